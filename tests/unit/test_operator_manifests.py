"""Jobs and Services from the chart's templates: names, arguments, ownership, patches."""

from dataclasses import replace
from typing import Any

import orjson
import pytest

from dflash.errors import ConfigurationError
from dflash.resource import Drafter
from operators import manifests
from operators.actions import Start
from operators.manifests import Owner, Work, merge
from operators.observed import ROLES, Role

Object = dict[str, Any]
DATASET, RUN, EVALUATION = "d" * 16, "r" * 16, "e" * 16
TEMPLATE: Object = {
    "metadata": {"labels": {"app.kubernetes.io/managed-by": "Helm"}},
    "spec": {
        "backoffLimit": 0,
        "template": {
            "metadata": {"labels": {"app": "x"}},
            "spec": {
                "containers": [{"name": "main", "command": ["python"], "env": [{"name": "A", "value": "1"}]}],
                "volumes": [{"name": "shm"}],
            },
        },
    },
}


def work(**spec: Any) -> Work:
    drafter = Drafter.model_validate(
        {
            "apiVersion": "dflash.dev/v1alpha1",
            "kind": "Drafter",
            "metadata": {"name": "qwen", "namespace": "ns"},
            "spec": {
                "target": {"model": "a/b"},
                "prompts": {"uri": "s3://p/q"},
                "storage": {"uri": "s3://b/p"},
                **spec,
            },
        }
    )
    return Work(drafter, DATASET, RUN, EVALUATION)


def made(start: Start, template: Object = TEMPLATE, completions: int = 2, **spec: Any) -> Object:
    return manifests.job(template, start, Owner("qwen", "ns", "uid-1"), work(**spec), completions)


def main(job: Object) -> Object:
    return dict(job["spec"]["template"]["spec"]["containers"][0])


def test_each_role_is_started_like_on_one_machine() -> None:
    group = "qwen-dft-rrrrrrrr-a4"
    job = made(Start("drafter", RUN, 4, (0, 1), 2))
    assert main(job)["command"] == ["python", "-m", "jobs.drafter"]
    assert main(job)["args"] == [
        "--resource", "/etc/dflash/drafter.json", "--dataset", DATASET, "--run", RUN, "--attempt", "4",
        "--rank", "$(INDEX)", "--world", "2", "--rendezvous", f"{group}-0.{group}.ns.svc:29500",
    ]  # fmt: skip
    target = main(made(Start("target", RUN, 0, (0,), 1)))["args"]
    assert target[-4:] == [
        "--bind",
        "0.0.0.0",
        "--advertise",
        "qwen-tgt-rrrrrrrr-$(INDEX).qwen-tgt-rrrrrrrr.ns.svc",
    ]
    generate = main(made(Start("generate", DATASET, 0, (0, 1), 2)))["args"]
    assert generate[-4:] == ["--index", "$(INDEX)", "--replicas", "2"]
    assert main(made(Start("evaluate", EVALUATION, 0, (0,), 1)))["args"][-2:] == ["--evaluation", EVALUATION]


def test_the_pod_sees_the_resource_as_it_is_declared() -> None:
    job = made(Start("drafter", RUN, 0, (0,), 1), training={"epochs": 3})
    pod = job["spec"]["template"]
    resource = Drafter.model_validate(orjson.loads(pod["metadata"]["annotations"]["dflash.dev/resource"]))
    assert resource.spec.training.epochs == 3
    volume = next(v for v in pod["spec"]["volumes"] if v["name"] == "dflash-resource")
    assert volume["downwardAPI"]["items"][0]["path"] == "drafter.json"
    assert {"name": "dflash-resource", "mountPath": "/etc/dflash", "readOnly": True} in main(job)[
        "volumeMounts"
    ]


def test_jobs_are_owned_labelled_and_indexed() -> None:
    job = made(Start("drafter", RUN, 4, (0, 1), 2))
    owner = job["metadata"]["ownerReferences"][0]
    assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == ("uid-1", True, True)
    for labels in (job["metadata"]["labels"], job["spec"]["template"]["metadata"]["labels"]):
        assert labels["dflash.dev/drafter"] == "qwen"
        assert (labels["dflash.dev/role"], labels["dflash.dev/hash"], labels["dflash.dev/attempt"]) == (
            "drafter",
            RUN,
            "4",
        )
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert TEMPLATE["spec"]["template"]["metadata"] == {"labels": {"app": "x"}}, "the template is not changed"


def test_the_service_finds_pods_of_its_attempt_only_ready_or_not() -> None:
    service = manifests.service(Start("drafter", RUN, 4, (0, 1), 2), Owner("qwen", "ns", "uid-1"))
    assert service["metadata"]["name"] == "qwen-dft-rrrrrrrr-a4"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"]["dflash.dev/attempt"] == "4"


def test_chart_and_drafter_may_patch_the_pod_and_lists_of_named_things_merge_by_name() -> None:
    chart = {
        "spec": {
            "containers": [
                {"name": "main", "env": [{"name": "A", "value": "2"}, {"name": "B", "value": "3"}]}
            ]
        }
    }
    drafter = {
        "spec": {
            "nodeSelector": {"gpu": "h200"},
            "containers": [{"name": "side", "image": "x"}],
            "volumes": [{"name": "cache"}],
        }
    }
    job = made(
        Start("drafter", RUN, 0, (0,), 1), {**TEMPLATE, "podTemplatePatch": chart}, pods={"drafter": drafter}
    )
    spec = job["spec"]["template"]["spec"]
    assert [c["name"] for c in spec["containers"]] == ["main", "side"]
    env = {e["name"]: e.get("value") for e in main(job)["env"]}
    assert (env["A"], env["B"]) == ("2", "3")
    assert [v["name"] for v in spec["volumes"]] == ["shm", "cache", "dflash-resource"]
    assert spec["nodeSelector"] == {"gpu": "h200"}
    assert "podTemplatePatch" not in job


@pytest.mark.parametrize(("role", "chart", "wanted"), [
    ("target", 1, 4), ("target", 8, 8), ("target", 0, 0), ("drafter", 1, 1),
])  # fmt: skip
def test_a_target_over_several_gpus_has_as_many(role: Role, chart: int, wanted: int) -> None:
    limits = {"resources": {"limits": {"nvidia.com/gpu": chart, "memory": "64Gi"}}}
    gpus = {"spec": {"containers": [{"name": "main", **limits}]}}
    start = Start(role, RUN, 0, (0,), 1)
    job = made(start, {**TEMPLATE, "podTemplatePatch": gpus}, training={"targetDevices": 4})
    assert main(job)["resources"]["limits"] == {"nvidia.com/gpu": wanted, "memory": "64Gi"}


def test_null_deletes_and_other_lists_are_replaced() -> None:
    assert merge({"a": 1, "b": {"c": 2}}, {"b": None}) == {"a": 1}
    assert merge({"args": ["x"]}, {"args": ["y", "z"]}) == {"args": ["y", "z"]}
    mounts = [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"}]
    assert merge({"m": mounts}, {"m": [{"name": "w", "mountPath": "/b"}]})["m"][1] == {
        "name": "w",
        "mountPath": "/b",
    }


def test_secrets_are_named_never_read() -> None:
    job = made(
        Start("drafter", RUN, 0, (0,), 1),
        storage={"uri": "s3://b/p", "secretRef": "s3"},
        tracking={"wandb": {"secretRef": "wandb"}},
    )
    assert main(job)["envFrom"] == [{"secretRef": {"name": "s3"}}, {"secretRef": {"name": "wandb"}}]


@pytest.mark.parametrize("length", [1, 25, 40])
def test_names_fit_for_the_longest_name_and_the_highest_attempt(length: int) -> None:
    owner = Owner("a" * length, "ns", "uid-1")
    for role in ROLES:
        start = Start(role, RUN, 1000, (0,), 1)
        job = manifests.job(TEMPLATE, start, owner, work(), 4096)
        assert len(job["metadata"]["name"]) + len("-4095") <= 63
        assert job["spec"]["template"]["spec"]["subdomain"] == job["metadata"]["name"]
        assert job == manifests.job(TEMPLATE, start, replace(owner), work(), 4096), (
            "same names for the same input"
        )


def test_a_broken_template_is_told_by_name(tmp_path: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"generate\.yaml"):
        manifests.load_templates(tmp_path)
    for role in ROLES:
        (tmp_path / f"{role}.yaml").write_text("spec: {template: {spec: {containers: [{name: other}]}}}")
    with pytest.raises(ConfigurationError, match="no container is named main"):
        manifests.load_templates(tmp_path)
