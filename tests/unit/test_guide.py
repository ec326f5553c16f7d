"""What the guide shows is so: its example is what `dflash plan` prints, its commands name what there is."""

from pathlib import Path

import pytest
import yaml

from tests.support import guide

READMES = (guide.README, guide.ROOT / "README.md")
VALUES = yaml.safe_load((guide.ROOT / "charts" / "values.yaml").read_text())
CLUSTER = [
    pytest.param(program, words, id=f"{program} {' '.join(words)}"[:80])
    for readme in READMES
    for program in ("helm", "kubectl")
    for words in guide.commands(program, readme)
]


def test_the_cost_example_is_what_the_plan_says() -> None:
    readme = guide.README.read_text()
    assert guide.embed(readme) == readme, "run: python -m tests.support.guide"


def test_only_programs_are_called_that_tests_run() -> None:
    assert guide.programs() == {"dflash", "helm", "kubectl"}
    assert guide.programs(READMES[1]) <= {"dflash", "helm", "kubectl", "make"}


@pytest.mark.parametrize(("program", "words"), CLUSTER)
def test_commands_for_a_cluster_name_files_values_and_drafters_that_there_are(
    program: str, words: list[str]
) -> None:
    names = [
        yaml.safe_load(file.read_text())["metadata"]["name"]
        for file in (guide.ROOT / "charts" / "examples").glob("qwen*.yaml")
    ]
    for before, word in zip(["", *words], words, strict=False):
        if word.startswith(("charts/", "./charts")):
            assert (guide.ROOT / word).exists(), word
        if before == "--set":
            value = VALUES
            for part in word.partition("=")[0].split("."):
                assert part in value, f"there is no value {word}"
                value = value[part]
        if before == "drafter":
            assert word in names
        if word.startswith("drafter/"):
            assert word.removeprefix("drafter/") in names
    assert program in ("helm", "kubectl")


def test_the_guides_place_for_reports_is_where_runs_put_them() -> None:
    from operators.local import Home

    (compare,) = [words for words in guide.commands("dflash") if words[:2] == ["report", "compare"]]
    assert Path(compare[2]) == Home(Path("store"), "qwen3-8b").report
