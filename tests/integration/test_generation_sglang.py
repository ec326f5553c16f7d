"""Generation through the real SGLang, on the CPU: two replicas, one of which is killed in the middle."""

import asyncio
import json
import os
import signal
from pathlib import Path

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
from tests.support import sglang_cpu
from tests.support.generation import committed_prompts, make_worker

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not sglang_cpu.available(), reason="needs `make serve-env` and a C compiler"),
]

PATIENCE = Patience(answer=600.0, progress=600.0, absence=900.0)
TOKENS = 24


class KeptEngine(SglangEngine):
    """Stays open after its worker has ended, for direct questions to its server."""

    async def close(self) -> None:
        """Nothing yet."""

    async def really_close(self) -> None:
        """What `close` does otherwise."""
        await super().close()


def test_two_replicas_one_killed_give_every_prompt_once_with_the_ids_of_direct_requests(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dflash.model.tokenizer import load_tokenizer
    from jobs.demo.model import prepare

    for name, value in sglang_cpu.environment().items():
        monkeypatch.setenv(name, value)
    model = prepare()
    prompts = tmp_path / "p.jsonl"
    subjects = ["a river", "the moon", "bread", "a violin", "snow", "an old map", "bees", "a lighthouse"]
    texts = [f"Write {n + 2} words about {subject}." for subject in subjects for n in range(8)]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    generation = Generation(
        # fp32: in bf16 a near-tie may fall the other way in another batch
        server_args=[*sglang_cpu.SERVER_ARGS, "--dtype", "float32"],
        sampling=Sampling(temperature=0.0),
        in_flight=8,
    )
    target = Target(model=str(model), dtype="float32")
    engines = [
        KeptEngine(generation, weights="w", patience=PATIENCE, server=ServerProcess(target, generation, 512))
        for _ in range(2)
    ]
    workers = [
        make_worker(
            store,
            prompts,
            urls=[],
            index=index,
            replicas=2,
            part_prompts=8,
            max_tokens=TOKENS,
            context_length=512,
            gate=Gate(
                min_supervised_tokens=2,
                truncated="keep",
                max_dropped_share=1.0,
                max_empty_share=1.0,
                max_repetition_share=1.0,
            ),
            engine=engine,
            tokenizer=load_tokenizer(str(model)),
        )
        for index, engine in enumerate(engines)
    ]

    async def kill_one_in_the_middle() -> None:
        while workers[0].tally.seen < 10:
            await asyncio.sleep(0.05)
        process = engines[0]._process
        assert process is not None
        assert process._process is not None
        os.killpg(process._process.pid, signal.SIGKILL)

    async def direct(rows: list[np.ndarray]) -> list[list[int]]:
        process = engines[1]._process
        assert process is not None
        client = HttpClient(process.url)
        answers = []
        for ids in rows:
            body = {"input_ids": ids, "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS}}
            status, answer = await client.post("/generate", body, 600.0)
            assert status == 200
            answers.append(answer["output_ids"])
        client.close()
        return answers

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
            some = rows[::4]
            for row, ids in zip(some, await direct([row.prompt_ids for row in some]), strict=True):
                assert row.output_ids.tolist() == ids
        finally:
            for engine in engines:
                await engine.really_close()

    asyncio.run(everything())
    expected = {prompt.key for prompt in read_prompts(str(prompts), tmp_path)}
    counted = committed_prompts(store)
    assert set(counted) == expected
    assert set(counted.values()) == {1}
