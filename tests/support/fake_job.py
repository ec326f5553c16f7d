"""Jobs that only keep the books: they commit what real jobs commit, and can be told to fail.

Each start is a line in $FAKE_FOLDER/starts. A file $FAKE_FOLDER/fail-<role> makes the next job of that
role end: its first word is an exit code, the rest its last words. deaf-<role> makes it ignore SIGTERM.
"""

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from dflash import layout
from dflash.errors import ExitCode, TemporaryError
from dflash.processes import TERMINATION_LOG
from dflash.progress import Progress
from dflash.resource.load import load_resource
from dflash.storage.commit import write_commit
from dflash.storage.location import location_of
from dflash.storage.store import Store, to_json

PROMPTS = 6
STEPS = int(os.environ.get("FAKE_STEPS", "8"))
PAUSE = float(os.environ.get("FAKE_PAUSE", "0.05"))


def command(action, index, port, *, resource, hashes) -> list[str]:
    """Stands in for `operators.local.job_command`."""
    numbers = [index, action.world, action.attempt]
    return [
        sys.executable,
        "-m",
        "tests.support.fake_job",
        action.role,
        str(resource),
        hashes.dataset,
        hashes.drafter,
        hashes.evaluation,
        *map(str, numbers),
    ]


def main() -> None:
    role, resource, dataset, run, evaluation, *numbers = sys.argv[1:]
    index, world, attempt = map(int, numbers)
    folder = Path(os.environ["FAKE_FOLDER"])
    with (folder / "starts").open("a") as starts:
        starts.write(f"{role} {index} {attempt} {os.getpid()}\n")
    deaf = (folder / f"deaf-{role}").exists()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else _leave)
    store = Store.open(location_of(load_resource(Path(resource)).spec.storage))
    fault = folder / f"fail-{role}"
    if fault.exists():
        code, _, words = fault.read_text().partition(" ")
        fault.unlink()
        Path(os.environ[TERMINATION_LOG]).write_text(words)
        os._exit(int(code))
    if role == "generate":
        generate(store, dataset, index, world)
    elif role == "target":
        time.sleep(600)
    elif role == "drafter":
        train(store, run, index, attempt)
    else:
        store.put(layout.evaluation(evaluation, "report.html"), b"<html></html>")
        store.create(layout.report(evaluation), to_json(report(run, evaluation)))


def generate(store: Store, dataset: str, index: int, world: int) -> None:
    mine = range(index, PROMPTS, world)
    for done, prompt in enumerate(mine, 1):
        time.sleep(PAUSE)
        store.create(layout.dataset(dataset, f"parts/{prompt}.json"), to_json({"prompt": prompt}))
        say(
            store, layout.dataset(dataset, f"progress/{index}.json"), "generation", done, len(mine), "prompts"
        )
    parts = sorted(i.key for i in store.list(layout.dataset(dataset, "parts/")))
    if len(parts) == PROMPTS:
        store.create(layout.dataset_manifest(dataset), to_json({"parts": parts}))


def train(store: Store, run: str, rank: int, attempt: int) -> None:
    if rank:
        while not store.exists(layout.export(run, layout.COMMIT)):
            time.sleep(0.1)
        return
    latest = store.find_json(layout.latest(run)) or {"attempt": -1, "step": 0}
    if latest["attempt"] >= attempt:
        raise SystemExit(f"attempt {attempt} is not above {latest['attempt']}")
    for step in range(latest["step"], STEPS + 1):
        store.put_json(layout.latest(run), {"attempt": attempt, "step": step})
        say(store, layout.heartbeat(run), "training", step, STEPS, "steps", attempt, loss=1.0 / (step + 1))
        time.sleep(PAUSE)
    write_commit(store, layout.export(run), {"config.json": to_json({"steps": STEPS})}, {})


def report(run: str, evaluation: str) -> dict:
    return {
        "name": "fake",
        "drafter": run,
        "evaluation": evaluation,
        "acceptance_length": {"pooled": 1.5, "per_response_mean": 1.4},
        "greedy_equal": True,
        "speedup": 1.2,
        "tokens_per_second": {"none": 10.0, "dflash": 12.0},
        "gate": {"passed": True, "reason": "the gate has no limits."},
    }


def say(store, key, stage, done, total, unit, attempt=0, **figures) -> None:
    told = Progress(
        stage=stage,
        done=done,
        total=total,
        unit=unit,
        attempt=attempt,
        rate=20.0,
        updated_at=time.time(),
        figures=figures,
    )
    store.put(key, told.model_dump_json(by_alias=True).encode())


def _leave(_number: int, _frame: FrameType | None) -> None:
    os._exit(int(ExitCode.PREEMPTED))


if __name__ == "__main__":
    try:
        main()
    except TemporaryError as error:
        Path(os.environ[TERMINATION_LOG]).write_text(str(error))
        sys.exit(int(ExitCode.TEMPORARY))
