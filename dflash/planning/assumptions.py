"""What a plan assumes: named numbers, each with the range it may lie in and where it comes from.

A number that is known (given on the command line, or measured) takes the place of an assumed one with
`known`, and has no range any more. Not for facts: shapes come from config.json, peaks from the profile.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True)
class Assumption:
    """One number. `low` to `high` is where it lies in most runs; equal to `value` when it is known."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    source: str

    @property
    def known(self) -> bool:
        """Whether it was given or measured, so that it cannot move an estimate."""
        return self.low == self.high


_DEFAULTS = (
    Assumption(
        "prompt_tokens",
        300,
        50,
        2000,
        "tokens per sample",
        "not measured: a chat turn with its template; measure by generating a small part",
    ),
    Assumption(
        "response_tokens",
        1000,
        300,
        4000,
        "tokens per sample",
        "not measured: depends on thinking and maxTokens; measure by generating a small part",
    ),
    Assumption("dropped_share", 0.05, 0.0, 0.10, "of samples", "the quality gate stops a dataset above 10 %"),
    Assumption(
        "decode_bandwidth_share",
        0.6,
        0.4,
        0.8,
        "of peak memory bandwidth",
        "Qwen3-8B in bf16 at concurrency 1: 145 tok/s on H100 is 0.71 (Model-Optimizer doc/dflash.md); "
        "103.6 tok/s of a 27B over 4 H100 is 0.42 (sglang#19952)",
    ),
    Assumption(
        "concurrency",
        32,
        8,
        256,
        "answers in flight per GPU",
        "calibrated: 32 gives the 2,000 tok/s per B200 that a 27B reached over 2.3 B tokens",
    ),
    Assumption(
        "speculation_gain",
        1.6,
        1.0,
        2.5,
        "x plain decoding",
        "a target's own MTP accepts 2.8 tokens a verification (llama.cpp#27342), less its overhead",
    ),
    Assumption(
        "target_efficiency",
        0.45,
        0.25,
        0.55,
        "of peak FLOP/s",
        "27 k tok/s of Qwen3-8B prefill on one H200 (SpecForge domino-disaggregated-performance.md) is 0.45",
    ),
    Assumption(
        "drafter_efficiency",
        0.35,
        0.24,
        0.45,
        "of peak FLOP/s",
        "27B on H100 at 2.6 samples/s (SF#654) is 0.36, TorchSpec's 15 samples/s on 4 H100 at least 0.35; "
        "SpecForge reports 43-44 % within a microstep and 0.31 over all on H200",
    ),
    Assumption(
        "link_efficiency", 0.8, 0.5, 0.95, "of a link's bandwidth", "large NCCL transfers; not measured"
    ),
    Assumption(
        "reserved_memory_share",
        0.10,
        0.05,
        0.20,
        "of device memory",
        "CUDA context, communication buffers and fragmentation; not measured",
    ),
    Assumption(
        "startup_minutes",
        8,
        3,
        20,
        "per stage",
        "image, weights from disk or hub, kernel compilation; not measured",
    ),
    Assumption(
        "lost_share",
        0.03,
        0.0,
        0.15,
        "of the time",
        "work repeated after failures; a checkpoint at least every 10 minutes bounds each",
    ),
    Assumption(
        "acceptance_length",
        3.5,
        2.0,
        6.4,
        "tokens a verification",
        "published: 2.8 to 6.4 by task (TorchSpec docs/dflash/README.md, sglang#23000)",
    ),
    Assumption(
        "row_bytes_per_token",
        2.5,
        1.5,
        4.0,
        "bytes",
        "int32 ids in Parquet with zstd; ids below 2^18 have 18 bits of 32 before compression",
    ),
)


class Assumptions(Mapping[str, float]):
    """All of them by name; indexing gives the number."""

    def __init__(self, entries: tuple[Assumption, ...] = _DEFAULTS) -> None:
        self.entries = {entry.name: entry for entry in entries}

    def __getitem__(self, name: str) -> float:
        return self.entries[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def known(self, source: str, **values: float) -> Self:
        """A copy with these numbers known from `source`."""
        copy = self
        for name, value in values.items():
            copy = copy.about(name, value, 1.0, source)
        return copy

    def about(self, name: str, value: float, factor: float, source: str) -> Self:
        """A copy with one number taken from `source`, which may be wrong by `factor` either way."""
        low, high = value / factor, value * factor
        changed = replace(self.entries[name], value=value, low=low, high=high, source=source)
        return type(self)(tuple({**self.entries, name: changed}.values()))

    def varied(self, name: str, value: float) -> Self:
        """A copy with one number changed, to see what that does."""
        changed = replace(self.entries[name], value=value)
        return type(self)(tuple({**self.entries, name: changed}.values()))
