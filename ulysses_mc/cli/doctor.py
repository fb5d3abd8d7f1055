"""What is installed here, what works and why the rest does not. Needs no GPU, and under 10 s."""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from typing import Any

from ..planning.problems import Problem
from .diagnosis import backends, bad_combinations, runs
from .probes import PACKAGES, Facts, gather

HELP = "say what is installed, what is usable, and why the rest is not"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(options: argparse.Namespace, problems: list[Problem]) -> int:
    """0: ranks can exchange here; 1: they cannot."""
    from .main import refuse

    refuse(problems)
    facts = gather()
    print(json.dumps(as_dict(facts), indent=2) if options.json else as_text(facts))
    return 0 if any(b.usable for b in backends(facts) if b.part == "exchange") else 1


def as_dict(facts: Facts) -> dict[str, Any]:
    return {
        **asdict(facts),
        "backends": [asdict(backend) for backend in backends(facts)],
        "runs": [{"what": what, "run": is_run, "why": why} for what, is_run, why in runs(facts)],
        "bad_combinations": bad_combinations(facts),
    }


def as_text(facts: Facts) -> str:
    """The diagnosis for people."""
    from .. import __version__

    lines = [f"ulysses-mc {__version__}, Python {'.'.join(map(str, facts.python))}, "
             f"{platform.system()} {platform.machine()}", "", "packages"]  # fmt: skip
    for name in PACKAGES:
        if name == "apex" and name in facts.packages and not facts.nvidia_apex:
            lines.append(f"  {name:20} {facts.packages[name]} (not NVIDIA's)")
        else:
            lines.append(f"  {name:20} {facts.packages.get(name, '-')}")
    if facts.torch.get("nccl_version"):
        lines.append(f"  {'NCCL':20} {facts.torch['nccl_version']}")
    lines += ["", "GPUs and links", *_gpus(facts)]
    lines += ["", "backends"]
    for backend in backends(facts):
        mark = "yes" if backend.usable else "no "
        lines.append(f"  {mark}  {backend.part:10} {backend.name:20} {backend.why}")
    lines += ["", "what is run here"]
    for what, is_run, why in runs(facts):
        lines.append(f"  {'run ' if is_run else 'skip'}  {what:26} {why}".rstrip())
    bad = bad_combinations(facts)
    lines += ["", "known bad combinations", *(f"  ! {line}" for line in bad or [])]
    if not bad:
        lines.append("  none")
    if facts.environment:
        shown = " ".join(f"{name}={value}" for name, value in facts.environment.items())
        lines += ["", f"environment: {shown}"]
    return "\n".join([*lines, "", f"({facts.seconds:.1f} s)"])


def _gpus(facts: Facts) -> list[str]:
    if not facts.gpus:
        return [f"  {facts.driver or 'none'}"]
    counted: dict[str, int] = {}
    for gpu in facts.gpus:
        key = f"{gpu['name']}, {gpu['memory'] / 2**30:.1f} GiB"
        counted[key] = counted.get(key, 0) + 1
    lines = [f"  {count} x {text}" for text, count in counted.items()]
    return lines + [f"  {line}" for line in facts.links.splitlines() if len(facts.gpus) > 1]
