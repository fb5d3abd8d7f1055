"""Runs a function on several ranks, by workers that stay alive for the whole pytest session."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .worker import Job, Outcome, serve

MAX_WORLD_SIZE = 8
TIMEOUT = 30.0  # seconds for one test on all its ranks
IMPORT_TIMEOUT = 180.0  # seconds for the imports of a test module, which come before
GRACE = 5.0  # seconds that the other ranks get once one has failed

# What a rank reports because another failed or hangs; never the cause.
_CONSEQUENCES = ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting")


class RankFailure(RuntimeError):
    """A rank failed: its number, its traceback, and a line for each other rank that failed."""


class _Worker:
    """A process and the connection to it."""

    def __init__(self, directory: str) -> None:
        context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        handle, stack_path = tempfile.mkstemp(dir=directory, suffix=".stack")
        os.close(handle)
        self.stack_path = Path(stack_path)
        # Not a daemon: Megatron's checkpoint writer starts processes of its own.
        self.process = context.Process(target=serve, args=(theirs, sys.path, stack_path))
        self.process.start()
        theirs.close()

    def stack(self) -> str:
        """Where the worker is now, in all its threads."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
            time.sleep(0.3)
        return self.stack_path.read_text() or "(no stack: the process does not answer)"

    def kill(self) -> None:
        """Kills the worker and all that it started: compilers, Megatron's checkpoint writer."""
        self.connection.close()
        for pid in _session(self.process.pid or 0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        """Lets an idle worker end by itself; it must not wait for one that hangs."""
        self.connection.close()
        self.process.join(2)
        self.kill()


def _session(leader: int) -> list[int]:
    """The processes of a worker's session, whatever their process groups."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(entry.name)) == leader:
                found.append(int(entry.name))
    return found


class WorkerPool:
    """Up to eight workers, started when first needed, replaced when they die or hang."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._preload = ["torch", "torch.distributed", "numpy", "pytest", "tests.support.worker"]

    def preload(self, modules: Iterable[str]) -> None:
        """Imports `modules` once, in the server that workers are forked from, not per worker."""
        self._preload += modules

    def run(
        self,
        world_size: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        timeout: float = TIMEOUT,
        backend: str = "gloo",
        env: dict[str, str] | None = None,
        grace: float = GRACE,
    ) -> list[Outcome]:
        """One outcome per rank, by rank. Never takes much longer than the imports + `timeout`."""
        payload = pickle.dumps((function, args, kwargs))
        workers = self._ready_workers(world_size)
        handle, store = tempfile.mkstemp(dir=self._directory.name, suffix=".store")  # type: ignore[union-attr]
        os.close(handle)
        try:
            for rank, worker in enumerate(workers):
                job = Job(rank, world_size, store, payload, timeout * 0.8, backend, env or {})
                worker.connection.send_bytes(pickle.dumps(job))
            outcomes = _gather(workers, IMPORT_TIMEOUT)
            if all(isinstance(outcome, str) for outcome in outcomes):
                _tell(workers, b"go")
                outcomes = _gather(workers, timeout, grace)
                _tell(workers, b"release")
                self._retire(workers, _gather(workers, GRACE))
            else:  # an import failed; ranks that are ready wait for a "go" that will not come
                self._retire(workers, outcomes)
        except BaseException:  # interrupted: the workers are in the middle of something
            self._retire(workers, [None] * world_size)
            raise
        finally:
            Path(store).unlink(missing_ok=True)
        return [o for o in outcomes if isinstance(o, Outcome)]

    def _ready_workers(self, world_size: int) -> list[_Worker]:
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size is {world_size}; the pool has {MAX_WORLD_SIZE} workers")
        if self._directory is None:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
            self._directory = tempfile.TemporaryDirectory(prefix="rank-pool-")
            multiprocessing.get_context("forkserver").set_forkserver_preload(self._preload)
        self._retire(self._workers, ["" if w.process.is_alive() else None for w in self._workers])
        while len(self._workers) < world_size:
            self._workers.append(_Worker(self._directory.name))
        return self._workers[:world_size]

    def _retire(self, workers: list[_Worker], answers: list[Any]) -> None:
        """Kills the workers that did not answer as a reusable worker does ("clean" or "")."""
        for worker, answer in zip(list(workers), answers, strict=True):
            if answer not in ("clean", ""):
                worker.kill()
                self._workers.remove(worker)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers.clear()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None


def _tell(workers: list[_Worker], message: bytes) -> None:
    for worker in workers:
        with contextlib.suppress(OSError):  # dead or killed: has its outcome already
            worker.connection.send_bytes(message)


def _gather(workers: list[_Worker], timeout: float, grace: float = GRACE) -> list[Any]:
    """One message per worker; in place of a missing one, an outcome that says what happened."""
    pending = {w.connection: r for r, w in enumerate(workers) if not w.connection.closed}
    answers: list[Any] = [Outcome(rank, failure="not running") for rank in range(len(workers))]
    deadline = time.monotonic() + timeout
    while pending:
        arrived = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not arrived:
            for rank in pending.values():
                answers[rank] = _hung(rank, workers[rank])
            break
        for connection in arrived:
            assert isinstance(connection, Connection)
            rank = pending.pop(connection)
            answers[rank] = _receive(connection, rank, workers[rank])
            if isinstance(answers[rank], Outcome) and answers[rank].failure:
                deadline = min(deadline, time.monotonic() + grace)
    return answers


def _receive(connection: Connection, rank: int, worker: _Worker) -> Any:
    try:
        message = connection.recv_bytes()
    except (EOFError, OSError):
        worker.kill()
        return Outcome(rank, failure=f"The process died, exit code {worker.process.exitcode}.")
    try:
        return pickle.loads(message)
    except Exception as error:
        return Outcome(rank, failure=f"The result cannot be unpickled: {error!r}")


def _hung(rank: int, worker: _Worker) -> Outcome:
    stack = worker.stack()
    worker.kill()
    return Outcome(rank, failure=f"Still running at the end of the timeout; killed in:\n{stack}")


def _raise_first(outcomes: list[Outcome]) -> None:
    """Raises the cause: an error of a rank's own, else a hang, else what is left."""

    def order(outcome: Outcome) -> int:
        if any(sign in outcome.failure for sign in _CONSEQUENCES):
            return 2
        return 1 if outcome.failure.startswith("Still running") else 0

    failed = sorted((o for o in outcomes if o.failure), key=order)
    if not failed:
        return
    cause, others = failed[0], failed[1:]
    lines = [
        # A traceback ends with the error; what the pool says itself begins with it.
        f"rank {o.rank} also: {o.failure.strip().splitlines()[-1 if o.error else 0][:200]}"
        for o in others
    ]
    failure = RankFailure("\n".join([f"rank {cause.rank}: {cause.failure}", *lines]))
    if cause.error is None:
        raise failure
    raise cause.error from failure


_pool = WorkerPool()
preload, close = _pool.preload, _pool.close
atexit.register(close)


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT,
    env: dict[str, str] | None = None,
    backend: str = "gloo",
    return_exceptions: bool = False,
    grace: float = GRACE,
    **kwargs: Any,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` on every rank of a fresh default group.

    Args:
        world_size: 1 to 8.
        function: defined at the top level of a module below `tests/`; it and the arguments
            are pickled. It asks torch.distributed for its rank.
        timeout: seconds for all ranks together, without the imports of the test's module.
        env: environment variables for this call alone.
        return_exceptions: gives each failed rank's exception in its place instead of raising.
        grace: seconds that the other ranks get once one has failed.

    Returns:
        What each rank returned, by rank.

    Raises:
        The exception of the first rank that failed by itself (not because a peer closed the
        connection), from a RankFailure that holds the rank and its traceback; the RankFailure
        alone if the rank died or did not end in time.
    """
    outcomes = _pool.run(
        world_size,
        function,
        args,
        kwargs,
        timeout=timeout,
        backend=backend,
        env=env,
        grace=grace,
    )
    if not return_exceptions:
        _raise_first(outcomes)
    return [
        (o.error or RankFailure(f"rank {o.rank}: {o.failure}")) if o.failure else o.value
        for o in outcomes
    ]
