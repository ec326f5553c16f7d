"""What an embedded server keeps in its folder beside the data: who holds it, its ports, its access key.

Files with the key are readable by their owner only. Not for starting anything.
"""

import fcntl
import json
import os
import secrets
import socket
import time
from pathlib import Path

from dflash.errors import ConfigurationError, TemporaryError

IDENTITIES = "identities.json"
"""The file that tells SeaweedFS who may do what."""
_SETTINGS = "server.json"
_LOCK_SECONDS = 10.0
_PORTS = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc")
_LOWEST_PORT, _HIGHEST_PORT = 20000, 32000  # below Linux's range for outgoing connections


def lock(folder: Path) -> int:
    """Take a folder for this process and the children that inherit the descriptor given back.

    ConfigurationError with the holder's process id when another has it.
    """
    path = folder / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = path.read_text().strip()
            # A server whose parent was just killed needs a moment to go.
            if time.monotonic() < until and not _is_alive(holder):
                time.sleep(0.05)
                continue
            os.close(descriptor)
            raise ConfigurationError(
                f"{folder} is in use by process {holder or 'unknown'}: wait for that run or stop it, or give "
                "spec.storage.uri another folder"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        return descriptor


def unlock(descriptor: int) -> None:
    """Let go of a folder, even if a forked child still has the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True


def server_settings(folder: Path) -> dict[str, object]:
    """Ports and access key of this folder's server: kept, unless a port was taken meanwhile."""
    path = folder / _SETTINGS
    settings: dict[str, object] = {}
    if path.exists():
        try:
            settings = json.loads(path.read_text())
        except ValueError as error:
            raise ConfigurationError(f"{path} is not JSON ({error}): delete it and run again") from None
    else:
        settings = {"accessKey": secrets.token_hex(10), "secretKey": secrets.token_urlsafe(30)}
    ports = settings.get("ports")
    if (
        not isinstance(ports, dict)
        or sorted(ports) != sorted(_PORTS)
        or not all(map(_is_free, ports.values()))
    ):
        settings["ports"] = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
    _write_private(path, settings)
    identity = {
        "name": "dflash",
        "credentials": [{"accessKey": settings["accessKey"], "secretKey": settings["secretKey"]}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    _write_private(folder / IDENTITIES, {"identities": [identity]})
    return settings


def _write_private(path: Path, value: object) -> None:
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(value, file)
    partial.replace(path)


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, drawn at random so that two servers starting at once do not meet."""
    found: set[int] = set()
    for _ in range(1000):
        port = secrets.randbelow(_HIGHEST_PORT - _LOWEST_PORT) + _LOWEST_PORT
        if _is_free(port):
            found.add(port)
        if len(found) == count:
            return sorted(found)
    raise TemporaryError(f"no {count} free ports between {_LOWEST_PORT} and {_HIGHEST_PORT} on this machine")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
