"""Names of Megatron-LM's flags: those that are read, and those that change nothing here."""

# Flags without a value. Each is False unless given.
SWITCHES = frozenset(
    [
        "group-query-attention", "swiglu", "disable-bias-linear", "add-qkv-bias",
        "qk-layernorm", "untie-embeddings-and-output-weights", "sequence-parallel",
        "use-distributed-optimizer", "recompute-activations", "bf16", "fp16",
        "multi-latent-attention", "overlap-grad-reduce", "overlap-param-gather",
        "tp-comm-overlap", "optimizer-cpu-offload", "use-mcore-models", "use-flash-attn",
        "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
        "moe-grouped-gemm", "calculate-per-token-loss", "use-rotary-position-embeddings",
        "squared-relu", "openai-gelu", "mock-data", "no-masked-softmax-fusion",
        "no-rope-fusion", "use-torch-fsdp2", "use-megatron-fsdp", "cross-entropy-loss-fusion",
        "manual-gc", "accumulate-allreduce-grads-in-fp32", "use-checkpoint-args",
        "no-load-optim", "no-load-rng",
    ]
)  # fmt: skip
# Flags with a value that are read here.
READ = frozenset(
    [
        "num-layers", "hidden-size", "num-attention-heads", "num-query-groups", "kv-channels",
        "ffn-hidden-size", "seq-length", "max-position-embeddings", "position-embedding-type",
        "rotary-base", "normalization", "hidden-dropout", "attention-dropout", "num-experts",
        "moe-router-topk", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size",
        "moe-layer-freq", "q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim",
        "v-head-dim", "vocab-size", "padded-vocab-size", "make-vocab-size-divisible-by",
        "tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size",
        "cp-comm-type", "hierarchical-context-parallel-sizes", "expert-model-parallel-size",
        "expert-tensor-parallel-size", "num-layers-per-virtual-pipeline-stage",
        "num-virtual-stages-per-pipeline-rank", "micro-batch-size", "global-batch-size",
        "recompute-granularity", "recompute-method", "recompute-num-layers",
        "recompute-modules", "fp8-format", "spec", "attention-backend", "transformer-impl",
        "data-parallel-sharding-strategy", "decoder-first-pipeline-num-layers",
        "decoder-last-pipeline-num-layers", "pipeline-model-parallel-layout", "lr", "min-lr",
    ]
)  # fmt: skip
# Flags with a value that change nothing here.
OTHER = frozenset(
    [
        "lr-decay-style", "lr-warmup-iters", "lr-decay-iters",
        "lr-warmup-samples", "lr-warmup-fraction", "weight-decay", "clip-grad", "adam-beta1",
        "adam-beta2", "adam-eps", "init-method-std", "seed", "train-iters", "train-samples",
        "eval-iters", "eval-interval", "save", "save-interval", "load", "data-path", "split",
        "data-cache-path", "tokenizer-type", "tokenizer-model", "vocab-file", "merge-file",
        "log-interval", "tensorboard-dir", "wandb-project", "wandb-exp-name",
        "distributed-backend", "distributed-timeout-minutes", "num-workers", "fp8-recipe",
        "exit-duration-in-mins", "ckpt-format", "moe-router-load-balancing-type",
        "moe-aux-loss-coeff", "moe-token-dispatcher-type", "manual-gc-interval",
    ]
)  # fmt: skip
