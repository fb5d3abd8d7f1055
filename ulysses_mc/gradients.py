"""Norm and averaging of gradients where FSDP2 shards some parameters and others are replicated.

`fully_shard(model, mesh=..., ignored_params={...})` leaves parameters as plain tensors, the same
on every rank. FSDP2 then does not reduce their gradients, and `torch.nn.utils.clip_grad_norm_`
cannot mix them with the sharded ones. Call in this order:

    loss.backward()
    average_replicated_gradients(model.parameters(), state.group("dp", "ulysses"))
    norm = clip_gradients(model.parameters(), max_norm=1.0)
    optimizer.step()
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from .parallel_state.errors import ParallelConfigError


@torch.no_grad()
def average_replicated_gradients(
    parameters: Iterable[torch.nn.Parameter],
    group: dist.ProcessGroup,
    *,
    gradient_divisor: float | None = None,
) -> None:
    """Sums the gradients of plain (not DTensor) parameters over `group`, and divides.

    One all-reduce for each dtype, in float32 or wider. A rank without a gradient counts as zero.

    Args:
        parameters: a model's, in the same order on every rank; sharded ones are left alone.
        group: the ranks that hold different tokens, data-parallel x Ulysses.
        gradient_divisor: as that of `token_mean_loss`; the size of `group` if None, as FSDP2's.
    """
    plain = [p for p in parameters if p.requires_grad and not isinstance(p, DTensor)]
    for dtype in sorted({_wide(p.dtype) for p in plain}, key=str):
        members = [p for p in plain if _wide(p.dtype) == dtype]
        for member in members:
            if member.grad is None:
                member.grad = torch.zeros_like(member)
        gradients = [p.grad for p in members if p.grad is not None]
        flat = torch.cat([gradient.flatten().to(dtype) for gradient in gradients])
        dist.all_reduce(flat, group=group)
        flat /= group.size() if gradient_divisor is None else gradient_divisor
        pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, piece in zip(gradients, pieces, strict=True):
            gradient.copy_(piece.view_as(gradient))


@torch.no_grad()
def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """The 2-norm of all gradients together, the same on every rank.

    A sharded gradient (a DTensor) counts every shard once, whatever mesh it lies on; a replicated
    one, plain or along a mesh dimension, counts once. One all-reduce for each set of ranks that
    shards. Squares are summed in float64.

    Args:
        parameters: with reduced gradients; those without one do not count.

    Returns:
        Scalar, float32 (float64 if every gradient is).

    Raises:
        ParallelConfigError: a gradient that is a sum still to be formed (Partial).
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.zeros(())
    squares: dict[tuple[dist.ProcessGroup, ...], torch.Tensor] = {}
    for gradient in gradients:
        groups, local = _shard_groups(gradient)
        square = local.double().square().sum()
        squares[groups] = squares[groups] + square if groups in squares else square
    total = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    for groups, square in squares.items():
        for group in groups:
            dist.all_reduce(square, group=group)
        total += square
    widest = all(gradient.dtype == torch.float64 for gradient in gradients)
    return total.sqrt().to(torch.float64 if widest else torch.float32)


@torch.no_grad()
def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scales all gradients so that their norm is `max_norm` at most; no read on the host.

    Returns:
        The norm before, as `gradient_norm` gives it.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # torch.nn.utils.clip_grad_norm_'s
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.mul_(factor.to(local.device))
    return norm


def _shard_groups(
    gradient: torch.Tensor,
) -> tuple[tuple[dist.ProcessGroup, ...], torch.Tensor]:
    """The groups over which shards of `gradient` lie, and this rank's shard."""
    if not isinstance(gradient, DTensor):
        return (), gradient
    groups = []
    for dim, placement in enumerate(gradient.placements):
        if isinstance(placement, Shard):
            groups.append(gradient.device_mesh.get_group(dim))
        elif not isinstance(placement, Replicate):
            raise ParallelConfigError(
                f"The norm of a gradient placed {placement} along dimension {dim} of its mesh.",
                rule="gradients are reduced before their norm is taken",
            )
    return tuple(groups), gradient.to_local()


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def deepspeed_gradient_divisor(engine: Any) -> float:
    """By what a DeepSpeed engine divides summed gradients, for `token_mean_loss`.

    Seen with DeepSpeed 0.19.8. The engine averages over data-parallel ranks and sums over the
    sequence-parallel ones, except that ZeRO 3 with `reduce_scatter: true`, its default, averages
    over all (runtime/comm/coalesced_collectives.py); `engine.backward` divides by the gradient
    accumulation steps besides.

    Args:
        engine: what deepspeed.initialize(..., mpu=state) returned.

    Raises:
        ParallelConfigError: `gradient_predivide_factor` or `prescale_gradients` is set.
    """
    if engine.gradient_predivide_factor() != 1.0 or not engine.postscale_gradients():
        raise ParallelConfigError(
            "A DeepSpeed config with gradient_predivide_factor or prescale_gradients.",
            rule="the ZeRO stages apply them differently; float32 reduction needs neither",
            nearest="leave both out.",
        )
    ranks = float(engine.seq_dp_world_size)
    if not (engine.zero_optimization_stage() == 3 and engine.zero_reduce_scatter()):
        ranks /= engine.sequence_parallel_size
    return ranks * float(engine.gradient_accumulation_steps())
