"""Whether a Megatron model really runs its attention over whole sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..parallel_state.errors import ParallelConfigError
from .core_attention import UlyssesCoreAttention
from .dropout import ShardDropout

if TYPE_CHECKING:
    from ..parallel_state.state import ParallelState

# Layers that mix tokens otherwise than by a core attention.
_SEQUENCE_MIXERS = ("MambaMixer", "GatedDeltaNet", "KimiDeltaAttention", "AbsorbedMLASelfAttention")
# PyTorch's own, which a model may have beside Megatron's layers.
_TORCH_MIXERS = (torch.nn.MultiheadAttention, torch.nn.RNNBase)
_BIAS_DROPOUT_ADDS = ("self_attn_bda", "cross_attn_bda", "mlp_bda", "mamba_bda")


def check_wired(model: Any, state: ParallelState) -> None:
    """Refuses a model that would train on shards as if they were whole sequences.

    Args:
        model: a Megatron model, its chunks of a virtual pipeline as a list, wrapped or not.
        state: what `initialize_model_parallel` returned.

    Raises:
        ParallelConfigError: an interleaved pipeline would mistake messages for one another; or
            with ulysses > 1 some attention is not inside the exchange, mixes
            tokens in a way that is not known to be exact, or some dropout would draw the same
            mask on all Ulysses ranks. Names the layers.
    """
    config = state.config
    chunks = model if isinstance(model, (list, tuple)) else [model]
    _check_pipeline(chunks)
    ulysses, ring = config.ulysses_parallel_size, config.ring_parallel_size
    if ring > 1:
        raise ParallelConfigError(
            f"ring_parallel_size={ring}.",
            rule="there is no ring attention yet",
            nearest=f"ring_parallel_size 1 with ulysses_parallel_size {ulysses * ring}.",
        )
    if ulysses == 1:
        return
    modules = [item for chunk in chunks for item in chunk.named_modules()]
    _check_attention(modules, state)
    _check_mixers(modules, ulysses)
    _check_torch_mixers(modules, ulysses)
    _check_positions(modules, ulysses)
    _check_latent(modules, config.tensor_model_parallel_size, ulysses)
    _check_dropout(modules, ulysses)


def _check_pipeline(chunks: Any) -> None:
    """Two stages interleaved send both ways to one another, in one batch if the config says so."""
    if len(chunks) == 1:
        return
    config = chunks[0].config
    if config.pipeline_model_parallel_size != 2 or config.overlap_p2p_comm:
        return
    mixed = [
        name for name in ("batch_p2p_comm", "variable_seq_lengths") if getattr(config, name, False)
    ]
    if mixed:
        raise ParallelConfigError(
            f"{len(chunks)} model chunks on each of 2 pipeline stages with {' and '.join(mixed)}, "
            "without overlap_p2p_comm.",
            rule="messages of one batch between the same two ranks are taken in order, so "
            "activations and gradients would be mistaken for one another",
            nearest="overlap_p2p_comm=True with batch_p2p_comm=False; or 4 pipeline stages.",
        )


def _check_attention(modules: list[tuple[str, torch.nn.Module]], state: ParallelState) -> None:
    unwired = []
    for name, module in modules:
        core = getattr(module, "core_attention", None)
        if isinstance(core, torch.nn.Module) and not isinstance(core, UlyssesCoreAttention):
            unwired.append(f"{name}.core_attention ({type(core).__name__})")
        elif isinstance(core, UlyssesCoreAttention):
            over, ranks = _ranks_of(core.group), list(state.ranks("ulysses"))
            if over is None:
                unwired.append(f"{name}.core_attention (over a group that was destroyed)")
            elif over != ranks:
                unwired.append(f"{name}.core_attention (over ranks {over}, not {ranks})")
    if unwired:
        raise _error(
            unwired,
            state.config.ulysses_parallel_size,
            "every core attention runs between the exchanges of the Ulysses group of this state",
            "build the model with with_ulysses(spec), after initialize_model_parallel.",
        )


def _ranks_of(group: dist.ProcessGroup) -> list[int] | None:
    """Global ranks of a group; None if it no longer exists."""
    try:
        return dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return None


def _check_mixers(modules: list[tuple[str, torch.nn.Module]], ulysses: int) -> None:
    found = [
        f"{name} ({type(module).__name__})"
        for name, module in modules
        if any(base.__name__ in _SEQUENCE_MIXERS for base in type(module).__mro__)
    ]
    if found:
        raise _error(
            found,
            ulysses,
            "only softmax attention is exact between the exchanges; Mamba and linear attention "
            "carry a state from token to token",
            "ulysses_parallel_size 1, or a stack of attention layers.",
        )


def _check_torch_mixers(modules: list[tuple[str, torch.nn.Module]], ulysses: int) -> None:
    """A call of `scaled_dot_product_attention` in a module of one's own cannot be seen."""
    found = [
        f"{name or 'model'} ({type(module).__name__})"
        for name, module in modules
        if isinstance(module, _TORCH_MIXERS)
    ]
    if found:
        raise _error(
            found,
            ulysses,
            "it would mix the tokens of this rank alone, as if they were the whole sequence",
            "UlyssesAttention between projections of one's own; or ulysses_parallel_size 1.",
        )


def _check_positions(modules: list[tuple[str, torch.nn.Module]], ulysses: int) -> None:
    """T5 and BERT number the tokens of each rank themselves, from 0."""
    found = [
        f"{name or 'model'} ({type(module).__name__} with learned_absolute positions)"
        for name, module in modules
        if type(module).__name__ in ("T5Model", "BertModel")
        and getattr(module, "position_embedding_type", None) == "learned_absolute"
    ]
    if found:
        raise _error(
            found,
            ulysses,
            "positions are those of the whole sequence, which this model does not take",
            "position_embedding_type='rope'.",
        )


def _check_latent(modules: list[tuple[str, torch.nn.Module]], tensor: int, ulysses: int) -> None:
    """Megatron's own layers lose a gradient there, with and without Ulysses (0.16.1, 0.19.2)."""
    found = [
        f"{name}.linear_kv_down_proj (ColumnParallelLinear)"
        for name, module in modules
        if type(getattr(module, "linear_kv_down_proj", None)).__name__ == "ColumnParallelLinear"
    ]
    if found and tensor > 1:
        raise _error(
            found,
            ulysses,
            "the heads of all tensor-parallel ranks share the rotary part of the keys, whose "
            f"gradient this layer does not sum over tensor_model_parallel_size={tensor}",
            "tensor_model_parallel_size 1.",
        )


def _check_dropout(modules: list[tuple[str, torch.nn.Module]], ulysses: int) -> None:
    unwired = []
    for name, module in modules:
        dropout = getattr(module, "embedding_dropout", None)
        if isinstance(dropout, torch.nn.Dropout) and dropout.p:
            unwired += [f"{name}.embedding_dropout"] * (not isinstance(dropout, ShardDropout))
        if getattr(module, "hidden_dropout", 0):
            for slot in _BIAS_DROPOUT_ADDS:
                add = getattr(module, slot, None)
                if getattr(add, "__name__", None) == "get_bias_dropout_add":
                    unwired.append(f"{name}.{slot}")
    if unwired:
        raise _error(
            unwired,
            ulysses,
            "dropout masks differ between the shards of a sequence",
            "with_ulysses(spec) for the layers, and wire_dropout(model) for the embedding.",
        )


def _error(names: list[str], ulysses: int, rule: str, nearest: str) -> ParallelConfigError:
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return ParallelConfigError(
        f"ulysses_parallel_size={ulysses} with {shown}.", rule=rule, nearest=nearest
    )
