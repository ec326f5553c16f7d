"""What the operator's benchmarks share: a control plane, many Drafters, the operator's process."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import yaml

from operators import kube
from operators.kube import Kube, Object
from tests.cluster.cluster import Cluster
from tests.cluster.images import REPOSITORY

NAMESPACE = "bench"
PORT = 18080
ROLES = ("generate", "target", "drafter", "evaluate")


@contextmanager
def control_plane() -> Iterator[Kube]:
    """API server, etcd, controllers, no node; the CRD and a namespace are there."""
    with Cluster(control_plane_only=True) as cluster:
        cluster.establish_crds(REPOSITORY / "charts" / "crds")
        cluster.kubectl("create", "namespace", NAMESPACE)
        os.environ["KUBECONFIG"] = str(cluster.kubeconfig)
        try:
            yield Kube.connect()
        finally:
            del os.environ["KUBECONFIG"]


def declare(api: Kube, count: int) -> None:
    """Make so many Drafters."""
    for number in range(count):
        spec: Object = {
            "target": {"model": "a/b"},
            "prompts": {"uri": "s3://p/q"},
            "storage": {"uri": f"s3://b/{number}"},
        }
        body = {
            "apiVersion": "dflash.dev/v1alpha1",
            "kind": "Drafter",
            "metadata": {"name": f"d{number}"},
            "spec": spec,
        }
        api.create(kube.DRAFTERS, NAMESPACE, body)


class Operator:
    """The operator as a process of its own."""

    def __init__(self, stage: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="operator-bench-")
        folder = Path(self._folder.name)
        (folder / "told.json").write_text(json.dumps({"stage": stage}))
        template = {"spec": {"template": {"spec": {"containers": [{"name": "main", "image": "none"}]}}}}
        for role in ROLES:
            made = {**template, "spec": {**template["spec"], "backoffLimit": 0}}
            (folder / f"{role}.yaml").write_text(yaml.safe_dump(made))
        environment = os.environ | {
            "DFLASH_OPERATOR_NAMESPACE": NAMESPACE,
            "DFLASH_OPERATOR_IDENTITY": f"bench-{time.time()}",
            "DFLASH_OPERATOR_TEMPLATES": str(folder),
            "DFLASH_OPERATOR_ADDRESS": "127.0.0.1",
            "DFLASH_OPERATOR_PORT": str(PORT),
        }
        command = [sys.executable, "-m", "tests.support.operator_process", str(folder / "told.json")]
        self.process = subprocess.Popen(command, env=environment, cwd=REPOSITORY)
        self.usage = psutil.Process(self.process.pid)

    def stop(self, hard: bool = False) -> None:
        """End it, releasing its Lease unless killed."""
        self.process.send_signal(signal.SIGKILL if hard else signal.SIGTERM)
        self.process.wait(timeout=30)
        self._folder.cleanup()

    def metrics(self) -> dict[str, float]:
        """All samples by name and labels; empty while it does not answer yet."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics", timeout=5) as answer:
                text = answer.read().decode()
        except (urllib.error.URLError, OSError):
            return {}
        lines = [line.rpartition(" ") for line in text.splitlines() if line and line[0] != "#"]
        return {name: float(value) for name, _, value in lines}

    def looks(self) -> float:
        """Drafters looked at so far."""
        return sum(v for k, v in self.metrics().items() if k.startswith("dflash_operator_reconciles_total"))

    def requests(self, *verbs: str) -> float:
        """Requests to the API server so far."""
        found = self.metrics()
        return sum(found.get(f'dflash_operator_requests_total{{verb="{verb}"}}', 0.0) for verb in verbs)


def until(what: str, ready: Callable[[], Any], seconds: float, pause: float = 0.1) -> Any:
    """Wait for something true; RuntimeError names what did not come."""
    deadline = time.monotonic() + seconds
    while True:
        answer = ready()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not come within {seconds:.0f} s")
        time.sleep(pause)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of all is not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
