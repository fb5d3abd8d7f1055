"""torchrun --max-restarts starts a run again after a SIGKILL, and it ends as if uninterrupted."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("jsonargparse")
from tests.examples.small_run import SMALL, layout
from tests.examples.test_training import losses, train
from tests.faults.killing import PHASES, Kill
from tests.faults.launching import Agent, agents
from tests.support.pool import run_ranks

pytestmark = pytest.mark.megatron

OPTIONS = [
    *SMALL, *layout(ulysses=2), "--evaluation.interval=0", "--checkpoint.interval=2",
    "--training.train_iters=8", "--batch.global_batch_size=4", "--logging.plot=false",
    "--model.num_layers=2",
]  # fmt: skip
# CI kills once; `make faults` in each phase of one job, in each of 10 jobs.
SEEDS = int(os.environ.get("FAULT_SEEDS", "0"))
MINUTES = 20 if SEEDS else 8  # a quiet machine takes 1 and 0.5


def kills(seed: int, phases: tuple[str, ...]) -> list[Kill]:
    draw = random.Random(1000 + seed)
    iterations = {"forward": 4, "backward": 4, "optimizer": 4, "save": 8}
    return [Kill(draw.randrange(2), p, iterations[p], draw.random()) for p in phases]


@pytest.fixture(scope="module")
def uninterrupted(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    argv = [*OPTIONS, f"--data.path=[{small_data}/text]"]
    argv.append(f"--output={tmp_path_factory.mktemp('uninterrupted')}")
    return losses(run_ranks(2, train, argv, timeout=90)[0])


@pytest.mark.parametrize("seed", range(SEEDS or 1))
def test_killed_and_restarted(
    uninterrupted: dict[int, float], small_data: Path, tmp_path: Path, seed: int
) -> None:
    planned = kills(seed, PHASES if SEEDS else ("save",))
    output = tmp_path / "run"
    agent = Agent(
        ["--standalone", "--nproc-per-node=2", f"--max-restarts={len(planned)}",
         "tests/faults/killed_run.py", *OPTIONS, f"--data.path=[{small_data}/text]",
         f"--output={output}"],
        tmp_path / "log",
        KILLS=json.dumps([[k.rank, k.phase, k.iteration, k.moment] for k in planned]),
        CHECKED=str(tmp_path / "checked"),
    )  # fmt: skip
    with agents(agent):
        code = agent.wait(60 * MINUTES)
    text = agent.output()
    assert code == 0, text
    for kill in planned:
        lost = f"error: rank {1 - kill.rank}: rank {kill.rank} is missing: killed, "
        assert lost in text, text
        assert f"groups of rank {1 - kill.rank} that cannot go on: ulysses [0, 1]" in text
    checked = [json.loads(line) for line in (tmp_path / "checked").read_text().splitlines()]
    assert checked == [[attempt, []] for attempt in range(len(planned) + 1)]
    records = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    assert losses(records) == uninterrupted
