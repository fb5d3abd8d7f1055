"""One run at a time in an output folder: two would write the same checkpoint and log."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from .errors import UserError

NAME = ".run.lock"
INTERVAL = 1.0  # seconds between two attempts


@contextlib.contextmanager
def only_run_in(output: Path, patience: float) -> Iterator[None]:
    """Holds the folder's lock on rank 0 for as long as the process lives. Collective.

    The kernel lets go of it however the process ends. On a file system without locks nothing is
    held.

    Args:
        patience: seconds to wait for another run. Of a run that torchrun has started again, the
            ranks of a node that was cut off may live on until their timeout.

    Raises:
        UserError: on every rank, naming the process that holds it.
    """
    deadline, file, told = time.monotonic() + patience, None, False
    while True:
        said: list[str | bool] = ["", False]  # why not, and whether that is the end of it
        if dist.get_rank() == 0:
            late = time.monotonic() >= deadline
            try:
                file = _lock(output / NAME)
            except BlockingIOError as error:
                said = [f"{error.strerror} writes to output {output}", late]
                if not told and not late:
                    print(f"{said[0]}; waiting up to {patience:.0f} s for it", flush=True)
                    told = True
            except OSError as error:
                said = [f"output {output} cannot be written: {error.strerror}", True]
        dist.broadcast_object_list(said, src=0)
        if not said[0]:
            break
        if said[1]:
            raise UserError(f"{said[0]}. End that first, or name another output")
        time.sleep(INTERVAL)
    try:
        yield
    finally:
        if file is not None:
            os.close(file)


def _lock(path: Path) -> int | None:
    """The locked file; None where the file system has no locks.

    Raises:
        BlockingIOError: it is locked; says by whom.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(file, 200).decode("utf-8", "replace").strip()
        os.close(file)
        raise BlockingIOError(error.errno, f"another run ({holder or 'starting'})") from None
    except OSError:
        os.close(file)
        return None
    os.truncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return file
