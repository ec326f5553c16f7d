"""Are the outputs the same? And where not: an error, or two logits that were equal but for rounding?

A pass over a block and a pass over one token add the same numbers in another order, so the last
bits of the logits differ. Where the target's two best tokens are that close, either may come first,
and the rest of the answer differs rightly. The measure is the logits' distance in steps of the
compute type (units in the last place at the logits' own size), computed by one pass over the common
text.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

_BITS = {"bfloat16": 8, "float32": 24}
"""Significant bits."""
NEAR_TIE_STEPS = {"bfloat16": 2.0, "float32": 32.0}
"""Largest distance called a near-tie. Two bf16 steps; in fp32, what 30 layers of rounding add up to."""

Kind = Literal["near_tie", "divergence"]


class Difference(BaseModel):
    """Where two answers to one question part."""

    model_config = ConfigDict(frozen=True)

    sample_id: str = Field(description="Id of the prompt.")
    contender: str = Field(description="The answer compared with plain decoding.")
    position: int = Field(description="First differing token, 0-based, in the output.")
    plain_token: int = Field(description="Token of plain decoding; -1 when it had ended.")
    other_token: int = Field(description="Token of the contender; -1 when it had ended.")
    margin: float | None = Field(
        description="Distance between both tokens' logits, and to the best. null when one had ended."
    )
    steps: float | None = Field(description="The margin in steps of the compute type.")
    kind: Kind = Field(description="near_tie when within rounding, else divergence.")


class Equality(BaseModel):
    """Greedy outputs against plain decoding's."""

    model_config = ConfigDict(frozen=True)

    compared: int = Field(description="Answers compared.")
    identical: int = Field(description="Of these, the same to the last token.")
    near_ties: int = Field(
        description="First difference where the target's best logits were within rounding."
    )
    divergences: int = Field(description="All others: these are errors.")
    differences: list[Difference] = Field(description="Every first difference.")

    @property
    def equal(self) -> bool:
        """No answer differs but by a near-tie."""
        return self.divergences == 0


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, or None when the answers are the same."""
    for index, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return index
    return None if len(plain) == len(other) else min(len(plain), len(other))


class Scores(NamedTuple):
    """The target's logits of two tokens, and of its best one."""

    plain: float
    other: float
    best: float


def compare(
    *,
    sample_id: str,
    contender: str,
    prompt: Sequence[int],
    plain: Sequence[int],
    other: Sequence[int],
    dtype: str,
    scores: Callable[[list[int], int, int], Scores],
) -> Difference | None:
    """The first difference of two answers, judged; None when there is none.

    `scores` gives the target's logits after a text, for two tokens. An answer that only ends earlier is
    a divergence: with equal tokens before, the ends are equal too.
    """
    position = first_difference(plain, other)
    if position is None:
        return None
    mine = plain[position] if position < len(plain) else -1
    theirs = other[position] if position < len(other) else -1
    margin: float | None = None
    steps: float | None = None
    if mine >= 0 and theirs >= 0:
        found = scores([*prompt, *plain[:position]], mine, theirs)
        # Both must be among the best: two poor tokens with like logits are no tie.
        margin = max(abs(found.plain - found.other), found.best - min(found.plain, found.other))
        steps = margin / step(max(abs(found.plain), abs(found.other)), dtype)
    return Difference(
        sample_id=sample_id,
        contender=contender,
        position=position,
        plain_token=mine,
        other_token=theirs,
        margin=margin,
        steps=steps,
        kind="near_tie" if steps is not None and steps <= NEAR_TIE_STEPS[dtype] else "divergence",
    )


def step(value: float, dtype: str) -> float:
    """Distance between neighbouring numbers of `dtype` at `value`'s size."""
    return 2.0 ** (math.frexp(value)[1] - _BITS[dtype]) if value else 2.0 ** -_BITS[dtype]


def summarise(compared: int, differences: Sequence[Difference]) -> Equality:
    """Count what `compare` found in `compared` answers."""
    near_ties = sum(d.kind == "near_tie" for d in differences)
    return Equality(
        compared=compared,
        identical=compared - len(differences),
        near_ties=near_ties,
        divergences=len(differences) - near_ties,
        differences=list(differences),
    )
