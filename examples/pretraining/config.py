"""What a run can be told: dataclasses, filled from YAML and the command line by jsonargparse.

    --config FILE.yaml --model.num_layers 8 --training.train_iters=500

Later options win. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import Any, Literal

from ulysses_mc.parallel_state import ParallelConfig

from .errors import UserError
from .misread import damaged_files, every_mistake, explain
from .problems import Problems


@dataclass
class ModelOptions:
    """The network, in Megatron's words."""

    kind: Literal["gpt", "hybrid"] = "gpt"
    """gpt: GPTModel; hybrid: HybridModel (megatron-core >= 0.19), laid out by its pattern"""
    num_layers: int = 4
    hidden_size: int = 128
    num_attention_heads: int = 8
    num_query_groups: int | None = None
    """key/value heads (GQA); default: as many as query heads"""
    ffn_hidden_size: int | None = None
    """default: 4 x hidden_size, 8/3 x hidden_size with swiglu, rounded up to 64"""
    seq_length: int = 256
    """tokens of one sample, over all Ulysses ranks"""
    vocab_size: int | None = None
    """default: the tokenizer's"""
    make_vocab_size_divisible_by: int = 128
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    swiglu: bool = True
    position_embedding_type: Literal["rope", "learned_absolute", "none"] = "rope"
    rotary_base: int = 10000
    share_embeddings_and_output_weights: bool = False
    hybrid_layer_pattern: str | None = None
    """one letter per layer of a hybrid: * attention, - MLP, M Mamba, E mixture of experts"""
    transformer_impl: Literal["local", "transformer_engine"] = "local"
    """local: Megatron's own layers, no further package; transformer_engine: needs CUDA and TE"""
    local_attention: Literal["auto", "spec", "sdpa"] = "auto"
    """between the exchanges: the layers' own core attention (auto: TransformerEngine's), or
    PyTorch's SDPA (auto: with Megatron's own layers)"""
    recompute: Literal["none", "selective", "full"] = "none"
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    transformer: dict[str, Any] = field(default_factory=dict)
    """any other field of Megatron's TransformerConfig, for example {qk_layernorm: true}"""


@dataclass
class DataOptions:
    """Megatron's .bin/.idx files, as examples/prepare_data.py writes them."""

    path: list[str | float] = field(default_factory=lambda: ["runs/data/python_stdlib/text"])
    """prefixes without .bin/.idx; or weight, prefix, weight, prefix, ..."""
    split: str = "98,2,0"
    """parts for training, validation, test"""
    description: str | None = None
    """JSON with vocab_size, end_of_document, padding; default: data.json beside the first path"""
    eod_mask_loss: bool = False
    """leave end-of-document tokens out of the loss"""
    isolate_documents: bool = False
    """documents of a sample do not see each other, positions begin anew in each, and its last
    token predicts nothing (Megatron-LM's --reset-attention-mask, --reset-position-ids and
    --eod-mask-loss)"""
    cache: str | None = None
    """folder for Megatron's sample indices; default: OUTPUT/data_cache"""


@dataclass
class BatchOptions:
    """global_batch_size = micro_batch_size x data-parallel size x accumulation steps."""

    micro_batch_size: int = 1
    global_batch_size: int = 16


@dataclass
class OptimizerOptions:
    """Megatron's Adam and OptimizerParamScheduler."""

    lr: float = 1e-3
    min_lr: float = 1e-4
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = "cosine"
    lr_warmup_iters: int = 10
    lr_decay_iters: int | None = None
    """default: train_iters"""
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = True
    """shard optimizer state over data x ulysses x ring ranks (ZeRO stage 1)"""
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False


@dataclass
class TrainingOptions:
    train_iters: int | None = None
    """default: one pass over the training data"""
    seed: int = 1234
    precision: Literal["fp32", "bf16"] = "fp32"
    self_check: bool = True
    """at start: ranks agree on config, versions and data, and attention reaches over all ranks"""


@dataclass
class EvaluationOptions:
    interval: int = 50
    """iterations between evaluations; 0: never"""
    iters: int = 4
    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    seq_length: int | None = None


@dataclass
class CheckpointOptions:
    interval: int = 100
    """iterations between checkpoints (one is also written at the end); 0: none at all"""
    resume: bool = True
    """continue from the newest checkpoint below OUTPUT/checkpoints, if there is one"""
    load: str | None = None
    """another run's checkpoints folder, or one iter_XXXXXXX in it, to start from"""
    verify: bool = True
    """compare every file with its recorded SHA-256 before loading"""


@dataclass
class LoggingOptions:
    interval: int = 1
    tensorboard: bool = True
    plot: bool = True
    peak_tflops_per_gpu: float | None = None
    """for MFU; default: known for common NVIDIA GPUs (dense bf16), not for CPUs"""


@dataclass
class Config:
    """One run."""

    output: str = "runs/pretrain"
    """folder for checkpoints, log, tensorboard files and the loss plot"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    model: ModelOptions = field(default_factory=ModelOptions)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataOptions = field(default_factory=DataOptions)
    batch: BatchOptions = field(default_factory=BatchOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    training: TrainingOptions = field(default_factory=TrainingOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    logging: LoggingOptions = field(default_factory=LoggingOptions)


@dataclass(frozen=True)
class Request:
    """A command line: the config, and what is asked besides training."""

    config: Config
    check: int | None
    """ranks to check for; 0: as many as there will be, or as one replica of the model takes"""
    processes: int | None


def parse(argv: list[str] | None = None) -> Request:
    """Reads a command line.

    Raises:
        UserError: unknown keys, wrong types, unreadable YAML: all of them.
        ParallelConfigError: every problem of the sizes in `parallel`.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(
        prog="pretrain_gpt.py", description=(__doc__ or "").split("\n\n")[0], exit_on_error=False
    )
    parser.add_argument("--config", action="config", help="YAML file; may be given several times")
    parser.add_argument(
        "--check",
        type=int,
        nargs="?",
        const=0,
        metavar="RANKS",
        help="check everything for so many ranks (default: WORLD_SIZE, or what one replica of the "
        "model takes), train nothing",
    )
    parser.add_argument(
        "--processes", type=int, metavar="GPUS", help="print how many ranks to start on a node"
    )
    parser.add_class_arguments(Config, None)
    argv = sys.argv[1:] if argv is None else argv
    problems = Problems()
    for problem in damaged_files(argv):
        problems.add(UserError(problem))
    problems.tell()
    try:
        namespace = parser.parse_args(argv)
        values = (getattr(parser, "instantiate", None) or parser.instantiate_classes)(namespace)
    except ArgumentError as error:
        known = known_keys()
        mistakes = every_mistake(parser, ArgumentError, argv, known) or [explain(str(error), known)]
        for mistake in mistakes:
            problems.add(UserError(mistake))
        problems.tell()
    names = [f.name for f in dataclasses.fields(Config)]
    config = Config(**{name: values[name] for name in names})
    return Request(config, namespace.check, namespace.processes)


def known_keys(cls: type = Config, prefix: str = "") -> dict[str, Any]:
    """Every key that a config may have, dotted, with its default (None for a section)."""
    keys: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        section = dataclasses.is_dataclass(default)
        keys[prefix + f.name] = None if section else default
        if section:
            keys |= known_keys(type(default), f"{prefix}{f.name}.")
    return keys
