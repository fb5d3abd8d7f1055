"""What is refused of a local attention's options before anything is sent, on every rank alike.

Some ranks may hold no heads: they never see what an attention says of its options itself, and
would wait for the others. So every option with a standard name is checked here first.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import torch

from ..batch import check_whole_numbers, document_boundaries
from ..parallel_state.errors import ParallelConfigError
from . import local

MASKS = ("attention_mask", "attention_bias")
VECTORS = ("alibi_slopes", "sinks")


def check_call(
    local_attention: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    shape: tuple[int, int, int, int],
    options: Mapping[str, Any],
) -> None:
    """Refuses what a local attention cannot do, and values and shapes that do not fit.

    Args:
        tensors: query, key and value, as this rank has them.
        shape: the whole [b, h, s, s_kv].
        options: what the attention will be called with, not yet cut; `causal` among them.

    Raises:
        ParallelConfigError: on every rank alike.
    """
    check_options(local_attention, [name for name in options if name != "causal"])
    check_values(options)
    device = tensors[0].device
    check_whole_sequence(shape, {name: options.get(name) for name in MASKS}, device)
    check_per_head(shape, {name: options.get(name) for name in VECTORS}, device)
    check_documents(options, *shape[2:])
    backend_check = getattr(local_attention, "check_before_exchange", None)
    if backend_check is not None:
        backend_check(*tensors, options)


def check_values(options: Mapping[str, Any]) -> None:
    """Refuses numbers and flags that mean nothing, or not what they say."""
    for name, value in options.items():
        is_right, rule, nearest = _VALUES.get(name, _ANY)
        if not is_right(value):
            raise ParallelConfigError(
                f"{name}={value!r} for attention.", rule=f"{name} is {rule}", nearest=nearest
            )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _is_window(value: Any) -> bool:
    return (
        isinstance(value, (tuple, list))
        and len(value) == 2
        and all(isinstance(x, Integral) and not isinstance(x, bool) and int(x) >= -1 for x in value)
    )


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


_ANY: tuple[Callable[[Any], bool], str, str] = (lambda _: True, "", "")
# Name: whether a value is right, what it must be, what works.
_VALUES: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "causal": (_is_flag, "True or False", "causal=True."),
    "deterministic": (_is_flag, "True or False", "deterministic=True."),
    "dropout_p": (
        lambda p: _is_number(p) and 0 <= p < 1,
        "the probability of dropping a weight, from 0 to below 1",
        "dropout_p=0.0 for none.",
    ),
    "scale": (
        lambda x: _is_number(x) and x != 0,
        "a finite number other than 0",
        "none given, for 1/sqrt(d).",
    ),
    "softcap": (
        lambda x: _is_number(x) and x > 0,
        "a finite number above 0",
        "none given, for logits as they are.",
    ),
    "window": (
        _is_window,
        "(left, right), whole numbers of keys seen beside the query's own, -1 for all",
        "window=(128, 0) for the 128 before, (-1, -1) for all.",
    ),
}


def check_local_attention(local_attention: Any) -> None:
    """Refuses what could not be called as a local attention.

    Raises:
        ParallelConfigError: it is not callable, or not with (query, key, value, causal=...).
    """
    try:
        _signature(local_attention).bind_partial(None, None, None, causal=True)
    except TypeError as error:
        raise ParallelConfigError(
            f"{local_attention!r:.200} as local attention: {error}.",
            rule="a local attention is called as attention(query, key, value, causal=True, ...)",
            nearest=f"one of ulysses_mc.layers.local ({', '.join(local.__all__)}), or "
            "a function of yours with these arguments.",
        ) from None


def _signature(local_attention: Callable[..., Any]) -> inspect.Signature:
    function: Callable[..., Any] = local_attention
    if isinstance(local_attention, torch.nn.Module):
        function = local_attention.forward
    return inspect.signature(function)


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
    parameters = _signature(local_attention).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    return frozenset(list(parameters)[3:])


def _takes_all(local_attention: Callable[..., Any], names: Sequence[str]) -> bool:
    taken = options_taken(local_attention)
    return taken is None or set(names) <= taken


def _name(local_attention: Callable[..., Any]) -> str:
    return getattr(local_attention, "__name__", type(local_attention).__name__)


def check_whole_sequence(
    shape: tuple[int, int, int, int],
    masks: Mapping[str, torch.Tensor | None],
    device: torch.device,
) -> None:
    """Refuses masks and biases that do not broadcast to `shape`, the whole [b, h, s, s_kv].

    Raises:
        ParallelConfigError: a dim that is neither 1 nor whole, a mask that is not boolean, a bias
            that is not of floating point, or one on another device.
    """
    for name, tensor in masks.items():
        if tensor is None:
            continue
        _check_tensor(name, tensor, device)
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
                rule="a mask is boolean",
                nearest="attention_mask.bool() of ones and zeros; attention_bias=... if it is "
                "added to the logits.",
            )
        if name == "attention_bias":
            _check_floating(name, tensor)


def check_per_head(
    shape: tuple[int, int, int, int],
    vectors: Mapping[str, torch.Tensor | None],
    device: torch.device,
) -> None:
    """Refuses slopes and sinks that are not one number per query head."""
    batch, heads = shape[:2]
    for name, vector in vectors.items():
        if vector is None:
            continue
        _check_tensor(name, vector, device)
        fits = [[heads], [batch, heads]] if name == "alibi_slopes" else [[heads]]
        if list(vector.shape) not in fits:
            raise ParallelConfigError(
                f"{name} of shape {list(vector.shape)} for {heads} query heads.",
                rule="one number for every query head of this tensor-parallel rank; they are cut "
                "here",
                nearest=f"shape {' or '.join(map(str, fits))}.",
            )
        _check_floating(name, vector)


def _check_tensor(name: str, tensor: Any, device: torch.device) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ParallelConfigError(f"{name} is a {type(tensor).__name__}.", rule="it is a tensor")
    if tensor.device != device:
        raise ParallelConfigError(
            f"{name} on {tensor.device} with a query on {device}.",
            rule="all tensors of an attention are on one device",
            nearest=f"{name}.to(query.device).",
        )


def _check_floating(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        raise ParallelConfigError(
            f"{name} of dtype {tensor.dtype}.",
            rule="what is added to logits is of floating point",
            nearest=f"{name}.to(query.dtype); attention_mask=... if it says which keys are seen.",
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
    for given in (cu, cu_kv):
        if given is not None:
            check_whole_numbers(given)
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
