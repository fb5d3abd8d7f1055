"""One worker of the pool: runs a function as one rank of a fresh process group, then cleans up."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

MAX_THREADS = 24  # of a worker between jobs


@dataclass(frozen=True)
class Job:
    """What a worker is asked to run."""

    rank: int
    world_size: int
    store: str  # path of the file that the ranks rendezvous over
    payload: bytes  # pickled (function, args, kwargs)
    timeout: float  # seconds a collective may take
    backend: str = "gloo"
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """What became of a rank: a value, or an exception with its traceback as text."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    failure: str = ""  # traceback, or how the rank died; empty for success


def serve(connection: Connection, sys_path: list[str], stack_path: str) -> None:
    """Runs jobs until the other end of `connection` closes.

    For each job the two ends exchange: job ->, <- ready, go ->, <- outcome, release ->, <- clean.
    "ready" comes after the imports, so that they do not count against the test's timeout;
    "release" comes when every rank has an outcome, so that no rank closes its sockets while
    another still reads from them.
    """
    os.setsid()  # so that the pool can kill a worker together with what it started
    sys.path[:] = sys_path
    _share_gloo_device()
    with open(stack_path, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                _serve_one(connection, pickle.loads(connection.recv_bytes()))


def _serve_one(connection: Connection, job: Job) -> None:
    with _restored_state(job):
        try:
            function, args, kwargs = _imported(job.payload)
        except BaseException as error:
            _send(connection, _failed(job.rank, error))
            return
        _send(connection, "ready")
        connection.recv_bytes()
        joined = False
        try:
            _initialize(job)
            joined = True
            outcome = Outcome(job.rank, function(*args, **kwargs))
        except BaseException as error:
            outcome = _failed(job.rank, error)
            _destroy_groups()  # at once: the other ranks then fail instead of waiting for this one
        _send(connection, outcome)
        connection.recv_bytes()
        clean = _destroy_groups()
    # PyTorch names a default group by how many this process began: one that failed counts on.
    clean = joined and clean and _no_mode_left() and _few_threads()
    _send(connection, "clean" if clean else "dirty")


def _imported(payload: bytes) -> Any:
    """What shall be called, with its modules. Those stay: a collection need not look at them again,
    which takes a third of a second of each rank once Megatron is loaded."""
    loaded = len(sys.modules)
    wanted = pickle.loads(payload)
    if len(sys.modules) > loaded or not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
    return wanted


def _initialize(job: Job) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        job.backend,
        init_method=f"file://{job.store}",
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout),
    )


def _share_gloo_device() -> None:
    """All gloo groups of this process on one network thread.

    By default each has its own, which wakes a hundred times a second: with 8 ranks of Megatron's
    dozens of groups, two cores are busy with waking.
    """
    from torch.distributed import ProcessGroupGloo

    device = ProcessGroupGloo.create_default_device()
    own_init = ProcessGroupGloo.__init__

    def init(
        self: Any,
        store: Any,
        rank: int,
        size: int,
        timeout: timedelta = timedelta(minutes=30),
        **more: Any,
    ) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._timeout, options._threads = [device], timeout, 2
        for name, value in more.items():
            setattr(options, name, value)
        own_init(self, store, rank, size, options)  # type: ignore[call-overload]

    ProcessGroupGloo.__init__ = init  # type: ignore[assignment]


def _destroy_groups() -> bool:
    """Megatron's and the library's module-level state, then every process group; True if it could.

    After an error one of them may raise in turn; that must hide neither the error nor the rest.
    """
    import torch.distributed as dist

    done = True
    for module, function in (
        ("ulysses_mc.parallel_state", "destroy_model_parallel"),
        ("megatron.core.parallel_state", "destroy_model_parallel"),
        ("megatron.core.num_microbatches_calculator", "destroy_num_microbatches_calculator"),
        ("megatron.core.rerun_state_machine", "destroy_rerun_state_machine"),
    ):
        try:
            destroy = getattr(sys.modules.get(module), function, None)
            if destroy is not None:
                destroy()
        except Exception:
            done = False
    if dist.is_initialized():
        dist.destroy_process_group()
    _forget_meshes()
    return done


def _forget_meshes() -> None:
    """DTensor keeps plans by mesh, and meshes of equal ranks are equal: the plan of an earlier job
    names groups that are gone."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute, debug

        debug._clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()
        getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()


@contextlib.contextmanager
def _restored_state(job: Job) -> Iterator[None]:
    """Every job starts from the same seeds, and leaves behind none of the usual settings."""
    import numpy
    import torch

    environment, directory = dict(os.environ), os.getcwd()
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    os.environ.update(RANK=str(job.rank), LOCAL_RANK=str(job.rank), WORLD_SIZE=str(job.world_size))
    os.environ.update(job.env)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(directory)
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        if torch.are_deterministic_algorithms_enabled() != deterministic:  # it imports for 2 s
            torch.use_deterministic_algorithms(deterministic)
        torch.set_grad_enabled(True)


def _no_mode_left() -> bool:
    """Whether the job left its dispatch and function modes; if not, the pool replaces the worker.

    Those of `torch.set_default_device` count too.
    """
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    return not _get_current_function_mode_stack() and not _get_current_dispatch_mode_stack()


def _few_threads() -> bool:
    """Whether the groups of the job are really gone.

    Each gloo group has a thread that wakes a hundred times a second until nothing refers to the
    group any more. Models, optimizers and caches of Megatron's and of DTensor's do; after some
    dozens of tests their threads would leave no processor time for the next.
    """
    if len(os.listdir("/proc/self/task")) > MAX_THREADS:
        gc.collect()
    return len(os.listdir("/proc/self/task")) <= MAX_THREADS


def _failed(rank: int, error: BaseException) -> Outcome:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return Outcome(rank, error=error, failure=text)


def _send(connection: Connection, message: Any) -> None:
    """By plain pickle: multiprocessing's own pickler would pass tensors as file descriptors."""
    try:
        connection.send_bytes(pickle.dumps(message))
    except (ConnectionError, EOFError):
        raise
    except Exception as error:  # not picklable: the text still tells
        failure = message.failure or f"The result cannot be pickled: {error!r}"
        connection.send_bytes(pickle.dumps(Outcome(message.rank, failure=failure)))
