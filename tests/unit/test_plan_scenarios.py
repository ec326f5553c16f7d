"""The planner, one situation a test."""

from dataclasses import replace

import pytest

from dflash.resource import DrafterSpec
from dflash.resource.hashes import StageHashes
from operators import failures
from operators.actions import Promote, Start, StopChild, StopGroup, Wait
from operators.conditions import refused, summarize
from operators.observed import Child, Committed, Observed, Record, RoleRecord, StageProgress
from operators.plan import APPEARANCE_SECONDS, LINGER_SECONDS, Plan, plan, restarted

HASHES = StageHashes("d" * 16, "r" * 16, "e" * 16)
NOW = 1_000_000.0


def spec(suspend=False, **training) -> DrafterSpec:
    return DrafterSpec.model_validate(
        {
            "target": {"model": "m"},
            "prompts": {"uri": "p"},
            "storage": {"uri": "s"},
            "training": {"targets": 2, "drafters": 2, **training},
            "generation": {"replicas": 2},
            "suspend": suspend,
        }
    )


def look(
    *children,
    dataset=False,
    export=False,
    evaluation=False,
    record=None,
    now=NOW,
    the_spec=None,
    hashes=HASHES,
    progress=None,
    **more,
) -> Observed:
    committed = {k: more.pop(k) for k in ("attempt", "gate", "promoted") if k in more}
    return Observed(
        name="qwen",
        spec=the_spec or spec(),
        hashes=hashes,
        committed=Committed(dataset=dataset, export=export, evaluation=evaluation, **committed),
        children=tuple(children),
        record=record or Record(),
        now=now,
        progress=progress or {},
        **more,
    )


def child(role, index=0, state="running", attempt=0, **more) -> Child:
    hashes = {"generate": "d" * 16, "target": "r" * 16, "drafter": "r" * 16, "evaluate": "e" * 16}
    more = {
        "hash": hashes[role],
        "created_at": NOW - 5,
        "world": {"generate": 2, "drafter": 2}.get(role, 1),
        **more,
    }
    more.setdefault("id", f"{role}-{index}-{attempt}-{state}")
    if state in ("failed", "succeeded"):
        more.setdefault("ended_at", NOW - 1)
    return Child(role=role, index=index, state=state, attempt=attempt, **more)


def of(decided: Plan, kind) -> list:
    return [a for a in decided.actions if isinstance(a, kind)]


def begun(attempt=0, **more) -> Record:
    """A record of a training attempt that was launched."""
    fresh = plan(look(dataset=True, attempt=attempt - 1)).record
    return fresh.with_role("drafter", replace(fresh.roles["drafter"], launched_at=NOW - 5, **more))


TRAINING = [child("target", 0), child("target", 1), child("drafter", 0), child("drafter", 1)]


# --- the chain ------------------------------------------------------------------------------------


def test_nothing_is_there_so_generation_starts():
    assert of(plan(look()), Start) == [Start("generate", "d" * 16, 0, (0, 1), 2)]


def test_a_committed_dataset_leads_to_targets_and_drafters_together():
    assert of(plan(look(dataset=True)), Start) == [
        Start("target", "r" * 16, 0, (0, 1), 1),
        Start("drafter", "r" * 16, 0, (0, 1), 2),
    ]


def test_a_committed_export_leads_to_evaluation_even_if_the_dataset_was_deleted():
    assert of(plan(look(export=True)), Start) == [Start("evaluate", "e" * 16, 0, (0,), 1)]


def test_a_committed_evaluation_is_promoted_and_then_nothing_is_left():
    assert of(plan(look(evaluation=True)), Promote) == [Promote("qwen", "r" * 16, "e" * 16)]
    assert plan(look(evaluation=True, promoted=True)).idle


def test_a_drafter_below_its_gate_is_not_promoted_and_nothing_runs_again():
    seen = look(evaluation=True, gate="acceptance length 1.02 is below 3.0")
    assert plan(seen).idle
    assert summarize(seen, plan(seen)).phase == "Stalled"


def test_running_children_are_left_alone():
    decided = plan(look(*TRAINING, dataset=True, record=begun()))
    assert [type(a) for a in decided.actions] == [Wait, Wait]


def test_children_of_a_finished_stage_may_end_by_themselves_and_are_stopped_after_a_while():
    seen = look(child("generate", 0), dataset=True)
    decided = plan(seen)
    assert of(decided, Start) == []
    assert decided.wake_at == NOW + LINGER_SECONDS
    later = plan(replace(seen, record=decided.record, now=NOW + LINGER_SECONDS))
    assert of(later, StopGroup) == [StopGroup("generate", "d" * 16, 0, "Obsolete")]


def test_targets_are_stopped_as_soon_as_the_export_is_committed():
    decided = plan(look(child("target", 0), export=True, record=begun()))
    assert of(decided, StopGroup) == [StopGroup("target", "r" * 16, 0, "Obsolete")]
    assert of(decided, Start) == []


# --- elastic roles --------------------------------------------------------------------------------


def test_a_dead_target_is_replaced_alone_and_the_drafters_go_on():
    dead = child("target", 1, "failed", exit_code=137)
    decided = plan(look(TRAINING[0], dead, *TRAINING[2:], dataset=True, record=begun()))
    assert of(decided, Start) == [Start("target", "r" * 16, 0, (1,), 1)]
    assert of(decided, StopGroup) == []
    assert decided.record.roles["target"].disruptions == 1


def test_a_failure_is_counted_once_however_often_it_is_seen():
    dead = child("target", 1, "failed", exit_code=1)
    seen = look(TRAINING[0], dead, *TRAINING[2:], dataset=True, record=begun())
    for _ in range(5):
        seen = replace(seen, record=plan(seen).record)
    assert seen.record.roles["target"].restarts == 1


def test_a_generation_worker_that_finished_its_share_is_not_started_again():
    done, dead = child("generate", 0, "succeeded", exit_code=0), child("generate", 1, "failed", exit_code=137)
    assert of(plan(look(done, dead)), Start) == [Start("generate", "d" * 16, 0, (1,), 2)]


def test_workers_that_all_end_well_without_a_manifest_spend_a_restart():
    seen = look(child("generate", 0, "succeeded"), child("generate", 1, "succeeded"))
    decided = plan(seen)
    assert decided.record.roles["generate"].restarts == 1
    assert of(decided, Wait)[0].reason == "Backoff"
    again = plan(replace(seen, record=decided.record, now=NOW + 10))
    assert of(again, Start) == [Start("generate", "d" * 16, 0, (0, 1), 2)]


def test_fewer_targets_asked_for_stops_the_surplus_only():
    decided = plan(look(*TRAINING, dataset=True, record=begun(), the_spec=spec(targets=1)))
    assert of(decided, StopChild) == [StopChild(TRAINING[1], "Resized")]
    assert of(decided, StopGroup) == []


def test_another_number_of_generation_workers_starts_all_of_them_anew():
    decided = plan(look(child("generate", 0, world=3), child("generate", 1, world=3)))
    assert of(decided, StopGroup) == [StopGroup("generate", "d" * 16, 0, "Resized")]
    assert of(decided, Start) == []


def test_auto_targets_follow_the_verdict_within_their_bounds():
    auto = spec(targets="auto", minTargets=1, maxTargets=3)
    assert of(plan(look(dataset=True, the_spec=auto)), Start)[0].indexes == (0,)
    assert of(plan(look(dataset=True, the_spec=auto, suggested_targets=9)), Start)[0].indexes == (0, 1, 2)
    # While nothing is said, such as at the start of an attempt, there are as many as there were.
    silent = plan(look(*TRAINING, dataset=True, record=begun(), the_spec=auto))
    assert (of(silent, Start), of(silent, StopChild)) == ([], [])
    fewer = plan(look(*TRAINING, dataset=True, record=begun(), the_spec=auto, suggested_targets=1))
    assert of(fewer, StopChild) == [StopChild(TRAINING[1], "Resized")]


# --- the drafter group ----------------------------------------------------------------------------


def test_one_dead_drafter_ends_the_attempt_and_the_next_waits_until_nobody_lives():
    dead = child("drafter", 1, "failed", exit_code=137)
    seen = look(*TRAINING[:3], dead, dataset=True, record=begun())
    decided = plan(seen)
    assert of(decided, StopGroup) == [StopGroup("drafter", "r" * 16, 0, "Killed")]
    assert of(decided, Start) == []
    assert decided.record.roles["drafter"].attempt == 1
    still = replace(TRAINING[2], state="stopping")
    seen = replace(seen, children=(*TRAINING[:2], still, dead), record=decided.record)
    assert of(plan(seen), Start) == []
    seen = replace(seen, children=(*TRAINING[:2], dead))
    assert of(plan(seen), Start) == [Start("drafter", "r" * 16, 1, (0, 1), 2)]


def test_the_attempt_is_in_the_record_before_anything_is_started():
    decided = plan(look(dataset=True))
    assert decided.record.roles["drafter"].launched_at == NOW
    # The process that decided dies here; the next finds a launched attempt that never appeared.
    lost = plan(look(dataset=True, record=decided.record, now=NOW + APPEARANCE_SECONDS))
    assert of(lost, Start)[1].attempt == 1


def test_a_configuration_error_stalls_at_once_and_everything_is_released():
    dead = child("drafter", 1, "failed", exit_code=78, message="maskTokenId 7 is in use")
    seen = look(*TRAINING[:3], dead, dataset=True, record=begun())
    decided = plan(seen)
    assert {(a.role, a.attempt) for a in of(decided, StopGroup)} == {("target", 0), ("drafter", 0)}
    assert of(decided, Start) == []
    told = {c.type: c for c in summarize(seen, decided).conditions}
    assert (told["Stalled"].status, told["Stalled"].reason) == ("True", "ConfigurationError")
    assert "maskTokenId 7 is in use" in told["Stalled"].message
    assert told["Reconciling"].status == "False"


def test_a_stalled_drafter_starts_again_when_the_spec_changes():
    dead = child("drafter", 1, "failed", exit_code=78)
    stalled = plan(look(*TRAINING[:3], dead, dataset=True, record=begun())).record
    assert of(plan(look(dataset=True, record=stalled)), Start) == []
    edited = plan(look(dataset=True, record=stalled, the_spec=spec(queueDepth=8)))
    assert of(edited, Start)[1] == Start("drafter", "r" * 16, 1, (0, 1), 2)


def test_out_of_memory_stalls_since_the_next_attempt_would_need_as_much():
    dead = child("drafter", 0, "failed", exit_code=137, reason="OOMKilled")
    assert (
        plan(look(dead, TRAINING[3], dataset=True, record=begun())).record.roles["drafter"].stalled
        == "OOMKilled"
    )


@pytest.mark.parametrize(
    ("more", "restarts", "disruptions"),
    [
        ({"exit_code": 1}, 1, 0),
        ({"exit_code": 75}, 1, 0),
        ({"exit_code": 137}, 0, 1),
        ({"exit_code": 143}, 0, 1),
        ({"exit_code": 1, "disrupted": True, "reason": "Evicted"}, 0, 1),
        ({"exit_code": None, "disrupted": True}, 0, 1),
        ({"exit_code": None}, 1, 0),
    ],
)
def test_each_way_to_end_spends_its_own_budget(more, restarts, disruptions):
    dead = child("drafter", 0, "failed", **more)
    mine = plan(look(dead, TRAINING[3], dataset=True, record=begun())).record.roles["drafter"]
    assert (mine.restarts, mine.disruptions) == (restarts, disruptions)


def test_the_first_to_die_is_blamed_not_the_peers_that_lost_it():
    first = child("drafter", 1, "failed", exit_code=1, message="division by zero", ended_at=NOW - 1.0)
    peer = child("drafter", 0, "failed", exit_code=75, message="peer lost", ended_at=NOW - 1.0)
    told = plan(look(first, peer, dataset=True, record=begun())).record.roles["drafter"].failure
    assert told.message == "division by zero"


def test_a_drafter_deleted_from_outside_ends_the_attempt_before_it_is_gone():
    leaving = child("drafter", 1, "stopping")
    decided = plan(look(*TRAINING[:3], leaving, dataset=True, record=begun()))
    assert of(decided, StopGroup) == [StopGroup("drafter", "r" * 16, 0, "Deleted")]
    assert decided.record.roles["drafter"].disruptions == 1


def test_restarts_are_limited_and_disruptions_have_their_own_limit():
    dead = child("drafter", 0, "failed", exit_code=1)
    limited = spec(maxRestarts=0)
    record = plan(look(dataset=True, the_spec=limited)).record
    decided = plan(look(dead, TRAINING[3], dataset=True, record=record, the_spec=limited))
    assert decided.record.roles["drafter"].stalled == "RestartsExhausted"
    killed = child("drafter", 0, "failed", exit_code=137)
    decided = plan(look(killed, TRAINING[3], dataset=True, record=record, the_spec=limited))
    assert decided.record.roles["drafter"].stalled == ""


def test_failures_in_a_row_wait_longer_and_progress_resets_the_wait():
    dead = child("drafter", 0, "failed", exit_code=1)
    delays = []
    record = begun()
    for attempt in range(4):
        seen = look(replace(dead, attempt=attempt), TRAINING[0], TRAINING[1], dataset=True, record=record)
        record = plan(seen).record
        delays.append(record.roles["drafter"].not_before - NOW)
        record = record.with_role("drafter", replace(record.roles["drafter"], launched_at=NOW))
    assert delays == sorted(delays)
    assert delays[3] > 4 * delays[0]
    moved = look(
        replace(dead, attempt=4),
        dataset=True,
        record=record,
        progress={"training": StageProgress(4, 50, NOW)},
    )
    assert plan(moved).record.roles["drafter"].streak == 1


def test_the_first_disruption_is_answered_at_once():
    dead = child("drafter", 0, "failed", exit_code=137)
    gone = child("drafter", 1, "failed", exit_code=75)
    decided = plan(look(*TRAINING[:2], dead, gone, dataset=True, record=begun()))
    assert of(decided, Start) == [Start("drafter", "r" * 16, 1, (0, 1), 2)]


def test_an_attempt_is_above_whatever_the_store_has_seen():
    assert of(plan(look(dataset=True, attempt=6)), Start)[1].attempt == 7


def test_a_live_group_is_adopted_when_the_record_was_lost():
    group = [child("drafter", i, attempt=3) for i in (0, 1)]
    decided = plan(look(*TRAINING[:2], *group, dataset=True, attempt=3))
    assert of(decided, Start) == of(decided, StopGroup) == []
    assert decided.record.roles["drafter"].attempt == 3


def test_another_number_of_drafters_is_a_new_attempt_that_spends_nothing():
    decided = plan(look(*TRAINING, dataset=True, record=begun(), the_spec=spec(drafters=1)))
    mine = decided.record.roles["drafter"]
    assert (mine.attempt, mine.restarts, mine.disruptions) == (1, 0, 0)
    assert of(decided, StopGroup) == [StopGroup("drafter", "r" * 16, 0, "Restarting")]


def test_success_without_an_export_is_a_failure():
    group = [child("drafter", i, "succeeded", exit_code=0) for i in (0, 1)]
    decided = plan(look(*TRAINING[:2], *group, dataset=True, record=begun()))
    assert decided.record.roles["drafter"].failure.reason == "NoExport"


# --- deadlines ------------------------------------------------------------------------------------


def test_no_first_step_within_the_startup_deadline_releases_the_whole_gang():
    old = [replace(c, created_at=NOW - 1800) for c in TRAINING]
    decided = plan(look(*old, dataset=True, record=begun()))
    assert {a.role for a in of(decided, StopGroup)} == {"target", "drafter"}
    failure = decided.record.roles["drafter"].failure
    assert failure.reason == "StartupDeadlineExceeded"
    assert "startupDeadlineSeconds" in failure.message


def test_waiting_for_room_is_named_and_spends_no_restart():
    waiting = [
        replace(
            c, state="pending", created_at=NOW - 1800, reason="Unschedulable", message="0/3 nodes: no GPU"
        )
        for c in TRAINING
    ]
    seen = look(*waiting, dataset=True, record=begun())
    early = replace(seen, now=NOW - 100)
    assert summarize(early, plan(early)).phase == "Queued"
    mine = plan(seen).record.roles["drafter"]
    assert (mine.restarts, mine.disruptions, mine.failure.reason) == (0, 1, "Unschedulable")
    assert "0/3 nodes: no GPU" in mine.failure.message


def test_a_queue_may_hold_a_whole_stage_for_as_long_as_it_likes():
    held = {"state": "pending", "reason": "Suspended", "message": "held", "created_at": NOW - 1e6}
    waiting = [child("target", 0, **held), child("target", 1, **held), child("drafter", 0, **held)]
    seen = look(*waiting, child("drafter", 1, **held), dataset=True, record=begun())
    decided = plan(seen)
    assert (of(decided, Start), of(decided, StopGroup)) == ([], [])
    assert summarize(seen, decided).phase == "Queued"
    assert "Suspended held" in summarize(seen, decided).message
    # Half of it holds its place for nothing: after the deadline it is given back, at no restart's cost.
    half = [replace(c, state="running", reason="", message="") for c in waiting[:2]]
    seen = look(*half, waiting[2], child("drafter", 1, **held), dataset=True, record=begun())
    decided = plan(seen)
    assert {a.role for a in of(decided, StopGroup)} == {"target", "drafter"}
    mine = decided.record.roles["drafter"]
    assert (mine.restarts, mine.disruptions, mine.failure.reason) == (0, 1, "Suspended")


def test_no_step_within_the_progress_deadline_replaces_the_drafters_and_keeps_the_targets():
    old = [replace(c, created_at=NOW - 5000) for c in TRAINING]
    progress = {"training": StageProgress(attempt=0, done=12, moved_at=NOW - 900)}
    decided = plan(look(*old, dataset=True, record=begun(), progress=progress))
    assert of(decided, StopGroup) == [StopGroup("drafter", "r" * 16, 0, "ProgressDeadlineExceeded")]
    fresh = {"training": StageProgress(attempt=0, done=12, moved_at=NOW - 899)}
    waiting = plan(look(*old, dataset=True, record=begun(), progress=fresh))
    assert of(waiting, StopGroup) == []
    assert waiting.wake_at == NOW + 1


def test_an_old_attempts_progress_is_not_taken_for_the_new_ones():
    old = [replace(c, created_at=NOW - 1800) for c in TRAINING]
    progress = {"training": StageProgress(attempt=7, done=12, moved_at=NOW - 1)}
    decided = plan(look(*old, dataset=True, record=begun(), progress=progress))
    assert decided.record.roles["drafter"].failure.reason == "StartupDeadlineExceeded"


def test_generation_without_progress_is_started_again():
    stuck = [replace(child("generate", i), created_at=NOW - 5000) for i in (0, 1)]
    progress = {"generation": StageProgress(attempt=0, done=3, moved_at=NOW - 901)}
    decided = plan(look(*stuck, progress=progress))
    assert of(decided, StopGroup) == [StopGroup("generate", "d" * 16, 0, "ProgressDeadlineExceeded")]
    assert decided.record.roles["generate"].restarts == 1


# --- suspend, edit, rerun -------------------------------------------------------------------------


def test_suspend_stops_everything_and_spends_nothing_however_the_children_end():
    paused = spec(suspend=True)
    seen = look(*TRAINING, dataset=True, record=begun(), the_spec=paused)
    decided = plan(seen)
    assert {a.role for a in of(decided, StopGroup)} == {"target", "drafter"}
    ended = [replace(c, state="failed", exit_code=143, ended_at=NOW + 1) for c in TRAINING]
    resumed = plan(look(*ended, dataset=True, record=decided.record, now=NOW + 2))
    assert of(resumed, Start)[1] == Start("drafter", "r" * 16, 1, (0, 1), 2)
    for role in ("target", "drafter"):
        mine = resumed.record.roles[role]
        assert (mine.restarts, mine.disruptions) == (0, 0)


def test_a_suspended_drafter_at_rest_asks_for_nothing():
    seen = look(dataset=True, the_spec=spec(suspend=True))
    assert plan(seen).idle
    assert summarize(seen, plan(seen)).phase == "Suspended"


def test_an_edit_stops_the_old_run_before_the_new_one_starts():
    edited = StageHashes("d" * 16, "n" * 16, "f" * 16)
    seen = look(*TRAINING, dataset=True, record=begun(), hashes=edited)
    decided = plan(seen)
    assert {a.hash for a in of(decided, StopGroup)} == {"r" * 16}
    assert of(decided, Start) == []
    after = plan(replace(seen, children=(), record=decided.record))
    assert of(after, Start)[1] == Start("drafter", "n" * 16, 0, (0, 1), 2)


def test_a_new_run_of_the_executor_has_fresh_budgets_and_an_unused_attempt():
    tired = Record(
        "x", {"drafter": RoleRecord("r" * 16, attempt=4, launched_at=1.0, restarts=9, stalled="Failed")}
    )
    assert restarted(tired).roles["drafter"] == RoleRecord("r" * 16, attempt=5)


# --- what is told ---------------------------------------------------------------------------------


def conditions(seen) -> dict[str, str]:
    return {c.type: c.status for c in summarize(seen, plan(seen)).conditions}


def test_exactly_one_of_reconciling_stalled_and_ready_is_true():
    dead = child("drafter", 1, "failed", exit_code=78)
    for seen in (
        look(),
        look(dataset=True),
        look(*TRAINING, dataset=True, record=begun()),
        look(dead, dataset=True, record=begun()),
        look(evaluation=True),
        look(evaluation=True, promoted=True),
        look(evaluation=True, gate="too low"),
    ):
        told = conditions(seen)
        assert [told[t] for t in ("Reconciling", "Stalled", "Ready")].count("True") == 1, told


def test_conditions_follow_the_stages():
    told = conditions(look(dataset=True))
    assert (told["DatasetReady"], told["Trained"], told["Evaluated"]) == ("True", "False", "False")


def test_a_spec_that_cannot_be_taken_is_stalled_with_its_sentence():
    told = {c.type: c for c in refused("spec.drafter.blockSze: unknown field").conditions}
    assert told["Accepted"].status == "False"
    assert told["Stalled"].status == "True"
    assert "blockSze" in told["Ready"].message


def test_backoff_doubles_up_to_five_minutes():
    waits = [failures.backoff(n, "salt") for n in range(30)]
    assert waits[0] == 0.0
    assert 0.75 <= waits[1] <= 1.25
    assert max(waits) <= 375.0
