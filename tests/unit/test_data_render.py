"""What is trained on is what the target saw: rendering, turns, thinking and tool calls."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.data.prompts import turns_to_produce
from dflash.data.render import Renderer, UnrenderableError
from tests.support.tiny_tokenizer import OPENING, SPECIALS, STRIPPING, tiny_tokenizer

OPEN, CLOSE = 256 + SPECIALS.index("<think>"), 256 + SPECIALS.index("</think>")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ids(renderer: Renderer, text: str) -> np.ndarray:
    return np.array(renderer.tokenizer.encode(text), np.int32)


def test_later_turns_see_earlier_answers_as_the_server_renders_them() -> None:
    renderer = Renderer(tiny_tokenizer(STRIPPING), thinking=True)
    history = [user("one"), {"role": "assistant", "content": "stale"}, user("two")]
    first_end, second_end = turns_to_produce(history)
    first = renderer.prompt_ids(history[:first_end])
    output = ids(renderer, "<think>\nsecret\n</think>\n\nanswer<|im_end|>")
    history[1] = renderer.answer_message(output, renderer.read_thinking(output, opened=False))
    second = renderer.text(renderer.prompt_ids(history[:second_end]))
    assert "answer" in second
    assert "secret" not in second
    assert "stale" not in second
    # Ids of a sample are what was sent and what came, tag for tag.
    sample = renderer.text(np.concatenate([first, output]))
    assert sample.count("<think>") == 1
    assert sample.count("</think>") == 1


def test_thinking_is_read_off_the_prompt_and_not_off_a_name() -> None:
    opening = Renderer(tiny_tokenizer(OPENING), thinking=True)
    on = Renderer(tiny_tokenizer(STRIPPING), thinking=True)
    off = Renderer(tiny_tokenizer(STRIPPING), thinking=False)
    assert opening.opens_thinking(opening.prompt_ids([user("hi")]))
    assert not on.opens_thinking(on.prompt_ids([user("hi")]))
    assert not off.opens_thinking(off.prompt_ids([user("hi")]))
    assert not on.opens_thinking(on.prompt_ids([user("what is <think> for?")]))


@pytest.mark.parametrize(
    ("text", "opened", "span", "closed"),
    [
        ("plain answer", False, None, True),
        ("<think>a</think>b", False, (0, 3), True),
        ("\n<think>a</think>b", False, (1, 4), True),
        ("abc</think>d", True, (0, 4), True),
        ("abc", True, (0, 3), False),
        ("<think>abc", False, (0, 4), False),
        ("write <think> like this", False, None, True),
    ],
)
def test_think_spans_cover_the_thinking_with_its_tags(
    text: str, opened: bool, span: tuple[int, int] | None, closed: bool
) -> None:
    renderer = Renderer(tiny_tokenizer(), thinking=True)
    found = renderer.read_thinking(ids(renderer, text), opened=opened)
    assert (found.span, found.closed) == (span, closed)


@given(st.lists(st.text(max_size=40), max_size=6), st.integers(0, 6))
@settings(max_examples=100, deadline=None)
def test_prompts_encoded_together_have_the_ids_that_each_has_alone(texts: list[str], place: int) -> None:
    renderer = Renderer(tiny_tokenizer(), thinking=True)
    alone = [renderer.prompt_ids([user(text)]).tolist() for text in texts]
    asked: list[str | UnrenderableError] = [renderer.prompt_text([user(text)]) for text in texts]
    refused = UnrenderableError("template", "no")
    asked.insert(place, refused)
    together = renderer.ids_of_prompts(asked)
    assert together.pop(min(place, len(texts))) is refused
    assert [ids.tolist() for ids in together if not isinstance(ids, UnrenderableError)] == alone


def test_a_text_that_cannot_be_encoded_spoils_none_of_its_neighbours() -> None:
    renderer = Renderer(tiny_tokenizer(), thinking=True)
    first, broken, last = renderer.ids_of_prompts(["one", "half a pair \ud83c", "two"])
    assert isinstance(broken, UnrenderableError)
    assert np.array_equal(first, ids(renderer, "one"))
    assert np.array_equal(last, ids(renderer, "two"))


def test_padding_and_truncation_that_a_tokenizers_file_sets_touch_no_prompt() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_padding(pad_id=256, pad_token="<|endoftext|>")
    tokenizer.backend_tokenizer.enable_truncation(4)
    renderer = Renderer(tokenizer, thinking=True)
    plain = Renderer(tiny_tokenizer(), thinking=True)
    texts = ["short", "a good deal longer than four tokens"]
    together = renderer.ids_of_prompts(texts)
    assert [len(one) for one in together] == [len(text) for text in texts]
    assert np.array_equal(together[1], ids(plain, texts[1]))


PIECES = st.sampled_from(["<", "think", "<think>", ">", " ", "\n", "a", "\u3000", "é", "</think>", "b"])


@given(st.lists(PIECES, max_size=14))
@settings(max_examples=200, deadline=None)
def test_a_tag_in_pieces_is_seen_at_the_end_of_a_prompt_and_the_start_of_an_answer(parts: list[str]) -> None:
    tokenizer = tiny_tokenizer()
    pieces = Renderer(tokenizer, thinking=True)
    pieces._open = pieces._close = None
    text = "".join(parts)
    spelt = np.array([i for part in parts for c in part for i in tokenizer.encode(c)], np.int32)
    tail, head = pieces.text(spelt[-16:]), pieces.text(spelt[:16])
    assert pieces.text(spelt) == text
    assert pieces.opens_thinking(spelt) == tail.rstrip().endswith("<think>")
    begins = head.lstrip().startswith("<think>")
    assert (pieces.read_thinking(spelt, opened=False).span is not None) == begins


def test_tags_that_a_tokenizer_cuts_into_pieces_are_found_in_the_text() -> None:
    tokenizer = tiny_tokenizer()
    whole = Renderer(tokenizer, thinking=True)
    pieces = Renderer(tokenizer, thinking=True)
    pieces._open = pieces._close = None
    plain = np.array([i for c in b"<think>ab</think>" for i in tokenizer.encode(chr(c))], np.int32)
    output = np.concatenate([plain, ids(whole, "visible")])
    found = pieces.read_thinking(output, opened=False)
    assert found.closed
    assert found.span == (0, len(plain))
    assert pieces.visible(output[found.span[1] :]) == "visible"


def calling(arguments: Any) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "lookup", "arguments": arguments}}
    return [
        user("where?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
    ]


def test_arguments_as_text_and_as_an_object_give_the_same_ids() -> None:
    renderer = Renderer(tiny_tokenizer(STRIPPING), thinking=True)
    value = {"city": "Paris \U0001f378"}
    as_object = renderer.prompt_ids(calling(value))
    assert np.array_equal(renderer.prompt_ids(calling(json.dumps(value))), as_object)
    assert np.array_equal(renderer.prompt_ids(calling(json.dumps(value, ensure_ascii=False))), as_object)
    assert "\U0001f378" in renderer.text(as_object) or "\\ud83c" in renderer.text(as_object)


@pytest.mark.parametrize("arguments", ["null", "[1]", "{bad", None, 3])
def test_arguments_that_are_no_object_reject_the_prompt_with_a_reason(arguments: Any) -> None:
    renderer = Renderer(tiny_tokenizer(STRIPPING), thinking=True)
    with pytest.raises(UnrenderableError) as caught:
        renderer.prompt_ids(calling(arguments))
    assert caught.value.reason == "bad_tool_call"


def test_a_template_that_refuses_a_conversation_rejects_only_that_prompt() -> None:
    renderer = Renderer(tiny_tokenizer("{{ raise_exception('roles must alternate') }}"), thinking=True)
    with pytest.raises(UnrenderableError, match="roles must alternate") as caught:
        renderer.prompt_ids([user("hi")])
    assert caught.value.reason == "template"


def test_there_is_one_begin_token_where_the_template_writes_one_and_the_tokenizer_would_too() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = tiny_tokenizer("<|endoftext|>{% for m in messages %}{{ m.content }}{% endfor %}")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    assert tokenizer.encode("x")[0] == 256
    rendered = Renderer(tokenizer, thinking=True).prompt_ids([user("hi")])
    assert rendered.tolist().count(256) == 1
