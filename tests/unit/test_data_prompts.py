"""Reading prompts: every row once, under a key that never changes, and each fault told with file and line."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash.data.keyset import KeySet
from dflash.data.prompts import (
    Prompt,
    PromptCounts,
    content_key,
    fingerprint_prompts,
    is_held_out,
    read_prompts,
    survey_prompts,
    turns_to_produce,
)
from dflash.errors import ConfigurationError


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path, **options: object) -> list[Prompt]:
    return list(read_prompts(str(path), path.parent, **options))  # type: ignore[arg-type]


def test_rows_of_messages_and_rows_of_prompts_are_read_alike(tmp_path: Path) -> None:
    file = write(
        tmp_path / "p.jsonl",
        {"prompt": "Hi", "id": 7, "group": "greetings"},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "old answer"}]},
    )
    first, second = read(file)
    assert first.messages == [{"role": "user", "content": "Hi"}]
    assert (first.id, first.group, first.line, first.index) == ("7", "greetings", 1, 0)
    assert (second.id, second.group, second.line, second.index) == (second.key, None, 2, 1)


def test_equal_rows_are_kept_once_and_counted_and_keys_do_not_depend_on_ids(tmp_path: Path) -> None:
    file = write(
        tmp_path / "p.jsonl",
        {"id": "a", "prompt": "one"},
        {"id": "a", "prompt": "two"},
        {"id": "b", "prompt": "three"},
        {"id": "b", "prompt": "three"},
        {"prompt": "four"},
    )
    counts = PromptCounts()
    prompts = read(file, counts=counts)
    assert (counts.rows, counts.unique, counts.duplicates) == (5, 4, 1)
    assert len({prompt.key for prompt in prompts}) == 4
    survey = survey_prompts(str(file), tmp_path, hold_out=0.0)
    assert survey.repeated_ids == 1
    assert survey.turns == 4


def test_a_second_read_leaves_out_the_repeats_that_the_first_one_found(tmp_path: Path) -> None:
    rows = [{"prompt": text} for text in ("a", "b", "a", "c", "b", "b", "d")]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = PromptCounts(), PromptCounts()
    found = list(read_prompts("p.jsonl", tmp_path, counts=first))
    second.earlier = first
    assert list(read_prompts("p.jsonl", tmp_path, counts=second)) == found
    assert list(first.repeats) == list(second.repeats) == [2, 4, 5]
    assert (second.rows, second.unique, second.duplicates) == (7, 4, 3)


def test_a_key_is_the_same_in_any_file_order_and_key_order(tmp_path: Path) -> None:
    one = write(tmp_path / "1.jsonl", {"prompt": "x"}, {"messages": [{"role": "user", "content": "y"}]})
    two = write(
        tmp_path / "2.jsonl", {"messages": [{"content": "y", "role": "user"}], "id": 3}, {"prompt": "x"}
    )
    assert {prompt.key for prompt in read(one)} == {prompt.key for prompt in read(two)}


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_only_a_line_feed_ends_a_line(tmp_path: Path, separator: str) -> None:
    file = tmp_path / "p.jsonl"
    text = f"before{separator}after"
    file.write_bytes(json.dumps({"prompt": text}, ensure_ascii=False).encode().replace(b"\n", b"") + b"\r\n")
    if separator in "\x0b\x0c\x1c":  # must be escaped in JSON
        file.write_bytes(json.dumps({"prompt": text}).encode() + b"\r\n")
    (prompt,) = read(file)
    assert prompt.messages[0]["content"] == text


def test_half_a_surrogate_pair_is_replaced_and_the_other_rows_are_untouched(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'{"prompt": "a \\ud835 b"}\n{"prompt": "\\ud83c\\udf78"}\n')
    counts = PromptCounts()
    broken, whole = read(file, counts=counts)
    assert broken.messages[0]["content"] == "a \ufffd b"
    assert whole.messages[0]["content"] == "\U0001f378"
    assert counts.repaired == 1
    json.dumps(broken.messages).encode()


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "parquet.gz"])
def test_every_format_gives_the_same_prompts(tmp_path: Path, suffix: str) -> None:
    rows = [{"id": str(i), "messages": [{"role": "user", "content": f"question {i}"}]} for i in range(600)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = tmp_path / f"p.{suffix}"
    if suffix == "jsonl":
        file.write_bytes(lines)
    elif suffix == "jsonl.gz":
        file.write_bytes(gzip.compress(lines))
    elif suffix == "jsonl.zst":
        with pa.CompressedOutputStream(str(file), "zstd") as stream:
            stream.write(lines)
    else:
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "plain", row_group_size=100)
        data = (tmp_path / "plain").read_bytes()
        file.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    prompts = read(file)
    assert [prompt.id for prompt in prompts] == [row["id"] for row in rows]
    assert prompts[-1].key == content_key([{"role": "user", "content": "question 599"}], None)


def test_fields_that_parquet_adds_as_nulls_change_nothing(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    rows = [
        {"messages": [{"role": "user", "content": "a"}]},
        {
            "messages": [
                {"role": "user", "content": "b"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "1"},
            ]
        },
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet")
    file = write(tmp_path / "p.jsonl", *rows)
    assert [p.key for p in read(tmp_path / "p.parquet")] == [p.key for p in read(file)]


def test_a_glob_reads_its_files_in_name_order_and_counts_across_them(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", {"prompt": "second"}, {"prompt": "first"})
    write(tmp_path / "a.jsonl", {"prompt": "first"})
    counts = PromptCounts()
    prompts = list(read_prompts("*.jsonl", tmp_path, counts=counts))
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["first", "second"]
    assert counts.duplicates == 1


def test_the_limit_counts_distinct_prompts(tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", {"prompt": "a"}, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    assert [prompt.messages[0]["content"] for prompt in read(file, limit=2)] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "holds no prompts"),
        ("\n\n", "holds no prompts"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2 is not JSON"),
        ('{"prompt": "a"}\n{"prompt": "torn', "line 2 is not JSON"),
        ('["a"]\n', "line 1 is not a JSON object"),
        ('{"text": "a"}\n', "neither `messages` nor `prompt`"),
        ('{"id": "x9", "messages": [{"role": "human", "content": "a"}]}\n', "id x9.*role 'human'"),
        ('{"messages": [{"role": "system", "content": "a"}]}\n', "no message has role 'user'"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}\n',
            "role 'system' after others",
        ),
        (
            '{"messages": [{"role": "tool", "content": "a"}, {"role": "user", "content": "a"}]}\n',
            "role 'tool'",
        ),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}\n', "not text"),
        ('{"messages": "hello"}\n', "not JSON"),
    ],
)
def test_bad_files_are_refused_with_file_and_line(tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=told) as caught:
        read(file)
    assert "bad.jsonl" in str(caught.value)


def test_a_missing_file_and_a_broken_archive_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no file at"):
        list(read_prompts("nowhere.jsonl", tmp_path))
    broken = tmp_path / "p.jsonl.gz"
    broken.write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 1000)[:-20])
    with pytest.raises(ConfigurationError, match="broken compressed file"):
        read(broken)


def test_the_fingerprint_follows_content_and_not_names(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", {"prompt": "x"})
    write(tmp_path / "b.jsonl", {"prompt": "x"})
    write(tmp_path / "c.jsonl", {"prompt": "y"})
    prints = [fingerprint_prompts(name, tmp_path) for name in ("a.jsonl", "b.jsonl", "c.jsonl", "*.jsonl")]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_groups_are_never_on_both_sides_of_the_hold_out(tmp_path: Path) -> None:
    rows = [{"prompt": f"{g} {i}", "group": f"g{g}"} for g in range(200) for i in range(5)]
    prompts = read(write(tmp_path / "p.jsonl", *rows))
    sides = {(prompt.group, is_held_out(prompt, 0.2)) for prompt in prompts}
    assert len(sides) == 200
    assert 20 < sum(held for _, held in sides) < 60
    assert not any(is_held_out(prompt, 0.0) for prompt in prompts)


def test_each_assistant_turn_is_produced_but_those_that_tools_replied_to() -> None:
    def roles(*names: str) -> list[int]:
        return turns_to_produce([{"role": name, "content": "x"} for name in names])

    assert roles("user") == [1]
    assert roles("user", "assistant") == [1]
    assert roles("system", "user", "assistant", "user", "assistant") == [2, 4]
    assert roles("user", "assistant", "user") == [1, 3]
    assert roles("user", "assistant", "tool", "assistant", "user") == [3, 5]
    assert roles("user", "assistant", "tool") == [3]


@given(st.lists(st.integers(0, 2**64 - 1), max_size=3000))
def test_a_key_set_holds_what_a_set_holds(values: list[int]) -> None:
    keys, expected = KeySet(), set()
    for value in values:
        assert keys.add(value) == ((value or 1) not in expected)
        expected.add(value or 1)
    assert len(keys) == len(expected)
    assert all(value in keys for value in values)
    assert (12345 in keys) == (12345 in expected)
