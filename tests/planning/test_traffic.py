"""Bytes: the head layout's own count, the published formulas, and where ring beats Ulysses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ulysses_mc.head_layout import HeadLayout
from ulysses_mc.planning import GPUS, PRESETS, Job, Limits, Setting, search
from ulysses_mc.planning.advice import advice
from ulysses_mc.planning.traffic import Flow, bytes_per_step, crossover, flows, ranks_per_node
from ulysses_mc.sequence_layout import SequenceLayout

LARGE = replace(GPUS["h100"], memory=1e13)  # a GPU into which everything fits


def job(name: str = "llama-3.1-70b", **changes: Any) -> Job:
    fields: dict[str, Any] = {
        "model": PRESETS[name], "gpu": GPUS["h100"], "num_gpus": 8, "seq_length": 131072,
        "global_batch_size": 1,
    }  # fmt: skip
    return Job(**{**fields, **changes})


def flow(kind: str, asked: Job, setting: Setting) -> Flow:
    return next(f for f in flows(asked, setting) if f.kind == kind)


@pytest.mark.parametrize(("tp", "ulysses"), [(1, 2), (1, 8), (2, 8), (8, 8), (4, 3), (2, 7)])
def test_exchange_is_the_layouts_lower_bound(tp: int, ulysses: int) -> None:
    asked = job(seq_length=1024 * ulysses)
    layout = HeadLayout(64, 8, ulysses, tp)
    lengths = SequenceLayout.contiguous(asked.seq_length, ulysses).lengths
    most = max(
        layout.bytes_received(rank, lengths, batch_size=1, head_dim=128, element_size=2)
        for rank in range(ulysses)
    )
    told = flow("ulysses", asked, Setting(tp=tp, ulysses=ulysses))
    assert (told.forward, told.backward) == (most, most)


def test_published_numbers_for_llama_70b_over_8_ranks_at_128k() -> None:
    """0.528 GB for Ulysses and 0.470 for ring, per layer and forward pass."""
    ulysses = flow("ulysses", job(), Setting(ulysses=8)).forward
    ring = flow("ring", job(), Setting(ring=8)).forward
    assert ulysses / 1e9 == pytest.approx(0.528, abs=5e-4)
    assert ring / 1e9 == pytest.approx(0.470, abs=5e-4)


def test_mha_is_the_papers_4_n_h_over_p() -> None:
    asked = job("llama-2-7b", seq_length=65536)
    told = flow("ulysses", asked, Setting(ulysses=8)).forward
    assert told == 7 / 8 * 4 * 65536 * 4096 / 8 * 2


@pytest.mark.parametrize(("name", "tp"), [("llama-3.1-8b", 1), ("llama-3.1-70b", 1),
                                          ("llama-2-7b", 1), ("qwen2.5-7b", 1)])  # fmt: skip
def test_crossover_counts_both_passes(name: str, tp: int) -> None:
    """For P <= n_k Ulysses sends less exactly when P > 2 (n_q + n_k) / (3 n_k)."""
    model = PRESETS[name]
    limit = 2 * (model.num_attention_heads + model.num_query_groups) / (3 * model.num_query_groups)
    for ranks in (n for n in (2, 4, 8) if n <= model.num_query_groups):
        if model.num_attention_heads % ranks or model.num_query_groups % ranks:
            continue
        ulysses, ring = crossover(job(name), Setting(tp=tp, ulysses=ranks))
        assert (ulysses < ring) == (ranks > limit), ranks


def test_ring_wins_where_keys_and_values_would_be_replicated() -> None:
    ulysses, ring = crossover(job(), Setting(tp=8, ulysses=2))
    assert ring < ulysses  # one KV head on a TP rank, copied twice
    few = Limits(tp=8, ulysses=2, ring=1)
    words = " ".join(advice(search(job(num_gpus=16, gpu=LARGE), few)))
    assert "ring moves fewer bytes than Ulysses" in words


def test_tensor_parallelism_across_nodes_is_told() -> None:
    plan = search(job(num_gpus=16, gpu=LARGE), Limits(tp=16))
    assert any("crosses the node of 8" in line for line in advice(plan))
    sent = bytes_per_step(job(num_gpus=16), Setting(tp=16))
    assert sent["tp"]["inter"] > 0
    assert bytes_per_step(job(), Setting(tp=8))["tp"]["inter"] == 0


def test_data_parallelism_is_told_where_it_does() -> None:
    short = job("llama-3.1-8b", seq_length=4096, global_batch_size=64, num_gpus=8)
    assert any("data parallelism does here" in line for line in advice(search(short)))
    forced = search(short, Limits(ulysses=2))
    assert not any("data parallelism does here" in line for line in advice(forced))


def test_logits_that_fill_the_memory_are_told() -> None:
    plan = search(job("llama-3.1-8b", zero_stage=3, seq_length=262144), Limits(tp=1, pp=1))
    assert any("--tiled-logits" in line for line in advice(plan))


def test_bytes_leave_the_node_only_where_a_group_does() -> None:
    asked = job(num_gpus=32, global_batch_size=8)
    inside = bytes_per_step(asked, Setting(tp=2, ulysses=4, dp=4))["ulysses"]
    across = bytes_per_step(asked, Setting(tp=4, ulysses=8))["ulysses"]
    assert inside["inter"] == 0 and inside["intra"] > 0
    # 2 of 8 Ulysses ranks share a node with tp 4: 6 of 7 peers are elsewhere.
    assert across["inter"] / (across["inter"] + across["intra"]) == pytest.approx(6 / 7)


@pytest.mark.parametrize(
    ("group", "stride", "node", "world", "fewest"),
    [
        (8, 1, 8, 64, 8), (16, 1, 8, 64, 8), (4, 4, 8, 64, 2), (4, 8, 8, 64, 1),
        (64, 1, 72, 576, 8),  # ranks 64 to 127: 8 of them on the first node
        (32, 2, 72, 576, 4), (12, 6, 72, 576, 12), (6, 1, 8, 48, 2), (64, 1, 72, 64, 64),
    ],
)  # fmt: skip
def test_ranks_of_a_group_on_a_node(
    group: int, stride: int, node: int, world: int, fewest: int
) -> None:
    """Against the groups themselves, counted node by node."""
    members = [
        [start + offset + index * stride for index in range(group)]
        for start in range(0, world // (group * stride) * group * stride, group * stride)
        for offset in range(stride)
    ]
    counted = min(
        sum(rank // node == place for rank in ranks)
        for ranks in members
        for place in {rank // node for rank in ranks}
    )
    assert ranks_per_node(group, stride, node, world) == fewest == max(counted, 1)


def test_recomputation_repeats_the_forward_exchange() -> None:
    once = flow("ulysses", job(), Setting(ulysses=8))
    again = flow("ulysses", job(), Setting(ulysses=8, recompute="full"))
    assert again.forward == once.forward and again.backward == 2 * once.forward
    assert replace(again, backward=once.backward, messages=once.messages) == once
