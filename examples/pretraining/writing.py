"""How Megatron-core's checkpoint writer runs."""

from __future__ import annotations

import contextlib
import multiprocessing.dummy
from collections.abc import Iterator
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

    before = writer.mp, writer._results_queue
    writer.mp, writer._results_queue = _Threads, None
    try:
        yield
    finally:
        writer.mp, writer._results_queue = before
