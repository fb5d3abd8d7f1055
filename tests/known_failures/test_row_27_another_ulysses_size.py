"""Row 27: a checkpoint of one Ulysses size, loaded at another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.megatron.small_gpt import Setting
from tests.megatron.test_megatron_on_cpu import load, save
from tests.megatron.test_ulysses_gpt import around_the_specs_core
from tests.support.pool import run_ranks

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")

SINKS = dict(softmax_type="learnable")


@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (1, 2)])
def test_training_goes_on_at_another_size(tmp_path: Path, saved: int, loaded: int) -> None:
    """Saved with and loaded without Ulysses and the reverse, the sinks of the heads included."""
    settings = [Setting(cp=size, config=SINKS) for size in (saved, loaded)]
    directory = str(tmp_path)
    going_on = run_ranks(saved, save, settings[0], directory, around_the_specs_core, timeout=120)
    resumed = run_ranks(loaded, load, settings[1], directory, around_the_specs_core, timeout=120)
    assert resumed[0] == pytest.approx(going_on[0], rel=2e-5)
