"""`bench`: the fit, real ranks, and that plan reads what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ulysses_mc.cli import main
from ulysses_mc.planning import read_gpu
from ulysses_mc.planning.link_fit import OPERATIONS, bytes_sent, fit


@pytest.mark.parametrize(("alpha", "beta"), [(20e-6, 50e9), (0.0, 1e9), (1e-3, 2e8)])
def test_fit_finds_alpha_and_beta(alpha: float, beta: float) -> None:
    points = [(float(2**p), alpha + 2**p / beta) for p in range(10, 28, 2)]
    found = fit(points)
    assert found.alpha == pytest.approx(alpha, rel=1e-6, abs=1e-12)
    assert found.beta == pytest.approx(beta, rel=1e-6)
    assert found.error < 1e-6


def test_fit_of_noise_stays_positive() -> None:
    for points in ([(1e3, 2e-5), (1e6, 1e-5)], [(1e3, 1e-6), (1e6, 1e-2)], [(1e4, 1e-5)] * 3):
        found = fit(points)
        assert found.alpha >= 0 and found.beta > 0


def test_bytes_that_a_rank_sends() -> None:
    sent = {name: bytes_sent(name, 800, 4) for name in OPERATIONS}
    assert sent == {"all_to_all": 600, "all_gather": 600, "all_reduce": 1200, "p2p": 800}


def test_measures_ranks_and_plan_reads_the_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "links.json"
    arguments = [
        "bench",
        "--backend",
        "gloo",
        "--ranks",
        "2",
        "--repeats",
        "2",
        "--largest",
        "65536",
    ]
    assert main([*arguments, "--output", str(file)]) == 0
    out = capsys.readouterr().out
    assert "2 ranks on 1 node(s), gloo" in out
    profile = json.loads(file.read_text())
    assert set(profile["fits"]) == set(OPERATIONS)
    assert len(profile["measurements"]) == 3 * len(OPERATIONS)
    assert all(m["seconds"] > 0 and m["bytes"] > 0 for m in profile["measurements"])
    gpu = read_gpu("h100", profile=str(file))
    link = gpu.link("intra", "all_to_all")
    assert link.seconds(1, 1e6) == pytest.approx(
        profile["fits"]["all_to_all"]["alpha_seconds"]
        + 1e6 / profile["fits"]["all_to_all"]["bytes_per_second"]
    )
    assert gpu.link("inter", "p2p") == read_gpu("h100").inter
    plan = ["plan", "llama-3.1-8b", "--seq-length", "8K", "--profile", str(file), "--json"]
    assert main(plan) == 0


@pytest.mark.parametrize("content", ["{", "{}", '{"fits": {"all_to_all": {"alpha_seconds": 1}}}'])
def test_a_file_that_is_no_profile(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "links.json"
    file.write_text(content)
    arguments = ["plan", "llama-3.1-8b", "--seq-length", "8K", "--profile", str(file)]
    assert main(arguments) == 2
    assert "ulysses-mc bench --output" in capsys.readouterr().err
