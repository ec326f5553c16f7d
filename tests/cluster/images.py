"""Container images for the throwaway cluster, made without a registry or a build tool.

Each is a docker-archive tar of one layer. The job image is an empty root on which pods mount this
machine's own programs and Python environment, so that no 6 GB image is built to run a test; the
images that users get are built from `images/` in tests of their own.
"""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

REGISTRY = "localhost"
PAUSE = f"{REGISTRY}/pause:test"
BUSYBOX = f"{REGISTRY}/busybox:test"
HOST_PYTHON = f"{REGISTRY}/dflash-host-python:test"
REPOSITORY = Path(__file__).parents[2]

_USERS = [("root", 0), ("job", 1000), ("nonroot", 65532)]

_PAUSE_SOURCE = r"""
#include <signal.h>
#include <unistd.h>
static void stop(int s) { (void)s; _exit(0); }
static void reap(int s) { (void)s; }
int main(void) {
  signal(SIGINT, stop); signal(SIGTERM, stop); signal(SIGCHLD, reap);
  for (;;) pause();
}
"""


def pause(folder: Path) -> Path:
    """The image that holds a pod's namespaces open."""
    with tempfile.TemporaryDirectory() as scratch:
        source, program = Path(scratch, "pause.c"), Path(scratch, "pause")
        source.write_text(_PAUSE_SOURCE)
        subprocess.run(
            ["gcc", "-Os", "-static", "-o", str(program), str(source)], check=True, capture_output=True
        )
        return _archive(folder, PAUSE, {"pause": program.read_bytes()}, entrypoint=["/pause"])


def busybox(folder: Path) -> Path:
    """A shell and small tools."""
    path = shutil.which("busybox")
    assert path, "busybox is installed with the system packages"
    tools = {
        f"bin/{name}": "busybox"
        for name in (
            "sh",
            "sleep",
            "cat",
            "echo",
            "nslookup",
            "wget",
            "nc",
            "true",
            "false",
            "dd",
            "tail",
            "head",
        )
    }
    return _archive(
        folder, BUSYBOX, {"bin/busybox": Path(path).read_bytes()}, links=tools, entrypoint=["/bin/sh"]
    )


def host_python(folder: Path) -> Path:
    """A root without programs; `host_volumes` gives it this machine's."""
    links = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
    files = {
        "etc/passwd": "".join(f"{name}:x:{uid}:{uid}::/tmp:/bin/sh\n" for name, uid in _USERS).encode(),
        "etc/group": "".join(f"{name}:x:{uid}:\n" for name, uid in _USERS).encode(),
        "etc/nsswitch.conf": b"hosts: files dns\n",
    }
    environment = [
        f"PATH={sys.prefix}/bin:/usr/bin:/bin",
        f"PYTHONPATH={REPOSITORY}",
        "PYTHONDONTWRITEBYTECODE=1",
    ]
    return _archive(
        folder, HOST_PYTHON, files, links=links, directories=host_paths(), environment=environment
    )


def host_paths() -> list[str]:
    """Folders of this machine that a pod needs to run our programs with the tests' own Python."""
    paths = {"/usr", sys.base_prefix, sys.prefix, str(REPOSITORY)}
    return sorted(p for p in paths if not any(p != q and Path(p).is_relative_to(q) for q in paths))


def host_volumes(read_only: bool = True) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Pod volumes and container mounts of `host_paths`, at the same paths as here."""
    names = {path: f"host-{i}" for i, path in enumerate(host_paths())}
    volumes: list[dict[str, object]] = [
        {"name": n, "hostPath": {"path": p, "type": "Directory"}} for p, n in names.items()
    ]
    mounts: list[dict[str, object]] = [
        {"name": n, "mountPath": p, "readOnly": read_only} for p, n in names.items()
    ]
    return volumes, mounts


def _archive(
    folder: Path,
    name: str,
    files: dict[str, bytes],
    *,
    links: dict[str, str] | None = None,
    directories: list[str] | None = None,
    entrypoint: list[str] | None = None,
    environment: list[str] | None = None,
) -> Path:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        made: set[str] = set()

        def parents(path: str) -> None:
            for parent in reversed(Path(path).parents):
                directory(str(parent))

        def directory(path: str, mode: int = 0o755) -> None:
            if path in (".", "/") or path in made:
                return
            made.add(path)
            entry = tarfile.TarInfo(path)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)

        for path in ["tmp", "proc", "sys", "dev", "etc", "var", *[d.lstrip("/") for d in directories or []]]:
            parents(path)
            directory(path, 0o1777 if path == "tmp" else 0o755)
        for path, data in files.items():
            parents(path)
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
        for path, target in (links or {}).items():
            parents(path)
            entry = tarfile.TarInfo(path)
            entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, target, 0o777
            tar.addfile(entry)
    data = layer.getvalue()
    config = json.dumps(
        {
            "architecture": {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine],
            "os": "linux",
            "config": {"Entrypoint": entrypoint or [], "Env": environment or ["PATH=/bin:/usr/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(data).hexdigest()}"]},
        }
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [name], "Layers": ["layer.tar"]}]).encode()
    archive = folder / f"{name.rpartition('/')[2].replace(':', '-')}.tar"
    with tarfile.open(archive, "w") as tar:
        for path, content in ((config_name, config), ("layer.tar", data), ("manifest.json", manifest)):
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return archive
