"""`doctor`: quick, never crashes, and what the facts mean."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ulysses_mc.cli import probes
from ulysses_mc.cli.diagnosis import Backend, backends, bad_combinations, runs, version
from ulysses_mc.cli.doctor import as_text
from ulysses_mc.cli.probes import Facts, gather, nvidia_apex

ROOT = Path(__file__).resolve().parents[2]
H100 = {"name": "NVIDIA H100", "memory": 80 * 2**30, "capability": [9, 0]}
BARE = Facts(python=(3, 11, 7))
TORCH: dict[str, Any] = {"version": "2.13.0", "cuda_build": "12.8", "cuda": False, "gloo": True,
                         "nccl": True, "nccl_version": "2.27", "gpus": []}  # fmt: skip
CPU = replace(BARE, packages={"torch": "2.13.0", "megatron-core": "0.16.1", "psutil": "7"},
              torch=TORCH, environment={"OMP_NUM_THREADS": "1"})  # fmt: skip
GPU = replace(CPU, torch={**TORCH, "cuda": True, "gpus": [H100, H100]},
              environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})  # fmt: skip


def by_name(facts: Facts) -> dict[str, Backend]:
    return {backend.name: backend for backend in backends(facts)}


def test_on_this_machine_in_under_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    facts = gather()
    assert time.monotonic() - start < 9 and facts.seconds < 9
    assert facts.packages.get("torch")
    assert by_name(facts)["gloo"].usable
    assert "known bad combinations" in as_text(facts)


def test_where_nothing_is_installed(tmp_path: Path) -> None:
    """-S: a Python that sees no installed package at all."""
    code = "import sys; from ulysses_mc.cli import main; sys.exit(main(['doctor', '--json']))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, env=env,
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 1, done.stderr
    said = json.loads(done.stdout)
    assert not said["packages"]
    assert all(b["why"] for b in said["backends"] if not b["usable"])


@pytest.mark.parametrize(
    "code", ["raise OSError('libnccl.so.2: not found')", "import os; os.abort()", "print('hello')"]
)
def test_a_broken_torch_is_reported(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_IMPORTS", code)
    facts = gather()
    assert facts.torch["error"]
    assert "torch does not import" in by_name(facts)["gloo"].why
    as_text(facts)


def test_a_torch_that_hangs_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_IMPORTS", "import time; time.sleep(60)")
    facts = gather(deadline=1.0)
    assert facts.torch["late"] and facts.seconds < 5
    assert by_name(facts)["gloo"].usable
    assert any("did not end in time" in line for line in bad_combinations(facts))


def test_an_nvidia_smi_that_hangs_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(probes, "_IMPORTS", "import time; time.sleep(60)")
    facts = gather(deadline=1.0)
    # Side by side: three probes that hang take the time of one.
    assert facts.driver_late and facts.torch["late"] and facts.seconds < 5
    assert any("nvidia-smi did not answer" in line for line in bad_combinations(facts))


def test_what_an_import_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that outlives its parent would hold the pipe open."""
    code = "import subprocess; subprocess.run(['sleep', '60'])"
    monkeypatch.setattr(probes, "_IMPORTS", code)
    assert gather(deadline=1.0).seconds < 5


def test_apex_is_known_by_its_contents_not_its_name(tmp_path: Path) -> None:
    stranger = tmp_path / "a" / "apex"
    stranger.mkdir(parents=True)
    (stranger / "__init__.py").write_text("# a web toolkit\n")
    assert not nvidia_apex([str(tmp_path / "a")])
    optimizers = tmp_path / "b" / "apex" / "optimizers"
    optimizers.mkdir(parents=True)
    assert not nvidia_apex([str(tmp_path / "b")])
    (optimizers / "__init__.py").write_text("from .fused_adam import FusedAdam\n")
    (optimizers / "fused_adam.py").write_text("class FusedAdam: ...\n")
    assert not nvidia_apex([str(tmp_path / "b")])
    (optimizers / "fused_adam.py").write_text("class FusedAdam:\n    import amp_C\n")
    assert nvidia_apex([str(tmp_path / "b")])
    unrelated = replace(CPU, packages={**CPU.packages, "apex": "0.9.10"})
    assert not by_name(unrelated)["apex (NVIDIA's)"].usable
    assert any("unrelated package" in line for line in bad_combinations(unrelated))
    assert by_name(replace(unrelated, nvidia_apex=True))["apex (NVIDIA's)"].usable


def test_backends_and_why_not() -> None:
    bare, cpu, gpu = by_name(BARE), by_name(CPU), by_name(GPU)
    assert not any(b.usable for b in bare.values())
    assert cpu["gloo"].usable and cpu["sdpa"].usable and cpu["megatron-core"].usable
    assert cpu["nccl"].why == "no GPU is visible"
    assert "backward" in cpu["flex"].why
    assert gpu["nccl"].usable and gpu["flex"].usable
    assert "ulysses-mc[flash]" in gpu["flash-attn"].why
    half = replace(GPU, packages={**GPU.packages, "flash-attn": "2.8.3"})
    assert "extension" in by_name(half)["flash-attn"].why
    assert by_name(replace(half, flash=(2,)))["flash-attn"].usable


def test_what_is_run_or_skipped() -> None:
    skipped = {what: why for what, is_run, why in runs(CPU) if not is_run}
    assert skipped["tests marked gpu"] == "no GPU"
    assert "jsonargparse" in skipped["examples/pretrain_gpt.py"]
    assert "tests marked megatron" not in skipped
    assert "tests marked megatron" in {what for what, is_run, _ in runs(BARE) if not is_run}


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        (replace(CPU, packages={"torch": "2.5.1"}), "torch 2.5.1 is older than 2.6"),
        (replace(CPU, packages={"megatron-core": "0.19.2", "psutil": "7"}), "needs Python 3.12"),
        (replace(CPU, packages={"megatron-core": "0.16.1"}), "needs psutil"),
        (replace(CPU, driver="NVIDIA H100, 81559 MiB, 470.1"), "the driver may be too old"),
        (replace(GPU, environment={}), "CUDA_DEVICE_MAX_CONNECTIONS=1"),
        (replace(GPU, environment={"NCCL_P2P_DISABLE": "1"}), "unset NCCL_P2P_DISABLE"),
        (replace(CPU, te={"error": "undefined symbol"}), "built for one torch"),
        (replace(CPU, environment={}), "OMP_NUM_THREADS=1"),
    ],
)
def test_known_bad_combinations(facts: Facts, part: str) -> None:
    assert any(part in line for line in bad_combinations(facts))


def test_good_combinations() -> None:
    assert not bad_combinations(CPU) and not bad_combinations(GPU)


def test_version() -> None:
    assert version("2.13.0+cpu") == (2, 13, 0) < version("2.13.1")
    assert version("garbage") == (0,)
