"""What a user gets wrong is answered with one message that says what would work."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jsonargparse")
from examples.pretraining.config import Config, known_keys, parse
from examples.pretraining.errors import UserError
from examples.pretraining.preflight import check
from ulysses_mc import ParallelConfigError
from ulysses_mc.planning.megatron_fields import core_folder

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "examples" / "configs").glob("*.yaml"))


def has_hybrid_models() -> bool:
    core = core_folder()
    return core is None or (core / "models" / "hybrid").is_dir()


def config(*argv: str) -> Config:
    return parse(list(argv)).config


@pytest.mark.parametrize(
    ("argument", "nearest"),
    [
        ("--model.hiden_size=3", "model.hidden_size"),
        ("--modle.num_layers=3", "model.num_layers"),
        ("--parallel.ulyses_parallel_size=2", "parallel.ulysses_parallel_size"),
        ("--train_iter=3", "training.train_iters"),
        ("--outputs=x", "output"),
        ("--modell.x=3", "model"),  # not any key with an x in it
    ],
)
def test_an_unknown_option_names_the_nearest(argument: str, nearest: str) -> None:
    with pytest.raises(UserError, match="unknown config key") as caught:
        config(argument)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(f"the nearest known one is {nearest}")


@pytest.mark.parametrize(
    ("argument", "place"),
    [
        ("--parallel.context_parallel_size=2", "parallel.ulysses_parallel_size"),
        ("--context-parallel-size=2", "parallel.ulysses_parallel_size"),
        ("--tp=2", "parallel.tensor_model_parallel_size"),
        ("--parallel.sequence_parallel=true", "model.transformer.sequence_parallel"),
        ("--tensor-model-parallel-size=2", "parallel.tensor_model_parallel_size"),
    ],
)
def test_names_of_other_programs_are_known(argument: str, place: str) -> None:
    with pytest.raises(UserError, match="unknown config key") as caught:
        config(argument)
    assert str(caught.value).endswith(place)


def test_an_unknown_key_in_yaml_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("optimizer: {warmup: 3}\n")
    with pytest.raises(UserError, match=r"'optimizer.warmup'; the nearest .* optimizer.lr_warmup"):
        config("--config", str(tmp_path / "c.yaml"))


def test_wrong_values_and_files_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("model: {num_layers: [\n")
    for argv in (
        ["--model.num_layers=many"],
        ["--model.kind=gtp"],
        ["--config", str(tmp_path / "none.yaml")],
        ["--config", str(tmp_path / "bad.yaml")],
    ):
        with pytest.raises(UserError) as caught:
            config(*argv)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {num_layers: [\n", r"c\.yaml, line 2, column 1: not readable as YAML"),
        ("model:\n\tnum_layers: 2\n", r"c\.yaml, line 2, column 1: not readable as YAML"),
        (
            "model: {num_layers: 2}\nmodel: {hidden_size: 64}\n",
            r"c\.yaml: model stands there twice",
        ),
        ("optimizer:\n  lr: 1\n  lr: 2\n", r"optimizer\.lr stands there twice, .* in line 3"),
        ("model: &m {transformer: *m}\n", r"c\.yaml: not readable as YAML"),
    ],
)
def test_a_file_that_cannot_be_meant(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        config(f"--config={tmp_path / 'c.yaml'}")


def test_yaml_then_command_line(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "model: {num_layers: 6, transformer: {qk_layernorm: true}}\noptimizer: {lr: 1e-4}\n"
        "parallel: {ulysses_parallel_size: 4}\n"
    )
    got = config("--config", str(tmp_path / "c.yaml"), "--model.num_layers=8", "--data.path=[a,b]")
    assert got.model.num_layers == 8 and got.model.transformer == {"qk_layernorm": True}
    assert got.optimizer.lr == 1e-4 and got.parallel.ulysses_parallel_size == 4
    assert got.data.path == ["a", "b"]


def test_every_key_is_known_and_documented_by_its_dataclass() -> None:
    keys = known_keys()
    assert "parallel.ulysses_parallel_size" in keys and "output" in keys
    assert len(keys) > len(dataclasses.fields(Config))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_the_configs_that_are_shipped_fit(path: Path, data: str) -> None:
    got = config("--config", str(path), f"--data.path=[{data}]")
    if got.model.kind == "hybrid" and not has_hybrid_models():
        with pytest.raises(UserError, match=r"needs megatron-core >= 0.19.* here is .* on Python"):
            check(got, 4)
        return
    replicas = 2 if path.stem == "llama3_8b_128k" else 1
    shape = check(got, got.parallel.model_size * replicas)
    assert shape.global_batch_size == got.batch.global_batch_size
    assert shape.padded_seq_length == got.model.seq_length


def test_the_batch_arithmetic(data: str) -> None:
    got = config(
        f"--data.path=[{data}]", "--parallel.tensor_model_parallel_size=2",
        "--parallel.ulysses_parallel_size=2", "--model.seq_length=250",
        "--batch.micro_batch_size=2", "--batch.global_batch_size=24",
        "--model.transformer.sequence_parallel=true",
    )  # fmt: skip
    shape = check(got, 16)
    assert (shape.data_parallel_size, shape.accumulation_steps) == (4, 3)
    assert (shape.padded_seq_length, shape.tokens_per_step) == (252, 24 * 250)
    text = shape.describe()
    assert "world size 16 = tensor 2 x pipeline 1 x ulysses 2 x ring 1 x data 4" in text
    assert "24 samples = micro batch 2 x data 4 x 3 accumulation steps; 6000 tokens" in text
    assert "padded by 2 tokens" in text and "a multiple of 4" in text


@pytest.mark.parametrize(
    ("argv", "world", "parts"),
    [
        (["--parallel.tensor_model_parallel_size=2", "--parallel.ulysses_parallel_size=2"], 6,
         ["over 6 ranks", "Nearest that work: 4 or 8 ranks"]),
        (["--parallel.tensor_model_parallel_size=8", "--model.num_attention_heads=12"], 8,
         ["num_attention_heads 12", "12 / 8 = 1.5", "tensor_model_parallel_size 4 or 6"]),
        (["--model.num_attention_heads=12", "--model.num_query_groups=5"], 1,
         ["num_attention_heads 12", "num_query_groups 5"]),
        (["--parallel.tensor_model_parallel_size=3", "--model.num_attention_heads=6",
          "--model.num_query_groups=3", "--model.ffn_hidden_size=256"], 3,
         ["ffn_hidden_size 256", "256 / 3", "255 with tensor_model_parallel_size 3"]),
        (["--parallel.tensor_model_parallel_size=2", "--model.num_attention_heads=6",
          "--model.num_query_groups=3"], 2, ["3 key/value heads", "num_query_groups 2"]),
        (["--parallel.pipeline_model_parallel_size=4", "--model.num_layers=6"], 4,
         ["num_layers 6", "6 / 4 = 1.5"]),
        (["--batch.micro_batch_size=2", "--batch.global_batch_size=7"], 2,
         ["global_batch_size 7", "7 / 4", "4 or 8"]),
        (["--parallel.pipeline_model_parallel_size=2", "--model.transformer.batch_p2p_comm=true",
          "--parallel.virtual_pipeline_model_parallel_size=2"], 2,
         ["2 model chunks on each of 2", "without overlap_p2p_comm and batch_p2p_comm"]),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit(data: str, argv: list[str], world: int, parts: list[str]) -> None:
    with pytest.raises(ParallelConfigError) as caught:
        check(config(f"--data.path=[{data}]", *argv), world)
    for part in parts:
        assert part in str(caught.value)


def test_data_that_does_not_fit(data: str, tmp_path: Path) -> None:
    cases = [
        ([f"--data.path=[{tmp_path}/none]"], "text|none.* is missing"),
        ([f"--data.path=[{data}]", "--model.vocab_size=200"], "200 is smaller than .* 300"),
        ([f"--data.path=[0.5,{data},{data}]"], "weight and prefix in turn"),
        (["--data.path=[]"], "names no data"),
        ([f"--data.path=[{data}]", "--model.kind=hybrid"], "hybrid_layer_pattern"),
    ]
    for argv, message in cases:
        with pytest.raises(UserError, match=message):
            check(config(*argv), 1)
    (tmp_path / "data.json").write_text('{"vocab_size": 50, "end_of_document": 0, "padding": 1}')
    with pytest.raises(UserError, match="holds token 99, the model's vocabulary has 50"):
        check(config(f"--data.path=[{data}]"), 1)


def test_the_script_prints_one_error_and_exits_with_2(data: str) -> None:
    """As a user runs it, and before Megatron or torch are imported."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", ROOT / "examples" / "pretrain_gpt.py",
         f"--data.path=[{data}]", "--model.num_attention_heads=7",
         "--parallel.tensor_model_parallel_size=2"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    errors = [x for x in done.stderr.splitlines() if not x.startswith("import time:")]
    assert done.returncode == 2 and errors[0].startswith("error: model.num_attention_heads 7")
    assert "Traceback" not in done.stderr
    assert not [x for x in done.stderr.splitlines() if x.endswith(("| torch", "megatron.core"))]


@pytest.mark.parametrize("name", ["", "checkpoints", "data_cache", "tensorboard", "log.jsonl"])
def test_something_in_the_way_of_the_output(name: str, data: str, tmp_path: Path) -> None:
    output = tmp_path / "run"
    if name == "log.jsonl":
        (output / name).mkdir(parents=True)
    elif name:
        output.mkdir()
        (output / name).write_text("")
    else:
        output.write_text("")
    with pytest.raises(UserError, match=f"{output / name} is a (file|folder), where the run needs"):
        check(config(f"--data.path=[{data}]", f"--output={output}"), 1)


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ("adam_eps=0", "a number above 0 and below 1"),
        ("adam_beta2=1.0", "a number from 0, below 1"),
        ("lr=3e38", "a number from 0 to 1000"),
    ],
)
def test_optimizers_that_cannot_train(option: str, rule: str, data: str) -> None:
    with pytest.raises(UserError, match=rule):
        check(config(f"--data.path=[{data}]", f"--optimizer.{option}"), 1)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"vocab_size": 300, "end_of_document": 0}',
        '{"vocab_size": Infinity, "end_of_document": 0, "padding": 1}',
        '{"vocab_size": 300, "end_of_document": 300, "padding": 1}',
        '{"vocab_size": 300, "end_of_document": 0, "padding": -3}',
        None,
    ],
)
def test_a_damaged_description_of_data(text: str | None, data: str, tmp_path: Path) -> None:
    description = tmp_path / "description"
    description.mkdir() if text is None else description.write_text(text)
    argv = [f"--data.path=[{data}]", f"--data.description={description}"]
    with pytest.raises(UserError, match="description is not a description of data: "):
        check(config(*argv), 1)
