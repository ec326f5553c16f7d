"""One worker of the dataset stage: its share of the prompts, through an engine and the gate, into parts.

Prompts are streamed and answers leave with the next part, so memory does not grow with either. What is
committed is never generated again, by whichever worker or attempt; what is not committed is at most
`COMMIT_SECONDS` of work. See `dflash.data.parts` for why nothing is lost or counted twice.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator

from dflash import layout
from dflash.data.parts import Manifest, find_manifest
from dflash.data.prompts import Prompt, PromptCounts, is_held_out
from dflash.data.render import Renderer
from dflash.engines.engine import Engine
from dflash.errors import ConfigurationError, DflashError, Preempted
from dflash.generation.answering import Answerer, Asked
from dflash.generation.canary import check_engine
from dflash.generation.committing import Committer
from dflash.generation.gate import Judge, Tally
from dflash.generation.job import Done, Job
from dflash.generation.reporting import Meter, progress
from dflash.storage.store import Store

log = logging.getLogger("dflash.generation")

COMMIT_SECONDS = 20.0
"""Longest time between the end of an answer and the start of its commit."""
COMMIT_TOKENS = 4_000_000
"""Most tokens in one part: bounds memory when answers are long."""
_REPORT_SECONDS = 2.0
_LAST_COMMIT_SECONDS = 7.0
"""Time for the last commit after a request to stop: the process must be gone within 10 s."""
_BACKLOG_PARTS = 4
"""Parts' worth of answers that may wait for the store before no more are asked for."""


class Worker:
    """Runs one share. `prompts(counts)` starts a new pass over all distinct prompts."""

    def __init__(
        self,
        store: Store,
        job: Job,
        *,
        prompts: Callable[[PromptCounts], Iterator[Prompt]],
        renderer: Renderer,
        judge: Judge,
        engine: Engine,
    ) -> None:
        self.tally = Tally(job.limits)
        self._store = store
        self._job = job
        self._prompts = prompts
        self._engine = engine
        self._renderer = renderer
        self._answerer = Answerer(job, renderer, judge, engine, self.tally)
        self._committer = Committer(store, job.dataset, job.name, self.tally)
        self._meter = Meter()
        self._counts = PromptCounts()
        self._total = self._held_out = self._share = self._share_before = 0
        self._ready: list[Done] = []
        self._ready_tokens = 0
        self._ready_since = 0.0
        self._lanes: set[asyncio.Task[None]] = set()
        self._commit: asyncio.Task[None] | None = None
        self._exhausted = False
        self._stop: BaseException | None = None
        self._changed = asyncio.Event()

    def stop(self) -> None:
        """Ask the worker to commit what is finished and to end. Called in its loop."""
        self._end_with(Preempted("asked to stop: what was finished is committed; run again to go on"))

    async def run(self) -> Manifest | None:
        """Answer every prompt of the share; gives the manifest where this worker saw the dataset complete.

        Raises ConfigurationError when the gate refuses the dataset, Preempted after `stop`, TemporaryError
        when engine or store is lost. Whatever was finished is committed first.
        """
        manifest = await asyncio.to_thread(find_manifest, self._store, self._job.dataset)
        if manifest is not None:
            log.info("dataset %s is complete already: %d samples", self._job.dataset, manifest.samples)
            return manifest
        try:
            await self._unless_stopped(self._prepare())
            if self._share_before < self._share:
                await self._unless_stopped(self._start_engine())
                await self._generate()
        finally:
            await self._engine.close()
        return await asyncio.to_thread(self._finish)

    async def _prepare(self) -> None:
        await asyncio.to_thread(self._survey)
        await asyncio.to_thread(self._report)  # what there is to do is shown while the engine starts
        self._refuse_if(self.tally.refusal())

    async def _start_engine(self) -> None:
        await self._engine.start()
        await check_engine(self._engine, self._renderer, self._job.max_tokens)
        self._meter = Meter()  # rates are of answering, not of starting

    async def _unless_stopped(self, work: Coroutine[None, None, None]) -> None:
        """Do something, but drop it when a request to stop comes."""
        task = asyncio.create_task(work)
        stopped = asyncio.create_task(self._stopped())
        await asyncio.wait([task, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not task.done():
            task.cancel()
            assert self._stop is not None
            raise self._stop
        task.result()

    async def _stopped(self) -> None:
        while self._stop is None:
            await self._wait_for_change(60.0)

    def _survey(self) -> None:
        """Read what is committed and count what there is to do: one whole pass over the prompts."""
        self._committer.refresh()
        for prompt in self._prompts(self._counts):
            if is_held_out(prompt, self._job.hold_out):
                self._held_out += 1
                continue
            self._total += 1
            if self._job.is_mine(prompt):
                self._share += 1
                self._share_before += prompt.key in self._committer.done
        log.info(
            "%d of %d prompts done, %d left for this worker (%d rows read, %d duplicates, %d held out)",
            self._committer.parts.accounted,
            self._total,
            self._share - self._share_before,
            self._counts.rows,
            self._counts.duplicates,
            self._held_out,
        )
        if self._total == 0:
            raise ConfigurationError(
                f"all {self._counts.unique} prompts are held out, so there is nothing to generate: "
                "lower prompts.holdOut or add prompts"
            )

    # While it runs

    async def _generate(self) -> None:
        todo = self._answerer.ask(self._todo())
        helpers = [asyncio.create_task(self._keep_committing()), asyncio.create_task(self._keep_reporting())]
        for helper in helpers:
            helper.add_done_callback(self._ended)
        try:
            while self._stop is None and not (self._exhausted and not self._lanes):
                self._open_lanes(todo)
                await self._wait_for_change(1.0)
        finally:
            await _cancelled([*self._lanes, *helpers])
        try:
            async with asyncio.timeout(_LAST_COMMIT_SECONDS if self._stop else None):
                await self._commit_ready()
                await asyncio.to_thread(self._report)
        except (TimeoutError, DflashError) as error:
            self._end_with(error)  # what is not committed is generated again
        if self._stop is not None:
            raise self._stop

    def _open_lanes(self, todo: Iterator[Asked]) -> None:
        while len(self._lanes) < self._engine.in_flight and not self._exhausted:
            asked = next(todo, None)
            if asked is None:
                self._exhausted = True
                return
            lane = asyncio.create_task(self._lane(asked, todo))
            self._lanes.add(lane)
            lane.add_done_callback(self._lanes.discard)
            lane.add_done_callback(self._ended)

    def _todo(self) -> Iterator[Prompt]:
        for prompt in self._prompts(PromptCounts(earlier=self._counts)):
            mine = self._job.is_mine(prompt) and not is_held_out(prompt, self._job.hold_out)
            if mine and prompt.key not in self._committer.done:
                yield prompt

    async def _lane(self, first: Asked, todo: Iterator[Asked]) -> None:
        """Answer one prompt after another, while the engine wants this many at once."""
        asked: Asked | None = first
        while asked is not None:
            done = await self._answerer.answer(asked)
            self._take(done)
            self._refuse_if(self.tally.refusal())
            while len(self._ready) > _BACKLOG_PARTS * self._job.part_prompts:
                await asyncio.sleep(0.05)  # the store is slower than the engine: wait for it
            if len(self._lanes) > self._engine.in_flight:
                return
            asked = next(todo, None)
        self._exhausted = True

    def _take(self, done: Done) -> None:
        if not self._ready:
            self._ready_since = time.monotonic()
        self._ready.append(done)
        self._ready_tokens += done.tokens
        self._meter.add([len(row.output_ids) for row in done.kept])

    async def _keep_committing(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            waited = time.monotonic() - self._ready_since
            full = len(self._ready) >= self._job.part_prompts or self._ready_tokens >= COMMIT_TOKENS
            if self._ready and (full or waited >= COMMIT_SECONDS):
                await self._commit_ready()

    async def _commit_ready(self) -> None:
        """Commit all that is ready, after the commit that is under way. Cancelling interrupts neither."""
        if self._commit is not None:
            await asyncio.shield(self._commit)
        batch, self._ready, self._ready_tokens = self._ready, [], 0
        self._commit = asyncio.create_task(asyncio.to_thread(self._committer.commit, batch))
        await asyncio.shield(self._commit)

    async def _keep_reporting(self) -> None:
        while True:
            await asyncio.to_thread(self._report)
            await asyncio.sleep(_REPORT_SECONDS)

    def _report(self) -> None:
        snapshot = progress(
            self._meter,
            self.tally,
            self._engine.counts,
            before=self._share_before,
            total=self._share,
            in_flight=len(self._lanes),
        )
        key = layout.dataset(self._job.dataset, f"progress/{self._job.index}.json")
        self._store.put_json(key, snapshot.model_dump(by_alias=True))

    # How it ends

    def _finish(self) -> Manifest | None:
        """Close the dataset if every prompt is accounted for; else other workers are still at it."""
        self._committer.refresh()
        parts = self._committer.parts
        if parts.accounted < self._total:
            log.info(
                "this share is done; %d of %d prompts are with others",
                self._total - parts.accounted,
                self._total,
            )
            return None
        self._refuse_if(self.tally.refusal(final=True))
        if parts.samples == 0:
            raise ConfigurationError(
                f"no sample was kept of {self._total} prompts, so there is nothing to train on"
            )
        manifest = parts.close(
            rows=self._counts.rows, duplicates=self._counts.duplicates, held_out=self._held_out
        )
        log.info("dataset %s is complete: %d samples", self._job.dataset, manifest.samples)
        return manifest

    def _refuse_if(self, refusal: str | None) -> None:
        if refusal is not None:
            raise ConfigurationError(
                f"generation stopped by its quality gate: {refusal} (limits: generation.gate)"
            )

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end_with(error)
        self._changed.set()

    def _end_with(self, error: BaseException) -> None:
        if self._stop is None:
            self._stop = error
        self._changed.set()

    async def _wait_for_change(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()


async def _cancelled(tasks: "list[asyncio.Task[None]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
