"""Times collectives on real ranks, by size. Runs under torchrun, or starts the ranks itself."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from ..planning.link_fit import OPERATIONS, bytes_sent

TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Plan:
    """What to measure: buffer sizes in bytes, calls of each, and over which backend."""

    backend: str
    sizes: tuple[int, ...]
    repeats: int = 7


@dataclass(frozen=True)
class Result:
    """(bytes sent by a rank, seconds) by operation: the slowest rank's, best of the calls."""

    backend: str
    device: str
    ranks: int
    nodes: int
    points: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


def under_torchrun() -> bool:
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()


def measure_here(plan: Plan) -> Result | None:
    """This process is a rank of torchrun's. Returns the result on rank 0, None elsewhere."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if plan.backend == "nccl":
        torch.cuda.set_device(local)
    dist.init_process_group(plan.backend, timeout=TIMEOUT)
    try:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size())))
        result = _measure(plan, -(-dist.get_world_size() // per_node))
        return result if dist.get_rank() == 0 else None
    finally:
        dist.destroy_process_group()


def measure_spawned(plan: Plan, ranks: int) -> Result:
    """Starts `ranks` processes on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_spawned, (plan, ranks, folder), nprocs=ranks)
        saved: dict[str, Any] = torch.load(Path(folder) / "result", weights_only=True)
    return Result(**saved)


def _spawned(rank: int, plan: Plan, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    if plan.backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        plan.backend, f"file://{folder}/store", rank=rank, world_size=ranks, timeout=TIMEOUT
    )
    try:
        result = _measure(plan, 1)
        if rank == 0:
            torch.save(vars(result), Path(folder) / "result")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _measure(plan: Plan, nodes: int) -> Result:
    ranks = dist.get_world_size()
    device = torch.device("cuda" if plan.backend == "nccl" else "cpu")
    points: dict[str, list[tuple[float, float]]] = {name: [] for name in OPERATIONS}
    for size in plan.sizes:
        count = max(size // 4 // ranks, 1) * ranks  # float32, a whole number for each rank
        for name in OPERATIONS:
            seconds = _seconds(_operation(name, count, ranks, device), plan.repeats, device)
            points[name].append((bytes_sent(name, 4 * count, ranks), seconds))
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return Result(plan.backend, name, ranks, nodes, points)


def _operation(name: str, count: int, ranks: int, device: torch.device) -> Callable[[], Any]:
    """A call of one operation on buffers of `count` elements."""
    whole, other = torch.ones(count, device=device), torch.empty(count, device=device)
    part = torch.ones(count // ranks, device=device)
    rank = dist.get_rank()
    # The name since torch 2.13, and the one before.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    after, before = (rank + 1) % ranks, (rank - 1) % ranks

    def p2p() -> None:
        ops = [dist.P2POp(dist.isend, whole, after), dist.P2POp(dist.irecv, other, before)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return {
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "all_gather": lambda: gather(other, part),
        "all_reduce": lambda: dist.all_reduce(whole),
        "p2p": p2p,
    }[name]


def _seconds(call: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """The slowest rank's time, in the best of the calls: what else runs here is not the link's."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        dist.barrier()
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times.append(float(slowest.item()))
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
