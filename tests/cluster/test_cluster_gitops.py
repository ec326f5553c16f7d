"""A real GitOps loop: commits that edit a Drafter rerun exactly what they must. Long: `make soak`."""

import json
from pathlib import Path

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.conftest import Object, small_drafter
from tests.cluster.gitops import Repository, flux
from tests.cluster.release import Release
from tests.cluster.test_cluster_stages import new, stages

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]


def _sources(namespace: str, url: str) -> list[dict[str, object]]:
    return [
        {
            "apiVersion": "source.toolkit.fluxcd.io/v1",
            "kind": "GitRepository",
            "metadata": {"name": "declared", "namespace": namespace},
            "spec": {"url": url, "interval": "3s", "ref": {"branch": "main"}},
        },
        {
            "apiVersion": "kustomize.toolkit.fluxcd.io/v1",
            "kind": "Kustomization",
            "metadata": {"name": "declared", "namespace": namespace},
            "spec": {
                "interval": "10s",
                "path": "./",
                "prune": True,
                "targetNamespace": namespace,
                "sourceRef": {"kind": "GitRepository", "name": "declared"},
            },
        },
    ]


def _applied(release: Release, commit: str) -> None:
    """Flux has applied this commit."""

    def there() -> bool:
        status = release.get("kustomization.kustomize.toolkit.fluxcd.io", "declared").get("status", {})
        return commit in str(status.get("lastAppliedRevision"))

    release.wait(f"commit {commit[:8]} to be applied", there, 120)


def test_commits_rerun_exactly_what_they_must(cluster: Cluster, release: Release, tmp_path: Path) -> None:
    with Repository(tmp_path) as repository, flux(cluster, tmp_path, release.namespace):

        def declare(message: str, **spec: object) -> str:
            drafter: Object = small_drafter("gitops", storage={"uri": "s3://dflash/gitops"}, **spec)
            return repository.commit(message, {"drafter.yaml": json.dumps(drafter)})

        first = declare("A drafter")
        cluster.apply(_sources(release.namespace, repository.url))
        _applied(release, first)
        release.wait_condition("gitops", "Ready", "True", 400)
        made = release.jobs("gitops")
        generation = release.get("drafter", "gitops")["metadata"]["generation"]

        _applied(release, declare("Other words, same meaning", pods={}))
        _applied(release, declare("Fewer samples to evaluate", pods={}, evaluation={"samples": 2}))
        release.wait_condition("gitops", "Ready", "False", 60)
        release.wait_condition("gitops", "Ready", "True", 200)
        assert stages(new(release, "gitops", made)) == ["eval"]

        again = release.jobs("gitops")
        _applied(release, declare("Another pass", evaluation={"samples": 2}, training={"epochs": 3}))
        release.wait_condition("gitops", "Ready", "False", 60)
        release.wait_condition("gitops", "Ready", "True", 300)
        assert [s for s in stages(new(release, "gitops", again)) if s != "tgt"] == ["dft", "eval"]

        final = release.jobs("gitops")
        _applied(release, declare("Back to the first", pods={}))
        release.wait_condition("gitops", "Ready", "True", 60)
        assert release.jobs("gitops") == final, "what was made before is still there"
        assert release.get("drafter", "gitops")["metadata"]["generation"] == generation + 3, (
            "one change of the spec for each commit that changes it, and none by the operator or Flux"
        )

        release.kubectl("delete", "kustomization.kustomize.toolkit.fluxcd.io", "declared", "--timeout=60s")
        release.wait(
            "the Drafter to be pruned",
            lambda: "gitops" not in release.kubectl("get", "drafters", "-o", "name"),
            60,
        )
        release.kubectl("delete", "gitrepository.source.toolkit.fluxcd.io", "declared", "--timeout=60s")
