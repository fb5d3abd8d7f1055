"""Bad input of every kind: exit code 2, one message with all of it, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ulysses_mc.cli import main
from ulysses_mc.planning.megatron_read import read_megatron
from ulysses_mc.planning.shell_script import flags_of_script

ROOT = Path(__file__).resolve().parents[2]
PLAN = ["plan", "llama-3.1-8b", "--gpus", "8", "--seq-length"]
SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(arguments) == 2
    taken = capsys.readouterr()
    assert "problem" in taken.err and "Traceback" not in taken.err
    assert not taken.out
    return taken.err


@pytest.mark.parametrize("word", ["-1", "0", "nan", "inf", "", "x", "²", "８", "1e400", "2.5", "K"])
def test_numbers_that_are_none(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`str.isdigit` is true of ², which `int` refuses."""
    names = ["--seq-length", "--gpus", "--global-batch-size", "--tp", "--micro-batch", "--top",
             "--pick", "--zero", "--gradient-bytes", "--gpus-per-node"]  # fmt: skip
    if word == "0":
        names = [name for name in names if name not in ("--zero", "--gradient-bytes")]
    error = refused(["plan", "llama-3.1-8b", *(f"{n}={word}" for n in names)], capsys)
    for name in names:
        assert f"{name} is {word!r}" in error, name
    for command in (["explain", "--megatron-args", SMALL], ["bench"]):
        option = "--rank" if command[0] == "explain" else "--repeats"
        if (command[0], word) != ("explain", "0"):
            assert f"{option} is {word!r}" in refused([*command, f"{option}={word}"], capsys)


@pytest.mark.parametrize(
    ("word", "tokens"), [("1e6", "1,000,000"), ("1M", "1,048,576"), ("1.5k", "1,536"),
                         ("65_536", "65,536"), ("65,536", "65,536")],
)  # fmt: skip
def test_numbers_with_units(word: str, tokens: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("rich")
    assert main([*PLAN, word, "--zero", "3", "--tiled-logits", "--recompute", "full"]) == 0
    assert f"{tokens} tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([*PLAN, "8K", "--json", "--yaml"], "--json with --yaml"),
        ([*PLAN, "8K", "--longest-sequence"], "--longest-sequence with --seq-length"),
        ([*PLAN, "8K", "--fewest-gpus"], "--fewest-gpus with --gpus"),
        ([*PLAN, "8K", "--megatron-args", SMALL], "the model is told once"),
        (["explain", "a.yaml", "--megatron-args", SMALL], "a run is told once"),
        ([*PLAN, "8K", "--ep", "4"], "ep divides experts, and it has none"),
        ([*PLAN, "8K", "--vpp", "4", "--pp", "1"], "several pipeline stages"),
        ([*PLAN, "8K", "--positions", "9K"], "rotary positions"),
        ([*PLAN, "8K", "--gpu", "h100,memory_gib=inf"], "memory_gib is inf"),
        ([*PLAN, "8K", "--gpu", "rtx4090"], "its numbers after a name"),
        (["plan", "llama-3.1-8b", "--seq-length", "8K", "--gpus", "1e9"], "from 1 to 131,072"),
        ([*PLAN, "1e30"], "from 1 to 8,589,934,592"),
        (["plan", "/nowhere/config.json", "--seq-length", "8K"], "no such file"),
        (["plan", "n" * 300, "--seq-length", "8K"], "no known name"),
        (["plan", "a\0b", "--seq-length", "8K"], "no known name"),
        ([*PLAN], "--seq-length has no value"),
        (["plann"], "nearest that work: plan"),
        ([], "no command"),
        (["explain", "--megatron-args", "--num-layers 'a"], "no closing quotation"),
        (["explain", "--megatron-args", f"{SMALL} --cp-comm-type a2a+p2p --context-parallel-size "
          "0 --hierarchical-context-parallel-sizes 0 0"], "two sizes, Ulysses and ring"),
        (["bench", "--ranks", "99999"], "at most 128"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)  # fmt: skip
def test_requests_that_contradict_themselves_or_end_nowhere(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(arguments, capsys)


@pytest.mark.parametrize("option", [[*PLAN, "8K", "--html"], ["bench", "--output"]])
def test_files_that_cannot_be_written_are_told_before_the_work(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, why in ((tmp_path, "is a folder"), (tmp_path / "no" / "x", "does not exist"),
                      ("", "names no file")):  # fmt: skip
        assert why in refused([*option, str(path)], capsys)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "a JSON object"),
        ("[]", "holds a list"),
        ("\ud800", "no text"),
        ('{"num_hidden_layers": -1, "hidden_size": "x", "vocab_size": 1e400,'
         '"num_attention_heads": NaN, "intermediate_size": null}', "5 problems"),
        ('{"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 9,'
         '"intermediate_size": 8, "rope_theta": Infinity}', "rope_theta is inf"),
    ],
    ids=["half", "list", "bytes", "all wrong", "infinite"],
)  # fmt: skip
def test_damaged_model_files(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    error = refused(["plan", str(file), "--seq-length", "8K"], capsys)
    assert said in error
    assert "is meant" not in error  # a key that is null is no misspelling of itself


def test_the_flags_that_plan_prints_are_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    """With their line ends, as `"$(ulysses-mc plan ... --megatron)"` gives them."""
    assert main([*PLAN, "32K", "--megatron", "--ulysses", "4", "--ring", "1"]) == 0
    flags = capsys.readouterr().out
    assert "\\\n" in flags
    for text in (flags, flags.replace("\n", "\r\n")):
        run = read_megatron(text)
        assert not run.problems and run.ulysses == 4 and run.seq_length == 32768
    assert main(["explain", "--ranks", "8", "--megatron-args", flags]) == 0


SCRIPT = """#!/bin/bash
GPUS=8   # of this node
export TP="2"
ARGS=(
  --num-layers 4 --hidden-size ${HIDDEN:-64}
  --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
  --context-parallel-size 2 --cp-comm-type a2a
)
torchrun --nproc_per_node $GPUS pretrain_gpt.py "${ARGS[@]}" \\
  --tensor-model-parallel-size ${TP} --global-batch-size $UNSET
"""


def test_a_shell_script_with_an_array_and_variables() -> None:
    run = read_megatron(flags_of_script(SCRIPT), "run.sh")
    assert (run.world_size, run.tp, run.ulysses, run.model.hidden_size) == (8, 2, 2, 64)
    assert ["'$UNSET'" in problem.found for problem in run.problems] == [True]


def ending(arguments: list[str], **environment: str) -> list[str]:
    command = [sys.executable, "-m", "ulysses_mc", *arguments]
    line = " ".join(f"'{word}'" for word in command)
    return ["bash", "-c", f"{line} | head -1; echo ${{PIPESTATUS[0]}}"]


@pytest.mark.parametrize("arguments", [[*PLAN, "8K", "--dropped"], [*PLAN, "8K", "--json"]])
def test_a_closed_pipe_is_no_error(arguments: list[str]) -> None:
    pytest.importorskip("rich")
    done = subprocess.run(ending(arguments), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "0" and not done.stderr


def test_letters_that_a_terminal_lacks_and_a_full_disk() -> None:
    pytest.importorskip("rich")
    command = [sys.executable, "-m", "ulysses_mc", *PLAN, "8K"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True,
                              timeout=120)  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "ulysses-mc plan: cannot write: No space left on device\n"
