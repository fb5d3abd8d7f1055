"""Ulysses in Hugging Face models, by one call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..parallel_state.errors import ParallelConfigError
from ..sequence_layout import SequenceLayout
from .attention import UlyssesAttention
from .huggingface_inputs import MARKER, WholeSequence, prepare_inputs

# Layers that mix tokens in other ways (chunked, linear, state space) would mix a shard alone.
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def use_ulysses(
    model: Any,
    group: dist.ProcessGroup,
    sequence_layout: SequenceLayout | None = None,
    local_attention: Callable[..., torch.Tensor] | None = None,
    *,
    uneven_heads: bool = True,
    transport: str = "auto",
) -> None:
    """Makes a causal language model of `transformers` work on this rank's tokens alone.

        use_ulysses(model, state.group("ulysses"))
        logits = model(input_ids=batch["tokens"]).logits    # [b, s_r] -> [b, s_r, vocabulary]

    Registers an attention function with transformers' AttentionInterface, sets it on the model,
    and watches the model's inputs. Call it before DDP, fully_shard or deepspeed.initialize. Keys
    and values are not repeated before the exchange. Two models do not share a config object
    afterwards: it names the attention.

    What the model's forward takes from then on:

    * `input_ids` [b, s_r] or `inputs_embeds`: the rank's tokens.
    * `position_ids`: best left out; then they are the global positions of the rank's tokens
      (within documents, if those are given). If given, [b or 1, s_r]: the rank's cut of the
      global ones, gathered once per forward call (a read on the host); where they do not go on by
      one, a new document starts, as in transformers. Positions that restart at 0 on every rank
      are refused.
    * `cu_seq_lens_q` or `cu_seqlens`: global document boundaries, for every sample alike.
    * `attention_mask`: *whole*, [b, s] of ones and zeros (padding), or [b, 1, s, s], boolean or
      additive, which replaces the causal mask.
    * `sequence_layout`: of this call alone, where lengths change from batch to batch.

    Args:
        model: a PreTrainedModel; not one with several parts, such as image and text.
        group: the Ulysses group.
        sequence_layout: the tokens of each rank; equally many contiguous ones if None.
        local_attention, uneven_heads, transport: see `UlyssesAttention`.

    Raises:
        ParallelConfigError: now, for a model that cannot be exact: it does not use
            AttentionInterface, or mixes tokens elsewhere than in causal attention. In forward,
            on every rank before the first collective: `labels` (they would be shifted and
            averaged within the shard), a cache, attention weights or router losses as outputs, a
            mask that is not whole, left padding without position_ids, an option that the local
            attention lacks.
    """
    pretrained_model = _transformers()
    _check_model(model, pretrained_model)
    config = model.config
    attention = UlyssesAttention(
        group,
        sequence_layout,
        config.num_attention_heads,
        getattr(config, "num_key_value_heads", None),
        local_attention,
        uneven_heads=uneven_heads,
        transport=transport,
    )
    name = f"ulysses_{id(attention)}"  # the registry keeps `attention`, so no other has this id
    _register(name, partial(_attend, attention))
    model.set_attn_implementation(name)
    if config._attn_implementation != name:
        raise _unsupported(model, "it has attention code of its own")
    # Inner models too: `model.model(...)` gives hidden states, for `linear_cross_entropy`.
    for module in model.modules():
        if isinstance(module, pretrained_model):
            hook = _input_hook(module, group, sequence_layout)
            module.register_forward_pre_hook(hook, with_kwargs=True)
            module.register_forward_hook(_check_reached, with_kwargs=True)


def _input_hook(
    module: torch.nn.Module, group: dist.ProcessGroup, sequence_layout: SequenceLayout | None
) -> Callable[..., Any]:
    """A closure, because a deep copy of the model shares closures, and a group has no copy."""
    names = list(inspect.signature(module.forward).parameters)

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return prepare_inputs(group, sequence_layout, names, module, args, kwargs)

    return hook


def _attend(
    attention: UlyssesAttention,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: [b, h, s_r, d], [b, k, s_r, d] -> [b, s_r, h, d_v]."""
    whole: WholeSequence | None = kwargs.get(MARKER)
    if whole is None or attention_mask is not None or key.size(2) != query.size(2):
        raise ParallelConfigError(
            f"{type(module).__name__} over {query.size(2)} queries and {key.size(2)} keys of a "
            "rank, with "
            + ("a mask of the model's own." if whole else "no word of the whole sequence."),
            rule="the model hands its keyword arguments down to self-attention, which gets the "
            "whole sequence's mask from them; no cross attention, no cache",
        )
    options: dict[str, Any] = {
        "window": _window(module, kwargs.get("sliding_window")),
        "sinks": kwargs.get("s_aux"),
        "softcap": kwargs.get("softcap"),
        "attention_bias": kwargs.get("position_bias"),
        "cu_seqlens": whole.cu_seqlens,
        "scale": scaling,
    }
    is_causal = kwargs.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not is_causal or options["attention_bias"] is not None:
        what = "position biases" if is_causal else "attention that is not causal"
        raise ParallelConfigError(
            f"{type(module).__name__} with {what}.", rule="causal attention by position alone"
        )
    if whole.mask is not None:
        name = "attention_mask" if whole.mask.dtype == torch.bool else "attention_bias"
        options[name] = whole.mask
    options = {name: option for name, option in options.items() if option is not None}
    _check_options(attention.local_attention, [*options, *(["dropout_p"] if dropout else [])])
    whole.layers += 1
    out = attention(
        *(tensor.transpose(1, 2) for tensor in (query, key, value)),  # [b, s_r, h, d]
        causal=whole.causal,
        dropout_p=dropout,
        sequence_layout=whole.layout,
        **options,
    )
    return out, None


def _window(module: torch.nn.Module, sliding_window: int | None) -> tuple[int, int] | None:
    """transformers counts the token itself: a sliding window of 1 sees that alone."""
    config = getattr(module, "config", None)
    types, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if types and index is not None:
        slides = types[index] == "sliding_attention"
    else:
        slides = getattr(config, "sliding_window", None) is not None
    if slides and sliding_window is None:
        raise ParallelConfigError(
            f"{type(module).__name__} of a layer with a sliding window, which it does not hand "
            "to the attention function.",
            rule="without the window it would be plain causal attention",
        )
    return None if sliding_window is None else (sliding_window - 1, 0)


def _check_options(local_attention: Callable[..., Any], names: list[str]) -> None:
    parameters = inspect.signature(local_attention).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    missing = [name for name in names if name not in parameters and not takes_any]
    if missing:
        raise ParallelConfigError(
            f"The model asks for {', '.join(missing)}.",
            rule=f"the local attention takes {', '.join(list(parameters)[3:])}",
            nearest="local_attention=... that takes it (see ulysses_mc.layers.local).",
        )


def _check_model(model: Any, pretrained_model: Any) -> None:
    if not isinstance(model, pretrained_model):
        raise ParallelConfigError(
            f"use_ulysses on {type(model).__name__}.",
            rule="a PreTrainedModel of transformers, before it is wrapped by DDP or DeepSpeed; "
            "other models call ulysses_mc.layers.UlyssesAttention themselves",
        )
    config = model.config
    if getattr(config, "_attn_implementation", "").startswith("ulysses_"):
        raise _unsupported(model, "its config names a Ulysses attention already")
    types = set(getattr(config, "layer_types", None) or [])
    types |= set(getattr(config, "layers_block_type", None) or [])
    if types - _LAYER_TYPES:
        raise _unsupported(model, f"it has layers of type {sorted(types - _LAYER_TYPES)}")
    if getattr(config, "is_encoder_decoder", False) or config.sub_configs:
        raise _unsupported(model, "it has several parts with masks of their own")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Conv1d):
            raise _unsupported(model, f"{name} is a convolution over tokens")


def _check_reached(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    whole = kwargs.get(MARKER)
    if whole is not None and not whole.layers:
        raise _unsupported(module, "its forward reached no attention function")


def _unsupported(model: torch.nn.Module, why: str) -> ParallelConfigError:
    return ParallelConfigError(
        f"use_ulysses on {type(model).__name__}: {why}.",
        rule="tokens meet in causal self-attention alone, and it goes through transformers' "
        "AttentionInterface",
    )


def _transformers() -> Any:
    try:
        from transformers import PreTrainedModel
    except ImportError as error:
        raise ParallelConfigError(
            "use_ulysses without transformers.",
            rule="pip install 'ulysses-mc[huggingface]'",
            nearest="ulysses_mc.layers.UlyssesAttention, which needs torch alone.",
        ) from error
    return PreTrainedModel


def _register(name: str, function: Callable[..., Any]) -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(name, function)
