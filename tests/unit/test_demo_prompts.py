"""The demo's prompts: enough of them, all different, an even mix of kinds over many subjects."""

from collections import Counter
from pathlib import Path

import orjson
import pytest

import jobs.demo

KINDS = {"question", "code", "list", "rewrite", "explain"}


@pytest.fixture(scope="module")
def prompts() -> list[dict[str, str]]:
    path = Path(jobs.demo.__path__[0]) / "prompts.jsonl"
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_every_line_has_the_same_fields_with_text(prompts: list[dict[str, str]]) -> None:
    for prompt in prompts:
        assert list(prompt) == ["id", "group", "kind", "prompt"]
        assert all(value.strip() == value and value for value in prompt.values())


def test_there_are_enough_and_none_twice(prompts: list[dict[str, str]]) -> None:
    assert len(prompts) >= 600
    assert len({prompt["id"] for prompt in prompts}) == len(prompts)
    assert len({prompt["prompt"].casefold() for prompt in prompts}) == len(prompts)


def test_kinds_are_balanced_in_all_and_in_any_hundred_in_a_row(prompts: list[dict[str, str]]) -> None:
    kinds = Counter(prompt["kind"] for prompt in prompts)
    assert set(kinds) == KINDS
    assert all(0.15 <= count / len(prompts) <= 0.35 for count in kinds.values())
    for start in range(0, len(prompts) - 100, 50):
        window = Counter(prompt["kind"] for prompt in prompts[start : start + 100])
        assert all(8 <= window[kind] <= 45 for kind in KINDS), (start, window)


def test_subjects_are_many_and_of_equal_size(prompts: list[dict[str, str]]) -> None:
    groups = Counter(prompt["group"] for prompt in prompts)
    assert len(groups) >= 100
    assert set(groups.values()) == {6}
    kinds = {group: {p["kind"] for p in prompts if p["group"] == group} for group in groups}
    assert all(found == KINDS for found in kinds.values())


def test_lengths_are_within_bounds(prompts: list[dict[str, str]]) -> None:
    words = [len(prompt["prompt"].split()) for prompt in prompts]
    assert min(words) >= 8
    assert max(words) <= 60


def test_every_kind_is_asked_in_more_than_one_wording(prompts: list[dict[str, str]]) -> None:
    for kind in KINDS:
        asked = Counter(p["prompt"].replace(p["group"], "...") for p in prompts if p["kind"] == kind)
        assert len([wording for wording, count in asked.items() if count >= 40]) >= 2, asked
