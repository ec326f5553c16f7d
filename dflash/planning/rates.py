"""How fast each stage goes on one GPU, and how a fleet of them is best split. Pure.

Decoding is limited by the bytes it reads per token or by arithmetic, whichever takes longer (a
roofline). Training is arithmetic on both sides, plus the sum of the gradients over the links; what targets
produce must be what drafters consume, so the slower side and the network set the pace.
"""

from dataclasses import dataclass

from dflash.model.facts import TargetFacts
from dflash.planning.assumptions import Assumptions
from dflash.planning.hardware import Gpu
from dflash.planning.job import Job, Measured
from dflash.planning.memory import generation_batch, sample_bytes, value_bytes
from dflash.planning.step_cost import parameter_count, step_cost
from dflash.planning.target_cost import target_cost
from dflash.planning.workload import Workload

_GRADIENT_BYTES = 4


@dataclass(frozen=True)
class DecodeRate:
    """Output tokens per second of one GPU, and whether memory bandwidth or arithmetic limits them."""

    tokens_per_second: float
    batch: float
    bound: str


@dataclass(frozen=True)
class Rates:
    """Of one GPU each, but for a target over several devices. Samples per second in training.

    `flops` are of one sample.
    """

    generation: DecodeRate
    target_samples: float
    target_flops: float
    drafter_samples: float
    drafter_flops: float
    sample_bytes: float
    gradient_bytes: float
    link: float
    """Bytes per second that one pod's link carries, after overheads."""


@dataclass(frozen=True)
class Split:
    """A fleet of targets and drafters, its samples per second, and what limits it."""

    targets: int
    drafters: int
    samples_per_second: float
    limit: str


def decode_rate(
    facts: TargetFacts,
    gpu: Gpu,
    assumed: Assumptions,
    *,
    batch: float,
    prompt: float,
    response: float,
    dtype: str = "bfloat16",
) -> DecodeRate:
    """Plain decoding of `batch` answers at once, their prompts' prefill included."""
    cost = target_cost(facts)
    context = prompt + response / 2
    read = cost.decode_bytes(max(1, round(batch)), context) * value_bytes(dtype) / 2
    token_flops = (
        2.0 * (cost.active_layer_parameters + (cost.head_parameters or cost.embedding_parameters))
        + cost.attention_flops_per_pair * context
        + cost.recurrent_flops_per_token
    )
    reading = read / (gpu.memory_bandwidth * assumed["decode_bandwidth_share"])
    arithmetic = gpu.bf16_flops * assumed["target_efficiency"]
    computing = batch * token_flops / arithmetic
    prefill = cost.prefill_flops(round(prompt)) / arithmetic
    seconds = response * max(reading, computing) / batch + prefill
    return DecodeRate(response / seconds, batch, "bandwidth" if reading >= computing else "arithmetic")


def rates(job: Job, work: Workload, assumed: Assumptions) -> Rates:
    """Everything that a fleet's pace follows from; measured rates take the place of estimates."""
    facts, shape, spec, gpu = job.facts, job.shape, job.spec, job.gpu
    measured = job.measured or Measured()
    batch = generation_batch(job, work, assumed)
    decode = decode_rate(
        facts,
        gpu,
        assumed,
        batch=batch,
        prompt=work.prompt_tokens,
        response=work.response_tokens,
        dtype=spec.target.dtype,
    )
    tokens = decode.tokens_per_second
    if spec.generation.speculation is not None:
        tokens *= assumed["speculation_gain"]
    tokens = measured.generation or tokens
    distilled = spec.training.loss.kl_weight > 0
    target_flops = target_cost(facts, None if distilled else max(shape.taps) + 1).prefill_flops(
        round(work.length)
    )
    drafter_flops = step_cost(
        shape,
        context=round(work.length),
        blocks=work.blocks,
        rows=round(work.rows),
        seen=work.seen(),
        teacher_rows=round(work.teacher_rows),
    ).flops
    link = (job.network or gpu.peer_bandwidth) * assumed["link_efficiency"]
    target = 1 / (
        target_flops / (gpu.bf16_flops * assumed["target_efficiency"] * spec.training.target_devices)
        + _sums_seconds(job, work.length, gpu.peer_bandwidth * assumed["link_efficiency"])
    )
    drafter = gpu.bf16_flops * assumed["drafter_efficiency"] / drafter_flops
    return Rates(
        generation=DecodeRate(tokens, batch, decode.bound),
        target_samples=measured.target / work.length if measured.target else target,
        target_flops=target_flops,
        drafter_samples=measured.drafter / work.length if measured.drafter else drafter,
        drafter_flops=float(drafter_flops),
        sample_bytes=sample_bytes(job, work.length),
        gradient_bytes=float(_GRADIENT_BYTES * parameter_count(shape)),
        link=link,
    )


def _sums_seconds(job: Job, tokens: float, bandwidth: float) -> float:
    """What a target over several devices sums up for a sample: each layer's attention and MLP, in a ring."""
    devices, facts = job.spec.training.target_devices, job.facts
    states = 2 * facts.layers * tokens * facts.hidden_size * value_bytes(job.spec.target.dtype)
    return 2 * (devices - 1) / devices * states / bandwidth


def fleet_rate(rate: Rates, targets: int, drafters: int, batch_size: int) -> Split:
    """Pace of a split. A step's gradients are summed once, in a ring over the drafters."""
    share = -(-batch_size // drafters)
    ring = 2 * (drafters - 1) / drafters * rate.gradient_bytes / rate.link
    sides = {
        "targets": targets * rate.target_samples,
        "drafters": batch_size / (share / rate.drafter_samples + ring),
        "network": min(targets, drafters) * rate.link / rate.sample_bytes,
    }
    limit = min(sides, key=lambda side: sides[side])
    return Split(targets, drafters, sides[limit], limit)


def best_split(rate: Rates, gpus: int, batch_size: int, devices: int = 1) -> Split:
    """The fastest split of `gpus`; `devices` are those of one target. Of equals, the one with most targets.

    Targets are elastic. GPUs that make no whole one are left over; there must be more than `devices`.
    """
    splits = (
        fleet_rate(rate, (gpus - drafters) // devices, drafters, batch_size)
        for drafters in range(1, min(gpus - devices, batch_size) + 1)
    )
    return max(splits, key=lambda split: (split.samples_per_second, split.targets))
