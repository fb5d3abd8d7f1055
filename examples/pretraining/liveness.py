"""Says which rank is missing when a run cannot go on.

A rank whose peer has died is told that a connection broke (gloo), or nothing until a timeout
(NCCL), and never by whom. So each rank counts in the rendezvous store, which torchrun keeps outside
the ranks; when something fails, the ranks whose counters stand still are the ones that are gone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ulysses_mc import ParallelConfigError
from ulysses_mc.parallel_state import get_parallel_state, model_parallel_is_initialized
from ulysses_mc.parallel_state.state import STANDARD_GROUPS

from .errors import UserError

INTERVAL = 0.25  # seconds between two counts
# Seconds without a count after which a rank is called missing, once something failed. They are as
# many counts of this rank's own: on a busy machine, where others are slow to count, it is too.
WINDOW = 3.0
DOUBT = 9.0  # the same for several ranks: more likely starved on a busy machine than dead at once
ANSWER = 5.0  # seconds that the store may take to answer, twice
GRACE = 10.0  # seconds for the main thread to fail by itself
ALIKE = (UserError, ParallelConfigError, FloatingPointError)  # raised by all ranks, with a reason


class RankLost(RuntimeError):
    """Another rank is gone or has failed: names it, and the groups that cannot go on."""


def groups_of_this_rank() -> dict[str, tuple[int, ...]]:
    """Name -> global ranks; the whole world last."""
    groups: dict[tuple[int, ...], str] = {}
    if model_parallel_is_initialized():
        state = get_parallel_state()
        for axes in STANDARD_GROUPS:
            groups.setdefault(state.ranks(*axes), " x ".join(axes))
    groups.setdefault(tuple(range(dist.get_world_size())), "all ranks")
    return {name: ranks for ranks, name in groups.items()}


class Liveness:
    """Counts for this rank, in a thread, until `close()`.

    The thread also ends the process, with the same message, where the main thread cannot: it is
    still inside a collective GRACE seconds after another rank has failed.

    Args:
        store: shared by all ranks; used by the thread alone.
        timeout: seconds without a count after which the next rank is given up although nothing has
            failed. As long as a collective may take: a rank that computes without giving Python a
            chance to count is silent no longer than that.
        groups: the groups of this rank, by name.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Any,
        timeout: float,
        groups: Callable[[], Mapping[str, Sequence[int]]] = groups_of_this_rank,
    ) -> None:
        self.rank, self.world_size, self.store, self.timeout = rank, world_size, store, timeout
        self.groups = groups
        self._count, self._next_count, self._next_seen = 0, -1, time.monotonic()
        self._heard = time.monotonic()  # when the store last answered
        self._told_at = math.inf  # when it was seen that another rank has failed
        self._reason: str | None = None
        self._began, self._before = 0, list[int]()
        self._silent: list[int] = []
        self._failures: dict[int, tuple[int, str]] = {}
        self._done = False
        self._asked, self._told, self._answered, self._stop = (threading.Event() for _ in range(4))
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)
        self._thread.start()

    def done(self) -> None:
        """This rank ends before others, and nothing is wrong."""
        self._done = True

    def close(self) -> None:
        self._stop.set()
        self._thread.join(ANSWER)

    def explain(self, error: Exception) -> RankLost | None:
        """What `error` comes from; None: from this rank itself. The other ranks are told of it.

        A peer that is gone is met as a RuntimeError, so that another kind is this rank's own. Who
        is silent then is of no interest: on a busy machine that may be one that has lost nothing.
        """
        first_sentence = str(error).partition("\n")[0].partition(". ")[0]
        self._reason = f"{type(error).__name__}: {first_sentence}"
        self._asked.set()
        if not isinstance(error, RuntimeError):
            self._told.wait(ANSWER)
            return None
        while not self._answered.wait(INTERVAL):
            if time.monotonic() - self._heard < 2 * ANSWER:
                continue
            host = ":".join(os.environ.get(k, "?") for k in ("MASTER_ADDR", "MASTER_PORT"))
            return RankLost(
                f"rank {self.rank}: the rendezvous store at {host} does not answer: this node is "
                f"cut off from it, or its node is gone; {self._stopped()} ({self._reason})"
            )
        message = self._verdict()
        return RankLost(message) if message else None

    def _verdict(self) -> str:
        """Once all counts are known; empty if this rank failed first, by itself."""
        missing = [r for r in self._silent if r not in self._failures]
        if missing:
            who = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {missing} are"
            return (
                f"rank {self.rank}: {who} missing: killed, or on a node that is gone or cut off; "
                f"{self._stopped(missing)} ({self._reason})"
            )
        first = min(self._failures, key=lambda r: self._failures[r])
        if first == self.rank:
            return ""
        return (
            f"rank {self.rank}: rank {first} failed first, by {self._failures[first][1]}; "
            f"{self._stopped([first])}"
        )

    def _stopped(self, missing: Sequence[int] | None = None) -> str:
        names = [
            f"{name} {list(ranks)}"
            for name, ranks in self.groups().items()
            if len(ranks) > 1 and (missing is None or set(missing) & set(ranks))
        ]
        return f"groups of rank {self.rank} that cannot go on: {', '.join(names)}"

    # --- in the thread --------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            # The store is gone, or slow: explain() says so if it stays so.
            with contextlib.suppress(RuntimeError):
                self._tick()
            self._stop.wait(INTERVAL)
        if self._done:
            with contextlib.suppress(RuntimeError):
                self.store.set(f"liveness/done/{self.rank}", "1")

    def _tick(self) -> None:
        self._count += 1
        self.store.set(f"liveness/count/{self.rank}", str(self._count))
        self._heard = time.monotonic()
        if self._asked.is_set():
            self._look_at_all()
            return
        self._look_at_next()
        now = time.monotonic()
        if self.store.check(["liveness/failures"]):
            self._told_at = min(self._told_at, now)
        if now - self._told_at > GRACE and not self._asked.is_set():
            self._reason = f"still inside a collective {GRACE:g} s after that was known"
            self._look_at_all()
            while not self._answered.wait(INTERVAL):
                self._count += 1
                self.store.set(f"liveness/count/{self.rank}", str(self._count))
                self._look_at_all()
            silent = f"rank {self.rank}: the next rank was silent for {self.timeout:g} s"
            print(f"error: {self._verdict() or silent}", file=sys.stderr, flush=True)
            os._exit(1)

    def _look_at_next(self) -> None:
        count, now = self._read((self.rank + 1) % self.world_size), time.monotonic()
        if count != self._next_count:
            self._next_count, self._next_seen = count, now
        elif now - self._next_seen > self.timeout:
            self._told_at = min(self._told_at, now)

    def _look_at_all(self) -> None:
        """Compares all ranks' counts with those when this was first called."""
        counts = [self._read(r) for r in range(self.world_size)]
        self._heard = time.monotonic()
        if not self._before:
            order = self.store.add("liveness/failures", 1)
            self.store.set(f"liveness/failed/{self.rank}", json.dumps([order, self._reason]))
            self._began, self._before = self._count, counts
            self._told.set()
        silent = [r for r in range(self.world_size) if counts[r] == self._before[r]]
        waited = INTERVAL * (self._count - self._began)
        if silent and waited < WINDOW:
            return
        for r in range(self.world_size):
            if self.store.check([f"liveness/failed/{r}"]):
                order, text = json.loads(self.store.get(f"liveness/failed/{r}"))
                self._failures[r] = int(order), str(text)
        self._silent = [r for r in silent if not self.store.check([f"liveness/done/{r}"])]
        if waited < DOUBT and len([r for r in self._silent if r not in self._failures]) > 1:
            return
        self._answered.set()

    def _read(self, rank: int) -> int:
        key = f"liveness/count/{rank}"
        return int(self.store.get(key)) if self.store.check([key]) else 0


@contextlib.contextmanager
def watched(timeout_minutes: float) -> Iterator[None]:
    """Around a run: an exception that another rank is to blame for becomes RankLost."""
    if dist.get_world_size() == 1:
        yield
        return
    store = dist.distributed_c10d._get_default_store().clone()
    store.set_timeout(timedelta(seconds=ANSWER))
    liveness = Liveness(dist.get_rank(), dist.get_world_size(), store, 60 * timeout_minutes)
    try:
        yield
        liveness.done()
    except ALIKE:
        raise
    except Exception as error:
        if (lost := liveness.explain(error)) is not None:
            raise lost from error
        raise
    finally:
        liveness.close()
