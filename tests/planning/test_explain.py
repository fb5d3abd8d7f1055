"""`explain`: the grid's own groups, shapes, batch arithmetic, and every problem at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ulysses_mc.head_layout import HeadLayout
from ulysses_mc.parallel_state import ParallelConfig, RankGrid
from ulysses_mc.planning import GPUS, PRESETS, RequestError
from ulysses_mc.planning.example_read import run_from_config
from ulysses_mc.planning.explain import as_dict, as_text, explain
from ulysses_mc.planning.run import Run
from ulysses_mc.planning.run_problems import all_problems
from ulysses_mc.planning.shapes import layer_shapes

ROOT = Path(__file__).resolve().parents[2]
RUN = Run(
    source="test", model=PRESETS["llama-3.1-70b"], seq_length=8192, micro_batch_size=2,
    global_batch_size=32, world_size=64, tp=4, ulysses=4, pp=2, tp_sequence_sharding=True,
)  # fmt: skip


def test_groups_and_coordinates_are_the_grids() -> None:
    said = as_dict(explain(RUN, rank=21))
    grid = RankGrid(
        ParallelConfig(
            tensor_model_parallel_size=4, ulysses_parallel_size=4, pipeline_model_parallel_size=2
        ),
        64,
    )
    assert said["coordinates"] == grid.coordinates(21)
    for kind, members in said["groups"].items():
        assert tuple(members) == grid.group_of(21, kind)
    assert said["accumulation_steps"] == 32 // (2 * 2)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_shapes_of_an_uneven_layout(rank: int) -> None:
    run = replace(RUN, tp=8, ulysses=3, seq_length=6144, world_size=48, tp_sequence_sharding=False)
    layout = HeadLayout(64, 8, 3, 8)
    shapes = {t.step: t.shape for t in layer_shapes(run, rank)}
    q_r, k_r = len(layout.query_heads[rank]), len(layout.kv_heads[rank])
    assert shapes["hidden states"] == (2048, 2, 8192)
    assert shapes["query"] == (2048, 2, 8, 128) and shapes["key"] == (2048, 2, 1, 128)
    assert shapes["query by heads"] == (6144, 2, q_r, 128)
    assert shapes["key by heads"] == (6144, 2, k_r, 128)
    assert shapes["context"] == (2048, 2, 1024)
    assert shapes["gate and up"] == (2048, 2, 2 * 28672 // 8)
    assert shapes["logits"] == (2048, 2, 128256 // 8)


def test_bytes_of_the_exchange_are_those_of_its_shapes() -> None:
    """What a rank holds by heads, less what it had already, is what it receives."""
    run = replace(RUN, tp=1, pp=1, tp_sequence_sharding=False, world_size=4, recompute="none")
    shapes = {t.step: t for t in layer_shapes(run, 0)}
    arrived = sum(shapes[f"{name} by heads"].elements for name in ("query", "key", "value"))
    arrived += shapes["context"].elements
    per_layer = 2 * arrived * 3 / 4  # bf16; a quarter was there before
    said = as_dict(explain(run))["bytes_per_step"]["ulysses"]
    steps = 32 // 2
    assert said["intra"] + said["inter"] == pytest.approx(2 * per_layer * 80 * steps)


def test_text_holds_every_part() -> None:
    text = as_text(explain(RUN, GPUS["gb200-nvl72"], rank=9))
    for part in ("tp 1", "ulysses: ", "node 0", "accumulation steps", "query heads",
                 "all-gather over tp", "reduce-scatter over tp", "memory of the fullest rank",
                 "sent per rank and step"):  # fmt: skip
        assert part in text, part


def test_mla_and_experts() -> None:
    run = Run(source="t", model=PRESETS["deepseek-v3"], seq_length=4096, world_size=64, ep=64,
              global_batch_size=64)  # fmt: skip
    shapes = {t.step: t for t in layer_shapes(run, 0)}
    assert shapes["compressed key/value"].shape == (4096, 1, 576)
    assert shapes["query"].shape[-1] == 192 and shapes["value"].shape[-1] == 128
    assert shapes["routed tokens, evenly"].shape == (4096 * 8, 7168)
    assert "all-to-all over ep" in as_text(explain(run))


def test_everything_that_is_wrong_at_once() -> None:
    run = replace(RUN, tp=3, pp=7, global_batch_size=33, seq_length=8191, world_size=85)
    text = "\n".join(map(str, all_problems(run, rank=85)))
    for part in ("leaves 1 of 85 ranks over", "64 query heads / tp 3", "hidden size 8192 / tp 3",
                 "80 layers", "global batch 33", "8191 tokens", "rank 85 of 85"):  # fmt: skip
        assert part in text, part
    with pytest.raises(RequestError, match="7 problems"):
        explain(run, rank=85)


def test_nearest_settings_work() -> None:
    run = replace(RUN, seq_length=8191, global_batch_size=30)
    found = {p.found.split()[0]: p.nearest for p in all_problems(run)}
    assert found["8191"] == "seq_length 8176 or 8192"
    assert "global batch 28 or 32" in found["global"]
    assert not all_problems(replace(RUN, seq_length=8192, global_batch_size=32))


def test_memory_that_does_not_fit() -> None:
    problems = all_problems(replace(RUN, tp=1, ulysses=1, pp=1, world_size=2), GPUS["h100"])
    assert len(problems) == 1 and "GiB per GPU" in problems[0].found


def test_problems_of_a_yaml_config() -> None:
    run = run_from_config(
        {"modle": {}, "model": {"hiden_size": 64, "num_layers": "four", "num_query_groups": 3},
         "parallel": {"ulysses_parallel_size": 0, "order": 7}, "batch": [1]}, "c.yaml",
    )  # fmt: skip
    text = "\n".join(map(str, run.problems))
    for part in ("'modle'", "model", "'model.hiden_size'", "hidden_size", "'four'",
                 "ulysses_parallel_size is 0", "order is 7", "batch is [1]",
                 "3 key/value heads do not divide 8"):  # fmt: skip
        assert part in text, part


@pytest.mark.parametrize("name", ["cpu_demo.yaml", "llama3_8b_128k.yaml"])
def test_the_examples_own_configs(name: str) -> None:
    pytest.importorskip("yaml")
    from ulysses_mc.planning.example_read import read_yaml

    run = read_yaml(ROOT / "examples/configs" / name)
    assert not all_problems(run)
