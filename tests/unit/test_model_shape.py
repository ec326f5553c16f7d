"""The drafter's shape: defaults from the target, and every refusal names its field."""

import dataclasses

import pytest

from dflash.errors import ConfigurationError
from dflash.model.facts import TargetFacts
from dflash.model.shape import check_fits, default_taps, resolve_shape
from dflash.model.tokenizer import load_tokenizer
from dflash.resource.model import DraftModel
from tests.support.tiny import save_tiny_target, tiny_target, tiny_tokenizer


@pytest.fixture(scope="module")
def facts():
    return TargetFacts.from_folder(tiny_target())


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


def model(**fields):
    return DraftModel(**{"layers": 2, "block_size": 8, "taps": [1, 3]} | fields)


@pytest.mark.parametrize(
    ("layers", "count", "taps"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (64, 5, (1, 16, 31, 46, 61)),
        (30, 3, (1, 14, 27)),
        (36, 1, (18,)),
    ],
)
def test_default_taps_are_those_of_published_drafters(layers, count, taps):
    assert default_taps(layers, count) == taps


def test_sizes_left_out_are_the_targets(facts, tokenizer):
    shape = resolve_shape(model(), facts, tokenizer)
    assert (shape.hidden_size, shape.heads, shape.kv_heads, shape.head_dim) == (64, 4, 2, 16)
    assert shape.rope_theta == 50_000.0
    assert shape.tap_width == 2 * 64
    assert shape.layer_types == ("sliding_attention", "full_attention")


def test_a_hybrid_targets_partial_rotary_and_head_width_are_not_inherited(tokenizer):
    facts = TargetFacts.from_folder(tiny_target("qwen3_5"))
    assert facts.head_dim == 32
    assert resolve_shape(model(), facts, tokenizer).head_dim == 128


def test_full_layers_everywhere_need_no_window(facts, tokenizer):
    shape = resolve_shape(model(sliding_window=None), facts, tokenizer)
    assert shape.sliding_window is None
    assert set(shape.layer_types) == {"full_attention"}


@pytest.mark.parametrize("taps", [[0, 3], [2], [0, 1, 2, 3]])
def test_taps_of_every_layer_of_the_target_are_accepted(facts, tokenizer, taps):
    assert resolve_shape(model(taps=taps), facts, tokenizer).taps == tuple(taps)


def test_a_tap_beyond_the_last_layer_is_refused_with_the_range(facts, tokenizer):
    with pytest.raises(ConfigurationError, match=r"drafter\.taps: 4 is out of range.*0 to 3"):
        resolve_shape(model(taps=[1, 4]), facts, tokenizer)


def test_more_default_taps_than_fit_are_refused(facts, tokenizer):
    with pytest.raises(ConfigurationError, match=r"drafter\.tapCount"):
        resolve_shape(model(taps=None, tap_count=3), facts, tokenizer)


def test_head_counts_must_divide(facts, tokenizer):
    with pytest.raises(ConfigurationError, match=r"drafter\.kvHeads"):
        resolve_shape(model(heads=4, kv_heads=3), facts, tokenizer)


def test_an_odd_head_width_is_refused(facts, tokenizer):
    with pytest.raises(ConfigurationError, match=r"drafter\.headDim"):
        resolve_shape(model(head_dim=15), facts, tokenizer)


def test_a_block_longer_than_the_context_is_refused(facts, tokenizer):
    short = dataclasses.replace(facts, max_positions=4)
    with pytest.raises(ConfigurationError, match=r"drafter\.blockSize.*2 to 4"):
        resolve_shape(model(), short, tokenizer)


class TestMaskToken:
    def test_default_is_the_first_row_beyond_the_tokenizer(self, facts, tokenizer):
        assert len(tokenizer) == 262
        assert resolve_shape(model(), facts, tokenizer).mask_token_id == 262

    def test_default_is_the_tokenizers_own_mask_token_if_it_has_one(self, facts):
        tokenizer = tiny_tokenizer()
        tokenizer.mask_token = "<|unused|>"
        assert resolve_shape(model(), facts, tokenizer).mask_token_id == 261

    def test_it_is_never_guessed(self, facts, tokenizer):
        full = dataclasses.replace(facts, vocab_size=len(tokenizer))
        with pytest.raises(ConfigurationError, match=r"drafter\.maskTokenId.*no mask token"):
            resolve_shape(model(), full, tokenizer)

    @pytest.mark.parametrize("token", [261, 262, 319])
    def test_an_unused_special_token_or_spare_row_is_accepted(self, facts, tokenizer, token):
        assert resolve_shape(model(mask_token_id=token), facts, tokenizer).mask_token_id == token

    def test_a_row_that_does_not_exist_is_refused(self, facts, tokenizer):
        with pytest.raises(ConfigurationError, match=r"320 is not a row.*0 to 319"):
            resolve_shape(model(mask_token_id=320), facts, tokenizer)

    @pytest.mark.parametrize(
        ("token", "reason"),
        [
            (65, "an ordinary token"),
            (256, "pad_token"),
            (257, "the chat template writes"),
            (258, "eos_token"),
        ],
    )
    def test_a_token_that_text_uses_is_refused(self, facts, tokenizer, token, reason):
        with pytest.raises(ConfigurationError, match=rf"drafter\.maskTokenId: {token} is .*{reason}"):
            resolve_shape(model(mask_token_id=token), facts, tokenizer)

    def test_an_end_token_that_only_the_configuration_names_is_refused(self, facts):
        with pytest.raises(ConfigurationError, match="begin, end or padding"):
            resolve_shape(model(mask_token_id=258), facts, None)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": 128}, "hidden_size"),
        ({"layers": 3}, "num_target_layers"),
        ({"vocab_size": 999}, "vocab_size"),
    ],
)
def test_a_drafter_of_another_target_is_refused_by_field(facts, tokenizer, change, field):
    shape = resolve_shape(model(), facts, tokenizer)
    check_fits(shape, facts)
    with pytest.raises(ConfigurationError, match=field):
        check_fits(shape, dataclasses.replace(facts, **change))


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path):
    save_tiny_target(tmp_path, template=None)
    with pytest.raises(ConfigurationError, match="no chat template"):
        load_tokenizer(str(tmp_path))


def test_a_model_that_is_nowhere_is_refused():
    with pytest.raises(ConfigurationError, match="is not a folder"):
        load_tokenizer("/nowhere/at/all")
