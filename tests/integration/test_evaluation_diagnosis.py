"""Drafters broken on purpose are named for what is wrong with them, not only scored low."""

from dataclasses import replace

import pytest

from dflash.evaluation.diagnosis import diagnose
from dflash.model.drafter import DFlashDrafter
from dflash.model.shape import DraftShape, resolve_shape
from dflash.model.target import Tables, TargetModel
from dflash.resource.model import DraftModel
from tests.support.overfit import Text, answers_of, loaded, trained
from tests.support.tiny import save_tiny_target

# Trains three drafters: about a minute of one core.
pytestmark = [pytest.mark.timeout(900), pytest.mark.xdist_group("diagnosis")]

MASKS = [256, 300, 301]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> tuple[TargetModel, Tables, list[Text]]:
    target, tables = loaded(save_tiny_target(tmp_path_factory.mktemp("target"), layers=6))
    return target, tables, answers_of(target, tables, count=18, tokens=30)


def shape_for(target: TargetModel, **kwargs: object) -> DraftShape:
    declared = {"layers": 2, "block_size": 6, "sliding_window": None, "taps": [1, 3], "mask_token_id": 300}
    return resolve_shape(DraftModel(**(declared | kwargs)), target.facts)


@pytest.fixture(scope="module")
def good(scene) -> DFlashDrafter:  # type: ignore[no-untyped-def]
    target, tables, texts = scene
    return trained(target, tables, shape_for(target), texts)


def served_as(drafter: DFlashDrafter, **changes: object) -> DFlashDrafter:
    """The same weights under another declaration."""
    other = DFlashDrafter(replace(drafter.shape, **changes))
    other.load_state_dict(drafter.state_dict())
    return other


def test_a_sound_drafter_has_no_fault(scene, good: DFlashDrafter) -> None:  # type: ignore[no-untyped-def]
    target, tables, texts = scene
    found = diagnose(target, tables, good, texts, MASKS)
    assert found.fault == ""
    assert found.trials[0].name == "as declared"
    assert found.trials[0].acceptance_length > 3.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"taps": (2, 4)}, "trained on [1, 3], not [2, 4]"),
        ({"taps": (1, 4)}, "tap 4 is off by one layer: it was trained on 3"),
        ({"rope_theta": 1e7}, "rope_theta is wrong: it was trained with 50000, not 1e+07"),
        ({"mask_token_id": 256}, "mask_token_id is wrong: it was trained with 300"),
    ],
    ids=["every tap", "one tap", "rotary base", "mask token"],
)
def test_a_wrong_declaration_is_named(scene, good: DFlashDrafter, changes: dict, words: str) -> None:  # type: ignore[no-untyped-def]
    target, tables, texts = scene
    found = diagnose(target, tables, served_as(good, **changes), texts, MASKS)
    assert words in found.fault
    assert words in found.sentence


def test_shifted_labels_are_named(scene) -> None:  # type: ignore[no-untyped-def]
    target, tables, texts = scene
    drafter = trained(target, tables, shape_for(target), texts, label_shift=1)
    assert "labels were shifted" in diagnose(target, tables, drafter, texts, MASKS).fault


def test_causal_training_served_bidirectional_is_named(scene) -> None:  # type: ignore[no-untyped-def]
    target, tables, texts = scene
    # Measured: 9.8 of 12 tokens where causal it has all 12. Within a block of 6 it hardly matters: 5.9 of 6.
    causal = shape_for(target, block_size=12, sliding_window=2048, layer_types=["sliding_attention"] * 2)
    drafter = trained(target, tables, causal, texts)
    served = served_as(drafter, layer_types=("full_attention",) * 2, sliding_window=None)
    assert "trained causal" in diagnose(target, tables, served, texts, MASKS).fault
