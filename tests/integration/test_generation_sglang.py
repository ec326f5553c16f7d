"""Generation through the real SGLang, on the CPU: replicas that are killed, and a target that thinks."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from dflash.data.dataset import Dataset
from dflash.data.prompts import read_prompts
from dflash.engines.http import HttpClient
from dflash.engines.server import ServerProcess
from dflash.engines.sglang import Patience, SglangEngine
from dflash.resource.generation import Gate, Generation, Sampling
from dflash.resource.target import Target
from dflash.storage.store import Store
from jobs.demo import sglang_cpu
from tests.support.generation import committed_prompts, make_worker
from tests.support.thinking import QUESTIONS, save_thinking_target
from tests.support.tiny_tokenizer import SPECIALS, STRIPPING, tiny_tokenizer

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(not sglang_cpu.available(), reason="needs `make serve-env` and a C compiler"),
]

PATIENCE = Patience(answer=600.0, progress=600.0, absence=900.0)
TOKENS = 40
CONTEXT = 512
OPEN, CLOSE = 256 + SPECIALS.index("<think>"), 256 + SPECIALS.index("</think>")


EVERYTHING = Gate(
    min_supervised_tokens=2,
    truncated="keep",
    max_dropped_share=1.0,
    max_empty_share=1.0,
    max_repetition_share=1.0,
)


@pytest.fixture(autouse=True)
def _serving_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in sglang_cpu.environment().items():
        monkeypatch.setenv(name, value)


class KeptEngine(SglangEngine):
    """Stays open after its worker has ended, for direct questions to its server."""

    @classmethod
    def greedy(cls, model: Path, **settings: Any) -> Self:
        """With a server of its own, not started; `settings` of the generation section."""
        generation = Generation(
            # fp32: in bf16 a near-tie may fall the other way in another batch
            server_args=[*sglang_cpu.SERVER_ARGS, "--dtype", "float32"],
            sampling=Sampling(temperature=0.0),
            in_flight=8,
            **settings,
        )
        target = Target(model=str(model), dtype="float32")
        server = ServerProcess(target, generation, CONTEXT)
        return cls(generation, weights="w", patience=PATIENCE, server=server)

    @property
    def server(self) -> ServerProcess:
        assert self._process is not None
        return self._process

    async def direct(self, prompt_ids: np.ndarray) -> list[int]:
        """What the server answers to a request that nobody else made up."""
        client = HttpClient(self.server.url)
        try:
            body = {
                "input_ids": prompt_ids,
                "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS},
            }
            status, answer = await client.post("/generate", body, 600.0)
            assert status == 200
            ids: list[int] = answer["output_ids"]
            return ids
        finally:
            client.close()

    async def close(self) -> None:
        """Nothing yet."""

    async def really_close(self) -> None:
        """What `close` does otherwise."""
        await super().close()


def test_two_replicas_one_killed_give_every_prompt_once_with_the_ids_of_direct_requests(
    store: Store, tmp_path: Path
) -> None:
    from dflash.model.tokenizer import load_tokenizer
    from jobs.demo.model import prepare

    model = prepare()
    prompts = tmp_path / "p.jsonl"
    subjects = ["a river", "the moon", "bread", "a violin", "snow", "an old map", "bees", "a lighthouse"]
    texts = [f"Write {n + 2} words about {subject}." for subject in subjects for n in range(8)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    engines = [KeptEngine.greedy(model) for _ in range(2)]
    workers = [
        make_worker(
            store,
            prompts,
            urls=[],
            index=index,
            replicas=2,
            part_prompts=8,
            max_tokens=TOKENS,
            context_length=CONTEXT,
            gate=EVERYTHING,
            engine=engine,
            tokenizer=load_tokenizer(str(model)),
        )
        for index, engine in enumerate(engines)
    ]

    async def kill_one_in_the_middle() -> None:
        while workers[0].tally.seen < 10:
            await asyncio.sleep(0.05)
        process = engines[0].server._process
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)

    async def everything() -> None:
        killer = asyncio.create_task(kill_one_in_the_middle())
        try:
            await asyncio.gather(*[worker.run() for worker in workers])
            await killer
            assert engines[0].counts.restarts == 1
            assert engines[0].origin.version
            with Dataset.open(store, "d") as data:
                rows = [data.fetch(number) for number in range(len(data))]
            assert {row.origin.engine for row in rows} == {"sglang"}
            for row in rows[::4]:
                assert row.output_ids.tolist() == await engines[1].direct(row.prompt_ids)
        finally:
            for engine in engines:
                await engine.really_close()

    asyncio.run(everything())
    expected = {prompt.key for prompt in read_prompts(str(prompts), tmp_path)}
    counted = committed_prompts(store)
    assert set(counted) == expected
    assert set(counted.values()) == {1}


def test_the_thinking_of_a_target_that_thinks_is_found_tag_for_tag(store: Store, tmp_path: Path) -> None:
    model = save_thinking_target(tmp_path / "model")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text, "id": text}) + "\n" for text in QUESTIONS))
    engine = KeptEngine.greedy(model)
    worker = make_worker(
        store,
        prompts,
        urls=[],
        max_tokens=TOKENS,
        context_length=CONTEXT,
        gate=EVERYTHING,
        engine=engine,
        tokenizer=tiny_tokenizer(STRIPPING),
    )

    async def everything() -> None:
        try:
            await worker.run()
            with Dataset.open(store, "d") as data:
                rows = [data.fetch(number) for number in range(len(data))]
            for row in rows[:4]:
                assert row.output_ids.tolist() == await engine.direct(row.prompt_ids)
            by_question = {row.source_id: row for row in rows}
            assert set(by_question) == set(QUESTIONS)
            thoughtless = {q for q, row in by_question.items() if row.think_span is None}
            assert thoughtless == set(QUESTIONS[3::4])
            for row in rows:
                ids = row.ids.tolist()
                assert ids.count(OPEN) == ids.count(CLOSE) == (row.think_span is not None)
                if row.think_span is not None:
                    start, end = row.think_span
                    assert (start, row.output_ids[start], row.output_ids[end - 1]) == (0, OPEN, CLOSE)
        finally:
            await engine.really_close()

    asyncio.run(everything())
