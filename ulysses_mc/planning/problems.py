"""Every problem of a request at once: what is wrong, the rule, the nearest values that work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any

from ..parallel_state.errors import ParallelConfigError


@dataclass(frozen=True)
class Problem:
    """What was found, the rule that it breaks, and what would work ('' if nothing near does)."""

    found: str
    rule: str
    nearest: str = ""

    def __str__(self) -> str:
        hint = f"; nearest that work: {self.nearest}" if self.nearest else ""
        return f"{self.found}: {self.rule}{hint}"


class RequestError(ParallelConfigError):
    """A request with one or more problems, all of them listed."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(dict.fromkeys(problems))
        count = len(self.problems)
        lines = "\n".join(f"  {i}. {problem}" for i, problem in enumerate(self.problems, 1))
        head = "A problem" if count == 1 else f"{count} problems"
        super().__init__(f"{head}:\n{lines}")


def check(problems: Iterable[Problem]) -> None:
    """Raises RequestError if there is any problem."""
    found = list(problems)
    if found:
        raise RequestError(found)


def read_text(path: str | Path, rule: str) -> str:
    """The text of a file.

    Args:
        rule: what the file has to be, for the message.

    Raises:
        RequestError: it is not there, is a folder, cannot be read, or is no text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        why = error.strerror or type(error).__name__
    except UnicodeDecodeError:
        why = "is no text (UTF-8)"
    except ValueError:  # a NUL in the name
        why = "is no name of a file"
    raise RequestError([Problem(f"{path}: {why}", rule)])


def whole_number(
    name: str, value: Any, *, minimum: int = 1, maximum: int | None = None
) -> list[Problem]:
    """Whether `value` is an int of at least `minimum`, and at most `maximum`."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= minimum:
        if maximum is None or value <= maximum:
            return []
        rule = f"a whole number from {minimum} to {maximum:,}"
        return [Problem(f"{name} is {value!r}", rule, f"{name} {maximum}")]
    rule = f"a whole number from {minimum} up"
    return [Problem(f"{name} is {value!r}", rule, f"{name} {_near_whole(value, minimum)}")]


def positive(name: str, value: Any) -> list[Problem]:
    """Whether `value` is a number above 0, not infinite."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and value > 0 and isfinite(value):
        return []
    return [Problem(f"{name} is {value!r}", "a number above 0")]


def _near_whole(value: Any, minimum: int) -> int:
    try:
        return max(round(float(value)), minimum)
    except (TypeError, ValueError, OverflowError):
        return minimum


def one_of(name: str, value: Any, allowed: Iterable[Any]) -> list[Problem]:
    """Whether `value` is one of `allowed`."""
    known = list(allowed)
    if value in known:
        return []
    near = get_close_matches(str(value).lower(), [str(k) for k in known], n=2, cutoff=0.4)
    return [
        Problem(f"{name} is {value!r}", f"one of {', '.join(map(str, known))}", " or ".join(near))
    ]


def unknown_keys(given: Mapping[str, Any] | Iterable[str], known: Iterable[str]) -> list[Problem]:
    """A problem for each key that is not known, with the nearest one that is."""
    names = list(known)
    return [
        Problem(
            f"unknown key {key!r}",
            "every key is a known one",
            " or ".join(get_close_matches(key, names, n=1, cutoff=0.5)),
        )
        for key in given
        if key not in names
    ]


def divides(name: str, value: int, total_name: str, total: int) -> list[Problem]:
    """Whether `value` divides `total`; the nearest divisors below and above are offered."""
    if value >= 1 and total % value == 0:
        return []
    return [
        Problem(
            f"{name} {value} does not divide {total_name} {total} (remainder "
            f"{total % value if value >= 1 else total})",
            f"{name} divides {total_name}",
            f"{name} {either(near(value, total, lambda n: total % n == 0))}",
        )
    ]


def near(value: int, limit: int, works: Callable[[int], bool]) -> list[int]:
    """The greatest number below and the least above `value`, up to `limit`, that work."""
    below = next((n for n in range(min(value - 1, limit), 0, -1) if works(n)), None)
    above = next((n for n in range(max(value + 1, 1), limit + 1) if works(n)), None)
    return [n for n in (below, above) if n is not None]


def either(values: Iterable[Any]) -> str:
    return " or ".join(map(str, values))
