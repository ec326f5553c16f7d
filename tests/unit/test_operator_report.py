"""What is written into a status: no more than has changed, small, and as the CRD takes it."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dflash.progress import Progress
from operators import report
from operators.conditions import refused
from operators.kube import _refusal
from operators.metrics import Figures, Metrics, serve
from operators.observed import Record, RoleRecord
from operators.status import DrafterStatus
from tests.support.fake_cluster import FakeCluster

_JSON = st.recursive(
    st.one_of(st.integers(), st.text(max_size=3), st.booleans()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("abc", max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)
_OBJECTS = st.dictionaries(st.text("abc", max_size=2), _JSON, max_size=4)


def _apply(base: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result = dict(base) if isinstance(base, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = _apply(result.get(key), value)
    return result


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_OBJECTS, _OBJECTS)
def test_a_merge_patch_leads_from_the_old_to_the_new(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert _apply(old, report.merge_patch(old, new)) == new
    assert report.merge_patch(new, new) == {}


def test_the_record_survives_being_written_down() -> None:
    record = Record("s", {"drafter": RoleRecord("h" * 16, attempt=3, counted=frozenset({"a", "b"}))})
    assert report.record_of(report.with_record({}, record)) == record
    assert report.record_of({}) == Record()


def test_a_status_is_valid_and_its_times_move_only_with_transitions() -> None:
    world = FakeCluster()
    operator = world.operator()
    operator.reconcile("d")
    first = world.status()
    DrafterStatus.model_validate(first)
    world.api.clock += 100
    world.controllers()
    operator.reconcile("d")
    second = world.status()
    times = [
        {c["type"]: c["lastTransitionTime"] for c in s["conditions"] if c["type"] == "Reconciling"}
        for s in (first, second)
    ]
    assert times[0] == times[1]
    assert second["observedGeneration"] == 1
    types = {c["type"] for c in second["conditions"]}
    assert types == {
        "Accepted", "DatasetReady", "Trained", "Evaluated", "Suspended", "Reconciling", "Stalled", "Ready",
    }  # fmt: skip


def test_a_spec_that_cannot_be_taken_is_told_with_its_generation() -> None:
    status = report.refused_status(
        {"attempt": 2}, 7, refused("spec.training.drafters: too many"), 1_800_000_000.0
    )
    assert status["observedGeneration"] == 7
    assert status["attempt"] == 2
    kinds = {e.kind for e in report.events({}, status)}
    assert kinds == {"Warning"}


def test_progress_is_short_and_its_figures_are_text() -> None:
    told = report._progress(
        Progress(
            stage="training",
            message="x" * 1000,
            done=41,
            total=100,
            unit="steps",
            eta_seconds=12.7,
            updated_at=1.0,
            figures={f"figure{i}": 1 / 3 for i in range(100)},
        )
    )
    assert told["summary"] == "41 %"
    assert len(told["message"]) == 256
    assert told["etaSeconds"] == 12
    assert len(told["figures"]) == 64
    assert set(told["figures"].values()) == {"0.3333"}


def test_gpu_time_is_counted_once_for_pods_that_live_and_those_that_are_gone() -> None:
    world = FakeCluster()
    operator = world.operator()
    operator.reconcile("d")
    world.controllers()
    (pod,) = world.live()
    pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 4}}
    from tests.support.fake_cluster import timestamp_of

    running = {"running": {"startedAt": timestamp_of(world.api.clock)}}
    pod["status"]["containerStatuses"] = [{"name": "main", "state": running}]
    for seconds in (100, 50):
        world.api.clock += seconds
        operator.reconcile("d")
    assert world.status()["stages"][0]["gpuSeconds"] == 600
    world.api.objects["pods"].clear()
    world.api.objects["jobs"].clear()
    world.api.clock += 50
    operator.reconcile("d")
    assert world.status()["stages"][0]["gpuSeconds"] == 600, "lost work stays counted"


def test_what_was_spent_and_wasted_and_the_end_are_told_in_hours_and_money() -> None:
    from tests.support.fake_cluster import timestamp_of

    world = FakeCluster(tracking={"gpuHourPrice": 3.0}, training={"targets": 1, "drafters": 1})
    world.store.committed.add(stage_of(world, "generation"))
    operator = world.operator()
    operator.reconcile("d")
    world.controllers()

    def hold(pod: dict[str, Any]) -> None:
        pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": 4}}
        running = {"running": {"startedAt": timestamp_of(world.api.clock)}}
        pod["status"]["containerStatuses"] = [{"name": "main", "state": running}]

    for pod in world.live():
        hold(pod)
    world.store.progress["training"] = Progress(
        stage="training",
        done=50,
        total=100,
        eta_seconds=900,
        updated_at=world.api.clock + 900.7,
        figures={"bottleneck": "targets", "queue_depth": 12.0},
    )
    world.api.clock += 900.7  # a look is at no whole second
    operator.reconcile("d")
    cost = world.status()["cost"]
    assert cost["spentGpuHours"] == "2.00"
    assert cost["projectedGpuHours"] == "4.00"
    assert (cost["spent"], cost["wasted"], cost["projected"]) == ("6.00", "0.00", "12.00")
    assert cost["through"] == "training"
    DrafterStatus.model_validate(world.status())
    for _ in range(59):
        world.api.clock += 1.3
        operator.reconcile("d")
    held = world.status()["stages"][1]["gpuSeconds"]
    assert held == 8 * int(900.7 + 59 * 1.3), "no part of a second is counted twice"
    assert world.store.spending.stages["training"].gpu_seconds == held
    drafter = next(p for p in world.live() if p["metadata"]["labels"]["dflash.dev/role"] == "drafter")
    world.end(drafter, 1)
    world.store.progress.clear()
    for _ in range(4):
        world.controllers()
        world.api.clock += 10
        operator.reconcile("d")
    for pod in world.live():
        if "containerStatuses" not in pod["status"]:
            hold(pod)
    world.api.clock += 100
    operator.reconcile("d")
    wasted = world.status()["stages"][1]["wastedGpuSeconds"]
    assert wasted >= 4 * 100 + 4 * 30, "the target waits and the new attempt starts for nothing new"
    assert wasted < world.status()["stages"][1]["gpuSeconds"]
    text = scrape([{"metadata": {"name": "d"}, "status": world.status()}])
    assert f'dflash_drafter_wasted_gpu_seconds_total{{drafter="d",stage="training"}} {wasted}.0' in text
    assert 'dflash_drafter_cost{drafter="d",kind="spent"}' in text


def test_figures_of_the_running_stage_are_metrics_and_sentences_are_not() -> None:
    status = {
        "stage": "training",
        "progress": {
            "done": 1,
            "total": 2,
            "figures": {"queue_depth": "12", "verdict": "a sentence", "bottleneck": "targets", "loss": "nan"},
        },
        "alerts": ["one; do this", "two; do that"],
        "cost": {"projected": "24.00", "endsAt": "2026-12-01T12:00:00Z", "through": "evaluation"},
    }
    text = scrape([{"metadata": {"name": "d"}, "status": status}])
    assert 'dflash_drafter_figure{drafter="d",name="queue_depth",stage="training"} 12.0' in text
    assert text.count("dflash_drafter_figure{") == 1
    assert 'dflash_drafter_bottleneck{drafter="d",side="targets"} 1.0' in text
    assert 'dflash_drafter_alerts{drafter="d"} 2.0' in text
    assert 'dflash_drafter_cost{drafter="d",kind="projected"} 24.0' in text
    assert (
        'dflash_drafter_projected_end_timestamp_seconds{drafter="d",through="evaluation"} 1.7961264e+09'
        in text
    )


def stage_of(world: FakeCluster, stage: str) -> str:
    from dflash.resource.hashes import stage_hashes
    from dflash.resource.load import Document, parse_resource

    item = world.api.objects["drafters"]["d"]
    spec = parse_resource(
        Document("d", {k: item[k] for k in ("apiVersion", "kind", "metadata", "spec")})
    ).spec
    return {"generation": stage_hashes(spec, prompts="p", target="t").dataset}[stage]


def scrape(items: list[dict[str, Any]]) -> str:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(
        Figures(  # type: ignore[arg-type]
            drafters=lambda: items,
            queue_length=lambda: 0,
            requests=dict,
            actions=dict,
            status_writes=lambda: 0,
            watch_silence=dict,
            relists=dict,
        )
    )
    return generate_latest(registry).decode()


def test_refusals_are_told_apart() -> None:
    error = _refusal(409, b'{"reason": "Conflict", "message": "changed"}')
    assert (error.status, error.reason, error.message) == (409, "Conflict", "changed")
    assert _refusal(502, b"<html>bad gateway").reason == "Unknown"


def test_the_endpoints_answer_with_what_is_true_when_they_are_asked() -> None:
    import urllib.error
    import urllib.request

    metrics = Metrics()
    drafters = [
        {
            "metadata": {"name": "d"},
            "status": {
                "phase": "Training",
                "stage": "training",
                "progress": {"done": 1, "total": 4},
                "acceptanceLength": "3.50",
                "stages": [{"name": "training", "gpuSeconds": 12}],
            },
        }
    ]
    figures = Figures(
        drafters=lambda: drafters,
        queue_length=lambda: 3,
        requests=lambda: {"GET": 2},
        actions=lambda: {"Start": 1},
        status_writes=lambda: 5,
        watch_silence=lambda: {"pods": 1.5},
        relists=lambda: {"pods": 1},
    )
    metrics.registry.register(figures)  # type: ignore[arg-type]
    state = {"ready": "waiting for the lease"}
    server = serve("127.0.0.1", 0, metrics=metrics, healthy=lambda: "", ready=lambda: state["ready"])
    base = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        text = urllib.request.urlopen(f"{base}/metrics", timeout=5).read().decode()
        assert 'dflash_drafters{phase="Training"} 1.0' in text
        assert 'dflash_drafter_progress_ratio{drafter="d",stage="training"} 0.25' in text
        assert 'dflash_drafter_gpu_seconds_total{drafter="d",stage="training"} 12.0' in text
        assert "dflash_operator_queue_length 3.0" in text
        assert urllib.request.urlopen(f"{base}/healthz", timeout=5).status == 200
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{base}/readyz", timeout=5)
        state["ready"] = ""
        assert urllib.request.urlopen(f"{base}/readyz", timeout=5).status == 200
    finally:
        server.shutdown()
        server.server_close()
