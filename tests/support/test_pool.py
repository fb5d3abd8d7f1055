"""The worker pool has teeth: deaths, hangs, wrong results and leaks are seen, and it recovers."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import RankFailure, run_ranks


class TwoPartError(ValueError):
    pass


def sum_of_ranks(offset: float, *, scale: float = 1.0) -> torch.Tensor:
    value = torch.full((3,), (dist.get_rank() + offset) * scale, dtype=torch.float64)
    dist.all_reduce(value)
    return value


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise TwoPartError("request", f"{rank} is wrong")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def a_function_that_sleeps(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(3600)
    dist.barrier()


def start_a_process_and_hang(path: str) -> None:
    child = subprocess.Popen(["sleep", "3600"], preexec_fn=os.setpgrp)  # a group of its own
    Path(path).write_text(str(child.pid))
    time.sleep(3600)


def change_everything() -> int:
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    torch.rand(5)
    return os.getpid()


def look_around() -> tuple[str | None, str | None, torch.dtype, bool, float, str, int]:
    return (
        os.environ.get("LEFT_BEHIND"),
        os.environ.get("GIVEN"),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        float(torch.rand(1).sum()),
        str(torch.empty(1).device),
        os.getpid(),
    )


def unpicklable() -> object:
    return lambda: None


def early_and_late() -> int:
    """Rank 0 ends at once; the others still read what it sent."""
    if dist.get_rank():
        time.sleep(0.3)
    value = torch.ones(1 << 20)
    dist.broadcast(value, 0)
    return int(value.sum())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_back_by_rank(world_size: int) -> None:
    results = run_ranks(world_size, sum_of_ranks, 1.0, scale=2.0)
    expected = torch.full((3,), float(world_size * (world_size + 1)), dtype=torch.float64)
    assert len(results) == world_size
    assert all(torch.equal(result, expected) for result in results)


def test_the_rank_that_failed_is_named_not_its_peers() -> None:
    with pytest.raises(TwoPartError, match="1 is wrong") as caught:
        run_ranks(3, raise_on, 1)
    assert caught.value.args == ("request", "1 is wrong")
    assert isinstance(caught.value.__cause__, RankFailure)
    assert "rank 1" in str(caught.value.__cause__)
    assert "raise_on" in str(caught.value.__cause__)


def test_exceptions_of_every_rank_on_request() -> None:
    results = run_ranks(2, raise_on, 0, return_exceptions=True)
    assert isinstance(results[0], TwoPartError)
    assert isinstance(results[1], Exception)


def test_a_rank_that_could_not_join_does_not_disturb_the_next_test() -> None:
    """PyTorch counts the groups that a process began: a rank whose first group failed would look
    for its peers under another name than theirs ever after."""
    with pytest.raises(Exception, match="MPI"):  # PyTorch is built without it
        run_ranks(1, sum_of_ranks, 0.0, backend="mpi")
    assert run_ranks(2, sum_of_ranks, 0.0)[1][0] == 1.0


def test_a_dying_rank_fails_the_test_and_the_pool_recovers() -> None:
    with pytest.raises(RankFailure, match=r"rank 2: The process died, exit code 7"):
        run_ranks(3, die_on, 2)
    assert run_ranks(3, sum_of_ranks, 0.0)[2][0] == 3.0


def test_a_hanging_rank_fails_within_the_timeout_with_its_stack() -> None:
    begin = time.monotonic()
    with pytest.raises(RankFailure, match=r"rank 1: Still running[\s\S]*a_function_that_sleeps"):
        run_ranks(2, a_function_that_sleeps, 1, timeout=3)
    assert time.monotonic() - begin < 3 + 5 + 5
    assert run_ranks(2, sum_of_ranks, 0.0)[0][0] == 1.0


def test_what_a_hanging_worker_started_ends_with_it(tmp_path: Path) -> None:
    with pytest.raises(RankFailure):
        run_ranks(1, start_a_process_and_hang, str(tmp_path / "pid"), timeout=2)
    child = Path("/proc") / (tmp_path / "pid").read_text() / "stat"
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_a_worker_leaks_nothing_into_the_next_test() -> None:
    clean = run_ranks(1, look_around)[0]
    dirty_pid = run_ranks(1, change_everything)[0]
    after = run_ranks(1, look_around)[0]
    assert clean[:-1] == after[:-1]
    assert after[0] is None and after[2] is torch.float32 and after[3] and after[5] == "cpu"
    assert after[-1] != dirty_pid  # it left a default device behind: replaced


def test_a_worker_is_kept() -> None:
    assert run_ranks(1, os.getpid) == run_ranks(1, os.getpid)


def test_env_is_given_for_one_call() -> None:
    assert run_ranks(1, look_around, env={"GIVEN": "yes"})[0][1] == "yes"
    assert run_ranks(1, look_around)[0][1] is None


def test_a_result_that_cannot_be_pickled_says_so() -> None:
    with pytest.raises(RankFailure, match="cannot be pickled"):
        run_ranks(1, unpicklable)


def test_a_rank_that_ends_early_does_not_disturb_the_others() -> None:
    assert run_ranks(3, early_and_late) == [1 << 20] * 3


def test_a_wrong_result_is_not_taken_for_a_right_one() -> None:
    with pytest.raises(AssertionError):
        run_ranks(2, assert_sum, 99.0)
    run_ranks(2, assert_sum, 1.0)


def assert_sum(expected: float) -> None:
    assert sum_of_ranks(0.0)[0] == expected
