"""Local copies stay right whatever the watch does: 410, silence, breaks, empty streams, missed deletions."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from operators.informer import Informer
from operators.kube import PODS, ApiError, Gone, Unreachable, _change

Object = dict[str, Any]


def item(name: str, version: int, **labels: str) -> Object:
    return {
        "kind": "Pod",
        "metadata": {
            "name": name,
            "uid": name,
            "resourceVersion": str(version),
            "labels": labels,
            "managedFields": [1],
        },
    }


class ScriptedKube:
    """Answers lists and watches from a script; stops the informer at its end."""

    def __init__(
        self, lists: list[tuple[list[Object], str]], watches: list[Any], stop: threading.Event
    ) -> None:
        self.lists, self.watches, self.stop = lists, watches, stop
        self.watched_from: list[str] = []

    def list(self, *_: Any) -> tuple[list[Object], str]:
        return self.lists.pop(0)

    def watch(self, _resource: Any, _namespace: str, _selector: str, version: str) -> Iterator[Object]:
        self.watched_from.append(version)
        if not self.watches:
            self.stop.set()
            return
        script = self.watches.pop(0)
        for step in script:
            if isinstance(step, Exception):
                raise step
            yield step


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("operators.informer._LONGEST_PAUSE", 0.001)


def run(
    lists: list[Any], watches: list[Any]
) -> tuple[Informer, ScriptedKube, list[tuple[str | None, str | None]]]:
    stop = threading.Event()
    kube = ScriptedKube(lists, watches, stop)
    seen: list[tuple[str | None, str | None]] = []

    def name(o: Object | None) -> str | None:
        return o["metadata"]["name"] + "@" + o["metadata"]["resourceVersion"] if o else None

    informer = Informer(kube, PODS, "ns", lambda old, new: seen.append((name(old), name(new))))  # type: ignore[arg-type]
    informer.run(stop)
    return informer, kube, seen


def added(o: Object) -> Object:
    return {"type": "ADDED", "object": o}


def test_changes_are_told_with_what_was_known_before() -> None:
    deleted = {"type": "DELETED", "object": item("a", 7)}
    informer, _, seen = run([([item("a", 1)], "5")], [[added(item("b", 6)), deleted]])
    assert seen == [(None, "a@1"), (None, "b@6"), ("a@1", None)]
    assert informer.names() == ["b"]
    assert "managedFields" not in informer.get("b")["metadata"]  # type: ignore[index]


def test_410_in_the_stream_and_as_status_lists_again_and_misses_nothing() -> None:
    for gone in (Gone(410, "Expired", "too old"),):
        lists = [([item("a", 1), item("b", 2)], "5"), ([item("b", 9), item("c", 8)], "10")]
        _, kube, seen = run(lists, [[gone]])
        assert kube.watched_from == ["5", "10"]
        assert seen[2:] == [("b@2", "b@9"), (None, "c@8"), ("a@1", None)]
    with pytest.raises(Gone):
        _change({"type": "ERROR", "object": {"code": 410, "reason": "Expired", "message": "too old"}})


def test_a_broken_watch_goes_on_from_the_last_version_it_saw() -> None:
    bookmark = {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "20"}}}
    _, kube, _ = run(
        [([], "5")], [[added(item("a", 7)), Unreachable("reset")], [bookmark, Unreachable("reset")]]
    )
    assert kube.watched_from == ["5", "7", "20"]


def test_a_watch_that_ends_at_once_is_not_looped_on_hot() -> None:
    informer, kube, _ = run([([], "5"), ([], "6"), ([], "7")], [[], []])
    assert informer.relists == 3
    assert kube.watched_from == ["5", "6", "7"]


def test_an_error_of_the_server_lists_again() -> None:
    _, kube, _ = run([([], "5"), ([], "9")], [[ApiError(500, "InternalError", "etcd")]])
    assert kube.watched_from == ["5", "9"]


def test_objects_are_found_by_their_drafter_also_after_a_change_of_label() -> None:
    one, moved = item("a", 1), item("a", 6)
    one["metadata"]["labels"] = {"dflash.dev/drafter": "x"}
    moved["metadata"]["labels"] = {"dflash.dev/drafter": "y"}
    informer, _, _ = run([([one], "5")], [[{"type": "MODIFIED", "object": moved}]])
    assert informer.labelled("x") == []
    assert [o["metadata"]["name"] for o in informer.labelled("y")] == ["a"]


def test_synced_only_after_the_first_list() -> None:
    stop = threading.Event()
    calls: list[Callable[[], Any]] = []

    class Down(ScriptedKube):
        def list(self, *_: Any) -> tuple[list[Object], str]:
            if not calls:
                calls.append(lambda: None)
                assert not informer.synced.is_set()
                raise Unreachable("down")
            return super().list()

    informer = Informer(Down([([], "5")], [], stop), PODS, "ns", lambda *_: None)  # type: ignore[arg-type]
    informer.run(stop)
    assert informer.synced.is_set()
