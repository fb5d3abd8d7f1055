"""Megatron's flags: written and read back, and every name known to Megatron's own parser."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from ulysses_mc.planning import GPUS, PRESETS, Estimate, Job, Setting
from ulysses_mc.planning.megatron_names import OTHER, READ, SWITCHES
from ulysses_mc.planning.megatron_read import read_megatron
from ulysses_mc.planning.megatron_write import megatron_flags, remark

CASES = [
    ("llama-3.1-70b", Setting(tp=4, ulysses=2, pp=2, dp=4, vpp=2), {}),
    ("llama-3.1-8b", Setting(ring=4, dp=2, recompute="full"), {"zero_stage": 3}),
    ("qwen3-8b", Setting(tp=2, ulysses=2, ring=2, dp=2), {"precision": "fp8"}),
    ("deepseek-v3", Setting(tp=2, pp=1, dp=32, ep=32), {"offload_optimizer": True}),
    ("mixtral-8x7b", Setting(ulysses=4, dp=4, ep=4), {}),
    ("gpt3-1.3b", Setting(tp=2, dp=2, recompute="selective"),
     {"attention": "unfused", "seq_length": 2048}),
]  # fmt: skip


def flags_of(name: str, setting: Setting, changes: dict[str, Any]) -> list[str]:
    fields: dict[str, Any] = {
        "model": PRESETS[name], "gpu": GPUS["h100"], "num_gpus": setting.world_size,
        "seq_length": 8192, "global_batch_size": 64, **changes,
    }  # fmt: skip
    return megatron_flags(Estimate.of(Job(**fields), setting))


@pytest.mark.parametrize(("name", "setting", "changes"), CASES, ids=lambda value: str(value)[:20])
def test_what_is_written_reads_back(name: str, setting: Setting, changes: dict[str, Any]) -> None:
    flags = flags_of(name, setting, changes)
    run = read_megatron(
        f"torchrun --nproc_per_node {setting.world_size} pretrain_gpt.py " + " ".join(flags)
    )
    assert not run.problems and not run.unread
    assert (run.setting(), run.ep) == (setting, setting.ep)
    known = PRESETS[name]
    assert run.model.layer_parameters == pytest.approx(known.layer_parameters, rel=1e-6)
    assert run.model.total_parameters == pytest.approx(known.total_parameters, rel=2e-3)
    assert run.precision == changes.get("precision", "bf16")
    assert run.zero_stage == changes.get("zero_stage", 1)


@pytest.fixture(scope="module")
def megatron_parser() -> argparse.ArgumentParser:
    arguments = pytest.importorskip("megatron.training.arguments")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_megatron_arguments(parser)
    return parser


@pytest.mark.megatron
def test_megatron_accepts_every_flag(megatron_parser: argparse.ArgumentParser) -> None:
    for name, setting, changes in CASES:
        words = [w for flag in flags_of(name, setting, changes) for w in flag.split(" ")]
        options, unknown = megatron_parser.parse_known_args(words)
        assert not unknown, (name, unknown)
        assert options.context_parallel_size == setting.cp
        assert options.num_layers == PRESETS[name].num_layers


@pytest.mark.megatron
def test_megatron_knows_every_name_that_is_read(megatron_parser: argparse.ArgumentParser) -> None:
    known = {option for action in megatron_parser._actions for option in action.option_strings}
    assert {f"--{name}" for name in SWITCHES | READ | OTHER} <= known
    values = {o for a in megatron_parser._actions if a.nargs != 0 for o in a.option_strings}
    assert {f"--{name}" for name in READ | OTHER} <= values
    assert not {f"--{name}" for name in SWITCHES} & values


def test_remark_on_heads_that_stock_megatron_refuses() -> None:
    fields: dict[str, Any] = {"gpu": GPUS["h100"], "num_gpus": 8, "seq_length": 8192,
                              "global_batch_size": 8}  # fmt: skip
    llama = Job(model=PRESETS["llama-3.1-70b"], **fields)
    assert "--spec" in remark(llama, Setting(tp=2, ulysses=8))
    assert remark(llama, Setting(tp=2, ulysses=4)) == ""
    assert "--ring 1" in remark(llama, Setting(tp=2, ulysses=4, ring=2))


def test_everything_wrong_with_a_command_line_at_once() -> None:
    run = read_megatron(
        "pretrain_gpt.py --num-layers 24 --hidden-size 1000 --num-attention-heads 16 "
        "--seq-lenght 4096 --micro-batch-size 0 --cp-comm-type a2b --num-query-groups 4 "
        "--recompute-granularity some"
    )
    text = "\n".join(map(str, run.problems))
    for part in ("unknown flag --seq-lenght", "--seq-length", "micro-batch-size is '0'", "a2b",
                 "--group-query-attention", "'some'", "seq-length is missing"):  # fmt: skip
        assert part in text, part
