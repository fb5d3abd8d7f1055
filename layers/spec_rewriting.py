"""Layer specs with Ulysses: new specs, the given ones untouched."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from ..parallel_state.errors import ParallelConfigError
from .core_attention import UlyssesCoreAttention
from .dropout import bias_dropout_add
from .inner_core import Core, resolve_core
from .norm import Norm

Spec = TypeVar("Spec")


def with_ulysses(spec: Spec, core: Any = None, *, uneven_heads: bool = True) -> Spec:
    """The spec with every core attention inside the exchange, and hidden dropout to match.

    Takes layer specs (GPT, T5, MoE, multi-latent attention), the specs of whole blocks
    (`TransformerBlockSubmodules`, multi-token prediction) and HybridModel stacks.

    Args:
        spec: of any of these kinds; not changed. What is inside the exchange already stays
            there, with `core` and `uneven_heads=False` if they are given.
        core: what runs inside: None for the core that the spec names, 'sdpa', a local attention
            function, or another core attention (class or ModuleSpec).
        uneven_heads: whether ranks may hold different numbers of heads.

    Raises:
        ParallelConfigError: the spec has no core attention, or `core` is nothing of the kind.
    """
    if core is not None and _is_wired(resolve_core(core)):
        raise ParallelConfigError(
            f"with_ulysses(spec, core={core!r:.200}).",
            rule="core is what runs between the exchanges, not what makes them",
            nearest="with_ulysses(spec), or a core attention of Megatron's as the core.",
        )
    wired = 0

    def change(name: str, value: Any) -> Any:
        nonlocal wired
        if name == "core_attention" and value is not None and value is not IdentityOp:
            wired += 1
            return _wired(value, core, uneven_heads)
        return bias_dropout_add if value is get_bias_dropout_add else _UNCHANGED

    changed: Spec = _rewrite("", spec, change)
    if not wired:
        raise ParallelConfigError(
            f"with_ulysses({spec!r:.200}).",
            rule="the spec names a core_attention somewhere, which runs between the exchanges",
            nearest="with_ulysses(get_gpt_layer_local_spec(...)).",
        )
    return changed


def with_norm(spec: Spec, norm: Any = Norm) -> Spec:
    """The spec with Megatron's fallback norms replaced by one that knows of sequence_parallel."""
    replaced: tuple[Any, ...] = (WrappedTorchNorm,)
    try:
        from megatron.core.fusions.fused_layer_norm import HAVE_FUSED_LAYER_NORM, FusedLayerNorm

        if not HAVE_FUSED_LAYER_NORM:  # named by some specs all the same, and fails when built
            replaced += (FusedLayerNorm,)
    except ImportError:
        pass
    changed: Spec = _rewrite(
        "", spec, lambda name, value: norm if _is_one_of(value, replaced) else _UNCHANGED
    )
    return changed


def _wired(value: Any, core: Any, uneven_heads: bool) -> Any:
    """A core attention inside the exchange: the spec's own, or `core`."""
    if inspect.isfunction(value):  # in a spec, one that builds a core attention
        if core is None:
            raise ParallelConfigError(
                f"with_ulysses of a spec whose core_attention is the function {value!r:.100}.",
                rule="what shall run between the exchanges is known before it is built",
                nearest="the class that the function builds, or a ModuleSpec of it, in the spec or "
                "as with_ulysses(spec, core=...).",
            )
        value = core
    given = resolve_core(value)
    if not _is_wired(given):
        params = {"core": value if core is None else core, "uneven_heads": uneven_heads}
        return ModuleSpec(module=UlyssesCoreAttention, params=params)
    changed = {} if core is None else {"core": core}
    if not uneven_heads:
        changed["uneven_heads"] = False
    if not changed:
        return value
    before = (given.spec.params or {}) if isinstance(given.spec, ModuleSpec) else {}
    return ModuleSpec(module=given.module, params=before | changed)


def _is_wired(core: Core) -> bool:
    return core.is_megatron and issubclass(core.module, UlyssesCoreAttention)


_UNCHANGED = object()


def _is_one_of(value: Any, candidates: tuple[Any, ...]) -> bool:
    return any(value is candidate for candidate in candidates)


def _rewrite(name: str, value: Any, change: Callable[[str, Any], Any]) -> Any:
    """`value` with `change` applied to all that is nested in it; itself if nothing changed."""
    new = change(name, value)
    if new is not _UNCHANGED:
        return new
    if is_dataclass(value) and not isinstance(value, type):
        old = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        items = {key: _rewrite(key, item, change) for key, item in old.items()}
        differing = {key: item for key, item in items.items() if item is not old[key]}
        return replace(value, **differing) if differing else value
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        rewritten = [_rewrite(name, item, change) for item in value]
        same = all(a is b for a, b in zip(rewritten, value, strict=True))
        return value if same else type(value)(rewritten)
    if type(value) is dict:
        entries = {key: _rewrite(str(key), item, change) for key, item in value.items()}
        same = all(entries[key] is item for key, item in value.items())
        return value if same else entries
    if isinstance(value, functools.partial):
        keywords = {key: _rewrite(key, item, change) for key, item in value.keywords.items()}
        if all(keywords[key] is item for key, item in value.keywords.items()):
            return value
        return functools.partial(value.func, *value.args, **keywords)
    return value
