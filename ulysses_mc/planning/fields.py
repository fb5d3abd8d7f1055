"""Reads typed values out of a mapping, and remembers every problem met on the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from math import isfinite
from typing import Any

from .problems import Problem


class Fields:
    """A mapping and the problems found in it so far.

    Args:
        values: what was given.
        source: for messages, such as a file's name.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values, self.source = dict(values), source
        self.problems: list[Problem] = []

    def whole(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """The first of `names` that is given, as an int; `default` where None is given."""
        name = self._given(names)
        if name is None:
            if default is None:
                self._missing(names[0])
                return minimum
            return default
        value = self.values[name]
        if isinstance(value, str):
            value = _number(value)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            self._wrong(name, f"a whole number from {minimum} up")
            return default if default is not None else minimum
        return value

    def number(self, *names: str, default: float, above: float | None = None) -> float:
        """The first of `names` that is given, a finite number, greater than `above`."""
        name = self._given(names)
        if name is None:
            return default
        value = self.values[name]
        value = _number(value) if isinstance(value, str) else value
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not isfinite(value)
            or (above is not None and value <= above)
        ):
            self._wrong(name, "a number" if above is None else f"a number above {above:g}")
            return default
        return float(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        name = self._given(names)
        if name is None:
            return default
        if not isinstance(self.values[name], bool):
            self._wrong(name, "true or false")
            return default
        return bool(self.values[name])

    def text(self, name: str, default: str, allowed: Iterable[str] = ()) -> str:
        value = self.values.get(name)
        if value is None:
            return default
        known = list(allowed)
        if not isinstance(value, str) or (known and value not in known):
            near = get_close_matches(str(value).lower(), known, n=2, cutoff=0.4)
            rule = f"one of {', '.join(known)}" if known else "a word"
            self.problems.append(Problem(f"{self.source}: {name} is {value!r}", rule,
                                         " or ".join(near)))  # fmt: skip
            return default
        return value

    def misspelt(self, known: Iterable[str]) -> list[str]:
        """Keys that are not known: a problem for those that look like a known one."""
        names = list(known)
        strangers = [key for key in self.values if key not in names]
        for key in strangers:
            near = get_close_matches(str(key), [n for n in names if n not in self.values], 1, 0.85)
            if near:
                self.problems.append(
                    Problem(f"{self.source}: unknown key {key!r}", "a known key", near[0])
                )
        return strangers

    def _given(self, names: tuple[str, ...]) -> str | None:
        return next((name for name in names if self.values.get(name) is not None), None)

    def _missing(self, name: str) -> None:
        others = [str(key) for key, value in self.values.items() if value is not None]
        near = get_close_matches(name, others, n=1, cutoff=0.7)
        hint = f"{near[0]!r} is there; {name!r} is meant?" if near else ""
        self.problems.append(Problem(f"{self.source}: {name} is missing", "it is needed", hint))

    def _wrong(self, name: str, rule: str) -> None:
        self.problems.append(
            Problem(f"{self.source}: {name} is {self.values[name]!r}", f"it is {rule}")
        )


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text.replace(",", "").replace("_", ""))
        except ValueError:
            continue
    return text
