"""A disk that is full while a checkpoint is written: the run says so, and the old one is whole."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("jsonargparse")
from tests.examples.small_run import SMALL, layout
from tests.examples.test_training import losses
from tests.faults.killing import broken_checkpoints
from tests.faults.test_killed_ranks import watched_train
from tests.support.pool import RankFailure, run_ranks

pytestmark = pytest.mark.megatron

OPTIONS = [*SMALL, *layout(ulysses=2), "--evaluation.interval=0", "--checkpoint.interval=2",
           "--model.num_layers=2", "--optimizer.lr_decay_iters=4"]  # fmt: skip
ROOM = 100_000  # bytes: less than one checkpoint's


def train_with_room(argv: list[str], messages: Path, room: int | None) -> list[dict[str, Any]]:
    """With no file larger than `room` bytes, where a disk cannot be made full."""
    if room is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    return watched_train(argv, None, messages)


COLLECT_A_FAILED_WRITE = """
import gc, io, sys
from examples.pretraining.writing import without_frames

class Stream(io.RawIOBase):
    def write(self, data):
        raise OSError("No space left on device")

def write():
    Stream().write(io.BytesIO(bytes(9)).getbuffer())

def save():
    try:
        without_frames(write)()
    except OSError as error:
        met = error  # a cycle, by this frame

save()
assert gc.collect() > 0
print("collected")
"""


def test_the_collector_survives_a_failed_write() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COLLECT_A_FAILED_WRITE], capture_output=True, text=True
    )
    assert done.stdout == "collected\n", (done.returncode, done.stderr)


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Makes `folder` one, if this user may; whether it did."""
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", folder]
    mounted = subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)


def test_a_full_disk(small_data: Path, tmp_path: Path) -> None:
    disk, messages = tmp_path / "disk", tmp_path / "messages"
    disk.mkdir(), messages.mkdir()
    argv = [*OPTIONS, f"--data.path=[{small_data}/text]", f"--data.cache={tmp_path}/cache"]
    two, four = "--training.train_iters=2", "--training.train_iters=4"
    whole = [*argv, four, f"--output={tmp_path}/whole"]
    uninterrupted = run_ranks(2, watched_train, whole, None, timeout=90)[0]
    argv.append(f"--output={disk}")
    with small_disk(disk) as mounted:
        run_ranks(2, watched_train, [*argv, two], None, timeout=90)
        if mounted:
            free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize
            (disk / "other").write_bytes(bytes(free - ROOM))
        results = run_ranks(
            2, train_with_room, [*argv, four], messages, None if mounted else ROOM,
            timeout=90, grace=30, return_exceptions=True,
        )  # fmt: skip
        said = [str(r) for r in results if type(r).__name__ == "CheckpointNotWritten"]
        assert all("iter_0000004 could not be written: " in text for text in said)
        # What PyTorch's writer makes of a full disk is not "No space left on device".
        assert said, results
        assert (" (0 KiB free)" if mounted else "File too large") in "".join(said)
        for rank, result in enumerate(results):
            if isinstance(result, RankFailure):  # the other was told
                assert "failed first, by CheckpointNotWritten" in (messages / str(rank)).read_text()
        assert broken_checkpoints(disk / "checkpoints") == []
        assert (disk / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "2\n"
        (disk / "other").unlink(missing_ok=True)
        went_on = run_ranks(2, watched_train, [*argv, four], None, timeout=90)[0]
        assert losses(went_on) == losses(uninterrupted)
        assert broken_checkpoints(disk / "checkpoints") == []
        assert not list((disk / "checkpoints").glob(".iter*"))
