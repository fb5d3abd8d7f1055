"""Row 29: training resumed with another data-parallel layout repeats or skips data.

The real run, stopped and resumed under four layouts, is in tests/examples/test_training.py.
"""

from __future__ import annotations

from tests.examples.test_data import samples_of_step


def test_another_layout_continues_at_consumed_samples() -> None:
    """17 samples: 5 steps of 2 at dp 1, then dp 4 from sample 10 on."""
    first = [n for step in range(5) for n in samples_of_step(step * 2, 2, 1, 1)]
    then = samples_of_step(10, 1, 1, 4)
    assert sorted(first) == list(range(10)) and sorted(then) == [10, 11, 12, 13]
