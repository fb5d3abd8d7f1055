"""The verb: moves tensors between "split by sequence" and "split by heads".

One grouped exchange carries any number of tensors (Q, K and V; or O), differentiably. The
backward pass of each direction is the other direction, so a layer makes four exchanges per
step. Source: DeepSpeed-Ulysses, arXiv 2309.14509, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from . import transport
from .parallel_state.errors import ParallelConfigError
from .transport.memory import PLANS_KEPT, Cut

__all__ = ["Cut", "heads_to_sequence", "sequence_to_heads"]


@dataclass(frozen=True)
class _Route:
    """What both directions need to know, and what their backward passes hand to each other."""

    group: dist.ProcessGroup
    cuts: tuple[Cut, ...]
    batch_first: bool
    transport: str


def sequence_to_heads(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    *,
    batch_first: bool = False,
    transport: str = "auto",
) -> tuple[torch.Tensor, ...]:
    """Gathers the sequence and splits the heads of all `tensors` in one grouped exchange.

    =========  =======================================================
    forward    [s_r, b, h, d] -> [s, b, h_r, d]
    backward   [s, b, h_r, d] -> [s_r, b, h, d], summed over the ranks that held the same head
    =========  =======================================================

    Args:
        tensors: each [s_r, b, h, d] with any strides; h and d may differ between them.
        cuts: for each tensor its `SequenceLayout` and the heads of every rank.
        group: the Ulysses group.
        batch_first: all tensors, those given and those returned, are [b, s, h, d] instead.
        transport: 'p2p' (sends and receives under way together, no unpacking on arrival),
            'all_to_all' (one all_to_all_single over a packed buffer), or 'auto'.

    Raises:
        ParallelConfigError: a tensor does not have the shape that its cut says, or types differ.
    """
    cuts = tuple(cuts)
    _check(tensors, cuts, group, batch_first, by_heads=False)
    if group.size() == 1:  # all is here; at most the layout has the tokens in another order
        return tuple(
            tensor
            if cut.sequence.is_contiguous
            else cut.sequence.unshard([tensor], int(batch_first))
            for tensor, cut in zip(tensors, cuts, strict=True)
        )
    route = _Route(group, cuts, batch_first, transport)
    return tuple(_SequenceToHeads.apply(route, *tensors))  # type: ignore[no-untyped-call]


def heads_to_sequence(
    tensors: Sequence[torch.Tensor],
    cuts: Sequence[Cut],
    group: dist.ProcessGroup,
    *,
    batch_first: bool = False,
    transport: str = "auto",
) -> tuple[torch.Tensor, ...]:
    """Splits the sequence and gathers the heads of all `tensors` in one grouped exchange.

    The adjoint of `sequence_to_heads`: a head held by several ranks is summed over them.

    =========  =======================================================
    forward    [s, b, h_r, d] -> [s_r, b, h, d]
    backward   [s_r, b, h, d] -> [s, b, h_r, d]
    =========  =======================================================

    Arguments and errors as in `sequence_to_heads`; tensors that are not contiguous are copied
    first.
    """
    cuts = tuple(cuts)
    _check(tensors, cuts, group, batch_first, by_heads=True)
    if group.size() == 1:
        return tuple(
            tensor
            if cut.sequence.is_contiguous
            else cut.sequence.shard(tensor, int(batch_first), 0)
            for tensor, cut in zip(tensors, cuts, strict=True)
        )
    route = _Route(group, cuts, batch_first, transport)
    return tuple(_HeadsToSequence.apply(route, *tensors))  # type: ignore[no-untyped-call]


class _SequenceToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: _Route, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.route = route
        return _not_views(_gather(route, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _check_gradients(gradients)
        if _is_differentiated():
            return (None, *_HeadsToSequence.apply(ctx.route, *gradients))  # type: ignore[no-untyped-call]
        return (None, *_not_views(_scatter(ctx.route, gradients)))


class _HeadsToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: _Route, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.route = route
        return _not_views(_scatter(route, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _check_gradients(gradients)
        if _is_differentiated():
            return (None, *_SequenceToHeads.apply(ctx.route, *gradients))  # type: ignore[no-untyped-call]
        return (None, *_not_views(_gather(ctx.route, gradients)))


def _gather(route: _Route, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    gathered: tuple[torch.Tensor, ...] = transport.gather_sequence(
        tensors, route.cuts, route.group, route.batch_first, route.transport
    )
    return gathered


def _scatter(route: _Route, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    scattered: tuple[torch.Tensor, ...] = transport.scatter_sequence(
        tensors, route.cuts, route.group, route.batch_first, route.transport
    )
    return scattered


def _is_differentiated() -> bool:
    """Whether a backward pass is itself recorded (`create_graph`) or transformed (torch.func)."""
    transformed: bool = torch._C._are_functorch_transforms_active()
    return torch.is_grad_enabled() or transformed


def _check_gradients(gradients: Sequence[torch.Tensor]) -> None:
    """Refuses what cannot be sent, before others wait for it."""
    if torch.compiler.is_compiling():  # which batches none, and cannot trace the question
        return
    if any(torch._C._functorch.is_legacy_batchedtensor(gradient) for gradient in gradients):
        raise ParallelConfigError(
            "A backward pass of an exchange with is_grads_batched=True.",
            rule="messages are of one gradient: there is no batching rule for them",
            nearest="one call of torch.autograd.grad for each gradient.",
        )


def _not_views(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The same memory, as tensors that may be changed in place (`out += residual`): autograd
    refuses that for views that are made inside a Function, or without recording."""
    return tuple([tensor.data for tensor in tensors])


def check_one_type(tensors: Sequence[torch.Tensor]) -> None:
    """Refuses types that differ: a receiver makes room by its own tensors' type, and gloo takes a
    shorter message without a word."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        raise ParallelConfigError(
            f"One exchange of types {', '.join(str(tensor.dtype) for tensor in tensors)}.",
            rule="what travels in one exchange has one type, the same on every rank",
            nearest="key.to(query.dtype) and value.to(query.dtype), or torch.autocast.",
        )


def _check(
    tensors: Sequence[torch.Tensor],
    cuts: tuple[Cut, ...],
    group: dist.ProcessGroup,
    batch_first: bool,
    *,
    by_heads: bool,
) -> None:
    check_one_type(tensors)
    shapes = tuple([tensor.shape for tensor in tensors])
    # The compiler says of a cache that it looks through it.
    check = _check_shapes.__wrapped__ if torch.compiler.is_compiling() else _check_shapes
    check(shapes, cuts, group.rank(), group.size(), batch_first, by_heads)


@lru_cache(maxsize=PLANS_KEPT)  # what was right is not looked at again in every step
def _check_shapes(
    shapes: tuple[torch.Size, ...],
    cuts: tuple[Cut, ...],
    rank: int,
    size: int,
    batch_first: bool,
    by_heads: bool,
) -> None:
    for shape, cut in zip(shapes, cuts, strict=True):
        if (cut.sequence.group_size, len(cut.heads)) != (size, size):
            raise ParallelConfigError(
                f"An exchange over a group of {size} ranks with a sequence layout for "
                f"{cut.sequence.group_size} and a head layout for {len(cut.heads)}.",
                rule="layouts are built for the size of the Ulysses group",
            )
        if by_heads:
            expected = (cut.sequence.sequence_length, len(cut.heads[rank]))
        else:
            expected = (cut.sequence.lengths[rank], cut.num_heads)
        if len(shape) != 4 or (shape[int(batch_first)], shape[2]) != expected:
            raise ParallelConfigError(
                f"Rank {rank} of {size} gave a tensor of shape {list(shape)} "
                f"to {'heads_to_sequence' if by_heads else 'sequence_to_heads'}.",
                f"Its layout says {expected[0]} tokens and {expected[1]} heads: "
                f"{f'[b, {expected[0]}' if batch_first else f'[{expected[0]}, b'}, {expected[1]}, "
                f"d]. Tokens per rank: {list(cut.sequence.lengths)}.",
                "every rank holds the tokens that the sequence layout gives it; without a layout "
                "all ranks hold equally many",
                "pass sequence_layout=SequenceLayout.from_lengths([...]) with the true lengths.",
            )
