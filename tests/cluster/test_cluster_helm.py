"""The chart's life: rights, upgrade, rollback, uninstall and second install, two releases at once."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from operators import kube
from operators.kube import ApiError, Kube, Resource
from tests.cluster.cluster import API_PORT, HOST, ROOT, Cluster
from tests.cluster.conftest import installed, small_drafter
from tests.cluster.release import CHART, Release, merged

pytestmark = pytest.mark.timeout(600)

SECRETS, NODES = Resource("v1", "secrets"), Resource("v1", "nodes")
ROLES = Resource("rbac.authorization.k8s.io/v1", "roles")


def sleeping(name: str) -> dict[str, Any]:
    """A Drafter whose generation only sleeps: something that runs, at no cost."""
    sleep = {"name": "main", "command": ["/bin/sh", "-c", "sleep 600", "--"]}
    spec = {"containers": [sleep], "terminationGracePeriodSeconds": 2}
    return small_drafter(name, pods={"generate": {"spec": spec}})


def as_service_account(release: Release, name: str) -> Kube:
    token = release.kubectl("create", "token", name).strip()
    settings = client.Configuration()
    settings.host = f"https://{HOST}:{API_PORT}"
    settings.ssl_ca_cert = str(ROOT / "pki" / "ca.crt")
    settings.api_key = {"BearerToken": token}
    settings.api_key_prefix = {"BearerToken": "Bearer"}
    return Kube(client.ApiClient(settings))


def test_the_operator_may_do_its_work_and_nothing_else(module_release: Release) -> None:
    ns = module_release.namespace
    module_release.apply(sleeping("rights"))
    me = as_service_account(module_release, "dflash-operator")
    assert me.list(kube.DRAFTERS, ns)[0]
    assert me.list(kube.PODS, ns)[0]
    pod = {"metadata": {"name": "x"}, "spec": {"containers": [{"name": "x", "image": "x"}]}}
    forbidden = [
        lambda: me.list(SECRETS, ns),
        lambda: me.get(SECRETS, ns, "dflash-dflash-s3"),
        lambda: me.create(SECRETS, ns, {"metadata": {"name": "x"}}),
        lambda: me.list(kube.CONFIG_MAPS, ns),
        lambda: me.create(kube.PODS, ns, pod),
        lambda: me.delete(kube.PODS, ns, "x"),
        lambda: me.create(kube.DRAFTERS, ns, sleeping("y")),
        lambda: me.replace(kube.DRAFTERS, ns, sleeping("rights")),
        lambda: me.delete(kube.DRAFTERS, ns, "rights"),
        lambda: me.list(kube.JOBS, "default"),
        lambda: me.list(kube.DRAFTERS, ""),
        lambda: me.list(NODES, ""),
        lambda: me.create(ROLES, ns, {"metadata": {"name": "x"}, "rules": []}),
        lambda: me.apply(kube.DEFINITIONS, "", {"metadata": {"name": "drafters.dflash.dev"}}),
        lambda: me.delete(kube.LEASES, ns, "dflash-operator"),
        lambda: me.list(kube.NETWORK_POLICIES, ns),
        lambda: me.delete(kube.NETWORK_POLICIES, ns, "dflash-jobs"),
    ]
    for number, attempt in enumerate(forbidden):
        with pytest.raises(ApiError) as refused:
            attempt()
        assert refused.value.status == 403, number
    jobs = as_service_account(module_release, "dflash-jobs")
    for resource in (kube.DRAFTERS, kube.PODS, SECRETS):
        with pytest.raises(ApiError) as refused:
            jobs.list(resource, ns)
        assert refused.value.status == 403
    pods = module_release.wait("a pod", lambda: module_release.pods("rights"), 60, "rights")
    assert pods[0]["spec"]["automountServiceAccountToken"] is False
    module_release.kubectl("delete", "drafter", "rights", "--timeout=60s")


def test_the_operators_pod_is_admitted_to_a_restricted_namespace(module_release: Release) -> None:
    (pod,) = module_release.objects("pods", "app.kubernetes.io/component=operator")
    # The test environment's mounts are host paths, which no restricted namespace takes; users have none.
    spec = {
        k: v for k, v in pod["spec"].items() if k not in ("nodeName", "serviceAccountName", "serviceAccount")
    }
    spec["volumes"] = [v for v in spec["volumes"] if "hostPath" not in v and "projected" not in v]
    names = {v["name"] for v in spec["volumes"]}
    for container in spec["containers"]:
        container["volumeMounts"] = [m for m in container["volumeMounts"] if m["name"] in names]
    enforce = "pod-security.kubernetes.io/enforce=restricted"
    module_release.cluster.kubectl("create", "namespace", "restricted")
    try:
        module_release.cluster.kubectl("label", "namespace", "restricted", enforce)
        alone = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}, "spec": spec}
        module_release.cluster.kubectl(
            "-n", "restricted", "create", "--dry-run=server", "-f", "-", stdin=json.dumps(alone)
        )
    finally:
        module_release.cluster.kubectl("delete", "namespace", "restricted", "--wait=false")


def test_the_store_probe_is_helm_test(module_release: Release) -> None:
    told = module_release.helm("test", module_release.name, "--logs", "--timeout=90s")
    assert "creates once, compares and swaps" in told


def test_upgrade_and_rollback_leave_running_jobs_alone(module_release: Release) -> None:
    release = module_release
    release.apply(sleeping("running"))
    release.wait("a running pod", lambda: release.pods("running", "generate"), 60, "running")
    before = release.jobs("running")
    release.upgrade(
        values={"jobs": {"shmSize": "128Mi"}, "operator": {"workers": 2}, "crds": {"upgrade": True}}
    )
    templates = release.get("configmap", "dflash-job-templates")["data"]["target.yaml"]
    assert "128Mi" in templates
    assert release.jobs("running") == before
    release.helm("rollback", release.name, "1", "--wait", "--timeout=300s")
    assert "256Mi" in release.get("configmap", "dflash-job-templates")["data"]["target.yaml"]
    assert release.jobs("running") == before
    assert len(release.pods("running", "generate")) == 1
    release.kubectl("delete", "drafter", "running", "--timeout=60s")


def test_an_old_crd_is_refused_and_the_hook_brings_it_up_to_date(module_release: Release) -> None:
    release = module_release
    definition = release.cluster.kubectl("get", "crd", "drafters.dflash.dev", "-o", "json")
    old = json.loads(definition)
    version = old["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    del version["spec"]["properties"]["training"]["properties"]["maxRestarts"]
    del version["spec"]["properties"]["training"]["default"]["maxRestarts"]
    del version["status"]["properties"]["record"]
    for field in ("resourceVersion", "uid", "creationTimestamp", "generation", "managedFields"):
        old["metadata"].pop(field, None)
    old.pop("status", None)
    release.cluster.kubectl("replace", "-f", "-", stdin=json.dumps(old))
    release.kubectl("delete", "pod", "-l", "app.kubernetes.io/component=operator", "--timeout=60s")

    def refusing() -> bool:
        logs = release.kubectl("logs", "-l", "app.kubernetes.io/component=operator", check=False)
        return "CRD is older than this operator" in logs and "spec.training.maxRestarts" in logs

    release.wait("the operator to refuse", refusing, 90)
    release.upgrade(values={"crds": {"upgrade": True}})
    schema = release.cluster.kubectl("get", "crd", "drafters.dflash.dev", "-o", "json")
    assert "maxRestarts" in schema
    assert not release.objects("jobs", "app.kubernetes.io/component=crd"), "hooks are removed"


def test_uninstall_with_a_running_drafter_keeps_it_and_a_second_install_goes_on(
    cluster: Cluster, files: Path
) -> None:
    with installed(cluster, files) as release:
        release.apply(sleeping("kept"))
        release.wait("a running pod", lambda: release.pods("kept", "generate"), 60, "kept")
        before = release.jobs("kept")
        release.helm("uninstall", release.name, "--wait", "--timeout=120s")
        assert release.get("drafter", "kept")["spec"]
        assert release.jobs("kept") == before
        release.kubectl("patch", "drafter", "kept", "--type=merge", "-p", '{"spec":{"suspend":true}}')
        release.install()
        release.wait_condition("kept", "Suspended", "True", 60, "Suspended")
        release.wait("no pods", lambda: not release.pods("kept"), 60, "kept")


def test_an_operator_with_a_wrong_key_says_so_and_goes_on_once_it_is_right(
    module_release: Release,
) -> None:
    release = module_release
    wrong = [{"name": "AWS_SECRET_ACCESS_KEY", "value": "wrong"}]
    release.upgrade(values={"operator": {"env": wrong}})
    release.apply(sleeping("keyless"))
    condition = release.wait_condition("keyless", "Accepted", "False", 60, "Invalid")
    assert "AWS_SECRET_ACCESS_KEY" in condition["message"]
    assert release.condition("keyless", "Ready")["status"] == "False"
    assert release.condition("keyless", "Stalled")["status"] == "True"
    assert release.jobs("keyless") == {}
    release.upgrade()
    release.wait("its pod", lambda: release.pods("keyless"), 60, "keyless")
    assert release.condition("keyless", "Accepted")["status"] == "True"
    release.kubectl("delete", "drafter", "keyless", "--timeout=60s")


def test_uninstall_deletes_drafters_whose_data_is_to_go_while_there_is_an_operator(
    cluster: Cluster, files: Path
) -> None:
    with installed(cluster, files) as release:
        goes = sleeping("goes")["spec"]
        goes["storage"]["deletionPolicy"] = "Delete"
        release.upgrade(values={"drafters": {"goes": goes}})
        release.wait("a running pod", lambda: release.pods("goes", "generate"), 60, "goes")
        release.helm("uninstall", release.name, "--wait", "--timeout=120s")
        assert release.objects("drafters") == []
        assert release.objects("jobs") == []
        release.install()


def test_two_releases_in_two_namespaces_do_not_see_each_other(
    cluster: Cluster, files: Path, module_release: Release
) -> None:
    with installed(cluster, files) as other:
        spec = sleeping("declared")["spec"]
        other.upgrade(values={"drafters": {"declared": spec}})
        other.wait("a pod of a Drafter from the values", lambda: other.pods("declared"), 60, "declared")
        assert module_release.pods("declared") == []
        lease = other.get("lease", "dflash-operator")["spec"]["holderIdentity"]
        assert lease != module_release.get("lease", "dflash-operator")["spec"]["holderIdentity"]
        other.upgrade()
        other.wait("its pods to go with it", lambda: not other.pods("declared"), 60)


def render(
    cluster_bin: str, *arguments: str, values: dict[str, Any] | None = None, tmp: Path | None = None
) -> Any:
    command = [cluster_bin, "template", "other", str(CHART), *arguments]
    if values and tmp:
        (tmp / "values.yaml").write_text(yaml.safe_dump(values))
        command += ["-f", str(tmp / "values.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [o for o in yaml.safe_load_all(done.stdout) if o]


def test_everything_that_the_chart_can_render_is_taken_by_the_api_server(
    module_release: Release, tmp_path: Path
) -> None:
    everything = {
        "operator": {"replicas": 2, "priorityClassName": "", "podLabels": {"a": "b"}},
        "jobs": {
            "rdma": {"enabled": True, "resources": {"rdma/hca": 1}},
            "tolerations": [{"operator": "Exists"}],
            "runtimeClassName": "nvidia",
            "scratchSize": "10Gi",
            "podTemplate": {"spec": {"hostNetwork": True}},
        },
        "grafanaDashboard": {"enabled": True},
        "argoHealth": {"enabled": True},
        "crds": {"upgrade": True},
        "networkPolicy": {"metricsFrom": [{"namespaceSelector": {}}]},
        "storage": {"probeUri": "s3://x/y", "existingSecret": "s3", "region": "eu-west-1"},
        "images": {"pullSecrets": ["registry"]},
        "extraObjects": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-x"}}
        ],
    }
    objects = render(
        module_release.cluster.helm_path,
        "-n",
        module_release.namespace,
        values=merged(module_release.values(), everything),
        tmp=tmp_path,
    )
    # Pods are admitted only where their ServiceAccount is there already.
    items = [o for o in objects if o["kind"] != "Pod"]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
    module_release.kubectl("create", "--dry-run=server", "-f", "-", stdin=text)
    again = render(
        module_release.cluster.helm_path,
        "-n",
        module_release.namespace,
        values=merged(module_release.values(), everything),
        tmp=tmp_path,
    )
    assert objects == again, "the same text every time"
    kinds = {
        o["kind"] for o in render(module_release.cluster.helm_path, "--set", "serviceMonitor.enabled=true")
    }
    assert "ServiceMonitor" in kinds
    assert "Job" not in kinds, "only hooks are Jobs"


def test_lint(cluster: Cluster) -> None:
    assert "0 chart(s) failed" in cluster.helm("lint", str(CHART), "--strict")
