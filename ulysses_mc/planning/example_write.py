"""The YAML config of examples/pretrain_gpt.py for an estimate."""

from __future__ import annotations

from typing import Any

from .estimate import Estimate


def write_yaml(estimate: Estimate) -> str:
    """The estimate as a config of the example, defaults left out."""
    job, setting, model = estimate.job, estimate.setting, estimate.job.model
    sections: dict[str, dict[str, Any]] = {
        "parallel": {
            "tensor_model_parallel_size": setting.tp,
            "pipeline_model_parallel_size": setting.pp,
            "ulysses_parallel_size": setting.ulysses,
            "ring_parallel_size": setting.ring,
        },
        "model": {
            "num_layers": model.num_layers,
            "hidden_size": model.hidden_size,
            "num_attention_heads": model.num_attention_heads,
            "num_query_groups": model.num_query_groups,
            "ffn_hidden_size": model.ffn_hidden_size,
            "seq_length": job.seq_length,
            "vocab_size": model.vocab_size,
            "normalization": "LayerNorm" if model.layer_norm else "RMSNorm",
            "swiglu": model.gated_mlp,
            "position_embedding_type": "learned_absolute" if model.learned_positions else "rope",
            "rotary_base": int(model.rotary_base),
            "share_embeddings_and_output_weights": model.tied_embeddings,
            "transformer_impl": "transformer_engine",
            "local_attention": "spec",
            "recompute": setting.recompute,
        },
        "batch": {
            "micro_batch_size": setting.micro_batch,
            "global_batch_size": job.global_batch_size,
        },
        "optimizer": {"use_distributed_optimizer": job.zero_stage > 0},
        "training": {"precision": "fp32" if job.precision == "fp32" else "bf16"},
    }
    if setting.vpp > 1:
        sections["parallel"]["virtual_pipeline_model_parallel_size"] = setting.vpp
    if setting.ep > 1:
        sections["parallel"]["expert_model_parallel_size"] = setting.ep
        sections["parallel"]["expert_tensor_parallel_size"] = 1
    transformer = _transformer_fields(estimate)
    lines = [f"# {model.name}: {setting.label()} on {job.num_gpus} x {job.gpu.name}"]
    if setting.ring > 1:
        lines.append("# The example has no ring attention: it refuses ring_parallel_size > 1.")
    lines.append("device: cuda")
    for section, values in sections.items():
        lines.append(f"{section}:")
        lines += [f"  {name}: {_scalar(value)}" for name, value in values.items()]
        if section == "model" and transformer:
            lines.append("  transformer:")
            lines += [f"    {name}: {_scalar(value)}" for name, value in transformer.items()]
    return "\n".join(lines) + "\n"


def _transformer_fields(estimate: Estimate) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig that the example passes on."""
    job, setting, model = estimate.job, estimate.setting, estimate.job.model
    fields: dict[str, Any] = {}
    if model.mla:
        fields |= {"multi_latent_attention": True, "kv_lora_rank": model.mla.kv_lora_rank,
                   "qk_head_dim": model.head_dim - model.mla.rope_head_dim,
                   "qk_pos_emb_head_dim": model.mla.rope_head_dim,
                   "v_head_dim": model.value_dim}  # fmt: skip
        fields["q_lora_rank"] = model.mla.q_lora_rank  # none is not Megatron's default
    elif model.head_dim * model.num_attention_heads != model.hidden_size:
        fields["kv_channels"] = model.head_dim
    if model.linear_bias:
        fields["add_bias_linear"] = True
    if model.qkv_bias:
        fields["add_qkv_bias"] = True
    if model.qk_norm:
        fields["qk_layernorm"] = True
    if setting.tp > 1 and job.tp_sequence_sharding:
        fields["sequence_parallel"] = True
    if model.moe:
        fields |= {"num_moe_experts": model.moe.num_experts,
                   "moe_router_topk": model.moe.top_k,
                   "moe_ffn_hidden_size": model.moe.ffn_hidden_size,
                   "moe_token_dispatcher_type": "alltoall"}  # fmt: skip
        if model.moe.shared_ffn_hidden_size:
            fields["moe_shared_expert_intermediate_size"] = model.moe.shared_ffn_hidden_size
        if model.moe.num_dense_layers:
            pattern = [int(i >= model.moe.num_dense_layers) for i in range(model.num_layers)]
            fields["moe_layer_freq"] = pattern
    if job.model.num_layers % (setting.pp * setting.vpp):
        fields["account_for_embedding_in_pipeline_split"] = True
        fields["account_for_loss_in_pipeline_split"] = True
    return fields


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
