"""`dflash status`: how far a Drafter is, from the store alone, so also while it runs elsewhere."""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import typer

from dflash import layout
from dflash.planning.kept import find_warm_up, read_spending
from dflash.planning.spending import Projection, project
from dflash.progress import Progress
from dflash.resource import Drafter
from dflash.resource.load import load_resource
from dflash.storage.location import is_local
from dflash.storage.store import Store
from jobs.cli.connect import connected, home_of
from jobs.cli.results import rows
from jobs.cli.view import amount, cost, figures, pace, remarks
from operators.observe import Outputs, committed, outputs_of, progress
from operators.observed import STAGES, Committed, Stage

FRESH_SECONDS = 30.0
"""A progress object this old is of a stage that no longer runs."""


def show_status(file: Path, *, as_json: bool) -> None:
    """Print the state of each stage."""
    drafter = load_resource(file)
    if is_local(drafter.spec.storage.uri) and not home_of(drafter, file).folder.exists():
        state = status_of(drafter, outputs_of(drafter), None)
    else:
        with connected(drafter, shared=True) as connection:
            drafter = connection.resolved(drafter)
            state = status_of(drafter, outputs_of(drafter, connection.store), connection.store)
    if as_json:
        typer.echo(orjson.dumps(state, option=orjson.OPT_INDENT_2).decode())
        return
    typer.echo(f"{state['name']}: {state['phase']}")
    for stage in state["stages"]:
        seen = stage["progress"]
        told = Progress.model_validate(seen) if seen else None
        detail = ", ".join(filter(None, [amount(told), pace(told), figures(told)])) if told else ""
        typer.echo(f"  {stage['name']:<11} {stage['state']:<8} {stage['hash']}  {detail}".rstrip())
        if told is not None and stage["state"] == "running":
            for sentence in remarks(told):
                typer.echo(f"    {sentence}")
    for sentence in state["costSentences"]:
        typer.echo(f"  {sentence}")
    if state["report"]:
        for name, value in rows(state["report"], promoted=state["promoted"]):
            typer.echo(f"  {name}: {value}")


def status_of(drafter: Drafter, outputs: Outputs, store: Store | None) -> dict[str, Any]:
    """The state as plain data: name, phase, promoted, stages (name, hash, state, progress), cost, report.

    No `store` means that none was made yet.
    """
    hashes = outputs.hashes
    done = committed(store, drafter.metadata.name, hashes) if store else Committed()
    names: dict[Stage, str] = {
        "generation": hashes.dataset,
        "training": hashes.drafter,
        "evaluation": hashes.evaluation,
    }
    stages = []
    for stage in STAGES:
        seen = progress(store, hashes, stage) if store else None
        fresh = seen is not None and time.time() - seen.updated_at < FRESH_SECONDS
        state = (
            "done" if done.has(stage) else "running" if fresh else "begun" if seen is not None else "waiting"
        )
        shown = seen.model_dump(mode="json", by_alias=True) if seen is not None else None
        stages.append({"name": stage, "hash": names[stage], "state": state, "progress": shown})
    running = next((str(s["name"]) for s in stages if s["state"] == "running"), None)
    projection = _projection(drafter, running, stages, store)
    finished = "ready" if done.promoted else "gate failed" if done.gate else "evaluated"
    return {
        "name": drafter.metadata.name,
        "phase": finished if done.evaluation else str(running or "not running"),
        "promoted": done.promoted,
        "gate": done.gate,
        "stages": stages,
        "cost": {
            **asdict(projection),
            "spent": projection.spent,
            "wasted": projection.wasted,
            "cost": projection.cost,
        },
        "costSentences": cost(projection),
        "report": store.find_json(layout.report(hashes.evaluation)) if store else None,
    }


def _projection(
    drafter: Drafter, running: str | None, stages: list[dict[str, Any]], store: Store | None
) -> Projection:
    """What was spent, and where it ends, from what the executor has counted."""
    if store is None:
        return Projection(0.0, 0.0)
    seen = next((s["progress"] for s in stages if s["name"] == running), None)
    return project(
        read_spending(store, drafter.metadata.name),
        running,
        Progress.model_validate(seen) if seen else None,
        now=time.time(),
        price=drafter.spec.tracking.gpu_hour_price,
        warm_up=find_warm_up(store, drafter.metadata.name),
    )
