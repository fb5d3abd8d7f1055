"""The Megatron model, optimizer and learning-rate schedule that a config describes."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from ulysses_mc.layers import check_wired, wire_dropout, wire_rope
from ulysses_mc.parallel_state import ParallelState

from .config import Config
from .errors import UserError
from .model_rules import ffn_hidden_size
from .preflight import RunShape
from .specs import gpt_spec, hybrid_spec


def transformer_config(config: Config, device: torch.device) -> TransformerConfig:
    """Megatron's own config: ours translated, then `model.transformer` on top of it."""
    model, parallel = config.model, config.parallel
    cuda, bf16 = device.type == "cuda", config.training.precision == "bf16"
    dtype = torch.bfloat16 if bf16 else torch.float32
    interleaved = (parallel.virtual_pipeline_model_parallel_size or 1) > 1
    fields: dict[str, Any] = {
        "num_layers": number_of_layers(config),
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups or model.num_attention_heads,
        "ffn_hidden_size": ffn_hidden_size(config),
        "normalization": model.normalization,
        "gated_linear_unit": model.swiglu,
        "activation_func": torch.nn.functional.silu if model.swiglu else torch.nn.functional.gelu,
        "add_bias_linear": False,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": parallel.virtual_pipeline_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "expert_model_parallel_size": parallel.expert_model_parallel_size,
        "expert_tensor_parallel_size": parallel.expert_tensor_parallel_size,
        "bf16": bf16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        # The loss is a sum over tokens, divided once by the number of tokens of the global batch.
        "calculate_per_token_loss": True,
        # Initial weights drawn whole, then cut: the same for every tensor-parallel size.
        "use_cpu_initialization": not cuda,
        # Batched, the messages of two interleaved stages would be mistaken for one another; and
        # gloo has no batched send and receive.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": cuda and not interleaved,
        # Fused kernels need CUDA, TransformerEngine or apex.
        "bias_activation_fusion": cuda,
        "bias_dropout_fusion": cuda,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        **_recompute(model.recompute),
    }
    latent = model.transformer.get("multi_latent_attention")  # its ranks are fields of their own
    kind = MLATransformerConfig if latent else TransformerConfig
    try:
        return kind(**{**fields, **model.transformer})
    except (ValueError, AssertionError, TypeError) as error:
        raise UserError(f"Megatron refuses this model: {error}") from error


def number_of_layers(config: Config) -> int:
    if config.model.kind == "gpt":
        return config.model.num_layers
    return len((config.model.hybrid_layer_pattern or "").split("/")[0].replace("|", ""))


def _recompute(mode: str) -> dict[str, Any]:
    if mode == "none":
        return {}
    if mode == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


def build_chunk(
    config: Config, shape: RunShape, megatron: TransformerConfig, vp_stage: int | None
) -> torch.nn.Module:
    """One pipeline stage, or one chunk of it in an interleaved pipeline."""
    from megatron.core import parallel_state

    model = config.model
    common: dict[str, Any] = {
        "vocab_size": shape.padded_vocab_size,
        # Of the data, not of the padding that a layout needs: checkpoints fit any layout.
        "max_sequence_length": max(model.seq_length, config.evaluation.seq_length or 0),
        "pre_process": parallel_state.is_pipeline_first_stage(
            ignore_virtual=False, vp_stage=vp_stage
        ),
        "post_process": parallel_state.is_pipeline_last_stage(
            ignore_virtual=False, vp_stage=vp_stage
        ),
        "share_embeddings_and_output_weights": model.share_embeddings_and_output_weights,
        "position_embedding_type": model.position_embedding_type,
        "rotary_base": model.rotary_base,
        "vp_stage": vp_stage,
    }
    if model.kind == "gpt":
        from megatron.core.models.gpt.gpt_model import GPTModel

        return GPTModel(megatron, gpt_spec(config, megatron, vp_stage), **common)
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return HybridModel(
        megatron, hybrid_spec(config), hybrid_layer_pattern=model.hybrid_layer_pattern, **common
    )


def build_model(
    config: Config, shape: RunShape, state: ParallelState, device: torch.device
) -> list[DistributedDataParallel]:
    """The chunks of this rank, on `device`, in Megatron's DistributedDataParallel."""
    megatron = transformer_config(config, device)
    chunks = config.parallel.virtual_pipeline_model_parallel_size
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.optimizer.use_distributed_optimizer,
        overlap_grad_reduce=config.optimizer.overlap_grad_reduce,
        overlap_param_gather=config.optimizer.overlap_param_gather,
    )
    model = []
    for stage in range(chunks) if chunks else [None]:
        chunk = build_chunk(config, shape, megatron, stage).to(device)
        wire_dropout(chunk)
        if config.data.isolate_documents:
            wire_rope(chunk)
        if config.training.precision == "bf16":
            chunk = Float16Module(megatron, chunk)
        model.append(
            DistributedDataParallel(megatron, options, chunk, disable_bucketing=bool(stage))
        )
    check_wired(model, state)
    return model


def build_optimizer(config: Config, model: list[DistributedDataParallel]) -> MegatronOptimizer:
    options, bf16 = config.optimizer, config.training.precision == "bf16"
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.min_lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.adam_beta1,
            adam_beta2=options.adam_beta2,
            adam_eps=options.adam_eps,
            clip_grad=options.clip_grad,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=options.use_distributed_optimizer,
            overlap_param_gather=options.overlap_param_gather,
        ),
        model,
    )


def build_scheduler(
    config: Config, optimizer: MegatronOptimizer, train_iters: int
) -> OptimizerParamScheduler:
    """Counts in samples, so that it goes on rightly under another data-parallel size."""
    options, batch = config.optimizer, config.batch.global_batch_size
    decay = options.lr_decay_iters or train_iters
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=min(options.lr_warmup_iters, decay - 1) * batch,
        lr_decay_steps=decay * batch,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=decay * batch,
        wd_incr_style="constant",
        # A resumed run goes on at its sample of the schedule that the config says now.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def number_of_parameters(model: list[DistributedDataParallel]) -> int:
    """Parameters of the whole model: each one counted on the one rank that owns it."""
    from megatron.core import parallel_state, tensor_parallel

    tp_first = parallel_state.get_tensor_model_parallel_rank() == 0
    count = sum(
        p.numel()
        for chunk in model
        for p in chunk.parameters()
        if (tp_first or tensor_parallel.param_is_not_tensor_parallel_duplicate(p))
        and not getattr(p, "shared", False)
    )
    total = torch.tensor([count], dtype=torch.int64, device=next(model[0].parameters()).device)
    torch.distributed.all_reduce(total, group=parallel_state.get_model_parallel_group())
    return int(total.item())
