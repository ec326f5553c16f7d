"""Bad input is found before anything is started, and told in one sentence."""

import json
import shutil
from pathlib import Path

import pytest

from dflash.errors import ConfigurationError, ExitCode, TemporaryError
from dflash.resource.load import Document, parse_resource, resolve_paths
from jobs.cli.preflight import Findings, Problem, check
from tests.support.tiny import save_tiny_target, tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path, model) -> Path:
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "what is {i}?"}}\n' for i in range(50)))
    return tmp_path


def findings(folder: Path, **sections) -> Findings:
    spec = {
        "target": {"model": "./model"},
        "prompts": {"uri": "prompts.jsonl", "holdOut": 0.2},
        "storage": {"uri": "state"},
        "drafter": {"taps": [0, 2], "slidingWindow": 0},
        **sections,
    }
    document = {
        "apiVersion": "dflash.dev/v1alpha1",
        "kind": "Drafter",
        "metadata": {"name": "x"},
        "spec": spec,
    }
    return check(resolve_paths(parse_resource(Document("x", document)), folder), None)


def problem(folder: Path, **sections) -> str:
    found = findings(folder, **sections).problems
    assert found
    assert {p.exit_code for p in found} == {ExitCode.CONFIGURATION}
    return "\n".join(p.sentence for p in found)


def test_good_input_has_no_problems_and_is_counted(folder):
    found = findings(folder)
    assert found.problems == []
    assert found.notes[0].startswith("50 prompts, ")


def test_duplicates_are_kept_once_and_counted(folder):
    prompts = folder / "prompts.jsonl"
    prompts.write_text(prompts.read_text() + '{"prompt": "what is 3?"}\n' * 2)
    assert "2 duplicate prompts are kept once" in findings(folder).notes


def test_nothing_is_held_out(folder):
    told = problem(folder, prompts={"uri": "prompts.jsonl", "holdOut": 0.0})
    assert "spec.prompts.holdOut keeps no prompt for evaluation" in told


def test_a_missing_model_folder(folder):
    assert "is not a folder; give a hub id" in problem(folder, target={"model": "./absent"})


def test_a_hub_model_without_a_network_is_told_in_a_sentence(folder, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = findings(folder, target={"model": "nobody/such-model"}).problems
    assert len(found) == 1
    assert "nobody/such-model" in found[0].sentence


def test_a_model_folder_without_weights(folder):
    for weights in (folder / "model").glob("*.safetensors"):
        weights.unlink()
    assert "no *.safetensors" in problem(folder)


def test_a_model_folder_without_a_configuration(folder):
    (folder / "model" / "config.json").unlink()
    assert "config.json" in problem(folder)


def test_a_tokenizer_without_a_chat_template(folder):
    (folder / "model" / "chat_template.jinja").unlink(missing_ok=True)
    tiny_tokenizer(None).save_pretrained(folder / "model")
    assert "has no chat template" in problem(folder)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "prompts.jsonl"),
        ("", "the file is empty"),
        ('{"prompt": "a"}\nnot json\n', "line 2"),
        ('{"prompt": "a"}\n[1]\n', "line 2 is not a JSON object"),
        (
            '{"messages": [{"role": "robot", "content": "a"}], "id": "q7"}\n',
            "line 1 (id q7): message 0 has role 'robot'",
        ),
        ('{"messages": [{"role": "assistant", "content": "a"}]}\n', "no message has role 'user'"),
    ],
)
def test_prompts_that_cannot_be_used(folder, text, told):
    prompts = folder / "prompts.jsonl"
    if text is None:
        prompts.unlink()
    else:
        prompts.write_text(text)
    assert told in problem(folder)


def test_a_prompt_longer_than_the_context_is_named_by_line_and_id(folder):
    prompts = folder / "prompts.jsonl"
    long = json.dumps({"id": "novel", "prompt": "word " * 2000})
    prompts.write_text(f'{{"prompt": "short"}}\n{long}\n')
    told = problem(folder)
    assert "line 2 (id novel)" in told
    assert "context of 4096" in told


@pytest.mark.parametrize(
    ("drafter", "told"),
    [
        ({"taps": [0, 4]}, "drafter.taps: 4 is out of range; the target has 4 layers"),
        ({"taps": [0, 2], "maskTokenId": 65}, "an ordinary token"),
        ({"taps": [0, 2], "maskTokenId": 320}, "is not a row of the target's embedding"),
        ({"taps": [0, 2], "maskTokenId": 258}, "drafter.maskTokenId: 258"),
        ({"tapCount": 5}, "drafter.tapCount: 5 evenly spaced taps do not fit"),
    ],
)
def test_a_drafter_that_does_not_fit_the_target(folder, drafter, told):
    assert told in problem(folder, drafter={"slidingWindow": 0, **drafter})


def test_problems_of_different_kinds_are_told_together(folder):
    (folder / "prompts.jsonl").write_text("")
    found = findings(folder, drafter={"taps": [9], "slidingWindow": 0})
    assert len(found.problems) == 2
    with pytest.raises(ConfigurationError, match=r"2 problems:\n.*empty(.|\n)*taps"):
        found.raise_problems()


def test_only_temporary_problems_are_temporary():
    with pytest.raises(TemporaryError, match="the hub"):
        Findings(problems=[Problem(sentence="the hub is away", exit_code=75)]).raise_problems()


def test_what_the_engine_could_not_serve_is_told_before_training(folder):
    taps = {"taps": [0, 3], "slidingWindow": 0}
    served = problem(folder, drafter=taps, evaluation={"engine": "sglang"})
    assert "spec.drafter taps layer 3, the target's last, which SGLang cannot read" in served
    found = findings(folder, drafter=taps)
    assert found.problems == []
    assert any("which SGLang cannot read" in note for note in found.notes)
    assert findings(folder, drafter=taps, evaluation={"engine": "transformers"}).notes == found.notes[:1]


def test_prediction_layers_that_the_target_lacks_are_told(folder):
    sentence = problem(folder, generation={"engine": "sglang", "speculation": {}})
    assert "declares no multi-token prediction layers; remove it, or name an EAGLE algorithm" in sentence
    found = findings(folder, evaluation={"engine": "sglang", "baselines": ["none", "mtp"]})
    assert any("mtp was left out" in note for note in found.notes)
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "model" / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    found = findings(
        folder,
        generation={"engine": "sglang", "speculation": {}},
        evaluation={"engine": "sglang", "baselines": ["none", "mtp"]},
    )
    assert (found.problems, found.notes[1:]) == ([], [])
