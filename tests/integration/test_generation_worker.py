"""A worker against a fake engine and a real store: each prompt exactly once, whatever happens."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from dflash.data.dataset import Dataset
from dflash.data.parts import PartLog, find_manifest
from dflash.errors import ConfigurationError, Preempted, TemporaryError
from dflash.resource.generation import Gate
from dflash.storage.embedded import EmbeddedStore
from dflash.storage.store import Store
from tests.support.fake_engine import Behaviour, FakeSglang, fake_answer
from tests.support.generation import (
    PATIENCE,
    check_dataset,
    committed_prompts,
    make_worker,
    run,
    write_prompts,
)


def test_all_prompts_become_samples_in_a_manifest(store: Store, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, 100)
    with FakeSglang() as fake:
        manifest = run(make_worker(store, prompts, urls=[fake.url]))
    assert manifest.samples == 100
    assert manifest.histogram == {"40": 100}
    check_dataset(store, prompts)
    progress = store.get_json("datasets/d/progress/0.json")
    assert (progress["done"], progress["total"], progress["figures"]["tokens"]) == (100, 100, 4000)


def test_a_second_run_asks_nothing(store: Store, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, 20)
    with FakeSglang() as fake:
        first = run(make_worker(store, prompts, urls=[fake.url]))
        asked = fake.requests.total()
        assert run(make_worker(store, prompts, urls=[fake.url])) == first
        assert fake.requests.total() == asked


def test_a_stopped_worker_has_committed_what_was_finished_and_its_successor_asks_only_the_rest(
    store: Store, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path, 60)
    with FakeSglang(Behaviour(delay=0.02)) as fake:
        worker = make_worker(store, prompts, urls=[fake.url], in_flight=4, part_prompts=1000)

        async def stop_in_the_middle() -> None:
            task = asyncio.create_task(worker.run())
            while worker.tally.seen < 25:
                await asyncio.sleep(0.01)
            worker.stop()
            await task

        with pytest.raises(Preempted):
            asyncio.run(stop_in_the_middle())
        done = committed_prompts(store)
        assert done.total() == worker.tally.seen >= 25
        fake.requests.clear()
        run(make_worker(store, prompts, urls=[fake.url]))
        canaries = 3
        assert fake.requests.total() == 60 - done.total() + canaries
    check_dataset(store, prompts)


def test_a_prompt_that_did_not_finish_in_order_is_asked_again(store: Store, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, 8)
    with FakeSglang() as fake:
        slow = bytes("question 3", "utf8")
        fake.behaviour.hang = lambda ids: bytes_of(slow) in ",".join(map(str, ids))
        worker = make_worker(store, prompts, urls=[fake.url], in_flight=8)

        async def stop_when_the_others_are_done() -> None:
            task = asyncio.create_task(worker.run())
            while worker.tally.seen < 7:
                await asyncio.sleep(0.01)
            worker.stop()
            await task

        with pytest.raises(Preempted):
            asyncio.run(stop_when_the_others_are_done())
        assert committed_prompts(store).total() == 7
        fake.behaviour.hang = lambda ids: False
        run(make_worker(store, prompts, urls=[fake.url]))
    check_dataset(store, prompts)


def bytes_of(text: bytes) -> str:
    """How a text's ids read in a list, with the tiny tokenizer."""
    from tests.support.tiny_tokenizer import tiny_tokenizer

    return ",".join(str(token) for token in tiny_tokenizer().encode(text.decode()))


def test_two_workers_racing_for_the_same_prompts_count_none_twice(store: Store, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, 200)

    async def both(url: str) -> list[object]:
        workers = [make_worker(store, prompts, urls=[url], part_prompts=7) for _ in range(2)]
        return await asyncio.gather(*[worker.run() for worker in workers])

    with FakeSglang(Behaviour(delay=0.01)) as fake:
        manifests = [manifest for manifest in asyncio.run(both(fake.url)) if manifest is not None]
    assert manifests
    assert all(manifest == manifests[0] for manifest in manifests)
    check_dataset(store, prompts)


def test_two_shares_make_one_dataset_and_the_last_worker_closes_it(store: Store, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, 101)
    with FakeSglang() as fake:
        assert run(make_worker(store, prompts, urls=[fake.url], index=0, replicas=2)) is None
        assert run(make_worker(store, prompts, urls=[fake.url], index=1, replicas=2)).samples == 101
    check_dataset(store, prompts)


def test_a_storm_of_refusals_loses_nothing_and_lowers_the_pace(store: Store, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, 80)
    with FakeSglang(Behaviour(refuse_share=0.3, delay=0.01)) as fake:
        worker = make_worker(store, prompts, urls=[fake.url], in_flight=64)
        run(worker)
    check_dataset(store, prompts)
    progress = store.get_json("datasets/d/progress/0.json")
    assert progress["figures"]["retries"] > 5
    assert worker._engine.in_flight < 64


def test_a_request_that_is_never_answered_is_dropped_after_two_tries_and_the_rest_finish(
    store: Store, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path, 50)
    with FakeSglang() as fake:
        needle = bytes_of(b"question 7")
        fake.behaviour.hang = lambda ids: needle in ",".join(map(str, ids)) and len(ids) < 42
        patience = PATIENCE.__class__(answer=0.5, progress=30.0, absence=30.0)
        manifest = run(make_worker(store, prompts, urls=[fake.url], patience=patience))
    assert manifest.dropped == {"unanswered": 1}
    assert manifest.samples == 49


def test_prompts_too_long_for_the_context_are_dropped_unasked_and_the_cap_fits_the_context(
    store: Store, tmp_path: Path
) -> None:
    rows = [{"prompt": "x" * n} for n in (10, 60, 120, 300)]
    prompts = tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = []
    with FakeSglang() as fake:
        fake.behaviour.answer = lambda ids, tokens: asked.append(len(ids)) or fake_answer(ids, tokens)
        gate = Gate(max_dropped_share=1.0)
        manifest = run(make_worker(store, prompts, urls=[fake.url], context_length=200, gate=gate))
    assert manifest.dropped == {"prompt_too_long": 1}
    assert manifest.samples == 3
    assert max(asked) < 200 - 32


def test_what_the_engine_refuses_is_not_asked_again(store: Store, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, 40)
    with FakeSglang() as fake:
        needle = bytes_of(b"question 5")
        fake.behaviour.too_long = lambda ids: needle in ",".join(map(str, ids))
        manifest = run(make_worker(store, prompts, urls=[fake.url]))
        assert max(fake.requests.values()) == 1
    assert manifest.dropped == {"refused": 1}


def test_an_answer_with_fewer_tokens_than_it_says_is_not_believed(store: Store, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, 40)
    lied: set[tuple[int, ...]] = set()

    def lie_once(ids: list[int]) -> bool:
        first = tuple(ids) not in lied
        lied.add(tuple(ids))
        return first

    with FakeSglang(Behaviour(lie=lie_once)) as fake:
        run(make_worker(store, prompts, urls=[fake.url]))
    check_dataset(store, prompts)


def test_a_server_that_looks_healthy_but_generates_nothing_ends_the_worker(
    store: Store, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path, 40)
    patience = PATIENCE.__class__(answer=60.0, progress=1.0, absence=30.0)
    with FakeSglang(Behaviour(stuck=True)) as fake:
        with pytest.raises(TemporaryError, match="answered nothing for 1 s"):
            run(make_worker(store, prompts, urls=[fake.url], patience=patience))
        fake.behaviour.stuck = False
    assert find_manifest(store, "d") is None


def test_a_slow_server_is_not_stuck_while_its_tokens_flow(store: Store, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, 4)
    patience = PATIENCE.__class__(answer=60.0, progress=3.0, absence=30.0)
    with FakeSglang() as fake:
        worker = make_worker(store, prompts, urls=[fake.url], patience=patience)
        fake.behaviour.delay, fake.behaviour.flowing = 7.0, True
        run(worker)
    check_dataset(store, prompts)


def test_a_server_too_busy_for_its_probes_is_left_alone_while_answers_come(
    store: Store, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path, 60)
    with FakeSglang(Behaviour(delay=0.05)) as fake:
        worker = make_worker(store, prompts, urls=[fake.url], in_flight=4)

        async def unhealthy_from_the_middle_on() -> None:
            task = asyncio.create_task(worker.run())
            while worker.tally.seen < 20:
                await asyncio.sleep(0.01)
            fake.behaviour.unhealthy = True
            await task

        asyncio.run(unhealthy_from_the_middle_on())
        # Probes that generate pile up on a busy server: none is ever sent.
        assert set(fake.paths) <= {"/generate", "/model_info", "/server_info", "/v1/loads", "/tokenize"}
    check_dataset(store, prompts)


def test_an_engine_that_answers_with_nothing_visible_is_found_by_the_first_questions(
    store: Store, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path, 40)
    with FakeSglang(Behaviour(answer=lambda ids, tokens: [258])) as fake:
        with pytest.raises(ConfigurationError, match="with nothing"):
            run(make_worker(store, prompts, urls=[fake.url]))
        assert fake.requests.total() <= 3


def test_a_bad_dataset_is_refused_early_with_its_cause_and_again_at_every_start(
    store: Store, tmp_path: Path
) -> None:
    # 1,000 prompts of which 87 % get answers of exactly six tokens
    prompts = write_prompts(tmp_path, 1000)
    generator = random.Random(0)

    def mostly_six(ids: list[int], tokens: int) -> list[int]:
        return fake_answer(ids, 6 if generator.random() < 0.87 else tokens)

    with FakeSglang(Behaviour(answer=mostly_six)) as fake:
        with pytest.raises(ConfigurationError, match="have exactly 6") as caught:
            run(make_worker(store, prompts, urls=[fake.url]))
        assert "too few supervised tokens" in str(caught.value)
        assert fake.requests.total() < 100 + 16 + 3 + 16
        asked = fake.requests.total()
        with pytest.raises(ConfigurationError, match="have exactly 6"):
            run(make_worker(store, prompts, urls=[fake.url]))
        assert fake.requests.total() == asked
    assert find_manifest(store, "d") is None


def test_nothing_left_to_train_on_is_an_error_and_not_an_empty_dataset(store: Store, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, 5)
    gate = Gate(max_dropped_share=1.0)
    with (
        FakeSglang(Behaviour(tokens=6)) as fake,
        pytest.raises(ConfigurationError, match="no sample was kept of 5 prompts"),
    ):
        run(make_worker(store, prompts, urls=[fake.url], gate=gate))


def test_each_turn_is_a_sample_that_sees_the_answers_before_it(store: Store, tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "stale"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "stale"},
        {"role": "user", "content": "three"},
    ]
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"messages": messages}) + "\n")
    with FakeSglang() as fake:
        fake.behaviour.answer = lambda ids, tokens: [*ids_of("answer after ", len(ids)), 258]
        manifest = run(make_worker(store, prompts, urls=[fake.url], gate=Gate(min_supervised_tokens=4)))
    assert (manifest.samples, manifest.prompts.kept) == (3, 1)
    assert manifest.output_tokens == sum(part.output_tokens for part in manifest.parts)
    from tests.support.tiny_tokenizer import tiny_tokenizer

    with Dataset.open(store, "d") as data:
        texts = [tiny_tokenizer().decode(data.fetch(n).prompt_ids) for n in range(3)]
        assert [data.fetch(n).turn for n in range(3)] == [0, 1, 2]
    assert "stale" not in "".join(texts)
    assert texts[1].count("answer after") == 1
    assert texts[2].count("answer after") == 2


def test_after_a_turn_that_is_dropped_the_later_ones_are_not_asked_and_the_earlier_ones_stay(
    store: Store, tmp_path: Path
) -> None:
    messages = [{"role": role, "content": f"{role} {n}"} for n in range(3) for role in ("user", "assistant")]
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"messages": messages[:-1]}) + "\n")
    canaries = 3
    with FakeSglang() as fake:

        def second_turn_is_cut_short(ids: list[int], tokens: int) -> list[int]:
            return fake_answer(ids, 2 if fake.requests.total() == canaries + 2 else tokens)

        fake.behaviour.answer = second_turn_is_cut_short
        manifest = run(make_worker(store, prompts, urls=[fake.url], gate=Gate(max_dropped_share=1.0)))
        assert fake.requests.total() == canaries + 2
    assert (manifest.samples, manifest.prompts.kept, manifest.dropped) == (1, 1, {"too_short": 1})


def ids_of(text: str, number: int) -> list[int]:
    from tests.support.tiny_tokenizer import tiny_tokenizer

    return tiny_tokenizer().encode(f"{text}{number}")


def test_workers_and_store_killed_again_and_again_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    kill_at_random(tmp_path, kills=10, prompts=400)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_kills_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    kill_at_random(tmp_path, kills=100, prompts=3000)


def kill_at_random(folder: Path, *, kills: int, prompts: int) -> None:
    """Two workers race for one share while they and the store are killed with SIGKILL."""
    path = write_prompts(folder, prompts)
    generator = random.Random(1)
    with EmbeddedStore(folder / "s3") as server, FakeSglang(Behaviour(delay=0.15)) as fake:

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.support.generation"),
                    *(server.location.model_dump_json(), str(path), fake.url, "0", "1"),
                ],
                env={**os.environ, **server.environment},
                stderr=(folder / "workers.log").open("ab"),
            )

        workers = [start(), start()]
        try:
            for number in range(kills):
                time.sleep(generator.uniform(0.3, 2.0))
                if number % 5 == 4:
                    server.restart()
                else:
                    victim = generator.randrange(2)
                    workers[victim].send_signal(signal.SIGKILL)
                    workers[victim].wait()
                    workers[victim] = start()
            deadline = time.monotonic() + 300
            while find_manifest(server.store(), "d") is None:
                assert time.monotonic() < deadline, (folder / "workers.log").read_text()[-5000:]
                for place, worker in enumerate(workers):
                    if worker.poll() is not None:
                        workers[place] = start()
                time.sleep(0.5)
            check_dataset(server.store(), path)
            log = PartLog(server.store(), "d")
            log.refresh()
            assert log.accounted == prompts
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def test_samples_hold_exactly_the_ids_that_were_sent_and_received(store: Store, tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, 30)
    with FakeSglang() as fake:
        run(make_worker(store, prompts, urls=[fake.url]))
        sent = set(fake.requests)
    with Dataset.open(store, "d") as data:
        for number in range(len(data)):
            row = data.fetch(number)
            assert tuple(row.prompt_ids.tolist()) in sent
            assert np.array_equal(row.ids[row.supervised], row.output_ids)
            assert 0 < row.supervised.sum() < row.length


def test_a_server_that_renders_otherwise_is_refused_with_the_first_differing_position(
    store: Store, tmp_path: Path
) -> None:
    prompts = write_prompts(tmp_path, 5)
    with FakeSglang(Behaviour(renders=[257, 84, 82, 1])) as fake:
        with pytest.raises(ConfigurationError, match="ids differ from position 3 on"):
            run(make_worker(store, prompts, urls=[fake.url]))
        assert fake.requests.total() == 0
