"""`dflash run`: check, then work until the Drafter is true, showing how far it is, then the results."""

import signal
from pathlib import Path

import orjson
import typer

from dflash import layout
from dflash.resource import Drafter
from dflash.resource.load import dump_resource, load_resource
from dflash.storage.commit import fetch_commit, read_commit
from dflash.storage.probe import probe
from dflash.storage.store import Store
from jobs.cli.connect import Connection, connected, home_of
from jobs.cli.preflight import preflight
from jobs.cli.results import print_results
from jobs.cli.validate import look_at_paths, uid_of
from jobs.cli.view import view
from operators.local import Command, Home, Local, Outcome
from operators.observe import Outputs, committed, outputs_of
from operators.owner import claim


def run_file(file: Path, *, plain: bool, take_over: bool, command: Command | None = None) -> int:
    """Run a Drafter file; the exit code of the process. `command` stands in for the jobs in tests."""
    try:
        return _run(load_resource(file), file, plain=plain, take_over=take_over, command=command)
    except KeyboardInterrupt:  # once jobs run, signals are the executor's
        typer.echo("stopped before anything was started", err=True)
        return 128 + signal.SIGINT


def _run(drafter: Drafter, file: Path, *, plain: bool, take_over: bool, command: Command | None) -> int:
    look_at_paths(drafter)
    home = home_of(drafter, file)
    name = drafter.metadata.name
    with home.locked(), connected(drafter) as connection:
        store = connection.store
        for sentence in probe(store).missing if connection.embedded is None else ():
            typer.echo(f"note: {connection.location.server}: {sentence}", err=True)
        claim(store, name, uid_of(file, drafter), str(file.resolve()), take_over=take_over)
        drafter = connection.resolved(drafter)
        outputs = outputs_of(drafter, store)
        if not drafter.spec.suspend and not committed(store, name, outputs.hashes).evaluation:
            check(drafter, home, connection)
        with view(name, plain=plain) as show:
            outcome = Local(
                drafter,
                outputs,
                store,
                home,
                environment=connection.environment,
                show=show,
                embedded=connection.embedded,
                command=command,
            ).run()
        _tell(outcome, home, store, outputs)
    return outcome.exit_code


def check(drafter: Drafter, home: Home, connection: Connection) -> None:
    """Preflight of a resolved Drafter; raises what is wrong."""
    home.resource.parent.mkdir(parents=True, exist_ok=True)
    home.resource.write_bytes(orjson.dumps(dump_resource(drafter)))
    findings = preflight(home.resource, connection.environment)
    for note in findings.notes:
        typer.echo(note, err=True)
    findings.raise_problems()


def _tell(outcome: Outcome, home: Home, store: Store, outputs: Outputs) -> None:
    """The last words: results, or where it stands and what to do."""
    shown = outcome.snapshot
    if shown is None:
        typer.echo("stopped before anything was started", err=True)
        return
    if shown.committed.evaluation and outcome.exit_code == 0:
        if not outcome.worked:
            typer.echo("up to date")
        report = _fetch_report(store, outputs.hashes.evaluation, home)
        export = _fetch_export(store, outputs.hashes.drafter, home)
        print_results(report, export, promoted=shown.committed.promoted)
        return
    if outcome.exit_code in (130, 143):
        typer.echo("stopped; what is committed is kept, run again to go on", err=True)
    elif shown.summary.phase == "Suspended":
        typer.echo("suspended (spec.suspend is true); nothing runs")
    else:
        typer.echo(f"dflash: {shown.summary.message}", err=True)
        typer.echo(f"logs: {shown.logs}", err=True)


def _fetch_report(store: Store, evaluation: str, home: Home) -> Path:
    """Copy the evaluation's files here; report.json last, so that it never stands alone."""
    home.report.mkdir(parents=True, exist_ok=True)
    prefix = layout.evaluation(evaluation)
    keys = [info.key for info in store.list(prefix)]
    for key in sorted(keys, key=lambda k: k == layout.report(evaluation)):
        if "/" not in key.removeprefix(prefix) and not key.endswith("progress.json"):
            partial = home.report / ".partial"
            partial.write_bytes(store.get(key))
            partial.replace(home.report / key.removeprefix(prefix))
    return home.report / "report.json"


def _fetch_export(store: Store, drafter: str, home: Home) -> Path | None:
    """Copy the trained drafter here, unless this one is here already; None when the store has none."""
    commit = read_commit(store, layout.export(drafter))
    if commit is None:
        return None
    mark = home.export / ".drafter"
    if not mark.exists() or mark.read_text() != drafter:
        mark.unlink(missing_ok=True)
        fetch_commit(store, layout.export(drafter), home.export)
        mark.write_text(drafter)
    return home.export
