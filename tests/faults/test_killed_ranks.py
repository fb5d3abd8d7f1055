"""A rank dies by SIGKILL in any phase of a step: the others say who, and nothing is lost."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("jsonargparse")
import torch.distributed as dist

from tests.examples.small_run import SMALL, layout
from tests.examples.test_training import losses, train
from tests.faults.killing import PHASES, Kill, arm, broken_checkpoints
from tests.support.pool import RankFailure, run_ranks

pytestmark = pytest.mark.megatron

RANKS, SIZES = 4, layout(pipeline_model=2, ulysses=2)
# One in each phase: `make faults` sets 10.
SEEDS = range(int(os.environ.get("FAULT_SEEDS", "1")))
TESTED = os.environ.get("FAULT_PHASES", " ".join(PHASES)).split()
TIMEOUT = 90 if len(SEEDS) == 1 else 300  # seconds for a run; many are for busy machines too
OPTIONS = [*SMALL, *SIZES, "--evaluation.interval=0", "--checkpoint.interval=2",
           "--training.train_iters=8", "--batch.global_batch_size=4",
           "--model.num_layers=2"]  # fmt: skip


def watched_train(
    argv: list[str], kill: Kill | None, messages: Path | None = None
) -> list[dict[str, Any]]:
    """One rank, as `pretraining.run.run` has it: a survivor says why and ends."""
    from examples.pretraining import checkpoint, trainer
    from examples.pretraining.liveness import RankLost, watched

    if kill is not None and kill.rank == dist.get_rank():
        arm(kill, {"trainer": trainer, "checkpoint": checkpoint})
    try:
        with watched(timeout_minutes=5):
            return train(argv)
    except RankLost as lost:
        assert messages is not None
        (messages / str(dist.get_rank())).write_text(str(lost))
        os._exit(1)


def kills(seed: int) -> list[Kill]:
    """One in each phase. Checkpoints are at 2, 4, 6 and 8; each run goes on from the last one."""
    draw = random.Random(seed)
    iterations = {"forward": 4, "backward": 4, "optimizer": 4, "save": 8}
    all_of_them = [Kill(draw.randrange(RANKS), p, iterations[p], draw.random()) for p in PHASES]
    return [kill for kill in all_of_them if kill.phase in TESTED]


@pytest.fixture(scope="module")
def uninterrupted(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    argv = [*OPTIONS, f"--data.path=[{small_data}/text]"]
    output = tmp_path_factory.mktemp("uninterrupted")
    return losses(
        run_ranks(RANKS, watched_train, [*argv, f"--output={output}"], None, timeout=TIMEOUT)[0]
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_in_every_phase(
    uninterrupted: dict[int, float], small_data: Path, tmp_path: Path, seed: int
) -> None:
    argv = [*OPTIONS, f"--data.path=[{small_data}/text]", f"--output={tmp_path}"]
    for kill in kills(seed):
        messages, killed = tmp_path / kill.phase, tmp_path / f"{kill.phase}-killed"
        messages.mkdir()
        results = run_ranks(
            RANKS,
            watched_train,
            argv,
            kill,
            messages,
            timeout=TIMEOUT,
            grace=30,
            return_exceptions=True,
            env={"KILLED_AT": str(killed)},
        )
        for rank, result in enumerate(results):
            code = -signal.SIGKILL if rank == kill.rank else 1
            assert isinstance(result, RankFailure)
            assert f"exit code {code}." in str(result), str(result)
            if rank != kill.rank:
                message = (messages / str(rank)).read_text()
                print(message)
                assert f"rank {rank}: rank {kill.rank} is missing" in message
                for name, ranks in shared_groups(rank, kill.rank).items():
                    assert f"{name} {ranks}" in message
        said_after = max(p.stat().st_mtime for p in messages.iterdir()) - killed.stat().st_mtime
        print(f"{kill}: all survivors had ended {said_after:.1f} s later")
        assert broken_checkpoints(tmp_path / "checkpoints") == []
    records = run_ranks(RANKS, watched_train, argv, None, timeout=TIMEOUT)[0]
    assert losses(records) == uninterrupted
    names = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    expected = [f"iter_{n:07d}" for n in (2, 4, 6, 8)] + ["latest_checkpointed_iteration.txt"]
    assert names == expected  # nothing half-written is left behind


def shared_groups(rank: int, other: int) -> dict[str, list[int]]:
    """Of pp2 x ulysses2: Ulysses [0, 1] and [2, 3], pipeline [0, 2] and [1, 3]."""
    groups = {
        "ulysses": [rank // 2 * 2, rank // 2 * 2 + 1],
        "pp": [rank % 2, rank % 2 + 2],
        "all ranks": [0, 1, 2, 3],
    }
    return {name: ranks for name, ranks in groups.items() if other in ranks}


def processes_started(argv: list[str]) -> list[str]:
    from multiprocessing.process import BaseProcess

    started, start = list[str](), BaseProcess.start

    def noted(process: BaseProcess) -> None:
        started.append(repr(process))
        start(process)

    BaseProcess.start = noted  # type: ignore[method-assign]
    try:
        train(argv)
    finally:
        BaseProcess.start = start  # type: ignore[method-assign]
    return started


def test_a_checkpoint_is_written_without_other_processes(small_data: Path, tmp_path: Path) -> None:
    """They would be forked beside the threads of gloo and of liveness, or be slow to start."""
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={tmp_path}",
            "--training.train_iters=1", "--evaluation.interval=0"]  # fmt: skip
    assert run_ranks(1, processes_started, argv) == [[]]
    assert (tmp_path / "checkpoints/iter_0000001/manifest.json").is_file()


def one_rank_meets_wrong_input(messages: Path) -> None:
    from examples.pretraining.errors import SeenByOneRank
    from examples.pretraining.liveness import watched

    try:
        with watched(timeout_minutes=5):
            if dist.get_rank() == 1:
                raise SeenByOneRank("sample 3 holds token 99")
            dist.barrier()
    except Exception as error:
        (messages / str(dist.get_rank())).write_text(str(error))
        os._exit(1)


def test_what_one_rank_alone_refuses_is_told_by_the_others(tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        run_ranks(2, one_rank_meets_wrong_input, tmp_path, timeout=60)
    assert (tmp_path / "1").read_text() == "sample 3 holds token 99"
    said = (tmp_path / "0").read_text()
    assert "rank 1 failed first, by SeenByOneRank: sample 3 holds token 99" in said
