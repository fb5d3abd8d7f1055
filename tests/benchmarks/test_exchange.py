"""The benchmark runs, and what it counts is what the documentation says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import Case
from benchmarks.contenders import CONTENDERS
from benchmarks.report import verdict

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_quick_run_of_ours_and_the_floor(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/exchange.py", "--quick"]
    command += ["--contenders", "ulysses_mc", "separate, no copy"]
    command += ["--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]

    tables = json.loads((tmp_path / "out.json").read_text())
    assert [table["case"]["attention"] for table in tables] == ["none", "none", "sdpa", "sdpa"]
    for table in tables:
        rows = {row["name"]: row for row in table["rows"]}
        assert not any(row["refuses"] for row in rows.values())
        assert all(abs(row["bytes_ratio"] - 1) < 1e-9 for row in rows.values())
        assert rows["ulysses_mc"]["exchanges"] == rows["floor"]["exchanges"] == 4
        assert rows["separate, no copy"]["exchanges"] == 8
        assert rows["floor"]["copies"] == 0
        assert 0 < rows["ulysses_mc"]["copies"] <= 8
        assert rows["floor"]["both"] == 1
        assert table["title"] in (tmp_path / "out.md").read_text()


@pytest.mark.slow
def test_libraries_that_are_installed_run_and_others_are_named(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/exchange.py", "--quick", "--sdpa-size", "0"]
    command += ["--contenders", "DeepSpeed", "yunchang", "ringmaster (NCCL path)"]
    command += ["--json", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((tmp_path / "out.json").read_text())[0]["rows"][1:]
    for row in rows:
        if row["refuses"] is None:
            assert row["exchanges"] in (4, 6, 8) and row["copies"] >= 8
        else:
            assert "ulysses-mc[bench]" in row["refuses"]
            assert f"{row['name']} refuses" in done.stdout


def test_bound_of_a_case() -> None:
    """4 ranks, 8 query and 2 key/value heads of 64, 16 tokens each, by hand."""
    case = Case(ranks=4, heads=8, kv_heads=2, local_tokens=16)
    per_rank = 48 * (2 + 1 + 1) * 64 * 4 + 16 * 6 * 64 * 4  # q, k, v of 48 tokens; o of 6 heads
    assert case.bound_bytes == 2 * 4 * per_rank


def test_verdict_names_the_best_other_library() -> None:
    names = ("floor", "ulysses_mc", "yunchang", "DeepSpeed")
    rows: list[dict[str, Any]] = [
        {"name": name, "refuses": None, "both": both}
        for name, both in zip(names, (1.0, 1.4, 2.5, 2.0), strict=True)
    ]
    assert "1.40 x the floor (within" in verdict(rows, "none")
    assert "ahead of the best other library (DeepSpeed, 2.00)" in verdict(rows, "none")
    rows[1]["both"] = 2.2
    assert "above the target" in verdict(rows, "none")
    assert "behind the best other library (DeepSpeed, 2.00)" in verdict(rows, "none")
    assert set(names) <= set(CONTENDERS)
