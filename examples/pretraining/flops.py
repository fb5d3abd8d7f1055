"""Floating-point operations of a training step, by Megatron's convention.

3 x the forward pass (backward is twice the forward), 2 per multiply-add, causal attention counted
as half of s x s, recomputation not counted, the output layer counted once, embeddings not at all.
"""

from __future__ import annotations

from .config import Config
from .model_rules import ffn_hidden_size
from .preflight import RunShape

CONVENTION = "model FLOPs, causal attention, without recomputation"

# Dense bf16 TFLOP/s from the vendor's data sheets, by a part of the device name.
PEAK_TFLOPS = {
    "H100 PCIe": 756.0, "H100": 989.0, "H200": 989.0, "GH200": 989.0, "H800": 989.0,
    "H20": 148.0, "B200": 2250.0, "GB200": 2500.0, "B300": 2250.0, "A100": 312.0, "A800": 312.0,
    "L40S": 362.0, "L40": 181.0, "A40": 149.7, "A10": 125.0, "V100": 125.0,
}  # fmt: skip


def peak_tflops(device_name: str) -> float | None:
    """The longest name that occurs in the device's name decides."""
    for name in sorted(PEAK_TFLOPS, key=len, reverse=True):
        if name in device_name:
            return PEAK_TFLOPS[name]
    return None


def flops_per_step(config: Config, shape: RunShape) -> float | None:
    """FLOPs of one global batch; None for layers whose count is not known here (Mamba, ...)."""
    per_token = _forward_per_token(config, shape)
    return None if per_token is None else 3.0 * per_token * shape.tokens_per_step


def _forward_per_token(config: Config, shape: RunShape) -> float | None:
    model = config.model
    if model.kind == "hybrid":
        pattern = (model.hybrid_layer_pattern or "").replace("|", "")
        if set(pattern) - set("*-"):
            return None
        attention_layers, mlp_layers = pattern.count("*"), pattern.count("-")
    else:
        attention_layers = mlp_layers = model.num_layers
    if model.transformer.get("multi_latent_attention") or model.transformer.get("mtp_num_layers"):
        return None
    hidden = model.hidden_size
    head = model.transformer.get("kv_channels") or hidden // model.num_attention_heads
    query = head * model.num_attention_heads
    key_value = head * (model.num_query_groups or model.num_attention_heads)
    attention = 2 * hidden * (2 * query + 2 * key_value) + 2 * model.seq_length * query
    matrices = 3 if model.swiglu else 2
    ffn: float = ffn_hidden_size(config)
    if model.transformer.get("num_moe_experts"):
        ffn = model.transformer.get("moe_ffn_hidden_size") or ffn
        ffn *= model.transformer.get("moe_router_topk", 2)
    mlp = 2 * hidden * ffn * matrices
    return attention_layers * attention + mlp_layers * mlp + 2 * hidden * shape.padded_vocab_size
