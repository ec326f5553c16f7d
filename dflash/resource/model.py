"""`spec.drafter`: the shape of the block-diffusion model that is trained."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from dflash.resource.section import Section

LayerType = Literal["sliding_attention", "full_attention"]


class DraftModel(Section):
    """Shape of the drafter. Sizes left out are derived from the target's config.json."""

    layers: int = Field(5, ge=1, le=64, description="Decoder layers.")
    block_size: int = Field(
        16,
        ge=2,
        le=64,
        description="Tokens in a block: the anchor and blockSize - 1 proposals in one pass.",
    )
    sliding_window: int | None = Field(
        2048,
        ge=0,
        le=1_000_000,
        description=(
            "Context window of sliding layers, at least blockSize. 0 or null makes every layer full; write "
            "0 for a cluster, since `kubectl apply` drops null."
        ),
    )
    layer_types: list[LayerType] | None = Field(
        None,
        max_length=64,
        description="One per layer. Default: all sliding but the last, or all full without a window.",
    )
    taps: list[Annotated[int, Field(ge=0, le=100_000)]] | None = Field(
        None,
        min_length=1,
        max_length=32,
        description=(
            "0-based target layers whose outputs the drafter reads, ascending. "
            "Default: tapCount layers, evenly spaced from the second to the third last."
        ),
    )
    tap_count: int = Field(5, ge=1, le=32, description="Number of taps when `taps` is not given.")
    mask_token_id: int | None = Field(
        None,
        ge=0,
        le=10_000_000,
        description=(
            "An existing row of the target's embedding that text never uses. Default: the tokenizer's "
            "mask token, else the first row beyond the tokenizer; when there is neither, it must be given."
        ),
    )
    heads: int | None = Field(None, ge=1, le=1024, description="Query heads. Default: the target's.")
    kv_heads: int | None = Field(
        None, ge=1, le=1024, description="Key and value heads. Default: the target's."
    )
    head_dim: int | None = Field(
        None, ge=2, le=1024, description="Width of a head, even. Default: the target's, or 128 for hybrids."
    )
    intermediate_size: int | None = Field(
        None, ge=1, le=1_000_000, description="Width of the MLP. Default: the target's."
    )
    rope_theta: float | None = Field(
        None, gt=0.0, le=1e12, description="Base of the rotary embedding. Default: the target's."
    )
    head: Literal["dflash", "domino"] = Field(
        "dflash", description="Output head, by name: plain, or Domino's prefix correction."
    )

    @field_validator("sliding_window")
    @classmethod
    def _no_window(cls, value: int | None) -> int | None:
        return value or None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ValueError(
                f"slidingWindow {self.sliding_window} is smaller than blockSize {self.block_size}; "
                "give a window of at least one block"
            )
        if self.layer_types is not None:
            if len(self.layer_types) != self.layers:
                raise ValueError(
                    f"layerTypes has {len(self.layer_types)} entries for {self.layers} layers; give one each"
                )
            if "sliding_attention" in self.layer_types and self.sliding_window is None:
                raise ValueError("layerTypes has sliding layers, but slidingWindow is null; give a window")
        if self.taps is not None and sorted(set(self.taps)) != self.taps:
            raise ValueError(f"taps {self.taps} must be ascending and without repeats")
        return self

    def resolved_layer_types(self) -> list[LayerType]:
        """One type per layer, defaults applied."""
        if self.layer_types is not None:
            return list(self.layer_types)
        inner: LayerType = "full_attention" if self.sliding_window is None else "sliding_attention"
        return [inner] * (self.layers - 1) + ["full_attention"]
