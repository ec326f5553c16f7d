"""The store as the operator looks at it: names of outputs, commits, progress, ownership, promotion.

Many Drafters, many stores, few requests: what cannot have changed is remembered. Impatient: a store
that is away is told as TemporaryError within seconds, since a worker that waits serves nobody.
"""

import hashlib
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from dflash import layout
from dflash.data.sources import source_files
from dflash.planning.kept import find_warm_up, write_spending
from dflash.planning.spending import Spending
from dflash.planning.warm_up import WarmUp
from dflash.progress import Progress
from dflash.resource import Drafter
from dflash.resource.hashes import StageHashes
from dflash.resource.storage import Storage
from dflash.storage.location import StoreLocation, location_of
from dflash.storage.store import Store
from operators.actions import Promote
from operators.observe import (
    Movement,
    Outputs,
    committed,
    outputs_of,
    progress,
    write_inputs,
)
from operators.observed import Committed, Stage, StageProgress
from operators.owner import claim
from operators.plan import spec_digest
from operators.purge import purge

_PATIENCE_SECONDS = 5.0
_STAMP_SECONDS = 60.0
"""How often it is checked whether prompt files have changed, and whether there was a warm-up."""
_ACCOUNT_SECONDS = 30.0
"""How often what was spent is written into the store, for jobs and the command line."""


@dataclass(frozen=True)
class Look:
    """One look at a Drafter's part of a store."""

    hashes: StageHashes
    committed: Committed
    progress: Mapping[Stage, Progress]
    moved: Mapping[Stage, StageProgress]
    warm_up: WarmUp | None = None


@dataclass
class _Known:
    """What is remembered of one Drafter."""

    uid: str
    owned: bool = False
    key: str = ""
    """Spec and state of the prompt files that `outputs` is of."""
    checked_at: float = 0.0
    outputs: Outputs | None = None
    described: set[str] = field(default_factory=set)
    movement: Movement = field(default_factory=Movement)
    warm_up: WarmUp | None = None
    warm_up_checked_at: float = -_STAMP_SECONDS
    accounted_at: float = -_ACCOUNT_SECONDS


class StoreView:
    """Looks for all Drafters of one operator. Thread-safe for different Drafters."""

    def __init__(self, identity: str) -> None:
        """`identity` tells this cluster and namespace from others that use the same store."""
        self._identity = identity
        self._stores: dict[StoreLocation, Store] = {}
        self._known: dict[str, _Known] = {}
        self._lock = threading.Lock()

    def look(self, drafter: Drafter, uid: str, at_work: Iterable[Stage], *, take_over: bool = False) -> Look:
        """What is true now. ConfigurationError when declared things are wrong, TemporaryError when away."""
        name = drafter.metadata.name
        store = self._store(drafter.spec.storage)
        known = self._remembered(name, uid)
        if not known.owned:
            where = f"{self._identity}/{name}"
            claim(store, name, where, f"Drafter {where}", take_over=take_over)
            known.owned = True
        outputs = self._outputs(drafter, store, known)
        hashes = outputs.hashes
        done = committed(store, name, hashes)
        shown: dict[Stage, Progress] = {}
        moved: dict[Stage, StageProgress] = {}
        named: dict[Stage, str] = {
            "generation": hashes.dataset,
            "training": hashes.drafter,
            "evaluation": hashes.evaluation,
        }
        for stage in at_work:
            found = progress(store, hashes, stage)
            if found is not None:
                shown[stage] = found
            at = known.movement.note(stage, named[stage], found)
            if at is not None:
                moved[stage] = at
        return Look(hashes, done, shown, moved, self._warm_up(name, store, known) if shown else None)

    def account(self, drafter: Drafter, spending: Spending) -> None:
        """Put down what was spent, now and then; a store that is away gets the next copy."""
        name = drafter.metadata.name
        with self._lock:
            known = self._known.get(name)
        soon = known is None or time.monotonic() - known.accounted_at < _ACCOUNT_SECONDS
        if known is None or (soon and spending.gpus > 0):
            return
        known.accounted_at = time.monotonic()
        write_spending(self._store(drafter.spec.storage), name, spending)

    def _warm_up(self, name: str, store: Store, known: _Known) -> WarmUp | None:
        if time.monotonic() - known.warm_up_checked_at >= _STAMP_SECONDS:
            known.warm_up = find_warm_up(store, name)
            known.warm_up_checked_at = time.monotonic()
        return known.warm_up

    def describe(self, drafter: Drafter, uid: str, stage: Stage) -> None:
        """Put down, once, what the stage's output is the hash of."""
        known = self._remembered(drafter.metadata.name, uid)
        store = self._store(drafter.spec.storage)
        outputs = self._outputs(drafter, store, known)
        mark = f"{stage}/{outputs.hashes}"
        if mark not in known.described:
            write_inputs(store, outputs, stage)
            known.described.add(mark)

    def promote(self, drafter: Drafter, action: Promote) -> None:
        """Point promoted/<name>.json at a drafter whose report passed the gate."""
        from dflash.evaluation.gate import promote

        store = self._store(drafter.spec.storage)
        report = store.get(layout.report(action.evaluation))
        promote(
            store,
            action.name,
            drafter=action.drafter,
            evaluation=action.evaluation,
            report_sha256=hashlib.sha256(report).hexdigest(),
            acceptance_length=orjson.loads(report)["acceptance_length"]["pooled"],
        )

    def purge(self, name: str, storage: Storage) -> None:
        """Delete a Drafter's data from its part of the store."""
        purge(self._store(storage), name, f"{self._identity}/{name}")

    def forget(self, name: str) -> None:
        """A Drafter is gone."""
        with self._lock:
            self._known.pop(name, None)

    def _store(self, storage: Storage) -> Store:
        location = location_of(storage)
        with self._lock:
            if location not in self._stores:
                self._stores[location] = Store.open(location, patience=_PATIENCE_SECONDS)
            return self._stores[location]

    def _remembered(self, name: str, uid: str) -> _Known:
        with self._lock:
            known = self._known.get(name)
            if known is None or known.uid != uid:
                known = self._known[name] = _Known(uid)
            return known

    def _outputs(self, drafter: Drafter, store: Store, known: _Known) -> Outputs:
        """Names of the outputs; prompt files are read again only when they have changed."""
        digest = spec_digest(drafter.spec)
        fresh = time.monotonic() - known.checked_at < _STAMP_SECONDS
        if known.outputs is not None and fresh and known.key.startswith(digest):
            return known.outputs
        key = f"{digest} {_stamps(drafter, store)}"
        if known.outputs is None or known.key != key:
            known.outputs = outputs_of(drafter, store)
            known.key = key
        known.checked_at = time.monotonic()
        return known.outputs


def _stamps(drafter: Drafter, store: Store) -> str:
    """Names and entity tags (or sizes and times) of all prompt files: equal while their content is."""
    spec = drafter.spec
    stamps: list[tuple[str, str]] = []
    for uri in [spec.prompts.uri, *(s.uri for s in spec.evaluation.prompts)]:
        for file in source_files(uri, Path("/"), store):
            if file.path is not None:
                about = file.path.stat()
                stamps.append((file.name, f"{about.st_size} {about.st_mtime_ns}"))
            elif file.store is not None:
                tags = [info.etag for info in file.store.list(file.key) if info.key == file.key]
                stamps.append((file.name, " ".join(tags)))
    return orjson.dumps(stamps).decode()
