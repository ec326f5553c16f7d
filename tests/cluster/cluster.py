"""A throwaway Kubernetes on this machine: real API server, kubelet, containers and DNS, without Docker.

One at a time per machine, under one root folder, found again by that folder's path: whatever a
killed predecessor left (processes, mounts, cgroups, the bridge, the proxy's nftables) is cleared
before a start and after a stop, and nothing else is touched. Not for production, and not needed
where DFLASH_TEST_KUBECONFIG names another cluster.

    with Cluster() as cluster:
        cluster.kubectl("get", "nodes")
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from tests.cluster import binaries, images, pki

ROOT = Path("/var/lib/dflash-test-cluster")
BRIDGE = "dflash0"
HOST = "10.244.0.1"  # the bridge's address: API server, kubelet and DNS as pods see them
PODS = "10.244.0.0/16"
SERVICES = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
DNS_SERVICE = "10.96.0.10"
API_PORT = 16443
NODE = "dflash-test"
CGROUP = "dflash-test"
CNI_NETWORK = "dflash-test"
_PORTS = {
    "etcd": 12379,
    "etcd-peer": 12380,
    "controller": 20257,
    "scheduler": 20259,
    "kubelet": 20250,
    "dns": 10053,
}

log = logging.getLogger("tests.cluster")


class Cluster:
    """The throwaway cluster; `control_plane_only` leaves out the node (no pod ever starts)."""

    throwaway = True

    def __init__(self, control_plane_only: bool = False) -> None:
        self.control_plane_only = control_plane_only
        self.kubeconfig = ROOT / "pki" / "admin.conf"
        self._bin = binaries.built()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lock: IO[str] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start everything; returns when the API server answers and the node is Ready (seconds)."""
        binaries.install_system_packages()
        self._lock = _lock()
        clear()
        for folder in ("logs", "pki", "etcd", "cni", "kubelet", "containerd", "images", "kubelet-plugins"):
            (ROOT / folder).mkdir(parents=True)
        (ROOT / "ip_forward").write_text(Path("/proc/sys/net/ipv4/ip_forward").read_text())
        _make_bridge()
        pki.create(ROOT / "pki", f"https://{HOST}:{API_PORT}", [API_SERVICE, HOST, "127.0.0.1"], NODE)
        self.start_etcd()
        self.start_api_server()
        self.start_controllers()
        if not self.control_plane_only:
            self._start_node()

    def stop(self) -> None:
        """Stop everything and leave nothing behind."""
        clear()
        for process in self._processes.values():
            process.wait(timeout=30)
        self._processes.clear()
        if self._lock:
            self._lock.close()
            self._lock = None

    def start_etcd(self) -> None:
        """Start etcd."""
        url, peer = f"http://127.0.0.1:{_PORTS['etcd']}", f"http://127.0.0.1:{_PORTS['etcd-peer']}"
        self._run(
            "etcd", "--name=test", f"--data-dir={ROOT}/etcd/data", f"--listen-client-urls={url}",
            f"--advertise-client-urls={url}", f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=test={peer}",
            "--unsafe-no-fsync", "--log-level=warn",
        )  # fmt: skip

    def start_api_server(self) -> None:
        """Start the API server and wait until it is ready."""
        keys = ROOT / "pki"
        self._run(
            "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{_PORTS['etcd']}",
            f"--secure-port={API_PORT}",
            f"--bind-address={HOST}", f"--advertise-address={HOST}", f"--service-cluster-ip-range={SERVICES}",
            "--authorization-mode=Node,RBAC", "--allow-privileged=true",
            "--kubelet-preferred-address-types=InternalIP", "--enable-admission-plugins=NodeRestriction",
            f"--client-ca-file={keys}/ca.crt", f"--tls-cert-file={keys}/server.crt",
            f"--tls-private-key-file={keys}/server.key", f"--kubelet-client-certificate={keys}/admin.crt",
            f"--kubelet-client-key={keys}/admin.key", f"--service-account-key-file={keys}/sa.pub",
            f"--service-account-signing-key-file={keys}/sa.key",
            "--service-account-issuer=https://kubernetes.default.svc",
        )  # fmt: skip
        self._wait("the API server", self._api_ready, seconds=120)

    def start_controllers(self) -> None:
        """Start the controller manager and the scheduler."""
        keys, admin = ROOT / "pki", self.kubeconfig
        self._run(
            "kube-controller-manager", f"--kubeconfig={admin}", f"--secure-port={_PORTS['controller']}",
            "--bind-address=127.0.0.1", f"--cert-dir={keys}/controller", "--leader-elect=false",
            "--use-service-account-credentials", f"--root-ca-file={keys}/ca.crt",
            f"--service-account-private-key-file={keys}/sa.key", "--controllers=*",
            f"--cluster-signing-cert-file={keys}/ca.crt", f"--cluster-signing-key-file={keys}/ca.key",
        )  # fmt: skip
        self._run(
            "kube-scheduler", f"--kubeconfig={admin}", f"--secure-port={_PORTS['scheduler']}",
            "--bind-address=127.0.0.1", f"--cert-dir={keys}/scheduler", "--leader-elect=false",
        )  # fmt: skip

    def stop_process(self, name: str) -> None:
        """Kill one of the cluster's programs, such as `kube-apiserver`, for failure tests."""
        process = self._processes.pop(name)
        process.kill()
        process.wait(timeout=30)

    def _start_node(self) -> None:
        _write_node_configuration()
        _make_cgroup()
        self._run("containerd", f"--config={ROOT}/containerd/config.toml", program="containerd")
        socket = ROOT / "containerd" / "containerd.sock"
        self._wait(
            "containerd", lambda: socket.exists() and self.ctr("version", check=False) == 0, seconds=30
        )
        for image in (images.pause(ROOT / "images"), images.busybox(ROOT / "images")):
            self.import_image(image)
        self._run(
            "kubelet", f"--config={ROOT}/kubelet.yaml", f"--kubeconfig={ROOT}/pki/node.conf",
            f"--root-dir={ROOT}/kubelet", f"--cert-dir={ROOT}/pki/kubelet", f"--hostname-override={NODE}",
            f"--node-ip={HOST}",
        )  # fmt: skip
        self._run("kube-proxy", f"--config={ROOT}/proxy.yaml", f"--hostname-override={NODE}")
        self._run("coredns", f"-conf={ROOT}/Corefile", "-quiet")
        self.apply(_DNS_OBJECTS)
        ready = "jsonpath={.items[*].status.conditions[?(@.type=='Ready')].status}"
        self._wait(
            "the node", lambda: self.kubectl("get", "nodes", "-o", ready, check=False) == "True", seconds=60
        )

    def _run(self, name: str, *arguments: str, program: str | None = None) -> None:
        path = program or str(self._bin / name)
        output = (ROOT / "logs" / f"{name}.log").open("ab")
        # NOTIFY_SOCKET and the like of the caller are no business of a daemon of ours.
        environment = {"PATH": os.environ["PATH"], "HOME": str(ROOT)}
        self._processes[name] = subprocess.Popen(
            [path, *arguments],
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
            cwd=ROOT,
        )
        output.close()

    def _wait(self, what: str, ready: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            dead = [name for name, process in self._processes.items() if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                why = f"{dead[0]} ended" if dead else f"not ready within {seconds:.0f} s"
                name = dead[0] if dead else what
                tails = "".join(
                    f"\n--- {p.name}\n{p.read_text()[-1500:]}" for p in (ROOT / "logs").glob("*.log")
                )
                raise RuntimeError(f"the test cluster's {name} did not start ({why}); logs:{tails}")
            time.sleep(0.2)

    def _api_ready(self) -> bool:
        context = ssl.create_default_context(cafile=str(ROOT / "pki" / "ca.crt"))
        context.load_cert_chain(ROOT / "pki" / "admin.crt", ROOT / "pki" / "admin.key")
        try:
            with urllib.request.urlopen(
                f"https://{HOST}:{API_PORT}/readyz", context=context, timeout=5
            ) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    # -- use ---------------------------------------------------------------------------------

    @property
    def helm_path(self) -> str:
        """Path of the helm that was built."""
        return str(self._bin / "helm")

    @property
    def kubectl_path(self) -> str:
        """Path of the kubectl that was built."""
        return str(self._bin / "kubectl")

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout: float = 120
    ) -> str:
        """Run kubectl as administrator; returns what it printed."""
        return _run_client([self.kubectl_path, *arguments], self.kubeconfig, stdin, check, timeout)

    def helm(self, *arguments: str, check: bool = True, timeout: float = 400) -> str:
        """Run helm as administrator; returns what it printed."""
        return _run_client([self.helm_path, *arguments], self.kubeconfig, None, check, timeout)

    def apply(self, *objects: dict[str, object] | list[dict[str, object]]) -> None:
        """`kubectl apply` of plain objects."""
        items = [o for entry in objects for o in (entry if isinstance(entry, list) else [entry])]
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items})
        self.kubectl("apply", "-f", "-", stdin=text)

    def establish_crds(self, folder: Path) -> None:
        """Apply the CRDs of a folder and wait until they are served."""
        self.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(folder))
        # `kubectl wait` fails on a CRD that has no conditions yet, so the state is read instead.
        state = "jsonpath={.items[*].status.conditions[?(@.type=='Established')].status}"
        deadline = time.monotonic() + 30
        while set(self.kubectl("get", "crd", "-o", state).split()) != {"True"}:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the CRDs in {folder} were not established within 30 s")
            time.sleep(0.2)

    def ctr(self, *arguments: str, check: bool = True) -> int:
        """Run containerd's client in the kubelet's namespace; returns its exit code."""
        command = ["ctr", "-a", str(ROOT / "containerd" / "containerd.sock"), "-n", "k8s.io", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        if check and done.returncode:
            raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
        return done.returncode

    def import_image(self, archive: Path) -> None:
        """Make an image archive (docker-archive tar) known to the node."""
        self.ctr("images", "import", str(archive))


class ExistingCluster(Cluster):
    """A cluster that somebody else runs, by its kubeconfig. Nothing on this machine is started or cleared."""

    throwaway = False

    def __init__(self, kubeconfig: Path) -> None:
        self.kubeconfig = kubeconfig
        self._processes = {}
        self._lock = None

    @property
    def helm_path(self) -> str:
        """helm of the PATH."""
        return "helm"

    @property
    def kubectl_path(self) -> str:
        """kubectl of the PATH."""
        return "kubectl"

    def start(self) -> None:
        """It runs already."""

    def stop(self) -> None:
        """It goes on."""


def _run_client(command: list[str], kubeconfig: Path, stdin: str | None, check: bool, timeout: float) -> str:
    environment = os.environ | {"KUBECONFIG": str(kubeconfig)}
    done = subprocess.run(
        command, input=stdin, env=environment, capture_output=True, text=True, check=False, timeout=timeout
    )
    if check and done.returncode:
        shown = " ".join([Path(command[0]).name, *command[1:]])
        raise RuntimeError(f"`{shown}` ended with {done.returncode}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _lock() -> IO[str]:
    ROOT.parent.mkdir(parents=True, exist_ok=True)
    lock = ROOT.with_suffix(".lock").open("w")
    deadline = time.monotonic() + 600
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                lock.close()
                raise RuntimeError(f"another test cluster has held {ROOT}.lock for 10 minutes") from None
            time.sleep(1)
        else:
            return lock


# -- configuration ---------------------------------------------------------------------------


def _write_node_configuration() -> None:
    (ROOT / "containerd" / "config.toml").write_text(f"""\
version = 2
root = "{ROOT}/containerd/root"
state = "{ROOT}/containerd/state"
oom_score = 0
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.aufs"]
[grpc]
  address = "{ROOT}/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{images.PAUSE}"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  disable_apparmor = true
  disable_hugetlb_controller = true
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{binaries.CNI}"
  conf_dir = "{ROOT}/cni/conf"
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "overlayfs"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = false
""")
    network = {
        "cniVersion": "0.4.0",
        "name": CNI_NETWORK,
        "plugins": [
            {
                "type": "bridge",
                "bridge": BRIDGE,
                "isGateway": True,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "dataDir": f"{ROOT}/cni/leases",
                    "ranges": [[{"subnet": PODS, "gateway": HOST}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }
    (ROOT / "cni" / "conf").mkdir()
    (ROOT / "cni" / "conf" / "10-test.conflist").write_text(json.dumps(network))
    (ROOT / "kubelet.yaml").write_text(f"""\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: {HOST}
port: {_PORTS["kubelet"]}
healthzPort: 0
authentication:
  anonymous: {{enabled: false}}
  webhook: {{enabled: true}}
  x509: {{clientCAFile: {ROOT}/pki/ca.crt}}
authorization: {{mode: Webhook}}
clusterDNS: [{DNS_SERVICE}]
clusterDomain: cluster.local
resolvConf: ""
containerRuntimeEndpoint: unix://{ROOT}/containerd/containerd.sock
cgroupDriver: cgroupfs
cgroupRoot: /{CGROUP}
failCgroupV1: false
failSwapOn: false
enforceNodeAllocatable: []
oomScoreAdj: 0
localStorageCapacityIsolation: false
evictionHard: {{}}
makeIPTablesUtilChains: false
podLogsDir: {ROOT}/pod-logs
volumePluginDir: {ROOT}/kubelet-plugins
imageGCHighThresholdPercent: 100
serializeImagePulls: false
syncFrequency: 10s
nodeStatusUpdateFrequency: 5s
maxPods: 250
""")
    (ROOT / "proxy.yaml").write_text(f"""\
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
clientConnection: {{kubeconfig: {ROOT}/pki/admin.conf}}
clusterCIDR: {PODS}
nftables: {{masqueradeAll: true}}
conntrack:  # zero: leave this machine's settings alone
  maxPerCore: 0
  min: 0
  tcpEstablishedTimeout: 0s
  tcpCloseWaitTimeout: 0s
  udpTimeout: 0s
  udpStreamTimeout: 0s
healthzBindAddress: 127.0.0.1:20256
metricsBindAddress: 127.0.0.1:20249
""")
    (ROOT / "Corefile").write_text(f"""\
.:{_PORTS["dns"]} {{
    bind {HOST}
    errors
    kubernetes cluster.local in-addr.arpa {{
        kubeconfig {ROOT}/pki/admin.conf
        pods insecure
        ttl 1
    }}
}}
""")


_DNS_OBJECTS: list[dict[str, object]] = [
    {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system"},
        "spec": {
            "clusterIP": DNS_SERVICE,
            "ports": [
                {"name": protocol.lower(), "port": 53, "targetPort": _PORTS["dns"], "protocol": protocol}
                for protocol in ("UDP", "TCP")
            ],
        },
    },
    {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "kube-dns-host",
            "namespace": "kube-system",
            "labels": {"kubernetes.io/service-name": "kube-dns"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [HOST], "conditions": {"ready": True}}],
        "ports": [
            {"name": protocol.lower(), "port": _PORTS["dns"], "protocol": protocol}
            for protocol in ("UDP", "TCP")
        ],
    },
]


def _make_bridge() -> None:
    for command in (
        ["ip", "link", "add", BRIDGE, "type", "bridge"],
        ["ip", "addr", "add", f"{HOST}/16", "dev", BRIDGE],
        ["ip", "link", "set", BRIDGE, "up"],
    ):
        subprocess.run(command, check=True, capture_output=True)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def _cgroups() -> list[Path]:
    """Our cgroup in each hierarchy that there is (one for version 2, one a controller for version 1)."""
    base = Path("/sys/fs/cgroup")
    if (base / "cgroup.controllers").exists():
        return [base / CGROUP]
    return [folder / CGROUP for folder in base.iterdir() if (folder / "cgroup.procs").exists()]


def _make_cgroup() -> None:
    for cgroup in _cgroups():
        cgroup.mkdir(exist_ok=True)
        shares = cgroup / "cpu.shares"
        if shares.exists():  # as much as four processes outside: a busy machine must not starve all pods
            shares.write_text("4096")
        for name in ("cpuset.cpus", "cpuset.mems"):  # version 1 starts these empty, and then nothing may join
            file = cgroup / name
            if cgroup.parent.name == "cpuset" and file.exists():
                file.write_text((cgroup.parent / name).read_text())


def _remove_cgroups() -> bool:
    """Remove ours, innermost first; False while some are busy."""
    done = True
    for cgroup in _cgroups():
        for folder in [*sorted(cgroup.rglob("*/"), reverse=True), cgroup]:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue
            except OSError:
                done = False
    return done


# -- clearing --------------------------------------------------------------------------------


def clear() -> None:
    """Remove everything that a cluster under `ROOT` has made on this machine, and only that."""
    deadline = time.monotonic() + 60
    while pids := list(_our_processes()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes {pids} of the test cluster do not end")
        for pid in pids:
            _kill(pid)
        time.sleep(0.1)
    for mount in _our_mounts():
        subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)
    while not _remove_cgroups():  # a process that has just been killed may still be in one
        if time.monotonic() > deadline:
            raise RuntimeError(f"the cgroups {CGROUP} of the test cluster stay busy")
        time.sleep(0.1)
    if Path("/sys/class/net", BRIDGE).exists():
        subprocess.run(["ip", "link", "delete", BRIDGE], check=True, capture_output=True)
    if ROOT.exists() and shutil.which("nft"):
        for family in ("ip", "ip6"):
            subprocess.run(["nft", "delete", "table", family, "kube-proxy"], check=False, capture_output=True)
    forwarding = ROOT / "ip_forward"
    if forwarding.exists():
        Path("/proc/sys/net/ipv4/ip_forward").write_text(forwarding.read_text())
    for leftover in Path("/var/lib/cni/results").glob(f"{CNI_NETWORK}-*"):
        leftover.unlink()
    for link in Path("/var/log/containers").glob("*"):
        if link.is_symlink() and link.readlink().is_relative_to(ROOT):
            link.unlink()
    if ROOT.exists():
        shutil.rmtree(ROOT)


def leftovers() -> list[str]:
    """What of a cluster is still on this machine: empty after `clear`, whoever was killed before it."""
    found = [f"process {pid}" for pid in _our_processes()]
    found += [f"mount {mount}" for mount in _our_mounts()]
    found += [f"cgroup {cgroup}" for cgroup in _cgroups() if cgroup.exists()]
    found += [str(path) for path in (ROOT, Path("/sys/class/net", BRIDGE)) if path.exists()]
    found += [f"lease {path}" for path in Path("/var/lib/cni/results").glob(f"{CNI_NETWORK}-*")]
    if shutil.which("nft"):
        tables = subprocess.run(["nft", "list", "tables"], check=False, capture_output=True, text=True).stdout
        found += [f"nftables {line}" for line in tables.splitlines() if line.endswith(" kube-proxy")]
    return found


def _our_processes() -> Iterator[int]:
    """Processes with our root among their arguments (and this is not us), and those in our cgroup."""
    mark = str(ROOT).encode()
    inside = {
        int(pid) for cgroup in _cgroups() for file in cgroup.rglob("cgroup.procs") for pid in _lines(file)
    }
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue  # it has just ended
        if state == "Z":
            continue
        started_by_us = Path(os.fsdecode(arguments[0])).name in _PROGRAMS and any(
            mark in a for a in arguments[1:]
        )
        if started_by_us or int(entry.name) in inside:
            yield int(entry.name)


_PROGRAMS = {
    "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "coredns",
    "containerd", "containerd-shim-runc-v2",
}  # fmt: skip


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _our_mounts() -> list[str]:
    """Mount points under the root, innermost first."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return sorted((m for m in mounts if m.startswith(f"{ROOT}/")), key=len, reverse=True)
