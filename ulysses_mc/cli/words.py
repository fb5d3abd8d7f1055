"""Words of a command line to values; each wrong one becomes a problem, with the nearest right one.

A word is read with ASCII digits only: `str.isdigit` also accepts what `int` refuses.
"""

from __future__ import annotations

import os
import re
from math import isfinite
from pathlib import Path

from ..planning.problems import Problem, one_of

_UNITS = {"": 1, "k": 1024, "m": 1024**2}
_COUNT = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]{1,2})?)([kKmM]?)")


def whole(word: str, name: str, minimum: int, problems: list[Problem]) -> int:
    """'12' as 12; `minimum`, and a problem, where that is wrong."""
    if re.fullmatch(r"[0-9]{1,18}", word) and int(word) >= minimum:
        return int(word)
    rule = f"a whole number from {minimum} up"
    near = f"{name} {max(round(_float(word)), minimum)}"
    problems.append(Problem(f"{name} is {word!r}", rule, near))
    return minimum


def count(
    word: str | None, name: str, problems: list[Problem], *, like: str = "1, 8 or 64"
) -> int | None:
    """'8192', '128K', '1.5M', '1e6', '1_000' as a number; None if there is no word or a wrong one.

    Args:
        like: right values, for the message.
    """
    if word is None:
        return None
    match = _COUNT.fullmatch(word.strip())
    number = match[1].replace("_", "").replace(",", "") if match else word
    value = _float(number) * (_UNITS[match[2].lower()] if match else 1)
    if match and value >= 1 and value.is_integer():
        return int(value)
    near = f"{name} {max(round(value), 1)}" if _is_number(number) else ""
    rule = f"a whole number from 1 up, such as {like}"
    problems.append(Problem(f"{name} is {word!r}", rule, near))
    return None


def choice(word: str, name: str, allowed: tuple[int, ...], problems: list[Problem]) -> int:
    """One of a few numbers; the first of them, and a problem, where it is another."""
    if word in map(str, allowed):
        return int(word)
    problems += one_of(name, word, allowed)
    return allowed[0]


def _float(word: str) -> float:
    return min(max(float(word), -1e18), 1e18) if _is_number(word) else 1.0


def _is_number(word: str) -> bool:
    try:
        return isfinite(float(word))
    except ValueError:
        return False


def writable(path: str | None, name: str) -> list[Problem]:
    """Whether a file can be written, known before the work that it is to hold."""
    if path is None:
        return []
    file = Path(path)
    why = ""
    if not path or file.is_dir():
        why = "is a folder" if path else "names no file"
    elif file.exists():
        why = "" if os.access(file, os.W_OK) else "cannot be written"
    elif not file.resolve().parent.is_dir():
        why = "lies in a folder that does not exist"
    elif not os.access(file.resolve().parent, os.W_OK):
        why = "lies in a folder that cannot be written"
    rule = "a file that can be written, in a folder that exists"
    return [Problem(f"{name} {path!r} {why}", rule)] if why else []
