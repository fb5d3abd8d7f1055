"""A run from Megatron-LM's command line. Names and defaults: megatron.training.arguments 0.19."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from .example_keys import rate_problems
from .fields import Fields
from .hugging_face import model_problems
from .megatron_layout import chunks, context_sizes, hand_made, runs_on
from .megatron_names import OTHER, READ, SWITCHES
from .model import MLAShape, ModelShape, MoEShape
from .problems import Problem
from .run import Run
from .shell_script import join_lines

_LAUNCHER = ("nproc_per_node", "nproc-per-node", "nnodes")


def read_megatron(command: str | Sequence[str], source: str = "command line") -> Run:
    """The run that a Megatron command line describes; torchrun's own options are understood.

    Args:
        command: with or without `torchrun ... pretrain_gpt.py` in front.
        source: for messages.

    Returns:
        The run. What is wrong with it is in its `problems`, not raised, so that all of it can
        be told at once.
    """
    words, unreadable = _words(command, source)
    values, problems, unread = _parse(words, source)
    problems = [*unreadable, *problems]
    fields = Fields(values, source)
    fields.problems += problems
    if "lr" in values and "min-lr" in values:
        rates = values["lr"], values["min-lr"]
        fields.problems += rate_problems(*rates, f"{source}: ", ("--lr", "--min-lr"))
    model = _model(fields)
    derived = "kv-channels" not in values and model.mla is None
    fields.problems += model_problems(model, source, fields.problems, derived=derived)
    return _run(fields, model, source, tuple(unread))


def _words(command: str | Sequence[str], source: str) -> tuple[list[str], list[Problem]]:
    if not isinstance(command, str):
        return list(command), []
    text = join_lines(command)
    try:
        return shlex.split(text, comments=True), []
    except ValueError as error:  # a quote that is not closed
        problem = Problem(f"{source}: {str(error).lower()}", "words as a shell reads them")
        return text.replace('"', " ").replace("'", " ").split(), [problem]


def _parse(words: list[str], source: str) -> tuple[dict[str, Any], list[Problem], list[str]]:
    """Flags to values (True for switches), problems, and flags that are not used."""
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    unread: list[str] = []
    known = [*SWITCHES, *READ, *OTHER, *_LAUNCHER]
    for flag, given in _flags(words):
        if flag in SWITCHES and not given:
            values[flag] = True
        elif flag in READ or flag in _LAUNCHER:
            if not given:
                problems.append(Problem(f"{source}: --{flag} has no value", "it takes one"))
            several = ("hierarchical-context-parallel-sizes", "cp-comm-type", "spec",
                       "recompute-modules")  # fmt: skip
            values[flag] = given if flag in several else given[0] if given else None
        elif flag not in OTHER and flag not in SWITCHES:
            near = get_close_matches(flag, known, n=1, cutoff=0.88)
            if near:
                problems.append(
                    Problem(f"{source}: unknown flag --{flag}", "a known flag", f"--{near[0]}")
                )
            else:
                unread.append(f"--{flag}")
    return values, problems, unread


def _flags(words: Iterable[str]) -> list[tuple[str, list[str]]]:
    """(flag, values) in order; `--a=b` too. Words before the first flag or after -- are dropped."""
    found: list[tuple[str, list[str]]] = []
    last: list[str] = []
    for word in words:
        if word == "--":
            last = []
        elif word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            last = [value] if equals else []
            found.append((name, last))
        elif not word.endswith(".py"):
            last.append(word)
    return found


def _model(fields: Fields) -> ModelShape:
    given = fields.values
    layers, hidden = fields.whole("num-layers"), fields.whole("hidden-size")
    heads = fields.whole("num-attention-heads")
    grouped = fields.flag("group-query-attention")
    groups = fields.whole("num-query-groups", default=1) if grouped else heads
    if "num-query-groups" in given and not grouped:
        fields.problems.append(
            Problem(
                f"{fields.source}: --num-query-groups {given['num-query-groups']} without "
                "--group-query-attention",
                "Megatron ignores the number without the switch",
                "--group-query-attention",
            )
        )
    swiglu, norm = fields.flag("swiglu"), fields.text("normalization", "LayerNorm")
    bias = not fields.flag("disable-bias-linear")
    usual = int(4 * hidden * 2 / 3) // 64 * 64 if swiglu else 4 * hidden
    ffn = fields.whole("ffn-hidden-size", default=max(usual, 1))
    learned = fields.text("position-embedding-type", "learned_absolute") == "learned_absolute"
    positions = fields.whole("max-position-embeddings", default=1)
    positions = max(positions, fields.whole("seq-length", default=1))
    mla = _mla(fields)
    nope = fields.whole("qk-head-dim", default=128) if mla else 0
    return ModelShape(
        name="Megatron GPT",
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads if mla else groups,
        head_dim=nope + mla.rope_head_dim
        if mla
        else fields.whole("kv-channels", default=max(hidden // heads, 1)),
        value_head_dim=fields.whole("v-head-dim", default=128) if mla else 0,
        ffn_hidden_size=ffn,
        vocab_size=_vocabulary(fields),
        gated_mlp=swiglu,
        layer_norm=norm == "LayerNorm",
        linear_bias=bias,
        qkv_bias=fields.flag("add-qkv-bias"),
        qk_norm=fields.flag("qk-layernorm"),
        tied_embeddings=not fields.flag("untie-embeddings-and-output-weights"),
        hidden_dropout=fields.number("hidden-dropout", default=0.1) > 0,
        learned_positions=positions if learned else 0,
        max_positions=positions,
        rotary_base=fields.number("rotary-base", default=10000.0),
        moe=_moe(fields, ffn, layers),
        mla=mla,
    )


def _vocabulary(fields: Fields) -> int:
    if fields.values.get("padded-vocab-size"):
        return fields.whole("padded-vocab-size")
    # The tokenizer says it where the flags do not; GPT-2's is the usual one.
    size = fields.whole("vocab-size", default=50257)
    unit = fields.whole("make-vocab-size-divisible-by", default=128)
    unit *= fields.whole("tensor-model-parallel-size", default=1)
    return -(-size // unit) * unit


def _mla(fields: Fields) -> MLAShape | None:
    if not fields.flag("multi-latent-attention"):
        return None
    return MLAShape(
        q_lora_rank=fields.whole("q-lora-rank") if fields.values.get("q-lora-rank") else None,
        kv_lora_rank=fields.whole("kv-lora-rank", default=32),
        rope_head_dim=fields.whole("qk-pos-emb-head-dim", default=64),
    )


def _moe(fields: Fields, ffn: int, layers: int) -> MoEShape | None:
    if not fields.values.get("num-experts"):
        return None
    frequency = str(fields.values.get("moe-layer-freq", "1"))
    dense = 0
    if "[0]" in frequency:  # "([0]*3+[1]*58)"
        digits = frequency.split("[0]*")[-1].split("+")[0].strip("() ")
        dense = int(digits) if digits.isdigit() else 1
    return MoEShape(
        num_experts=fields.whole("num-experts"),
        top_k=fields.whole("moe-router-topk", default=2),
        ffn_hidden_size=fields.whole("moe-ffn-hidden-size", default=ffn),
        shared_ffn_hidden_size=fields.whole(
            "moe-shared-expert-intermediate-size", default=0, minimum=0
        ),
        num_dense_layers=min(dense, layers),
    )


def _run(fields: Fields, model: ModelShape, source: str, unread: tuple[str, ...]) -> Run:
    tp = fields.whole("tensor-model-parallel-size", default=1)
    pp = fields.whole("pipeline-model-parallel-size", default=1)
    ulysses, ring = context_sizes(fields)
    micro = fields.whole("micro-batch-size", default=1)
    nodes = fields.whole("nnodes", default=1)
    per_node = fields.whole("nproc_per_node", "nproc-per-node", default=0, minimum=0)
    sharded = fields.flag("use-distributed-optimizer")
    precision = "fp8" if fields.values.get("fp8-format") else "fp32"
    if precision == "fp32" and (fields.flag("bf16") or fields.flag("fp16")):
        precision = "bf16"
    # The table of learned positions is as large as it must be: what is wrong with it is told once.
    positions = fields.whole("max-position-embeddings", default=0, minimum=0)
    etp = fields.whole("expert-tensor-parallel-size", default=tp)
    world = nodes * per_node
    dp = max(world // (tp * pp * ulysses * ring), 1)
    return Run(
        source=source,
        model=model,
        seq_length=fields.whole("seq-length"),
        micro_batch_size=micro,
        global_batch_size=fields.whole("global-batch-size", default=micro * dp),
        world_size=world,
        tp=tp,
        ulysses=ulysses,
        ring=ring,
        pp=pp,
        vpp=chunks(fields, model.num_layers, pp),
        ep=fields.whole("expert-model-parallel-size", default=1),
        etp=etp if etp != tp else None,
        recompute=_recompute(fields),
        precision=precision,
        zero_stage=_zero_stage(fields, sharded),
        tp_sequence_sharding=fields.flag("sequence-parallel") and tp > 1,
        attention="unfused" if fields.values.get("attention-backend") == "unfused" else "flash",
        kernels="plain" if fields.values.get("transformer-impl") == "local" else "fused",
        offload_optimizer=fields.flag("optimizer-cpu-offload"),
        ends_count=fields.flag("account-for-embedding-in-pipeline-split")
        and fields.flag("account-for-loss-in-pipeline-split"),
        unread=unread,
        runs_on=runs_on(fields),
        positions=positions,
        problems=(*fields.problems, *hand_made(fields)),
    )


def _zero_stage(fields: Fields, sharded: bool) -> int:
    strategy = fields.values.get("data-parallel-sharding-strategy")
    stages = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
    if strategy is None:
        return 1 if sharded else 0
    return stages[fields.text("data-parallel-sharding-strategy", "optim", stages)]


def _recompute(fields: Fields) -> str:
    if fields.flag("recompute-activations"):
        return "selective"
    return fields.text("recompute-granularity", "none", ("none", "selective", "full"))
