"""The estimator against real runs of the example on CPU ranks: bytes exact, activations exact.

A layer's bytes are the difference between runs of 4 and of 2 layers: equal to the last byte. A
whole step has the embedding, the loss and the data-parallel reduction besides; there Megatron
rounds its buffers up and sends a few numbers for the log.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("jsonargparse")
from tests.planning.measured_run import measured_step
from tests.support.pool import run_ranks
from ulysses_mc.parallel_state import RankGrid
from ulysses_mc.planning import Estimate
from ulysses_mc.planning.activations import layer_activations
from ulysses_mc.planning.example_read import run_from_config
from ulysses_mc.planning.explain import parallel_config
from ulysses_mc.planning.shapes import layer_shapes
from ulysses_mc.planning.traffic import bytes_per_step

pytestmark = pytest.mark.megatron

MODEL = {
    "hidden_size": 64, "num_attention_heads": 8, "num_query_groups": 4, "seq_length": 64,
    "vocab_size": 256,
}  # fmt: skip
BATCH = {"micro_batch_size": 2, "global_batch_size": 4}
# Parameters of a layer come in whole buffers of 128 elements, so that rounding does not blur it.
CASES: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "ulysses2": (2, {"ulysses": 2}, {}),
    "ulysses4": (4, {"ulysses": 4}, {}),
    "uneven heads": (4, {"ulysses": 4}, {"num_attention_heads": 6, "num_query_groups": 3,
                                         "hidden_size": 192}),
    "replicated heads": (4, {"ulysses": 4}, {"num_query_groups": 2}),
    "tp2 ulysses2": (4, {"tensor_model": 2, "ulysses": 2}, {}),
    "tp2 ulysses2, full recompute": (4, {"tensor_model": 2, "ulysses": 2}, {"recompute": "full"}),
    "tp2 ulysses2, sequence sharding": (4, {"tensor_model": 2, "ulysses": 2},
                                        {"transformer": {"sequence_parallel": True}}),
    "LayerNorm and GELU": (2, {"ulysses": 2}, {"normalization": "LayerNorm", "swiglu": False}),
    "tp2 pp2 ulysses2": (8, {"tensor_model": 2, "pipeline_model": 2, "ulysses": 2}, {}),
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.examples.conftest import small_data

    make: Any = getattr(small_data, "__wrapped__", None) or small_data.__pytest_wrapped__.obj
    folder: Path = make(tmp_path_factory)
    return folder


def config(name: str, layers: int) -> dict[str, Any]:
    _, sizes, changes = CASES[name]
    return {
        "model": {**MODEL, **changes, "num_layers": layers},
        "parallel": {f"{axis}_parallel_size": size for axis, size in sizes.items()},
        "batch": BATCH,
    }


def measure(name: str, layers: int, data: Path, output: Path) -> list[dict[str, Any]]:
    arguments = [f"--data.path=[{data}/text]", f"--output={output}"]
    for section, values in config(name, layers).items():
        for key, value in values.items():
            text = str(value).lower() if isinstance(value, bool) else value
            if isinstance(value, dict):
                text = "{" + ", ".join(f"{k}: {str(v).lower()}" for k, v in value.items()) + "}"
            arguments.append(f"--{section}.{key}={text}")
    return run_ranks(CASES[name][0], measured_step, arguments, timeout=150)


def estimate(name: str, layers: int) -> Estimate:
    run = run_from_config(config(name, layers), name)
    assert not run.problems
    return Estimate.of(run.job(), run.setting())


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_activations(name: str, data: Path, tmp_path: Path) -> None:
    few, many = (measure(name, layers, data, tmp_path / str(layers)) for layers in (2, 4))
    told_few, told_many = estimate(name, 2), estimate(name, 4)
    check_bytes(few, many, told_few, told_many)
    check_activations(few, many, told_few, told_many)
    check_shapes(few, name)


def check_shapes(ranks: list[dict[str, Any]], name: str) -> None:
    """What `explain` says of every rank's tensors is what they were."""
    run = run_from_config(config(name, 2), name)
    for number, rank in enumerate(ranks):
        place = RankGrid(parallel_config(run), run.ranks).coordinates(number)
        said = {t.step: t.shape for t in layer_shapes(run, place["ulysses"])}
        for step, shape in rank["shapes"].items():
            if step in said:
                assert shape == said[step], (number, step)
        checked = set(said) & set(rank["shapes"])
        assert {"query", "key", "value", "query by heads", "key by heads", "context"} <= checked
        assert "logits" in checked or place["pp"] < run.pp - 1


def check_bytes(few: Any, many: Any, told_few: Estimate, told_many: Estimate) -> None:
    said = [
        {kind: sum(sides.values()) for kind, sides in bytes_per_step(t.job, t.setting).items()}
        for t in (told_few, told_many)
    ]
    # The exchange and the data-parallel reduction go to the same peers.
    for kind, parts in (("tp", ["tp"]), ("ulysses", ["ulysses", "dp"]), ("pp", ["pp"])):
        measured = [
            max(sum(rank["sent"].get(peer, 0) for peer in rank["peers"][kind]) for rank in ranks)
            for ranks in (few, many)
        ]
        expected = [sum(s.get(part, 0.0) for part in parts) for s in said]
        if not measured[1]:
            assert not expected[1]
            continue
        print(f"{kind}: {measured[1]:,} bytes measured, {expected[1]:,.0f} estimated")
        assert measured[1] - measured[0] == expected[1] - expected[0], kind
        # Buffers rounded up to 128 elements (4 bytes each way), and numbers for the log.
        assert 0 <= measured[1] - expected[1] <= 128 * 8 * 3 + 100, kind


def check_activations(few: Any, many: Any, told_few: Estimate, told_many: Estimate) -> None:
    setting = told_many.setting
    layer = layer_activations(told_many.job, setting)
    kept = layer.layer_input if setting.recompute == "full" else layer.kept
    micro_batches, added = told_many.micro_batches, 2 / setting.pp
    measured = [ranks[0]["kept"] for ranks in (few, many)]
    print(f"{measured[1]:,} bytes kept, {kept * added * micro_batches:,.0f} of them of 2 layers")
    assert measured[1] - measured[0] == kept * added * micro_batches
