"""Loops in token ids are found; text that merely resembles itself is left alone."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.generation.repetition import _gram_hashes, degenerate, measure, tail_period
from dflash.generation.toolcalls import loops

RNG = np.random.default_rng(0)


def fresh(tokens: int) -> np.ndarray:
    """Ids without repetition."""
    return RNG.permutation(200_000)[:tokens].astype(np.int32)


@pytest.mark.parametrize("period", [1, 2, 3, 7, 8, 9, 40, 500])
def test_a_cycle_at_the_end_of_a_cut_answer_is_a_loop(period: int) -> None:
    ids = np.concatenate([fresh(1000), np.resize(fresh(period), 3000)])
    found = measure(ids)
    assert found.period == period
    assert found.run >= 3000
    assert degenerate(found, len(ids), cut=True)


def test_a_long_loop_from_which_the_answer_escapes_is_a_loop() -> None:
    ids = np.concatenate([fresh(2000), np.resize(fresh(40), 6000), fresh(200)])
    assert degenerate(measure(ids), len(ids), cut=False)


def test_a_loop_that_counts_up_is_a_loop() -> None:
    rounds = [np.concatenate([fresh(1), np.arange(300_000, 300_020)]) for _ in range(60)]
    ids = np.concatenate([fresh(100), *rounds]).astype(np.int32)
    assert degenerate(measure(ids), len(ids), cut=False)


def test_saying_something_three_times_is_not_a_loop() -> None:
    code = fresh(700)
    ids = np.concatenate([fresh(300), code, fresh(200), code, fresh(100), code, fresh(50)])
    found = measure(ids)
    assert found.heavy_share < 0.2  # places that two n-grams share by chance
    assert not degenerate(found, len(ids), cut=False)


def test_a_rule_of_dashes_at_the_end_of_a_whole_answer_is_not_a_loop() -> None:
    ids = np.concatenate([fresh(800), np.full(70, 5, np.int32)])
    assert not degenerate(measure(ids), len(ids), cut=False)
    assert degenerate(measure(ids), len(ids), cut=True)


@given(st.integers(0, 2000), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_ids_without_repetition_are_never_flagged(length: int, seed: int) -> None:
    ids = np.random.default_rng(seed).permutation(200_000)[:length].astype(np.int32)
    assert not degenerate(measure(ids), length, cut=True)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(2, 30), st.integers(0, 11))
@settings(max_examples=200, deadline=None)
def test_the_run_found_has_the_period_found(pattern: list[int], rounds: int, extra: int) -> None:
    ids = np.array([9, 8, *(pattern * rounds), *pattern[:extra]], np.int32)
    period, run = tail_period(ids, _gram_hashes(ids))
    if period:
        tail = ids[len(ids) - run :]
        assert np.array_equal(tail[period:], tail[:-period])
        assert run >= 2 * period


@pytest.mark.parametrize("length", [0, 1, 7, 8, 15, 16, 17])
def test_short_answers_are_measured_without_error(length: int) -> None:
    assert not degenerate(measure(np.arange(length, dtype=np.int32)), length, cut=True)


def test_the_cost_of_a_token_does_not_grow_with_the_length_of_its_loop() -> None:
    def seconds_a_token(length: int) -> float:
        ids = np.resize(fresh(40), length)
        best = np.inf
        for _ in range(7):
            began = time.thread_time()
            for _ in range(65_536 // length):
                measure(ids)
            best = min(best, time.thread_time() - began)
        return best / 65_536

    assert seconds_a_token(32_768) < 2 * seconds_a_token(1024)


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'


def test_three_equal_tool_calls_are_a_loop_however_they_are_spaced() -> None:
    text = call('{"a": 1, "b": 2}') + "thinking" + call('{"b":2,"a":1}') + call('{"a": 1,  "b": 2}')
    assert loops(text)
    assert not loops(call('{"a": 1}') + call('{"a": 1}'))


def test_many_tool_calls_that_differ_in_a_counter_are_a_loop_and_a_few_are_work() -> None:
    counted = [call(f'{{"city": "Paris", "try": {i}}}') for i in range(12)]
    assert loops("".join(counted))
    assert not loops("".join(counted[:5]))
    assert not loops("".join(call(f'{{"city": "{name}"}}') for name in "abcdefghijkl"))
