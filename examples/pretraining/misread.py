"""What is wrong with options and config files: key, value, what is allowed, and an example.

jsonargparse stops at the first mistake and speaks of Python's types. When it has stopped, every
option and every key of a file is read once more, alone, and all that is wrong is told at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator
from typing import Any

from ulysses_mc.planning.example_keys import keys_given_twice, rule_of

_UNKNOWN = (
    r"Group '(?P<group>[\w.]+)' does not accept option '(?P<option>[\w.]+)'",
    r"Option '(?P<option>[\w.]+)' is not accepted",
    r"unrecognized arguments: --(?P<option>[\w.-]+)",
)
_WRONG = (
    r'Parser key "(?P<key>[\w.]+)": (?:Expected a|Does not validate|Unable to load).*?'
    r"(?:Got value|Given value|load config): *'?(?P<value>.*)",
    r'Parser key "(?P<key>[\w.]+)": Unable to load config \'(?P<value>.*?)\'',
    r"argument --(?P<key>[\w.]+): expected one argument(?P<value>)",
)


# What other programs call it, and where it is here.
_ELSEWHERE = {
    "tp": "parallel.tensor_model_parallel_size",
    "pp": "parallel.pipeline_model_parallel_size",
    "vpp": "parallel.virtual_pipeline_model_parallel_size",
    "dp": "parallel.data_parallel_size",
    "ep": "parallel.expert_model_parallel_size",
    "cp": "parallel.ulysses_parallel_size",
    "sp": "parallel.ulysses_parallel_size",
    "context_parallel_size": "parallel.ulysses_parallel_size",
    "sequence_parallel_size": "parallel.ulysses_parallel_size",
    "ulysses_sequence_parallel_size": "parallel.ulysses_parallel_size",
    "sequence_parallel": "a field of Megatron's config: model.transformer.sequence_parallel",
}


def every_mistake(
    parser: Any, error: type[Exception], argv: list[str], defaults: dict[str, Any]
) -> list[str]:
    """A message for each option, and each key of a config file, that `parser` does not take.

    Args:
        parser: jsonargparse's, with exit_on_error=False.
        error: what it raises.
        argv: a command line.
        defaults: every known key, dotted, with its default; None for a section.
    """
    found = []
    for source, read in _alone(parser, argv):
        try:
            read()
        except error as mistake:
            found.append(source + explain(str(mistake), defaults))
    return list(dict.fromkeys(found))


def damaged_files(argv: list[str]) -> list[str]:
    """A message for each config file that is no YAML, and each key that stands twice in one: the
    reader would take the last."""
    import yaml

    found = []
    for file in filter(None, map(_config_file, _options(argv))):
        try:
            with open(file, encoding="utf-8") as stream:
                twice = keys_given_twice(yaml.compose(stream, yaml.SafeLoader))
            found += [f"{file}: {key} stands there twice, the second in line {line}"
                      for key, line in twice]  # fmt: skip
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            place = getattr(error, "problem_mark", None)
            where = f", line {place.line + 1}, column {place.column + 1}" if place else ""
            reason = getattr(error, "problem", None) or error
            found.append(f"{file}{where}: not readable as YAML: {reason}")
        except OSError:
            continue  # the parser's to tell
    return found


def _alone(parser: Any, argv: list[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """(what to put before a message, how to read it) for each option and each key of a file."""
    for words in _options(argv):
        file = _config_file(words)
        keys = _keys(file) if file else None
        if keys is None:
            yield "", lambda words=words: parser.parse_args(words)
            continue
        for key in keys:
            yield f"{file}: ", lambda key=key: parser.parse_object(key)


def _options(argv: list[str]) -> Iterator[list[str]]:
    """Each option with its values."""
    words: list[str] = []
    for word in argv:
        if word.startswith("--") and words:
            yield words
            words = []
        words.append(word)
    if words:
        yield words


def _config_file(words: list[str]) -> str | None:
    """What an option and its values say of `--config`."""
    name, equals, value = words[0].partition("=")
    return (value if equals else " ".join(words[1:])) if name == "--config" else None


def _keys(file: str) -> list[dict[str, Any]] | None:
    """A config file cut into configs of one key each; None if it cannot be read as one."""
    import yaml

    try:
        with open(file, encoding="utf-8") as stream:
            data = yaml.safe_load(stream)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    if not isinstance(data, dict):
        return None
    keys: list[dict[str, Any]] = []
    for section, values in data.items():
        inside = values if isinstance(values, dict) and values else None
        keys += [{section: {k: v}} for k, v in inside.items()] if inside else [{section: values}]
    return keys


def explain(message: str, defaults: dict[str, Any]) -> str:
    """jsonargparse's message on one line, in the words of a config."""
    line = " ".join(message.split())
    for pattern in _UNKNOWN:
        if match := re.search(pattern, line):
            parts = [match.groupdict().get("group"), match["option"]]
            return unknown_key(".".join(p for p in parts if p), list(defaults), "config key")
    for pattern in _WRONG:
        match = re.search(pattern, line)
        if match and match["key"] in defaults:
            return wrong_value(match["key"], match["value"].rstrip("'"), defaults)
        if match:  # --check, --processes
            return f"--{match['key']} is {match['value']!r}: it is a whole number, of ranks or GPUs"
    return re.sub(r'^Parser key "(\w+)": ', r"--\1: ", line)


def wrong_value(key: str, value: str, defaults: dict[str, Any]) -> str:
    """`model.kind is 'gtp': it is one of gpt, hybrid; for example --model.kind gpt`"""
    rule, default = rule_of(key), defaults[key]
    given = f"is {value!r}" if value else "has no value"
    if rule.startswith("one of "):
        words = rule.removeprefix("one of ").split(", ")
        example = (difflib.get_close_matches(value.lower(), words, 1, 0.4) or [default])[0]
    elif rule == "a list":
        example = f"'[{value or default[0]}]'"
    elif rule.startswith("keys"):
        return f"{key} {given}: it has {rule}; for example --{key} '{{qk_layernorm: true}}'"
    elif rule.startswith("a section"):
        inner = next(k for k in defaults if k.startswith(f"{key}.") and defaults[k] is not None)
        return f"{key} {given}: it is {rule}; for example --{inner} {_word(defaults[inner])}"
    else:
        example = _word(default) if default is not None else "1"
    return f"{key} {given}: it is {rule}; for example --{key} {example}"


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"


def unknown_key(key: str, known: list[str], what: str) -> str:
    """`unknown config key 'model.hiden_size'; the nearest known one is model.hidden_size`"""
    group, dot, name = key.replace("-", "_").rpartition(".")
    if name in _ELSEWHERE:
        return f"unknown {what} {key!r}; here it is {_ELSEWHERE[name]}"
    inside = [k for k in known if k.rpartition(".")[0] == group]
    candidates = inside if dot and inside else known

    def likeness(candidate: str) -> float:
        own = candidate.rpartition(".")[2]
        if (
            len(name) > 2 and name in own
        ):  # `warmup` for lr_warmup_iters, or a field without its group
            return 1.0 + len(name) / len(own)
        return difflib.SequenceMatcher(None, key, candidate).ratio()

    return f"unknown {what} {key!r}; the nearest known one is {max(candidates, key=likeness)}"
