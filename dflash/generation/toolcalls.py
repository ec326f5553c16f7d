"""Loops over tool calls: the same call again and again, also when only a counter in it moves.

Calls are read from text between tags, as Qwen's and Hermes' templates write them. Normalised means: JSON
with sorted keys, so that spacing and order do not hide that two calls are one.
"""

import re
from itertools import groupby

import orjson

OPEN = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_DIGITS = re.compile(r"\d+")
SAME = 3
"""Consecutive calls, equal to the last argument, that make a loop."""
ALIKE = 8
"""Consecutive calls, equal but for digits, that make a loop: a few such calls may be real work."""


def loops(text: str) -> bool:
    """Whether an answer's tool calls go round in a circle."""
    calls = [_normalised(call) for call in _CALL.findall(text)]
    return _longest(calls) >= SAME or _longest([_DIGITS.sub("#", call) for call in calls]) >= ALIKE


def _normalised(call: str) -> str:
    try:
        return orjson.dumps(orjson.loads(call), option=orjson.OPT_SORT_KEYS).decode()
    except orjson.JSONDecodeError:
        return " ".join(call.split())  # another call syntax: compared as text


def _longest(calls: list[str]) -> int:
    return max((sum(1 for _ in group) for _, group in groupby(calls)), default=0)
