"""How much there is to do: samples, tokens, blocks and slots, from a declaration and assumed lengths."""

from dataclasses import dataclass

from dflash.planning.assumptions import Assumptions
from dflash.planning.job import Job


@dataclass(frozen=True)
class Workload:
    """Totals and means. A sample is one answer; `length` is its mean after cutting to maxLength.

    answered: answers generated; samples: of these, kept by the gate. supervised: answer tokens of a sample.
    blocks: anchors of a sample in one epoch; rows: their supervised slots. teacher_rows: positions whose
    teacher distribution is computed, 0 without distillation.
    """

    answered: float
    samples: float
    prompt_tokens: float
    response_tokens: float
    length: float
    supervised: float
    blocks: int
    rows: float
    teacher_rows: float
    epochs: int

    @property
    def generated_tokens(self) -> float:
        """Output tokens of the dataset stage."""
        return self.answered * self.response_tokens

    @property
    def dataset_tokens(self) -> float:
        """Prompt and answer tokens of the kept samples, uncut."""
        return self.samples * (self.prompt_tokens + self.response_tokens)

    @property
    def trained_samples(self) -> float:
        """Samples over all epochs."""
        return self.samples * self.epochs

    @property
    def trained_tokens(self) -> float:
        """Tokens that pass through target and drafter in training, over all epochs."""
        return self.trained_samples * self.length

    def seen(self) -> list[int]:
        """Context that each block of a sample sees on full layers: anchors spread evenly over the answer."""
        first = self.length - self.supervised
        return [round(first + (i + 0.5) / self.blocks * self.supervised) for i in range(self.blocks)]


def workload(job: Job, assumed: Assumptions) -> Workload:
    """What the job's answers amount to."""
    answers, spec = job.answers, job.spec
    training = spec.training
    prompt, response = assumed["prompt_tokens"], assumed["response_tokens"]
    response = min(response, float(spec.generation.max_tokens))
    length = min(prompt + response, float(training.max_length))
    supervised = max(0.0, length - prompt)
    blocks = int(min(training.anchors, max(0.0, supervised - 1)))
    slots = job.shape.block_size - 1
    # The last blocks of an answer stick out over its end: slot k is supervised for anchors k before it.
    inside = max(0.0, 1.0 - job.shape.block_size / 2 / supervised) if supervised else 0.0
    covered = supervised * (1.0 - (1.0 - blocks / supervised) ** slots) if supervised > blocks else supervised
    return Workload(
        answered=answers,
        samples=answers * (1.0 - assumed["dropped_share"]),
        prompt_tokens=prompt,
        response_tokens=response,
        length=length,
        supervised=supervised,
        blocks=blocks,
        rows=blocks * slots * inside,
        teacher_rows=covered if training.loss.kl_weight > 0 else 0.0,
        epochs=training.epochs,
    )
