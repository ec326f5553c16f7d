"""What a drafter accepts in a greedy answer that is already there: speculation without the target.

Greedy decoding is decided: every verification agrees with the target's own answer as far as it goes.
So with an answer's tokens and their taps at hand, the rounds of speculative decoding follow from the
drafter alone, and many checkpoints are measured for one decoding by the target. Counted exactly as
`dflash.evaluation.speculative` counts. Not for speed, nor for temperatures above 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dflash.evaluation.answers import DFLASH, Answer, Question, accept, cut
from dflash.evaluation.speculative import Proposer
from dflash.model.drafter import DFlashDrafter
from dflash.model.target import Tables


@dataclass(frozen=True)
class GreedyAnswer:
    """The target's greedy answer to a question.

    tokens: emitted, the end token included; room: the most it might have had; taps: [P + n, K*D] of
    prompt and answer, on any device.
    """

    question: Question
    tokens: list[int]
    room: int
    taps: Tensor


@torch.inference_mode()
def replay(drafter: DFlashDrafter, tables: Tables, plain: GreedyAnswer) -> Answer:
    """Answer the question again with the drafter proposing; the tokens are the same by construction.

    Drafter and tables are on one device and in the type to compute in.
    """
    device, prompt, tokens = tables.embedding.device, len(plain.question.prompt_ids), plain.tokens
    proposer = Proposer(drafter, tables)
    taps = plain.taps.to(device)
    accepted: list[int] = []
    emitted: list[int] = []
    done, cached = 1, 0  # the first token is the prefill's
    while done < len(tokens):
        position = prompt + done - 1
        draft = proposer.propose(tokens[done - 1], taps[cached:position], position)[: plain.room - done - 1]
        cached = position
        # Past the answer's end nothing can be accepted: what follows the end token is never known.
        agreed, round_tokens = accept(draft[: len(tokens) - done], [*tokens[done:], -1])
        kept, _ = cut(round_tokens, frozenset(), len(tokens) - done)
        accepted.append(min(agreed, len(kept)))
        emitted.append(len(kept))
        done += len(kept)
    return Answer(
        sample_id=plain.question.sample_id,
        contender=DFLASH,
        tokens=tokens,
        accepted=accepted,
        emitted=emitted,
        finish_reason="stop" if len(tokens) < plain.room else "length",
    )
