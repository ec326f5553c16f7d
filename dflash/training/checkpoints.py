"""Checkpoints in the store: committed whole or not at all, in the background, fenced by attempt.

A checkpoint is weights.safetensors (fp32 masters), moments.safetensors (Adam's) and state.json
(where the run is, what it counted, and what it was made from). Nothing random is in it: order,
anchors, noise and schedule are functions of the step. COMMIT.json comes last; LATEST.json is a hint
and a fence: it names the highest attempt seen, and only ever moves to a higher or equal one.

Resume takes the newest checkpoint whose files verify, not what LATEST says.
"""

import logging
import re
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dflash import layout
from dflash.errors import ConfigurationError, DflashError, TemporaryError
from dflash.storage.commit import delete_commit, fetch_commit, read_commit, write_commit
from dflash.storage.store import Corrupt, NotFound, Store

log = logging.getLogger(__name__)

_WEIGHTS, _MOMENTS, _STATE = "weights.safetensors", "moments.safetensors", "state.json"
_FOLDER = re.compile(r"checkpoints/step-(\d+)-a(\d+)/")


@dataclass(frozen=True)
class RunState:
    """Where a run is: the number of steps done, which is also the next step, and its counts so far."""

    step: int
    counts: Mapping[str, float]
    """Totals over all attempts, by name: samples, tokens, skipped steps, ..."""
    identity: Mapping[str, Any]
    """What the run is made from; a checkpoint of anything else is refused."""


@dataclass(frozen=True, order=True)
class Place:
    """A checkpoint's name."""

    step: int
    attempt: int

    def folder(self, run: str) -> str:
        """Its folder's key."""
        return layout.checkpoint(run, self.step, self.attempt)


@dataclass(frozen=True)
class Restored:
    """A checkpoint that was fetched and verified."""

    place: Place
    state: RunState
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]


@dataclass
class _Listing:
    seen: set[Place] = field(default_factory=set)
    committed: set[Place] = field(default_factory=set)


def load_weights(store: Store, run: str, place: Place) -> tuple[RunState, dict[str, Tensor]]:
    """A committed checkpoint's state and masters, verified. NotFound or Corrupt where they cannot be had."""
    commit = read_commit(store, place.folder(run))
    if commit is None:
        raise NotFound(f"the checkpoint of step {place.step}, attempt {place.attempt}, is not there any more")
    with tempfile.TemporaryDirectory(prefix="dflash-weights-") as folder:
        for name in (_STATE, _WEIGHTS):
            store.download_file(commit.files[name], Path(folder, name))
        state = RunState(**orjson.loads(Path(folder, _STATE).read_bytes()))
        return state, load_file(Path(folder, _WEIGHTS))


class Checkpoints:
    """Saves and restores one run's checkpoints, for one attempt. Used by rank 0 only."""

    def __init__(
        self, store: Store, run: str, attempt: int, *, keep: int, identity: Mapping[str, Any]
    ) -> None:
        self._store, self._run, self._attempt, self._keep = store, run, attempt, keep
        # What was saved comes back through JSON, so what it is compared with goes through it too.
        self._identity: dict[str, Any] = orjson.loads(orjson.dumps(identity))
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._upload: Future[None] | None = None
        self._saved: int | None = None
        self.committed: Place | None = None
        """The newest checkpoint that this attempt committed or resumed from."""
        self.committed_at = time.monotonic()
        """When that was; at first, when this attempt began."""
        self.pinned: frozenset[Place] = frozenset()
        """Checkpoints that are kept however many are newer."""

    def claim(self) -> None:
        """Make this attempt the one that may commit. TemporaryError when a higher one was here."""
        highest = max((place.attempt for place in self._list().seen), default=-1)
        if highest > self._attempt:
            raise self._superseded(highest)
        self._move_latest(None)

    def restore(self) -> Restored | None:
        """The newest checkpoint that verifies; None where there is none.

        A checkpoint with missing or changed files is passed over for the one before it, loudly.
        ConfigurationError when what it was made from differs.
        """
        for place in sorted(self._list().committed, reverse=True):
            with tempfile.TemporaryDirectory(prefix="dflash-resume-") as folder:
                try:
                    fetch_commit(self._store, place.folder(self._run), Path(folder))
                except (Corrupt, NotFound) as error:
                    log.error(
                        "checkpoint of step %d is unusable, the one before is tried: %s", place.step, error
                    )
                    continue
                return self._read(place, Path(folder))
        return None

    def _read(self, place: Place, folder: Path) -> Restored:
        state = RunState(**orjson.loads((folder / _STATE).read_bytes()))
        for name in sorted(self._identity.keys() | state.identity.keys()):
            theirs, ours = state.identity.get(name), self._identity.get(name)
            if theirs != ours:
                raise ConfigurationError(
                    f"checkpoint {place.folder(self._run)} was made with {name} {theirs}, but this run has "
                    f"{ours}; restore the declaration it was made from, or set spec.rerun to train anew"
                )
        self._saved = place.step if place.attempt == self._attempt else None
        self.committed = place
        return Restored(place, state, load_file(folder / _WEIGHTS), load_file(folder / _MOMENTS))

    @property
    def busy(self) -> bool:
        """Whether an upload is under way."""
        return self._upload is not None and not self._upload.done()

    def save(
        self, step: int, counts: Mapping[str, float], weights: dict[str, Tensor], moments: dict[str, Tensor]
    ) -> None:
        """Commit host tensors in the background; waits for an upload under way. Errors: as `finish`."""
        self.finish()
        if self._saved == step:
            return
        state = RunState(step, dict(counts), self._identity)
        self._upload = self._pool.submit(self._commit, Place(step, self._attempt), state, weights, moments)
        self._saved = step

    def finish(self) -> None:
        """Wait for the upload under way. Raises what went wrong with it: the store, or a higher attempt."""
        if self._upload is not None:
            upload, self._upload = self._upload, None
            upload.result()

    def check(self) -> None:
        """Raise what went wrong with an upload that has ended; never waits."""
        if self._upload is not None and self._upload.done():
            self.finish()

    def _commit(
        self, place: Place, state: RunState, weights: dict[str, Tensor], moments: dict[str, Tensor]
    ) -> None:
        for name, tensor in (*weights.items(), *moments.items()):
            if not torch.isfinite(tensor).all():
                raise DflashError(
                    f"{name} is not finite after step {place.step}, so it is not saved; the last good "
                    "checkpoint is kept: lower training.learningRate or training.clip"
                )
        folder = place.folder(self._run)
        if read_commit(self._store, folder) is not None:
            self.committed = place
            return  # this attempt was started twice and has been here; equal steps have equal weights
        self._check_fence()
        with tempfile.TemporaryDirectory(prefix="dflash-checkpoint-") as temporary:
            paths = {_WEIGHTS: Path(temporary, _WEIGHTS), _MOMENTS: Path(temporary, _MOMENTS)}
            save_file(weights, paths[_WEIGHTS])
            save_file(moments, paths[_MOMENTS])
            files: dict[str, Path | bytes] = {
                **paths,
                _STATE: orjson.dumps(asdict(state), option=orjson.OPT_INDENT_2),
            }
            self._check_fence()
            write_commit(self._store, folder, files, {"step": place.step, "attempt": place.attempt})
        try:
            self._move_latest(place)
        except TemporaryError:
            # A higher attempt came between the check and the commit: take the commit back.
            delete_commit(self._store, folder)
            raise
        self.committed, self.committed_at = place, time.monotonic()
        log.info("checkpoint of step %d is committed", place.step)
        self._prune()

    def _check_fence(self) -> None:
        latest = self._store.find_json(layout.latest(self._run))
        if latest is not None and latest["attempt"] > self._attempt:
            raise self._superseded(latest["attempt"])

    def _move_latest(self, place: Place | None) -> None:
        """Point LATEST at a checkpoint, or (None) only put this attempt's number on it."""
        key = layout.latest(self._run)
        while True:
            latest: dict[str, Any] = {"attempt": -1, "step": None, "folder": None}
            tag: str | None = None
            try:
                data, tag = self._store.read(key)
                latest = orjson.loads(data)
            except NotFound:
                pass
            if latest["attempt"] > self._attempt:
                raise self._superseded(latest["attempt"])
            wanted = {**latest, "attempt": self._attempt}
            if place is not None:
                wanted |= {"step": place.step, "folder": place.folder(self._run)}
            if wanted == latest or self._store.swap(key, orjson.dumps(wanted), tag) is not None:
                return

    def _superseded(self, attempt: int) -> TemporaryError:
        return TemporaryError(
            f"attempt {self._attempt} of run {self._run} may not commit: attempt {attempt} has taken over; "
            "this process ends"
        )

    def _prune(self) -> None:
        """Delete all but the newest checkpoints, and what attempts before left without a commit."""
        listing = self._list()
        kept = {*sorted(listing.committed)[-self._keep :], *self.pinned}
        for place in listing.seen:
            unfinished = place not in listing.committed
            if place not in kept and not (unfinished and place.attempt >= self._attempt):
                delete_commit(self._store, place.folder(self._run))

    def _list(self) -> _Listing:
        listing = _Listing()
        for found in self._store.list(layout.drafter(self._run, "checkpoints/")):
            match = _FOLDER.search(found.key)
            if match is None:
                continue
            place = Place(int(match[1]), int(match[2]))
            listing.seen.add(place)
            if found.key.endswith("/" + layout.COMMIT):
                listing.committed.add(place)
        return listing
