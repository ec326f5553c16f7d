"""The programs a throwaway cluster is made of: built once from Go modules, or installed from Debian.

`build/` has one Go module per group of programs that can share dependencies. What is built goes to
the user's cache, under the hash of those modules, so that a second checkout starts at once. Not
for starting anything: that is `tests.cluster.cluster`.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

KUBERNETES = "v1.34.4"
MODULES = Path(__file__).parent / "build"
BUILDS = {
    "kubernetes": {
        name: f"k8s.io/kubernetes/cmd/{name}"
        for name in (
            "kube-apiserver",
            "kube-controller-manager",
            "kube-scheduler",
            "kubelet",
            "kube-proxy",
            "kubectl",
        )
    },
    "etcd-helm": {"etcd": "go.etcd.io/etcd/server/v3", "helm": "helm.sh/helm/v3/cmd/helm"},
    "coredns": {"coredns": "github.com/coredns/coredns"},
}
# Flux, for the GitOps loop of the soak tests: the newest that Go 1.26 builds.
FLUX_MODULES = Path(__file__).parent / "flux"
FLUX_BUILDS = {
    "source": {"source-controller": "github.com/fluxcd/source-controller"},
    "kustomize": {"kustomize-controller": "github.com/fluxcd/kustomize-controller"},
}
# What the programs' own build scripts put in; without it Helm takes the cluster for version 1.20.
_STAMPS = " ".join(
    [
        f"-X {package}.git{field}={value}"
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
        for field, value in (("Version", KUBERNETES), ("Major", "1"), ("Minor", "34"))
    ]
    + [
        f"-X helm.sh/helm/v3/pkg/{package}.k8sVersion{field}={value}"
        for package in ("chartutil", "lint/rules")
        for field, value in (("Major", "1"), ("Minor", "34"))
    ]
)
_DEBIAN = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "nft": "nftables",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "busybox": "busybox-static",
    "openssl": "openssl",
    "gcc": "gcc",
}
CNI = Path("/usr/lib/cni")
_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # bridges and rules; mounts and namespaces

log = logging.getLogger("tests.cluster")


class CannotRun(Exception):
    """This machine cannot run the throwaway cluster; the text says why and what to do instead."""


def require_machine() -> None:
    """Raise `CannotRun` where a throwaway cluster is impossible."""
    advice = "set DFLASH_TEST_KUBECONFIG to the kubeconfig of a cluster instead"
    if sys.platform != "linux":
        raise CannotRun(f"the throwaway cluster needs Linux and this is {sys.platform}; {advice}")
    if os.geteuid() != 0:
        raise CannotRun(f"the throwaway cluster needs root; run as root, or {advice}")
    missing = [name for name, bit in _CAPABILITIES.items() if not _effective_capabilities() >> bit & 1]
    if missing:
        raise CannotRun(
            f"the throwaway cluster needs {' and '.join(missing)}, which this root lacks; {advice}"
        )
    if not shutil.which("go"):
        raise CannotRun(
            f"the throwaway cluster is built with Go, and there is none; install Go 1.24 or {advice}"
        )


def _effective_capabilities() -> int:
    """This process's capabilities: root in a container often lacks most of them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("CapEff:")), 16)


def cache(modules: Path = MODULES) -> Path:
    """Where built programs are kept: one folder for each state of the Go modules."""
    digest = hashlib.sha256(_STAMPS.encode())
    for path in sorted(modules.glob("*/*")):
        digest.update(path.relative_to(modules).as_posix().encode() + path.read_bytes())
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "dflash" / "cluster" / digest.hexdigest()[:16]


def built() -> Path:
    """Folder of the built programs, building those that are missing (ten minutes on two cores)."""
    return _all_built(MODULES, BUILDS)


def flux() -> tuple[Path, list[Path]]:
    """Folder of Flux's controllers, and the files with their definitions; builds what is missing."""
    folder = _all_built(FLUX_MODULES, FLUX_BUILDS)
    definitions: list[Path] = []
    for module, programs in FLUX_BUILDS.items():
        for package in programs.values():
            list_folder = ["go", "list", "-mod=mod", "-m", "-f", "{{.Dir}}", package]
            done = subprocess.run(
                list_folder, cwd=FLUX_MODULES / module, capture_output=True, text=True, check=True
            )
            definitions += sorted(Path(done.stdout.strip(), "config", "crd", "bases").glob("*.yaml"))
    return folder, definitions


def _all_built(modules: Path, builds: dict[str, dict[str, str]]) -> Path:
    require_machine()
    home = cache(modules)
    folder = home / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for module, programs in builds.items():
            for name, package in programs.items():
                if not (folder / name).exists():
                    _build(modules / module, package, folder / name)
    return folder


def _build(module: Path, package: str, program: Path) -> None:
    log.info("building %s (once; the result is kept in %s)", program.name, program.parent)
    partial = program.with_suffix(".partial")
    command = ["go", "build", "-trimpath", "-buildvcs=false", "-ldflags", f"-s -w {_STAMPS}"]
    environment = os.environ | {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOFLAGS": ""}
    done = subprocess.run(
        ["nice", "-n", "19", *command, "-o", str(partial), package],
        cwd=module,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CannotRun(f"building {program.name} in {module} failed:\n{done.stderr[-3000:]}")
    partial.rename(program)


def install_system_packages() -> None:
    """Install what comes from Debian and is missing here."""
    require_machine()
    missing = {package for program, package in _DEBIAN.items() if not shutil.which(program)}
    if not (CNI / "bridge").exists():
        missing.add("containernetworking-plugins")
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise CannotRun(
            f"these programs are missing and this is no Debian: {', '.join(sorted(missing))}; install them"
        )
    log.info("installing %s", ", ".join(sorted(missing)))
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *sorted(missing)]
    for command in (["apt-get", "update", "-q"], install):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotRun(f"`{' '.join(command)}` failed:\n{(done.stdout + done.stderr)[-2000:]}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    install_system_packages()
    print(built())
