"""`spec.generation`: how the target answers the prompts, and which answers are worth training on."""

from typing import Annotated, Literal

from pydantic import Field

from dflash.resource.section import Section, operational

Engine = Literal["auto", "sglang", "transformers"]
"""`auto` is sglang where a GPU is present, else transformers in process."""


class Sampling(Section):
    """Sampling parameters, passed to the engine as they are."""

    temperature: float = Field(0.6, ge=0.0, le=2.0, description="0 is greedy decoding.")
    top_p: float = Field(0.95, gt=0.0, le=1.0, description="Nucleus sampling's probability mass.")
    top_k: int = Field(20, ge=-1, le=1_000_000, description="Candidates kept; -1 keeps all.")
    seed: int = Field(
        0, ge=0, le=2**31 - 1, description="Each sample's own seed is derived from this and its id."
    )


class Speculation(Section):
    """The target's own multi-token prediction, used to generate faster."""

    algorithm: Literal["NEXTN", "EAGLE", "EAGLE3"] = Field(
        "NEXTN", description="SGLang's name of the speculative algorithm."
    )
    draft_model: str | None = Field(
        None, max_length=512, description="Draft weights, for algorithms that need a folder of their own."
    )
    steps: int = Field(3, ge=1, le=64, description="Draft steps before each verification.")
    draft_tokens: int = Field(4, ge=2, le=64, description="Tokens verified at once.")


class Gate(Section):
    """Which samples are dropped, and when the whole dataset is refused.

    Shares are of the samples seen so far, tested once `check_after` samples have been seen and
    again at the end.
    """

    min_supervised_tokens: int | None = Field(
        None,
        ge=2,
        le=1_000_000,
        description="Samples with fewer supervised tokens are dropped. Default: 2 x block size.",
    )
    truncated: Literal["keep", "drop"] = Field(
        "drop", description="What to do with an answer cut by maxTokens. Cut thinking is always dropped."
    )
    max_dropped_share: float = Field(
        0.10,
        ge=0.0,
        le=1.0,
        description="Stop when more than this share is dropped, for all reasons together.",
    )
    max_empty_share: float = Field(
        0.02, ge=0.0, le=1.0, description="Stop when more than this share has no visible answer."
    )
    max_repetition_share: float = Field(
        0.05,
        ge=0.0,
        le=1.0,
        description="Stop when more than this share repeats itself or loops over tool calls.",
    )
    check_after: int = operational(
        100, ge=1, le=1_000_000, description="Samples seen before a share can stop the stage early."
    )


class Generation(Section):
    """The dataset stage: regenerate every answer with the target."""

    engine: Engine = Field("auto", description="Which engine runs the target.")
    thinking: bool = Field(
        True, description="Render the chat template with thinking on. Train in the mode you serve."
    )
    max_tokens: int = Field(
        2048, ge=1, le=1_000_000, description="Most tokens in one answer, thinking included."
    )
    context_length: int | None = Field(
        None, ge=16, le=10_000_000, description="Longest prompt + answer. Default: the target's own limit."
    )
    sampling: Sampling = Field(Sampling(), description="Sampling parameters.")
    speculation: Speculation | None = Field(
        None, description="Generate with the target's own multi-token prediction."
    )
    gate: Gate = Field(Gate(), description="The quality gate.")
    replicas: int = operational(
        1, ge=1, le=4096, description="Workers, each with an engine and a share of the prompts."
    )
    in_flight: int | None = operational(
        None,
        ge=1,
        le=65_536,
        description="Most samples being generated at once per worker. Default: the engine decides.",
    )
    shard_size: int = operational(
        512, ge=1, le=100_000, description="Prompts per committed part: what a lost worker costs at most."
    )
    server_args: list[Annotated[str, Field(max_length=4096)]] = operational(
        [], max_length=64, description="Further flags for the SGLang server, as on its command line."
    )
    urls: list[Annotated[str, Field(max_length=1024)]] = operational(
        [], max_length=4096, description="Servers that already run. None are started when given."
    )
