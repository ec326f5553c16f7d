"""Who may write under a name: two Drafters of one name in one place would promote over each other."""

from dflash import layout
from dflash.errors import ConfigurationError
from dflash.storage.store import Store, to_json


def claim(store: Store, name: str, uid: str, declared: str, *, take_over: bool = False) -> None:
    """Put down the owner, or find that it is us. ConfigurationError when it is somebody else.

    `uid` identifies the Drafter for good; `declared` tells a person where it is declared.
    """
    mine = to_json({"name": name, "uid": uid, "declared": declared})
    if store.create(layout.owner(name), mine):
        return
    if take_over:
        store.put(layout.owner(name), mine)
    else:
        check_owner(store, name, uid)


def check_owner(store: Store, name: str, uid: str) -> None:
    """ConfigurationError when another Drafter of this name writes here; nothing is written."""
    held = store.find_json(layout.owner(name))
    if held is not None and held.get("uid") != uid:
        raise ConfigurationError(
            f"spec.storage.uri: {store.location.uri} already belongs to another Drafter named {name!r} "
            f"({held.get('declared')}); give this one another metadata.name or storage.uri, or if it is the "
            "same one that has moved, run once with --take-over"
        )
