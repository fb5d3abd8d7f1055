"""The same weights under Megatron's names (one rank, its local layers) and those of Llama in
Hugging Face transformers.

    Megatron                                     Llama
    self_attention.linear_qkv [K (H/K + 2) d, h] q_proj [H d, h], k_proj, v_proj [K d, h]
    mlp.linear_fc1 [2 f, h]                      gate_proj, up_proj [f, h]

linear_qkv holds, for each of the K key/value heads, its H/K query heads, its key, its value.
"""

from __future__ import annotations

import re

import torch

Weights = dict[str, torch.Tensor]

_OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_IN_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_QKV, _FC1 = "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"
_Q, _K, _V = (f"self_attn.{name}_proj.weight" for name in "qkv")
_GATE, _UP = "mlp.gate_proj.weight", "mlp.up_proj.weight"


def to_llama(weights: Weights, groups: int, head_dim: int) -> Weights:
    """Llama's names and shapes.

    Raises:
        KeyError: a weight that a Llama does not have.
    """
    result: Weights = {}
    for name, weight in weights.items():
        if name in _OUTSIDE:
            result[_OUTSIDE[name]] = weight
            continue
        layer = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
        if layer is None:
            raise KeyError(name)
        prefix, rest = f"model.layers.{layer[1]}.", layer[2]
        if rest == _QKV:
            heads = weight.unflatten(0, (groups, -1, head_dim))  # [K, H/K + 2, d, h]
            result[prefix + _Q] = heads[:, :-2].flatten(0, 2)
            result[prefix + _K] = heads[:, -2].flatten(0, 1)
            result[prefix + _V] = heads[:, -1].flatten(0, 1)
        elif rest == _FC1:
            result[prefix + _GATE], result[prefix + _UP] = weight.chunk(2)
        else:
            result[prefix + _IN_LAYER[rest]] = weight
    return {name: weight.clone().contiguous() for name, weight in result.items()}


def to_megatron(weights: Weights, groups: int, head_dim: int) -> Weights:
    """The inverse of to_llama."""
    outside = {llama: megatron for megatron, llama in _OUTSIDE.items()}
    in_layer = {llama: megatron for megatron, llama in _IN_LAYER.items()}
    result: Weights = {}
    for name, weight in weights.items():
        if name in outside:
            result[outside[name]] = weight
            continue
        layer = re.match(r"(model\.layers\.(\d+)\.)(.*)", name)
        if layer is None:
            raise KeyError(name)
        llama, prefix, rest = layer[1], f"decoder.layers.{layer[2]}.", layer[3]
        if rest == _Q:
            parts = [weight, weights[llama + _K], weights[llama + _V]]
            heads = [part.unflatten(0, (groups, -1, head_dim)) for part in parts]
            result[prefix + _QKV] = torch.cat(heads, 1).flatten(0, 2)
        elif rest == _GATE:
            result[prefix + _FC1] = torch.cat([weight, weights[llama + _UP]])
        elif rest not in (_K, _V, _UP):
            result[prefix + in_layer[rest]] = weight
    return result
