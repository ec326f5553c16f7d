"""One measured answer: what was emitted, verification by verification, and how long it took.

Both engines (in process and SGLang) give these, so that every figure is counted by one definition:
the prefill emits the first token; every verification after it emits the drafts it accepted and one
token more, the bonus. Tokens beyond the end of the answer are not counted.
"""

import unicodedata

from pydantic import BaseModel, ConfigDict, Field

NONE = "none"
"""The contender without speculation, which the others are compared with."""
DFLASH = "dflash"
"""The drafter."""
MTP = "mtp"
"""The target's own multi-token prediction."""


class Question(BaseModel):
    """A prompt, rendered, and the slices it falls into."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sample_id: str = Field(description="Id of the prompt.")
    prompt_ids: list[int] = Field(description="Token ids, chat template applied.")
    prompt_set: str = Field("held-out", description="Name of the prompt set.")
    group: str = Field("", description="The prompt's own group, such as its subject or kind.")
    language: str = Field("", description="Writing system of most letters: latin, cjk, cyrillic, ...")
    thinking: bool = Field(False, description="Whether the template was rendered with thinking on.")
    tools: bool = Field(False, description="Whether the template was rendered with tools to call.")


class Answer(BaseModel):
    """One contender's answer to one question.

    Identity: `len(tokens) == 1 + sum(emitted)`, checked by `check`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sample_id: str = Field(description="Id of the prompt.")
    contender: str = Field(description="none, mtp, dflash, or a second drafter's name.")
    concurrency: int = Field(1, description="Requests in flight while it was measured.")
    repeat: int = Field(0, description="Which of the repeats.")
    tokens: list[int] = Field(description="Token ids emitted, the end token included.")
    accepted: list[int] = Field(description="Drafts accepted and emitted, per verification.")
    emitted: list[int] = Field(description="Tokens emitted per verification, bonus included.")
    ordered: bool = Field(True, description="Whether verifications are in the order they were made.")
    finish_reason: str = Field(description="stop or length.")
    prefill_seconds: float = Field(0.0, description="Until the first token.")
    decode_seconds: float = Field(0.0, description="From the first token to the last.")
    draft_seconds: float = Field(0.0, description="Of decode_seconds, spent in the drafter.")

    @property
    def verifications(self) -> int:
        """Target passes after the prefill."""
        return len(self.emitted)

    def check(self) -> None:
        """AssertionError when tokens were counted twice or not at all."""
        if len(self.tokens) != 1 + sum(self.emitted):
            raise AssertionError(
                f"{self.sample_id}: {len(self.tokens)} tokens, but 1 + {sum(self.emitted)} were counted"
            )


def accept(draft: list[int], posterior: list[int]) -> tuple[int, list[int]]:
    """How far a draft agrees with the target, and what is emitted.

    `draft` are the proposals for slots 1..B-1, `posterior` the target's own choices after each of
    the block's B tokens. Gives (n, the n agreeing drafts followed by the bonus token).
    """
    agreed = 0
    while agreed < len(draft) and draft[agreed] == posterior[agreed]:
        agreed += 1
    return agreed, posterior[: agreed + 1]


def cut(emitted: list[int], stops: frozenset[int], room: int) -> tuple[list[int], str]:
    """What of a round belongs to the answer: up to the first stop token, and at most `room` tokens.

    Gives (tokens, finish reason or "").
    """
    for index, token in enumerate(emitted[:room]):
        if token in stops:
            return emitted[: index + 1], "stop"
    return (emitted[:room], "length") if len(emitted) >= room else (emitted, "")


_SYSTEMS = {
    "CJK": "cjk",
    "HIRAGANA": "cjk",
    "KATAKANA": "cjk",
    "HANGUL": "hangul",
    "LATIN": "latin",
    "CYRILLIC": "cyrillic",
    "ARABIC": "arabic",
    "DEVANAGARI": "devanagari",
    "GREEK": "greek",
    "HEBREW": "hebrew",
    "THAI": "thai",
}


def writing_system(text: str) -> str:
    """The writing system of most letters: the part of a language that can be told without a model."""
    counts: dict[str, int] = {}
    for character in text[:4000]:
        if character.isalpha():
            system = _SYSTEMS.get(unicodedata.name(character, "").split(" ")[0], "other")
            counts[system] = counts.get(system, 0) + 1
    return max(counts, key=lambda s: counts[s]) if counts else "none"
