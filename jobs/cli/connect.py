"""Access to a Drafter's state: its own storage, or the embedded server of a local folder.

A local folder's server belongs to one process. While `dflash run` has it, other commands reach it
through the address and key that the run leaves in a private file.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dflash.errors import ConfigurationError
from dflash.resource import Drafter
from dflash.storage.embedded import EmbeddedStore
from dflash.storage.location import StoreLocation, is_local, location_of
from dflash.storage.store import Credentials, Store
from operators.local import STORE_PATIENCE, Home

_ACCESS = "store.json"


@dataclass(frozen=True)
class Connection:
    """A reachable store, and how other processes reach it."""

    store: Store
    location: StoreLocation
    environment: Mapping[str, str]
    embedded: EmbeddedStore | None

    def resolved(self, drafter: Drafter) -> Drafter:
        """The Drafter as jobs are given it: storage at an s3:// address."""
        storage = drafter.spec.storage.model_copy(
            update={
                "uri": self.location.uri,
                "endpoint": self.location.endpoint,
                "region": self.location.region,
                "addressing_style": self.location.addressing_style,
            }
        )
        return drafter.model_copy(update={"spec": drafter.spec.model_copy(update={"storage": storage})})


def home_of(drafter: Drafter, file: Path) -> Home:
    """Where this Drafter's files on this machine are."""
    uri = drafter.spec.storage.uri
    folder = _folder(uri) if is_local(uri) else file.resolve().parent / ".dflash"
    return Home(folder, drafter.metadata.name)


@contextmanager
def connected(drafter: Drafter, *, shared: bool = False) -> Iterator[Connection]:
    """A checked connection; an embedded server is run for as long as it is open.

    `shared` uses the server of another process where there is one, rather than refusing. Raises
    ConfigurationError or TemporaryError with what is wrong with the storage.
    """
    uri = drafter.spec.storage.uri
    if not is_local(uri):
        location = location_of(drafter.spec.storage)
        store = Store.open(location, patience=STORE_PATIENCE)
        store.check()
        yield Connection(store, location, os.environ, None)
        return
    folder = _folder(uri)
    running = _attach(folder) if shared else None
    if running is not None:
        yield running
        return
    with EmbeddedStore(folder) as embedded:
        access = folder / _ACCESS
        access.touch(mode=0o600)
        access.write_text(
            json.dumps(
                {
                    "pid": os.getpid(),
                    "location": embedded.location.model_dump(mode="json"),
                    "key": embedded.credentials.access_key_id,
                    "secret": embedded.credentials.secret_access_key,
                    "environment": embedded.environment,
                }
            )
        )
        try:
            yield Connection(
                embedded.store(STORE_PATIENCE),
                embedded.location,
                {**os.environ, **embedded.environment},
                embedded,
            )
        finally:
            access.unlink(missing_ok=True)


def _folder(uri: str) -> Path:
    return Path(uri.removeprefix("file://"))


def _attach(folder: Path) -> Connection | None:
    """The server that another process runs in this folder; None where there is none."""
    try:
        told = json.loads((folder / _ACCESS).read_text())
        os.kill(int(told["pid"]), 0)
    except (FileNotFoundError, ProcessLookupError, json.JSONDecodeError):
        return None
    except PermissionError as error:
        raise ConfigurationError(f"{folder} belongs to another user; run the command as that user") from error
    location = StoreLocation.model_validate(told["location"])
    store = Store.open(location, Credentials(told["key"], told["secret"]), STORE_PATIENCE)
    return Connection(store, location, {**os.environ, **told["environment"]}, None)
