"""What a config or a Megatron command line will do, and everything that is wrong with it.

ulysses-mc explain examples/configs/cpu_demo.yaml --rank 3
ulysses-mc explain --gpu h100 --ranks 64 --megatron-args "torchrun ... pretrain_gpt.py ..."
ulysses-mc explain run.sh        a shell script that holds the command line
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from ..planning.example_read import read_yaml
from ..planning.explain import as_dict, as_text, explain
from ..planning.hardware import read_gpu
from ..planning.job import MOST
from ..planning.megatron_read import read_megatron
from ..planning.problems import Problem, RequestError, read_text
from ..planning.run import Run
from ..planning.run_problems import all_problems
from ..planning.shell_script import flags_of_script
from .words import count, whole

HELP = "explain a config or a Megatron command line before it is launched"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", nargs="?", metavar="CONFIG", help="YAML of examples/pretrain_gpt.py, or a shell "
        "script with a Megatron command line")  # fmt: skip
    add("--megatron-args", metavar="FLAGS", help="a Megatron command line, in one word")
    add("--ranks", metavar="N", help="ranks in total, if the config does not say")
    add("--rank", metavar="R", default="0", help="whose place, groups and shapes (default: 0)")
    add("--gpu", metavar="GPU", help="check that the memory fits, and time for, this GPU")
    add("--json", action="store_true", help="as JSON")


def run(options: argparse.Namespace, problems: list[Problem]) -> int:
    problems = list(problems)
    rank = whole(options.rank, "--rank", 0, problems)
    # A wrong number says nothing: what follows is checked with the config's own.
    ranks = count(options.ranks, "--ranks", problems) or 0
    if ranks > MOST["gpus"]:
        most = MOST["gpus"]
        problems.append(Problem(f"--ranks {ranks}", f"at most {most}", f"--ranks {most}"))
        ranks = 0
    gpu = None
    if options.gpu is not None:
        try:
            gpu = read_gpu(options.gpu)
        except RequestError as error:
            problems += error.problems
    try:
        described = _read(options)
    except RequestError as error:
        raise RequestError([*problems, *error.problems]) from None
    if ranks:
        described = replace(described, world_size=ranks)
    problems += all_problems(described, gpu, rank)
    if problems:
        raise RequestError(problems)
    explanation = explain(described, gpu, rank)
    print(json.dumps(as_dict(explanation), indent=2) if options.json else as_text(explanation))
    return 0


def _read(options: argparse.Namespace) -> Run:
    if options.megatron_args is not None:
        if options.config:
            text = f"CONFIG {options.config!r} and --megatron-args"
            raise RequestError([Problem(text, "a run is told once", "one of the two")])
        return read_megatron(options.megatron_args, "--megatron-args")
    if not options.config:
        text = "nothing to explain"
        raise RequestError([Problem(text, "CONFIG or --megatron-args", "CONFIG.yaml")])
    path = Path(options.config)
    if path.suffix in (".yaml", ".yml"):
        return read_yaml(path)
    text = read_text(path, "YAML of the example (.yaml), or a script with Megatron's flags")
    if "--num-layers" not in text:
        rule = "YAML of the example (.yaml), or a script with Megatron's flags"
        raise RequestError([Problem(f"{path} holds no --num-layers", rule)])
    return read_megatron(flags_of_script(text), path.name)
