"""What one pod of each kind holds in device memory, part by part, and whether that fits. Pure."""

from dataclasses import dataclass

from dflash.model.facts import TargetFacts
from dflash.planning.assumptions import Assumptions
from dflash.planning.job import Job
from dflash.planning.step_cost import parameter_count, step_cost
from dflash.planning.target_cost import target_cost
from dflash.planning.workload import Workload


@dataclass(frozen=True)
class PodMemory:
    """One GPU's memory by purpose, in bytes. `advice` says what to change when it does not fit."""

    pod: str
    parts: dict[str, float]
    capacity: float
    advice: str

    @property
    def used(self) -> float:
        """All parts together."""
        return sum(self.parts.values())

    @property
    def left(self) -> float:
        """What remains; negative when it does not fit."""
        return self.capacity - self.used

    @property
    def fits(self) -> bool:
        """Whether it fits at all."""
        return self.left >= 0


def value_bytes(dtype: str) -> int:
    """Bytes of one number."""
    return 4 if dtype == "float32" else 2


def weight_bytes(facts: TargetFacts, dtype: str) -> float:
    """Bytes of the target's weights."""
    return float(target_cost(facts).parameters * value_bytes(dtype))


def sequence_bytes(facts: TargetFacts, tokens: float, dtype: str) -> float:
    """KV cache and recurrent state of one sequence of `tokens`."""
    cost = target_cost(facts)
    return tokens * cost.cache_bytes_per_token * value_bytes(dtype) / 2 + cost.state_bytes_per_sequence


def sample_bytes(job: Job, length: float) -> float:
    """Hidden states of a sample as they are sent: K·D numbers a token, and D more with distillation."""
    width = job.shape.tap_width + (job.shape.hidden_size if job.spec.training.loss.kl_weight > 0 else 0)
    return length * width * value_bytes(job.spec.target.dtype)


def generation_batch(job: Job, work: Workload, assumed: Assumptions) -> float:
    """Answers in flight on one GPU: what was asked for, or what the KV cache has room for; at least 1."""
    facts, dtype = job.facts, job.spec.target.dtype
    room = job.gpu.memory_bytes * (1 - assumed["reserved_memory_share"]) - weight_bytes(facts, dtype)
    one = sequence_bytes(facts, work.prompt_tokens + work.response_tokens, dtype)
    return max(1.0, min(assumed["concurrency"], room / one))


def pod_memory(
    job: Job, work: Workload, drafters: int, assumed: Assumptions
) -> tuple[PodMemory, PodMemory, PodMemory]:
    """Pods of generation, target and drafter, with `drafters` of the last sharing a step's samples."""
    facts, spec, gpu = job.facts, job.spec, job.gpu
    reserved = {"reserved": gpu.memory_bytes * assumed["reserved_memory_share"]}
    weights = {"weights": weight_bytes(facts, spec.target.dtype)}
    batch = generation_batch(job, work, assumed)
    tokens = work.prompt_tokens + work.response_tokens
    generation = PodMemory(
        "generation",
        weights | {"KV cache": batch * sequence_bytes(facts, tokens, spec.target.dtype)} | reserved,
        gpu.memory_bytes,
        "the target does not fit one GPU: choose a larger one",
    )
    training = spec.training
    packed = max(float(training.target_batch_tokens), work.length)
    width = value_bytes(spec.target.dtype)
    # A layer's residual, normed input, attention and both halves of the MLP live at once.
    # Over several devices each has its share of the heads, of the MLP and of the weights.
    devices = training.target_devices
    split = (2 * facts.heads * facts.head_dim + 3 * facts.intermediate_size) / devices
    layer = 4 * facts.hidden_size + split
    target = PodMemory(
        "target",
        {
            "weights": weights["weights"] / devices,
            "activations": packed * layer * width,
            # One batch is computed while the one before is being sent.
            "states": 2 * sample_bytes(job, packed),
        }
        | reserved,
        gpu.memory_bytes,
        "lower training.targetBatchTokens, raise training.targetDevices, or choose a larger GPU",
    )
    return generation, target, _drafter(job, work, drafters, reserved)


def _drafter(job: Job, work: Workload, drafters: int, reserved: dict[str, float]) -> PodMemory:
    shape, spec, gpu = job.shape, job.spec, job.gpu
    training = spec.training
    share = -(-training.batch_size // drafters)
    together = max(1, min(share, int(training.micro_batch_tokens // work.length)))
    width = value_bytes(training.dtype)
    cost = step_cost(
        shape,
        context=round(together * work.length),
        blocks=together * work.blocks,
        rows=round(together * work.rows),
        seen=(),  # what blocks see costs time, not memory
        teacher_rows=round(together * work.teacher_rows),
        bytes_per_value=width,
    )
    copies = parameter_count(shape) * width if training.dtype != "float32" else 0
    queue = training.queue_depth * sample_bytes(job, work.length)
    return PodMemory(
        "drafter",
        {
            "weights": float(copies + cost.table_bytes),
            "optimiser": float(cost.state_bytes),
            "activations": float(cost.activation_bytes + cost.scratch_bytes),
            "queue": queue,
        }
        | reserved,
        gpu.memory_bytes,
        "lower training.queueDepth, microBatchTokens or anchors, or choose a larger GPU",
    )
