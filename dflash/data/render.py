"""From a conversation to the ids the target sees: the chat template, applied by us, exactly once.

Also reads back where an answer's thinking begins and ends. Whether thinking is on is seen in the rendered
prompt, never guessed from a model's name. Training uses the ids that were sent; nothing is rendered twice.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jinja2.exceptions import TemplateError

from dflash.data.prompts import Message
from dflash.data.rows import Ids

_OPEN, _CLOSE = "<think>", "</think>"
_TAIL = 16
"""Tokens at the end of a prompt in which an opening think tag counts."""
_UNDECIDED = "\ufffd"
"""What part of a character decodes to: whole, it may be blank."""
_REFUSALS = (TypeError, ValueError, KeyError)
"""What templates and tokenizers raise for a conversation that they cannot take, beside jinja's own."""


class UnrenderableError(Exception):
    """A conversation that the template cannot render. `reason` is the gate's word for it."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Thinking:
    """Where an answer thinks."""

    span: tuple[int, int] | None
    """[start, end) in the answer's ids, tags included; None when it does not think."""
    closed: bool
    """False when the thinking never ends, so that there is no visible answer."""


class Renderer:
    """Applies a tokenizer's chat template. Its `tokenizer` is transformers' PreTrainedTokenizerBase."""

    def __init__(self, tokenizer: Any, *, thinking: bool) -> None:
        self.tokenizer = tokenizer
        self.thinking = thinking
        self._open = _single_id(tokenizer, _OPEN)
        self._close = _single_id(tokenizer, _CLOSE)
        self._pieces: dict[int, str] = {}
        """Texts of single tokens that prompts end or answers begin with."""
        self._encode = _encoder(tokenizer)

    def prompt_ids(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> Ids:
        """int32 ids of a conversation that ends where the assistant speaks next.

        Special tokens come from the template alone, so there is at most one begin token. Raises
        UnrenderableError.
        """
        return self._ids(self.prompt_text(messages, tools))

    def prompt_text(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> str:
        """The text that `prompt_ids` are of. Raises UnrenderableError."""
        return self._text(messages, tools, speaks_next=True)

    def ids_of_prompts(self, texts: Sequence[str | UnrenderableError]) -> list[Ids | UnrenderableError]:
        """The ids of many prompts' texts, each as `prompt_ids` gives it; errors stay in their places.

        Takes half the time of one by one: the tokenizer's tables stay in the processor's cache.
        """
        try:
            encoded = self._encode([text for text in texts if isinstance(text, str)])
        except _REFUSALS:  # one of them cannot be encoded: find out which
            return [self._ids_or_error(text) if isinstance(text, str) else text for text in texts]
        following = iter(encoded)
        return [_array(next(following)) if isinstance(text, str) else text for text in texts]

    def conversation_ids(self, messages: list[Message], tools: list[dict[str, Any]] | None = None) -> Ids:
        """int32 ids of a whole conversation, its last turn included. Raises UnrenderableError."""
        return self._ids(self._text(messages, tools, speaks_next=False))

    def until_end_of_turn(self, ids: Ids) -> Ids:
        """An answer's ids up to the token that ends it: what a template writes after that is no answer."""
        ends = np.flatnonzero(ids == self.tokenizer.eos_token_id)
        return ids[: ends[0] + 1] if len(ends) else ids

    def _text(self, messages: list[Message], tools: list[dict[str, Any]] | None, *, speaks_next: bool) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                [_with_parsed_arguments(message) for message in messages],
                tools=tools,
                add_generation_prompt=speaks_next,
                enable_thinking=self.thinking,
                tokenize=False,
            )
        except (TemplateError, *_REFUSALS) as error:
            raise UnrenderableError("template", f"the chat template refuses it ({error})") from error
        return text

    def _ids(self, text: str) -> Ids:
        try:
            return _array(self._encode([text])[0])
        except _REFUSALS as error:
            raise UnrenderableError("template", f"the tokenizer refuses it ({error})") from error

    def _ids_or_error(self, text: str) -> Ids | UnrenderableError:
        try:
            return self._ids(text)
        except UnrenderableError as error:
            return error

    def opens_thinking(self, prompt_ids: Ids) -> bool:
        """Whether the prompt ends inside a think block, so that the answer begins in it."""
        if self._open is not None:
            tail = prompt_ids[-_TAIL:].tolist()
            if self._open not in tail:
                return False
            after = tail[len(tail) - tail[::-1].index(self._open) :]
            return self._close not in after and not self.text(after).strip()
        tail = prompt_ids[-_TAIL:].tolist()
        if not self._may_end_in_tag(tail):
            return False
        return self.text(tail).rstrip().endswith(_OPEN)

    def read_thinking(self, output_ids: Ids, *, opened: bool) -> Thinking:
        """Find the thinking of an answer; `opened` says that the prompt had begun it."""
        if self._open is not None and self._close is not None:
            start = 0 if opened else self._leading_open(output_ids)
            if start is None:
                return Thinking(None, closed=True)
            ends = np.flatnonzero(output_ids[start:] == self._close)
            end = start + int(ends[0]) + 1 if len(ends) else len(output_ids)
            return Thinking((start, end), closed=len(ends) > 0)
        return self._read_thinking_in_text(output_ids, opened=opened)

    def _leading_open(self, output_ids: Ids) -> int | None:
        places = np.flatnonzero(output_ids[:_TAIL] == self._open)
        if len(places) == 0 or self.text(output_ids[: places[0]]).strip():
            return None
        return int(places[0])

    def _read_thinking_in_text(self, output_ids: Ids, *, opened: bool) -> Thinking:
        """For tokenizers that cut the tags into pieces: the span is the tokens that cover them."""
        if not opened:
            head = output_ids[:_TAIL].tolist()
            if not self._may_begin_with_tag(head) or not self.text(head).lstrip().startswith(_OPEN):
                return Thinking(None, closed=True)
        place = self.text(output_ids).find(_CLOSE)
        if place < 0:
            return Thinking((0, len(output_ids)), closed=False)
        low, high = 0, len(output_ids)  # the fewest tokens whose text holds the whole closing tag
        while low < high:
            middle = (low + high) // 2
            if len(self.text(output_ids[:middle])) >= place + len(_CLOSE):
                high = middle
            else:
                low = middle + 1
        return Thinking((0, low), closed=True)

    # Decoding the ends of every prompt and answer takes longer than all else that is done with them: one look
    # at the outermost token that is not blank nearly always settles it.

    def _may_end_in_tag(self, tail: list[int]) -> bool:
        for token in reversed(tail):
            if piece := self._piece(token).rstrip():
                return piece[-1] in (_OPEN[-1], _UNDECIDED)
        return True

    def _may_begin_with_tag(self, head: list[int]) -> bool:
        for token in head:
            if piece := self._piece(token).lstrip():
                return piece[0] in (_OPEN[0], _UNDECIDED)
        return True

    def _piece(self, token: int) -> str:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self.text([token])
        return piece

    def text(self, ids: Any) -> str:
        """Text of ids, special tokens included."""
        decoded: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return decoded

    def visible(self, ids: Ids) -> str:
        """Text of ids as a reader sees it, special tokens left out."""
        decoded: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return decoded

    def answer_message(self, output_ids: Ids, thinking: Thinking) -> Message:
        """An answer as a message of the conversation's history, thinking apart as servers give it."""
        end = thinking.span[1] if thinking.span else 0
        message: Message = {"role": "assistant", "content": self.visible(output_ids[end:]).strip()}
        if thinking.span:
            inner = self.visible(output_ids[thinking.span[0] : end])
            message["reasoning_content"] = inner.replace(_OPEN, "").replace(_CLOSE, "").strip()
        return message


def _encoder(tokenizer: Any) -> Callable[[list[str]], list[list[int]]]:
    """Texts to ids. The template has written all special tokens, so none are added.

    A fast tokenizer is asked without transformers' wrapper, which takes as long again as the tokenizing, and
    without places in the text, as long too. Padding or truncation that its file sets is off, as the wrapper
    has it.
    """
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        return lambda texts: [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    fast.no_padding()
    fast.no_truncation()
    return lambda texts: [one.ids for one in fast.encode_batch_fast(texts, add_special_tokens=False)]


def _array(ids: list[int]) -> Ids:
    return np.array(ids, dtype=np.int32)


def _single_id(tokenizer: Any, tag: str) -> int | None:
    ids = tokenizer.encode(tag, add_special_tokens=False)
    return int(ids[0]) if len(ids) == 1 else None


def _with_parsed_arguments(message: Message) -> Message:
    """The message with each tool call's arguments as an object: OpenAI's form has them as JSON text."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise UnrenderableError("bad_tool_call", "a tool call has no function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise UnrenderableError("bad_tool_call", f"arguments are not JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise UnrenderableError("bad_tool_call", f"arguments are not an object ({arguments!r})")
    return {**call, "function": {**function, "arguments": arguments}}
