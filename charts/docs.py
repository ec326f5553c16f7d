"""Makes the values' table in README.md and values.schema.json from the comments of values.yaml.

    python charts/docs.py

A comment that begins with `# --` documents the key below it. Keys that nest documented keys become
closed objects in the schema, so that a misspelt value fails at install; a documented mapping without
documented keys (such as nodeSelector) is free. A test fails while the two files are out of date.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
BEGIN, END = "<!-- values: begin (made by python charts/docs.py) -->", "<!-- values: end -->"
_KEY = re.compile(r"^(?P<indent> *)(?P<key>[A-Za-z0-9]+):")


@dataclass
class Value:
    """One key of values.yaml."""

    path: tuple[str, ...]
    default: Any
    text: str = ""
    children: list["Value"] = field(default_factory=list)

    @property
    def documented_inside(self) -> bool:
        """Some key below it has a comment of its own."""
        return any(c.text or c.documented_inside for c in self.children)


def read(file: Path = HERE / "values.yaml") -> Value:
    """The tree of keys with their comments and defaults."""
    source = file.read_text()
    root = Value((), yaml.safe_load(source))
    stack: list[tuple[int, Value]] = [(-1, root)]
    comment: list[str] = []
    for line in source.splitlines():
        stripped = line.strip()
        if stripped.startswith("# --"):
            comment = [stripped.removeprefix("# --").strip()]
        elif stripped.startswith("#"):
            comment = [*comment, stripped.removeprefix("#").strip()] if comment else []
        elif not stripped:
            comment = []
        elif match := _KEY.match(line):
            indent = len(match["indent"])
            while stack[-1][0] >= indent:
                stack.pop()
            parent = stack[-1][1]
            if not isinstance(parent.default, dict) or match["key"] not in parent.default:
                continue  # inside a list or a block of text
            value = Value((*parent.path, match["key"]), parent.default[match["key"]], " ".join(comment))
            parent.children.append(value)
            stack.append((indent, value))
            comment = []
    return root


def table(root: Value) -> str:
    """Markdown: one row a documented value."""
    rows = ["| value | default | what it is |", "|---|---|---|"]

    def walk(value: Value) -> None:
        if value.text:
            default = "" if value.documented_inside else f"`{json.dumps(value.default)}`"
            rows.append(
                f"| `{'.'.join(value.path)}` | {default.replace('|', chr(92) + '|')} | {value.text} |"
            )
        for child in value.children:
            walk(child)

    walk(root)
    return "\n".join(rows)


def schema(root: Value) -> dict[str, Any]:
    """JSON schema of the values."""
    made = _schema(root)
    # Roles override any value of `jobs`, and nothing else.
    jobs = made["properties"]["jobs"]
    made["properties"]["roles"]["properties"] = {
        role.path[-1]: {"description": role.text, **{k: v for k, v in jobs.items() if k != "description"}}
        for role in next(c for c in root.children if c.path == ("roles",)).children
    }
    made["properties"]["drafters"] = {
        "type": "object",
        "description": made["properties"]["drafters"]["description"],
        "propertyNames": {"maxLength": 40, "pattern": "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$"},
        "additionalProperties": {"type": "object", "required": ["target", "prompts", "storage"]},
    }
    made["properties"]["global"] = {"type": "object"}  # Helm's own, for parent charts
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the dflash chart",
        **made,
    }


def _schema(value: Value) -> dict[str, Any]:
    made: dict[str, Any] = {"description": value.text} if value.text else {}
    default = value.default
    if isinstance(default, dict):
        made["type"] = "object"
        if value.documented_inside:
            made["properties"] = {child.path[-1]: _schema(child) for child in value.children}
            made["additionalProperties"] = False
    elif isinstance(default, list):
        made["type"] = "array"
    elif isinstance(default, bool):
        made["type"] = "boolean"
    elif isinstance(default, int | float):
        made |= {"type": "number" if value.path[-1] == "pollSeconds" else "integer", "minimum": 0}
    else:
        made["type"] = "string"
    if value.path == ("jobs", "image"):
        made["enum"] = ["train", "serve", "operator"]
    return made


def embed(readme: str, root: Value) -> str:
    """The README with its table renewed. Raises ValueError where a marker is missing."""
    before, _, rest = readme.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"README.md lacks the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{table(root)}\n\n{END}{after}"


def schema_text(root: Value) -> str:
    """values.schema.json."""
    return json.dumps(schema(root), indent=2) + "\n"


def main() -> None:
    """Rewrite both files."""
    root = read()
    readme = HERE / "README.md"
    readme.write_text(embed(readme.read_text(), root))
    (HERE / "values.schema.json").write_text(schema_text(root))


if __name__ == "__main__":
    main()
