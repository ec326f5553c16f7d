"""Prompts as people write them, checked, counted once each, and given a key that never changes.

A row holds `messages` in OpenAI form (with `tools` where there are any) or `prompt`, and optionally `id`
and `group`. A prompt's key is a hash of its content, so it is the same for whoever reads the file, in
whatever order and however often; the key is what generation resumes by. Rendering to tokens is
`dflash.data.render`.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from dflash.data import sources
from dflash.data.keyset import KeySet
from dflash.errors import ConfigurationError
from dflash.storage.store import Store

ROLES = ("system", "developer", "user", "assistant", "tool")
KEY_DIGITS = 16
"""Hexadecimal digits of a key: among a million prompts two share one with odds of 1 in 37 million."""

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to be answered."""

    index: int
    """Ordinal among the distinct prompts of all files, from 0."""
    key: str
    """16 hexadecimal digits, from messages and tools."""
    id: str
    """The row's own `id`, else the key."""
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    group: str | None
    file: str
    line: int

    @property
    def where(self) -> str:
        """File, line and id, for error messages."""
        return f"{self.file} line {self.line} (id {self.id})"


@dataclass
class PromptCounts:
    """What was met while reading; filled by `read_prompts` as it goes."""

    rows: int = 0
    unique: int = 0
    duplicates: int = 0
    """Rows whose content was seen before; each is kept once."""
    repaired: int = 0
    """Rows in which a lone surrogate was replaced."""
    repeats: "array[int]" = field(default_factory=lambda: array("Q"))
    """Which rows were duplicates, by ordinal from 0, ascending."""
    earlier: "PromptCounts | None" = None
    """Of a whole read of the same files before: its repeats are left out and none is looked for again."""


@dataclass(frozen=True)
class PromptSurvey:
    """A whole read of the prompts, for the check before anything is started."""

    counts: PromptCounts
    held_out: int
    turns: int
    """Assistant turns to produce for the prompts that are not held out: samples, if none is dropped."""
    characters: int
    """Of all messages of these prompts."""
    repeated_ids: int
    """Rows whose `id` another row with other content has too. Harmless: keys come from content."""


def read_prompts(
    uri: str,
    base: Path,
    store: Store | None = None,
    *,
    limit: int | None = None,
    counts: PromptCounts | None = None,
) -> Iterator[Prompt]:
    """Distinct prompts in file order, streaming. `limit` keeps the first N; s3:// uses `store`'s endpoint.

    Raises ConfigurationError naming file and line for a missing or empty file, a row that is not a JSON
    object, and messages that are not a conversation.
    """
    counts = counts if counts is not None else PromptCounts()
    yield from islice(_distinct(uri, sources.source_files(uri, base, store), counts), limit)


def _distinct(uri: str, files: list[sources.SourceFile], counts: PromptCounts) -> Iterator[Prompt]:
    is_repeat = _found_before(counts.earlier) if counts.earlier is not None else _not_seen_yet()
    for record in sources.read_records(files):
        ordinal = counts.rows
        counts.rows += 1
        counts.repaired += record.repaired
        messages, tools = _conversation(record)
        key = content_key(messages, tools)
        if is_repeat(ordinal, key):
            counts.duplicates += 1
            counts.repeats.append(ordinal)
            continue
        row = record.value
        prompt = Prompt(
            index=counts.unique,
            key=key,
            id=str(row["id"]) if row.get("id") not in (None, "") else key,
            messages=messages,
            tools=tools,
            group=str(row["group"]) if row.get("group") not in (None, "") else None,
            file=record.file,
            line=record.line,
        )
        counts.unique += 1
        yield prompt
    if counts.rows == 0:
        raise ConfigurationError(f"{uri} holds no prompts: the file is empty")


def _not_seen_yet() -> Callable[[int, str], bool]:
    seen = KeySet()
    return lambda _, key: not seen.add(key)


def _found_before(earlier: PromptCounts) -> Callable[[int, str], bool]:
    """Costs no memory a prompt, which matters where a worker keeps reading for days."""
    waiting = iter(earlier.repeats)
    following = next(waiting, None)

    def is_repeat(ordinal: int, _: str) -> bool:
        nonlocal following
        if ordinal != following:
            return False
        following = next(waiting, None)
        return True

    return is_repeat


def content_key(messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
    """The identity of a prompt: a hash of what is asked, independent of key order, place, id and group."""
    text = orjson.dumps([messages, tools or None], option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    return hashlib.sha256(text).hexdigest()[:KEY_DIGITS]


def is_held_out(prompt: Prompt, share: float) -> bool:
    """Whether a prompt belongs to evaluation: by its group where it has one, else by its content."""
    subject = f"group:{prompt.group}" if prompt.group is not None else f"content:{prompt.key}"
    draw = int.from_bytes(hashlib.sha256(subject.encode()).digest()[:8], "big")
    return draw < share * 2**64


def fingerprint_prompts(uri: str, base: Path, store: Store | None = None) -> str:
    """Hash of the prompt files' bytes; where they lie and what they are called does not enter."""
    return sources.fingerprint(sources.source_files(uri, base, store))


def survey_prompts(
    uri: str, base: Path, store: Store | None = None, *, hold_out: float, limit: int | None = None
) -> PromptSurvey:
    """Read every prompt once and count what matters before a run."""
    counts = PromptCounts()
    held_out = turns = characters = 0
    ids: Counter[str] = Counter()
    for prompt in read_prompts(uri, base, store, limit=limit, counts=counts):
        ids[prompt.id] += 1
        if is_held_out(prompt, hold_out):
            held_out += 1
        else:
            turns += len(turns_to_produce(prompt.messages))
            characters += sum(len(str(message.get("content") or "")) for message in prompt.messages)
    repeated = sum(count - 1 for count in ids.values())
    return PromptSurvey(counts, held_out, turns, characters, repeated)


def turns_to_produce(messages: list[Message]) -> list[int]:
    """Where an assistant's turn is produced: the number of messages before it, one entry a sample.

    Every assistant turn is answered anew, except one that tools replied to: the replies that follow in
    the conversation belong to exactly the calls it made, so it stays as it was given.
    """
    ends = []
    for place in range(1, len(messages) + 1):
        asked = messages[place - 1]["role"] in ("user", "tool")
        following = messages[place] if place < len(messages) else None
        if asked and (following is None or following["role"] == "assistant"):
            answered_by_tools = place + 1 < len(messages) and messages[place + 1]["role"] == "tool"
            if not answered_by_tools:
                ends.append(place)
    return ends


def _conversation(record: sources.Record) -> tuple[list[Message], list[dict[str, Any]] | None]:
    where = f"{record.file} line {record.line}"
    row = record.value
    if not isinstance(row, dict):
        raise ConfigurationError(
            f'{where} is not a JSON object: write {{"prompt": ...}} or {{"messages": [...]}}'
        )
    if "id" in row and row["id"] not in (None, ""):
        where += f" (id {row['id']})"
    messages = row.get("messages")
    if messages is None and isinstance(row.get("prompt"), str):
        messages = [{"role": "user", "content": row["prompt"]}]
    messages = _listed(messages, "messages", where)
    if not messages:
        raise ConfigurationError(f"{where} has neither `messages` nor `prompt`: give one of them")
    tools = row.get("tools")
    tools = _listed(tools, "tools", where) if tools not in (None, "", []) else None
    return [_message(message, place, where) for place, message in enumerate(_ordered(messages, where))], tools


def _listed(value: Any, field: str, where: str) -> list[Any]:
    """A list, or a list written as JSON text, which is how Parquet files often carry it."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise ConfigurationError(f"{where}: `{field}` is text that is not JSON ({error})") from error
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ConfigurationError(f"{where}: `{field}` must be a list of objects")
    return value


def _ordered(messages: list[Message], where: str) -> list[Message]:
    roles = [message.get("role") for message in messages]
    for place, role in enumerate(roles):
        if role not in ROLES:
            raise ConfigurationError(
                f"{where}: message {place} has role {role!r}; use one of {', '.join(ROLES)}"
            )
        if role in ("system", "developer") and any(r not in ("system", "developer") for r in roles[:place]):
            raise ConfigurationError(f"{where}: message {place} has role {role!r} after others; put it first")
        if role == "tool" and roles[place - 1] not in ("assistant", "tool"):
            raise ConfigurationError(
                f"{where}: message {place} has role 'tool' but follows no assistant turn"
            )
    if "user" not in roles:
        raise ConfigurationError(f"{where}: no message has role 'user', so there is nothing to answer")
    if not turns_to_produce(messages):
        raise ConfigurationError(
            f"{where}: roles {roles} leave no assistant turn to produce; end on a user message"
        )
    return messages


def _message(message: Message, place: int, where: str) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise ConfigurationError(
                f"{where}: message {place} has content that is not text; only text is supported"
            )
        return {**message, "content": "".join(str(part) for part in parts)}
    if content is None and message.get("tool_calls"):
        return {**message, "content": ""}
    if not isinstance(content, str):
        raise ConfigurationError(f"{where}: message {place} has no text in `content`")
    return message
