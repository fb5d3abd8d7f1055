"""Reads the command line and runs the command; every problem is told, none with a traceback."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from ..parallel_state.errors import ParallelConfigError
from ..planning.problems import Problem, RequestError
from . import bench, doctor, explain, plan

_COMMANDS = {"plan": plan, "explain": explain, "doctor": doctor, "bench": bench}


def build_parser() -> argparse.ArgumentParser:
    from .. import __version__

    parser = argparse.ArgumentParser(
        prog="ulysses-mc",
        description="Plans, explains and checks runs with tensor, Ulysses, ring, pipeline and data "
        "parallelism.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ulysses-mc {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, module in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns 0, 1 (a check failed) or 2 (the request is wrong)."""
    parser = build_parser()
    options, unknown = parser.parse_known_args(argv)
    strangers = _unknown_options(parser, options.command, unknown)
    try:
        code: int = _COMMANDS[options.command].run(options, strangers)
        return code
    except ParallelConfigError as error:
        print(f"ulysses-mc {options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        return 0


def _unknown_options(
    parser: argparse.ArgumentParser, command: str, unknown: list[str]
) -> list[Problem]:
    """A problem for each option that the command does not have, with the nearest it has."""
    actions = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    known = [o for a in actions.choices[command]._actions for o in a.option_strings]
    problems = []
    for index, word in enumerate(unknown):
        if index and not word.startswith("-") and unknown[index - 1].startswith("-"):
            continue  # the value of the option before it
        name = word.partition("=")[0]
        near = get_close_matches(name, known, n=1, cutoff=0.5) if name.startswith("-") else []
        problems.append(
            Problem(f"unknown argument {word!r}", f"ulysses-mc {command} --help lists them",
                    near[0] if near else "")
        )  # fmt: skip
    return problems


def refuse(problems: list[Problem]) -> None:
    if problems:
        raise RequestError(problems)
