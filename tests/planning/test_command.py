"""The command line: what it prints, and that wrong input is told whole, without a traceback."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ulysses_mc.cli import main

ROOT = Path(__file__).resolve().parents[2]
PLAN = ["plan", "llama-3.1-8b", "--seq-length", "32K", "--gpus", "16", "--global-batch-size", "16"]


def test_runs_as_a_module_without_torch_or_megatron(tmp_path: Path) -> None:
    """A torch that cannot be imported proves that nothing needs it."""
    for name in ("torch", "megatron"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not here')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    for command in (PLAN, ["explain", str(ROOT / "examples/configs/cpu_demo.yaml")]):
        done = subprocess.run(
            [sys.executable, "-m", "ulysses_mc", *command],
            cwd=ROOT, env=env, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "tp" in done.stdout


def test_table(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    assert main([*PLAN, "--top", "3", "--dropped"]) == 0
    out = capsys.readouterr().out
    for word in ("best settings first", "memory of the fullest GPU", "step time", "NVLink GB",
                 "MFU", "dropped", "x the best's time", "GiB of 79.1 with"):  # fmt: skip
        assert word in out, word


def test_json_has_every_setting_with_its_parts_and_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*PLAN, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    best = plan["settings"][0]
    assert plan["gpus"] == 16 and plan["parameters"] == 8_030_261_248
    parts = best["memory_bytes"]
    assert sum(size for name, size in parts.items() if name != "total") == pytest.approx(
        parts["total"]
    )
    times = best["step_seconds"]
    assert sum(s for name, s in times.items() if name != "total") == pytest.approx(times["total"])
    tokens = 32768 * 16
    assert best["tokens_per_second"] == pytest.approx(tokens / times["total"])
    assert all(d["reason"] for d in plan["dropped"])
    assert all(s["reason"] for s in plan["settings"][1:])


def test_yaml_is_a_config_that_the_example_knows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    yaml = pytest.importorskip("yaml")
    assert main([*PLAN, "--yaml", "--tp", "2", "--ulysses", "4"]) == 0
    text = capsys.readouterr().out
    config = yaml.safe_load(text)
    assert config["parallel"]["ulysses_parallel_size"] == 4
    known = example_keys()
    for section, values in config.items():
        if isinstance(values, dict):
            assert set(values) <= set(known[section]), section
    file = tmp_path / "planned.yaml"
    file.write_text(text)
    assert main(["explain", str(file), "--ranks", "16", "--gpu", "h100", "--rank", "5"]) == 0
    assert "exchange over ulysses" in capsys.readouterr().out


def test_keys_of_the_example_config_are_the_examples_own() -> None:
    """Names, and kinds: a word where the source has Literal, a number where it has int or float."""
    from ulysses_mc.planning.example_keys import KEYS, TOP, Range

    known = example_keys()
    assert {*KEYS, *TOP} == set(known["Config"])
    for section, keys in KEYS.items():
        assert set(keys) == set(known[section]), section
        for name, kind in keys.items():
            written = known[section][name].removesuffix(" | None")
            if isinstance(kind, tuple):
                assert written == f"Literal{list(kind)}", name
            elif isinstance(kind, Range):
                assert written in (("int",) if kind.whole else ("int", "float")), name
            else:
                assert written.partition("[")[0] == kind.__name__, name


def example_keys() -> dict[str, dict[str, str]]:
    """Fields of the example's dataclasses with their types by section, read from its source."""
    from dataclasses import fields

    from ulysses_mc.parallel_state import ParallelConfig

    tree = ast.parse((ROOT / "examples/pretraining/config.py").read_text())
    classes = {
        node.name.removesuffix("Options").lower(): {
            s.target.id: ast.unparse(s.annotation) for s in node.body
            if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
        }
        for node in tree.body if isinstance(node, ast.ClassDef)
    }  # fmt: skip
    parallel = {f.name: str(f.type) for f in fields(ParallelConfig)}
    return {**classes, "Config": classes["config"], "parallel": parallel}


class _Page(HTMLParser):
    """Collects tags and whatever would be fetched from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag != "meta":
            self.open.append(tag)
        self.outside += [v or "" for name, v in attrs if name in ("src", "href", "srcset")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("gpus", ["16", "4096"])
def test_html_is_one_self_contained_page(tmp_path: Path, gpus: str) -> None:
    file = tmp_path / "plan.html"
    arguments = ["plan", "llama-3.1-8b", "--seq-length", "32K", "--gpus", gpus, "--json"]
    assert main([*arguments, "--html", str(file)]) == 0
    page, text = _Page(), file.read_text()
    page.feed(text)
    assert not page.outside and not page.open
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert not re.search(r"url\(|@import|https?:", text)
    for title in ("Best settings", "Memory of the fullest GPU", "Step time", "Ranks on nodes",
                  "Heads after the exchange", "Settings that were dropped"):  # fmt: skip
        assert title in text
    assert text.count('class="node"') == min(int(gpus) // 8, 8)


def test_all_problems_of_a_request_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "plan lama-3-8b --gpu h10,memory_gb=3 --gpus 0 --seq-length x --zeor 3 --recompute some "
        "--zero 7 --tp 2.5 --top -1 --precision fp7"
    )
    code = main(words.split())
    error = capsys.readouterr().err
    assert code == 2 and "Traceback" not in error
    for part in ("'--zeor'", "--zero", "llama-3-8b", "'h10'", "h100", "memory_gb", "memory_gib",
                 "--gpus is '0'", "--seq-length is 'x'", "'some'", "--zero is '7'",
                 "--tp is '2.5'", "--top is '-1'", "'fp7'"):  # fmt: skip
        assert part in error, part


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["plan", "llama-3.1-8b"],
        ["plan", "llama-3.1-8b", "--seq-length", "8K", "--profile", "/nowhere"],
        ["plan", "--megatron-args", "--num-layers x", "--seq-length", "8K"],
        ["plan", "gpt3-175b", "--seq-length", "8K"],
        ["plan", "llama-3.1-8b", "--seq-length", "8K", "--pick", "999"],
        ["plan", "llama-3.1-8b", "--seq-length", "8K", "--gpu", "a100", "--precision", "fp8"],
        ["explain"],
        ["explain", "/nowhere.yaml"],
        ["explain", "/nowhere"],
        ["explain", "--megatron-args", ""],
        ["bench", "--ranks", "1", "--backend", "mpi"],
        ["doctor", "--nothing"],
    ],
    ids=" ".join,
)
def test_wrong_requests_end_with_a_message(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "problem" in error and "Traceback" not in error


def test_impossible_request_says_what_would_make_it_possible(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", "llama-3.1-405b", "--seq-length", "128K", "--gpus", "8"]) == 2
    error = capsys.readouterr().err
    assert "does not fit on 8 x h100" in error and "GPUs (" in error


def test_longest_and_fewest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-8b", "--gpus", "8", "--longest-sequence", "--json"]) == 0
    taken = capsys.readouterr()
    longest = json.loads(taken.out)["sequence_length"]
    assert f"{longest:,} tokens" in taken.err and longest > 100_000
    assert main(["plan", "llama-3.1-8b", "--seq-length", "1M", "--fewest-gpus", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"] in (8, 16, 24, 32)


def test_megatron_flags_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--megatron", "--tp", "2", "--ulysses", "8"]) == 0
    out = capsys.readouterr().out
    assert "--context-parallel-size 8" in out and "--spec ulysses_mc.layers.specs" in out
    assert out.startswith("# Megatron's own a2a refuses replicated heads")


def test_sizes_that_do_not_divide_the_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--tp", "3", "--pp", "5"]) == 2
    error = capsys.readouterr().err
    assert "tp 3 x pp 5 = 15 does not divide 16 GPUs" in error and "--gpus 15 or 30" in error


def test_keys_that_are_not_understood_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 8,
              "intermediate_size": 512, "vocab_size": 1000, "num_kv_groups": 2,
              "torch_dtype": "bfloat16"}  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    assert main(["plan", str(file), "--seq-length", "4K", "--gpus", "2", "--json"]) == 0
    error = capsys.readouterr().err
    assert "not understood and not used: num_kv_groups\n" in error
