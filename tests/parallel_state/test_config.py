"""ParallelConfig: every problem at once, with what would work."""

import subprocess
import sys

import pytest

from ulysses_mc.parallel_state import ParallelConfig, ParallelConfigError, RankGrid


def test_defaults_and_derived_sizes():
    config = ParallelConfig(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=3,
        ulysses_parallel_size=4,
        ring_parallel_size=5,
    )
    assert config.context_parallel_size == 20
    assert config.model_size == 120
    assert config.etp_size == 2
    assert not config.has_experts
    assert config.megatron_order == "tp-cp-ep-dp-pp"


@pytest.mark.parametrize(
    ("order", "axes"),
    [
        ("tp-ulysses-ring-ep-dp-pp", "tp-ulysses-ring-ep-dp-pp"),
        ("TP-CP-EP-PP-DP", "tp-ulysses-ring-ep-pp-dp"),
        ("tp-ulysses-dp-pp", "tp-ulysses-ring-dp-ep-pp"),
        ("dp-ring", "dp-ulysses-ring-tp-ep-pp"),
        ("", "tp-ulysses-ring-ep-dp-pp"),
        ("pp", "tp-ulysses-ring-ep-dp-pp"),
    ],
)
def test_axes_are_completed(order, axes):
    config = ParallelConfig(order=order)
    assert "-".join(config.axes) == axes
    assert config.megatron_order == axes.replace("ulysses-ring", "cp")


def test_every_problem_is_reported_together():
    with pytest.raises(ParallelConfigError) as raised:
        ParallelConfig(
            tensor_model_parallel_size=0,
            ring_parallel_size=2,
            virtual_pipeline_model_parallel_size=2,
            distributed_timeout_minutes=-1,
            order="tp-usp-ring-data-pp",
        )
    text = str(raised.value)
    for part in (
        "5 problems",
        "tensor_model_parallel_size is 0",
        "virtual_pipeline_model_parallel_size=2 with one pipeline stage",
        "distributed_timeout_minutes is -1",
        "unknown axis 'usp'",
        "unknown axis 'data'",
        "'ulysses' for 'usp'",
        "'dp' for 'data'",
    ):
        assert part in text, text


@pytest.mark.parametrize("minutes", [float("inf"), float("nan"), 1e300, 0, 1e-9, -1, True, "30"])
def test_timeouts_that_no_group_can_have(minutes):
    with pytest.raises(ParallelConfigError, match=r"from 0\.001 \(60 ms\) to 525600"):
        ParallelConfig(distributed_timeout_minutes=minutes)


@pytest.mark.parametrize(
    ("unknown", "known"),
    [("tpp", "tp"), ("ulyses", "ulysses"), ("sequence", "ulysses"), ("pipeline", "pp")],
)
def test_unknown_order_names_get_the_nearest_known(unknown, known):
    with pytest.raises(ParallelConfigError, match=f"'{known}' for '{unknown}'"):
        ParallelConfig(order=f"{unknown}-dp")


@pytest.mark.parametrize("order", ["tp-ring-ulysses-dp-pp", "tp-ulysses-dp-ring-pp"])
def test_ring_stands_directly_outside_ulysses(order):
    with pytest.raises(ParallelConfigError, match="order='tp-ulysses-ring-dp-pp'"):
        ParallelConfig(order=order, ulysses_parallel_size=2, ring_parallel_size=2)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"order": "tp-dp", "ulysses_parallel_size": 2}, "lacks 'ulysses', of size 2"),
        ({"order": "tp-tp-dp"}, "names 'tp' 2 times"),
        ({"order": "tp-cp-ulysses-dp"}, "names 'ulysses' 2 times"),
        ({"order": 3}, "order is 3"),
        ({"tensor_model_parallel_size": True}, "is True"),
        ({"ulysses_parallel_size": 2.0}, "is 2.0"),
        ({"ring_parallel_size": None}, "ring_parallel_size is None"),
        ({"expert_tensor_parallel_size": -1}, "is -1"),
        ({"distributed_timeout_minutes": float("nan")}, "is nan"),
    ],
)
def test_bad_settings(settings, text):
    with pytest.raises(ParallelConfigError, match=text):
        ParallelConfig(**settings)


def test_the_pure_half_needs_no_torch():
    code = (
        "import sys, ulysses_mc.parallel_state as p; "
        "p.RankGrid(p.ParallelConfig(ulysses_parallel_size=4), 8).describe(); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("settings", "world", "parts"),
    [
        (
            {"tensor_model_parallel_size": 2, "ulysses_parallel_size": 4},
            12,
            [
                "tensor_model_parallel_size=2 x ulysses_parallel_size=4 leaves 4 of 12 ranks over",
                "8 or 16 ranks",
                "tensor_model_parallel_size=1 or 3",
                "ulysses_parallel_size=3 or 6",
            ],
        ),
        (
            {"ulysses_parallel_size": 2, "data_parallel_size": 3},
            8,
            ["is 6, not 8 ranks", "6 ranks", "data_parallel_size=4"],
        ),
        (
            {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 3},
            8,
            ["leaves 2 of 8 ranks over", "6 or 12 ranks", "expert_model_parallel_size=2 or 4"],
        ),
        ({}, 0, ["empty", "1 ranks"]),
    ],
)
def test_sizes_that_do_not_multiply_to_the_world(settings, world, parts):
    with pytest.raises(ParallelConfigError) as raised:
        RankGrid(ParallelConfig(**settings), world)
    for part in parts:
        assert part in str(raised.value), str(raised.value)


def test_an_order_without_dp_needs_a_world_without_it():
    config = ParallelConfig(ulysses_parallel_size=2, order="tp-ulysses-pp")
    assert RankGrid(config, 2).groups("ulysses") == [[0, 1]]
    with pytest.raises(ParallelConfigError, match="lacks 'dp', of size 4"):
        RankGrid(config, 8)
