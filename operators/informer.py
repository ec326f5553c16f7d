"""A local copy of one kind of object, kept current by list and watch.

Level-triggered: whoever is told of a change reads the copy, not the change, so a missed or merged
event loses nothing. A watch that says 410, ends, breaks or falls silent is resumed or started over,
and objects that vanished meanwhile are told as deleted.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable

from operators.kube import ApiError, Gone, Kube, Object, Resource, Unreachable

log = logging.getLogger(__name__)

_LONGEST_PAUSE = 30.0
_EMPTY_SECONDS = 1.0
"""A watch that ends sooner than this without a word is no watch: pause before the next."""


class Informer:
    """Objects of a kind in a namespace, by name. `changed` is called with the old and the new object."""

    def __init__(
        self,
        kube: Kube,
        resource: Resource,
        namespace: str,
        changed: Callable[[Object | None, Object | None], None],
        selector: str = "",
    ) -> None:
        self.resource = resource
        self.synced = threading.Event()
        """Set once the first list is in."""
        self.heard_at = time.monotonic()
        """When the API server last said anything, bookmarks included."""
        self.relists = 0
        self._kube, self._namespace, self._selector = kube, namespace, selector
        self._changed = changed
        self._objects: dict[str, Object] = {}
        self._lock = threading.Lock()
        self._index: dict[str, set[str]] = {}

    def get(self, name: str) -> Object | None:
        """The object as last heard of; not to be changed."""
        with self._lock:
            return self._objects.get(name)

    def labelled(self, owner: str) -> list[Object]:
        """Objects that carry the label `dflash.dev/drafter` with this value."""
        with self._lock:
            return [self._objects[name] for name in sorted(self._index.get(owner, ()))]

    def names(self) -> list[str]:
        """All names."""
        with self._lock:
            return list(self._objects)

    def run(self, stop: threading.Event) -> None:
        """List and watch until told to stop; to be run in a thread of its own."""
        failures = 0
        version = ""
        while not stop.is_set():
            started, heard = time.monotonic(), self.heard_at
            try:
                if not version:
                    version = self._list()
                    heard = self.heard_at
                for change in self._kube.watch(self.resource, self._namespace, self._selector, version):
                    self.heard_at = time.monotonic()
                    version = change["object"]["metadata"]["resourceVersion"]
                    if change["type"] != "BOOKMARK":
                        self._update(change["object"], deleted=change["type"] == "DELETED")
                    if stop.is_set():
                        return
                silent = self.heard_at == heard and time.monotonic() - started < _EMPTY_SECONDS
                if silent:  # such as a server that answers an old version by an empty success
                    log.warning("watch of %s ended at once; listing again", self.resource.plural)
                    version = ""
                failures = failures + 1 if silent else 0
            except Gone:
                version = ""
                failures += 1 if time.monotonic() - started < _EMPTY_SECONDS and failures else 0
            except (Unreachable, ApiError) as error:
                log.warning("watching %s: %s", self.resource.plural, error)
                # What was seen stays valid; a version that is too old by then is told by 410.
                failures = 1 if self.heard_at != heard else failures + 1  # words between them: no streak
                if isinstance(error, ApiError):
                    version = ""
            if failures:
                pause = min(_LONGEST_PAUSE, 0.25 * 2.0 ** min(failures, 10))
                stop.wait(pause * random.uniform(0.5, 1.0))

    def _list(self) -> str:
        items, version = self._kube.list(self.resource, self._namespace, self._selector)
        self.heard_at = time.monotonic()
        self.relists += 1
        present = {item["metadata"]["name"] for item in items}
        for item in items:
            self._update(item)
        with self._lock:
            vanished = [known for name, known in self._objects.items() if name not in present]
        for known in vanished:
            self._update(known, deleted=True)
        self.synced.set()
        return version

    def _update(self, item: Object, deleted: bool = False) -> None:
        metadata = item["metadata"]
        metadata.pop("managedFields", None)  # nobody reads it and it is half of the memory
        name = metadata["name"]
        with self._lock:
            old = self._objects.get(name)
            if not deleted and old and old["metadata"]["resourceVersion"] == metadata["resourceVersion"]:
                return
            for owner in _owners(old):
                self._index[owner].discard(name)
            if deleted:
                self._objects.pop(name, None)
            else:
                self._objects[name] = item
                for owner in _owners(item):
                    self._index.setdefault(owner, set()).add(name)
        self._changed(old, None if deleted else item)


def _owners(item: Object | None) -> Iterable[str]:
    labels = item["metadata"].get("labels") if item else None
    owner = (labels or {}).get("dflash.dev/drafter")
    return [owner] if owner else []
