"""FlashAttention 2, 3 and 4: which are here, and which can do what is asked.

Found by the function that is called, not by the name of a package. What each can do was read
from the packages' sources: flash-attn 2.8.3, its `hopper` folder (FlashAttention-3), and
flash-attn-4 4.0.0b36; `tests/layers/flash_signatures.json` records their signatures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

_COMMON = frozenset(
    {"causal", "scale", "window", "cu_seqlens", "cu_seqlens_kv", "softcap", "deterministic"}
)


@dataclass(frozen=True)
class FlashBackend:
    """One generation of FlashAttention.

    Args:
        modules: where its functions may lie, the first that has them is taken.
        capabilities: major compute capabilities of GPUs that it runs on.
        options: options of `flash_attention` that it can do.
        unlimited: how its `window_size` says that a side is not limited.
    """

    name: str
    modules: tuple[str, ...]
    capabilities: tuple[int, ...]
    options: frozenset[str]
    unlimited: int | None

    def functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """`flash_attn_func` and `flash_attn_varlen_func`.

        Raises:
            ImportError: it is not installed, or does not import; says why.
        """
        found = _functions(self.modules)
        if isinstance(found, str):
            raise ImportError(found)
        return found

    def missing(self) -> str:
        """Why it cannot be called here; '' if it can."""
        found = _functions(self.modules)
        return found if isinstance(found, str) else ""


FA2 = FlashBackend(
    "FlashAttention-2",
    ("flash_attn",),
    (8, 9, 10, 11, 12),
    _COMMON | {"dropout_p", "alibi_slopes"},
    -1,
)
FA3 = FlashBackend(
    "FlashAttention-3",
    ("flash_attn_3.flash_attn_interface", "flash_attn_interface"),
    (9,),
    _COMMON,
    -1,
)
FA4 = FlashBackend(
    "FlashAttention-4",
    ("flash_attn.cute",),
    (9, 10, 11),
    _COMMON | {"sinks"},
    None,
)


@dataclass(frozen=True)
class Explanation:
    """Which FlashAttention is used, and why not the others.

    Args:
        chosen: its name; None if none can do it (`sdpa_attention` does all but softcap).
        passed_over: the reason by name, in the order in which they were considered.
    """

    chosen: str | None
    passed_over: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{name} passed over: {reason}" for name, reason in self.passed_over.items()]
        return "\n".join([f"uses {self.chosen or 'no FlashAttention'}", *lines])


def explain_backend(
    *,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = 128,
    value_head_dim: int | None = None,
    capability: tuple[int, int] | None = None,
    **options: Any,
) -> Explanation:
    """Says which FlashAttention `flash_attention` would use, and why it passes over the others.

    Args:
        dtype, head_dim, value_head_dim: of query, key and value.
        capability: compute capability of the GPU, (9, 0) for Hopper; None: of the current one.
        options: those of `flash_attention`, with their values (`window=(1024, 0)`).
    """
    if capability is None and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    given = {name: value for name, value in options.items() if is_given(value)}
    dims = (head_dim, head_dim if value_head_dim is None else value_head_dim)
    passed_over: dict[str, str] = {}
    chosen = None
    for backend in in_order(capability):
        reason = why_not(backend, dtype, dims, capability, given)
        if not reason and chosen is None:
            chosen = backend.name
        else:
            passed_over[backend.name] = reason or f"{chosen} is preferred"
    return Explanation(chosen, passed_over)


def is_given(option: Any) -> bool:
    """Whether it asks for anything: not None, 0.0 or False."""
    return isinstance(option, (torch.Tensor, Sequence)) or bool(option)


def in_order(capability: tuple[int, int] | None) -> tuple[FlashBackend, ...]:
    """The fastest on that GPU first."""
    return (FA3, FA4, FA2) if capability is not None and capability[0] == 9 else (FA4, FA3, FA2)


def why_not(
    backend: FlashBackend,
    dtype: torch.dtype,
    dims: tuple[int, int],
    capability: tuple[int, int] | None,
    options: Mapping[str, Any],
) -> str:
    """Why a backend cannot do it; '' if it can."""
    if capability is None:
        return "no GPU"
    if capability[0] not in backend.capabilities:
        wanted = " or ".join(f"{major}.x" for major in backend.capabilities)
        return f"needs compute capability {wanted}, the GPU has {capability[0]}.{capability[1]}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"{dtype} is neither float16 nor bfloat16"
    largest = max(dims) if dims != (192, 128) or backend is FA2 else 128
    limit = 128 if backend is FA4 and capability[0] != 9 else 256
    if largest > limit:
        return f"head dimension {largest} is above {limit}"
    lacking = [name for name in options if name not in backend.options]
    if lacking:
        return f"it has no {', '.join(lacking)}"
    slopes = options.get("alibi_slopes")
    if isinstance(slopes, torch.Tensor) and slopes.requires_grad:
        return "it has no gradient of alibi_slopes"
    if "dropout_p" in options and "softcap" in options:
        return "it has softcap without dropout only"
    return backend.missing() or (_too_old(options) if backend is FA4 else "")


def _too_old(options: Mapping[str, Any]) -> str:
    """What the backward pass of an older FlashAttention-4 gets wrong; '' of a newer one.

    Until 4.0.0b26 the gradient of the sinks is lost without a word; before 4.0.0b24 softcap ends in
    an assertion, with packed documents at least. Releases are told apart by what their backward
    pass takes: a build from the repository has any version number.
    """
    asked = [name for name in ("sinks", "softcap") if name in options]
    if not asked or _backward_takes_sinks():
        return ""
    return f"it is older than 4.0.0b26: its backward pass has no {' and no '.join(asked)}"


@lru_cache(maxsize=1)
def _backward_takes_sinks() -> bool:
    interface = import_module("flash_attn.cute.interface")
    backward = getattr(interface, "_flash_attn_bwd", None)  # all of the old ones have it
    return backward is None or "learnable_sink" in inspect.signature(backward).parameters


@lru_cache(maxsize=16)
def _functions(
    modules: tuple[str, ...],
) -> tuple[Callable[..., Any], Callable[..., Any]] | str:
    reasons = []
    for name in modules:
        try:
            module = import_module(name)
            return module.flash_attn_func, module.flash_attn_varlen_func
        except ModuleNotFoundError as error:
            reasons.append(f"not installed ({error})")
        except AttributeError as error:
            reasons.append(f"{name} is something else ({error})")
        except Exception as error:  # built for another torch or CUDA
            reasons.append(f"{name} does not import: {error!r:.200}")
    return "; ".join(dict.fromkeys(reasons))
