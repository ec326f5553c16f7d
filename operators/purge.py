"""Deletes what a Drafter has made, for `storage.deletionPolicy: Delete`: from its part of the store only.

Whatever another Drafter may use stays: outputs are named by their content, so two Drafters in one
place may share them, and nobody but those two knows. Not for tidying while work goes on.
"""

import logging

from dflash import layout
from dflash.storage.store import Store
from operators.owner import check_owner

log = logging.getLogger(__name__)

_OUTPUTS = ("evaluations/", "drafters/", "datasets/")


def purge(store: Store, name: str, uid: str) -> None:
    """Delete a Drafter's data; may be cut short anywhere and called again.

    With other Drafters in the same place only what carries this one's name goes. ConfigurationError
    when the name belongs to another Drafter here.
    """
    check_owner(store, name, uid)
    store.delete(layout.promoted(name))
    others = [info.key for info in store.list("owners/") if info.key != layout.owner(name)]
    if others:
        log.info("outputs stay, since others use the place too: %s", ", ".join(others[:5]))
    for folder in _OUTPUTS if not others else ():
        keys = [info.key for info in store.list(folder)]
        # What says that something is whole goes before any part of it.
        for key in sorted(keys, key=lambda key: not _commits(key)):
            store.delete(key)
    store.delete(layout.warm_up(name))
    store.delete(layout.spending(name))
    store.delete(layout.record(name))
    store.delete(layout.owner(name))


def _commits(key: str) -> bool:
    return key.rpartition("/")[2] in (layout.COMMIT, "manifest.json", "report.json", "LATEST.json")
