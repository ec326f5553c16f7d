"""Names of everything an executor makes, all from here.

    <cr>-gen-<h8>  <cr>-tgt-<h8>  <cr>-dft-<h8>-a<k>  <cr>-eval-<h8>

A hash or an attempt in each name means that nothing made is ever changed: another input is another
name. With a resource name of at most 40 characters the longest Job name has 63 - 6 or fewer left for
what Kubernetes appends (index and suffix).
"""

import hashlib

from operators.observed import Role

SHORT = {"generate": "gen", "target": "tgt", "drafter": "dft", "evaluate": "eval"}
LONGEST = 52
"""A pod's hostname is the Job's name, a dash and its index, within a label's 63 characters."""


def group(resource: str, role: Role, output: str, attempt: int = 0) -> str:
    """Name of a role's Job and Service, or of its folder of logs; the same for the same arguments."""
    tail = f"-{SHORT[role]}-{output[:8]}" + (f"-a{attempt}" if role == "drafter" else "")
    return shorten(resource, LONGEST - len(tail)) + tail


def child(resource: str, role: Role, output: str, index: int, attempt: int = 0) -> str:
    """Name of one process or pod."""
    return f"{group(resource, role, output, attempt)}-{index}"


def shorten(name: str, limit: int) -> str:
    """The name, or where it is too long its beginning and a hash of all of it."""
    if len(name) <= limit:
        return name
    mark = hashlib.sha256(name.encode()).hexdigest()[:6]
    return f"{name[: limit - 7].rstrip('-')}-{mark}"
