"""What is generated from the values' comments is current, and examples are valid Drafters."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash.resource import Drafter
from dflash.resource.load import load_resource

CHART = Path(__file__).parents[2] / "charts"
_spec = importlib.util.spec_from_file_location("chart_docs", CHART / "docs.py")
assert _spec is not None
assert _spec.loader is not None
docs: Any = importlib.util.module_from_spec(_spec)

sys.modules["chart_docs"] = docs
_spec.loader.exec_module(docs)


def test_readme_and_schema_are_current() -> None:
    root = docs.read()
    readme = (CHART / "README.md").read_text()
    assert docs.embed(readme, root) == readme, "run: python charts/docs.py"
    assert docs.schema_text(root) == (CHART / "values.schema.json").read_text(), "run: python charts/docs.py"


def test_every_value_is_documented() -> None:
    def undocumented(value: Any) -> list[str]:
        if value.text and not value.documented_inside:
            return []
        if not value.children:
            return [".".join(value.path)]
        return [name for child in value.children for name in undocumented(child)]

    assert undocumented(docs.read()) == []


def test_a_misspelt_value_is_refused_by_the_schema_and_roles_take_what_jobs_take() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["additionalProperties"] is False
    assert schema["properties"]["jobs"]["additionalProperties"] is False
    roles = schema["properties"]["roles"]["properties"]
    assert set(roles) == {"generate", "target", "drafter", "evaluate"}
    assert roles["target"]["properties"] == schema["properties"]["jobs"]["properties"]


@pytest.mark.parametrize("file", sorted((CHART / "examples").glob("qwen*.yaml")), ids=lambda f: f.name)
def test_examples_are_valid(file: Path) -> None:
    drafter = load_resource(file)
    assert drafter.spec.storage.uri.startswith("s3://")


def test_the_demos_drafter_is_valid() -> None:
    values = yaml.safe_load((CHART / "examples" / "demo-values.yaml").read_text())
    for name, spec in values["drafters"].items():
        Drafter.model_validate(
            {
                "apiVersion": "dflash.dev/v1alpha1",
                "kind": "Drafter",
                "metadata": {"name": name},
                "spec": spec,
            },
            by_alias=True,
            by_name=False,
        )
