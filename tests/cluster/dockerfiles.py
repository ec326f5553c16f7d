"""Builds the project's real Dockerfiles where no registry can be reached: Debian's buildah and debootstrap.

The base image is made by debootstrap and committed under the name that the Dockerfiles' FROM uses, and
kept in the cache. Needs root on Debian. Not how users build: that is `images/README.md`.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.cluster.binaries import CannotRun
from tests.cluster.images import REPOSITORY

BASE = "docker.io/library/python:3.11-slim-bookworm"
ENGINE_BASE = "docker.io/lmsysorg/sglang:v0.5.23"
ENGINE = Path("/opt/engine")
"""Where the stand-in for SGLang's own image looks for the engine's packages: mounted, not copied."""
_MOST_UNNAMED = 12
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash" / "images"
_STORAGE = [
    "--storage-driver",
    "overlay",
    "--root",
    str(_CACHE / "storage"),
    "--runroot",
    str(_CACHE / "run"),
]


def install() -> None:
    """Install buildah and debootstrap where they are missing."""
    missing = [name for name in ("buildah", "debootstrap") if not shutil.which(name)]
    if missing and not shutil.which("apt-get"):
        raise CannotRun(f"building the images needs Debian's {' and '.join(missing)}; install them")
    if missing:
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update", "-q"], ["install", "-y", "-q", "--no-install-recommends", *missing]):
            _run(["apt-get", *command], environment)


def base() -> None:
    """Make the base image, once."""
    if _buildah("images", "-q", BASE, check=False):
        return
    _CACHE.mkdir(parents=True, exist_ok=True)
    root = _CACHE / "rootfs"
    shutil.rmtree(root, ignore_errors=True)
    packages = "--include=python3,python3-venv,ca-certificates"
    _run(["debootstrap", "--variant=minbase", packages, "bookworm", str(root)])
    container = _buildah("from", "scratch")
    _buildah("add", container, str(root), "/")
    _buildah("commit", "--rm", container, BASE)
    shutil.rmtree(root)


def engine_base() -> None:
    """A stand-in for SGLang's image, once: Python that finds packages in `ENGINE` too.

    The engine's own 20 GB image comes from a registry, and none is reachable.
    """
    if _buildah("images", "-q", ENGINE_BASE, check=False):
        return
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "engine.pth")
        path.write_text(f"{ENGINE}\n")
        path.chmod(0o644)
        container = _buildah("from", "--pull-never", BASE)
        _buildah("add", container, str(path), "/usr/local/lib/python3.11/dist-packages/")
        _buildah("commit", "--rm", container, ENGINE_BASE)


def build(name: str, archive: Path, packages: Path | None = None) -> int:
    """Build images/NAME/Dockerfile as localhost/dflash-NAME:built into an archive; its size in bytes.

    packages: what to mount at `ENGINE` while it is built.
    """
    tag = f"localhost/dflash-{name}:built"
    # The registry mirrors and certificates of this machine: the base has none.
    mounts = [
        f"-v={path}:{path}:ro"
        for path in ("/etc/ssl/certs", "/etc/resolv.conf", "/etc/pip.conf")
        if Path(path).exists()
    ]
    if packages is not None:
        mounts.append(f"-v={packages}:{ENGINE}:ro")
    _buildah(
        "bud", "--layers", "--isolation", "chroot", "--network", "host", "--pull-never", *mounts,
        "-f", f"images/{name}/Dockerfile", "-t", tag, ".",
    )  # fmt: skip
    archive.unlink(missing_ok=True)
    _buildah("push", tag, f"docker-archive:{archive}:{tag}")
    # A change of our code leaves layers behind. Not all at once: the newest are the next build's cache.
    if len(_buildah("images", "-q", "--filter", "dangling=true").split()) > _MOST_UNNAMED:
        _buildah("rmi", "--prune", "--force")
    return archive.stat().st_size


def _buildah(*arguments: str, check: bool = True) -> str:
    return _run(["buildah", *_STORAGE, *arguments], check=check)


def _run(command: list[str], environment: dict[str, str] | None = None, check: bool = True) -> str:
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False, timeout=3000
    )
    if check and done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout.strip()
