"""The API server refuses what `dflash validate` refuses, keeps what it keeps, and defaults alike."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from dflash.resource import Drafter
from tests.cluster.cluster import Cluster
from tests.cluster.conftest import small_drafter

pytestmark = pytest.mark.timeout(900)

Object = dict[str, Any]


def made(name: str = "checked", **spec: Any) -> Object:
    base = {"target": {"model": "a/b"}, "prompts": {"uri": "s3://p/q"}, "storage": {"uri": "s3://b/p"}}
    return {
        "apiVersion": "dflash.dev/v1alpha1",
        "kind": "Drafter",
        "metadata": {"name": name},
        "spec": {**base, **spec},
    }


WRONG: dict[str, Object] = {
    "window smaller than a block": made(drafter={"slidingWindow": 8, "blockSize": 16}),
    "taps not ascending": made(drafter={"taps": [5, 3]}),
    "a tap twice": made(drafter={"taps": [3, 3]}),
    "a negative tap": made(drafter={"taps": [-1, 3]}),
    "one layer type too many": made(
        drafter={"layers": 1, "layerTypes": ["full_attention", "full_attention"]}
    ),
    "sliding layers without a window": made(
        drafter={"layers": 1, "layerTypes": ["sliding_attention"], "slidingWindow": 0}
    ),
    "targets neither number nor auto": made(training={"targets": "many"}),
    "no targets": made(training={"targets": 0}),
    "targets crossed": made(training={"minTargets": 4, "maxTargets": 2}),
    "more drafters than samples": made(training={"drafters": 9, "batchSize": 8}),
    "fp16": made(target={"model": "a/b", "dtype": "float16"}),
    "concurrency of zero": made(evaluation={"concurrency": [0]}),
    "two sets of one name": made(
        evaluation={"prompts": [{"name": "x", "uri": "s3://1"}, {"name": "x", "uri": "s3://2"}]}
    ),
    "an unknown field": made(trainning={}),
    "an unknown nested field": made(training={"loss": {"klWieght": 1}}),
    "a share above one": made(prompts={"uri": "s3://p/q", "holdOut": 1.5}),
    "no target": {**made(), "spec": {"prompts": {"uri": "s3://p/q"}, "storage": {"uri": "s3://b/p"}}},
    "a name with a dot": made("a.b"),
    "a name too long for pods": made("a" * 41),
}


def create(cluster: Cluster, namespace: str, drafter: Object) -> Object:
    text = cluster.kubectl(
        "-n", namespace, "create", "--dry-run=server", "-o", "json", "-f", "-", stdin=json.dumps(drafter)
    )
    return dict(json.loads(text))


@pytest.mark.parametrize("case", WRONG)
def test_both_refuse(cluster: Cluster, namespace: str, case: str) -> None:
    with pytest.raises(ValidationError):
        Drafter.model_validate(WRONG[case], by_alias=True, by_name=False)
    with pytest.raises(RuntimeError, match=r"[Ii]nvalid|unknown field"):
        create(cluster, namespace, WRONG[case])


def test_a_local_folder_is_no_storage_for_a_cluster(cluster: Cluster, namespace: str) -> None:
    with pytest.raises(RuntimeError, match="must be s3://bucket/prefix"):
        create(cluster, namespace, made(storage={"uri": "store"}))


@pytest.mark.parametrize(
    "drafter",
    [
        made(),
        small_drafter(),
        made("a" * 40),
        made(training={"targets": "auto"}),
        made(drafter={"slidingWindow": None}),
    ],
    ids=["least", "small", "longest name", "auto", "null"],
)
def test_both_accept_and_default_alike(cluster: Cluster, namespace: str, drafter: Object) -> None:
    stored = create(cluster, namespace, drafter)
    ours = Drafter.model_validate(drafter, by_alias=True, by_name=False).spec
    theirs = {key: stored[key] for key in ("apiVersion", "kind", "metadata", "spec")}
    assert Drafter.model_validate(theirs, by_alias=True, by_name=False).spec == ours


def test_patches_of_pods_are_kept_as_they_are(cluster: Cluster, namespace: str) -> None:
    patch = {
        "spec": {
            "nodeSelector": {"a": "b"},
            "containers": [{"name": "main", "env": [{"name": "X", "value": "1"}]}],
        }
    }
    assert create(cluster, namespace, made(pods={"target": patch}))["spec"]["pods"]["target"] == patch
