"""The order of samples: every sample once an epoch, whoever trains it, from any step on."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.training.order import Order, Permutation


@given(size=st.integers(1, 700), seed=st.integers(0, 2**31), epoch=st.integers(0, 50))
def test_an_epoch_has_every_sample_exactly_once(size: int, seed: int, epoch: int) -> None:
    permutation = Permutation(size, seed, epoch)
    assert sorted(permutation(place) for place in range(size)) == list(range(size))


def test_orders_differ_between_epochs_and_seeds_and_never_change() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        permutation = Permutation(1000, seed, epoch)
        return [permutation(place) for place in range(1000)]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(0, 1) != order(1, 0)
    # Fixed for good: another order would make a resumed run train samples twice.
    assert order(0, 0)[:8] == FIRST_EIGHT


FIRST_EIGHT = [717, 937, 303, 542, 981, 156, 517, 908]


def test_an_order_is_spread_evenly() -> None:
    permutation = Permutation(902_000, 7, 3)
    tenths = Counter(permutation(place) * 10 // 902_000 for place in range(20_000))
    assert all(abs(count - 2000) < 200 for count in tenths.values())


@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 12),
    epochs=st.integers(1, 3),
    world=st.integers(1, 5),
)
def test_ranks_share_each_step_and_agree_on_the_number_of_steps(
    samples: int, batch: int, epochs: int, world: int
) -> None:
    order = Order(samples, batch, epochs, seed=1)
    trained: Counter[tuple[int, int]] = Counter()
    for step in range(order.steps):
        alone = order.step(step)
        together = [place for rank in range(world) for place in order.step(step, rank, world)]
        assert sorted(together, key=lambda p: p.index) == alone
        trained.update((place.epoch, place.sample) for place in alone)
    assert trained == Counter({(e, s): 1 for e in range(epochs) for s in range(samples)})


def test_the_last_batch_is_kept_and_a_rank_may_have_nothing_in_it() -> None:
    order = Order(samples=10, batch_size=4, epochs=2, seed=0)
    assert order.steps == 6
    last = [order.step(2, rank, 4) for rank in range(4)]
    assert [len(places) for places in last] == [1, 1, 0, 0]
    assert all(place.epoch == 0 for places in last for place in places)
    assert all(place.epoch == 1 for place in order.step(3))


@given(step=st.integers(0, 17))
def test_a_run_goes_on_from_a_step_alone(step: int) -> None:
    order = Order(samples=11, batch_size=2, epochs=3, seed=5)
    whole = list(order.from_step(0, 1, 2))
    assert list(order.from_step(step, 1, 2)) == whole[step:]


def test_steps_outside_the_run_are_refused() -> None:
    with pytest.raises(IndexError, match="outside a run of 6"):
        Order(samples=10, batch_size=4, epochs=2, seed=0).step(6)
