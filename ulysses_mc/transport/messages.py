"""Sends and receives of views, all under way together: nothing to unpack where they gather.

A backend that joins messages into one kernel (NCCL) gets them as one coalesced batch. Any other
(gloo) works on a message from the moment it has it: each is sent while what was packed for it is
still in the processor's cache, and used when it has arrived, not when all have.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .memory import Cut, empty, in_memory_order, scratch, sum_dtype
from .plan import plan_gather, plan_scatter


def gather_by_messages(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """[s_r, b, h, d] -> [s, b, h_r, d]."""
    messages, rank = _Messages(group), group.rank()
    plans = [
        plan_gather(cut, rank, tensor.shape, tensor.stride(), batch_first, messages.joined)
        for tensor, cut in zip(tensors, cuts, strict=True)
    ]
    buffers = scratch(tensors[0], [plan.scratch for plan in plans])
    results = [
        empty(plan.result, tensor, batch_first) for plan, tensor in zip(plans, tensors, strict=True)
    ]
    receives = [
        messages.receive(peer, view.of(result))
        for plan, result in zip(plans, results, strict=True)
        for peer, view in plan.receives
    ]
    for plan, tensor, buffer in zip(plans, tensors, buffers, strict=True):
        for pack in plan.packs:
            pack.target.of(buffer).copy_(pack.source.of(tensor))
            for peer, view in pack.sends:
                messages.send(peer, view.of(buffer))
    messages.start()
    for plan, tensor, result in zip(plans, tensors, results, strict=True):  # while they travel
        for target, source in plan.own:
            target.of(result).copy_(source.of(tensor))
    messages.wait_for(receives)
    messages.finish()
    return tuple(results)


def scatter_by_messages(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    batch_first: bool,
    out_batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """[s, b, h_r, d] -> [s_r, b, h, d], replicas summed."""
    messages, rank = _Messages(group), group.rank()
    tensors = [in_memory_order(tensor, batch_first) for tensor in tensors]
    plans = [
        plan_scatter(cut, rank, tensor.shape, batch_first, out_batch_first, messages.joined)
        for tensor, cut in zip(tensors, cuts, strict=True)
    ]
    buffers = scratch(tensors[0], [plan.scratch for plan in plans])
    under_way = []
    for plan, tensor, buffer in zip(plans, tensors, buffers, strict=True):
        under_way += [
            [messages.receive(peer, view.of(buffer)) for peer, view in arrival.receives or ()]
            for arrival in plan.arrivals
        ]
        for peer, view in plan.sends:
            messages.send(peer, view.of(tensor))
    messages.start()
    arriving = iter(under_way)
    results = []
    for plan, cut, tensor, buffer in zip(plans, cuts, tensors, buffers, strict=True):
        dtype = sum_dtype(cut, tensor)
        result = empty(plan.result, tensor, out_batch_first, dtype)
        for arrival in plan.arrivals:
            messages.wait_for(next(arriving))
            here = tensor if arrival.receives is None else buffer
            for target, source, add in arrival.moves:
                if add:
                    target.of(result).add_(source.of(here))
                else:
                    target.of(result).copy_(source.of(here))
        results.append(result.to(tensor.dtype))
    messages.finish()
    return tuple(results)


_Works = Sequence[dist.Work | None]


class _Messages:
    """The messages of one exchange, all receives of a tensor before its sends."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.joined = _joins_messages(group)
        self._batch: list[dist.P2POp] = []
        self._under_way: list[dist.Work | None] = []  # but for the receives that a caller waits for

    def send(self, peer: int, block: torch.Tensor) -> None:
        if self.joined:
            self._batch.append(dist.P2POp(dist.isend, block, group=self.group, group_peer=peer))
        else:
            self._under_way.append(dist.isend(block, group=self.group, group_dst=peer))

    def receive(self, peer: int, block: torch.Tensor) -> dist.Work | None:
        """What `wait_for` takes. gloo lets no one wait twice."""
        if self.joined:
            self._batch.append(dist.P2POp(dist.irecv, block, group=self.group, group_peer=peer))
            return None
        return dist.irecv(block, group=self.group, group_src=peer)

    def start(self) -> None:
        if self._batch:  # a rank without tokens and without heads has nothing to say
            self._under_way = [*dist.batch_isend_irecv(self._batch)]

    def wait_for(self, receives: _Works) -> None:
        if self.joined:
            self.finish()
        _wait(receives)

    def finish(self) -> None:
        """Until all has left, too."""
        under_way, self._under_way = self._under_way, []
        _wait(under_way)


def _joins_messages(group: dist.ProcessGroup) -> bool:
    """Whether the backend makes one kernel of a batch of messages."""
    return dist.get_backend(group) != "gloo"


def _wait(works: _Works) -> None:
    for work in works:
        if work is not None:
            work.wait()
