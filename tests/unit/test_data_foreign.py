"""Datasets that someone else made: every form is read, judged and told about before it costs anything."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash.data.foreign import Foreign, read_foreign
from dflash.data.render import Renderer
from dflash.errors import ConfigurationError
from dflash.generation.gate import Judge, Limits
from dflash.generation.report import Report, new_report, of_file
from dflash.resource.generation import Gate
from tests.support.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
RENDERER = Renderer(TOKENIZER, thinking=True)
PROSE = "".join(chr(97 + (i * i + i // 7) % 26) for i in range(120))
GOOD = [*TOKENIZER.encode(PROSE), 258]


def read(folder: Path, *rows: dict[str, Any]) -> list[Foreign]:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return list(read_foreign(str(path), folder, RENDERER))


def judged(samples: list[Foreign], block_size: int = 16) -> tuple[list[str | None], Report]:
    judge = Judge.of(Limits.of(Gate(), block_size), TOKENIZER)
    report = new_report(judge.limits)
    return [sample.reason for sample in of_file(iter(samples), judge, RENDERER, report)], report


def test_the_same_sample_in_every_form_is_the_same_sample(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": PROSE}]
    prompt = RENDERER.prompt_ids(messages[:1]).tolist()
    ids = prompt + GOOD
    samples = read(
        tmp_path,
        {"prompt_ids": prompt, "output_ids": GOOD},
        {"input_ids": ids, "loss_mask": [0] * len(prompt) + [1] * len(GOOD)},
        {"input_ids": ids, "labels": [-100] * len(prompt) + GOOD},
        {"messages": messages},
    )
    for sample in samples:
        assert sample.reason is None
        assert sample.row.prompt_ids.tolist() == prompt
        assert sample.row.output_ids.tolist() == GOOD
    assert len({sample.row.sample_id for sample in samples}) == 4
    reasons, report = judged(samples)
    assert reasons == [None, "duplicate", "duplicate", "duplicate"]
    assert report.samples == 1


def test_parquet_is_read_like_json_lines(tmp_path: Path) -> None:
    rows = [{"prompt_ids": [1, 2, n], "output_ids": GOOD} for n in range(5)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "d.parquet")
    ours = list(read_foreign("d.parquet", tmp_path, None))
    theirs = read(tmp_path, *rows)
    assert [s.row.sample_id for s in ours] == [s.row.sample_id for s in theirs]


def test_each_supervised_stretch_becomes_a_sample_with_all_before_it_as_prompt(tmp_path: Path) -> None:
    (first, second) = read(
        tmp_path, {"input_ids": [1, 2, 3, 4, 5, 6], "loss_mask": [0, 1, 1, 0, 1, 0], "id": "x"}
    )
    assert (first.row.prompt_ids.tolist(), first.row.output_ids.tolist()) == ([1], [2, 3])
    assert (second.row.prompt_ids.tolist(), second.row.output_ids.tolist()) == ([1, 2, 3, 4], [5])
    assert (first.row.turn, second.row.turn, second.row.source_id) == (0, 1, "x")


@pytest.mark.parametrize("mask", [[0, 0, 0], [1, 1, 1]])
def test_masks_of_one_kind_are_dropped_with_their_reason(tmp_path: Path, mask: list[int]) -> None:
    (sample,) = read(tmp_path, {"input_ids": [1, 2, 3], "loss_mask": mask})
    assert sample.reason == "nothing_supervised"


def test_rows_of_6_31_and_200_supervised_tokens_at_block_size_16_keep_one(tmp_path: Path) -> None:
    long = np.random.default_rng(0).integers(97, 122, 200).tolist()
    samples = read(tmp_path, *[{"prompt_ids": [1], "output_ids": long[:n]} for n in (6, 31, 200)])
    assert judged(samples)[0] == ["too_short", "too_short", None]


def test_a_template_that_rewrites_the_prompt_once_there_is_an_answer_is_told(tmp_path: Path) -> None:
    rewriting = tiny_tokenizer("{{ messages|length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    path = tmp_path / "d.jsonl"
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path.write_text(json.dumps(row) + "\n")
    (sample,) = read_foreign(str(path), tmp_path, Renderer(rewriting, thinking=True))
    assert sample.reason == "template"


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"text": "a"}, "has fields text"),
        ({"input_ids": [1, 2]}, "neither loss_mask nor labels"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "1 mask entries for 2 tokens"),
        ({"prompt_ids": [1], "output_ids": ["a"]}, "whole numbers"),
        ({"prompt_ids": [1], "output_ids": [-1]}, "ids from 0 on"),
    ],
)
def test_unknown_forms_are_refused_with_file_and_line(tmp_path: Path, row: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told) as caught:
        read(tmp_path, {"prompt_ids": [1], "output_ids": [2]}, row)
    assert "data.jsonl line 2" in str(caught.value)


def test_the_report_on_the_disaster_set_names_the_cause_and_shows_it(tmp_path: Path) -> None:
    # 1,000 rows of which 87 % have exactly six supervised tokens
    generator = np.random.default_rng(0)
    rows = []
    for number in range(1000):
        answer = generator.integers(97, 122, 5 if number % 100 < 87 else 60).tolist()
        rows.append({"prompt_ids": [number % 200, 1], "output_ids": [*answer, 258]})
    reasons, report = judged(read(tmp_path, *rows))
    assert reasons.count("too_short") == 870
    figures = report.as_json()
    assert figures["histogram"] == {"61": 130}
    assert "870 have exactly 6" in figures["refused"]
    assert len(report.dropped["too_short"]) == 3
    assert all(example.answer.endswith("<|im_end|>") for example in report.dropped["too_short"])


def test_the_report_counts_lengths_scripts_thinking_and_repeated_answers(tmp_path: Path) -> None:
    russian = [*TOKENIZER.encode("".join(chr(0x430 + (i * i + i // 5) % 32) for i in range(60))), 258]
    thought = [*TOKENIZER.encode("<think>hm</think>"), *GOOD]
    answers = [GOOD, GOOD, russian, thought]
    samples = read(
        tmp_path, *[{"prompt_ids": [n, 1], "output_ids": answer} for n, answer in enumerate(answers)]
    )
    reasons, report = judged(samples)
    assert reasons == [None] * 4
    figures = report.as_json()
    assert figures["scripts"] == {"latin": 3, "cyrillic": 1}
    assert (figures["same_answers"], figures["thinking"], figures["refused"]) == (1, 1, None)
    assert figures["prompt_histogram"] == {"2": 4}
