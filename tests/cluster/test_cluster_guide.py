"""The guide's commands for a cluster, in the guide's order, on a real one.

Changed are only what a reader has to fill in (keys, an address), what would take days (the wait), and what
does not end (follow and watch, which are left after seconds).
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import Cluster
from tests.cluster.release import Release
from tests.support import guide

pytestmark = pytest.mark.timeout(600)

NAMESPACE = "drafters"
KEYS = {"AWS_ACCESS_KEY_ID": "dflash", "AWS_SECRET_ACCESS_KEY": "for-trying-out-only"}
_ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
SERVICE_MONITORS: dict[str, Any] = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "servicemonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "scope": "Namespaced",
        "names": {"kind": "ServiceMonitor", "plural": "servicemonitors"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
                },
            }
        ],
    },
}
"""Prometheus' operator brings it."""


def test_the_guides_commands_for_a_cluster_work_in_their_order(cluster: Cluster, files: Path) -> None:
    if not cluster.throwaway:
        pytest.skip("its pods mount this machine's Python: unset DFLASH_TEST_KUBECONFIG")
    release = Release(cluster, NAMESPACE, files)
    values = files / "values-guide.yaml"
    values.write_text(yaml.safe_dump(release.values()))
    cluster.apply(SERVICE_MONITORS)
    installed = False
    try:
        for words in guide.for_a_cluster():
            program, arguments = words[0], [_filled_in(word) for word in words[1:]]
            if program == "helm" and "install" in arguments:
                # The guide has two ways to install; the second is tried as far as the API server's checks.
                more = ["--dry-run=server"] if installed else ["-f", str(values), "--wait", "--timeout=300s"]
                installed = True
                arguments += more
            _run(cluster, program, arguments)
        assert "qwen3-8b" in release.kubectl("get", "drafters", "-o", "name")
        assert release.get("servicemonitor", "dflash-operator")
    finally:
        release.kubectl("delete", "drafters", "--all", "--timeout=90s", check=False)
        cluster.helm("-n", NAMESPACE, "uninstall", "dflash", "--wait", "--timeout=60s", check=False)
        cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false", check=False)
        cluster.kubectl("delete", "crd", SERVICE_MONITORS["metadata"]["name"], check=False)


def _filled_in(word: str) -> str:
    for name, value in KEYS.items():
        word = word.replace(f"{name}=...", f"{name}={value}")
    # The embedded store has an address of its own.
    word = word.replace("storage.endpoint=https://...", "embeddedS3.enabled=true")
    return word.replace("--timeout=48h", "--timeout=1s")


def _run(cluster: Cluster, program: str, arguments: list[str]) -> None:
    run = cluster.helm if program == "helm" else cluster.kubectl
    follows = program == "kubectl" and ("-w" in arguments or {"logs", "-f"} <= set(arguments))
    try:
        run(*arguments, timeout=5 if follows else 400)
    except subprocess.TimeoutExpired:
        assert follows, arguments
    except RuntimeError as error:
        if "wait" not in arguments or "timed out waiting" not in str(error):
            raise
