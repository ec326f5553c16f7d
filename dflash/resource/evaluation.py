"""`spec.evaluation`: what is measured on held-out prompts, and what must be reached to promote."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from dflash.resource.generation import Engine
from dflash.resource.section import Section, operational
from dflash.resource.target import Dtype

_CONTENDERS = ("none", "mtp", "dflash")


class EvaluationGate(Section):
    """What a drafter must reach to be promoted. Limits left out are not tested."""

    min_acceptance_length: float | None = Field(
        None, ge=1.0, le=64.0, description="Least pooled acceptance length, bonus token included."
    )
    min_speedup: float | None = Field(
        None, ge=0.0, le=64.0, description="Least speed-up over plain decoding at the first concurrency."
    )


class PromptSet(Section):
    """A named set of evaluation prompts, reported as a slice of its own."""

    name: str = Field(min_length=1, max_length=63, description="Name of the slice.")
    uri: str = Field(min_length=1, max_length=1024, description="As `spec.prompts.uri`.")


class Rival(Section):
    """A second drafter for the same target, measured beside this one: a published one, or yesterday's."""

    name: str = Field(
        "rival",
        max_length=40,
        pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$",
        description="What it is called in the report; not none, mtp or dflash.",
    )
    model: str = Field(min_length=1, max_length=1024, description="Hub id, or the folder of a drafter.")
    revision: str | None = Field(None, max_length=128, description="Commit or branch on the hub.")


class Server(Section):
    """A running SGLang server, measured in place of one that would be started."""

    contender: str = Field(
        min_length=1, max_length=40, description="none, mtp, dflash, or the second drafter's name."
    )
    url: str = Field(max_length=1024, pattern=r"^http://", description="Its address, http://host:port.")


class Evaluation(Section):
    """The evaluation stage: speculative against plain decoding, on the same prompts."""

    engine: Engine = Field("auto", description="The engine that serves target and drafter.")
    baselines: list[Literal["none", "mtp"]] = Field(
        ["none"],
        min_length=1,
        max_length=2,
        description="What the drafter is compared with: plain decoding, and the target's own multi-token "
        "prediction, which is left out where it has none.",
    )
    concurrency: list[Annotated[int, Field(ge=1, le=65_536)]] = Field(
        [1], min_length=1, max_length=16, description="Requests in flight; each is measured."
    )
    prompts: list[PromptSet] = Field(
        [], max_length=16, description="Prompt sets. Default: the held-out prompts."
    )
    samples: int = Field(128, ge=1, le=1_000_000, description="Most prompts taken from each set.")
    max_tokens: int = Field(512, ge=2, le=1_000_000, description="Most tokens in one answer.")
    temperature: float = Field(0.0, ge=0.0, le=2.0, description="0 also checks that outputs are equal.")
    repeats: int = Field(
        1, ge=1, le=100, description="Measurements of each contender; speed is their median."
    )
    dtype: Dtype = Field(
        "bfloat16",
        description="Precision. In float32 greedy outputs must be equal; in bfloat16 near-ties may flip.",
    )
    gate: EvaluationGate = Field(EvaluationGate(), description="The promotion gate.")
    rival: Rival | None = Field(None, description="A second drafter, measured on the same prompts.")
    servers: list[Server] = operational(
        [],
        max_length=4,
        description=(
            "Running SGLang servers by contender; the others are started. Speculation must be set as "
            "`dflash serve-args` says: it is read back."
        ),
    )
    server_args: list[Annotated[str, Field(max_length=4096)]] = operational(
        [], max_length=64, description="Further flags for the SGLang server, as on its command line."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [p.name for p in self.prompts]
        if len(set(names)) != len(names):
            raise ValueError(f"prompts: names {names} must differ")
        if self.rival is not None and self.rival.name in _CONTENDERS:
            raise ValueError(f"rival.name {self.rival.name} is taken; give it another")
        known = {*_CONTENDERS, *([self.rival.name] if self.rival else [])}
        served = [s.contender for s in self.servers]
        if len(set(served)) != len(served) or not set(served) <= known:
            raise ValueError(
                f"servers: contenders {served} must differ, and be among {', '.join(sorted(known))}"
            )
        return self
