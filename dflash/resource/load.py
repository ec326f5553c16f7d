"""From a file that a person wrote to a `Drafter`, or to a list of everything that is wrong with it.

Every problem is told at once, with its field in the file's spelling, its line where known, and what
to do. Relative paths are resolved against the file's folder, so what comes out means the same from
any working directory. Only what can be seen in the file itself is checked here: whether models,
prompts and stores exist is the command line's preflight.
"""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from dflash.errors import ConfigurationError
from dflash.resource.drafter import Drafter

At = tuple[str | int, ...]


@dataclass(frozen=True)
class Document:
    """A parsed file: plain data, and the line on which each field stands."""

    where: str
    data: Any
    lines: Mapping[At, int] = field(default_factory=dict)


def load_resource(file: Path) -> Drafter:
    """The Drafter in a YAML or JSON file, its relative paths resolved against the file's folder."""
    return resolve_paths(parse_resource(read_document(file)), file.resolve().parent)


def parse_resource(document: Document) -> Drafter:
    """The Drafter in a document; ConfigurationError lists every problem. Paths are left as they are."""
    data = document.data
    if not isinstance(data, dict):
        raise ConfigurationError(
            f"{document.where}: a Drafter is a mapping with apiVersion, kind, metadata and spec, "
            f"not {_kind(data)}; `dflash schema` prints the fields"
        )
    # What `kubectl get -o yaml` adds; the truth about status is in the store.
    data = {key: value for key, value in data.items() if key != "status"}
    try:
        return Drafter.model_validate(data, by_alias=True, by_name=False)
    except ValidationError as error:
        problems = _sentences(error.errors(include_url=False), data, document.lines)
    if len(problems) == 1:
        raise ConfigurationError(f"{document.where}: {problems[0]}")
    listed = "".join(f"\n  {problem}" for problem in problems)
    raise ConfigurationError(f"{document.where}: {len(problems)} problems:{listed}")


def read_document(file: Path) -> Document:
    """Plain data of a YAML or JSON file with exactly one document."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file}: not UTF-8 text at byte {error.start}; save it as UTF-8") from error
    except FileNotFoundError as error:
        raise ConfigurationError(f"{file}: no such file; give the path of a Drafter file") from error
    except OSError as error:
        raise ConfigurationError(
            f"{file}: cannot be read ({error.strerror}); give a readable file"
        ) from error
    return _read_json(file, text) if file.suffix == ".json" else _read_yaml(str(file), text)


def resolve_paths(drafter: Drafter, folder: Path) -> Drafter:
    """The same Drafter with relative paths made absolute, starting at `folder`."""
    spec = drafter.spec
    target = spec.target.model_copy(update={"model": _model(spec.target.model, folder)})
    generation = spec.generation
    if generation.speculation is not None and generation.speculation.draft_model is not None:
        draft = _model(generation.speculation.draft_model, folder)
        speculation = generation.speculation.model_copy(update={"draft_model": draft})
        generation = generation.model_copy(update={"speculation": speculation})
    sets = [p.model_copy(update={"uri": _uri(p.uri, folder)}) for p in spec.evaluation.prompts]
    rival = spec.evaluation.rival
    if rival is not None:
        rival = rival.model_copy(update={"model": _model(rival.model, folder)})
    return drafter.model_copy(
        update={
            "spec": spec.model_copy(
                update={
                    "target": target,
                    "prompts": spec.prompts.model_copy(update={"uri": _uri(spec.prompts.uri, folder)}),
                    "storage": spec.storage.model_copy(update={"uri": _uri(spec.storage.uri, folder)}),
                    "generation": generation,
                    "evaluation": spec.evaluation.model_copy(update={"prompts": sets, "rival": rival}),
                }
            )
        }
    )


def dump_resource(drafter: Drafter) -> dict[str, Any]:
    """Plain data in file spelling, as JSON can hold it; reading it back gives the same Drafter."""
    return drafter.model_dump(mode="json", by_alias=True)


def _uri(uri: str, folder: Path) -> str:
    if "://" in uri:
        return uri
    return str(_absolute(uri, folder))


def _model(model: str, folder: Path) -> str:
    """A path where it looks like one or a folder of that name lies there; else a hub id."""
    if model.startswith((".", "/", "~")) or (folder / model).is_dir():
        return str(_absolute(model, folder))
    return model


def _absolute(path: str, folder: Path) -> Path:
    # Not resolve(): a glob's star is no file, and a link may be meant to move.
    return Path(_normal(folder / Path(path).expanduser()))


def _normal(path: Path) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and len(parts) > 1:
            parts.pop()
        elif part not in (".", ".."):
            parts.append(part)
    return str(Path(*parts))


# --- reading ---------------------------------------------------------------------------------


def _read_json(file: Path, text: str) -> Document:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in items:
            if key in seen:
                raise ConfigurationError(f"{file}: {key!r} is given twice in one object; keep one of them")
            seen[key] = value
        return seen

    try:
        return Document(str(file), json.loads(text, object_pairs_hook=pairs))
    except json.JSONDecodeError as error:
        raise ConfigurationError(
            f"{file}: line {error.lineno}, column {error.colno}: not JSON ({error.msg}); correct it there"
        ) from error


def _read_yaml(where: str, text: str) -> Document:
    loader = yaml.SafeLoader(text)
    try:
        root = _only_node(text, where)
        lines: dict[At, int] = {}
        return Document(where, _plain(loader, root, (), lines, where), lines)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigurationError(f"{where}: {line}not YAML ({what}); correct it there") from error
    finally:
        loader.dispose()


def _only_node(text: str, where: str) -> yaml.Node:
    # Anchors and aliases are refused: two fields that are one cannot be told apart in a message, and
    # a handful of lines can expand to gigabytes.
    documents = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        anchor = getattr(event, "anchor", None)
        if anchor is not None:
            line = event.start_mark.line + 1 if event.start_mark else "?"
            raise ConfigurationError(
                f"{where}: line {line}: anchor or alias {anchor!r} is not taken here; write the value out"
            )
        documents += isinstance(event, yaml.DocumentStartEvent)
    node = yaml.compose(text, Loader=yaml.SafeLoader) if documents == 1 else None
    if node is None:
        raise ConfigurationError(
            f"{where}: {documents} YAML documents; give a file with exactly one Drafter (split it at `---`)"
        )
    return node


def _plain(loader: yaml.SafeLoader, node: yaml.Node, at: At, lines: dict[At, int], where: str) -> Any:
    lines.setdefault(at, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(key_node.value)
            line = key_node.start_mark.line + 1
            if key in mapping:
                first = lines[(*at, key)]
                raise ConfigurationError(
                    f"{where}: line {line}: {_spell((*at, key))} is given twice, first on line {first}; "
                    "keep one"
                )
            lines[(*at, key)] = line
            mapping[key] = _plain(loader, value_node, (*at, key), lines, where)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_plain(loader, item, (*at, i), lines, where) for i, item in enumerate(node.value)]
    if node.tag == "tag:yaml.org,2002:timestamp":
        return node.value  # a revision that looks like a date is still text
    return loader.construct_object(node)


# --- telling ---------------------------------------------------------------------------------


def _sentences(errors: Iterable[ErrorDetails], data: Any, lines: Mapping[At, int]) -> list[str]:
    """One sentence per field, in the order of the file."""
    told: dict[At, list[str]] = {}
    for error in errors:
        at = _field(error["loc"], data)
        told.setdefault(at, []).append(_sentence(error, at))
    ordered = sorted(told.items(), key=lambda item: lines.get(item[0], 1 << 30))
    return [
        f"{_line(at, lines)}{_spell(at) or 'the file'}: {'; or '.join(dict.fromkeys(said))}"
        for at, said in ordered
    ]


_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "model": "a mapping",
    "dict": "a mapping",
}


def _sentence(error: ErrorDetails, at: At) -> str:
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    shown = _shown(value)
    if kind == "extra_forbidden":
        return _unknown(at)
    if kind == "missing":
        return f"required field is missing; add it{_meaning(at)}"
    if kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        limit = next(iter(context.values()))
        words = {
            "greater_than_equal": f"at least {limit}",
            "greater_than": f"more than {limit}",
            "less_than_equal": f"at most {limit}",
            "less_than": f"less than {limit}",
        }
        return f"{shown} is out of range; give {words[kind]}"
    if kind == "literal_error":
        choices = str(context.get("expected", ""))
        hint = difflib.get_close_matches(
            str(value), choices.replace("'", "").replace(" or ", ", ").split(", "), 1
        )
        return f"{shown} is not {choices}" + (f"; did you mean {hint[0]}?" if hint else f"; give {choices}")
    if kind == "string_type":
        return f"{shown} is {_kind(value)}, but text is wanted; put it in quotes"
    if kind == "string_pattern_mismatch":
        return f"{shown} does not match {context.get('pattern')}{_meaning(at)}"
    if kind == "string_too_long":
        most = context.get("max_length")
        return f"{len(str(value))} characters are too many; give at most {most}{_meaning(at)}"
    if kind == "string_too_short":
        return f"it is empty; give at least {context.get('min_length')} character"
    if kind in ("too_short", "too_long"):
        limits = {"too_short": "at least", "too_long": "at most"}
        bound = context.get("min_length", context.get("max_length"))
        return f"{context.get('actual_length')} entries; give {limits[kind]} {bound}"
    if kind == "value_error":
        return str(context.get("error", error["msg"]))
    wanted = _WANTED.get(kind.split("_")[0], error["msg"])
    return f"{shown} is {_kind(value)}; give {wanted}"


def _unknown(at: At) -> str:
    owner = _model_at(at[:-1])
    name = str(at[-1])
    known = [f.alias or n for n, f in owner.model_fields.items()] if owner else []
    if to_camel(name) in known:
        return f"unknown field; did you mean {to_camel(name)}? (fields are spelled in camelCase)"
    near = difflib.get_close_matches(name.lower().replace("_", ""), [k.lower() for k in known], 1, cutoff=0.6)
    if near:
        return f"unknown field; did you mean {next(k for k in known if k.lower() == near[0])}?"
    return f"unknown field; known here: {', '.join(known)}"


def _meaning(at: At) -> str:
    owner = _model_at(at[:-1])
    for name, info in owner.model_fields.items() if owner else ():
        if (info.alias or name) == at[-1] and info.description:
            return f" ({info.description.split('. ')[0].rstrip('.')})"
    return ""


def _model_at(at: At) -> type[BaseModel] | None:
    """The section that a path leads to, through optional sections and lists of sections."""
    model: type[BaseModel] | None = Drafter
    for part in at:
        if isinstance(part, int):
            continue
        if model is None:
            return None
        found = [f.annotation for n, f in model.model_fields.items() if (f.alias or n) == part]
        model = _section_in(found[0]) if found else None
    return model


def _section_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((s for s in map(_section_in, get_args(annotation)) if s is not None), None)


def _field(loc: At, data: Any) -> At:
    """The part of pydantic's location that is in the file: without the tags of unions it adds."""
    at: list[str | int] = []
    for i, part in enumerate(loc):
        if isinstance(data, dict):
            if part not in data and i != len(loc) - 1:
                continue
            at.append(part)
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int):
            at.append(part)
            data = data[part] if part < len(data) else None
    return tuple(at)


def _spell(at: At) -> str:
    text = ""
    for part in at:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def _line(at: At, lines: Mapping[At, int]) -> str:
    while at and at not in lines:
        at = at[:-1]  # a missing field: where its section stands
    return f"line {lines[at]}: " if at in lines else ""


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _kind(value: Any) -> str:
    names = {dict: "a mapping", list: "a list", str: "text", bool: "true or false", type(None): "empty"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)
