"""torchrun, as users start it, on one machine or on what looks like two."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

psutil = pytest.importorskip("psutil")

ROOT = Path(__file__).resolve().parents[2]


class Agent:
    """One node's torchrun; what it and its ranks print goes to `log`."""

    def __init__(
        self, argv: Sequence[str], log: Path, prefix: Sequence[str] = (), **env: str
    ) -> None:
        self.log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "torch.distributed.run", *argv],
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env},
                stdout=out, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT,
            )  # fmt: skip

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while text not in self.output():
            assert self.process.poll() is None, f"ended before {text!r}:\n{self.output()}"
            assert time.monotonic() < deadline, f"{text!r} did not come:\n{self.output()}"
            time.sleep(0.2)

    def wait(self, timeout: float) -> int:
        return self.process.wait(timeout)


@contextmanager
def agents(*started: Agent) -> Iterator[None]:
    """Ends them, whatever happens."""
    try:
        yield
    finally:
        for agent in started:
            end(agent)


def end(agent: Agent) -> None:
    """By SIGKILL, together with its ranks."""
    if agent.process.poll() is None:
        family = psutil.Process(agent.process.pid).children(recursive=True)
        for process in [agent.process, *family]:  # ranks have sessions of their own
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        agent.process.wait()
