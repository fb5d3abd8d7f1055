"""SIGKILL of this process at a chosen moment of a training run."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHASES = ("forward", "backward", "optimizer", "save")
NEVER = 1 << 62


@dataclass(frozen=True)
class Kill:
    """Which rank dies, and when.

    Args:
        moment: 0 to 1, how far the phase has come: counted in calls of Python and C functions,
            of which there are about as many as in the step (or save) before.
        iteration: of the step in which, or after which (phase "save"), it dies; it must not be the
            first one of the process.
    """

    rank: int
    phase: str
    iteration: int
    moment: float


class _Counter:
    """Counts calls inside the phase, and ends the process at one of them."""

    def __init__(self, kill: Kill) -> None:
        self.kill, self.calls, self.last = kill, 0, NEVER

    def new_step(self, iteration: int) -> None:
        before, self.calls, self.last = self.calls, 0, NEVER
        if iteration == self.kill.iteration:
            assert before, "no step before this one to count calls in"
            self.last = max(1, int(before * self.kill.moment))

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            threading.setprofile(self._event)  # of those that start now: they write checkpoints
            sys.setprofile(self._event)
            try:
                return function(*args, **kwargs)
            finally:
                sys.setprofile(None)
                threading.setprofile(None)  # type: ignore[arg-type]

        return counted

    def _event(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            self.calls += 1
            if self.calls >= self.last:
                self.die()

    def end_step(self) -> None:
        """There were fewer calls than in the step before."""
        if self.last < NEVER:
            self.die()

    def die(self) -> None:
        self.last = NEVER
        if moment := os.environ.get("KILLED_AT"):
            Path(moment).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def arm(kill: Kill, modules: dict[str, Any]) -> None:
    """For the rest of this process.

    Args:
        modules: "trainer" and "checkpoint" of the example, under whatever name it was imported.
    """
    from megatron.core.pipeline_parallel import schedules

    counter, trainer_class = _Counter(kill), modules["trainer"].Trainer
    step, save = trainer_class.train_step, modules["checkpoint"].save

    def counted_step(self: Any) -> Any:
        if kill.phase != "save":
            counter.new_step(self.progress.iteration + 1)
        if kill.phase == "optimizer" and "step" not in vars(self.optimizer):
            self.optimizer.step = counter.around(self.optimizer.step)
        result = step(self)
        counter.end_step()
        return result

    def counted_save(config: Any, shape: Any, progress: Any, *rest: Any) -> Any:
        counter.new_step(progress.iteration)
        path = counter.around(save)(config, shape, progress, *rest)
        counter.end_step()
        return path

    trainer_class.train_step = counted_step
    if kill.phase == "forward":
        trainer_class.forward_step = counter.around(trainer_class.forward_step)
    elif kill.phase == "backward":
        schedules.backward_step = counter.around(schedules.backward_step)
    elif kill.phase == "save":
        modules["checkpoint"].save = counted_save


def broken_checkpoints(folder: Path) -> list[str]:
    """What is wrong with the checkpoints below `folder`, read without the example's code."""
    if not folder.is_dir():
        return []
    wrong = []
    whole = [p for p in folder.iterdir() if p.name.startswith("iter_")]
    latest = folder / "latest_checkpointed_iteration.txt"
    if latest.exists():
        named = folder / f"iter_{int(latest.read_text()):07d}"
        if named not in whole:
            wrong.append(f"{latest.name} names {named.name}, which is not there")
    for path in whole:
        files = json.loads((path / "manifest.json").read_text())
        if not {"run.json", ".metadata"} < files.keys():
            wrong.append(f"{path.name}: files are missing from the manifest")
        for name, facts in files.items():
            content = (path / name).read_bytes() if (path / name).is_file() else b""
            if hashlib.sha256(content).hexdigest() != facts["sha256"]:
                wrong.append(f"{path.name}/{name} is not what was written")
    return wrong
