"""A GitOps loop on this machine: a Git repository over HTTP on loopback, and Flux's controllers watching it.

Flux's two controllers run as processes beside the cluster's own, as its administrator. Not how users
install Flux.
"""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from dflash.processes import dying_with_parent
from tests.cluster import binaries
from tests.cluster.cluster import Cluster

_NAME = "declared.git"
_SOURCE_PORT, _METRICS_PORT = 19090, 19091


class Repository:
    """A repository with one branch, `main`, served read-only."""

    def __init__(self, folder: Path) -> None:
        self._bare, self._clone = folder / _NAME, folder / "clone"
        _git("init", "--quiet", "--bare", "--initial-branch=main", str(self._bare))
        _git("init", "--quiet", "--initial-branch=main", str(self._clone))
        handler = type("Handler", (_Handler,), {"folder": folder})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/{_NAME}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="git", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit(self, message: str, files: dict[str, str]) -> str:
        """Write files, commit and push; the commit's name."""
        for name, text in files.items():
            (self._clone / name).write_text(text)
        who = ("-c", "user.name=test", "-c", "user.email=test@example.org")
        _git("-C", str(self._clone), "add", "--all")
        _git("-C", str(self._clone), *who, "commit", "--quiet", "-m", message)
        _git("-C", str(self._clone), "push", "--quiet", str(self._bare), "main")
        return _git("-C", str(self._clone), "rev-parse", "HEAD").strip()


class _Handler(BaseHTTPRequestHandler):
    """`git http-backend` behind its CGI interface."""

    folder: Path

    def do_GET(self) -> None:
        self._serve(b"")

    def do_POST(self) -> None:
        self._serve(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def log_message(self, *_: Any) -> None:
        return

    def _serve(self, body: bytes) -> None:
        path, _, query = self.path.partition("?")
        environment = os.environ | {
            "GIT_PROJECT_ROOT": str(self.folder),
            "GIT_HTTP_EXPORT_ALL": "1",
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
        }
        done = subprocess.run(
            ["git", "http-backend"], input=body, env=environment, capture_output=True, check=True
        )
        head, _, answer = done.stdout.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        self.send_response(int(headers.pop("Status", "200").split()[0]))
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


@contextmanager
def flux(cluster: Cluster, folder: Path, namespace: str) -> Iterator[None]:
    """Flux's definitions, and its source and kustomize controllers for one namespace while this lasts."""
    programs, definitions = binaries.flux()
    for path in definitions:
        cluster.kubectl("apply", "--server-side", "-f", str(path))
    storage = f"127.0.0.1:{_SOURCE_PORT}"
    own: dict[str, list[str]] = {
        "source-controller": [
            f"--storage-path={folder}", f"--storage-addr={storage}", f"--storage-adv-addr={storage}",
        ],
        "kustomize-controller": [],
    }  # fmt: skip
    environment = os.environ | {"KUBECONFIG": str(cluster.kubeconfig), "RUNTIME_NAMESPACE": namespace}
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, (name, more) in enumerate(own.items()):
            metrics, health = (f"127.0.0.1:{_METRICS_PORT + 2 * number + i}" for i in range(2))
            command = [str(programs / name), "--watch-all-namespaces=false", "--events-addr=", *more]
            command += [f"--metrics-addr={metrics}", f"--health-addr={health}"]
            with (folder / f"{name}.log").open("wb") as log:
                started.append(
                    subprocess.Popen(dying_with_parent(command), env=environment, stdout=log, stderr=log)
                )
        yield
    finally:
        for process in started:
            process.kill()
            process.wait(timeout=30)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout
