"""The flags with which engines serve a drafter: one place, for evaluation and for `dflash serve-args`.

Engines count a block differently: SGLang's number of draft tokens is the block size B, vLLM's number
of speculative tokens is B - 1. Whatever bears on acceptance is said outright, so that a changed
default of an engine cannot change a measurement.
"""

import json

from dflash.model.shape import DraftShape

_GREEDY_SAFE = ("--speculative-accept-threshold-single", "1.0", "--speculative-accept-threshold-acc", "1.0")
"""Accept a draft only where the target agrees: anything less is not lossless."""
MTP_DRAFT_TOKENS = 4
"""Tokens verified at once with the target's own prediction: one, and three drafts."""


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
