"""Local attention by FlashAttention 2, 3 or 4, whichever of those installed can do it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from ...parallel_state.errors import ParallelConfigError
from .flash_backends import FA2, FlashBackend, explain_backend, in_order, is_given, why_not
from .masks import normal_window
from .sdpa import host_list

_DECIDING = ("dropout_p", "alibi_slopes", "sinks", "softcap")  # options that not all can do


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    window: tuple[int, int] | None = None,
    cu_seqlens: Sequence[int] | torch.Tensor | None = None,
    cu_seqlens_kv: Sequence[int] | torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    deterministic: bool | None = None,
) -> torch.Tensor:
    """Softmax attention in O(s) memory, on GPUs, in 16 bits; as `sdpa_attention` otherwise.

    Dropout and `alibi_slopes` need FlashAttention-2, `sinks` FlashAttention-4.

    Args:
        softcap: c; a logit x becomes c * tanh(x / c), before slopes.
        deterministic: the backward pass gives the same bits each time, and is slower; None: if
            `torch.use_deterministic_algorithms` asks for it.
        The other arguments are those of `sdpa_attention`.

    Returns:
        [b, s, h, d_v]; a query that may see no key gives 0.

    Raises:
        ParallelConfigError: none of those installed can do it; says of each why not.
    """
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    options = {
        "dropout_p": dropout_p,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "softcap": softcap,
    }
    backend = _choose(query, key, value, options)
    dim = max(query.size(-1), value.size(-1))
    if backend is not FA2 and (query.size(-1), value.size(-1)) == (192, 128):
        dim = 0  # they have a kernel of these two
    scale = query.size(-1) ** -0.5 if scale is None else scale
    arguments = _arguments(backend, causal, window, deterministic, options) | {
        "softmax_scale": scale
    }
    padded = [_pad(tensor, dim) for tensor in (query, key, value)]
    if cu_seqlens is None:
        out = _first(backend.functions()[0](*padded, **arguments))
    else:
        bounds = tuple(host_list(cu_seqlens))
        kv_bounds = bounds if cu_seqlens_kv is None else tuple(host_list(cu_seqlens_kv))
        out = _packed(backend, padded, bounds, kv_bounds, arguments)
    return out[..., : value.size(-1)]


def _choose(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Mapping[str, Any]
) -> FlashBackend:
    """The backend for such tensors and options, of any number of tokens and heads."""
    options = {name: options[name] for name in _DECIDING if name in options}
    capability = _capability(query.device)
    given = {name: option for name, option in options.items() if is_given(option)}
    dims = (query.size(-1), value.size(-1))
    for backend in in_order(capability):
        if not why_not(backend, query.dtype, dims, capability, given):
            return backend
    shape = dict(dtype=query.dtype, head_dim=dims[0], value_head_dim=dims[1])
    explanation = explain_backend(capability=capability, **shape, **options)  # type: ignore[arg-type]
    raise ParallelConfigError(
        f"flash_attention on {query.device}.",
        "; ".join(f"{name}: {reason}" for name, reason in explanation.passed_over.items()) + ".",
        "one of FlashAttention 2, 3 and 4 is installed and can do it",
        "local_attention=sdpa_attention, or flex_attention for softcap and windows.",
    )


flash_attention.check_before_exchange = _choose  # type: ignore[attr-defined]


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _arguments(
    backend: FlashBackend,
    causal: bool,
    window: tuple[int, int] | None,
    deterministic: bool,
    options: dict[str, Any],
) -> dict[str, Any]:
    """The keywords of both functions, but for the softmax scale."""
    sides = [backend.unlimited if side < 0 else side for side in normal_window(causal, window)]
    arguments: dict[str, Any] = {
        "causal": causal,
        "window_size": tuple(sides) if window is not None else (backend.unlimited,) * 2,
        "softcap": options["softcap"] or 0.0,
        "deterministic": deterministic,
    }
    if options["dropout_p"]:
        arguments["dropout_p"] = options["dropout_p"]
    if options["alibi_slopes"] is not None:
        arguments["alibi_slopes"] = options["alibi_slopes"].float()
    if options["sinks"] is not None:
        arguments["learnable_sink"] = options["sinks"]
    return arguments


def _packed(
    backend: FlashBackend,
    tensors: list[torch.Tensor],
    bounds: tuple[int, ...],
    kv_bounds: tuple[int, ...],
    arguments: dict[str, Any],
) -> torch.Tensor:
    """[b, s, h, d] of documents, the same ones in every sequence -> [b, s, h, d_v]."""
    batch, length = tensors[0].shape[:2]
    all_bounds = (bounds, kv_bounds, kv_bounds)
    flat = [
        tensor[:, : ends[-1]].flatten(0, 1)
        for tensor, ends in zip(tensors, all_bounds, strict=True)
    ]
    out = _first(
        backend.functions()[1](
            *flat,
            cu_seqlens_q=_on_device(bounds, batch, flat[0].device),
            cu_seqlens_k=_on_device(kv_bounds, batch, flat[0].device),
            max_seqlen_q=max((b - a for a, b in pairwise(bounds)), default=0),
            max_seqlen_k=max((b - a for a, b in pairwise(kv_bounds)), default=0),
            **arguments,
        )
    )
    out = out.unflatten(0, (batch, bounds[-1]))
    return F.pad(out, (0, 0, 0, 0, 0, length - bounds[-1]))  # padding after the last document


@lru_cache(maxsize=32)
def _on_device(bounds: tuple[int, ...], batch: int, device: torch.device) -> torch.Tensor:
    """[batch * documents + 1], int32; copied once for all layers and steps that share them."""
    starts = [row * bounds[-1] + start for row in range(batch) for start in bounds[:-1]]
    with torch.inference_mode(False):
        return torch.tensor([*starts, batch * bounds[-1]], dtype=torch.int32).to(device)


def _pad(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Zeros up to one head dimension for all, a multiple of 8; they add nothing to a product."""
    missing = max(dim, tensor.size(-1)) - tensor.size(-1)
    missing += -(tensor.size(-1) + missing) % 8
    return F.pad(tensor, (0, missing)) if missing else tensor


def _first(result: Any) -> torch.Tensor:
    """The output; some releases return the log-sum-exp beside it."""
    out: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return out
