"""Command-line words to a planning job; every wrong one is collected, not the first only."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from ..planning.hardware import GPU, GPUS, gpu_names, read_gpu
from ..planning.hugging_face import read_hugging_face, unread_keys
from ..planning.job import ATTENTION, PRECISIONS, RECOMPUTE, Job
from ..planning.megatron_read import read_megatron
from ..planning.model import ModelShape
from ..planning.presets import PRESETS, preset
from ..planning.problems import Problem, RequestError, either, near, one_of
from ..planning.search import Limits

_UNITS = {"": 1, "k": 1024, "m": 1024**2}
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
    model, seq_length, batch = _model(options, problems)
    gpu = _gpu(options, problems)
    numbers = {
        "seq_length": _count(options.seq_length, "--seq-length", problems) or seq_length,
        "num_gpus": _count(options.gpus, "--gpus", problems) or gpu.gpus_per_node,
        "global_batch_size": _count(options.global_batch_size, "--global-batch-size", problems)
        or batch,
    }
    if numbers["seq_length"] is None and not options.seq_length:
        problems.append(
            Problem("--seq-length is missing", "tokens of a sample", "--seq-length 8192")
        )
    if model and options.positions and model.learned_positions:
        size = _count(options.positions, "--positions", problems)
        model = replace(model, learned_positions=size or model.learned_positions)
    choices = {
        "precision": options.precision,
        "zero_stage": _choice(options.zero, "--zero", (0, 1, 2, 3), problems),
        "gradient_bytes": _choice(options.gradient_bytes, "--gradient-bytes", (0, 2, 4), problems),
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
    limits = Limits(**{n: _count(getattr(options, n), f"--{n.replace('_', '-')}", problems)
                       for n in _LIMITS})  # fmt: skip
    problems += _limit_problems(limits, fields["num_gpus"], options.fewest_gpus)
    return _build(fields, problems), limits


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
    text = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return [Problem(f"{text} = {product} does not divide {gpus} GPUs", "their product does",
                    "; ".join(options))]  # fmt: skip


def _fits(product: int, gpus: int) -> bool:
    return gpus % product == 0


def _divides(gpus: int, others: int, size: int) -> bool:
    return gpus % (others * size) == 0


def _build(fields: dict[str, Any], problems: list[Problem]) -> Job:
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
    if options.megatron_args:
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
        if Path(options.model).exists():
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
    node = _count(options.gpus_per_node, "--gpus-per-node", problems)
    try:
        return read_gpu(options.gpu, node, options.profile)
    except RequestError as error:
        problems += error.problems
        return GPUS["h100"]


def _count(word: str | None, name: str, problems: list[Problem]) -> int | None:
    """'8192', '128K', '1.5M', '1_000' as a number; None if there is no word or a wrong one."""
    if word is None:
        return None
    match = re.fullmatch(r"([0-9][0-9_,]*(?:\.[0-9]+)?)([kKmM]?)", word.strip())
    value = float(match[1].replace("_", "").replace(",", "")) * _UNITS[match[2].lower()] if match \
        else 0.0  # fmt: skip
    if value < 1 or not value.is_integer():
        problems.append(
            Problem(f"{name} is {word!r}", "a whole number from 1 up, such as 8192, 128K or 1M",
                    f"{name} {max(round(value), 1)}" if match else "")
        )  # fmt: skip
        return None
    return int(value)


def _choice(word: str, name: str, allowed: tuple[int, ...], problems: list[Problem]) -> int:
    if word.isdigit() and int(word) in allowed:
        return int(word)
    problems += one_of(name, word, allowed)
    return allowed[0]
