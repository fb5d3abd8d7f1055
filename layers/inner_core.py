"""What runs between the exchanges of a Megatron layer: its choice, its config, its options."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.spec_utils import ModuleSpec, build_module, get_module
from megatron.core.transformer.utils import is_layer_window_attention

from ..head_layout import HeadLayout
from ..parallel_state.errors import ParallelConfigError
from .local import sdpa_attention
from .option_checks import check_local_attention
from .te_checks import check_transformer_engine

LOCAL_ATTENTIONS: dict[str, Callable[..., torch.Tensor]] = {"sdpa": sdpa_attention}


@dataclass(frozen=True)
class Core:
    """Either a core attention of Megatron's kind or a local attention."""

    spec: Any = None  # class or ModuleSpec
    function: Callable[..., torch.Tensor] | None = None

    @property
    def is_megatron(self) -> bool:
        return self.spec is not None

    def build(self, *args: Any, **kwargs: Any) -> Any:
        return build_module(self.spec, *args, **kwargs)

    @property
    def module(self) -> type:
        module: type = get_module(self.spec)
        return module

    @property
    def is_transformer_engine(self) -> bool:
        return self.is_megatron and _is_transformer_engine(self.module)

    def takes(self, name: str) -> bool:
        """Whether the constructor has this argument."""
        parameters = inspect.signature(self.module).parameters.values()
        return any(p.name == name or p.kind is p.VAR_KEYWORD for p in parameters)


def resolve_core(core: Any) -> Core:
    """None, a name, a function, a class or a ModuleSpec -> what it stands for.

    Raises:
        ParallelConfigError: it is none of these, or an unknown name.
    """
    if core is None:
        return Core(function=sdpa_attention)
    if isinstance(core, str) and core in LOCAL_ATTENTIONS:
        return Core(function=LOCAL_ATTENTIONS[core])
    if isinstance(core, partial) and isinstance(core.func, type) and not core.args:
        return Core(spec=ModuleSpec(module=core.func, params=dict(core.keywords)))
    if isinstance(core, (type, ModuleSpec)):
        return Core(spec=core)
    if callable(core):
        check_local_attention(core)
        return Core(function=core)
    raise ParallelConfigError(
        f"core={core!r} for UlyssesCoreAttention.",
        rule="core is a class or ModuleSpec of a core attention, a local attention function, "
        f"or one of {', '.join(LOCAL_ATTENTIONS)}",
    )


def build_inner_core(
    core: Core,
    config: Any,
    layout: HeadLayout,
    rank: int,
    *,
    k_channels: int | None,
    v_channels: int | None,
    **arguments: Any,
) -> torch.nn.Module:
    """The core attention for the heads that `rank` holds inside the exchange; for one, if none:
    so every rank meets what the core refuses, now and when it runs."""
    if core.is_transformer_engine:
        check_transformer_engine(config, layout)
    heads = len(layout.query_heads[rank]) or 1
    if getattr(core.module, "requires_dsa_inputs", False):
        raise ParallelConfigError(
            f"{core.module.__name__} between the exchanges.",
            rule="it selects keys by hidden states, which stay split by sequence",
            nearest="softmax attention over all keys, or ulysses_parallel_size 1.",
        )
    expanded = layout.kv_expansion(rank) is not None
    inside = copy.copy(config)
    # Cores divide by the tensor-parallel size to find the heads of a rank.
    inside.num_attention_heads = heads * layout.tensor_model_parallel_size
    kv_heads = heads if expanded else len(layout.kv_heads[rank]) or 1
    inside.num_query_groups = kv_heads * layout.tensor_model_parallel_size
    inside.context_parallel_size = 1
    inside.cp_comm_type = None
    learnable = getattr(config, "softmax_type", "vanilla") == "learnable"
    if learnable:
        _check_offset_can_be_given(core)
        if not core.is_transformer_engine:  # that one has other kernels for it
            inside.softmax_type = "vanilla"
    channels = {"k_channels": k_channels, "v_channels": v_channels}
    channels = {name: value for name, value in channels.items() if value is not None}
    if channels and not core.takes("v_channels"):
        # Multi-latent attention gives the softmax scale, so that such a core needs the head
        # dimension only for its output, which is the value's.
        inside.kv_channels, channels = v_channels, {}
    module: torch.nn.Module = core.build(config=inside, **arguments, **channels)
    if learnable:
        # The parameter is the wrapper's, of all heads; this becomes its slice at every call.
        module._parameters.pop("softmax_offset", None)
        vars(module)["softmax_offset"] = None
    return module


def _check_offset_can_be_given(core: Core) -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    if not core.is_transformer_engine and not issubclass(core.module, DotProductAttention):
        raise ParallelConfigError(
            f"softmax_type='learnable' with {core.module.__name__} between the exchanges.",
            rule="each rank uses the offsets of its own heads, which this core keeps to itself",
            nearest="with_ulysses(spec, core='sdpa'), or Megatron's DotProductAttention.",
        )


def _is_transformer_engine(module: type) -> bool:
    return any(base.__module__.startswith("transformer_engine.") for base in module.__mro__)


def ignores_mask(inner: torch.nn.Module, mask_type: Any) -> bool:
    """Whether the core makes its own mask: TransformerEngine's does, unless there is padding."""
    makes_its_own = mask_type.name in ("causal", "no_mask", "causal_bottom_right")
    return makes_its_own and _is_transformer_engine(type(inner))


def local_attention_options(
    config: Any, layer_number: int, softmax_scale: float | None
) -> dict[str, Any]:
    """The config's attention settings as options of a local attention."""
    options: dict[str, Any] = {}
    if softmax_scale is not None:
        options["scale"] = softmax_scale
    if config.attention_dropout:
        options["dropout_p"] = config.attention_dropout
    if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        options["window"] = tuple(config.window_size)
    if getattr(config, "softmax_type", "vanilla") == "off-by-one":
        raise ParallelConfigError(
            "softmax_type='off-by-one' with a local attention.",
            rule="local attentions take learnable offsets",
            nearest="with_ulysses(spec) around DotProductAttention or TEDotProductAttention.",
        )
    return options


def check_config(config: Any, group: dist.ProcessGroup) -> None:
    """Refuses a config that is not that of the group, or asks for what Ulysses does not have."""
    size = group.size()
    if config.context_parallel_size != size:
        raise ParallelConfigError(
            f"context_parallel_size={config.context_parallel_size} in the config, over a "
            f"context-parallel group of {size} ranks.",
            rule="Ulysses rides on Megatron's context-parallel group; RoPE, the batch and the "
            "gradients are cut by the size in the config",
            nearest=f"TransformerConfig(context_parallel_size={size}, ...).",
        )
    refused = {
        "hierarchical_context_parallel_sizes": "ring attention outside Ulysses",
        "experimental_attention_variant": "attention that reads more than query, key and value",
        "qk_clip": "the largest logit of every head on every rank",
        "log_max_attention_logit": "the largest logit of every head on every rank",
        "hybrid_context_parallel": "groups that change from batch to batch",
    }
    for name, needs in refused.items():
        value = getattr(config, name, None)
        if size > 1 and value:
            raise ParallelConfigError(
                f"{name}={value!r} with ulysses_parallel_size={size}.",
                rule=f"it needs {needs}, which this layer does not have",
                nearest=f"{name} unset, or ulysses_parallel_size 1.",
            )
