"""Everything that is wrong with a run is told at once, in the words of a config."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse")
from examples.pretraining.config import known_keys, parse
from examples.pretraining.errors import UserError
from examples.pretraining.preflight import check
from tests.examples.test_config import config, has_hybrid_models
from ulysses_mc import ParallelConfigError
from ulysses_mc.planning.example_keys import LR, MIN_LR

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--data.path=foo", "data.path is 'foo': it is a list; for example --data.path '[foo]'"),
        ("--model.kind=gtp",
         "model.kind is 'gtp': it is one of gpt, hybrid; for example --model.kind gpt"),
        ("--device=gpu", "device is 'gpu': it is one of auto, cpu, cuda; for example --device cpu"),
        ("--model.num_layers=2.5",
         "model.num_layers is '2.5': it is a whole number from 1 up; for example "
         "--model.num_layers 4"),
        ("--model.num_query_groups=x",  # int or none
         "model.num_query_groups is 'x': it is a whole number from 1 up; for example "
         "--model.num_query_groups 1"),
        ("--optimizer.lr=fast",
         "optimizer.lr is 'fast': it is a number from 0 to 1000; for example --optimizer.lr 0.001"),
        ("--model.swiglu=yes!",
         "model.swiglu is 'yes!': it is true or false; for example --model.swiglu true"),
        ("--model=3",
         "model is '3': it is a section with keys of its own; for example --model.kind gpt"),
        ("--model.transformer=3",
         "model.transformer is '3': it has keys of its own; for example --model.transformer "
         "'{qk_layernorm: true}'"),
        ("--batch.micro_batch_size",
         "batch.micro_batch_size has no value: it is a whole number from 1 up; for example "
         "--batch.micro_batch_size 1"),
        ("--check=x", "--check is 'x': it is a whole number, of ranks or GPUs"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_told_with_key_value_rule_and_example(option: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        config(option)
    assert str(caught.value) == message


def test_all_options_and_keys_that_are_misread_at_once(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("model: {kind: gtp, hiden_size: 3, num_layers: 2}\ndata: {path: foo}\n")
    with pytest.raises(UserError) as caught:
        config("--config", str(file), "--batch.x", "3", "--model.num_layers=-1", "--device", "tpu")
    first, *lines = str(caught.value).splitlines()
    assert first == "5 problems:" and len(lines) == 5
    for line, parts in zip(
        lines,
        [
            (f"1. {file}: model.kind is 'gtp'", "one of gpt, hybrid"),
            (f"2. {file}: ", "'model.hiden_size'", "model.hidden_size"),
            (f"3. {file}: data.path is 'foo'", "'[foo]'"),
            ("4. unknown config key 'batch.x'", "batch.micro_batch_size"),
            ("5. device is 'tpu'", "--device cpu"),
        ],
        strict=True,
    ):
        assert all(part in line for part in parts), line


WRONG = [
    "--parallel.ring_parallel_size=2", "--parallel.tensor_model_parallel_size=4",
    "--model.num_attention_heads=6", "--model.num_query_groups=4", "--model.num_layers=3",
    "--parallel.pipeline_model_parallel_size=2", "--optimizer.lr=0.001", "--optimizer.min_lr=0.01",
    "--model.hidden_dropout=1.5", "--model.transformer.frob=1", "--evaluation.global_batch_size=3",
    "--evaluation.micro_batch_size=2", "--model.vocab_size=200",
]  # fmt: skip


def test_everything_that_is_wrong_with_a_run_at_once(data: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    with pytest.raises(UserError) as caught:
        check(config(*WRONG, f"--data.path=[{data},{tmp_path}/none]"), 16)
    text = str(caught.value)
    for part in (
        "10 problems:",
        "hidden_dropout is 1.5: a number from 0 to 1",
        "min_lr 0.01 with optimizer.lr 0.001",
        "ring_parallel_size 1 with ulysses_parallel_size 2",
        "6 / 4 = 1.5",
        "model.num_query_groups divides model.num_attention_heads",
        "model.num_layers 3 over pipeline stages x chunks 2",
        "unknown field of model.transformer 'frob'",
        "evaluation.global_batch_size 3",
        "200 is smaller than the data's vocabulary, 300",
        "none.idx is missing",
    ):
        assert part in text, part


def test_numbers_that_are_none_end_before_the_arithmetic(data: str) -> None:
    zeros = ["--model.num_query_groups=0", "--batch.micro_batch_size=0", "--model.num_layers=0"]
    with pytest.raises(UserError) as caught:
        check(config(*zeros, f"--data.path=[{data}]"), 1)
    assert str(caught.value).splitlines() == [
        "3 problems:",
        "  1. model.num_layers is 0: a whole number from 1 up",
        "  2. model.num_query_groups is 0: a whole number from 1 up",
        "  3. batch.micro_batch_size is 0: a whole number from 1 up",
    ]


def test_ring_is_refused_before_anything_starts(data: str) -> None:
    got = config(f"--data.path=[{data}]", "--parallel.ring_parallel_size=2")
    with pytest.raises(ParallelConfigError, match="ring attention is not there yet"):
        check(got, 2)


def test_a_rate_that_would_rise(data: str) -> None:
    """The same rule in explain, where a config may leave one of the two to its default."""
    from ulysses_mc.planning.example_read import run_from_config
    from ulysses_mc.planning.megatron_read import read_megatron

    assert (known_keys()["optimizer.lr"], known_keys()["optimizer.min_lr"]) == (LR, MIN_LR)
    path = f"--data.path=[{data}]"
    with pytest.raises(UserError, match=r"min_lr 0.01 .*: optimizer.min_lr 0.001 or optimizer.lr"):
        check(config(path, "--optimizer.min_lr=0.01"), 1)
    check(config(path, "--optimizer.lr=1e-4", "--optimizer.min_lr=1e-4"), 1)
    for rates, wrong in (({"lr": "5e-5"}, True), ({"min_lr": 0.01}, True), ({"lr": 0.1}, False)):
        found = " ".join(map(str, run_from_config({"optimizer": rates}, "c.yaml").problems))
        assert ("the rate falls from optimizer.lr to" in found) == wrong, rates
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --lr 1e-4 "
    for low, wrong in (("1e-3", True), ("1e-5", False), ("$LOW", False)):
        found = " ".join(map(str, read_megatron(f"{sizes} --min-lr {low}").problems))
        assert ("--min-lr 0.001 with --lr 0.0001" in found) == wrong


def script(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    outside = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"}
    return subprocess.run(
        [sys.executable, ROOT / "examples" / "pretrain_gpt.py", *options],
        env={**outside, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_check_takes_the_number_of_ranks(data: str) -> None:
    sizes = [f"--data.path=[{data}]", "--parallel.ulysses_parallel_size=2"]
    for ranks, environment, world in (
        (["--check", "8"], {"WORLD_SIZE": "4"}, "world size 8 = "),
        (["--check"], {"WORLD_SIZE": "4"}, "world size 4 = "),
        (["--check"], {}, "world size 2 = "),  # one replica
    ):
        done = script(*ranks, *sizes, **environment)
        assert done.returncode == 0 and done.stdout.startswith(world), done
    done = script("--check", "7", *sizes, "--optimizer.min_lr=1")
    assert done.returncode == 2 and done.stderr.startswith("error: 2 problems:")
    assert "over 7 ranks" in done.stderr and "Traceback" not in done.stderr
    done = script("--check", *sizes, WORLD_SIZE="x")
    assert done.returncode == 2 and done.stderr == "error: WORLD_SIZE is 'x', not a number\n"


def test_the_launcher_refuses_before_torchrun() -> None:
    options = ["--parallel.ring_parallel_size=2", "--optimizer.min_lr=1", "--data.path=[none]"]
    done = subprocess.run(
        [ROOT / "examples" / "pretrain_gpt.sh", "--config", "examples/configs/hybrid.yaml",
         *options], cwd=ROOT, env={**os.environ, "PYTHON": sys.executable},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and not done.stdout
    count = 3 if has_hybrid_models() else 4
    assert done.stderr.startswith(f"error: {count} problems:") and "Traceback" not in done.stderr
    assert "ring attention is not there yet" in done.stderr


def test_the_ranks_of_a_request() -> None:
    assert [parse(a).check for a in ([], ["--check"], ["--check", "8"])] == [None, 0, 8]


def test_experts_do_not_count_padding(data: str) -> None:
    moe = "--model.transformer={num_moe_experts: 4, moe_aux_loss_coeff: 0.01}"
    sizes = ["--parallel.ulysses_parallel_size=4", f"--data.path=[{data}]"]
    check(config(moe, "--model.seq_length=32", *sizes), 4)
    with pytest.raises(UserError, match=r"moe_aux_loss_coeff.*seq_length 24 or 32 needs none"):
        check(config(moe, "--model.seq_length=30", *sizes), 4)
    plain = "--model.transformer={num_moe_experts: 4}"  # routes each token by itself
    check(config(plain, "--model.seq_length=30", *sizes), 4)


def test_multi_token_prediction_is_not_built_here(data: str) -> None:
    with pytest.raises(UserError, match="builds no blocks for multi-token prediction"):
        check(config("--model.transformer.mtp_num_layers=1", f"--data.path=[{data}]"), 1)


def test_a_world_size_without_a_rank_is_refused(data: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    words = [f"--data.path=[{data}]", f"--output={tmp_path}", "--device=cpu"]
    done = script(*words, "--batch.global_batch_size=8", WORLD_SIZE="2")
    assert done.returncode == 2 and "WORLD_SIZE is 2 and RANK is not set" in done.stderr
    assert "Traceback" not in done.stderr
