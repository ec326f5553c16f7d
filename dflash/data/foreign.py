"""Samples that someone else made: JSON lines or Parquet with token ids, or with messages.

A row is one of
    {"prompt_ids": [...], "output_ids": [...]}
    {"input_ids": [...], "loss_mask": [0 or 1, ...]} (or "labels", where -100 is not supervised)
    {"messages": [...]} with assistant turns, and "tools" where there are any
Each stretch of supervised tokens becomes a sample of its own, with all that comes before it as its prompt:
what the target saw. For messages the stretch is found by length, never by tags in a template. Whether the
samples are good is the gate's business.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dflash.data.prompts import KEY_DIGITS
from dflash.data.render import Renderer, UnrenderableError
from dflash.data.rows import Ids, Row
from dflash.data.sources import Record, read_records, source_files
from dflash.errors import ConfigurationError
from dflash.storage.store import Store

_FORMS = "prompt_ids + output_ids, input_ids + loss_mask (or labels), or messages"


@dataclass(frozen=True)
class Foreign:
    """One sample of such a file; `reason` is set where the row itself is bad."""

    row: Row
    where: str
    reason: str | None = None


def read_foreign(
    uri: str, base: Path, renderer: Renderer | None, store: Store | None = None
) -> Iterator[Foreign]:
    """Samples in file order, streaming; several for a row with several supervised stretches.

    `renderer` is needed for rows of messages. Raises ConfigurationError naming file and line for rows of
    an unknown form.
    """
    empty = True
    for index, record in enumerate(read_records(source_files(uri, base, store))):
        empty = False
        yield from _samples(record, index, renderer)
    if empty:
        raise ConfigurationError(f"{uri} holds no rows: the file is empty")


def _samples(record: Record, index: int, renderer: Renderer | None) -> Iterator[Foreign]:
    where = f"{record.file} line {record.line}"
    value = record.value
    if not isinstance(value, dict):
        raise ConfigurationError(f"{where} is not an object: give {_FORMS}")
    finish = str(value.get("finish_reason") or "stop")
    if "output_ids" in value:
        stretches = [(_ids(value.get("prompt_ids"), where), _ids(value["output_ids"], where))]
        reason = None
    elif "input_ids" in value:
        ids = _ids(value["input_ids"], where)
        stretches = _stretches(ids, _mask(value, len(ids), where))
        reason = None
    elif "messages" in value:
        if renderer is None:
            raise ConfigurationError(
                f"{where} holds messages: give the model whose chat template renders them"
            )
        stretches, reason = _rendered(value, renderer)
    else:
        raise ConfigurationError(f"{where} has fields {', '.join(sorted(value))}: give {_FORMS}")
    if not stretches:
        stretches = [(np.zeros(0, np.int32), np.zeros(0, np.int32))]
        reason = reason or "nothing_supervised"
    key = hashlib.sha256(stretches[-1][0].tobytes() + b"/" + stretches[-1][1].tobytes()).hexdigest()[
        :KEY_DIGITS
    ]
    for turn, (prompt_ids, output_ids) in enumerate(stretches):
        row = Row(
            # The ordinal keeps ids distinct where rows are equal; the gate drops the later ones.
            sample_id=f"{key}.{index}-{turn}",
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            finish_reason=finish,
            prompt_index=index,
            turn=turn,
            source_id=str(value.get("id") or f"line-{record.line}"),
            group=str(value["group"]) if value.get("group") else None,
        )
        bad = len(output_ids) == 0 or len(prompt_ids) == 0
        yield Foreign(row, where, reason or ("nothing_supervised" if bad else None))


def _ids(value: Any, where: str) -> Ids:
    try:
        ids = np.asarray(value, dtype=np.int64)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{where}: token ids are not a list of whole numbers ({error})") from error
    if ids.ndim != 1 or (len(ids) and (ids.min() < 0 or ids.max() >= 2**31)):
        raise ConfigurationError(f"{where}: token ids are not a flat list of ids from 0 on")
    return ids.astype(np.int32)


def _mask(value: dict[str, Any], length: int, where: str) -> Any:
    mask = value.get("loss_mask", value.get("assistant_mask"))
    if mask is not None:
        supervised = np.asarray(mask) != 0
    elif value.get("labels") is not None:
        supervised = np.asarray(value["labels"]) != -100
    else:
        raise ConfigurationError(f"{where} has input_ids but neither loss_mask nor labels: give one of them")
    if supervised.shape != (length,):
        raise ConfigurationError(
            f"{where}: {supervised.size} mask entries for {length} tokens; give one a token"
        )
    return supervised


def _stretches(ids: Ids, supervised: Any) -> list[tuple[Ids, Ids]]:
    """(everything before, the stretch) for each run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], supervised, [False]]).astype(np.int8)))
    return [(ids[:start], ids[start:end]) for start, end in edges.reshape(-1, 2)]


def _rendered(value: dict[str, Any], renderer: Renderer) -> tuple[list[tuple[Ids, Ids]], str | None]:
    """A sample for each assistant turn: what the template adds to the conversation before it."""
    messages = value["messages"]
    tools = value.get("tools") or None
    stretches = []
    try:
        for place, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            prompt_ids = renderer.prompt_ids(messages[:place], tools)
            whole = renderer.conversation_ids(messages[: place + 1], tools)
            if not np.array_equal(whole[: len(prompt_ids)], prompt_ids):
                return [], "template"  # the template rewrites the prompt once there is an answer
            stretches.append((prompt_ids, renderer.until_end_of_turn(whole[len(prompt_ids) :])))
    except (UnrenderableError, AttributeError) as error:
        return [], getattr(error, "reason", "template")
    return stretches, None
