"""Fixtures: one throwaway cluster a session, a namespace with a release and a small Drafter a test."""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import binaries, images
from tests.cluster.cluster import ROOT, Cluster, ExistingCluster, leftovers
from tests.cluster.release import CHART, FILES, Release

Object = dict[str, Any]


_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All of this folder needs the cluster, of which there is one: one worker, in order."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            if item.get_closest_marker("soak") is None:
                item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.xdist_group("cluster"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what is missing before the first test's clock starts: it takes ten minutes, once."""
    wanted = any(item.path.is_relative_to(_HERE) for item in session.items)
    if wanted and not session.config.option.collectonly and not os.environ.get("DFLASH_TEST_KUBECONFIG"):
        with contextlib.suppress(binaries.CannotRun):  # the fixture skips and says why
            binaries.built()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A running cluster: the one of DFLASH_TEST_KUBECONFIG, or a throwaway one."""
    given = os.environ.get("DFLASH_TEST_KUBECONFIG")
    if given:
        yield ExistingCluster(Path(given))
        return
    try:
        made = Cluster()
    except binaries.CannotRun as error:
        pytest.skip(str(error))
    with made:
        made.import_image(images.host_python(ROOT / "images"))
        yield made
    assert leftovers() == [], "the cluster leaves nothing on the machine"


@pytest.fixture(scope="session")
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace in a cluster that has the CRD, for what needs no pods."""
    cluster.establish_crds(CHART / "crds")
    name = f"test-{secrets.token_hex(4)}"
    cluster.kubectl("create", "namespace", name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that pods see at /files: a tiny random target, and prompts."""
    from tests.support.tiny import save_tiny_target

    folder = tmp_path_factory.mktemp("files")
    save_tiny_target(folder / "target")
    rows = [{"prompt": f"What is {i} plus {i + 1}, and why?", "id": f"q{i}"} for i in range(24)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    return folder


@contextlib.contextmanager
def installed(cluster: Cluster, files: Path) -> Iterator[Release]:
    """The chart in a namespace of its own, with an S3 server of its own."""
    if not cluster.throwaway:
        pytest.skip("its pods mount this machine's Python: unset DFLASH_TEST_KUBECONFIG")
    namespace = f"test-{secrets.token_hex(4)}"
    cluster.kubectl("create", "namespace", namespace)
    release = Release(cluster, namespace, files)
    release.install()
    yield release
    release.kubectl("delete", "drafters", "--all", "--timeout=90s")
    release.helm("uninstall", release.name, "--wait", "--timeout=60s")
    cluster.kubectl("delete", "namespace", namespace, "--wait=false")


@pytest.fixture(scope="session")
def shared_release(cluster: Cluster, files: Path) -> Iterator[Release]:
    """A release for all modules that leave it as it is, since installing takes a while."""
    with installed(cluster, files) as release:
        yield release


@pytest.fixture(scope="module")
def release(shared_release: Release) -> Iterator[Release]:
    """That release; what a module has declared is removed after it."""
    yield shared_release
    shared_release.kubectl("delete", "drafters", "--all", "--timeout=90s")


@pytest.fixture(scope="module")
def module_release(cluster: Cluster, files: Path) -> Iterator[Release]:
    """A release of its own for a module that upgrades it, rolls it back and removes it."""
    with installed(cluster, files) as release:
        yield release


def small_drafter(name: str = "tiny", **spec: Any) -> Object:
    """A Drafter for the tiny target that goes through all stages in about a minute on one core."""
    base: Object = {
        "target": {"model": f"{FILES}/target", "dtype": "float32"},
        "prompts": {"uri": f"{FILES}/prompts.jsonl", "holdOut": 0.25},
        "generation": {
            "engine": "transformers",
            "thinking": False,
            "maxTokens": 32,
            "sampling": {"temperature": 1.0},
            "gate": {
                "minSupervisedTokens": 4,
                "truncated": "keep",
                "maxDroppedShare": 1.0,
                "maxEmptyShare": 1.0,
                "maxRepetitionShare": 1.0,
            },
        },
        "drafter": {"layers": 1, "blockSize": 4, "slidingWindow": 0, "taps": [0, 2], "maskTokenId": 300},
        "training": {
            "epochs": 2,
            "batchSize": 4,
            "anchors": 8,
            "dtype": "float32",
            "targets": 1,
            "drafters": 1,
            "backend": "gloo",
            "checkpoint": {"everySteps": 2, "everyMinutes": 0.1},
        },
        "evaluation": {"engine": "transformers", "maxTokens": 12, "samples": 3, "dtype": "float32"},
        "storage": {"uri": f"s3://dflash/{name}"},
        "tracking": {"wandb": {"enabled": False}, "intervalSeconds": 1.0},
    }
    for section, values in spec.items():
        base[section] = (
            {**base[section], **values} if isinstance(values, dict) and section in base else values
        )
    return {
        "apiVersion": "dflash.dev/v1alpha1",
        "kind": "Drafter",
        "metadata": {"name": name},
        "spec": base,
    }
