"""Why a drafter accepts almost nothing: each usual fault is undone in turn, to see what that gains.

Nearly every mistake between training and serving shows only as an acceptance length near one: a tap
read one layer off, another rotary base, the wrong mask token, labels shifted by one, causality inside
the block. Each has an inverse that can be tried without training: the drafter proposes for some
anchors of answers already there, as declared and as if; the one that accepts far more names the fault.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from dflash.model.drafter import DFlashDrafter
from dflash.model.shape import DraftShape
from dflash.model.target import Tables, TargetModel

_THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
_ANCHORS = 6
_GAIN = 0.25
_ERRORS = 3.0
"""A correction is named when it gains this many accepted drafts a block, and this many standard errors."""


class Trial(BaseModel):
    """One way of using the drafter."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(description="What was changed; `as declared` for nothing.")
    fault: str = Field(description="What is wrong with the drafter if this is much better.")
    acceptance_length: float = Field(description="Mean over the anchors tried, bonus included.")


class Diagnosis(BaseModel):
    """All trials, best first, and what they mean."""

    model_config = ConfigDict(frozen=True)

    sentence: str = Field(description="The fault found, or that none was.")
    fault: str = Field(description="The fault found; empty when none was.")
    trials: list[Trial] = Field(description="Best first.")


@dataclass(frozen=True)
class _Variant:
    name: str
    fault: str
    shape: DraftShape
    shift: int = 0
    causal: bool | None = None


@torch.inference_mode()
def diagnose(
    target: TargetModel,
    tables: Tables,
    drafter: DFlashDrafter,
    texts: Sequence[tuple[list[int], list[int]]],
    mask_candidates: Sequence[int],
) -> Diagnosis:
    """Try every correction on some (prompt ids, answer ids) of the target itself.

    `mask_candidates` are token ids that could have been the mask in training.
    """
    shape = drafter.shape
    variants = list(_variants(shape, mask_candidates, target.facts.rope_theta))
    taps = sorted({tap for variant in variants for tap in variant.shape.taps})
    streaks: dict[str, list[int]] = {variant.name: [] for variant in variants}
    for prompt, answer in texts:
        ids = np.array([*prompt, *answer], dtype=np.int64)
        states = target.capture([ids], taps, final=False)[0].taps
        columns = {
            tap: states[:, i * shape.hidden_size : (i + 1) * shape.hidden_size] for i, tap in enumerate(taps)
        }
        for anchor in _anchors(len(prompt), len(ids), shape.block_size):
            for variant in variants:
                context = torch.cat([columns[tap][:anchor] for tap in variant.shape.taps], dim=-1)
                drafts = _drafts(drafter, tables, variant.shape, int(ids[anchor]), context)
                streaks[variant.name].append(_streak(drafts, ids[anchor + 1 :].tolist(), variant.shift))
    return _conclude(variants, {name: np.array(found, dtype=np.float64) for name, found in streaks.items()})


def _variants(shape: DraftShape, mask_candidates: Sequence[int], theta: float) -> Iterator[_Variant]:
    """`theta`: the target's own rotary base, which a drafter takes over unless it is told otherwise."""
    yield _Variant("as declared", "", shape)
    for step, word in ((1, "later"), (-1, "earlier")):
        taps = tuple(tap + step for tap in shape.taps)
        if min(taps) >= 0 and max(taps) < shape.target_layers:
            fault = f"the taps are off by one layer: it was trained on {list(taps)}, not {list(shape.taps)}"
            yield _Variant(f"every tap one layer {word}", fault, replace(shape, taps=taps))
    for place, tap in enumerate(shape.taps):
        for moved in (tap - 1, tap + 1):
            taps = (*shape.taps[:place], moved, *shape.taps[place + 1 :])
            if len(shape.taps) > 1 and 0 <= moved < shape.target_layers and list(taps) == sorted(set(taps)):
                fault = f"tap {tap} is off by one layer: it was trained on {moved}"
                yield _Variant(f"tap {tap} read at {moved}", fault, replace(shape, taps=taps))
    for base in sorted({*_THETAS, theta}):
        if base != shape.rope_theta:
            fault = f"rope_theta is wrong: it was trained with {base:g}, not {shape.rope_theta:g}"
            yield _Variant(f"rope_theta {base:g}", fault, replace(shape, rope_theta=base))
    for token in mask_candidates:
        if token != shape.mask_token_id:
            fault = f"mask_token_id is wrong: it was trained with {token}, not {shape.mask_token_id}"
            yield _Variant(f"mask token {token}", fault, replace(shape, mask_token_id=token))
    for shift, meaning in ((1, "the token after its own"), (-1, "the token before its own")):
        fault = f"labels were shifted in training: each slot predicts {meaning}"
        yield _Variant(f"labels shifted by {shift:+d}", fault, shape, shift=shift)
    if "full_attention" in shape.layer_types:
        fault = (
            "the block is served bidirectional but was trained causal: declare its layers sliding_attention"
        )
        yield _Variant("causal inside the block", fault, _all(shape, "sliding_attention"))
    if "sliding_attention" in shape.layer_types:
        fault = "the block is served causal but was trained bidirectional: declare its layers full_attention"
        yield _Variant("bidirectional inside the block", fault, _all(shape, "full_attention"))


def _all(shape: DraftShape, kind: str) -> DraftShape:
    window = shape.max_positions if kind == "sliding_attention" else None
    return replace(shape, layer_types=(kind,) * shape.layers, sliding_window=shape.sliding_window or window)


def _anchors(prompt: int, length: int, block_size: int) -> list[int]:
    """A few places in the answer that have a whole block after them, evenly spaced."""
    last = length - block_size - 1
    return [] if last < prompt else sorted({int(a) for a in np.linspace(prompt, last, _ANCHORS)})


def _drafts(
    drafter: DFlashDrafter, tables: Tables, shape: DraftShape, token: int, context: Tensor
) -> list[int]:
    """What is proposed after `token`, whose context [a, K*D] precedes it, if the drafter had this shape."""
    block = torch.full((shape.block_size,), shape.mask_token_id, device=context.device)
    block[0] = token
    declared, drafter.shape = drafter.shape, shape
    try:
        states = drafter.propose(tables.embedding[block], context, drafter.new_cache(), len(context))
        drafts: list[int] = drafter.choose(states, token, tables.embedding, tables.head).tolist()
        return drafts
    finally:
        drafter.shape = declared


def _streak(drafts: list[int], wanted: list[int], shift: int) -> int:
    """Drafts from the first that agree with the text, if slot k tells the token at k + shift."""
    agreed = 0
    for draft, token in zip(drafts[max(0, -shift) :], wanted[max(0, shift) :], strict=False):
        if draft != token:
            break
        agreed += 1
    return agreed


def _conclude(variants: Sequence[_Variant], streaks: dict[str, np.ndarray]) -> Diagnosis:
    """Name the correction that gains most, if it is more than chance: the same anchors, compared in pairs."""
    declared, others = variants[0], variants[1:]
    trials = [
        Trial(name=v.name, fault=v.fault, acceptance_length=1.0 + float(streaks[v.name].mean()))
        for v in variants
        if len(streaks[v.name])
    ]
    ordered = sorted(trials, key=lambda t: -t.acceptance_length)
    best = max(others, key=lambda v: float(streaks[v.name].sum()))
    gains = streaks[best.name] - streaks[declared.name]
    if len(gains) > 1:
        gain, error = float(gains.mean()), float(gains.std(ddof=1)) / len(gains) ** 0.5
        if gain >= _GAIN and gain >= _ERRORS * error:
            sentence = (
                f"Acceptance would be {1.0 + streaks[best.name].mean():.2f} and not "
                f"{1.0 + streaks[declared.name].mean():.2f} with {best.name}: {best.fault}. "
                "Correct it and export again."
            )
            return Diagnosis(sentence=sentence, fault=best.fault, trials=ordered)
    sentence = "No usual fault explains it: taps, rotary base, mask, labels and causality are consistent."
    return Diagnosis(sentence=sentence, fault="", trials=ordered)
