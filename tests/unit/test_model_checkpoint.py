"""Exports: the published names, shapes and fields; and a gate that lets no mutation through."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.errors import ConfigurationError
from dflash.model.checkpoint import ExportError, check_export, export_files, load_export
from dflash.model.drafter import DFlashDrafter
from dflash.model.facts import TargetFacts
from tests.support.tiny import draft_shape, tiny_target

DOMINO = {"head": "domino", "head_state": 48, "head_rank": 32}


@pytest.fixture(scope="module")
def facts():
    return TargetFacts.from_folder(tiny_target())


def written(folder, shape, facts, seed=0):
    drafter = DFlashDrafter(shape, seed)
    for name, content in export_files(drafter, shape, facts).items():
        (folder / name).write_bytes(content)
    return drafter


def published_names(layers):
    per_layer = [
        "input_layernorm", "post_attention_layernorm",
        *[f"self_attn.{p}_proj" for p in "qkvo"], *[f"self_attn.{p}_norm" for p in "qk"],
        *[f"mlp.{p}_proj" for p in ("gate", "up", "down")],
    ]  # fmt: skip
    names = {f"layers.{i}.{name}.weight" for i in range(layers) for name in per_layer}
    return names | {"fc.weight", "hidden_norm.weight", "norm.weight"}


def test_five_layers_make_the_58_published_tensors_and_nothing_else(tmp_path, facts):
    shape = draft_shape(layers=5, layer_types=("sliding_attention",) * 4 + ("full_attention",))
    written(tmp_path, shape, facts)
    tensors = load_file(tmp_path / "model.safetensors")
    assert len(tensors) == 58
    assert set(tensors) == published_names(5)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors["fc.weight"].shape == (64, 128)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (64, 64)
    assert tensors["layers.0.self_attn.k_proj.weight"].shape == (32, 64)
    assert tensors["layers.0.self_attn.q_norm.weight"].shape == (16,)
    assert tensors["layers.0.mlp.down_proj.weight"].shape == (64, 96)


def test_the_configuration_has_both_spellings_of_what_readers_look_for(tmp_path, facts):
    written(tmp_path, draft_shape(), facts)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert config["block_size"] == config["dflash_config"]["block_size"] == 4
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50_000.0
    assert config["rope_scaling"] is None
    assert config["num_target_layers"] == 4
    assert config["dflash_config"]["target_layer_ids"] == [1, 3]
    assert config["dflash_config"]["mask_token_id"] == 262
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert (config["use_sliding_window"], config["sliding_window"]) == (True, 16)
    assert config["dtype"] == "bfloat16"


def test_transformers_reads_the_configuration_as_a_qwen3_one(tmp_path, facts):
    from transformers import AutoConfig

    written(tmp_path, draft_shape(), facts)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.rope_parameters["rope_theta"] == 50_000.0
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.head_dim == 16


@pytest.mark.parametrize(
    "changes", [{}, {"sliding_window": None, "layer_types": ("full_attention",) * 2}, DOMINO]
)
def test_an_export_loads_back_as_the_same_drafter(tmp_path, facts, changes):
    shape = draft_shape(**changes)
    drafter = written(tmp_path, shape, facts)
    check_export(tmp_path, drafter, facts)
    loaded, its_shape = load_export(tmp_path)
    assert its_shape == shape
    taps, inputs = torch.randn(20, shape.tap_width), torch.randn(4, 64)
    rounded = copy.deepcopy(drafter).bfloat16().float()
    one = rounded.propose(inputs, taps, rounded.new_cache(), 20)
    torch.testing.assert_close(loaded.propose(inputs, taps, loaded.new_cache(), 20), one)


def test_dominos_tensors_and_fields_are_those_sglang_looks_for(tmp_path, facts):
    written(tmp_path, draft_shape(**DOMINO), facts)
    tensors = load_file(tmp_path / "model.safetensors")
    more = {name: tuple(t.shape) for name, t in tensors.items() if name not in published_names(2)}
    assert more == {
        "prefix_gru.weight_ih_l0": (3 * 48, 64),
        "prefix_gru.weight_hh_l0": (3 * 48, 48),
        "embed_proj.0.weight": (32, 64 + 48),
        "embed_proj.2.weight": (320, 32),
    }
    fields = json.loads((tmp_path / "config.json").read_text())["dflash_config"]
    expected = {
        "projector_type": "domino", "shift_label": False, "pure_draft_prefix_len": 1,
        "gru_hidden_dim": 48, "emb_dim": 32,
    }  # fmt: skip
    assert expected.items() <= fields.items()


def drop(tensors):
    del tensors["layers.1.self_attn.k_norm.weight"]


def rename(tensors):
    tensors["layers.1.self_attn.key_norm.weight"] = tensors.pop("layers.1.self_attn.k_norm.weight")


def transpose_square(tensors):
    tensors["layers.0.self_attn.q_proj.weight"] = tensors["layers.0.self_attn.q_proj.weight"].T.contiguous()


def transpose_oblong(tensors):
    tensors["layers.0.mlp.up_proj.weight"] = tensors["layers.0.mlp.up_proj.weight"].T.contiguous()


def put_nan(tensors):
    tensors["fc.weight"][2, 3] = torch.nan


def cast_to_fp16(tensors):
    tensors["fc.weight"] = tensors["fc.weight"].half()


def swap_layers(tensors):
    a, b = "layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"
    tensors[a], tensors[b] = tensors[b], tensors[a]


def swap_taps(tensors):
    tensors["fc.weight"] = tensors["fc.weight"].roll(64, 1).contiguous()


def nudge_one_value(tensors):
    tensors["norm.weight"][7] += 0.01


def add_a_tensor(tensors):
    tensors["lm_head.weight"] = torch.zeros(4, 4, dtype=torch.bfloat16)


def theta_in_one_place(config):
    config["rope_theta"] = 1e4


def theta_in_both_places(config):
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 1e4


def shift_taps(config):
    config["dflash_config"]["target_layer_ids"] = [2, 3]


def other_mask_token(config):
    config["dflash_config"]["mask_token_id"] = 263


def no_mask_token(config):
    del config["dflash_config"]["mask_token_id"]


def all_layers_full(config):
    config["layer_types"] = ["full_attention", "full_attention"]


def other_window(config):
    config["sliding_window"] = 32


def other_block_size(config):
    config["block_size"] = 8


def other_epsilon(config):
    config["rms_norm_eps"] = 1e-5


def scaled_rope(config):
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0}


def cast_declared(config):
    config["dtype"] = "float16"


WEIGHTS = [drop, rename, transpose_square, transpose_oblong, put_nan, cast_to_fp16, swap_layers, swap_taps,
           nudge_one_value, add_a_tensor]  # fmt: skip
CONFIGS = [theta_in_one_place, theta_in_both_places, shift_taps, other_mask_token, no_mask_token,
           all_layers_full, other_window, other_block_size, other_epsilon, scaled_rope,
           cast_declared]  # fmt: skip


@pytest.mark.parametrize("mutate", WEIGHTS, ids=lambda f: f.__name__)
def test_the_gate_refuses_changed_weights(tmp_path, facts, mutate):
    drafter = written(tmp_path, draft_shape(), facts)
    tensors = load_file(tmp_path / "model.safetensors")
    mutate(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ExportError, match=str(tmp_path)):
        check_export(tmp_path, drafter, facts)


@pytest.mark.parametrize("mutate", CONFIGS, ids=lambda f: f.__name__)
def test_the_gate_refuses_a_changed_configuration(tmp_path, facts, mutate):
    drafter = written(tmp_path, draft_shape(), facts)
    config = json.loads((tmp_path / "config.json").read_text())
    mutate(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match=str(tmp_path)):
        check_export(tmp_path, drafter, facts)


def test_the_gate_refuses_a_file_cut_short_or_gone(tmp_path, facts):
    drafter = written(tmp_path, draft_shape(), facts)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-10])
    with pytest.raises(ExportError, match="cannot be read back"):
        check_export(tmp_path, drafter, facts)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ExportError, match="cannot be read back"):
        check_export(tmp_path, drafter, facts)


@pytest.mark.parametrize("mutate", [drop, rename, transpose_oblong, put_nan, cast_to_fp16, add_a_tensor])
def test_loading_refuses_what_it_can_tell_without_the_trained_drafter(tmp_path, facts, mutate):
    written(tmp_path, draft_shape(), facts)
    tensors = load_file(tmp_path / "model.safetensors")
    mutate(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"model\.safetensors"):
        load_export(tmp_path)


@pytest.mark.parametrize("mutate", [theta_in_one_place, no_mask_token, other_block_size])
def test_loading_refuses_spellings_that_disagree_and_never_guesses_the_mask_token(tmp_path, facts, mutate):
    written(tmp_path, draft_shape(), facts)
    config = json.loads((tmp_path / "config.json").read_text())
    mutate(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        load_export(tmp_path)


def test_a_drafter_with_a_nan_is_not_exported(facts):
    drafter = DFlashDrafter(draft_shape())
    with torch.no_grad():
        drafter.norm.weight[0] = torch.nan
    with pytest.raises(ExportError, match=r"norm\.weight holds values that are not finite"):
        export_files(drafter, drafter.shape, facts)


def test_a_drafter_for_another_target_is_not_exported(facts):
    shape = draft_shape(target_layers=5)
    with pytest.raises(ConfigurationError, match="num_target_layers"):
        export_files(DFlashDrafter(shape), shape, facts)


def test_a_folder_without_an_export_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"config\.json is missing"):
        load_export(tmp_path)
