"""The target side of the training stage: a frozen model that serves hidden states until the run ends.

A target knows nothing of order, epochs or attempts. It stays through restarts of the drafters, and
ends by itself when the run's export is committed. Target 0 also measures checkpoints, where that is
asked for.
"""

import itertools
import logging
import threading

import numpy as np
import torch

from dflash import layout
from dflash.channel.keys import Authority, KeyPair
from dflash.channel.members import MemberDirectory
from dflash.channel.server import HiddenStateServer
from dflash.errors import DflashError, Preempted, TemporaryError
from dflash.model.states import States
from dflash.model.target import TargetModel, load_target
from dflash.resource import Drafter
from dflash.storage.location import location_of
from dflash.storage.store import Store
from dflash.training.control import Control
from dflash.training.device import device_of
from dflash.training.measuring import Measuring
from dflash.training.run import Plan, plan_of
from dflash.training.tensor_parallel import FollowerCommand, ParallelTarget, check_devices
from dflash.training.versions import check_published

log = logging.getLogger(__name__)

_LOOK_SECONDS = 2.0
"""Between two looks at whether the run has ended."""
_PROBE_LENGTHS = (7, 40, 23)
_CHECK_EVERY = 2000
"""Batches between two checks of the kernels: six short forwards, nothing beside so many long ones."""
_LEAST_COSINE = 0.999


def serve(
    resource: Drafter,
    run: str,
    index: int,
    *,
    bind: str,
    advertise: str,
    control: Control,
    follower: FollowerCommand,
) -> None:
    """Serve until the run's export is committed, then return. Raises Preempted when asked to stop.

    `follower` gives the command line of another rank, for a target that is spread over devices.
    """
    training = resource.spec.training
    store = Store.open(location_of(resource.spec.storage))
    export = layout.export(run, layout.COMMIT)
    if store.exists(export):
        log.info("run %s is exported already", run)
        return
    versions_agree = check_published(store, run)
    plan = plan_of(resource)
    device = device_of(training.backend)
    target: TargetModel | ParallelTarget
    if training.target_devices > 1:
        check_devices(plan.facts, training.target_devices)
        target = ParallelTarget(resource, follower, control.give_up)
    else:
        model = resource.spec.target
        target = load_target(model.model, model.revision, model.dtype, device)
    check_capture(target, plan)
    measuring = None
    if index == 0 and training.evaluation.enabled and isinstance(target, TargetModel):
        # Before it serves, so that no drafter's request waits behind these answers.
        measuring = Measuring(resource.spec, plan.shape, target, store, run)
    batches = itertools.count(1)
    problem: list[DflashError] = []

    def capture(batch: list[np.ndarray]) -> list[States]:
        if next(batches) % _CHECK_EVERY == 0:
            try:
                check_capture(target, plan)
            except DflashError as error:  # no sample's fault: this process must go, not the sample
                problem.append(error)
                server.request_stop()
                raise
        try:
            return target.capture(batch, plan.identity.taps, plan.identity.final)
        except TemporaryError as error:  # from a target over several devices, which are out of step now
            problem.append(error)
            server.request_stop()
            raise

    directory = MemberDirectory(store, run)
    keys = KeyPair.generate()
    server = HiddenStateServer(
        capture,
        plan.identity,
        run=run,
        keys=keys,
        authority=Authority(directory.public_keys),
        bind=bind,
        advertise=advertise,
        token_budget=training.target_batch_tokens,
        backend=training.backend,
        device=device,
    )
    server.start()
    member = directory.publish(
        "target",
        index,
        keys,
        host=advertise,
        control_port=server.port,
        fingerprint=plan.identity.fingerprint,
    )
    log.info("target %d serves on %s:%d", index, advertise, server.port)

    def watch() -> None:
        agreed = versions_agree
        while not control.stopping.wait(_LOOK_SECONDS):
            try:
                agreed = agreed or check_published(store, run)
                if store.exists(export):
                    break
            except DflashError as error:
                problem.append(error)
                break
        server.request_stop()

    watcher = threading.Thread(target=watch, name="target-watch", daemon=True)
    watcher.start()
    if measuring is not None:
        measuring.start()
    try:
        server.serve()
    finally:
        server.stop()
        if measuring is not None:
            measuring.stop()
        if isinstance(target, ParallelTarget):
            target.close()
        stats = server.stats()
        log.info(
            "served %d samples, %d tokens; causes of faults: %s", stats.samples, stats.tokens, stats.causes
        )
        if not problem:
            directory.withdraw(member)
    if problem:
        raise problem[0]
    if control.stopping.is_set():
        raise Preempted("the target stopped; drafters go on with the others")


def check_capture(target: TargetModel | ParallelTarget, plan: Plan) -> None:
    """Compare states of short samples captured alone and together. DflashError when they differ.

    Kernels that mix up the samples of a batch give states that look healthy and train nothing.
    """
    generator = np.random.default_rng(0)
    batch = [generator.integers(0, target.facts.vocab_size, n).astype(np.int32) for n in _PROBE_LENGTHS]
    taps, final = plan.identity.taps, plan.identity.final
    together = target.capture(batch, taps, final)
    lowest = 1.0
    for ids, state in zip(batch, together, strict=True):
        alone = target.capture([ids], taps, final)[0]
        pairs = [(alone.taps, state.taps)]
        if alone.final is not None and state.final is not None:
            pairs.append((alone.final, state.final))
        for a, b in pairs:
            cosine = torch.cosine_similarity(a.float(), b.float(), dim=-1).min()
            lowest = min(lowest, float(cosine))
    log.info("states captured alone and together agree to a cosine of %.6f", lowest)
    if not lowest >= _LEAST_COSINE:
        raise DflashError(
            f"the target's hidden states depend on what else is in a batch (cosine {lowest:.4f}, at least "
            f"{_LEAST_COSINE} is expected); its attention kernels mix samples up: use other versions"
        )
