"""What a run needs and costs, before anything is paid for: memory, rates, split, time, money, bytes. Pure.

The stages follow each other on the same GPUs, which are paid from the first to the last, idle or not.
A row says what a number of GPUs gives; the recommended one is the fastest of those whose cost is
within a tenth of the cheapest. Every figure follows from shapes, a GPU's profile and named assumptions,
and is told with the assumption that moves it most.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dflash.errors import ConfigurationError
from dflash.planning.assumptions import Assumptions
from dflash.planning.hardware import Gpu
from dflash.planning.job import Job
from dflash.planning.memory import PodMemory, pod_memory, sample_bytes
from dflash.planning.rates import Rates, Split, best_split, decode_rate, fleet_rate, rates
from dflash.planning.sensitivity import Mover, movers
from dflash.planning.step_cost import parameter_count
from dflash.planning.workload import Workload, workload

COUNTS = (2, 4, 6, 7, 8, 12, 16)
"""GPU counts that are compared when none is asked for."""

_NEAR_CHEAPEST = 1.10
_NODE = 8
"""GPUs in one node, as a rule."""
_SPECULATIVE_STEP = 1.38
"""A speculative step over a plain one: acceptance 6.34 gave 4.59x (Model-Optimizer#2342, GSM8K, H100)."""
_CHECKPOINT_BYTES = 12
"""Per parameter: fp32 master and AdamW's two moments."""
_EXPORT_BYTES = 2


@dataclass(frozen=True)
class Row:
    """One number of GPUs. Seconds by stage, start-ups and lost work included; rates of the training."""

    gpus: int
    targets: int
    drafters: int
    fits: bool
    limit: str
    samples_per_second: float
    tokens_per_second: float
    target_idle: float
    generation_seconds: float
    training_seconds: float
    evaluation_seconds: float
    gpu_hours: float
    cost: float | None
    cost_per_million_tokens: float | None
    wire_bytes_per_second: float
    link_share: float
    """Load of the busiest pod's link, as a share of what it carries."""

    @property
    def wall_seconds(self) -> float:
        """From the first stage's start to the last one's end."""
        return self.generation_seconds + self.training_seconds + self.evaluation_seconds


@dataclass(frozen=True)
class RunPlan:
    """The whole answer. `recommended` is None when nothing fits."""

    gpu: Gpu
    work: Workload
    rates: Rates
    pods: tuple[PodMemory, ...]
    rows: tuple[Row, ...]
    recommended: Row | None
    wire_bytes: float
    store_bytes: float
    offline_bytes: float
    """What hidden states of the data set would take if they were stored; here they never are."""
    movers: dict[str, Mover | None]
    notes: tuple[str, ...]
    assumptions: Assumptions


def plan_run(job: Job, assumed: Assumptions, counts: Sequence[int] = COUNTS) -> RunPlan:
    """Plan for each of `counts` GPUs. ConfigurationError when a count cannot hold both sides."""
    least = job.spec.training.target_devices + 1
    enough = sorted({count for count in counts if count >= least})
    if not enough or min(counts) < 2:
        raise ConfigurationError(
            f"--gpu {job.gpu.name}:{min(counts)}: training needs a target and a drafter; give {least} GPUs "
            "or more"
        )
    work = workload(job, assumed)
    if work.blocks < 1:
        raise ConfigurationError(
            f"nothing to train on: prompts of {work.prompt_tokens:.0f} tokens leave no answer within "
            f"training.maxLength {job.spec.training.max_length}; raise it, or give shorter prompts"
        )
    rate = rates(job, work, assumed)
    rows = tuple(_row(job, work, rate, count, assumed) for count in enough)
    recommended = recommend(rows)
    shown = recommended or rows[-1]
    pods = pod_memory(job, work, shown.drafters, assumed)
    return RunPlan(
        gpu=job.gpu,
        work=work,
        rates=rate,
        pods=pods,
        rows=rows,
        recommended=recommended,
        wire_bytes=work.trained_samples * rate.sample_bytes,
        store_bytes=_store_bytes(job, work, assumed),
        offline_bytes=_offline_bytes(job, work),
        movers=movers(lambda a: _figures(job, a, shown.gpus), assumed),
        notes=tuple(_notes(job, rate, pods, shown)),
        assumptions=assumed,
    )


def recommend(rows: Sequence[Row]) -> Row | None:
    """The fastest of the rows that fit and cost at most a tenth more than the cheapest per trained token."""
    fitting = [row for row in rows if row.fits]
    if not fitting:
        return None
    limit = _NEAR_CHEAPEST * min(row.gpu_hours for row in fitting)
    return min((row for row in fitting if row.gpu_hours <= limit), key=lambda row: row.wall_seconds)


def estimate_errors(assumed: Rates, measured: Rates) -> dict[str, float]:
    """By how much the first estimate of each rate was off: 0.2 is 20 % too high."""
    return {
        "generation": assumed.generation.tokens_per_second / measured.generation.tokens_per_second - 1,
        "target": assumed.target_samples / measured.target_samples - 1,
        "drafter": assumed.drafter_samples / measured.drafter_samples - 1,
    }


def _row(job: Job, work: Workload, rate: Rates, gpus: int, assumed: Assumptions) -> Row:
    training = job.spec.training
    split = best_split(rate, gpus, training.batch_size, training.target_devices)
    startup, lost = 60 * assumed["startup_minutes"], 1 + assumed["lost_share"]
    generation = startup + lost * work.generated_tokens / (gpus * rate.generation.tokens_per_second)
    trained = startup + lost * work.trained_samples / split.samples_per_second
    evaluation = startup + _evaluation_seconds(job, work, assumed)
    hours = gpus * (generation + trained + evaluation) / 3600
    cost = None if job.price is None else hours * job.price
    wire = split.samples_per_second * rate.sample_bytes
    pods = pod_memory(job, work, split.drafters, assumed)
    return Row(
        gpus=gpus,
        targets=split.targets,
        drafters=split.drafters,
        fits=all(pod.fits for pod in pods),
        limit=split.limit,
        samples_per_second=split.samples_per_second,
        tokens_per_second=split.samples_per_second * work.length,
        target_idle=_target_idle(rate, split),
        generation_seconds=generation,
        training_seconds=trained,
        evaluation_seconds=evaluation,
        gpu_hours=hours,
        cost=cost,
        cost_per_million_tokens=None if cost is None else cost / (work.trained_tokens / 1e6),
        wire_bytes_per_second=wire,
        link_share=wire / min(split.targets, split.drafters) / rate.link,
    )


def _target_idle(rate: Rates, split: Split) -> float:
    return max(0.0, 1 - split.samples_per_second / (split.targets * rate.target_samples))


def _evaluation_seconds(job: Job, work: Workload, assumed: Assumptions) -> float:
    """One GPU answers every question plainly, by each other baseline, and with the drafter."""
    evaluation = job.spec.evaluation
    answer = min(work.response_tokens, float(evaluation.max_tokens))
    tokens = evaluation.samples * max(1, len(evaluation.prompts)) * answer * evaluation.repeats
    relative = 1 / max(1.0, assumed["acceptance_length"] / _SPECULATIVE_STEP)
    relative += sum(
        1.0 if baseline == "none" else 1 / assumed["speculation_gain"] for baseline in evaluation.baselines
    )
    return sum(
        relative
        * tokens
        / decode_rate(
            job.facts,
            job.gpu,
            assumed,
            batch=concurrency,
            prompt=work.prompt_tokens,
            response=answer,
            dtype=evaluation.dtype,
        ).tokens_per_second
        for concurrency in evaluation.concurrency
    )


def _store_bytes(job: Job, work: Workload, assumed: Assumptions) -> float:
    """Data set, the checkpoints that are kept, and the export."""
    parameters = parameter_count(job.shape)
    kept = job.spec.training.checkpoint.keep * _CHECKPOINT_BYTES + _EXPORT_BYTES
    return work.dataset_tokens * assumed["row_bytes_per_token"] + parameters * kept


def _offline_bytes(job: Job, work: Workload) -> float:
    return work.samples * sample_bytes(job, work.length)


def _figures(job: Job, assumed: Assumptions, gpus: int) -> Mapping[str, float]:
    """The estimates whose movers are told, for one number of GPUs."""
    work = workload(job, assumed)
    rate = rates(job, work, assumed)
    row = _row(job, work, rate, gpus, assumed)
    pods = pod_memory(job, work, row.drafters, assumed)
    return {
        "generation rate": rate.generation.tokens_per_second,
        "training rate": row.tokens_per_second,
        "targets per drafter": rate.drafter_samples / rate.target_samples,
        "wall time": row.wall_seconds,
        "GPU-hours and cost": row.gpu_hours,
        "cost per trained token": row.gpu_hours / work.trained_tokens,
        "bytes on the wire": work.trained_samples * rate.sample_bytes,
        "bytes in S3": _store_bytes(job, work, assumed),
        "offline hidden states": _offline_bytes(job, work),
        **{f"memory of a {pod.pod} pod": pod.used for pod in pods},
    }


def _notes(job: Job, rate: Rates, pods: Sequence[PodMemory], row: Row) -> list[str]:
    """What a reader should do about it, a sentence each."""
    notes = [
        f"a {pod.pod} pod needs {-pod.left / 1e9:.0f} GB more than {job.gpu.name} has: {pod.advice}"
        for pod in pods
        if not pod.fits
    ]
    training, limit = job.spec.training, job.spec.tracking.cost_limit
    if limit is not None and row.cost is not None and row.cost > limit:
        notes.append(
            f"{row.gpus} GPUs cost {row.cost:,.0f}, and tracking.costLimit is {limit:,.0f}: give fewer "
            "prompts or epochs, or take a cheaper row"
        )
    if row.gpus > _NODE and job.network is None:
        notes.append(
            f"{row.gpus} GPUs are seldom one node: give --network, so that links between nodes are counted"
        )
    if row.limit == "network":
        notes.append(
            f"the network limits training at {row.tokens_per_second:,.0f} tok/s: put targets and drafters "
            "into one node, or use a faster network"
        )
    declared_gpus = (
        training.targets * training.target_devices + training.drafters
        if isinstance(training.targets, int)
        else None
    )
    if isinstance(training.targets, int) and declared_gpus == row.gpus:
        declared = fleet_rate(rate, training.targets, training.drafters, training.batch_size)
        gain = row.samples_per_second / declared.samples_per_second
        if gain > 1.05:
            notes.append(
                f"the file asks for {training.targets}:{training.drafters}, which {declared.limit} limit to "
                f"{declared.samples_per_second:.1f} samples/s; {row.targets}:{row.drafters} gives {gain:.1f}x"
            )
    else:
        notes.append(
            f"for this row set training.targets: {row.targets}, training.drafters: {row.drafters} and "
            f"generation.replicas: {row.gpus}"
        )
    return notes
