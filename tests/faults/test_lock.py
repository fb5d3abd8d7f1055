"""Two runs do not write to one output folder."""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

import pytest

from tests.support.pool import run_ranks

pytest.importorskip("jsonargparse")
from examples.pretraining.lock import NAME


def enter(output: Path, patience: float) -> str:
    from examples.pretraining.errors import UserError
    from examples.pretraining.lock import only_run_in

    try:
        with only_run_in(output, patience):
            return "alone"
    except UserError as error:
        return str(error)


def test_the_second_run_is_refused_on_every_rank(tmp_path: Path) -> None:
    assert run_ranks(2, enter, tmp_path / "run", 0.0) == ["alone"] * 2
    with (tmp_path / "run" / NAME).open("w") as other:
        other.write("process 12 on node7\n")
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        found = run_ranks(2, enter, tmp_path / "run", 0.0)
    assert (
        found
        == [
            f"another run (process 12 on node7) writes to output {tmp_path / 'run'}. "
            "End that first, or name another output"
        ]
        * 2
    )
    assert run_ranks(2, enter, tmp_path / "run", 0.0) == ["alone"] * 2  # closed with the file


def test_a_run_that_was_started_again_waits_for_the_attempt_before(tmp_path: Path) -> None:
    file = os.open(tmp_path / NAME, os.O_RDWR | os.O_CREAT)
    fcntl.flock(file, fcntl.LOCK_EX)
    end = threading.Timer(1.5, os.close, [file])
    end.start()
    assert run_ranks(2, enter, tmp_path, 60.0) == ["alone"] * 2
    end.join()


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = run_ranks(2, enter, tmp_path / "file", 0.0)
    assert found[0] == found[1] and "cannot be written: " in found[0]
