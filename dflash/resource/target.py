"""`spec.target` and `spec.prompts`: whose completions are learnt, and from which questions."""

from typing import Literal

from pydantic import Field

from dflash.resource.section import Section

Dtype = Literal["bfloat16", "float32"]
"""fp16 is absent on purpose: a drafter served in fp16 accepts nothing (overflow in late layers)."""


class Target(Section):
    """The model that is served, and that the drafter must predict."""

    model: str = Field(
        min_length=1,
        max_length=512,
        description="Hub id, or the path of a folder with config.json, weights and tokenizer.",
    )
    revision: str | None = Field(
        None,
        max_length=128,
        description="Commit of the hub repository. Pin it: a moving branch makes runs differ.",
    )
    dtype: Dtype = Field(
        "bfloat16", description="Precision in which the target generates and serves hidden states."
    )


class Prompts(Section):
    """Where the questions come from. The answers are always regenerated with the target."""

    uri: str = Field(
        min_length=1,
        max_length=1024,
        description=(
            "File, glob or s3:// address of JSON lines or Parquet (.gz and .zst too), one prompt a "
            "row: `messages` in OpenAI form (with `tools` where there are any) or `prompt`, and "
            "optionally `id` and `group`. A relative path starts at the Drafter file's folder."
        ),
    )
    hold_out: float = Field(
        0.05,
        ge=0.0,
        le=0.5,
        description=(
            "Share of the prompts kept out of training and used for evaluation, drawn by a hash of "
            "`group` where rows have one (so that no subject is on both sides), else of the content."
        ),
    )
    limit: int | None = Field(None, ge=1, le=1_000_000_000, description="Use only the first N prompts.")
