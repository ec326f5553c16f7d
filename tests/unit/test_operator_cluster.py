"""The operator against a cluster in memory: stages in order, edits, failures, and a crash at every write."""

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.errors import TemporaryError
from operators.cluster import FINALIZER, retry_of
from operators.kube import DRAFTERS, JOBS, PODS, SERVICES, Conflict
from operators.lease import LEASE_SECONDS
from tests.support.fake_cluster import NAMESPACE, Crash, FakeCluster, timestamp_of

TRAINING = {"training": {"targets": 2, "drafters": 2}}


def drive(world: FakeCluster, rounds: int = 80, until: str = "Ready", work: bool = True) -> None:
    """Let operator, controllers and jobs go on until a phase is reached. Crashes start a new operator."""
    operator = world.operator()
    for _ in range(rounds):
        try:
            operator.reconcile("d")
        except Crash:
            operator = world.operator()
            world.api.clock += LEASE_SECONDS
        except Exception as error:
            if retry_of(error) is None:
                raise
        if world.status().get("phase") == until:
            return
        world.controllers()
        if work:
            world.work()
        world.api.clock += 1.0
    raise AssertionError(f"not {until} after {rounds} looks: {world.status()}")


def roles(world: FakeCluster) -> list[str]:
    return [name.split("-")[1] for name in world.made]


def test_the_stages_run_in_order_and_steady_state_writes_nothing() -> None:
    world = FakeCluster(**TRAINING)
    drive(world)
    assert roles(world) == ["gen", "tgt", "dft", "eval"]
    assert world.store.promoted is not None
    writes = len(world.api.writes)
    operator = world.operator()
    for _ in range(50):
        operator.reconcile("d")
        world.api.clock += 600
    assert len(world.api.writes) == writes


def test_an_edit_reruns_what_follows_from_it_and_editing_back_nothing() -> None:
    world = FakeCluster(**TRAINING)
    drive(world)
    world.declare(**TRAINING, evaluation={"samples": 5})
    drive(world)
    assert roles(world) == ["gen", "tgt", "dft", "eval", "eval"]
    world.declare(training={**TRAINING["training"], "epochs": 2}, evaluation={"samples": 5})
    drive(world)
    assert roles(world)[5:] == ["tgt", "dft", "eval"]
    made = list(world.made)
    world.declare(**TRAINING)
    drive(world)
    assert world.made == made


def test_a_lost_drafter_is_a_new_attempt_of_the_whole_group() -> None:
    world = FakeCluster(**TRAINING)
    operator = world.operator()
    for _ in range(10):
        operator.reconcile("d")
        world.controllers()
        for pod in world.live("generate"):
            world.store.committed.add(pod["metadata"]["labels"]["dflash.dev/hash"])
            world.end(pod, 0)
        world.api.clock += 1
    assert len(world.live("drafter")) == 2
    world.end(world.live("drafter")[0], 137)
    drive(world)
    assert roles(world).count("dft") == 2
    assert world.made[-2].endswith("-a1")
    status = world.status()
    assert (status["attempt"], status["disruptions"], status["restarts"]) == (1, 1, 0)
    assert status["lastFailure"]["exitCode"] == 137


def test_a_deleted_service_of_a_living_group_is_put_back() -> None:
    world = FakeCluster()
    operator = world.operator()
    operator.reconcile("d")
    world.controllers()
    (name,) = world.api.objects["services"]
    world.api.objects["services"].clear()
    operator.reconcile("d")
    assert list(world.api.objects["services"]) == [name]


def test_a_deleted_job_is_made_again() -> None:
    world = FakeCluster()
    operator = world.operator()
    operator.reconcile("d")
    world.controllers()
    (name,) = world.api.objects["jobs"]
    uid = world.api.objects["jobs"][name]["metadata"]["uid"]
    world.api.objects["jobs"].clear()
    world.api.objects["pods"].clear()
    operator.reconcile("d")
    assert world.api.objects["jobs"][name]["metadata"]["uid"] != uid


def test_suspending_frees_everything_and_resuming_goes_on() -> None:
    world = FakeCluster(**TRAINING)
    drive(world, until="Training", work=True)
    world.declare(**TRAINING, suspend=True)
    operator = world.operator()
    for _ in range(5):
        operator.reconcile("d")
        world.controllers()
        world.api.clock += 1
    assert world.live() == []
    assert world.status()["phase"] == "Suspended"
    world.declare(**TRAINING)
    drive(world)
    status = world.status()
    assert (status["restarts"], status["disruptions"]) == (0, 0)


def test_a_garbage_collector_that_is_slow_is_not_asked_again_at_each_look() -> None:
    world = FakeCluster()
    operator = world.operator()
    operator.reconcile("d")
    world.controllers()
    world.declare(suspend=True)
    operator.reconcile("d")
    writes = [w for w in world.api.writes if w[0] == "delete"]
    for _ in range(20):  # the pod is neither ended nor marked yet
        world.api.clock += 1
        operator.reconcile("d")
    assert [w for w in world.api.writes if w[0] == "delete"] == writes
    assert "1 process to end" in world.status()["message"]
    world.controllers()
    operator.reconcile("d")
    assert world.status()["phase"] == "Suspended"
    assert not world.api.objects["pods"]


def test_targets_that_are_slow_to_go_do_not_cost_the_drafters_an_attempt() -> None:
    world = FakeCluster(**TRAINING)
    drive(world, until="Training")
    world.controllers()
    (targets,) = (copy.deepcopy(j) for n, j in world.api.objects["jobs"].items() if "-tgt-" in n)
    world.declare(**TRAINING, suspend=True)
    operator = world.operator()
    for _ in range(5):
        operator.reconcile("d")
        world.controllers()
        world.api.clock += 1
    # The API server still has the Job, the informer's copy has not.
    targets["metadata"] |= {"deletionTimestamp": timestamp_of(world.api.clock), "labels": {}}
    world.api.put(JOBS, targets)
    world.declare(**TRAINING)
    with pytest.raises(Exception, match="waits for its predecessor to be gone"):
        operator.reconcile("d")
    assert [n for n in world.api.objects["jobs"] if n.endswith("-a1")]
    drive(world)
    status = world.status()
    assert (status["attempt"], status["restarts"], status["disruptions"]) == (1, 0, 0)


def test_targets_grow_and_shrink_without_touching_the_drafters() -> None:
    world = FakeCluster(**TRAINING)
    drive(world, until="Training")
    for wanted in (4, 1):
        world.declare(training={"targets": wanted, "drafters": 2})
        operator = world.operator()
        for _ in range(6):
            operator.reconcile("d")
            world.controllers()
            world.api.clock += 1
        (job,) = (j for n, j in world.api.objects["jobs"].items() if "-tgt-" in n)
        assert job["spec"]["completions"] == job["spec"]["parallelism"] == wanted
    assert [n for n in world.made if "-dft-" in n] == [n for n in world.made if n.endswith("-a0")]


def test_old_jobs_are_removed_and_what_is_done_is_not_done_again() -> None:
    world = FakeCluster()
    drive(world)
    for number in range(12):
        world.declare(evaluation={"samples": number + 1})
        drive(world)
    for _ in range(5):
        world.operator().reconcile("d")
        world.controllers()
        world.api.clock += 4000
    assert len(world.api.objects["jobs"]) == 12
    assert world.api.objects["services"] == {}
    made = list(world.made)
    world.api.objects["jobs"].clear()
    world.api.objects["pods"].clear()
    drive(world)
    assert world.made == made, "the store says that all is done, whatever became of the Jobs"


def test_what_is_over_stays_over_when_its_jobs_are_gone() -> None:
    world = FakeCluster()
    operator = world.operator()
    operator.reconcile("d")
    world.controllers()
    world.end(world.live("generate")[0], 78)
    drive(world, until="Stalled", work=False)
    made = list(world.made)
    world.api.objects["jobs"].clear()
    world.api.objects["pods"].clear()
    for _ in range(20):
        world.operator().reconcile("d")
        world.controllers()
        world.api.clock += 600
    assert world.made == made
    assert world.status()["phase"] == "Stalled"


@pytest.mark.parametrize("role", ["generate", "target", "drafter", "evaluate"])
@pytest.mark.parametrize("what", ["job", "pods"])
def test_whatever_is_deleted_at_any_stage_is_made_again_or_followed_by_the_next_attempt(
    role: str, what: str
) -> None:
    world = FakeCluster(**TRAINING)
    operator = world.operator()
    while not world.live(role):
        operator.reconcile("d")
        if not world.live(role):
            world.work()
        world.controllers()
        world.api.clock += 1
    names = {p["metadata"]["labels"]["dflash.dev/hash"] for p in world.live(role)}
    for name, pod in list(world.api.objects["pods"].items()):
        if pod in world.live(role):
            del world.api.objects["pods"][name]
    if what == "job":
        for name, job in list(world.api.objects["jobs"].items()):
            labels = job["metadata"]["labels"]
            if labels["dflash.dev/role"] == role and labels["dflash.dev/hash"] in names:
                del world.api.objects["jobs"][name]
                world.made.remove(name)
    before = len(world.made)
    drive(world, rounds=200)
    assert world.status()["restarts"] == 0
    assert what == "pods" or len(world.made) > before


def test_a_wait_is_the_time_to_the_next_look_so_that_nothing_else_has_to_happen() -> None:
    world = FakeCluster()
    operator = world.operator()
    operator.reconcile("d")
    world.controllers()
    world.end(world.live("generate")[0], 1)
    world.api.objects["jobs"].clear()
    wait = operator.reconcile("d")
    told = next(c for c in world.status()["conditions"] if c["type"] == "Reconciling")
    assert told["reason"] == "Backoff"
    assert wait is not None
    assert 0.0 < wait < 3.0
    assert world.api.objects["jobs"] == {}
    world.api.clock += wait
    operator.reconcile("d")
    assert len(world.api.objects["jobs"]) == 1


def test_its_pods_may_talk_to_each_other_and_to_no_other_drafters() -> None:
    world = FakeCluster(**TRAINING)
    drive(world)
    (policy,) = world.api.objects["networkpolicies"].values()
    mine = {"podSelector": {"matchLabels": {"dflash.dev/drafter": "d"}}}
    assert policy["spec"]["podSelector"] == mine["podSelector"]
    assert policy["spec"]["ingress"] == [{"from": [mine]}]
    assert policy["metadata"]["ownerReferences"][0]["kind"] == "Drafter"


DELETE = {"storage": {"uri": "s3://b/p", "deletionPolicy": "Delete"}}


def test_data_is_kept_unless_it_is_asked_to_go_with_the_drafter() -> None:
    world = FakeCluster()
    drive(world)
    assert not world.api.get(DRAFTERS, NAMESPACE, "d")["metadata"].get("finalizers")
    world.delete()
    assert world.operator().reconcile("d") is None
    assert len(world.store.committed) == 3


@pytest.mark.parametrize("until", ["Generating", "Training", "Ready"])
def test_data_that_is_to_go_goes_after_the_last_pod_and_before_the_drafter(until: str) -> None:
    world = FakeCluster(**TRAINING, **DELETE)
    drive(world, until=until)
    assert world.api.get(DRAFTERS, NAMESPACE, "d")["metadata"]["finalizers"] == [FINALIZER]
    world.store.committed.add("something")
    world.delete()
    for _ in range(10):
        world.operator().reconcile("d")  # a new process each time: it may die at any step
        if world.live():
            assert world.store.committed
        world.controllers()
    assert not world.store.committed
    assert not world.live()
    assert world.api.find(DRAFTERS, NAMESPACE, "d") is None


def test_a_drafter_that_is_being_deleted_gets_no_finalizer_and_no_pods() -> None:
    world = FakeCluster(**DELETE)
    item = world.api.get(DRAFTERS, NAMESPACE, "d")
    item["metadata"] |= {"finalizers": ["somebody/else"], "deletionTimestamp": "2026-01-01T00:00:00Z"}
    world.api.put(DRAFTERS, item)
    assert world.operator().reconcile("d") is None
    assert world.api.writes == []


def test_one_who_changes_their_mind_keeps_the_data() -> None:
    world = FakeCluster(**DELETE)
    drive(world)
    world.delete()
    world.declare()  # an edit of a Drafter that waits for its data to go
    world.operator().reconcile("d")
    assert world.api.find(DRAFTERS, NAMESPACE, "d") is None
    assert world.store.committed


def test_data_that_cannot_be_deleted_is_told_and_tried_again() -> None:
    world = FakeCluster(**DELETE)
    drive(world)
    world.delete()

    def away(name: str, storage: Any) -> None:
        raise TemporaryError("the store is away")

    world.store.purge = away  # type: ignore[method-assign]
    with pytest.raises(TemporaryError):
        world.operator().reconcile("d")
    told = next(c for c in world.status()["conditions"] if c["type"] == "Reconciling")
    assert (told["status"], told["reason"]) == ("True", "DataNotDeleted")
    assert "the store is away" in told["message"]
    assert "Retain" in told["message"]


def test_after_a_promotion_it_looks_again_at_once() -> None:
    world = FakeCluster()
    drive(world)
    world.store.promoted = None
    world.declare(rerun="")
    operator = world.operator()
    assert operator.reconcile("d") == 0.0
    assert world.store.promoted is not None
    operator.reconcile("d")
    assert world.status()["phase"] == "Ready"


def test_a_spec_changed_while_it_is_looked_at_is_looked_at_again() -> None:
    world = FakeCluster()
    operator = world.operator()

    def edit_once(_: int) -> None:
        world.api.before = lambda _: None
        world.declare(rerun="now")

    world.api.before = edit_once
    # The write is made with the version that was read: whoever comes second loses and looks again.
    item = world.api.get(DRAFTERS, NAMESPACE, "d")
    world.declare(rerun="now")
    with pytest.raises(Conflict):
        world.api.patch(
            DRAFTERS,
            NAMESPACE,
            "d",
            {"metadata": {"resourceVersion": item["metadata"]["resourceVersion"]}, "status": {}},
            "status",
        )
    world.api.before = lambda _: None
    operator.reconcile("d")
    assert world.status()["observedGeneration"] == 2


def test_an_old_copy_of_the_drafter_never_repeats_an_attempt() -> None:
    world = FakeCluster()
    world.store.committed.add(_dataset(world))
    stale = world.api.get(DRAFTERS, NAMESPACE, "d")
    operator = world.operator()
    operator.reconcile("d")
    operator._caches.drafters.get = lambda _: stale  # type: ignore[method-assign]
    # Our own last write is newer than the copy: it counts.
    operator.reconcile("d")
    fresh = world.operator()
    fresh._caches.drafters.get = lambda _: stale  # type: ignore[method-assign]
    with pytest.raises(Conflict):
        fresh.reconcile("d")
    assert sum(resource == "jobs" and verb == "create" for verb, resource, _ in world.api.writes) == 2


def _dataset(world: FakeCluster) -> str:
    from dflash.resource import Drafter
    from dflash.resource.hashes import stage_hashes

    item = world.api.get(DRAFTERS, NAMESPACE, "d")
    spec = Drafter.model_validate({k: item[k] for k in ("apiVersion", "kind", "metadata", "spec")}).spec
    return stage_hashes(spec, prompts="p", target="t").dataset


def _writes_of_a_whole_run() -> int:
    world = FakeCluster(**TRAINING)
    drive(world)
    return len(world.api.writes)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_write_of_a_whole_run_changes_nothing(when: str) -> None:
    for step in range(1, _writes_of_a_whole_run() + 1):
        world = FakeCluster(**TRAINING)

        def crash(number: int, step: int = step, world: FakeCluster = world) -> None:
            if number == step:
                world.api.before = world.api.after = lambda _: None
                raise Crash

        setattr(world.api, when, crash)
        drive(world)
        made = roles(world)
        assert made.count("gen") == 1, step
        assert made.count("eval") == 1, step
        # An attempt that was written down and not yet made is not used again; the next one is.
        assert 1 <= made.count("dft") <= 2, step
        names = [n for n in world.made if "-dft-" in n]
        assert len(set(names)) == len(names), step
        assert world.status()["restarts"] == 0, step


_EVENTS = st.lists(
    st.sampled_from(
        [
            "look",
            "look",
            "controllers",
            "work",
            "crash",
            "kill",
            "delete-job",
            "delete-service",
            "edit",
            "suspend",
        ]
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(_EVENTS, st.data())
def test_any_order_of_events_converges_and_never_has_two_attempts(events: list[str], data: Any) -> None:
    world = FakeCluster(**TRAINING)
    operator = world.operator()
    spec: dict[str, Any] = dict(TRAINING)
    for event in events:
        world.api.clock += 1
        if event == "look":
            try:
                operator.reconcile("d")
            except Exception as error:
                if retry_of(error) is None:
                    raise
        elif event == "controllers":
            world.controllers()
        elif event == "work":
            world.work()
        elif event == "crash":
            operator = world.operator()
        elif event == "kill" and world.live():
            world.end(data.draw(st.sampled_from(world.live())), 137)
        elif event == "delete-job" and world.api.objects.get("jobs"):
            world.api.delete(JOBS, NAMESPACE, data.draw(st.sampled_from(sorted(world.api.objects["jobs"]))))
        elif event == "delete-service" and world.api.objects.get("services"):
            world.api.objects["services"].clear()
        elif event == "edit":
            spec = {**spec, "evaluation": {"samples": data.draw(st.integers(1, 3))}}
            world.declare(**spec)
        elif event == "suspend":
            world.declare(**spec, suspend=True)
        world._check_one_attempt()
    world.declare(**spec)
    drive(world, rounds=400)
    assert (
        world.status()["observedGeneration"]
        == world.api.get(DRAFTERS, NAMESPACE, "d")["metadata"]["generation"]
    )
    assert SERVICES.plural in world.api.objects
    assert PODS.plural in world.api.objects
