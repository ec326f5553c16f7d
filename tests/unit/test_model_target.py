"""Hidden states of every family: the right layers, nothing from other samples, the right tables."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash.errors import ConfigurationError
from dflash.model.source import fingerprint
from dflash.model.target import load_tables, load_target
from tests.support.tiny import FAMILIES, save_tiny_target, tiny_target

LENGTHS = (7, 33, 31, 1, 64)


def ids(length, seed=0):
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)


def whole_model(folder):
    import transformers

    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    return getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_tap_k_is_entry_k_plus_1_of_hidden_states_and_the_last_is_taken_before_the_norm(family):
    folder = tiny_target(family)
    reference, target = whole_model(folder), load_target(str(folder), dtype="float32")
    tokens = ids(40)
    before_norm = []
    decoder = next(m for m in reference.modules() if hasattr(m, "embed_tokens") and hasattr(m, "norm"))
    decoder.norm.register_forward_pre_hook(lambda module, args: before_norm.append(args[0]))
    with torch.no_grad():
        output = reference(input_ids=torch.from_numpy(tokens)[None].long(), output_hidden_states=True)
    [states] = target.capture([tokens], [0, 1, 2, 3], final=True)
    taps = states.taps.view(40, 4, -1)
    for layer in range(3):
        torch.testing.assert_close(taps[:, layer], output.hidden_states[layer + 1][0])
    torch.testing.assert_close(taps[:, 3], before_norm[0][0])
    torch.testing.assert_close(states.final, output.hidden_states[4][0])
    assert not torch.allclose(taps[:, 3], states.final)
    head = load_tables(str(folder), dtype="float32").head
    torch.testing.assert_close(states.final @ head.T, output.logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padding", [0.0, 0.9])
def test_a_sample_has_the_same_states_alone_in_company_and_again(family, padding):
    target = load_target(str(tiny_target(family)), dtype="float32")
    target._padding = padding  # 0.9 puts samples of very unlike length into one forward
    batch = [ids(n, seed=n) for n in LENGTHS]
    alone = [target.capture([sample], [1, 3], final=True)[0] for sample in batch]
    for together in (target.capture(batch, [1, 3], True), target.capture(batch[::-1], [1, 3], True)[::-1]):
        for sample, one, other in zip(batch, alone, together, strict=True):
            assert other.taps.shape == (len(sample), 2 * 64)
            torch.testing.assert_close(one.taps, other.taps, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(one.final, other.final, rtol=1e-4, atol=1e-4)


def test_layers_above_the_last_tap_are_not_run_when_the_final_state_is_not_asked_for():
    target = load_target(str(tiny_target()), dtype="float32")
    runs = []
    for index, layer in enumerate(target.decoder.layers):
        layer.register_forward_hook(lambda module, args, output, index=index: runs.append(index))
    [short] = target.capture([ids(9)], [0, 2], final=False)
    assert runs == [0, 1, 2]
    assert short.final is None
    [full] = target.capture([ids(9)], [0, 2], final=True)
    assert runs[3:] == [0, 1, 2, 3]
    torch.testing.assert_close(short.taps, full.taps)


def test_taps_come_in_the_order_asked_for():
    target = load_target(str(tiny_target()), dtype="float32")
    [one], [other] = target.capture([ids(5)], [1, 3], False), target.capture([ids(5)], [3, 1], False)
    torch.testing.assert_close(one.taps.view(5, 2, -1), other.taps.view(5, 2, -1).flip(1))


def test_a_tap_that_is_not_a_layer_is_refused():
    target = load_target(str(tiny_target()), dtype="float32")
    with pytest.raises(ConfigurationError, match="4 is out of range"):
        target.capture([ids(5)], [4], False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_the_tables_are_the_models_own(family, tied):
    folder = tiny_target(family, tied)
    reference = whole_model(folder)
    tables = load_tables(str(folder), dtype="float32")
    torch.testing.assert_close(tables.embedding, reference.get_input_embeddings().weight.detach())
    torch.testing.assert_close(tables.head, reference.get_output_embeddings().weight.detach())
    assert (tables.head is tables.embedding) == tied


def test_a_head_that_is_claimed_but_absent_is_refused_never_made_up(tmp_path):
    shutil.copytree(tiny_target(), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(ConfigurationError, match=r"no head \(looked for lm_head.weight"):
        load_tables(str(tmp_path))


def test_a_table_of_another_size_than_declared_is_refused(tmp_path):
    shutil.copytree(tiny_target(), tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    with pytest.raises(ConfigurationError, match=r"\[320, 64\] but config.json says \[300, 64\]"):
        load_tables(str(tmp_path))


def test_a_folder_without_safetensors_is_refused(tmp_path):
    shutil.copytree(tiny_target(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="safetensors"):
        load_target(str(tmp_path))
    with pytest.raises(ConfigurationError, match="safetensors"):
        load_tables(str(tmp_path))


def test_a_weights_file_cut_short_is_refused(tmp_path):
    shutil.copytree(tiny_target(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").write_bytes(b"\xff\xff\xff")
    with pytest.raises(ConfigurationError, match="cut short"):
        load_tables(str(tmp_path))


def test_the_fingerprint_tells_models_apart_and_copies_together(tmp_path):
    original = tiny_target()
    copy, other, edited = tmp_path / "copy", tmp_path / "other", tmp_path / "edited"
    shutil.copytree(original, copy)
    shutil.copytree(original, edited)
    save_tiny_target(other, seed=1)
    tensors = load_file(edited / "model.safetensors")
    tensors["model.norm.weight"] += 1
    save_file(tensors, edited / "model.safetensors", {"format": "pt"})
    assert fingerprint(copy) == fingerprint(original) == load_target(str(original)).fingerprint
    assert fingerprint(other) != fingerprint(original)
    assert fingerprint(edited) != fingerprint(original)
