"""Plans against published figures; each test names its source and how far off it may be."""

import dataclasses

import pytest

from dflash.planning.hardware import GPUS
from dflash.planning.job import Measured
from dflash.planning.rates import best_split, decode_rate, fleet_rate, rates
from dflash.planning.run_plan import plan_run
from dflash.planning.step_cost import parameter_count
from dflash.planning.target_cost import target_cost
from dflash.planning.workload import workload
from tests.support.planning import QWEN3_8B, QWEN36_27B, QWEN36_DRAFT, job, lengths


def within(value: float, published: float, factor: float) -> bool:
    return published / factor <= value <= published * factor


# A sample of 4,096 tokens with 512 anchors, as the 27B sizing has it.
FULL = job(QWEN36_27B, "h100", drafter=QWEN36_DRAFT, generation={"maxTokens": 8192})
FULL_LENGTHS = lengths(96, 4000)


def rates_of(of, assumed):
    return rates(of, workload(of, assumed), assumed)


def test_the_drafter_of_a_27b_has_its_published_size():
    # Qwen3.6-27B's drafter: 5 layers of 320 M and fc of 131 M, about 1.73 B. Within 1 %.
    assert within(parameter_count(FULL.shape), 1.73e9, 1.01)


def test_a_27b_sample_costs_what_its_sizing_says():
    # Sizing of Qwen3.6-27B: 150 TFLOP for the drafter, with the head computed three times where we
    # compute it twice (so up to 1.3), and 221 TFLOP for the target, all layers (so up to 1.15).
    rate = rates_of(FULL, FULL_LENGTHS)
    assert within(rate.drafter_flops, 150e12, 1.3)
    assert within(rate.target_flops, 221e12, 1.15)


def test_a_27b_needs_one_and_a_half_targets_for_a_drafter():
    # Same sizing: 1.4 target GPUs per drafter GPU at 4,096 tokens. Within 1.2.
    rate = rates_of(FULL, FULL_LENGTHS)
    assert within(rate.drafter_samples / rate.target_samples, 1.4, 1.2)


def test_a_target_over_two_gpus_halves_its_memory_and_counts_twice():
    # No published figure: what follows from the shapes. Sums over NVLink cost a few per cent of a forward.
    spread = job(QWEN36_27B, "h100", drafter=QWEN36_DRAFT, training={"targetDevices": 2})
    whole = job(QWEN36_27B, "h100", drafter=QWEN36_DRAFT)
    one, two = rates_of(whole, FULL_LENGTHS), rates_of(spread, FULL_LENGTHS)
    assert 1.7 < two.target_samples / one.target_samples < 2.0
    row = plan_run(spread, FULL_LENGTHS, [2, 8]).rows
    assert [r.gpus for r in row] == [8]  # two GPUs hold no target and drafter
    assert 2 * row[0].targets + row[0].drafters in (7, 8)
    weights = [plan_run(of, FULL_LENGTHS, [8]).pods[1].parts["weights"] for of in (whole, spread)]
    assert weights[0] == 2 * weights[1]


def test_a_27b_drafter_trains_as_fast_on_h100_as_was_reported():
    # SpecForge#654: 5,000 steps of one sample in 33 minutes, 2.6 a second on one H100. Within 1.25.
    assert within(rates_of(FULL, FULL_LENGTHS).drafter_samples, 2.6, 1.25)


def test_a_drafter_gpu_receives_five_gigabits_a_second():
    # Same sizing: 51,200 bytes a token, 210 MB a sample, about 5 Gbit/s per drafter GPU. Within 1.2.
    rate = rates_of(FULL, FULL_LENGTHS)
    assert within(rate.sample_bytes, 210e6, 1.01)
    assert within(rate.drafter_samples * rate.sample_bytes * 8, 5e9, 1.2)


SPECFORGE = job(
    QWEN3_8B, "h200", training={"anchors": 256, "maxLength": 2048, "batchSize": 112, "loss": {"klWeight": 0}}
)
SPECFORGE_LENGTHS = lengths(100, 390)  # 27 k tok/s at 52 to 57 samples/s: about 490 tokens a sample


def test_qwen3_8b_on_eight_h200_trains_at_the_published_rates():
    # SpecForge docs/benchmarks/domino-disaggregated-performance.md: a server 52 to 57 samples/s (within
    # 1.4), a trainer about 7 at 45 TFLOP a sample (within 1.6, for its head's recompute), 50.1 samples/s
    # with one server and seven trainers, 39 with two and six (within 1.6).
    rate = rates_of(SPECFORGE, SPECFORGE_LENGTHS)
    assert within(rate.target_samples, 55, 1.4)
    assert within(rate.drafter_samples, 7, 1.6)
    assert within(rate.drafter_flops, 45e12, 1.4)
    assert within(fleet_rate(rate, 1, 7, 112).samples_per_second, 50.1, 1.6)
    assert within(fleet_rate(rate, 2, 6, 112).samples_per_second, 39, 1.6)


def test_qwen3_8b_on_eight_h200_is_best_with_one_server_as_was_found():
    # Same document: 1+7 beat 2+6.
    assert best_split(rates_of(SPECFORGE, SPECFORGE_LENGTHS), 8, 112).targets == 1


def test_torchspec_rate_on_four_h100():
    # TorchSpec, Qwen3-8B, 2,048 tokens, anchors padded to 512: about 15 samples/s on 4 H100. Within 1.25.
    of = job(QWEN3_8B, "h100", training={"maxLength": 2048, "batchSize": 48, "loss": {"klWeight": 0}})
    assumed = lengths(300, 1748)
    assert within(best_split(rates_of(of, assumed), 4, 48).samples_per_second, 15, 1.25)


def test_two_billion_tokens_on_seven_b200_take_45_hours_at_the_measured_rate():
    # History: 2.285 B output tokens at about 2,000 tok/s on each of 7 B200. Within 1.05 (start-up, losses).
    of = job(QWEN36_27B, "b200", answers=571_250, drafter=QWEN36_DRAFT, generation={"maxTokens": 8192})
    of = dataclasses.replace(of, measured=Measured(generation=2000.0))
    row = plan_run(of, lengths(300, 4000), [7]).rows[0]
    assert within(row.generation_seconds / 3600, 45.3, 1.05)


def test_a_b200_is_estimated_at_what_it_reached():
    # Same history, before anything is measured: 2,000 tok/s. Within 1.3; `concurrency` is calibrated on it.
    of = job(QWEN36_27B, "b200", drafter=QWEN36_DRAFT, generation={"maxTokens": 8192})
    assert within(rates_of(of, lengths(300, 4000)).generation.tokens_per_second, 2000, 1.3)


def test_decoding_27_gigabytes_of_weights_is_bound_by_bandwidth():
    # History: 27 GB of weights (here: 64 of Qwen3-8B's layers in bf16). One answer at a time cannot beat
    # bandwidth over weights (within 1.1); arithmetic takes over near the card's FLOP/s over bytes/s, 290.
    facts = job({**QWEN3_8B, "num_hidden_layers": 64}, "b200").facts
    assert within(target_cost(facts).weight_bytes, 27e9, 1.02)
    assumed = lengths(100, 1, target_efficiency=1.0, decode_bandwidth_share=1.0)
    one, many, most = (
        decode_rate(facts, GPUS["b200"], assumed, batch=batch, prompt=0, response=1)
        for batch in (1, 64, 1024)
    )
    assert one.bound == many.bound == "bandwidth"
    assert most.bound == "arithmetic"
    assert within(one.tokens_per_second, 7.7e12 / 27e9, 1.1)


RTX = job(
    QWEN36_27B,
    "rtx-pro-6000",
    drafter=QWEN36_DRAFT,
    generation={"maxTokens": 8192},
    training={"targets": 5, "drafters": 3, "loss": {"klWeight": 0.7}},
)


def test_five_to_three_on_rtx_pro_6000_trains_at_its_measured_rate():
    # History: 14.2 k tok/s. Within 1.2.
    rate = rates_of(RTX, FULL_LENGTHS)
    assert within(fleet_rate(rate, 5, 3, 8).samples_per_second * 4096, 14_200, 1.2)


def test_the_plan_says_that_four_to_four_would_have_been_faster():
    # History: at 5:3 targets idled 41 %, and 4:4 was worth about 1.3. Within 1.15 for the gain.
    split = fleet_rate(rates_of(RTX, FULL_LENGTHS), 5, 3, 8)
    assert split.limit == "drafters"
    idle = 1 - split.samples_per_second / (5 * rates_of(RTX, FULL_LENGTHS).target_samples)
    assert idle == pytest.approx(0.41, abs=0.06)
    plan = plan_run(RTX, FULL_LENGTHS, [8])
    assert (plan.rows[0].targets, plan.rows[0].drafters) == (4, 4)
    assert within(plan.rows[0].samples_per_second / split.samples_per_second, 1.3, 1.15)
    assert any("the file asks for 5:3" in note and "4:4 gives 1." in note for note in plan.notes)


@pytest.mark.parametrize(("hidden", "published"), [(5120, 118e12), (4096, 94e12)])
def test_hidden_states_of_two_billion_tokens_would_not_fit_any_disk(hidden, published):
    # History: 2.3 B tokens x 5 taps x hidden size x 2 bytes. Within 1 %.
    text = {**QWEN36_27B["text_config"], "hidden_size": hidden}
    of = job(
        {**QWEN36_27B, "text_config": text},
        "b200",
        answers=2.3e9 / 2300,
        drafter=QWEN36_DRAFT,
        generation={"maxTokens": 8192},
    )
    assert within(plan_run(of, lengths(300, 2000), [8]).offline_bytes, published, 1.01)
