"""Reads the command line and runs the command; every problem is told, none with a traceback."""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import NoReturn

from ..parallel_state.errors import ParallelConfigError
from ..planning.problems import Problem, RequestError
from . import bench, doctor, explain, plan

_COMMANDS = {"plan": plan, "explain": explain, "doctor": doctor, "bench": bench}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are problems like all others."""

    def error(self, message: str) -> NoReturn:
        raise RequestError([_parse_problem(message, self.prog)])


def _parse_problem(message: str, prog: str) -> Problem:
    match = re.search(r"invalid choice: '(.*?)'", message)
    if match:
        near = get_close_matches(match[1], _COMMANDS, n=1, cutoff=0.5)
        rule = f"a command is one of {', '.join(_COMMANDS)}"
        return Problem(f"no command {match[1]!r}", rule, "".join(near))
    if "COMMAND" in message:
        return Problem("no command", f"a command is one of {', '.join(_COMMANDS)}")
    if match := re.fullmatch(r"argument (\S+): expected one argument", message):
        text = f"{match[1]} has no value"
        return Problem(text, f"it takes one; a value that starts with - as {match[1]}=VALUE")
    return Problem(message, f"{prog} --help lists what there is")


def build_parser() -> argparse.ArgumentParser:
    from .. import __version__

    parser = Parser(
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
    if isinstance(sys.stdout, io.TextIOWrapper):  # letters that a terminal lacks are no error
        sys.stdout.reconfigure(errors="replace")
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="replace")
    parser, name = build_parser(), "ulysses-mc"
    try:
        options, unknown = parser.parse_known_args(argv)
        name = f"ulysses-mc {options.command}"
        strangers = _unknown_options(parser, options.command, unknown)
        code: int = _COMMANDS[options.command].run(options, strangers)
        sys.stdout.flush()
        return code
    except ParallelConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `| head`
        _close_stdout()
        return 0
    except OSError as error:  # a full disk, a file that went away
        where = f" {error.filename}" if error.filename else ""
        print(f"{name}: cannot write{where}: {error.strerror}", file=sys.stderr)
        _close_stdout()
        return 2


def _close_stdout() -> None:
    """What is left unwritten goes nowhere, so that Python's own flush at exit does not fail too."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return


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
        near = get_close_matches(name, known, n=1, cutoff=0.7) if name.startswith("-") else []
        problems.append(
            Problem(f"unknown argument {word!r}", f"ulysses-mc {command} --help lists them",
                    near[0] if near else "")
        )  # fmt: skip
    return problems


def refuse(problems: list[Problem]) -> None:
    if problems:
        raise RequestError(problems)
