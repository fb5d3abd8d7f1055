"""How Megatron-core's checkpoint writer runs, and what is left of a write that failed."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing.dummy
import traceback
from collections.abc import Callable, Iterator
from typing import Any


class _Threads:
    """In the place of torch.multiprocessing."""

    @staticmethod
    def get_context(method: str) -> Any:
        return multiprocessing.dummy


@contextlib.contextmanager
def in_this_process() -> Iterator[None]:
    """Files are written by threads.

    Megatron-core starts a second Python for each rank, which only hands over the results of the
    writers: seconds at the first save, a minute on a busy machine, also after a SIGTERM. And 0.16
    forks its writers, out of a process with threads in it (gloo's, NCCL's, liveness); if one is
    killed, its rank waits for ever.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async as writer

    before = writer.mp, writer._results_queue, writer._write_item
    writer.mp, writer._results_queue = _Threads, None
    writer._write_item = without_frames(writer._write_item)
    try:
        yield
    finally:
        writer.mp, writer._results_queue, writer._write_item = before


def without_frames(write: Callable[..., Any]) -> Callable[..., Any]:
    """`write`, whose error does not keep what its calls hold.

    A frame of PyTorch's writer holds a view of a BytesIO, and Megatron-core keeps the error in a
    cycle. The collector of CPython up to 3.12.1 crashes on the two (SIGSEGV), at any later time.
    """

    @functools.wraps(write)  # whose signature Megatron-core looks at
    def write_or_raise(*args: Any, **kwargs: Any) -> Any:
        try:
            return write(*args, **kwargs)
        except Exception as error:
            met: BaseException | None = error
            while met is not None:
                traceback.clear_frames(met.__traceback__)
                met = met.__context__
            raise

    return write_or_raise
