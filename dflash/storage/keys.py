"""Which keys we write: letters, digits and `. _ - =` in folders, so that no server rewrites them.

Only a prefix given by a person may hold other characters; names that come from people (of a run, a
dataset, a slice) go through `safe_name` first.
"""

import hashlib
import re

_KEY = re.compile(r"[A-Za-z0-9._=-]+(/[A-Za-z0-9._=-]+)*/?")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST = 40


def check_key(key: str) -> str:
    """`key` itself; ValueError, a mistake of the caller, when it is not in the safe alphabet."""
    if not _KEY.fullmatch(key) or any(part in (".", "..") for part in key.split("/")):
        raise ValueError(f"unsafe key {key!r}: use letters, digits and . _ - = between slashes")
    return key


def safe_name(text: str) -> str:
    """A key part for any text: itself where it is safe, else a readable slug with a hash of the text."""
    if text and len(text) <= _LONGEST and not _UNSAFE.search(text) and text not in (".", ".."):
        return text
    slug = _UNSAFE.sub("-", text).strip("-.")[:_LONGEST]
    return f"{slug}-{hashlib.sha256(text.encode()).hexdigest()[:10]}".lstrip("-")
