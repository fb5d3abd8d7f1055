"""Random layers against the float64 oracle: output and every gradient, bytes and collectives.

FUZZ_DRAWS (300) and FUZZ_SEED (0) choose how many and which; `make fuzz` runs 5,000. A failing
draw is made smaller by hypothesis and printed; `python -m tests.fuzz 'Draw(...)'` repeats it.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase

from tests.fuzz.draws import Draw, draws
from tests.fuzz.on_ranks import run_draws, whole_again
from tests.fuzz.tensors import expected, join_tensor_parallel
from tests.support.pool import run_ranks
from tests.support.sharded import assert_close

DRAWS = int(os.environ.get("FUZZ_DRAWS", "300"))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
PART = 300  # draws of one test
BATCH = 25  # draws of one call of the pool
AT_LEAST = 30  # of each kind in a part


def check(batch: list[Draw]) -> dict[Draw, str]:
    """What is wrong, by draw; all draws have the same Ulysses size."""
    try:
        by_rank = run_ranks(batch[0].ulysses, run_draws, batch, timeout=120)
    except Exception as error:
        if len(batch) == 1:
            cause = error.__cause__ or error
            return {batch[0]: f"{type(error).__name__}: {error}\n{cause}"}
        return {draw: wrong for alone in batch for draw, wrong in check([alone]).items()}
    failures = {}
    for draw, ranks in zip(batch, zip(*by_rank, strict=True), strict=True):
        parts = [whole_again(draw, results) for results in zip(*ranks, strict=True)]
        try:
            results = join_tensor_parallel(draw, parts)
            assert_close(results, expected(draw), getattr(torch, draw.dtype))
        except AssertionError as error:
            failures[draw] = str(error)
    return failures


def generate(seed: str, phases: list[Phase], use: Callable[[Draw], object]) -> None:
    """Hands ten draws to `use`, the same ones for the same seed.

    Ten, because after ten hypothesis goes on with variations of what it has: 300 draws in a row
    held 82 settings of heads.
    """

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=10,
        phases=phases,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(draws())
    def each(draw: Draw) -> None:
        use(draw)

    each()


def distinct(part: int, number: int) -> dict[Draw, str]:
    """Draws, each with the seed that it came from."""
    drawn: dict[Draw, str] = {}
    for ten in itertools.count():
        seed = f"{SEED}.{part}.{ten}"
        generate(seed, [Phase.generate], lambda draw, seed=seed: drawn.setdefault(draw, seed))
        if len(drawn) >= number:
            return dict(itertools.islice(drawn.items(), number))
    raise AssertionError


def smallest(seed: str, failures: dict[Draw, str]) -> str:
    """The same ten draws once more, with what is known of them, so that hypothesis shrinks one."""
    found: list[tuple[Draw, str]] = []

    def use(draw: Draw) -> None:
        # Before the first failure all results are known.
        wrong = (check([draw]) if found else failures).get(draw)
        if wrong:
            found.append((draw, wrong))
            raise AssertionError(wrong)

    try:
        generate(seed, [Phase.generate, Phase.shrink], use)
    except Exception:
        draw, wrong = found[-1]
        return f"python -m tests.fuzz {str(draw)!r}\n{wrong}"
    return "not found again"


@pytest.mark.compiler
@pytest.mark.parametrize("part", range(-(-DRAWS // PART)))
def test_random_layers_equal_the_oracle(part: int) -> None:
    drawn = distinct(part, min(PART, DRAWS - part * PART))
    counts = Counter(draw.kind for draw in drawn)
    counts["packed"] = sum(draw.batch is None for draw in drawn)
    kinds = ("even", "replicated", "uneven", "packed")
    assert len(drawn) < PART or all(counts[kind] >= AT_LEAST for kind in kinds), counts

    failures: dict[Draw, str] = {}
    by_size = sorted(drawn, key=lambda draw: draw.ulysses)
    for _, same in itertools.groupby(by_size, key=lambda draw: draw.ulysses):
        while batch := list(itertools.islice(same, BATCH)):
            failures |= check(batch)
    if failures:
        lines = [f"{draw}: {wrong.splitlines()[0]}" for draw, wrong in failures.items()]
        shrunk = smallest(drawn[next(iter(failures))], failures)
        pytest.fail(
            f"{len(failures)} of {len(drawn)}\n" + "\n".join(lines) + f"\nsmallest: {shrunk}"
        )
