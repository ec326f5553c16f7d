"""A run's alerts over time: said once, kept while they last, said anew when they come back."""

from dflash.planning.alerts import Surroundings
from dflash.training.alarms import Alarms

NOTHING = Surroundings()


def row(share: float, **values: float) -> dict[str, float]:
    return {
        "progress/share": share,
        "drafter/wait_share": 0.05,
        **{k.replace("__", "/"): v for k, v in values.items()},
    }


def test_an_alert_is_new_once_and_over_after_a_while_without_it() -> None:
    alarms = Alarms()
    told = [alarms.see(row(0.001 * i, drafter__wait_share=0.6), NOTHING) for i in range(40)]
    assert [alert.name for found in told for alert in found] == ["drafters-starved"]
    assert len(alarms.sentences) == 1
    told = [alarms.see(row(0.04 + 0.001 * i), NOTHING) for i in range(100)]
    assert not any(told)
    assert alarms.sentences == []
    told = [alarms.see(row(0.2 + 0.001 * i, drafter__wait_share=0.6), NOTHING) for i in range(60)]
    assert sum(len(found) for found in told) == 1


def test_starving_is_seen_within_minutes_of_a_run_of_days() -> None:
    alarms = Alarms()
    for i in range(500):
        assert alarms.see(row(i * 1e-4), NOTHING) == []
    told = [alarms.see(row(0.05 + i * 1e-4, drafter__wait_share=0.6), NOTHING) for i in range(60)]
    assert sum(len(found) for found in told) == 1


def test_a_loss_that_does_not_fall_is_seen_however_many_rows_a_run_has() -> None:
    alarms = Alarms()
    names = {
        alert.name
        for i in range(2000)
        for alert in alarms.see(row(i / 2000, train__loss=5.0 + 0.01 * (-1) ** i), NOTHING)
    }
    assert names == {"loss-not-falling"}


def test_a_loss_that_falls_slowly_but_steadily_over_a_long_run_raises_nothing() -> None:
    alarms = Alarms()
    for i in range(2000):
        loss = 6.0 - 3.0 * i / 2000 + 0.02 * (-1) ** i
        assert alarms.see(row(i / 2000, train__loss=loss), NOTHING) == []


def test_rows_of_earlier_attempts_count_and_other_rows_do_not() -> None:
    earlier = [row(0.001 * i, drafter__wait_share=0.6) for i in range(30)]
    alarms = Alarms([*earlier, {"global_step": 3, "event": "restart"}, {"eval/acceptance_length": 1.5}])
    told = alarms.see(row(0.03, drafter__wait_share=0.6), NOTHING)
    assert [alert.name for alert in told] == ["drafters-starved"]
