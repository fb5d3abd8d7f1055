"""The search: fast, complete, and with a reason for each setting that is out."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from ulysses_mc.head_layout import HeadLayout
from ulysses_mc.planning import GPUS, PRESETS, Estimate, Job, Limits, Setting, search
from ulysses_mc.planning import estimate as estimates
from ulysses_mc.planning.advice import fewest_gpus, longest_sequence, remedies, why_slower
from ulysses_mc.planning.hardware import GIB
from ulysses_mc.planning.memory import memory
from ulysses_mc.planning.rules import broken_rule, head_note
from ulysses_mc.planning.search import CHUNKS, MICRO_BATCHES, layouts
from ulysses_mc.planning.timing import step_time


def job(model: str = "llama-3.1-8b", **changes: object) -> Job:
    fields: dict[str, object] = {
        "model": PRESETS[model], "gpu": GPUS["h100"], "num_gpus": 8, "seq_length": 32768,
        "global_batch_size": 8,
    }  # fmt: skip
    return Job(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "gpu", "seq_length", "batch"),
    [
        ("llama-3.1-405b", "gb200-nvl72", 1 << 20, 64),
        ("llama-3.1-70b", "h100", 1 << 17, 512),
        ("deepseek-v3", "h100", 4096, 16384),
    ],
)
def test_all_layouts_of_4096_gpus_in_under_5_seconds(
    model: str, gpu: str, seq_length: int, batch: int
) -> None:
    start = time.process_time()  # not the wall clock: other tests run beside this one
    plan = search(
        job(model, gpu=GPUS[gpu], num_gpus=4096, seq_length=seq_length, global_batch_size=batch)
    )
    assert time.process_time() - start < 5
    # 2^12 as an ordered product of five factors: C(12 + 4, 4).
    assert plan.considered == 1820 or (plan.job.model.moe and plan.considered > 1820)
    assert plan.ranked


def test_every_layout_is_ranked_or_has_one_line_that_says_why_not() -> None:
    asked = job(num_gpus=16, seq_length=131072)
    plan = search(asked)
    every = set(layouts(asked))
    kept = {replace(e.setting, micro_batch=1, vpp=1, recompute="none") for e in plan.ranked}
    assert kept | {d.setting for d in plan.dropped} == every
    for dropped in plan.dropped:
        assert dropped.reason.line and "\n" not in dropped.reason.line
    best = plan.best
    assert best is not None
    for slower in plan.ranked[1:]:
        assert slower.seconds >= best.seconds
        assert "\n" not in why_slower(slower, best)


def test_what_is_ranked_fits_and_breaks_no_rule() -> None:
    for estimate in search(job(num_gpus=32, seq_length=262144)).ranked:
        assert estimate.memory.total <= estimate.job.gpu.memory
        assert broken_rule(estimate.job, estimate.setting) is None
        assert estimate.setting.world_size == 32
        heads = HeadLayout(32, 8, estimate.setting.ulysses, estimate.setting.tp)
        assert max(map(len, heads.query_heads)) > 0


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (Setting(tp=3), "32 query heads / tp 3 = 10.7: not whole"),
        (Setting(tp=16), None),  # replicated keys and values: exact
        (Setting(tp=8, ulysses=8), "fewer than ulysses 8: ulysses 1 x ring 8 instead"),
        (Setting(pp=5), "32 layers (or 34 with embedding and loss) / pp 5 = 6.4: not whole"),
        (Setting(dp=16), "global batch 8 / dp 16: less than one sample each"),
        (Setting(dp=3), "global batch 8 / dp 3: not whole"),
        (Setting(ring=48), "not whole; pad to"),
    ],
)
def test_reason(setting: Setting, line: str | None) -> None:
    reason = broken_rule(job(), setting)
    if line is None:
        assert reason is None
    else:
        assert reason is not None and line in reason.line


def test_notes_on_heads() -> None:
    asked = job("llama-3.1-70b")
    assert head_note(asked, Setting(tp=8, ulysses=4)) == (
        "8 KV heads / tp 8 = 1 per rank: replicated 4x over ulysses 4"
    )
    assert head_note(asked, Setting(tp=8, ulysses=3)) == (
        "8 query heads / ulysses 3: uneven, 12% imbalance"
    )
    assert head_note(asked, Setting(tp=4, ulysses=2)) == ""
    refusing = job("llama-3.1-70b", uneven_heads=False)
    reason = broken_rule(refusing, Setting(tp=8, ulysses=3))
    assert reason is not None and "uneven" in reason.line


def test_longest_sequence_fits_and_a_little_more_does_not() -> None:
    asked = job(zero_stage=3)
    found = longest_sequence(asked)
    assert found is not None
    tokens, setting = found
    assert memory(replace(asked, seq_length=tokens), setting).total <= asked.gpu.memory
    more = replace(asked, seq_length=int(tokens * 1.1) // 1024 * 1024)
    assert not search(more, Limits(tp=setting.tp, pp=setting.pp)).ranked


def test_fewest_gpus_fit_and_half_as_many_do_not() -> None:
    asked = job("llama-3.1-70b")
    found = fewest_gpus(asked)
    assert found is not None
    count, _ = found
    assert search(replace(asked, num_gpus=count)).ranked
    assert not search(replace(asked, num_gpus=count // 2)).ranked


def test_an_impossible_request_says_what_would_do_and_that_does() -> None:
    asked = job("llama-3.1-70b", num_gpus=8, seq_length=131072)
    plan = search(asked)
    assert not plan.ranked
    words = " | ".join(remedies(plan))
    gpus = int(words.split(" GPUs")[0].split("| ")[-1])
    assert gpus > 8
    assert search(replace(asked, num_gpus=gpus)).ranked


def test_limits_are_kept() -> None:
    plan = search(job(num_gpus=16), Limits(tp=2, ulysses=4))
    assert plan.ranked
    assert {(e.setting.tp, e.setting.ulysses) for e in plan.ranked} == {(2, 4)}


def exhaustive(asked: Job) -> tuple[list[Estimate], list[tuple[Setting, str]]]:
    """Every variant of every layout, each timed or found too large: no shortcut of the search."""
    ranked, dropped = [], []
    for layout in layouts(asked):
        found: list[Estimate] = []
        too_large, broken = "", None
        for vpp in CHUNKS if layout.pp > 1 else (1,):
            for micro in MICRO_BATCHES:
                variant = replace(layout, vpp=vpp, micro_batch=micro)
                if reason := broken_rule(asked, variant):
                    broken = broken or reason.line
                    continue
                for choice in ("none", "full"):
                    estimate = Estimate.of(asked, variant.with_recompute(choice))
                    if estimate.fits:
                        found.append(estimate)
                        break
                else:
                    too_large = too_large or f"needs {estimate.memory.total / GIB:.1f} GiB of"
        if found:
            ranked.append(min(found, key=lambda estimate: estimate.seconds))
        else:
            dropped.append((layout, too_large or broken or ""))
    return ranked, dropped


@pytest.mark.parametrize("gpus", [64, 256])
@pytest.mark.parametrize("model", ["llama-2-70b", "mixtral-8x7b", "deepseek-v3"])
def test_the_same_as_an_exhaustive_search(model: str, gpus: int) -> None:
    asked = job(model, num_gpus=gpus, seq_length=131072, global_batch_size=256)
    plan, (ranked, dropped) = search(asked), exhaustive(asked)
    assert {e.setting: e.seconds for e in plan.ranked} == {e.setting: e.seconds for e in ranked}
    assert [e.seconds for e in plan.ranked] == sorted(e.seconds for e in ranked)
    assert [d.setting for d in plan.dropped] == [layout for layout, _ in dropped]
    for ours, (_, line) in zip(plan.dropped, dropped, strict=True):
        assert ours.reason.line.startswith(line)


def test_few_variants_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, not timed: of a layout that fits, the steps of 4 of its 16 variants."""
    counts = Counter[str]()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            counts[name] += 1
            return function(*arguments)

        return call

    # Not by name: the package's `search` is the function.
    module = sys.modules["ulysses_mc.planning.search"]
    monkeypatch.setattr(module, "memory", counted("memory", memory))
    monkeypatch.setattr(estimates, "memory", counted("memory again", memory))
    monkeypatch.setattr(estimates, "step_time", counted("step", step_time))
    plan = search(job("mixtral-8x7b", num_gpus=256, seq_length=8192, global_batch_size=4096))
    assert len(plan.ranked) == 1158
    # Of some 20,000 variants; and no memory is worked out a second time.
    assert counts == {"memory": 16375, "step": 4326}
