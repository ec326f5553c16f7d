"""A watch on a Drafter's drafter pods: two attempts must never live at the same time, however briefly."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from operators.kube import PODS, Gone, Kube, Unreachable


@contextmanager
def one_attempt_at_a_time(api: Kube, namespace: str, drafter: str) -> Iterator[list[int]]:
    """Yields the attempts seen, in order; AssertionError at the end if two have lived together.

    A pod lives until its containers have ended, however long ago it was deleted.
    """
    selector = f"dflash.dev/drafter={drafter},dflash.dev/role=drafter"
    living: dict[str, int] = {}
    seen: list[int] = []
    together: list[set[int]] = []
    version = api.list(PODS, namespace, selector)[1]
    over = threading.Event()

    def follow() -> None:
        nonlocal version
        while not over.is_set():
            try:
                for change in api.watch(PODS, namespace, selector, version):
                    pod = change["object"]
                    version = pod["metadata"]["resourceVersion"]
                    if change["type"] == "BOOKMARK":
                        continue
                    attempt = int(pod["metadata"]["labels"]["dflash.dev/attempt"])
                    if change["type"] == "DELETED" or pod["status"].get("phase") in ("Succeeded", "Failed"):
                        living.pop(pod["metadata"]["uid"], None)
                    else:
                        living[pod["metadata"]["uid"]] = attempt
                        if attempt not in seen:
                            seen.append(attempt)
                    if len(set(living.values())) > 1:
                        together.append(set(living.values()))
                    if over.is_set():
                        return
            except (Gone, Unreachable):
                if not over.wait(0.5):
                    version = api.list(PODS, namespace, selector)[1]

    threading.Thread(target=follow, name=f"watch-{drafter}", daemon=True).start()
    try:
        yield seen
    finally:
        over.set()
    assert not together, f"attempts that lived together: {together}"
