"""What UlyssesAttention refuses before it sends anything: options and shapes that do not fit."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist

from ..batch import document_boundaries
from ..exchange import check_one_type
from ..parallel_state.errors import ParallelConfigError
from ..parallel_state.initialize import get_parallel_state, model_parallel_is_initialized
from ..sequence_layout import SequenceLayout
from . import local


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


def check_options(local_attention: Callable[..., Any], names: Iterable[str]) -> None:
    """Refuses options that the local attention does not take.

    Raises:
        ParallelConfigError: names the options, and which of our local attentions take them.
    """
    taken = options_taken(local_attention)
    missing = [name for name in names if taken is not None and name not in taken]
    if not missing:
        return
    able = [name for name in local.__all__ if _takes_all(getattr(local, name), missing)]
    raise ParallelConfigError(
        f"The local attention {_name(local_attention)} with {', '.join(missing)}.",
        rule=f"an option is one that the local attention takes: {', '.join(sorted(taken or ()))}",
        nearest="local_attention="
        + (" or ".join(able) or "a callable of yours that takes it")
        + " (see ulysses_mc.layers.local).",
    )


@lru_cache(maxsize=64)
def options_taken(local_attention: Callable[..., Any]) -> frozenset[str] | None:
    """The keyword options of a local attention; None if it takes any."""
    function: Callable[..., Any] = local_attention
    if isinstance(local_attention, torch.nn.Module):
        function = local_attention.forward
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return frozenset(list(parameters)[3:])


def _takes_all(local_attention: Callable[..., Any], names: Sequence[str]) -> bool:
    taken = options_taken(local_attention)
    return taken is None or set(names) <= taken


def _name(local_attention: Callable[..., Any]) -> str:
    return getattr(local_attention, "__name__", type(local_attention).__name__)


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


def check_qkv(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Refuses [b, s_r, h, d], [b, s_kv_r, k, d] and [b, s_kv_r, k, d_v] that do not go together."""
    fit = (
        query.dim() == key.dim() == value.dim() == 4
        and query.size(0) == key.size(0)
        and query.size(3) == key.size(3)
        and key.shape[:3] == value.shape[:3]
    )
    if not fit:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (query, key, value))
        raise ParallelConfigError(
            f"Query, key and value of shapes {shapes}.",
            rule="[b, s, h, d], [b, s_kv, k, d] and [b, s_kv, k, d_v], or all three without b",
        )


def check_whole_sequence(
    shape: tuple[int, int, int, int], masks: Mapping[str, torch.Tensor | None]
) -> None:
    """Refuses masks and biases that do not broadcast to `shape`, the whole [b, h, s, s_kv].

    Raises:
        ParallelConfigError: a dim that is neither 1 nor whole, or a mask that is not boolean.
    """
    for name, tensor in masks.items():
        if tensor is None:
            continue
        pairs = zip(reversed(tensor.shape), reversed(shape), strict=False)
        if tensor.dim() > 4 or any(size not in (1, whole) for size, whole in pairs):
            raise ParallelConfigError(
                f"{name} of shape {list(tensor.shape)}.",
                f"The whole sequence has [b, h, s, s_kv] = {list(shape)}.",
                "masks and biases are over the whole sequence and all heads on every rank, or "
                "broadcast to them; they are cut with the heads here, not with the tokens before",
                "the whole tensor on every rank; sequence_layout=... if the ranks hold different "
                "numbers of tokens.",
            )
        if name == "attention_mask" and tensor.dtype != torch.bool:
            raise ParallelConfigError(
                f"attention_mask of dtype {tensor.dtype}.",
                rule="a mask is boolean, True where a query may see a key",
                nearest="attention_mask.bool() of ones and zeros; attention_bias=... if it is "
                "added to the logits.",
            )


def check_per_head(heads: int, vectors: Mapping[str, torch.Tensor | None]) -> None:
    """Refuses slopes and sinks that are not one number per query head."""
    for name, vector in vectors.items():
        if vector is not None and (vector.dim() == 0 or vector.size(-1) != heads):
            raise ParallelConfigError(
                f"{name} of shape {list(vector.shape)} for {heads} query heads.",
                rule="one number for every query head of this tensor-parallel rank, [h]; they "
                "are cut here",
            )


def check_documents(options: Mapping[str, Any], s: int, s_kv: int) -> None:
    """Refuses document boundaries that do not fit the whole sequence (those on the host)."""
    cu, cu_kv = options.get("cu_seqlens"), options.get("cu_seqlens_kv")
    if cu_kv is not None and cu is None:
        raise ParallelConfigError(
            "cu_seqlens_kv without cu_seqlens.",
            rule="a document has its queries and its keys; without cu_seqlens none would be "
            "told apart",
            nearest="cu_seqlens for the queries and cu_seqlens_kv for keys and values.",
        )
    counts = [
        (given.numel() if isinstance(given, torch.Tensor) else len(given)) - 1
        for given in (cu, cu_kv)
        if given is not None
    ]
    if len(set(counts)) > 1:
        raise ParallelConfigError(
            f"cu_seqlens of {counts[0]} documents and cu_seqlens_kv of {counts[1]}.",
            rule="the i-th document of the queries attends to the i-th of the keys",
        )
    if cu is not None and cu_kv is None and s != s_kv:
        raise ParallelConfigError(
            f"cu_seqlens with {s} query and {s_kv} key tokens.",
            rule="sequences of different lengths have their own document boundaries",
            nearest="cu_seqlens for the queries and cu_seqlens_kv for keys and values.",
        )
    for boundaries, length in ((cu, s), (cu_kv, s_kv)):
        on_device = isinstance(boundaries, torch.Tensor) and boundaries.device.type != "cpu"
        if boundaries is not None and not on_device:
            document_boundaries(boundaries, length)
