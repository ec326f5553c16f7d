"""From a person's file to a Drafter, or to every problem in it at once."""

import json
from pathlib import Path

import pytest
import yaml

from dflash.errors import ConfigurationError
from dflash.resource.load import Document, dump_resource, load_resource, parse_resource, read_document

GOOD = """\
apiVersion: dflash.dev/v1alpha1
kind: Drafter
metadata: {name: qwen-drafter}
spec:
  target: {model: Qwen/Qwen3-8B}
  prompts: {uri: prompts/*.jsonl}
  storage: {uri: state}
"""


def written(folder: Path, text: str, name: str = "drafter.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def refusal(folder: Path, text: str, name: str = "drafter.yaml") -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_resource(written(folder, text, name))
    return str(caught.value)


def with_spec(**sections) -> str:
    document = yaml.safe_load(GOOD)
    document["spec"] |= sections
    return yaml.safe_dump(document, sort_keys=False)


def test_a_file_is_read_and_relative_paths_start_at_its_folder(tmp_path, monkeypatch):
    (tmp_path / "models" / "m").mkdir(parents=True)
    monkeypatch.chdir("/")
    text = with_spec(
        target={"model": "models/m"},
        storage={"uri": "../state"},
        evaluation={
            "prompts": [{"name": "extra", "uri": "./extra.jsonl"}, {"name": "far", "uri": "s3://b/x"}]
        },
    )
    spec = load_resource(written(tmp_path, text)).spec
    assert spec.target.model == str(tmp_path / "models" / "m")
    assert spec.prompts.uri == str(tmp_path / "prompts" / "*.jsonl")
    assert spec.storage.uri == str(tmp_path.parent / "state")
    assert [p.uri for p in spec.evaluation.prompts] == [str(tmp_path / "extra.jsonl"), "s3://b/x"]


def test_a_hub_id_stays_a_hub_id(tmp_path):
    assert load_resource(written(tmp_path, GOOD)).spec.target.model == "Qwen/Qwen3-8B"


def test_what_is_written_out_reads_back_as_the_same_drafter(tmp_path):
    drafter = load_resource(written(tmp_path, GOOD))
    again = load_resource(written(tmp_path, json.dumps(dump_resource(drafter)), "again.json"))
    assert again == drafter


def test_all_problems_are_told_at_once_with_line_field_and_remedy(tmp_path):
    told = refusal(
        tmp_path,
        GOOD.replace("kind: Drafter", "kind: Draftr")
        + "  drafter: {blockSze: 16, layers: 0}\n  training: {loss: {klWeight: 1.5}}\n",
    )
    assert "drafter.yaml: 4 problems:" in told
    assert "line 2: kind: \"Draftr\" is not 'Drafter'; did you mean Drafter?" in told
    assert "line 8: spec.drafter.blockSze: unknown field; did you mean blockSize?" in told
    assert "line 8: spec.drafter.layers: 0 is out of range; give at least 1" in told
    assert "line 9: spec.training.loss.klWeight: 1.5 is out of range; give at most 1.0" in told


@pytest.mark.parametrize(
    ("section", "field", "suggestion"),
    [
        ({"drafter": {"block_size": 8}}, "spec.drafter.block_size", "blockSize"),
        ({"drafter": {"blocksize": 8}}, "spec.drafter.blocksize", "blockSize"),
        ({"generation": {"gate": {"maxEmpty": 0.1}}}, "spec.generation.gate.maxEmpty", "maxEmptyShare"),
        ({"generation": {"speculation": {"step": 2}}}, "spec.generation.speculation.step", "steps"),
        ({"evaluation": {"prompts": [{"name": "a", "url": "b"}]}}, "spec.evaluation.prompts[0].url", "uri"),
        ({"trainning": {}}, "spec.trainning", "training"),
    ],
)
def test_an_unknown_field_is_refused_with_the_one_that_was_meant(tmp_path, section, field, suggestion):
    told = refusal(tmp_path, with_spec(**section))
    assert f"{field}: unknown field; did you mean {suggestion}?" in told


def test_an_unknown_field_like_no_other_is_answered_with_the_known_ones(tmp_path):
    assert "known here: uri, endpoint, region" in refusal(
        tmp_path, with_spec(storage={"uri": "state", "zzz": 1})
    )


def test_a_missing_field_is_named_with_its_meaning(tmp_path):
    told = refusal(tmp_path, GOOD.replace("  storage: {uri: state}\n", ""))
    assert "spec.storage: required field is missing; add it (Where state lives)" in told


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"training": {"targets": "many"}}, 'spec.training.targets: "many" is text; give a whole number; or'),
        ({"training": {"epochs": None}}, "spec.training.epochs: null is empty; give a whole number"),
        ({"generation": {"thinking": "perhaps"}}, '"perhaps" is text; give true or false'),
        ({"target": {"model": 7}}, "spec.target.model: 7 is a number, but text is wanted; put it in quotes"),
        ({"generation": {"engine": "sglan"}}, "did you mean sglang?"),
        ({"training": {"drafters": 9, "batchSize": 8}}, "drafters 9 is above batchSize 8"),
        ({"drafter": {"taps": [3, 1]}}, "taps [3, 1] must be ascending"),
        ({"drafter": 5}, "spec.drafter: 5 is a number; give a mapping"),
    ],
)
def test_a_wrong_value_is_told_with_what_is_wanted(tmp_path, section, told):
    assert told in refusal(tmp_path, with_spec(**section))


def test_a_name_that_cannot_be_a_pods_is_refused(tmp_path):
    assert "metadata.name" in refusal(tmp_path, GOOD.replace("qwen-drafter", "Qwen_Drafter"))
    assert "give at most 40" in refusal(tmp_path, GOOD.replace("qwen-drafter", "a" * 41))


def test_numbers_without_a_point_and_dates_mean_what_they_say(tmp_path):
    text = GOOD.replace("Qwen/Qwen3-8B}", "a/b, revision: 2024-01-02}") + "  training: {learningRate: 6e-4}\n"
    spec = load_resource(written(tmp_path, text)).spec
    assert (spec.target.revision, spec.training.learning_rate) == ("2024-01-02", 6e-4)


def test_several_documents_are_refused(tmp_path):
    assert "2 YAML documents; give a file with exactly one Drafter" in refusal(tmp_path, f"{GOOD}---\n{GOOD}")
    assert "0 YAML documents" in refusal(tmp_path, "# nothing\n")


def test_one_document_between_markers_is_one_document(tmp_path):
    assert load_resource(written(tmp_path, f"---\n{GOOD}...\n")).metadata.name == "qwen-drafter"


def test_anchors_and_aliases_are_refused_before_they_can_expand(tmp_path):
    bomb = "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"
    assert "line 1: anchor or alias 'a' is not taken here" in refusal(tmp_path, bomb)


def test_a_field_given_twice_is_refused(tmp_path):
    told = refusal(tmp_path, GOOD + "  drafter: {layers: 1}\n  drafter: {layers: 2}\n")
    assert "line 9: spec.drafter is given twice, first on line 8; keep one" in told
    told = refusal(tmp_path, '{"kind": "Drafter", "kind": "Drafter"}', "drafter.json")
    assert "'kind' is given twice" in told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("spec: [1, 2\n", "not YAML"),
        ("just text\n", "a Drafter is a mapping"),
        ("a: b: c\n", "line 1, column 5"),
        ("\tapiVersion: x\n", "not YAML"),
        ("spec: !!python/object:os.system {}\n", "Drafter"),
    ],
)
def test_what_is_no_drafter_at_all_is_told_where(tmp_path, text, told):
    assert told in refusal(tmp_path, text)


def test_files_that_cannot_be_read_are_told(tmp_path):
    with pytest.raises(ConfigurationError, match="no such file"):
        read_document(tmp_path / "absent.yaml")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_document(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9\n")
    with pytest.raises(ConfigurationError, match="not UTF-8 text at byte 6"):
        read_document(tmp_path / "latin.yaml")
    with pytest.raises(ConfigurationError, match="line 1, column 2: not JSON"):
        read_document(written(tmp_path, "{]", "broken.json"))


def test_what_a_cluster_adds_is_taken_and_left_alone():
    document = yaml.safe_load(GOOD)
    document["metadata"] |= {"uid": "1", "managedFields": []}
    document["status"] = {"phase": "Ready"}
    assert parse_resource(Document("cluster", document)).metadata.name == "qwen-drafter"
