"""The embedded server as a process: locks, crashes, restarts, and the death of its parent."""

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dflash.errors import ConfigurationError, TemporaryError
from dflash.storage import embedded
from dflash.storage.embedded import EmbeddedStore
from dflash.storage.store import Credentials, Store


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    """One server for the tests that leave it running."""
    with EmbeddedStore(tmp_path_factory.mktemp("embedded") / "data") as server:
        yield server


def _gone_within(pid: int, seconds: float) -> bool:
    try:
        psutil.Process(pid).wait(seconds)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True


def test_the_data_survive_a_kill_and_a_restart_keeps_address_and_key(server: EmbeddedStore) -> None:
    store = server.store(patience=20.0).under("kept")
    for number in range(30):
        store.put(f"parts/{number}", b"%d" % number)
    etag = store.put("LATEST.json", b"1")
    before = server.location, server.credentials
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    assert _gone_within(server.pid or 0, 5) or server.pid is None
    started = time.monotonic()
    server.restart()
    assert time.monotonic() - started < 30
    assert (server.location, server.credentials) == before
    assert [int(store.get(info.key)) for info in store.list("parts/")] == [
        int(i) for i in sorted(map(str, range(30)))
    ]
    assert store.swap("LATEST.json", b"2", etag) is not None
    assert not store.create("parts/3", b"other")


def test_a_request_made_while_the_server_is_away_succeeds_after_its_restart(server: EmbeddedStore) -> None:
    store = server.store(patience=30.0)
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    restart = threading.Timer(0.5, server.restart)
    restart.start()
    assert store.create("while-away", b"1")
    restart.join()
    assert store.get("while-away") == b"1"


def test_a_server_started_by_a_thread_that_ended_lives_on(tmp_path: Path) -> None:
    server = EmbeddedStore(tmp_path / "data")
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        time.sleep(0.3)
        server.store(patience=5.0).put("a", b"1")
    finally:
        server.stop()


def test_the_named_process_is_the_one_that_listens_and_only_on_this_machine(server: EmbeddedStore) -> None:
    connections = psutil.Process(server.pid).net_connections("inet")
    listening = [one.laddr for one in connections if one.status == psutil.CONN_LISTEN]
    assert int(str(server.location.endpoint).rsplit(":", 1)[1]) in [address.port for address in listening]
    assert {address.ip for address in listening} == {"127.0.0.1"}
    assert psutil.Process(server.pid).children() == []


def test_two_servers_run_side_by_side_and_start_at_the_same_time(tmp_path: Path) -> None:
    servers = [EmbeddedStore(tmp_path / name) for name in ("one", "two")]
    threads = [threading.Thread(target=server.start) for server in servers]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for server in servers:
            server.store(patience=5.0).put("whose", server.folder.name.encode())
        assert [server.store().get("whose") for server in servers] == [b"one", b"two"]
    finally:
        for server in servers:
            server.stop()


def test_a_folder_in_use_is_refused_with_its_holder(server: EmbeddedStore) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigurationError, match=f"in use by process {os.getpid()}"):
        EmbeddedStore(server.folder).start()
    assert time.monotonic() - started < 2
    server.store(patience=5.0).put("still", b"fine")


def test_stopping_takes_seconds_leaves_no_process_and_may_be_repeated(tmp_path: Path) -> None:
    server = EmbeddedStore(tmp_path / "data")
    server.stop()
    server.start()
    server.start()
    pid = server.pid
    assert pid is not None
    started = time.monotonic()
    server.stop()
    assert time.monotonic() - started < 5
    assert not psutil.pid_exists(pid)
    assert server.pid is None
    server.stop()
    server.start()
    server.store(patience=5.0).put("a", b"1")
    server.stop()


def test_the_key_is_readable_by_its_owner_only_and_needed(server: EmbeddedStore) -> None:
    secret = server.credentials.secret_access_key
    files = [path for path in server.folder.iterdir() if path.is_file()]
    holders = [path for path in files if secret in path.read_text(errors="replace")]
    assert holders
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in holders)
    guess = Credentials(server.credentials.access_key_id, "guess")
    with pytest.raises(ConfigurationError, match="SignatureDoesNotMatch"):
        Store.open(server.location, guess).check()


def test_a_later_run_has_the_same_key_and_data_and_replaces_a_port_taken_meanwhile(tmp_path: Path) -> None:
    with EmbeddedStore(tmp_path / "data") as server:
        server.store(patience=5.0).put("a", b"1")
        key = server.credentials
        port = int(str(server.location.endpoint).rsplit(":", 1)[1])
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", port))
        other.listen()
        with EmbeddedStore(tmp_path / "data") as server:
            assert server.credentials == key
            assert server.store(patience=5.0).get("a") == b"1"
            assert not str(server.location.endpoint).endswith(f":{port}")


_PARENT = """
import sys, time
from pathlib import Path
from dflash.storage.embedded import EmbeddedStore
server = EmbeddedStore(Path(sys.argv[1]))
server.start()
server.store().put("from-the-first", b"1")
print(server.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_parent_leaves_no_server_and_its_folder_is_free_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, str(folder)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    with pytest.raises(ConfigurationError, match=f"in use by process {parent.pid}"):
        EmbeddedStore(folder).start()
    parent.kill()
    parent.wait()
    with EmbeddedStore(folder) as server:
        assert not psutil.pid_exists(pid)
        assert server.store(patience=5.0).get("from-the-first") == b"1"


def test_a_server_that_ends_while_starting_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weed = tmp_path / "weed"
    weed.write_text("#!/bin/sh\necho 'cannot do this' >&2\nexit 1\n")
    weed.chmod(0o755)
    monkeypatch.setattr(embedded, "_find_weed", lambda: str(weed))
    server = EmbeddedStore(tmp_path / "data")
    with pytest.raises(TemporaryError, match=r"cannot do this.*server\.log"):
        server.start()
    monkeypatch.undo()
    with server:
        server.store(patience=5.0).put("a", b"1")


def test_a_server_that_does_not_answer_is_told_within_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weed = tmp_path / "weed"
    weed.write_text("#!/bin/sh\nexec sleep 60\n")
    weed.chmod(0o755)
    monkeypatch.setattr(embedded, "_find_weed", lambda: str(weed))
    started = time.monotonic()
    with pytest.raises(TemporaryError, match="did not answer within 1 s"):
        EmbeddedStore(tmp_path / "data").start(deadline=1.0)
    assert time.monotonic() - started < 6


def test_a_missing_server_program_is_told_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded.shutil, "which", lambda *_, **__: None)
    with pytest.raises(ConfigurationError, match=r"dflash-suite\[local\]"):
        EmbeddedStore(tmp_path / "data").start()


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="cannot make the folder"):
        EmbeddedStore(tmp_path / "file" / "data").start()


def test_a_full_disk_is_told_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "free_bytes", lambda folder: 10 << 20)
    with pytest.raises(TemporaryError, match=r"^disk full: 10 MiB are left"):
        EmbeddedStore(tmp_path / "data").start()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which needs root")
def test_a_disk_that_fills_up_is_told_and_what_was_written_stays(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=330m", "tmpfs", str(small)], check=False, capture_output=True
    )
    if mount.returncode != 0:
        pytest.skip(f"cannot mount here: {mount.stderr.decode().strip()}")
    server = EmbeddedStore(small / "data")
    try:
        server.start()
        store = server.store(patience=3.0)
        written = 0

        def fill() -> None:
            nonlocal written
            while written < 100:
                store.put(f"parts/{written:03d}", os.urandom(8 << 20))
                written += 1

        with pytest.raises(TemporaryError, match=rf"^disk full: put of .*under {server.folder}"):
            fill()
        assert [info.key for info in store.list("parts/")][:written] == [
            f"parts/{n:03d}" for n in range(written)
        ]
        assert len(store.get("parts/000")) == 8 << 20
    finally:
        server.stop()
        subprocess.run(["umount", "-l", str(small)], check=True)
