"""Keys and certificates of the throwaway cluster, by the openssl command. Not for anything that lasts."""

import base64
import subprocess
from pathlib import Path


def create(folder: Path, server: str, addresses: list[str], node: str) -> None:
    """Write a CA, certificates signed by it, the ServiceAccount key, and kubeconfigs for admin and node."""
    _openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "30", "-subj", "/CN=test-ca",
             "-keyout", f"{folder}/ca.key", "-out", f"{folder}/ca.crt")  # fmt: skip
    names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    alternatives = ",".join([*(f"DNS:{name}" for name in names), *(f"IP:{address}" for address in addresses)])
    _certificate(folder, "server", "/CN=kube-apiserver", alternatives)
    _certificate(folder, "admin", "/O=system:masters/CN=admin")
    _certificate(folder, "node", f"/O=system:nodes/CN=system:node:{node}")
    _openssl("genrsa", "-out", f"{folder}/sa.key", "2048")
    _openssl("rsa", "-in", f"{folder}/sa.key", "-pubout", "-out", f"{folder}/sa.pub")
    for user in ("admin", "node"):
        _kubeconfig(folder, user, server)


def _certificate(folder: Path, name: str, subject: str, alternatives: str = "") -> None:
    request, extensions = folder / f"{name}.csr", folder / f"{name}.ext"
    _openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", subject, "-keyout", f"{folder}/{name}.key",
             "-out", str(request))  # fmt: skip
    extensions.write_text(
        "extendedKeyUsage=serverAuth,clientAuth\n"
        + (f"subjectAltName={alternatives}\n" if alternatives else "")
    )
    _openssl("x509", "-req", "-in", str(request), "-CA", f"{folder}/ca.crt", "-CAkey",
             f"{folder}/ca.key", "-CAcreateserial", "-days", "30", "-extfile", str(extensions), "-out",
             f"{folder}/{name}.crt")  # fmt: skip


def _kubeconfig(folder: Path, user: str, server: str) -> None:
    def data(name: str) -> str:
        return base64.b64encode((folder / name).read_bytes()).decode()

    path = folder / f"{user}.conf"
    path.write_text(f"""\
apiVersion: v1
kind: Config
clusters:
- name: test
  cluster: {{server: "{server}", certificate-authority-data: {data("ca.crt")}}}
users:
- name: {user}
  user: {{client-certificate-data: {data(f"{user}.crt")}, client-key-data: {data(f"{user}.key")}}}
contexts:
- name: test
  context: {{cluster: test, user: {user}}}
current-context: test
""")
    path.chmod(0o600)


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
