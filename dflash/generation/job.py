"""What one worker is told to do, and what becomes of one prompt."""

from dataclasses import dataclass, field

from dflash.data.prompts import Prompt
from dflash.data.rows import Row
from dflash.generation.gate import Limits


@dataclass(frozen=True)
class Job:
    """One worker's share of a dataset."""

    dataset: str
    name: str
    """Of this worker, in commits and in progress."""
    index: int
    replicas: int
    part_prompts: int
    """Prompts that make a part full."""
    max_tokens: int
    context_length: int
    seed: int
    hold_out: float
    limits: Limits

    def is_mine(self, prompt: Prompt) -> bool:
        """Shares are dealt like cards, so that they are equal and none is idle for long."""
        return prompt.index % self.replicas == self.index


@dataclass(frozen=True)
class Done:
    """A prompt that is accounted for, with all its samples."""

    prompt: Prompt
    kept: list[Row] = field(default_factory=list)
    rejects: list[Row] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Ids held in memory for it."""
        return sum(row.length for row in (*self.kept, *self.rejects))
