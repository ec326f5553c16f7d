"""The work queue: each key once, one worker a key, later means later, failures back off."""

import threading
import time

from operators.queue import WorkQueue


def test_a_key_added_many_times_is_taken_once() -> None:
    queue = WorkQueue()
    for _ in range(5):
        queue.add("a")
    assert queue.take() == "a"
    queue.add("b")
    assert queue.take() == "b"


def test_a_key_added_while_it_is_worked_on_comes_again_afterwards() -> None:
    queue = WorkQueue()
    queue.add("a")
    assert queue.take() == "a"
    queue.add("a")
    queue.add("b")
    assert queue.take() == "b", "a is being worked on"
    queue.done("a")
    assert queue.take() == "a"


def test_a_delay_is_kept_unless_something_earlier_comes() -> None:
    queue = WorkQueue()
    queue.add("late", delay=60.0)
    queue.add("soon", delay=0.05)
    started = time.monotonic()
    assert queue.take() == "soon"
    assert time.monotonic() - started >= 0.05
    queue.add("late")
    assert queue.take() == "late"


def test_failures_back_off_and_success_forgets_them() -> None:
    queue = WorkQueue()
    delays = []
    for _ in range(3):
        queue.add("a")
        queue.take()
        queue.done("a", failed=True)
        delays.append(queue._due["a"] - time.monotonic())
        queue._due.clear()
        queue._heap.clear()
    assert 0.4 < delays[0] <= 1.0 < delays[2] <= 4.0
    queue.done("a")
    assert queue._failures == {}


def test_closing_lets_waiting_workers_go() -> None:
    queue = WorkQueue()
    taken: list[str | None] = []
    worker = threading.Thread(target=lambda: taken.append(queue.take()))
    worker.start()
    queue.close()
    worker.join(timeout=5)
    assert taken == [None]
