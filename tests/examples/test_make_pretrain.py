"""`make pretrain` from one end to the other: the first command of the README, made shorter; what a
user sees of it, and what its checkpoint answers. And the Slurm script, without Slurm."""

import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("jsonargparse")

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
PEAK = 0.05  # TFLOP/s, for an MFU
SHORT = [
    "--training.train_iters=3", "--evaluation.interval=3", "--evaluation.iters=1",
    "--checkpoint.interval=3", "--batch.global_batch_size=8", "--model.seq_length=64",
    "--data.split=9,1,0", f"--logging.peak_tflops_per_gpu={PEAK}",
]  # fmt: skip
LINE = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration +(?P<iteration>\d+)/ +3 "
    r"\| consumed samples: +(?P<consumed_samples>\d+) "
    r"\| elapsed time per iteration \(ms\): (?P<elapsed_ms>\S+) "
    r"\| throughput per GPU \(TFLOP/s/GPU\): (?P<tflops_per_gpu>\S+) "
    r"\| learning rate: (?P<learning_rate>\S+) "
    r"\| global batch size: +(?P<global_batch_size>\d+) "
    r"\| lm loss: (?P<lm_loss>\S+) "
    r"\| loss scale: (?P<loss_scale>\S+) "
    r"\| grad norm: (?P<grad_norm>\S+) "
    r"\| number of skipped iterations: +(?P<skipped_iterations>\d+) "
    r"\| number of nan iterations: +(?P<nan_iterations>\d+) "
    r"\| tokens/s/GPU: (?P<tokens_per_second_per_gpu>\S+) "
    r"\| MFU: (?P<mfu>\S+)% "
    r"\| peak memory \(GiB\): (?P<peak_memory_gib>\S+) "
    r"\| ETA: (?P<eta>\d+:\d\d:\d\d) \|"
)


@pytest.fixture(scope="module")
def made(
    small_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """tensor 2 x pipeline 2 x Ulysses 2, in the running environment and with prepared data."""
    output = tmp_path_factory.mktemp("made") / "run"
    venv = Path(sys.executable).parent.parent
    done = subprocess.run(
        ["make", "pretrain", f"VENV={venv}", f"PYTHON={sys.executable}", f"DATA={small_data}",
         f"--old-file={venv}/.installed-train",  # as it is: nothing is installed
         f"ARGS={' '.join(SHORT)} --device=cpu --output={output}"],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    return done, output


def records(output: Path, kind: str = "train") -> list[dict[str, float]]:
    lines = map(json.loads, (output / "log.jsonl").read_text().splitlines())
    return [record for record in lines if record["kind"] == kind]


def test_it_ends_well_and_says_where_everything_lies(made: tuple) -> None:
    done, output = made
    assert done.returncode == 0, done.stdout + done.stderr
    assert "installing" not in done.stdout and "Warning" not in done.stderr
    begin = "world size 8 = tensor 2 x pipeline 2 x ulysses 2 x ring 1 x data 1\n"
    end = done.stdout.split("\ndone: loss ")[1]
    assert begin in done.stdout and "the entropy of the token frequencies" in end
    named = dict(re.findall(r"^  (\w+(?: \w+)?)  +(/.*)$", end, re.MULTILINE))
    assert {name: Path(path).relative_to(output) for name, path in named.items()} == {
        "checkpoint": Path("checkpoints/iter_0000003"),
        "log": Path("log.jsonl"),
        "tensorboard": Path("tensorboard"),
        "loss plot": Path("loss.png"),
    }
    assert all(Path(path).exists() for path in named.values())
    plot = (output / "loss.png").read_bytes()
    assert plot.startswith(b"\x89PNG\r\n\x1a\n") and plot[-8:-4] == b"IEND"
    assert struct.unpack(">II", plot[16:24]) == (960, 540)


def test_the_log_line_is_megatrons_and_more(made: tuple) -> None:
    from examples.pretraining.flops import CONVENTION

    done, output = made
    start, *_ = done.stdout.partition(" iteration ")
    assert done.stdout.count(CONVENTION) == start.count(f"TFLOP/s and MFU: {CONVENTION}\n") == 1
    lines = [match.groupdict() for match in map(LINE.fullmatch, done.stdout.splitlines()) if match]
    logged = records(output)
    assert [line["iteration"] for line in lines] == ["1", "2", "3"]
    for line, record in zip(lines, logged, strict=True):
        hours, minutes, seconds = map(int, line.pop("eta").split(":"))
        assert 3600 * hours + 60 * minutes + seconds == round(record["eta_seconds"])
        shown = {name: float(value) for name, value in line.items()}
        shown["mfu"] /= 100
        units = {"mfu": 1e-3, "elapsed_ms": 0.1, "tokens_per_second_per_gpu": 0.1,
                 "peak_memory_gib": 0.01, "grad_norm": 1e-3}  # fmt: skip
        for name, value in shown.items():
            assert value == pytest.approx(record[name], rel=5e-3, abs=units.get(name, 0)), name
        assert record["consumed_samples"] == 8 * record["iteration"]
        seconds = record["elapsed_ms"] / 1e3
        assert record["tokens_per_second_per_gpu"] == pytest.approx(8 * 64 / seconds / 8)
        assert record["mfu"] == pytest.approx(record["tflops_per_gpu"] / PEAK)
        assert record["eta_seconds"] == pytest.approx((3 - record["iteration"]) * seconds)
        assert 0.1 < record["peak_memory_gib"] < 4
    # 4 layers of 128, 8 query and 4 key/value heads of 16, a 384 wide MLP; 128 rows of logits.
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 2 * 128 * 64 / 2 + 3 * 128 * 384
    flops = 6 * 8 * 64 * (4 * layer + 128 * 128)
    rates = [r["tflops_per_gpu"] * r["elapsed_ms"] * 1e9 * 8 for r in logged]
    assert rates == pytest.approx([flops] * 3)


def test_tensorboard_has_the_same_losses(made: tuple) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, output = made
    events = EventAccumulator(str(output / "tensorboard")).Reload()
    for tag, key, kind in (
        ("lm loss", "lm_loss", "train"),
        ("grad-norm", "grad_norm", "train"),
        ("learning-rate", "learning_rate", "train"),
        ("tokens_per_second_per_gpu", "tokens_per_second_per_gpu", "train"),
        ("lm loss validation", "lm_loss", "valid"),
    ):
        expected = {r["iteration"]: r[key] for r in records(output, kind)}
        found = {event.step: event.value for event in events.Scalars(tag)}
        assert expected and found == pytest.approx(expected, rel=1e-6), tag


def start_from(checkpoints: Path, data: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """One rank of the same model."""
    config = ROOT / "examples/configs/cpu_demo.yaml"
    sizes = [
        f"--parallel.{n}_parallel_size=1" for n in ("tensor_model", "pipeline_model", "ulysses")
    ]
    return subprocess.run(
        [sys.executable, ROOT / "examples/pretrain_gpt.py", "--config", config, *SHORT, *sizes,
         f"--data.path=[{data}/text]", f"--output={checkpoints.parent}", *options],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=180,
    )  # fmt: skip


@pytest.mark.parametrize("wrong", ["damaged", "of another model"])
def test_a_checkpoint_that_does_not_fit_is_one_message(
    made: tuple, small_data: Path, tmp_path: Path, wrong: str
) -> None:
    shutil.copytree(made[1] / "checkpoints", tmp_path / "checkpoints")
    checkpoint = tmp_path / "checkpoints/iter_0000003"
    if wrong == "damaged":
        damaged = checkpoint / "__0_0.distcp"
        content = bytearray(damaged.read_bytes())
        content[len(content) // 2] ^= 1
        damaged.write_bytes(content)
        done = start_from(tmp_path / "checkpoints", small_data)
        said = f"checkpoint {checkpoint} is damaged: {damaged.name}"
    else:
        done = start_from(tmp_path / "checkpoints", small_data, "--model.num_layers=2")
        said = f"{checkpoint} is a checkpoint of another model: num_layers is 4 there and 2 here"
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()  # PyTorch logs there that a CUDA toolkit lies beside no GPU
    assert [line for line in lines if "No CUDA runtime" not in line] == [f"error: {said}"]


# What Slurm does: srun runs its command once for each task, each of which is told its node.
SRUN = """#!/usr/bin/env bash
echo "srun with SRUN_CPUS_PER_TASK=$SRUN_CPUS_PER_TASK"
while [[ $1 == --* ]]; do shift; done
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
wait $first && wait $second
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames node[1-2]" ] && printf 'localhost\\nnode2\\n'
"""


def test_the_slurm_script_starts_every_node(small_data: Path, tmp_path: Path) -> None:
    """Two nodes of one rank each meet, and know how many they are."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    slurm = {
        "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_CPUS_PER_TASK": "3",
        "MASTER_PORT": str(port), "PYTHON": sys.executable,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", ROOT / "examples/pretrain_gpt.sbatch", "--config",
         "examples/configs/cpu_demo.yaml", "--parallel.tensor_model_parallel_size=1",
         "--parallel.pipeline_model_parallel_size=1", f"--data.path=[{small_data}/text]",
         "--check"],
        env={**ENVIRONMENT, **slurm}, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    first, *rest = done.stdout.splitlines()
    assert first == "srun with SRUN_CPUS_PER_TASK=3"
    world = "world size 2 = tensor 1 x pipeline 1 x ulysses 2 x ring 1 x data 1"
    assert [line for line in rest if line.startswith("world size")] == [world, world]
