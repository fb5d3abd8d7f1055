"""Runs on every rank: checks, counts and times the contenders of a case, interleaved."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from tests.support.copies import count_copies
from tests.support.wire import count_wire

from .cases import Case
from .contenders import CONTENDERS, FLOOR, NOT_PEERS, Refused, Step


@dataclass
class Row:
    """What one contender did in one case. Ratios are medians of the rounds' own ratios.

    Attributes:
        refuses: why it does not run, or None.
        exchanges: collectives, or messages under way together, forward and backward.
        bytes_ratio: bytes received by all ranks, both passes, over the least possible.
        copies: bytes written by copies outside the local attention, both passes, in local Qs.
        memory: peak of what is allocated during both passes, results included, in local Qs.
        forward, both: wall time over the floor's of the same round.
        cpu: processor time of all ranks over the floor's, both passes.
        milliseconds: median wall time of both passes.
    """

    name: str
    refuses: str | None = None
    exchanges: int = 0
    bytes_ratio: float = 0.0
    copies: float = 0.0
    memory: float = 0.0
    forward: float = 0.0
    both: float = 0.0
    cpu: float = 0.0
    milliseconds: float = 0.0


class Runner:
    """A contender's step with its inputs: `forward()` and `both()`."""

    def __init__(self, step: Step, inputs: list[torch.Tensor]) -> None:
        self.step = step
        *qkv, self.gradient = inputs
        prepare = getattr(step, "prepare", None)
        self.leaves = qkv if prepare is None else prepare(*qkv)

    def forward(self) -> torch.Tensor:
        return self.step(*self.leaves)

    def both(self) -> list[torch.Tensor]:
        """Output and gradients; not `.grad`, which would copy what the floor has prepared."""
        out = self.forward()
        return [out, *torch.autograd.grad(out, self.leaves, self.gradient)]

    def results(self) -> list[torch.Tensor]:
        """As `both`, with a gradient for each of q, k, v."""
        out, *gradients = self.both()
        return [out, *(gradients[0].unbind(2) if len(gradients) == 1 else gradients)]


def measure(case: Case, names: list[str], rounds: int) -> list[dict[str, Any]]:
    """All contenders of a case. Every rank calls it; the rows are complete on rank 0."""
    group = dist.group.WORLD
    rows = {name: Row(name) for name in names}
    runners: dict[str, Runner] = {}
    for name in names:
        rows[name].refuses = _refusal(name, case, group)
        if rows[name].refuses is None:
            _count(name, case, group, rows[name])
            step = CONTENDERS[name](case, group, lambda function: function)
            runners[name] = Runner(step, case.inputs(group.rank()))
    _time(runners, rows, rounds)
    return [asdict(row) for row in rows.values()]


def _refusal(name: str, case: Case, group: dist.ProcessGroup) -> str | None:
    """Runs a small case of the same heads, and compares with one process where possible."""
    small = replace(case, local_tokens=8, attention="sdpa")
    problem = None
    try:
        step = CONTENDERS[name](small, group, lambda function: function)
        runner = Runner(step, small.inputs(group.rank()))
        results = runner.results()
        real = name not in NOT_PEERS[:2]  # with prepared buffers nothing real travels
        if real and not _is_right(small, group.rank(), results):
            problem = "wrong result"
    except (Refused, ValueError, AssertionError, RuntimeError, NotImplementedError) as error:
        problem = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    problems: list[str | None] = [None] * group.size()
    dist.all_gather_object(problems, problem)
    return next((text for text in problems if text), None)


def _is_right(case: Case, rank: int, results: list[torch.Tensor]) -> bool:
    """Against attention over the whole sequence in one process, float64."""
    per_rank = [[t.detach().double() for t in case.inputs(r)] for r in range(case.ranks)]
    q, k, v, gradient = (torch.cat(parts, 1) for parts in zip(*per_rank, strict=True))
    leaves = [t.transpose(1, 2).requires_grad_() for t in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True).transpose(1, 2)
    out.backward(gradient)
    expected = [out, *(leaf.grad.transpose(1, 2) for leaf in leaves if leaf.grad is not None)]
    mine = slice(rank * case.local_tokens, (rank + 1) * case.local_tokens)
    return all(
        right[:, mine].shape == result.shape
        and torch.allclose(right[:, mine], result.double(), rtol=1e-5, atol=1e-5)
        for right, result in zip(expected, results, strict=True)
    )


def _count(name: str, case: Case, group: dist.ProcessGroup, row: Row) -> None:
    """Exchanges, bytes, copies and memory of one step."""
    with count_copies() as copies:
        step = CONTENDERS[name](case, group, copies.uncounted)
        runner = Runner(step, case.inputs(group.rank()))
        runner.both()  # makes what it keeps
        copies.by_op.clear()
        runner.both()
    row.copies = copies.bytes / case.local_q_bytes

    runner = Runner(
        CONTENDERS[name](case, group, lambda function: function), case.inputs(group.rank())
    )
    runner.both()
    with count_wire() as wire:
        runner.both()
    row.exchanges = wire.exchanges
    received = torch.tensor(float(wire.bytes_received), dtype=torch.float64)
    dist.all_reduce(received)
    row.bytes_ratio = received.item() / case.bound_bytes
    row.memory = _peak_bytes(runner) / case.local_q_bytes


def _peak_bytes(runner: Runner) -> int:
    """Peak of the bytes allocated since the step began, by the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        keep = runner.both()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    sizes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    del keep
    now = peak = 0
    for _, size in sizes:
        now += size
        peak = max(peak, now)
    return peak


def _time(runners: dict[str, Runner], rows: dict[str, Row], rounds: int) -> None:
    """Round-robin, starting with another contender every round; two rounds to warm up."""
    names = list(runners)
    forward: dict[str, list[float]] = {name: [] for name in names}
    both: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    for number in range(rounds + 2):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            wall_forward, _ = _clock(runners[name].forward)
            wall_both, processor = _clock(runners[name].both)
            if number >= 2:
                forward[name].append(wall_forward)
                both[name].append(wall_both)
                cpu[name].append(processor)
    gc.enable()
    for name in names:
        row = rows[name]
        row.forward = _median_ratio(forward[name], forward[FLOOR])
        row.both = _median_ratio(both[name], both[FLOOR])
        row.cpu = _median_ratio(cpu[name], cpu[FLOOR])
        row.milliseconds = 1e3 * statistics.median(both[name])


def _clock(function: Callable[[], Any]) -> tuple[float, float]:
    """Wall seconds until the slowest rank is done, processor seconds of all ranks."""
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    function()
    used = torch.tensor([time.process_time() - processor])
    dist.barrier()
    wall = time.perf_counter() - wall
    dist.all_reduce(used)
    return wall, used.item()


def _median_ratio(values: list[float], floor: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(values, floor, strict=True))
