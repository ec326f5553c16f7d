"""The flags with which engines serve a drafter: one place, for evaluation and for `dflash serve-args`.

Engines count a block differently: SGLang's number of draft tokens is the block size B, vLLM's number
of speculative tokens is B - 1. Whatever bears on acceptance is said outright, so that a changed
default of an engine cannot change a measurement.
"""

import json

from dflash.errors import ConfigurationError
from dflash.model.shape import DraftShape

_GREEDY_SAFE = ("--speculative-accept-threshold-single", "1.0", "--speculative-accept-threshold-acc", "1.0")
"""Accept a draft only where the target agrees: anything less is not lossless."""
MTP_DRAFT_TOKENS = 4
"""Tokens verified at once with the target's own prediction: one, and three drafts."""

NO_MTP = (
    "the target's config.json declares no multi-token prediction layers: mtp was left out; to measure it all "
    "the same, start a server that has it and name it in evaluation.servers"
)


def check_sglang_serves(shape: DraftShape, what: str) -> None:
    """ConfigurationError for a shape that SGLang cannot serve; `what` names the drafter in it.

    SGLang takes a tap where the next layer begins; asked for the last, it dies at its first answer.
    """
    last = shape.target_layers - 1
    if last in shape.taps:
        raise ConfigurationError(
            f"{what} taps layer {last}, the target's last, which SGLang cannot read; train with taps "
            f"below {last}, or measure with evaluation.engine transformers"
        )


def sglang_drafter_flags(draft: str, shape: DraftShape, *, hybrid: bool) -> list[str]:
    """SGLang's flags to speculate with the drafter in folder or hub id `draft`.

    `hybrid` targets keep recurrent states, which SGLang must be able to take back.
    """
    flags = [
        *("--speculative-algorithm", "DFLASH"),
        *("--speculative-draft-model-path", draft),
        *("--speculative-num-draft-tokens", str(shape.block_size)),
        *_GREEDY_SAFE,
    ]
    return [*flags, "--mamba-radix-cache-strategy", "extra_buffer"] if hybrid else flags


def sglang_mtp_flags() -> list[str]:
    """SGLang's flags to speculate with the target's own multi-token prediction, three steps ahead."""
    return [
        *("--speculative-algorithm", "NEXTN"),
        *("--speculative-num-steps", str(MTP_DRAFT_TOKENS - 1)),
        *("--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", str(MTP_DRAFT_TOKENS)),
        *_GREEDY_SAFE,
    ]


def vllm_drafter_flags(draft: str, shape: DraftShape) -> list[str]:
    """vLLM's flags to speculate with the drafter in folder or hub id `draft`."""
    config = {"method": "dflash", "model": draft, "num_speculative_tokens": shape.block_size - 1}
    return ["--speculative-config", json.dumps(config)]
