"""examples/pretrain_gpt.sh as users start it: signals, dead ranks, exit codes."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("jsonargparse")
from tests.examples.small_run import SMALL, layout

psutil = pytest.importorskip("psutil")

pytestmark = pytest.mark.megatron
SIZES = layout(tensor_model=1, pipeline_model=1, ulysses=2)  # not the demonstration's
ROOT = Path(__file__).resolve().parents[2]


class Launch:
    """A started run; its output is read line by line."""

    def __init__(self, argv: list[str], processes: int) -> None:
        bin_ = Path(sys.executable).parent
        self.process = subprocess.Popen(
            [ROOT / "examples" / "pretrain_gpt.sh", *argv],
            env={**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "PYTHON": sys.executable,
                 "NPROC_PER_NODE": str(processes)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        self.lines: list[str] = []

    def read_until(self, text: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if text in line:
                return line
        raise AssertionError(f"{text!r} did not come:\n{''.join(self.lines)}")

    def finish(self, timeout: float) -> tuple[int, str]:
        rest, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, "".join(self.lines) + rest

    def ranks(self) -> list["psutil.Process"]:
        """The processes that torchrun has started, by local rank."""
        found = [
            (p.environ()["LOCAL_RANK"], p)
            for p in psutil.Process(self.process.pid).children(recursive=True)
            if "LOCAL_RANK" in p.environ() and p.parent().environ().get("LOCAL_RANK") is None
        ]
        return [p for _, p in sorted(found, key=lambda pair: pair[0])]


@contextmanager
def launched(argv: list[str], processes: int = 2) -> Iterator[Launch]:
    launch = Launch(argv, processes)
    try:
        yield launch
    finally:
        if launch.process.poll() is None:
            os.killpg(launch.process.pid, signal.SIGKILL)


def checkpoints(output: Path) -> list[str]:
    return sorted(p.name for p in (output / "checkpoints").iterdir())


def test_sigterm_saves_and_a_dead_rank_does_not(small_data: Path, tmp_path: Path) -> None:
    endless = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={tmp_path}", *SIZES,
               "--training.train_iters=1000000", "--checkpoint.interval=1000000",
               "--evaluation.interval=0"]  # fmt: skip
    with launched(endless) as run:
        run.read_until("iteration        3/")
        run.process.send_signal(signal.SIGTERM)
        code, output = run.finish(60)
        assert code == 0, output
        assert "SIGTERM after iteration" in output and "stopped by SIGTERM" in output
        assert "Traceback" not in output
    stopped_at = int((tmp_path / "checkpoints/latest_checkpointed_iteration.txt").read_text())
    assert stopped_at >= 3
    names = [f"iter_{stopped_at:07d}", "latest_checkpointed_iteration.txt"]
    assert checkpoints(tmp_path) == names
    run_json = json.loads((tmp_path / "checkpoints" / names[0] / "run.json").read_text())
    assert run_json["consumed_samples"] == stopped_at * 8

    with launched(endless) as run:  # continues, and loses a rank
        assert f"continuing after iteration {stopped_at}, " in run.read_until("loaded ")
        run.read_until(f"iteration {stopped_at + 2:8d}/")
        started = time.monotonic()
        run.ranks()[1].send_signal(signal.SIGKILL)
        code, output = run.finish(60)
        assert code != 0 and "saved" not in output, output
        assert time.monotonic() - started < 45
    assert checkpoints(tmp_path) == names


def test_a_users_mistake_is_one_error_before_anything_starts(tmp_path: Path) -> None:
    with launched([*SMALL, *SIZES, f"--data.path=[{tmp_path}/none]"]) as run:
        code, output = run.finish(60)
    assert code == 2 and output.startswith("error: ") and "none" in output
    assert "Traceback" not in output and len(output.splitlines()) == 1


def one_rank(data: Path, output: Path, *options: str) -> subprocess.CompletedProcess[str]:
    argv = [*SMALL, *layout(), f"--data.path=[{data}/text]", f"--output={output}", *options]
    return subprocess.run(
        [sys.executable, ROOT / "examples" / "pretrain_gpt.py", *argv],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=180,
    )  # fmt: skip


def test_a_second_run_in_the_same_output_is_refused(small_data: Path, tmp_path: Path) -> None:
    with (tmp_path / ".run.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        done = one_rank(small_data, tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done
    assert f"error: another run (starting) writes to output {tmp_path}" in done.stderr
    assert not (tmp_path / "checkpoints").exists()


def test_a_run_that_is_not_finite_ends_with_1(small_data: Path, tmp_path: Path) -> None:
    """The only update overflows: no loss has seen it yet when the checkpoint is due."""
    options = "--training.train_iters=1", "--optimizer.lr_warmup_iters=0"
    done = one_rank(small_data, tmp_path, *options, "--optimizer.weight_decay=1e38",
                    "--optimizer.lr=1000")  # fmt: skip
    assert done.returncode == 1 and "Traceback" not in done.stderr, done
    assert "error: not finite after the update of iteration 1: rank 0: parameter" in done.stderr
    assert not (tmp_path / "checkpoints").exists()
