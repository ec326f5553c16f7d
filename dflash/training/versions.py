"""Versions of what computes, compared between the processes of one run at their start.

Two versions of a library may give hidden states or gradients that differ, and nothing else would say so.
"""

import platform
from collections.abc import Mapping
from importlib.metadata import version

from dflash import layout
from dflash.errors import ConfigurationError
from dflash.storage.store import Store

_COMPARED = ("dflash-suite", "torch", "transformers")


def own_versions() -> dict[str, str]:
    """This process's versions: what is compared, and Python's."""
    return {**{name: version(name) for name in _COMPARED}, "python": platform.python_version()}


def check_versions(theirs: Mapping[str, str], whose: str) -> None:
    """ConfigurationError when another process of the run computes with other versions."""
    ours = own_versions()
    for name in _COMPARED:
        if theirs.get(name) != ours[name]:
            raise ConfigurationError(
                f"{whose} has {name} {theirs.get(name)}, this process {ours[name]}; run all processes of a "
                "Drafter from one image or environment"
            )


def publish_versions(store: Store, run: str) -> None:
    """Rank 0 of each attempt writes the versions that its targets must have."""
    store.put_json(_key(run), own_versions())


def check_published(store: Store, run: str) -> bool:
    """A target compares itself with the drafters; False while they have not written theirs."""
    theirs = store.find_json(_key(run))
    if theirs is None:
        return False
    check_versions(theirs, "the drafter")
    return True


def _key(run: str) -> str:
    return layout.drafter(run, "versions.json")
