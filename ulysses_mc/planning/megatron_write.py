"""The exact flags of Megatron-LM (0.19) for an estimate."""

from __future__ import annotations

from math import gcd

from .estimate import Estimate
from .job import Job, Setting, head_layout
from .model import ModelShape


def megatron_flags(estimate: Estimate) -> list[str]:
    """One flag with its value a line, as pretrain_gpt.py takes them."""
    job, setting = estimate.job, estimate.setting
    return [
        *model_flags(job.model, job, setting.tp),
        *_parallel_flags(job, setting),
        *_run_flags(job, setting),
    ]


def model_flags(model: ModelShape, job: Job, tp: int = 1) -> list[str]:
    """The model's flags."""
    gated = ["--swiglu"] if model.gated_mlp else []
    bias = [] if model.linear_bias else ["--disable-bias-linear"]
    tied = [] if model.tied_embeddings else ["--untie-embeddings-and-output-weights"]
    positions = (
        ["--position-embedding-type learned_absolute"]
        if model.learned_positions
        else ["--position-embedding-type rope", f"--rotary-base {model.rotary_base:.0f}"]
    )
    dropout = 0.1 if model.hidden_dropout else 0.0
    flags = [
        f"--num-layers {model.num_layers}",
        f"--hidden-size {model.hidden_size}",
        f"--ffn-hidden-size {model.ffn_hidden_size}",
        f"--num-attention-heads {model.num_attention_heads}",
        *_attention_flags(model),
        *gated,
        f"--normalization {'LayerNorm' if model.layer_norm else 'RMSNorm'}",
        *bias,
        *(["--add-qkv-bias"] if model.qkv_bias and not model.linear_bias else []),
        *(["--qk-layernorm"] if model.qk_norm else []),
        *tied,
        *positions,
        f"--max-position-embeddings {max(model.max_positions, job.seq_length)}",
        f"--hidden-dropout {dropout}",
        f"--attention-dropout {dropout}",
        f"--vocab-size {model.vocab_size}",
        f"--make-vocab-size-divisible-by {_vocab_unit(model.vocab_size, tp)}",
    ]
    return flags + _moe_flags(model)


def _attention_flags(model: ModelShape) -> list[str]:
    if model.mla:
        rank = [f"--q-lora-rank {model.mla.q_lora_rank}"] if model.mla.q_lora_rank else []
        return [
            "--multi-latent-attention",
            *rank,
            f"--kv-lora-rank {model.mla.kv_lora_rank}",
            f"--qk-head-dim {model.head_dim - model.mla.rope_head_dim}",
            f"--qk-pos-emb-head-dim {model.mla.rope_head_dim}",
            f"--v-head-dim {model.value_dim}",
        ]
    flags = [f"--kv-channels {model.head_dim}"]
    if model.num_query_groups != model.num_attention_heads:
        flags += ["--group-query-attention", f"--num-query-groups {model.num_query_groups}"]
    return flags


def _moe_flags(model: ModelShape) -> list[str]:
    if not model.moe:
        return []
    moe, flags = model.moe, []
    flags = [
        f"--num-experts {moe.num_experts}",
        f"--moe-router-topk {moe.top_k}",
        f"--moe-ffn-hidden-size {moe.ffn_hidden_size}",
        "--moe-grouped-gemm",
        "--moe-token-dispatcher-type alltoall",
    ]
    if moe.shared_ffn_hidden_size:
        flags.append(f"--moe-shared-expert-intermediate-size {moe.shared_ffn_hidden_size}")
    if moe.num_dense_layers:
        rest = model.num_layers - moe.num_dense_layers
        flags.append(f"--moe-layer-freq ([0]*{moe.num_dense_layers}+[1]*{rest})")
    return flags


def _vocab_unit(vocab_size: int, tp: int) -> int:
    """Pads to Megatron's 128 where that changes nothing, else by the least that tp needs."""
    return gcd(vocab_size // tp, 128) if vocab_size % tp == 0 else 128


def _parallel_flags(job: Job, setting: Setting) -> list[str]:
    flags = [
        f"--tensor-model-parallel-size {setting.tp}",
        f"--pipeline-model-parallel-size {setting.pp}",
        f"--context-parallel-size {setting.cp}",
    ]
    if setting.tp > 1 and job.tp_sequence_sharding:
        flags.append("--sequence-parallel")
    if job.tp_overlap and setting.tp > 1:
        flags.append("--tp-comm-overlap")
    if setting.vpp > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {setting.vpp}")
    if job.model.num_layers % (setting.pp * setting.vpp):
        flags.append("--account-for-embedding-in-pipeline-split")
        flags.append("--account-for-loss-in-pipeline-split")
    if setting.ep > 1:
        flags.append(f"--expert-model-parallel-size {setting.ep}")
        flags.append("--expert-tensor-parallel-size 1")
    return flags + _context_flags(job.model, setting) + _sharding_flags(job)


def _context_flags(model: ModelShape, setting: Setting) -> list[str]:
    if setting.cp == 1:
        return []
    if setting.ulysses == 1:
        return ["--cp-comm-type p2p"]
    if setting.ring > 1:  # Megatron's own: this package has no ring attention
        sizes = f"--hierarchical-context-parallel-sizes {setting.ulysses} {setting.ring}"
        return ["--cp-comm-type a2a+p2p", sizes]
    name = our_spec(model)
    return ["--cp-comm-type a2a", *([f"--spec ulysses_mc.layers.specs {name}"] if name else [])]


def our_spec(model: ModelShape) -> str | None:
    """The name in ulysses_mc.layers.specs; None where one layer spec cannot say the model.

    `--spec` gives every layer the same spec, so dense layers before experts are beyond it.
    """
    if model.moe and (model.moe.num_dense_layers or model.qk_norm):
        return None
    kind = ("_mla" if model.mla else "") + ("_moe" if model.moe else "")
    return "gpt_layer_te" + (kind or ("_qk_norm" if model.qk_norm else ""))


def remark(job: Job, setting: Setting) -> str:
    """What to know about the flags of these heads: who can run them. '' if both can."""
    if setting.ring > 1:
        return "ring attention is stock Megatron's; plan with --ring 1 for this package's layers"
    layout = head_layout(job.model, setting.tp, setting.ulysses)
    if setting.ulysses == 1 or getattr(layout, "kind", "even") == "even":
        return ""
    kind = getattr(layout, "kind", "")
    if our_spec(job.model) is None:
        return f"Megatron's own a2a refuses {kind} heads: build the layers with with_ulysses"
    return f"Megatron's own a2a refuses {kind} heads: --spec is what makes them possible"


def _sharding_flags(job: Job) -> list[str]:
    flags = {
        0: [],
        1: ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
        2: ["--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads"],
        3: ["--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params"],
    }[job.zero_stage]
    return flags + (["--optimizer-cpu-offload"] if job.offload_optimizer else [])


def _run_flags(job: Job, setting: Setting) -> list[str]:
    flags = [
        f"--seq-length {job.seq_length}",
        f"--micro-batch-size {setting.micro_batch}",
        f"--global-batch-size {job.global_batch_size}",
    ]
    if job.precision != "fp32":
        flags.append("--bf16")
    if job.precision == "fp8":
        flags.append("--fp8-format hybrid")
    if setting.recompute == "full":
        flags += ["--recompute-granularity full", "--recompute-method uniform",
                  "--recompute-num-layers 1"]  # fmt: skip
    if setting.recompute == "selective":
        flags += ["--recompute-granularity selective", "--recompute-modules core_attn"]
    flags.append(f"--attention-backend {'flash' if job.attention == 'flash' else 'unfused'}")
    return flags
