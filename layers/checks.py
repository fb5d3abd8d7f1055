"""What UlyssesAttention refuses before it sends anything, beside options (`option_checks`)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..exchange import check_one_type
from ..parallel_state.errors import ParallelConfigError
from ..parallel_state.initialize import get_parallel_state, model_parallel_is_initialized
from ..sequence_layout import SequenceLayout

Shape = tuple[int, ...]  # such as torch.Size


def check_group(group: Any, *layouts: SequenceLayout | None) -> None:
    """Refuses what is no process group, ring attention around it, and layouts for other sizes.

    Raises:
        ParallelConfigError: on every rank alike.
    """
    if not isinstance(group, dist.ProcessGroup):
        raise ParallelConfigError(
            f"UlyssesAttention with group={group!r}.",
            rule="attention over a split sequence needs its process group; without one every "
            "rank would attend to its own tokens only",
            nearest='state.group("ulysses") of an initialised ParallelState.',
        )
    _check_no_ring(group)
    for layout in layouts:
        if layout is not None and layout.group_size != group.size():
            raise ParallelConfigError(
                f"UlyssesAttention over a group of {group.size()} ranks with a sequence layout "
                f"for {layout.group_size}.",
                rule="the layout says which tokens each rank of the Ulysses group holds",
                nearest=f"SequenceLayout.contiguous({layout.sequence_length}, {group.size()}).",
            )


def _check_no_ring(group: dist.ProcessGroup) -> None:
    """Inside a ring the Ulysses group holds a part of the sequence, and would attend to no more."""
    if not model_parallel_is_initialized():
        return
    state = get_parallel_state()
    ulysses, ring = state.config.ulysses_parallel_size, state.config.ring_parallel_size
    if ring > 1 and dist.get_process_group_ranks(group) == list(state.ranks("ulysses")):
        raise ParallelConfigError(
            f"UlyssesAttention over the Ulysses group of ulysses_parallel_size={ulysses} x "
            f"ring_parallel_size={ring}.",
            f"It holds {ulysses} of the {ulysses * ring} parts of a sequence.",
            "there is no ring attention yet",
            f"ulysses_parallel_size {ulysses * ring} with ring_parallel_size 1 (fewer heads than "
            "ranks are exact, too).",
        )


def check_transport(transport: str) -> None:
    """Refuses a transport that there is not."""
    known = ("auto", "p2p", "all_to_all")
    if transport not in known:
        raise ParallelConfigError(
            f"transport={transport!r}.", rule=f"one of {', '.join(known)}", nearest="'auto'."
        )


def in_one_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Query, key and value in the type that attention runs in under autocast, as PyTorch's own.

    A rank sends what another has room for: their types must agree before the exchange.

    Raises:
        ParallelConfigError: types that differ, outside autocast.
    """
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        tensors = tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)
    check_one_type(tensors)
    return tensors


def check_qkv(query: Shape, key: Shape, value: Shape) -> None:
    """Refuses [b, s_r, h, d], [b, s_kv_r, k, d] and [b, s_kv_r, k, d_v] that do not go together."""
    fit = (
        len(query) == len(key) == len(value) == 4
        and query[0] == key[0]
        and query[3] == key[3]
        and key[:3] == value[:3]
    )
    if not fit:
        raise ParallelConfigError(
            "Query, key and value of shapes "
            f"{', '.join(str(list(shape)) for shape in (query, key, value))}.",
            rule="[b, s, h, d], [b, s_kv, k, d] and [b, s_kv, k, d_v], or all three without b",
        )


def check_heads_given(query: Shape, key: Shape, *given: int | None) -> None:
    """Refuses other heads, dim 2, than the numbers that the module was built for (if any)."""
    names = ("num_heads", "num_kv_heads")
    for name, shape, heads in zip(names, (query, key), given, strict=True):
        if heads is not None and shape[2] != heads:
            raise ParallelConfigError(
                f"UlyssesAttention({name}={heads}) called with {shape[2]} such heads.",
                rule="heads given when the module is built are those of the tensors to come, of "
                "one tensor-parallel rank",
                nearest=f"{name}={shape[2]}, or none, for whatever comes.",
            )
