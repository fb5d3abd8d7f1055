"""Sends and receives of views, all under way together: nothing to unpack where they gather.

A backend that joins messages into one kernel (NCCL) gets them as one coalesced batch. Any other
(gloo) works on a message from the moment it has it: each is sent while what was packed for it is
still in the processor's cache. With small tensors it is Python that takes the time, so what a
step does is a plan that is found once, and followed here in few words.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .memory import Cut, scratch, sum_dtype
from .plan import plan_gathers, plan_scatters


def gather_by_messages(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """[s_r, b, h, d] -> [s, b, h_r, d]."""
    batch = _Batch(group) if _joins_messages(group) else None
    wire = batch or group
    shapes = tuple([tensor.shape for tensor in tensors])
    strides = tuple([tensor.stride() for tensor in tensors])
    plans = plan_gathers(tuple(cuts), group.rank(), shapes, strides, batch_first, batch is not None)
    buffers = scratch(tensors[0], plans)
    rows, receives, sends = [], [], []
    for plan in plans:
        whole = tensors[0].new_empty(plan.rows)
        arriving = plan.arriving.of(whole)
        receives += [wire.recv([arriving[number]], peer, 0) for peer, number in plan.receives]
        rows.append(whole)
    sources = [
        [views.of(tensors[i]) for i, views in zip(plan.bundle, plan.sources, strict=True)]
        for plan in plans
    ]
    for plan, source, buffer in zip(plans, sources, buffers, strict=True):
        for pack in plan.packs:
            for tensor, number, target in pack.copies:
                buffer[target].copy_(source[tensor][number])
            sends += [wire.send([buffer[packed]], peer, 0) for peer, packed in pack.sends]
    if batch is not None:
        batch.start()
    results: dict[int, torch.Tensor] = {}
    for plan, source, whole in zip(plans, sources, rows, strict=True):
        for tensor, number, place in plan.own:  # while they travel
            whole.as_strided(*place).copy_(source[tensor][number])
        for i, view in zip(plan.bundle, plan.results, strict=True):
            results[i] = whole.as_strided(*view)
    for work in reversed(receives):  # the last first: one wait for most of them
        work.wait()
    for work in sends:
        work.wait()
    return tuple([results[i] for i in range(len(tensors))])


def scatter_by_messages(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """[s, b, h_r, d] -> [s_r, b, h, d], replicas summed."""
    batch = _Batch(group) if _joins_messages(group) else None
    wire = batch or group
    tensors = [tensor.contiguous() for tensor in tensors]
    first, shapes = tensors[0], tuple([tensor.shape for tensor in tensors])
    plans = plan_scatters(
        tuple(cuts), group.rank(), shapes, first.itemsize, batch_first, batch is not None
    )
    buffers = scratch(first, plans)
    arriving = [
        [wire.recv([buffer[number]], peer, 0) for peer, number in arrival.receives]
        for plan, buffer in zip(plans, buffers, strict=True)
        for arrival in plan.arrivals
    ]
    owns = [[plan.own.of(tensors[i]) for i in plan.bundle] for plan in plans]
    sends = []
    for plan, own, buffer in zip(plans, owns, buffers, strict=True):
        sends += [wire.send([own[0][number]], peer, 0) for peer, number in plan.sends]
        for peer, packed, sources in plan.packs:
            parts = [own[i][number] for i, number in sources]
            torch.cat(parts, int(batch_first), out=buffer[packed])
            sends.append(wire.send([buffer[packed]], peer, 0))
    if batch is not None:
        batch.start()
    works = iter(arriving)
    found: dict[int, torch.Tensor] = {}
    for plan, own, buffer in zip(plans, owns, buffers, strict=True):
        dtype = sum_dtype(cuts[plan.bundle[0]], first)
        results = [first.new_empty(plan.result, dtype=dtype) for _ in plan.bundle]
        for arrival in plan.arrivals:
            for work in reversed(next(works)):
                work.wait()
            result, mine = results[arrival.tensor], own[arrival.tensor]
            for target, part, add in arrival.moves:
                if add:
                    result.as_strided(*target).add_(part.of(mine, buffer))
                else:
                    result.as_strided(*target).copy_(part.of(mine, buffer))
            for target, side_by_side in arrival.joins:
                parts = [part.of(mine, buffer) for part in side_by_side]
                torch.cat(parts, 2, out=result.as_strided(*target))
        for i, result in zip(plan.bundle, results, strict=True):
            found[i] = result if dtype == first.dtype else result.to(first.dtype)
    for work in sends:
        work.wait()
    return tuple([found[i] for i in range(len(tensors))])


class _Batch:
    """Takes messages as a group does, and gives them to it as one batch."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._messages: list[dist.P2POp] = []
        self._under_way: list[dist.Work] = []

    def send(self, block: list[torch.Tensor], peer: int, tag: int) -> _Batch:
        self._messages.append(
            dist.P2POp(dist.isend, block[0], group=self.group, group_peer=peer, tag=tag)
        )
        return self

    def recv(self, block: list[torch.Tensor], peer: int, tag: int) -> _Batch:
        self._messages.append(
            dist.P2POp(dist.irecv, block[0], group=self.group, group_peer=peer, tag=tag)
        )
        return self

    def start(self) -> None:
        if self._messages:  # a rank without tokens and without heads has nothing to say
            self._under_way = [*dist.batch_isend_irecv(self._messages)]

    def wait(self) -> None:
        """For all of them, whichever is asked for first."""
        under_way, self._under_way = self._under_way, []
        for work in under_way:
            work.wait()


def _joins_messages(group: dist.ProcessGroup) -> bool:
    """Whether the backend makes one kernel of a batch of messages."""
    return dist.get_backend(group) != "gloo"
