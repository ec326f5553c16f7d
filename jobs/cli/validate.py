"""`dflash validate`: everything that would make a run fail at once, found without running it."""

import hashlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import orjson
import typer

from dflash.errors import ConfigurationError, DflashError
from dflash.resource import Drafter
from dflash.resource.load import dump_resource, load_resource
from dflash.storage.location import is_local, location_of
from jobs.cli.connect import connected, home_of
from jobs.cli.preflight import Problem, preflight
from operators.owner import check_owner


def validate_file(file: Path, *, static: bool) -> None:
    """Print what was checked; raise what is wrong."""
    drafter = load_resource(file)
    local = is_local(drafter.spec.storage.uri)
    if not local:
        location_of(drafter.spec.storage)
    if static:
        typer.echo(f"{file}: valid (model, prompts and storage not looked at)")
        return
    look_at_paths(drafter)
    folder = home_of(drafter, file).folder
    if local and not folder.exists():
        _check_can_be_made(folder)
        _judge(drafter, os.environ, [])
    else:
        with connected(drafter, shared=True) as connection:
            wrong = []
            try:
                check_owner(connection.store, drafter.metadata.name, uid_of(file, drafter))
            except DflashError as error:
                wrong.append(Problem(sentence=str(error), exit_code=int(error.exit_code)))
            _judge(connection.resolved(drafter), connection.environment, wrong)
    typer.echo(f"{file}: valid; state in {folder if local else drafter.spec.storage.uri}")


def look_at_paths(drafter: Drafter) -> None:
    """What can be seen before the storage is opened; ConfigurationError when it is wrong."""
    spec = drafter.spec
    if is_local(spec.storage.uri) and spec.prompts.uri.startswith("s3://"):
        raise ConfigurationError(
            f"spec.prompts.uri: {spec.prompts.uri} would be read from the server of spec.storage, which is a "
            "local folder; give a local file of prompts, or an s3:// storage"
        )
    folder = Path(spec.target.model)
    if not folder.is_absolute():
        return  # a hub id
    if not folder.is_dir():
        raise ConfigurationError(
            f"target.model: {folder} is not a folder; give a hub id or the path of a model folder"
        )
    if not (folder / "config.json").is_file():
        raise ConfigurationError(
            f"target.model: {folder} has no config.json; give the folder that holds config.json and weights"
        )


def uid_of(file: Path, drafter: Drafter) -> str:
    """What identifies a Drafter on one machine: the path of its file and its name."""
    return hashlib.sha256(f"{file.resolve()}\n{drafter.metadata.name}".encode()).hexdigest()[:32]


def _judge(drafter: Drafter, environment: Mapping[str, str], wrong: list[Problem]) -> None:
    with tempfile.TemporaryDirectory(prefix="dflash-validate-") as folder:
        resource = Path(folder, "drafter.json")
        resource.write_bytes(orjson.dumps(dump_resource(drafter)))
        findings = preflight(resource, environment)
    for note in findings.notes:
        typer.echo(note)
    findings.model_copy(update={"problems": wrong + findings.problems}).raise_problems()


def _check_can_be_made(folder: Path) -> None:
    """A state folder that is not there yet is left for the run to make."""
    parent = next(p for p in folder.parents if p.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"spec.storage.uri: {folder} cannot be made in {parent}, which is read-only; name another folder"
        )
