"""The best way to divide a model over GPUs, before anything is launched.

ulysses-mc plan llama-3.1-70b --seq-length 128K --gpus 64 --global-batch-size 32
ulysses-mc plan config.json --seq-length 1M --fewest-gpus
ulysses-mc plan llama-3.1-8b --gpus 8 --global-batch-size 8 --longest-sequence --zero 3
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..planning.advice import (
    advice,
    broken_by_all,
    closest_miss,
    fewest_gpus,
    longest_sequence,
    remedies,
    why_slower,
)
from ..planning.estimate import Estimate
from ..planning.job import Job
from ..planning.presets import PRESETS
from ..planning.problems import Problem, RequestError
from ..planning.search import Limits, Plan, search
from .options import add_job_arguments, read_job
from .words import whole, writable

HELP = "find the best settings for a model on some GPUs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    add = parser.add_argument
    add("--models", action="store_true", help="list the known models and stop")
    add("--longest-sequence", action="store_true", help="find the longest sequence that fits")
    add("--fewest-gpus", action="store_true", help="find the fewest GPUs that do")
    add("--top", metavar="N", default="5", help="settings to show (default: 5)")
    add("--pick", metavar="N", default="1", help="the setting for --megatron and --yaml "
        "(default: 1, the best)")  # fmt: skip
    add("--dropped", action="store_true", help="list every other setting with its reason")
    add("--json", action="store_true", help="everything, as JSON")
    add("--megatron", action="store_true", help="Megatron-LM's flags")
    add("--yaml", action="store_true", help="the config of examples/pretrain_gpt.py")
    add("--html", metavar="FILE", help="write one self-contained page")


def run(options: argparse.Namespace, problems: list[Problem]) -> int:
    if options.models:
        for name, model in PRESETS.items():
            print(f"{name:18} {model.total_parameters / 1e9:9.3f}B")
        return 0
    problems = list(problems)
    top = whole(options.top, "--top", 1, problems)
    pick = whole(options.pick, "--pick", 1, problems)
    problems += [*_contradictions(options), *writable(options.html, "--html")]
    if options.longest_sequence and not options.seq_length:
        options.seq_length = "8K"
    job, limits = read_job(options, problems)
    job = _resized(job, limits, options)
    plan = search(job, limits)
    if not plan.ranked:
        raise RequestError(broken_by_all(plan) or [impossible(plan, limits)])
    if pick > len(plan.ranked):
        text = f"--pick {pick} of {len(plan.ranked)} settings"
        raise RequestError([Problem(text, "a setting of the list", str(len(plan.ranked)))])
    chosen = plan.ranked[pick - 1]
    if options.html:
        from ..planning.report_html import html_page

        Path(options.html).write_text(html_page(plan, top=top))
    if options.json:
        print(json.dumps(as_dict(plan), indent=2))
    if options.megatron:
        print(_megatron(chosen))
    if options.yaml:
        from ..planning.example_write import write_yaml

        runnable = [e for e in plan.ranked if e.setting.ring == 1]
        if options.pick == "1" and chosen.setting.ring > 1 and runnable:
            print(f"# {chosen.setting.label()} is {runnable[0].seconds / chosen.seconds - 1:.0%} "
                  "faster and needs ring attention, which the example does not have")  # fmt: skip
            chosen = runnable[0]
        print(write_yaml(chosen), end="")
    if not (options.json or options.megatron or options.yaml):
        from ..planning.report_table import console, print_plan

        print_plan(plan, console(), top=top, show_dropped=options.dropped)
        if options.html:
            print(f"page: {options.html}")
    return 0


def _contradictions(options: argparse.Namespace) -> list[Problem]:
    """Options that ask for one thing in two ways."""
    pairs = [
        (("json", "megatron", "yaml"), "one format is printed"),
        (("longest_sequence", "fewest_gpus"), "one is found with the other given"),
        (("longest_sequence", "seq_length"), "the sequence is given or found"),
        (("fewest_gpus", "gpus"), "the GPUs are given or found"),
    ]
    problems = []
    for names, rule in pairs:
        both = [f"--{name.replace('_', '-')}" for name in names if getattr(options, name)]
        if len(both) > 1:
            problems.append(Problem(" with ".join(both), rule, " or ".join(both)))
    return problems


def _resized(job: Job, limits: Limits, options: argparse.Namespace) -> Job:
    """The job with the most tokens or the fewest GPUs, where that was asked for."""
    if options.fewest_gpus:
        found = fewest_gpus(job, limits)
        if found is None:
            text = f"{job.seq_length:,} tokens do not fit on 65,536 GPUs"
            raise RequestError([Problem(text, closest_miss(job, limits))])
        job = replace(job, num_gpus=found[0])
        print(f"fewest {job.gpu.name}: {found[0]}", file=sys.stderr)
    if options.longest_sequence:
        longest = longest_sequence(job, limits)
        if longest is None:
            text = f"not even 1,024 tokens fit on {job.num_gpus} x {job.gpu.name}"
            raise RequestError([Problem(text, closest_miss(job, limits))])
        job = replace(job, seq_length=longest[0])
        found_text = f"longest sequence on {job.num_gpus} x {job.gpu.name}: {longest[0]:,} tokens"
        print(found_text, file=sys.stderr)
    return job


def impossible(plan: Plan, limits: Limits) -> Problem:
    """Why nothing fits, and what would make it possible."""
    job = plan.job
    text = (
        f"{job.model.name} with {job.seq_length:,} tokens does not fit on {job.num_gpus} x "
        f"{job.gpu.name} in any of {plan.considered} layouts"
    )
    return Problem(text, closest_miss(job, limits), "; ".join(remedies(plan, limits)))


def _megatron(estimate: Estimate) -> str:
    from ..planning.megatron_write import megatron_flags, remark

    lines = [" ".join(map(shlex.quote, flag.split(" "))) for flag in megatron_flags(estimate)]
    note = remark(estimate.job, estimate.setting)
    return (f"# {note}\n" if note else "") + " \\\n".join(lines)


def as_dict(plan: Plan) -> dict[str, Any]:
    """The whole plan for JSON."""
    job, best = plan.job, plan.best
    assert best is not None
    return {
        "model": job.model.name,
        "parameters": job.model.total_parameters,
        "sequence_length": job.seq_length,
        "global_batch_size": job.global_batch_size,
        "gpus": job.num_gpus,
        "gpu": job.gpu.name,
        "gpus_per_node": job.gpu.gpus_per_node,
        "gpu_memory_bytes": job.gpu.memory,
        "search_seconds": plan.seconds,
        "advice": advice(plan),
        "settings": [
            {**e.as_dict(), "reason": "" if e is best else why_slower(e, best)} for e in plan.ranked
        ],
        "dropped": [
            {"setting": d.setting.label(), "kind": d.reason.kind, "reason": d.reason.line}
            for d in plan.dropped
        ],
    }
