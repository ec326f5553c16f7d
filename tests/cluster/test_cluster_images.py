"""The images that users get, built from their Dockerfiles and run on the cluster.

The operator's is built whenever the cluster's tests run, the large ones in `make soak` only.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster import dockerfiles
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import Object, small_drafter
from tests.cluster.images import REPOSITORY
from tests.cluster.release import FILES, Release

PLAIN: Object = {"command": ["python"], "volumes": [], "volumeMounts": []}
"""Nothing of this machine is mounted."""


def _imported(cluster: Cluster, name: str, folder: Path, packages: Path | None = None) -> str:
    """Build an image, make it known to the node; its name."""
    if not cluster.throwaway:
        pytest.skip("images are imported into the throwaway cluster: unset DFLASH_TEST_KUBECONFIG")
    dockerfiles.install()
    dockerfiles.base()
    archive = folder / f"{name}.tar"
    if packages is not None:
        dockerfiles.engine_base()
    size = dockerfiles.build(name, archive, packages)
    print(f"{name} image: {size / 2**20:.0f} MiB unpacked, base included")
    cluster.import_image(archive)
    archive.unlink()
    return f"localhost/dflash-{name}:built"


@contextmanager
def _release(cluster: Cluster, files: Path, namespace: str, values: Object) -> Iterator[Release]:
    cluster.kubectl("create", "namespace", namespace)
    release = Release(cluster, namespace, files)
    release.install(values=values)
    try:
        yield release
    finally:
        release.kubectl("delete", "drafters", "--all", "--timeout=60s", check=False)
        release.helm("uninstall", release.name, "--wait")
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.mark.timeout(1800)
def test_the_operators_image_is_small_has_no_torch_and_looks_after_drafters(
    cluster: Cluster, files: Path, tmp_path: Path
) -> None:
    image = _imported(cluster, "operator", tmp_path)
    values: Object = {"images": {"operator": image}, "operator": PLAIN}
    with _release(cluster, files, "built-operator", values) as release:
        told = release.helm("test", release.name, "--logs", "--timeout=90s")
        assert "creates once, compares and swaps" in told
        (pod,) = release.objects("pods", "app.kubernetes.io/component=operator")
        assert pod["spec"]["containers"][0]["image"] == image
        inside = (
            "import importlib.util as u, os; print(os.getuid(), u.find_spec('torch'), "
            "u.find_spec('transformers'), os.access('/opt', os.W_OK))"
        )
        told = release.kubectl("exec", pod["metadata"]["name"], "--", "python", "-c", inside)
        assert told.split() == ["65532", "None", "None", "False"]
        sleep = {"name": "main", "command": ["/bin/sh", "-c", "sleep 600", "--"]}
        spec = {"containers": [sleep], "terminationGracePeriodSeconds": 2}
        release.apply(small_drafter("built", prompts={"uri": "/no/such/file.jsonl"}))
        release.wait_condition("built", "Accepted", "False", 60, "Invalid")
        # The demo's prompts are in the image; the operator reads them to name the dataset.
        demo: Object = {"uri": "/opt/demo/prompts.jsonl"}
        target: Object = {"model": "a/b", "dtype": "float32"}
        release.apply(small_drafter("built", target=target, prompts=demo, pods={"generate": {"spec": spec}}))
        release.wait("a pod", lambda: release.pods("built", "generate"), 60, "built")


@pytest.mark.soak
@pytest.mark.timeout(5400)
def test_the_train_image_makes_a_drafter_on_cpus(cluster: Cluster, files: Path, tmp_path: Path) -> None:
    images = {name: _imported(cluster, name, tmp_path) for name in ("operator", "train")}
    images["serve"] = images["train"]  # generation and evaluation by transformers
    volumes = [{"name": "files", "hostPath": {"path": str(files), "type": "Directory"}}]
    mounted = {
        "command": ["python"],
        "volumes": volumes,
        "volumeMounts": [{"name": "files", "mountPath": FILES, "readOnly": True}],
    }
    with _release(
        cluster, files, "built-train", {"images": images, "operator": mounted, "jobs": mounted}
    ) as release:
        # Nothing of the machine's own environment is mounted but the target and the prompts.
        release.apply(small_drafter("built", training={"targets": 1, "drafters": 2}))
        release.wait_condition("built", "Ready", "True", 900)
        (pod,) = release.pods("built", "evaluate", alive=False)
        assert pod["spec"]["containers"][0]["image"] == images["train"]


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_serve_image_generates_with_the_engines_own_packages(
    cluster: Cluster, files: Path, tmp_path: Path
) -> None:
    packages = REPOSITORY / ".venv-serve" / "lib" / "python3.11" / "site-packages"
    if not packages.exists():
        pytest.skip("the engine's packages are not installed: make serve-env")
    image = _imported(cluster, "serve", tmp_path, packages)
    paths = {"files": (str(files), FILES), "engine": (str(packages), str(dockerfiles.ENGINE))}
    serving: Object = {
        "image": "serve",
        "command": ["python"],
        "volumes": [{"name": n, "hostPath": {"path": p, "type": "Directory"}} for n, (p, _) in paths.items()],
        "volumeMounts": [{"name": n, "mountPath": at, "readOnly": True} for n, (_, at) in paths.items()],
    }
    # Generation and evaluation by this image, all else by the machine's Python.
    values: Object = {"images": {"serve": image}, "roles": {"generate": serving, "evaluate": serving}}
    with _release(cluster, files, "built-serve", values) as release:
        release.apply(small_drafter("built"))
        release.wait_condition("built", "Ready", "True", 600)
        for role in ("generate", "evaluate"):
            (ran,) = release.pods("built", role, alive=False)
            assert ran["spec"]["containers"][0]["image"] == image
    inside = "import dflash, sglang, torch; print(sglang.__version__, torch.__version__)"
    arguments = ["--rm", "--mount", f"type=bind,src={packages},dst={dockerfiles.ENGINE},options=rbind:ro"]
    assert cluster.ctr("run", *arguments, image, "imports", "python", "-c", inside) == 0
