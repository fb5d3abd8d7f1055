"""Megatron's flags out of a shell script, without running it."""

from __future__ import annotations

import re

# A line that starts something other than flags: they end before it.
_NOT_FLAGS = re.compile(r"\s*(\w+\+?=|\)|(exec\s+)?(torchrun|python\S*|srun|mpirun|bash|cd)\b)")
_ASSIGNED = re.compile(r"\s*(?:export\s+)?(\w+)=(?:\"([^\"]*)\"|'([^']*)'|([^\s()\"']*))\s*$")
_USED = re.compile(r"\$\{(\w+)(?::?-([^}]*))?\}|\$(\w+)")


def join_lines(command: str) -> str:
    """Lines that end in a backslash, and all others, as one; lines of comment left out."""
    return re.sub(r"\\?\r?\n", " ", re.sub(r"(?m)^\s*#.*$", "", command))


def flags_of_script(script: str) -> str:
    """The flags of a shell script: comments gone, arrays and quotes opened, plain variables filled.

    A word `--` stands where flags end.
    """
    values: dict[str, str] = {}
    words = []
    for raw in script.splitlines():
        line = re.sub(r"(^|\s)#.*", "", raw).rstrip("\\ \r")
        if match := _ASSIGNED.match(line):
            value = next((text for text in match.groups()[1:] if text is not None), "")
            values[match[1]] = _filled(value, values)
            if "--" not in value:
                continue
            line = value
        words.append(" -- " + line if _NOT_FLAGS.match(line) else line)
    return re.sub(r"[()\"']", " ", _filled(" ".join(words), values))


def _filled(text: str, values: dict[str, str]) -> str:
    """Variables that the script itself sets, or gives a default; others stay as they are."""

    def value(match: re.Match[str]) -> str:
        return values.get(match[1] or match[3], match[2] if match[2] is not None else match[0])

    return _USED.sub(value, text)
