"""Jobs and Services of a Drafter, from the chart's templates: pure functions on plain objects.

The chart says how pods look (images, resources, volumes, security), a Drafter's `spec.pods` may
patch that, and here comes what only the operator knows: names, labels, counts, arguments, the
resource itself (as an annotation that the pod sees as a file) and ownership.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import yaml

from dflash.errors import ConfigurationError
from dflash.resource import API_VERSION, KIND, Drafter
from dflash.resource.load import dump_resource
from operators import names
from operators.actions import Start
from operators.kube import Object
from operators.observed import ROLES, Role
from operators.pods import ATTEMPT, DRAFTER, HASH, MAIN, PREFIX, ROLE, WORLD, is_gpu

RESOURCE = f"{PREFIX}/resource"
"""Annotation with the resolved Drafter: the pod's own, so that it is as immutable as the Job."""
CHART_PATCH = "podTemplatePatch"
"""Key beside a template's Job: the chart's own partial pod template."""
FOLDER = "/etc/dflash"
RENDEZVOUS_PORT = 29500
_MANAGED_BY = {"app.kubernetes.io/managed-by": "dflash-operator"}


@dataclass(frozen=True)
class Owner:
    """The Drafter object that owns what is made for it."""

    name: str
    namespace: str
    uid: str


@dataclass(frozen=True)
class Work:
    """What the jobs work on: the hashes of the chain, which each role is given the part of it needs."""

    drafter: Drafter
    dataset: str
    run: str
    evaluation: str


def load_templates(folder: Path) -> dict[Role, Object]:
    """The chart's Job templates, one file a role; ConfigurationError names a missing or broken one."""
    templates: dict[Role, Object] = {}
    for role in ROLES:
        path = folder / f"{role}.yaml"
        try:
            template = yaml.safe_load(path.read_text())
        except (OSError, yaml.YAMLError) as error:
            raise ConfigurationError(f"job template {path}: {error}; reinstall the chart") from error
        containers = template["spec"]["template"]["spec"]["containers"]
        if not any(c["name"] == MAIN for c in containers):
            raise ConfigurationError(
                f"job template {path}: no container is named {MAIN}; see charts/README.md"
            )
        templates[role] = template
    return templates


def job(template: Object, start: Start, owner: Owner, work: Work, completions: int) -> Object:
    """The Job that a `Start` asks for."""
    name = names.group(owner.name, start.role, start.hash, start.attempt)
    made = copy.deepcopy(template)
    pod = made["spec"]["template"]
    for patch in (made.pop(CHART_PATCH, None), work.drafter.spec.pods.of(start.role)):
        if patch:
            made["spec"]["template"] = pod = merge(pod, patch)
    labels = labels_of(start, owner)
    resource = dump_resource(work.drafter)
    made |= {"apiVersion": "batch/v1", "kind": "Job"}
    made["metadata"] = _metadata(made.get("metadata", {}), name, owner, labels)
    made["spec"] |= {
        "completionMode": "Indexed",
        "completions": completions,
        "parallelism": completions,
    }
    meta = pod.setdefault("metadata", {})
    meta["labels"] = {**meta.get("labels", {}), **labels}
    meta["annotations"] = {**meta.get("annotations", {}), RESOURCE: orjson.dumps(resource).decode()}
    spec = pod["spec"]
    spec |= {"restartPolicy": "Never", "subdomain": name}
    spec.setdefault("volumes", []).append(
        {
            "name": "dflash-resource",
            "downwardAPI": {
                "items": [
                    {"path": "drafter.json", "fieldRef": {"fieldPath": f"metadata.annotations['{RESOURCE}']"}}
                ]
            },
        }
    )
    main = next(c for c in spec["containers"] if c["name"] == MAIN)
    main.setdefault("volumeMounts", []).append(
        {"name": "dflash-resource", "mountPath": FOLDER, "readOnly": True}
    )
    main["command"] = [*main.get("command", ["python"]), "-m", f"jobs.{start.role}"]
    main["args"] = [*arguments(start, name, owner.namespace, work), *main.get("args", [])]
    if start.role == "target":
        _at_least_gpus(main, work.drafter.spec.training.target_devices)
    main["env"] = merge_named(_environment(), main.get("env", []))
    secrets = [work.drafter.spec.storage.secret_ref, work.drafter.spec.tracking.wandb.secret_ref]
    main["envFrom"] = main.get("envFrom", []) + [{"secretRef": {"name": s}} for s in secrets if s]
    return made


def _at_least_gpus(container: Object, count: int) -> None:
    """A target that is spread over several GPUs has as many, whatever the chart gives; on CPUs none."""
    limits = (container.get("resources") or {}).get("limits") or {}
    for name, has in limits.items():
        if is_gpu(name) and int(has) > 0:
            limits[name] = max(int(has), count)


def arguments(start: Start, group: str, namespace: str, work: Work) -> list[str]:
    """The job's command line. $(INDEX) and $(HOST) are filled in by the kubelet."""
    common = ["--resource", f"{FOLDER}/drafter.json", "--dataset", work.dataset]
    if start.role == "generate":
        return [*common, "--index", "$(INDEX)", "--replicas", str(start.world)]
    common += ["--run", work.run]
    if start.role == "target":
        host = f"{group}-$(INDEX).{group}.{namespace}.svc"
        return [*common, "--index", "$(INDEX)", "--bind", "0.0.0.0", "--advertise", host]
    if start.role == "drafter":
        rendezvous = f"{group}-0.{group}.{namespace}.svc:{RENDEZVOUS_PORT}"
        rank = ["--rank", "$(INDEX)", "--world", str(start.world), "--rendezvous", rendezvous]
        return [*common, "--attempt", str(start.attempt), *rank]
    return [*common, "--evaluation", work.evaluation]


def service(start: Start, owner: Owner) -> Object:
    """The headless Service under which the pods of a group find each other, ready or not."""
    name = names.group(owner.name, start.role, start.hash, start.attempt)
    labels = labels_of(start, owner)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata({}, name, owner, labels),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {key: labels[key] for key in (DRAFTER, ROLE, HASH, ATTEMPT)},
        },
    }


def network_policy(owner: Owner) -> Object:
    """Pods of one Drafter talk to each other, on any port, since NCCL and Gloo choose theirs.

    What else they may reach is the chart's to say, and so is that nobody else reaches them.
    """
    mine = {"podSelector": {"matchLabels": {DRAFTER: owner.name}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata({}, f"{owner.name}-run", owner, {**_MANAGED_BY, DRAFTER: owner.name}),
        "spec": {
            **mine,
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [mine]}],
            "egress": [{"to": [mine]}],
        },
    }


def labels_of(start: Start, owner: Owner) -> dict[str, str]:
    """Labels of a group's Job, pods and Service."""
    return {
        **_MANAGED_BY,
        DRAFTER: owner.name,
        ROLE: start.role,
        HASH: start.hash,
        ATTEMPT: str(start.attempt),
        WORLD: str(start.world),
    }


def merge(base: Any, patch: Any) -> Any:
    """A patch laid over a base: mappings key by key (null deletes), lists of named things by name."""
    if isinstance(base, Mapping) and isinstance(patch, Mapping):
        result = dict(base)
        for key, value in patch.items():
            if value is None:
                result.pop(key, None)
            else:
                result[key] = merge(result[key], value) if key in result else value
        return result
    if isinstance(base, list) and isinstance(patch, list) and _named(base) and _named(patch):
        return merge_named(base, patch)
    return patch


def merge_named(base: list[Any], patch: list[Any]) -> list[Any]:
    """Two lists of things with names: the same name is merged, a new one is appended."""
    key = "mountPath" if all("mountPath" in item for item in [*base, *patch]) else "name"
    result = {item[key]: item for item in base}
    for item in patch:
        result[item[key]] = merge(result[item[key]], item) if item[key] in result else item
    return list(result.values())


def _named(items: list[Any]) -> bool:
    return all(isinstance(item, Mapping) and ("name" in item or "mountPath" in item) for item in items)


def _environment() -> list[Object]:
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    return [
        {"name": "INDEX", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        {"name": "DFLASH_TERMINATION_LOG", "value": "/dev/termination-log"},
    ]


def _metadata(given: Object, name: str, owner: Owner, labels: dict[str, str]) -> Object:
    return {
        **given,
        "name": name,
        "namespace": owner.namespace,
        "labels": {**given.get("labels", {}), **labels},
        "ownerReferences": [
            {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": owner.name,
                "uid": owner.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
