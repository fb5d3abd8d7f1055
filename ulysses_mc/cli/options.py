"""Command-line words to a planning job; every wrong one is collected, not the first only."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from ..planning.hardware import GPU, GPUS, gpu_names, read_gpu
from ..planning.hugging_face import read_hugging_face, unread_keys
from ..planning.job import ATTENTION, PRECISIONS, RECOMPUTE, Job
from ..planning.megatron_read import read_megatron
from ..planning.model import ModelShape
from ..planning.presets import PRESETS, preset
from ..planning.problems import Problem, RequestError, either, near
from ..planning.search import Limits
from .words import choice, count

_LIMITS = ("tp", "ulysses", "ring", "pp", "vpp", "ep", "micro_batch")


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that describe a job. All are words: they are checked together later."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="a name (llama-3.1-8b; --models lists them), or "
        "the path of a Hugging Face config.json")  # fmt: skip
    add("--megatron-args", metavar="FLAGS", help="the model as Megatron-LM flags, in one word; "
        "sequence length and batch are taken from them too")  # fmt: skip
    add("--seq-length", metavar="TOKENS", help="tokens of a sample: 8192, 128K, 1M")
    add("--global-batch-size", metavar="SAMPLES", help="samples of a step (default: 1 per GPU)")
    add("--gpus", metavar="N", help="GPUs in total (default: one node)")
    add("--gpu", metavar="GPU", default="h100", help=f"{', '.join(gpu_names())}; numbers may "
        "follow: h100,memory_gib=64,inter_gb_s=12.5 (default: h100)")  # fmt: skip
    add("--gpus-per-node", metavar="N", help="GPUs of one NVLink domain (default: the GPU's)")
    add(
        "--profile",
        metavar="FILE",
        help="measured links, from ulysses-mc bench; several with commas",
    )
    add("--precision", metavar="P", default="bf16", help=", ".join(PRECISIONS))
    add("--zero", metavar="STAGE", default="1", help="what is sharded over data x ulysses x ring: "
        "0 nothing, 1 optimizer (Megatron's), 2 and gradients, 3 and parameters")  # fmt: skip
    add("--gradient-bytes", metavar="B", default="0", help="2 or 4 (default: 4 with stage 0 or 1)")
    add("--no-master-weights", action="store_true", help="no fp32 copy of the weights")
    add("--recompute", metavar="CHOICES", default=",".join(RECOMPUTE),
        help="what may be chosen, with commas (default: none,selective,full)")  # fmt: skip
    add("--attention", metavar="KIND", default="flash", help=" or ".join(ATTENTION))
    add("--offload-optimizer", action="store_true", help="optimizer states in host memory")
    add("--offload-parameters", action="store_true", help="parameters in host memory")
    add("--offload-checkpoints", action="store_true", help="with full recompute, layer inputs too")
    add("--tiled-logits", action="store_true", help="output layer and loss in pieces")
    add("--tiled-mlp", action="store_true", help="MLPs in pieces along the sequence")
    add("--no-tp-sequence-sharding", action="store_true", help="without Megatron's "
        "--sequence-parallel")  # fmt: skip
    add("--tp-overlap", action="store_true", help="with Megatron's --tp-comm-overlap")
    add("--even-heads", action="store_true", help="refuse uneven head layouts")
    add("--positions", metavar="N", help="size of the table of learned positions (GPT-3)")
    for name in _LIMITS:
        option = f"--{name.replace('_', '-')}"
        add(option, metavar="N", help=f"only settings with this {name.replace('_', '-')}")


def read_job(options: argparse.Namespace, problems: list[Problem]) -> tuple[Job, Limits]:
    """The job and limits that `options` describe.

    Raises:
        RequestError: everything that is wrong, `problems` (found before) included.
    """
    problems = list(problems)
    before = len(problems)
    model, seq_length, batch = _model(options, problems)
    run_problems = problems[before:]
    gpu = _gpu(options, problems)
    tokens = "8192, 128K or 1M"
    numbers = {
        "seq_length": count(options.seq_length, "--seq-length", problems, like=tokens)
        or seq_length,
        "num_gpus": count(options.gpus, "--gpus", problems) or gpu.gpus_per_node,
        "global_batch_size": count(options.global_batch_size, "--global-batch-size", problems)
        or batch,
    }
    if numbers["seq_length"] is None and options.seq_length is None:
        problems.append(
            Problem("--seq-length is missing", "tokens of a sample", "--seq-length 8192")
        )
    size = count(options.positions, "--positions", problems, like=tokens)
    if model and size:
        if not model.learned_positions:
            text = f"--positions {size} with {model.name}, which has rotary positions"
            problems.append(Problem(text, "the size of a table of learned positions"))
        model = replace(model, learned_positions=size if model.learned_positions else 0)
    choices = {
        "precision": options.precision,
        "zero_stage": choice(options.zero, "--zero", (0, 1, 2, 3), problems),
        "gradient_bytes": choice(options.gradient_bytes, "--gradient-bytes", (0, 2, 4), problems),
        "recompute": tuple(word.strip() for word in options.recompute.split(",")),
        "attention": options.attention,
    }
    switches = ("offload_optimizer", "offload_parameters", "offload_checkpoints", "tiled_logits",
                "tiled_mlp", "tp_overlap")  # fmt: skip
    fields: dict[str, Any] = {
        "model": model or PRESETS["llama-3.1-8b"],
        "gpu": gpu,
        "seq_length": numbers["seq_length"] or 8,
        "num_gpus": numbers["num_gpus"],
        "global_batch_size": numbers["global_batch_size"] or numbers["num_gpus"],
        "master_weights": not options.no_master_weights,
        "tp_sequence_sharding": not options.no_tp_sequence_sharding,
        "uneven_heads": not options.even_heads,
        **{name: getattr(options, name) for name in switches},
        **choices,
    }
    limits = Limits(**{n: count(getattr(options, n), f"--{n.replace('_', '-')}", problems)
                       for n in _LIMITS})  # fmt: skip
    problems += _limit_problems(limits, fields["num_gpus"], options.fewest_gpus)
    problems += _unused_limits(limits, model)
    # Nothing is concluded from a model that is only half known.
    return _build(fields, problems, known=model is not None and not run_problems), limits


def _limit_problems(limits: Limits, gpus: int, any_number: bool) -> list[Problem]:
    """Sizes that do not multiply to a divisor of the GPUs, with the nearest of each that do."""
    sizes = {name: getattr(limits, name) or 1 for name in ("tp", "ulysses", "ring", "pp")}
    product = prod(sizes.values())
    if any_number or gpus % product == 0:
        return []
    options = [f"--gpus {either(near(gpus, 2 * max(gpus, product), partial(_fits, product)))}"]
    for name, size in sizes.items():
        if size > 1:
            found = near(size, gpus, partial(_divides, gpus, product // size))
            options += [f"--{name} {either(found)}"] if found else []
    given = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    text = " x ".join(given) + (f" = {product}" if len(given) > 1 else "")
    rule = "their product does" if len(given) > 1 else "it divides the GPUs"
    return [Problem(f"{text} does not divide {gpus} GPUs", rule,
                    "; ".join(options))]  # fmt: skip


def _unused_limits(limits: Limits, model: ModelShape | None) -> list[Problem]:
    """Sizes that nothing would be divided by."""
    problems = []
    if model and not model.moe and (limits.ep or 1) > 1:
        text, rule = f"--ep {limits.ep} with {model.name}", "ep divides experts, and it has none"
        problems.append(Problem(text, rule, "the same without --ep"))
    if limits.pp == 1 and (limits.vpp or 1) > 1:
        text, rule = f"--vpp {limits.vpp} with --pp 1", "chunks are of several pipeline stages"
        problems.append(Problem(text, rule, "--vpp 1; --pp 2"))
    return problems


def _fits(product: int, gpus: int) -> bool:
    return gpus % product == 0


def _divides(gpus: int, others: int, size: int) -> bool:
    return gpus % (others * size) == 0


def _build(fields: dict[str, Any], problems: list[Problem], *, known: bool) -> Job:
    if not known:
        fields = {**fields, "model": PRESETS["llama-3.1-8b"]}
    try:
        job = Job(**fields)
    except RequestError as error:
        raise RequestError([*problems, *error.problems]) from None
    if problems:
        raise RequestError(problems)
    return job


def _model(
    options: argparse.Namespace, problems: list[Problem]
) -> tuple[ModelShape | None, int | None, int | None]:
    """The model, and the sequence length and batch where Megatron's flags say them."""
    if options.megatron_args is not None:
        if options.model:
            text = f"MODEL {options.model!r} and --megatron-args"
            problems.append(Problem(text, "the model is told once", "one of the two"))
        run = read_megatron(options.megatron_args, "--megatron-args")
        missing = "seq-length is missing"
        problems += [p for p in run.problems if not (missing in p.found and options.seq_length)]
        _tell_unread("--megatron-args", list(run.unread))
        return run.model, run.seq_length, run.global_batch_size
    if not options.model:
        problems.append(
            Problem("no model is named", "MODEL or --megatron-args", "ulysses-mc plan --models")
        )
        return None, None, None
    try:
        if os.path.exists(options.model):  # unlike Path's, False for what is no name at all
            model = read_hugging_face(options.model)
            _tell_unread(options.model, unread_keys(options.model))
            return model, None, None
        return preset(options.model), None, None
    except RequestError as error:
        problems += error.problems
        return None, None, None


def _tell_unread(source: str, names: list[str]) -> None:
    if names:
        print(f"{source}: not understood and not used: {', '.join(names)}", file=sys.stderr)


def _gpu(options: argparse.Namespace, problems: list[Problem]) -> GPU:
    node = count(options.gpus_per_node, "--gpus-per-node", problems)
    try:
        return read_gpu(options.gpu, node, options.profile)
    except RequestError as error:
        problems += error.problems
        return GPUS["h100"]
