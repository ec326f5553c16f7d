"""The CRD says what the models say: one schema for the command line, the operator and the cluster."""

from pathlib import Path
from typing import Any

import yaml

from dflash.resource import DrafterSpec
from operators import crd
from operators.status import DrafterStatus

CHART = Path(__file__).parents[2] / "charts"
SCHEMA = crd.crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def _nodes(node: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = [(path, node)]
    for name, child in node.get("properties", {}).items():
        found += _nodes(child, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if isinstance(node.get(name), dict):
            found += _nodes(node[name], f"{path}[]")
    return found


def _fields(model: Any) -> set[str]:
    schema = model.model_json_schema(by_alias=True)
    names: set[str] = set()
    for part in [schema, *schema.get("$defs", {}).values()]:
        names |= set(part.get("properties", {}))
    return names


def test_the_charts_file_is_what_the_models_generate() -> None:
    file = CHART / "crds" / "drafters.dflash.dev.yaml"
    assert file.read_text() == crd.to_yaml(), (
        "run: python -m operators.crd > charts/crds/drafters.dflash.dev.yaml"
    )


def test_every_field_of_the_models_is_in_the_schema_and_nothing_else() -> None:
    for part, model in (("spec", DrafterSpec), ("status", DrafterStatus)):
        names = {
            path.rpartition(".")[2]
            for path, _ in _nodes(SCHEMA["properties"][part])
            if path and path[-2:] != "[]"
        }
        assert names == _fields(model)


def test_the_schema_is_structural_and_bounded() -> None:
    for path, node in _nodes(SCHEMA["properties"]["spec"], "spec") + _nodes(
        SCHEMA["properties"]["status"], "status"
    ):
        assert "$ref" not in node, path
        assert "anyOf" not in node, path
        assert ("type" in node) != ("x-kubernetes-int-or-string" in node), path
        if node.get("type") == "string" and "enum" not in node:
            assert "maxLength" in node, path
        if node.get("type") == "array":
            assert "maxItems" in node, path
            assert "x-kubernetes-list-type" in node, path
        if "properties" in node:
            assert "additionalProperties" not in node, path


def test_every_field_is_documented() -> None:
    for path, node in _nodes(SCHEMA["properties"]["spec"], "spec"):
        assert path.endswith("[]") or node.get("description"), path


def test_rules_and_list_types_name_places_that_exist() -> None:
    places = {
        path.removeprefix("spec.").removeprefix("status.")
        for path, _ in _nodes(SCHEMA["properties"]["spec"], "spec")
    }
    places |= {path.removeprefix("status.") for path, _ in _nodes(SCHEMA["properties"]["status"], "status")}
    assert set(crd.RULES) <= places
    assert set(crd._LIST_TYPES) <= places


def test_defaults_are_the_models_own() -> None:
    minimal = {
        "target": {"model": "a/b"},
        "prompts": {"uri": "s3://p/q"},
        "storage": {"uri": "s3://b/p"},
    }
    defaulted = _defaulted(minimal, SCHEMA["properties"]["spec"])
    assert DrafterSpec.model_validate(defaulted) == DrafterSpec.model_validate(minimal)


def _defaulted(value: Any, node: dict[str, Any]) -> Any:
    """What the API server makes of a value: defaults filled in at every depth."""
    if isinstance(value, dict) and "properties" in node:
        filled = dict(value)
        for name, child in node["properties"].items():
            if name not in filled and "default" in child:
                filled[name] = child["default"]
            if name in filled:
                filled[name] = _defaulted(filled[name], child)
        return filled
    return value


def test_printer_columns_and_short_name() -> None:
    definition = yaml.safe_load(crd.to_yaml())
    version = definition["spec"]["versions"][0]
    columns = [c["name"] for c in version["additionalPrinterColumns"]]
    assert columns == ["Stage", "Phase", "Progress", "Acceptance", "Attempt", "Ready", "Age"]
    assert definition["spec"]["names"]["shortNames"] == ["dfd"]
    assert version["subresources"] == {"status": {}}
