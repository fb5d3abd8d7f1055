"""Sends and receives of views, all under way together: nothing to unpack where they gather.

A backend that joins messages into one kernel (NCCL) gets them as one coalesced batch. Any other
(gloo) works on a message from the moment it has it: each is sent while what was packed for it is
still in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .memory import Cut, bundles, empty, in_memory_order, scratch, sum_dtype
from .plan import plan_gather, plan_scatter


def gather_by_messages(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    batch_first: bool,
) -> tuple[torch.Tensor, ...]:
    """[s_r, b, h, d] -> [s, b, h_r, d]."""
    messages, rank = _Messages(group), group.rank()
    # Tensors of the same tokens are one message to a peer, where a range of columns is as good as
    # contiguous to every kernel (b = 1). Messages that are joined anyway gain nothing by that.
    together = tensors[0].size(1) == 1 and not messages.joined
    bundled = bundles(cuts) if together else [[number] for number in range(len(tensors))]
    plans = [
        plan_gather(
            tuple(cuts[i] for i in bundle),
            rank,
            tuple(tensors[i].shape for i in bundle),
            tuple(tensors[i].stride() for i in bundle),
            batch_first,
            messages.joined,
        )
        for bundle in bundled
    ]
    buffers = scratch(tensors[0], plans)
    rows = [empty(plan.rows, tensors[0], batch_first) for plan in plans]
    receives = [
        messages.receive(peer, view.of(whole))
        for plan, whole in zip(plans, rows, strict=True)
        for peer, view in plan.receives
    ]
    for plan, bundle, buffer in zip(plans, bundled, buffers, strict=True):
        for pack in plan.packs:
            for number, source, target in pack.copies:
                buffer[target].copy_(source.of(tensors[bundle[number]]))
            for peer, packed in pack.sends:
                messages.send(peer, buffer[packed])
    messages.start()
    results: dict[int, torch.Tensor] = {}
    for plan, bundle, whole in zip(plans, bundled, rows, strict=True):  # while they travel
        for number, source, place in plan.own:
            place.of(whole).copy_(source.of(tensors[bundle[number]]))
        for i, view in zip(bundle, plan.results, strict=True):
            results[i] = view.of(whole)
    messages.wait_for(receives)
    messages.finish()
    return tuple(results[i] for i in range(len(tensors)))


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
        plan_scatter(cut, rank, tensor.shape, batch_first, out_batch_first)
        for tensor, cut in zip(tensors, cuts, strict=True)
    ]
    buffers = scratch(tensors[0], plans)
    under_way = []
    for plan, tensor, buffer in zip(plans, tensors, buffers, strict=True):
        under_way += [
            [messages.receive(peer, buffer[number]) for peer, number in arrival.receives]
            for arrival in plan.arrivals
        ]
        for peer, view in plan.sends:
            messages.send(peer, view.of(tensor))
    messages.start()
    arriving = iter(under_way)
    results = []
    for plan, cut, tensor, buffer in zip(plans, cuts, tensors, buffers, strict=True):
        result = empty(plan.result, tensor, out_batch_first, sum_dtype(cut, tensor))
        for arrival in plan.arrivals:
            messages.wait_for(next(arriving))
            for target, part, add in arrival.moves:
                if add:
                    target.of(result).add_(part.of(tensor, buffer))
                else:
                    target.of(result).copy_(part.of(tensor, buffer))
            for target, parts in arrival.joins:
                here = [part.of(tensor, buffer) for part in parts]
                torch.cat(here, 2, out=target.of(result))
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
            self._under_way.append(self.group.send([block], peer, 0))

    def receive(self, peer: int, block: torch.Tensor) -> dist.Work | None:
        """What `wait_for` takes. gloo lets no one wait twice."""
        if self.joined:
            self._batch.append(dist.P2POp(dist.irecv, block, group=self.group, group_peer=peer))
            return None
        return self.group.recv([block], peer, 0)

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
