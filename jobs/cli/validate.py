"""`dflash validate`: everything that would make a run fail at once, found without running it."""

import tempfile
from pathlib import Path

import orjson
import typer

from dflash.errors import DflashError
from dflash.resource import Drafter
from dflash.resource.load import dump_resource, load_resource
from dflash.storage.location import is_local, location_of
from jobs.cli.connect import connected, home_of
from operators.owner import check_owner


def validate_file(file: Path, *, static: bool) -> None:
    """Print what was checked; raise what is wrong."""
    drafter = load_resource(file)
    if not is_local(drafter.spec.storage.uri):
        location_of(drafter.spec.storage)
    if static:
        typer.echo(f"{file}: valid (model, prompts and storage not looked at)")
        return
    from jobs.cli.preflight import Problem, preflight

    # Prompts may lie in the same store, so storage comes first.
    with connected(drafter, shared=True) as connection:
        home = home_of(drafter, file)
        wrong: list[Problem] = []
        try:
            check_owner(connection.store, drafter.metadata.name, uid_of(file, drafter))
        except DflashError as error:
            wrong.append(Problem(sentence=str(error), exit_code=int(error.exit_code)))
        with tempfile.TemporaryDirectory(prefix="dflash-validate-") as folder:
            resolved = Path(folder, "drafter.json")
            resolved.write_bytes(orjson.dumps(dump_resource(connection.resolved(drafter))))
            findings = preflight(resolved, connection.environment)
    for note in findings.notes:
        typer.echo(note)
    findings.model_copy(update={"problems": wrong + findings.problems}).raise_problems()
    typer.echo(
        f"{file}: valid; state in {home.folder if connection.location.folder else connection.location.uri}"
    )


def uid_of(file: Path, drafter: Drafter) -> str:
    """What identifies a Drafter on one machine: the path of its file and its name."""
    import hashlib

    return hashlib.sha256(f"{file.resolve()}\n{drafter.metadata.name}".encode()).hexdigest()[:32]
