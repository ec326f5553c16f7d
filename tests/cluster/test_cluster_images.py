"""The images that users get, built from their Dockerfiles and run on the cluster. Long: `make soak`."""

from pathlib import Path

import pytest

from tests.cluster import dockerfiles
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import small_drafter
from tests.cluster.release import Release

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


def test_the_operators_image_is_small_has_no_torch_and_looks_after_drafters(
    cluster: Cluster, files: Path, tmp_path: Path
) -> None:
    dockerfiles.install()
    dockerfiles.base()
    size = dockerfiles.build("operator", tmp_path / "operator.tar")
    print(f"operator image: {size / 2**20:.0f} MiB unpacked, base included")
    assert size < 700 * 2**20
    cluster.import_image(tmp_path / "operator.tar")
    cluster.kubectl("create", "namespace", "built")
    release = Release(cluster, "built", files)
    image = "localhost/dflash-operator:built"
    nothing: dict[str, object] = {"command": ["python"], "volumes": [], "volumeMounts": []}
    release.install(values={"images": {"operator": image}, "operator": nothing})
    try:
        told = release.helm("test", release.name, "--logs", "--timeout=90s")
        assert "creates once, compares and swaps" in told
        (pod,) = release.objects("pods", "app.kubernetes.io/component=operator")
        name = pod["metadata"]["name"]
        assert "65532" in release.kubectl("exec", name, "--", "python", "-c", "import os; print(os.getuid())")
        for absent in ("torch", "transformers"):
            probe = f"import importlib.util; print(importlib.util.find_spec('{absent}'))"
            assert "None" in release.kubectl("exec", name, "--", "python", "-c", probe)
        release.apply(small_drafter("built", prompts={"uri": "/no/such/file.jsonl"}))
        release.wait_condition("built", "Accepted", "False", 60, "Invalid")
    finally:
        release.kubectl("delete", "drafters", "--all", "--timeout=60s", check=False)
        release.helm("uninstall", release.name, "--wait")
        cluster.kubectl("delete", "namespace", "built", "--wait=false")
