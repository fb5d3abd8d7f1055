"""Who is called missing: a rank that is dead, and none that a busy machine lets wait."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch.distributed as dist

from examples.pretraining import liveness
from examples.pretraining.checkpoint import CheckpointNotWritten


@pytest.mark.parametrize(("slow", "missing"), [((2, 3), "rank 1 is"), ((), "ranks [1, 2, 3] are")])
def test_starved_ranks_are_not_missing(
    monkeypatch: pytest.MonkeyPatch, slow: tuple[int, ...], missing: str
) -> None:
    """Rank 1 of 4 is dead; `slow` ones count again only after the window, the others never."""
    for name, seconds in (("INTERVAL", 0.05), ("WINDOW", 1.0), ("DOUBT", 3.0)):
        monkeypatch.setattr(liveness, name, seconds)
    store = dist.HashStore()
    for rank in (1, 2, 3):
        store.set(f"liveness/count/{rank}", "7")

    def count() -> None:
        for rank in slow:
            store.set(f"liveness/count/{rank}", "8")

    watcher = liveness.Liveness(0, 4, store, 60.0, lambda: {"all ranks": range(4)})
    later = threading.Timer(1.5, count)
    later.start()
    try:
        lost = watcher.explain(RuntimeError("Connection closed by peer"))
    finally:
        later.join()
        watcher.close()
    assert str(lost).startswith(f"rank 0: {missing} missing: ")
    assert "all ranks [0, 1, 2, 3] (RuntimeError: Connection closed by peer)" in str(lost)


def test_who_is_silent_does_not_hide_what_this_rank_met() -> None:
    """A full disk is one, whatever a busy machine does to the others; they are told at once."""
    store = dist.HashStore()
    watcher = liveness.Liveness(0, 2, store, 60.0, lambda: {"all ranks": range(2)})
    try:
        began = time.monotonic()
        assert watcher.explain(CheckpointNotWritten("No space left on device. More")) is None
        assert time.monotonic() - began < liveness.WINDOW
    finally:
        watcher.close()
    told = json.loads(store.get("liveness/failed/0"))
    assert told == [1, "CheckpointNotWritten: No space left on device"]
