"""Evaluation through SGLang: what users of the drafter will get, measured as they get it.

Every contender has a fresh server with flags that differ in speculation alone, or one that was given.
Counts come from each answer's `meta_info`, and are checked against the server's own counters on `/metrics`;
the effective settings are read back from the server. Order of contenders: plain decoding last, so that its
server is there to judge the differences found.
"""

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash import layout
from dflash.engines.engine import sample_seed
from dflash.engines.http import HttpClient
from dflash.engines.server import ServerProcess, wait_until_ready
from dflash.errors import ConfigurationError, TemporaryError
from dflash.evaluation import launch
from dflash.evaluation.answers import DFLASH, MTP, NONE, Answer, Question
from dflash.evaluation.equality import Equality, Scores, compare, summarise
from dflash.evaluation.ledger import Ledger
from dflash.model.facts import TargetFacts
from dflash.model.shape import DraftShape
from dflash.resource import DrafterSpec
from dflash.resource.generation import Generation

if TYPE_CHECKING:
    from dflash.storage.store import Store

log = logging.getLogger(__name__)

_SIMULATION = "SGLANG_SIMULATE_ACC_LEN"
_WARM_UP_ANSWERS = 4
_WARM_UP_TOKENS = 32
_TRIES = 2
_GIVEN_SECONDS = 120.0
_ASSUMED_LOGIT = 24.0
"""Log-probabilities do not tell how large logits are; the best of a confident model are 16 to 32."""


@dataclass
class ServedRun:
    """What was learnt beside the answers."""

    wall_seconds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    """By contender and concurrency, one a repeat."""
    flags: dict[str, list[str]] = field(default_factory=dict)
    effective: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Settings as the servers report them."""
    warnings: list[str] = field(default_factory=list)
    differences: Equality | None = None
    version: str = ""


class Served:
    """The contenders of one evaluation, each on its own server, one after the other."""

    def __init__(
        self,
        spec: DrafterSpec,
        drafters: Mapping[str, Path],
        shapes: Mapping[str, DraftShape],
        *,
        facts: TargetFacts,
        store: "Store",
        name: str,
        questions: Sequence[Question],
        ledger: Ledger,
        on_answer: Callable[[Answer], None],
    ) -> None:
        """`drafters`, `shapes`: by contender, DFLASH first; `facts`: the target's; `name`: a hash."""
        if float(os.environ.get(_SIMULATION) or -1) > 0:
            raise ConfigurationError(
                f"{_SIMULATION} is set, which makes SGLang report an invented acceptance; unset it"
            )
        for contender, shape in shapes.items():
            launch.check_sglang_serves(shape, contender)
        self._spec = spec
        self._shapes = shapes
        self._store = store
        self._name = name
        self._context = facts.max_positions
        self._questions, self._ledger, self._on_answer = questions, ledger, on_answer
        self._flags = {MTP: launch.sglang_mtp_flags(), NONE: []}
        for contender, folder in drafters.items():
            flags = launch.sglang_drafter_flags(str(folder), shapes[contender], hybrid=facts.hybrid)
            self._flags[contender] = flags
        self._given = {server.contender: server.url for server in spec.evaluation.servers}
        wants_mtp = MTP in spec.evaluation.baselines
        has_mtp = facts.predicts_ahead or MTP in self._given
        self.contenders = [*drafters, *([MTP] if wants_mtp and has_mtp else []), NONE]
        self._left_out = [launch.NO_MTP] if wants_mtp and not has_mtp else []

    def block_size(self, contender: str) -> int:
        """Tokens that one verification looks at."""
        if contender in self._shapes:
            return self._shapes[contender].block_size
        return launch.MTP_DRAFT_TOKENS if contender == MTP else 1

    def run(self) -> ServedRun:
        """Measure every contender at every concurrency; what the ledger has whole is not redone."""
        found = ServedRun(warnings=list(self._left_out))
        for contender in self.contenders:
            asyncio.run(self._contender(contender, found))
        return found

    async def _contender(self, contender: str, found: ServedRun) -> None:
        evaluation = self._spec.evaluation
        settings = [(c, r) for c in evaluation.concurrency for r in range(evaluation.repeats)]
        records: dict[tuple[int, int], dict[str, Any]] = {}
        for setting in settings:
            if (record := self._store.find_json(self._record(contender, *setting))) is not None:
                records[setting] = record
        missing = [setting for setting in settings if setting not in records]
        judging = contender == NONE and evaluation.temperature == 0.0
        if missing or judging:
            async with self._server(contender) as server:
                await self._check_settings(contender, server, found)
                for concurrency, repeat in missing:
                    measured = await self._measure(server, contender, concurrency, repeat)
                    self._store.put_json(self._record(contender, concurrency, repeat), measured)
                    records[concurrency, repeat] = measured
                if judging:
                    found.differences = await self._judge(server)
        given = self._given.get(contender)
        found.flags[contender] = [given] if given else self._flags[contender]
        for concurrency, repeat in settings:
            record = records[concurrency, repeat]
            found.wall_seconds.setdefault((contender, concurrency), []).append(record["wall_seconds"])
            found.warnings += record["warnings"]

    def _record(self, contender: str, concurrency: int, repeat: int) -> str:
        return layout.evaluation(self._name, f"runs/{contender}-{concurrency}-{repeat}.json")

    def _server(self, contender: str) -> "_Server":
        if contender in self._given:
            return _Server(self._given[contender])
        evaluation = self._spec.evaluation
        target = self._spec.target.model_copy(update={"dtype": evaluation.dtype})
        common = [
            "--enable-metrics",
            *("--max-running-requests", str(max(evaluation.concurrency))),
            *evaluation.server_args,
        ]
        # Speculation last, so that nothing can switch off what is being measured.
        generation = Generation(server_args=[*common, *self._flags[contender]])
        return _Server(ServerProcess(target, generation, self._context))

    async def _check_settings(self, contender: str, server: "_Server", found: ServedRun) -> None:
        """Stop when the server speculates otherwise than it was told to."""
        info = await server.get("/server_info")
        found.version = str(info.get("version", found.version))
        found.effective[contender] = {
            key: value
            for key, value in info.items()
            if key.startswith("speculative_")
            or key in ("model_path", "dtype", "attention_backend", "quantization", "tp_size")
        }
        drafting = contender in self._shapes
        wanted = {MTP: "EAGLE", NONE: None}.get(contender, "DFLASH"), self.block_size(contender)
        served = (info.get("speculative_algorithm"), info.get("speculative_num_draft_tokens"))
        if served[0] != wanted[0] or (drafting and served[1] != wanted[1]):
            raise ConfigurationError(
                f"the SGLang server for {contender} speculates with {served[0]} and {served[1]} draft tokens "
                f"where {wanted[0]} and {wanted[1]} were asked for; check evaluation.serverArgs and "
                "evaluation.servers, and the export's config.json"
            )
        if drafting and contender in self._given:
            found.warnings.append(
                f"{contender} was measured at {self._given[contender]}, which serves "
                f"{info.get('speculative_draft_model_path', 'a drafter it does not name')}: see that this is "
                "the drafter reported on"
            )

    async def _warm_up(self, server: "_Server") -> None:
        """First answers of a fresh server are slow, and may be its last: they are not measured."""
        if not server.warm:
            for question in self._questions[:_WARM_UP_ANSWERS]:
                await server.generate(self._body(question, _WARM_UP_TOKENS))
            server.warm = True

    async def _measure(
        self, server: "_Server", contender: str, concurrency: int, repeat: int
    ) -> dict[str, Any]:
        """All questions once, `concurrency` in flight; gives the record of this setting."""
        warnings: list[str] = []
        for attempt in range(_TRIES):
            try:
                await self._warm_up(server)
                await server.flush_cache()
                before = await server.counters()
                started = time.perf_counter()
                answers = await self._ask_all(server, contender, concurrency, repeat)
                wall = time.perf_counter() - started
                after = await server.counters()
                break
            except (OSError, TimeoutError, TemporaryError) as error:
                if attempt + 1 == _TRIES:
                    raise TemporaryError(
                        f"the SGLang server for {contender} failed {_TRIES} times, {concurrency} in flight "
                        f"({error}): {server.log_tail()}"
                    ) from error
                log.warning("server for %s failed (%s); once more with a fresh one", contender, error)
                warnings.append(
                    f"unstable: the server for {contender} failed once at {concurrency} in flight"
                )
                await server.restart()
        warnings += _cross_check(contender, answers, before, after)
        for answer in answers:
            self._ledger.add(answer)
            self._on_answer(answer)
        self._ledger.flush()
        return {"wall_seconds": wall, "warnings": warnings}

    async def _ask_all(
        self, server: "_Server", contender: str, concurrency: int, repeat: int
    ) -> list[Answer]:
        places = asyncio.Semaphore(concurrency)

        async def ask(question: Question) -> Answer:
            async with places:
                raw = await server.generate(self._body(question, self._spec.evaluation.max_tokens))
            return to_answer(raw, question, contender, concurrency, repeat)

        asking = [asyncio.ensure_future(ask(question)) for question in self._questions]
        try:
            return list(await asyncio.gather(*asking))
        finally:
            # After a failure nothing of this round may still be asked while the next one is measured.
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    def _body(self, question: Question, max_tokens: int) -> dict[str, Any]:
        room = self._context - len(question.prompt_ids)
        return {
            "input_ids": question.prompt_ids,
            "sampling_params": {
                "temperature": self._spec.evaluation.temperature,
                "max_new_tokens": min(max_tokens, room),
                "sampling_seed": sample_seed(0, question.sample_id),
            },
        }

    async def _judge(self, server: "_Server") -> Equality:
        """First differences at the first concurrency, scored by the server without speculation."""
        concurrency = self._spec.evaluation.concurrency[0]
        differences = []
        for question in self._questions:
            plain = self._ledger.find(NONE, concurrency, 0, question.sample_id)
            other = self._ledger.find(DFLASH, concurrency, 0, question.sample_id)
            if plain is None or other is None or plain.tokens == other.tokens:
                continue
            scored: dict[tuple[int, int], Scores] = {}
            position = next(
                (i for i, (a, b) in enumerate(zip(plain.tokens, other.tokens, strict=False)) if a != b), None
            )
            if position is not None:
                pair = plain.tokens[position], other.tokens[position]
                text = [*question.prompt_ids, *plain.tokens[:position]]
                scored[pair] = await server.scores(text, *pair)
            difference = compare(
                sample_id=question.sample_id,
                contender=DFLASH,
                prompt=question.prompt_ids,
                plain=plain.tokens,
                other=other.tokens,
                dtype=self._spec.evaluation.dtype,
                scores=lambda _, a, b, scored=scored: scored[a, b],  # type: ignore[misc]
            )
            if difference is not None:
                differences.append(difference)
        return summarise(len(self._questions), differences)


def to_answer(
    raw: dict[str, Any], question: Question, contender: str, concurrency: int, repeat: int
) -> Answer:
    """An answer of `/generate`, counted as everywhere here.

    SGLang tells how many verifications had how many correct drafts, not in which order, and counts a
    last verification whole though the answer ends inside it. What is beyond the answer's end is taken
    off the largest counts.
    """
    tokens, meta = list(raw["output_ids"]), raw["meta_info"]
    if len(tokens) != meta["completion_tokens"]:
        raise TemporaryError(
            f"{question.sample_id}: {len(tokens)} tokens came and {meta['completion_tokens']} were announced"
        )
    histogram = meta.get("spec_correct_drafts_histogram") or []
    if contender == NONE:
        emitted, accepted = [1] * (len(tokens) - 1), [0] * (len(tokens) - 1)
    else:
        accepted = [drafts for drafts, count in enumerate(histogram) for _ in range(count)]
        emitted = [drafts + 1 for drafts in accepted]
        surplus = sum(emitted) - (len(tokens) - 1)
        while surplus > 0 and emitted:
            cut = min(surplus, emitted[-1] - 1)
            if cut == 0:
                emitted.pop()
                accepted.pop()
                surplus -= 1
                continue
            emitted[-1] -= cut
            accepted[-1] = min(accepted[-1], emitted[-1])
            surplus -= cut
            emitted, accepted = _sorted_together(emitted, accepted)
    received, prefilled, finished = (
        meta.get(name) for name in ("request_received_ts", "prefill_finished_time", "request_finished_ts")
    )
    if received and prefilled and finished and prefilled >= received:
        prefill, decode = prefilled - received, finished - prefilled
    else:
        prefill, decode = 0.0, float(meta["e2e_latency"])
    reason = meta["finish_reason"]
    return Answer(
        sample_id=question.sample_id,
        contender=contender,
        concurrency=concurrency,
        repeat=repeat,
        tokens=tokens,
        accepted=accepted,
        emitted=emitted,
        ordered=contender == NONE,
        finish_reason=reason["type"] if isinstance(reason, dict) else str(reason),
        prefill_seconds=prefill,
        decode_seconds=decode,
    )


def _sorted_together(emitted: list[int], accepted: list[int]) -> tuple[list[int], list[int]]:
    pairs = sorted(zip(emitted, accepted, strict=True))
    return [e for e, _ in pairs], [a for _, a in pairs]


def _cross_check(
    contender: str, answers: Sequence[Answer], before: dict[str, float], after: dict[str, float]
) -> list[str]:
    """Do the server's own counters agree with the answers' figures? A sentence for each that does not."""
    counted = {
        "sglang:generation_tokens_total": sum(len(a.tokens) for a in answers),
        "sglang:spec_verify_calls_total": sum(a.verifications for a in answers) if contender != NONE else 0,
    }
    found = []
    for name, mine in counted.items():
        if name not in after or not mine:
            continue
        theirs = after[name] - before.get(name, 0.0)
        if abs(theirs - mine) > 0.01 * mine + 2:
            found.append(
                f"{contender}: answers add up to {mine} where the server counted {theirs:.0f} ({name}); "
                "do not trust its figures"
            )
    return found


class _Server:
    """One server, started here or given by its address, and its client."""

    def __init__(self, server: ServerProcess | str) -> None:
        self._server = server
        self._client: HttpClient | None = None
        self.warm = False
        """Whether it has answered since it was started."""

    async def __aenter__(self) -> "_Server":
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def _start(self) -> None:
        if isinstance(self._server, str):
            self._client = HttpClient(self._server)
            # A server that was given is not ours to start: it has a few minutes to come back.
            await wait_until_ready(
                self._client,
                _GIVEN_SECONDS,
                f"the SGLang server at {self._server} did not answer for {_GIVEN_SECONDS:.0f} s; "
                "start it, or correct evaluation.servers",
            )
            return
        try:
            await self._server.start()
        except BaseException:
            await asyncio.to_thread(self._server.kill)
            raise
        self._client = HttpClient(self._server.url)

    async def _stop(self) -> None:
        self.warm = False
        if self._client is not None:
            self._client.close()
        if isinstance(self._server, ServerProcess):
            await asyncio.to_thread(self._server.kill)

    async def restart(self) -> None:
        """A fresh server with the same flags; one that was given is waited for."""
        await self._stop()
        await self._start()

    def log_tail(self) -> str:
        """The end of what the server has said, or where to look."""
        return f"see the log of {self._server}" if isinstance(self._server, str) else self._server.log_tail()

    async def get(self, path: str) -> dict[str, Any]:
        """A JSON object that the server tells; empty where it does not."""
        assert self._client is not None
        status, value = await self._client.get(path, 60.0)
        return value if status == 200 and isinstance(value, dict) else {}

    async def flush_cache(self) -> None:
        """Forget prompts, so that no contender profits from those before."""
        assert self._client is not None
        await self._client.post("/flush_cache", {}, 60.0)

    async def counters(self) -> dict[str, float]:
        """The server's counters, summed over labels; empty when it does not export them."""
        assert self._client is not None
        status, text = await self._client.get("/metrics", 60.0)
        return read_counters(text) if status == 200 and isinstance(text, str) else {}

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        """One answer; TemporaryError when the server gives none."""
        assert self._client is not None
        seconds = 300 + body["sampling_params"]["max_new_tokens"]
        status, value = await self._client.post("/generate", body, seconds)
        if status != 200 or not isinstance(value, dict):
            raise TemporaryError(f"status {status}: {str(value)[:300]}")
        return value

    async def scores(self, text: list[int], plain: int, other: int) -> Scores:
        """Log-probabilities after a text, lifted to the size that logits usually have."""
        value = await self.generate(
            {
                "input_ids": text,
                "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
                "return_logprob": True,
                "token_ids_logprob": [plain, other],
                "top_logprobs_num": 1,
            }
        )
        meta = value["meta_info"]
        by_token = {token: value for value, token, *_ in meta["output_token_ids_logprobs"][0]}
        best = meta["output_top_logprobs"][0][0][0]
        lift = _ASSUMED_LOGIT - best
        return Scores(by_token[plain] + lift, by_token[other] + lift, best + lift)


_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{[^}]*\})? (?P<value>\S+)$", re.M)


def read_counters(text: str) -> dict[str, float]:
    """Samples of Prometheus' text format, summed over labels."""
    found: dict[str, float] = {}
    for sample in _SAMPLE.finditer(text):
        found[sample["name"]] = found.get(sample["name"], 0.0) + float(sample["value"])
    return found
