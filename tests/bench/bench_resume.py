"""Loss curve of a disturbed run against an undisturbed one, step by step: real processes, real store.

Disturbances: the drafter is killed and the next attempt resumes; the group is asked to stop and goes
on; two targets serve in place of one; two drafters share each batch. The figure is the largest
difference of any step's loss, over all of them. Computed in fp32, so it is the order of summing that differs.
"""

import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

from dflash.storage.embedded import EmbeddedStore
from tests.support.tiny import save_tiny_target
from tests.support.training import TrainingRun

_SLOW = 0.1
"""Seconds that a target takes longer for a batch, so that the disturbance falls into the run."""


def run(quick: bool) -> dict[str, float]:
    samples = 24 if quick else 200
    with tempfile.TemporaryDirectory() as name, EmbeddedStore(Path(name, "s3")) as server:
        folder = Path(name)
        target = save_tiny_target(folder / "target", layers=5)

        def losses(case: str, act: Callable[[TrainingRun], None]) -> dict[int, float]:
            training = TrainingRun(
                server,
                server.store().under(case),
                folder / case,
                samples=samples,
                target=target,
                interval=1e-6,
                training={"checkpoint": {"everySteps": 2}},
            )
            with training:
                act(training)
                return training.losses()

        expected = losses("undisturbed", lambda training: training.complete())
        assert len(expected) == training_steps(samples), expected
        worst = 0.0
        for case, act in (
            ("killed", _kill),
            ("stopped", _stop),
            ("two-targets", lambda training: training.complete(targets=2)),
            ("two-drafters", lambda training: training.complete(drafters=2)),
        ):
            found = losses(case, act)
            difference = max(abs(loss - expected[step]) for step, loss in found.items())
            print(
                f"{case:14} {len(found):3} steps, last loss {found[max(found)]:.6f}, {difference:.2e} apart"
            )
            assert max(found) == max(expected)
            worst = max(worst, difference)
        return {
            "max_abs_loss_difference": worst,
            "first_loss": expected[1],
            "last_loss": expected[max(expected)],
        }


def training_steps(samples: int) -> int:
    """Two epochs in batches of four."""
    return 2 * -(-samples // 4)


def _kill(training: TrainingRun) -> None:
    target = training.target(slow=_SLOW)
    (first,) = training.drafters(attempt=0)
    training.wait_for_checkpoint()
    first.send(signal.SIGKILL)
    first.wait()
    (second,) = training.drafters(attempt=1)
    assert second.wait(300) == 0
    assert target.wait() == 0


def _stop(training: TrainingRun) -> None:
    target = training.target(slow=_SLOW)
    (first,) = training.drafters(attempt=0)
    training.wait_for_checkpoint()
    first.send(signal.SIGTERM)
    assert first.wait() == 143
    (second,) = training.drafters(attempt=1)
    assert second.wait(300) == 0
    assert target.wait() == 0
