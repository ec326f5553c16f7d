"""What is in a dataset, in figures and examples: of one that we generated, or of a file someone else made.

Shown by `dflash dataset`. Plain data, so that it can be printed or kept as JSON.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np

from dflash.data.dataset import Dataset
from dflash.data.foreign import Foreign
from dflash.data.keyset import KeySet
from dflash.data.parts import histogram_bin
from dflash.data.render import Renderer
from dflash.data.rows import Row
from dflash.generation.gate import Answer, Judge, Limits, Tally

EXAMPLES = 3
_LOOKED_AT = 2000
"""Samples of which the text is decoded, for the mix of scripts: spread evenly over the dataset."""
_TEXT = 400
"""Characters of an example."""


@dataclass
class Example:
    """A sample to look at."""

    sample_id: str
    prompt: str
    answer: str


@dataclass
class Report:
    """All that is told about a dataset."""

    tally: Tally
    samples: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    thinking: int = 0
    """Samples with thinking."""
    same_answers: int = 0
    """Samples whose answer another one has too, token for token."""
    histogram: Counter[str] = field(default_factory=Counter)
    """Samples by supervised tokens; keys are lower edges."""
    prompt_histogram: Counter[str] = field(default_factory=Counter)
    scripts: Counter[str] = field(default_factory=Counter)
    """Samples by the script of most of their letters, of those that were looked at."""
    kept: list[Example] = field(default_factory=list)
    dropped: dict[str, list[Example]] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Figures without texts."""
        return {
            "samples": self.samples,
            "seen": self.tally.seen,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "thinking": self.thinking,
            "same_answers": self.same_answers,
            "dropped": dict(self.tally.dropped),
            "dropped_examples": self.tally.examples,
            "histogram": {key: self.histogram[key] for key in sorted(self.histogram, key=int)},
            "prompt_histogram": {
                key: self.prompt_histogram[key] for key in sorted(self.prompt_histogram, key=int)
            },
            "scripts": dict(self.scripts.most_common()),
            "refused": self.tally.refusal(final=True),
        }


def new_report(limits: Limits) -> Report:
    """An empty report."""
    return Report(Tally(limits))


def of_dataset(dataset: Dataset, rejects: Iterator[Row], limits: Limits, renderer: Renderer) -> Report:
    """Report on a committed dataset; `rejects` are the rows that its gate dropped."""
    report = new_report(limits)
    step = max(1, len(dataset) // _LOOKED_AT)
    answers = _Answers()
    for number in range(len(dataset)):
        row = dataset.fetch(number)
        report.tally.add(row.sample_id, None)
        _count(report, row, renderer if number % step == 0 else None, answers)
    for row in rejects:
        _drop(report, row, row.dropped or "", renderer)
    return report


def of_file(
    samples: Iterator[Foreign], judge: Judge, renderer: Renderer, report: Report
) -> Iterator[Foreign]:
    """Judge samples that someone else made: gives each with its `reason`, and fills `report` as it goes."""
    answers, seen = _Answers(), KeySet()
    for number, sample in enumerate(samples):
        row = sample.row
        reason = sample.reason
        if reason is None:
            opened = renderer.opens_thinking(row.prompt_ids)
            thinking = renderer.read_thinking(row.output_ids, opened=opened)
            reason = judge.reason(Answer(row.output_ids, row.finish_reason, thinking))
            row = replace(row, think_span=thinking.span)
        if reason is None and not seen.add(_hash(row.prompt_ids.tobytes() + b"/" + row.output_ids.tobytes())):
            reason = "duplicate"
        if reason is None:
            report.tally.add(row.sample_id, None)
            _count(report, row, renderer if number < _LOOKED_AT else None, answers)
        else:
            _drop(report, row, reason, renderer)
        yield Foreign(row, sample.where, reason)


class _Answers:
    """Finds equal answers by hash."""

    def __init__(self) -> None:
        self._seen = KeySet()

    def is_new(self, row: Row) -> bool:
        return self._seen.add(_hash(row.output_ids.tobytes()))


def _hash(data: bytes) -> int:
    return int.from_bytes(sha256(data).digest()[:8], "big")


def _count(report: Report, row: Row, renderer: Renderer | None, answers: _Answers) -> None:
    report.samples += 1
    report.prompt_tokens += len(row.prompt_ids)
    report.output_tokens += len(row.output_ids)
    report.thinking += row.think_span is not None
    report.same_answers += not answers.is_new(row)
    report.histogram[histogram_bin(len(row.output_ids))] += 1
    report.prompt_histogram[histogram_bin(len(row.prompt_ids))] += 1
    if renderer is not None:
        report.scripts[_script(renderer.visible(row.output_ids[:512]))] += 1
        if len(report.kept) < EXAMPLES:
            report.kept.append(_example(row, renderer))


def _drop(report: Report, row: Row, reason: str, renderer: Renderer) -> None:
    report.tally.add(row.sample_id, reason, len(row.output_ids))
    examples = report.dropped.setdefault(reason, [])
    if len(examples) < EXAMPLES:
        examples.append(_example(row, renderer))


def _example(row: Row, renderer: Renderer) -> Example:
    def clipped(ids: Any) -> str:
        text = renderer.text(np.asarray(ids)[: 4 * _TEXT])
        return text if len(text) <= _TEXT else f"{text[: _TEXT // 2]} ... {text[-_TEXT // 2 :]}"

    return Example(f"{row.sample_id} (id {row.source_id})", clipped(row.prompt_ids), clipped(row.output_ids))


def _script(text: str) -> str:
    """The script of most letters, by their Unicode names: LATIN, CJK, CYRILLIC, ..."""
    names = Counter(unicodedata.name(sign, "?").split(" ", 1)[0] for sign in text[:500] if sign.isalpha())
    return names.most_common(1)[0][0].lower() if names else "none"
