"""Real training runs of the example: save, resume under the same and another layout, refusals."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("jsonargparse")
from examples.pretraining.errors import UserError
from tests.examples.small_run import SMALL, layout
from tests.support.pool import run_ranks

pytestmark = pytest.mark.megatron


def train(argv: list[str]) -> list[dict[str, Any]]:
    """One rank of a run, as `pretraining.run.run` does it; its log."""
    import torch
    import torch.distributed as dist

    from examples.pretraining import config, preflight, run

    device = torch.device("cpu")
    options = config.parse(argv).config
    shape = preflight.check(options, dist.get_world_size())
    with run.on_device(device), run.quiet():
        trainer = run.prepare(options, shape, device)
        assert trainer.train()
        return trainer.log.records() if trainer.log is not None else []


def losses(records: list[dict[str, Any]], kind: str = "train") -> dict[int, float]:
    return {r["iteration"]: r["lm_loss"] for r in records if r["kind"] == kind}


@pytest.fixture(scope="module")
def finished(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run of 6 iterations at tp2 x pp2 x ulysses2, with checkpoints at 3 and 6; its log."""
    output = tmp_path_factory.mktemp("finished")
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={output}"]
    sizes = layout(tensor_model=2, pipeline_model=2, ulysses=2)
    return output, run_ranks(8, train, argv + sizes, timeout=120)[0]


@pytest.fixture
def stopped(finished: tuple[Path, Any], tmp_path: Path) -> Path:
    """The same run as it was after 3 iterations."""
    shutil.copytree(finished[0], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "iter_0000006")
    (tmp_path / "run/checkpoints/latest_checkpointed_iteration.txt").write_text("3\n")
    return tmp_path / "run"


def test_a_run_leaves_whole_checkpoints_and_a_log(finished: tuple[Path, Any]) -> None:
    output, records = finished
    assert sorted(p.name for p in (output / "checkpoints").iterdir()) == [
        "iter_0000003", "iter_0000006", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip
    assert sorted(losses(records)) == [1, 2, 3, 4, 5, 6]
    assert sorted(losses(records, "valid")) == [3, 6]
    assert losses(records)[6] < losses(records)[1]
    run = json.loads((output / "checkpoints/iter_0000003/run.json").read_text())
    assert (run["iteration"], run["consumed_samples"]) == (3, 24)


def test_resuming_repeats_the_run_bit_by_bit(
    finished: tuple[Path, Any], stopped: Path, small_data: Path
) -> None:
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={stopped}"]
    sizes = layout(tensor_model=2, pipeline_model=2, ulysses=2)
    records = run_ranks(8, train, argv + sizes, timeout=120)[0]
    assert losses(records) == losses(finished[1])  # each iteration once, the first three kept
    assert losses(records, "valid") == losses(finished[1], "valid")
    norms = [[r.get("grad_norm") for r in log] for log in (records, finished[1])]
    assert norms[0] == norms[1]


@pytest.mark.parametrize(
    "sizes",
    [
        {"ulysses": 2},  # dp 2
        {"tensor_model": 4},
        {"pipeline_model": 2, "virtual_pipeline_model": 2, "ulysses": 2},
        {},  # one rank
    ],
    ids=["ulysses2-dp2", "tp4", "pp2-interleaved-ulysses2", "one"],
)
def test_resuming_under_another_layout_goes_on_at_the_same_sample(
    finished: tuple[Path, Any], stopped: Path, small_data: Path, sizes: dict[str, int]
) -> None:
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={stopped}", *layout(**sizes)]
    records = run_ranks(4 if sizes else 1, train, argv, timeout=120)[0]
    assert records[-1]["consumed_samples" if "consumed_samples" in records[-1] else "iteration"]
    for kind in ("train", "valid"):
        assert losses(records, kind) == pytest.approx(losses(finished[1], kind), rel=2e-6)


def refuse(argv: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        train(argv)
    return str(caught.value)


def test_another_models_checkpoint_is_refused_by_every_rank(
    stopped: Path, small_data: Path
) -> None:
    argv = [
        *SMALL,
        f"--data.path=[{small_data}/text]",
        f"--output={stopped}",
        "--model.num_layers=2",
    ]
    messages = run_ranks(2, refuse, [*argv, *layout(ulysses=2), "--model.num_layers=2"], timeout=60)
    assert len(set(messages)) == 1
    assert "a checkpoint of another model: num_layers is 4 there and 2 here" in messages[0]


@pytest.mark.parametrize("name", ["__1_0.distcp", "common.pt", ".metadata", "run.json"])
def test_a_damaged_or_missing_file_is_named_by_every_rank(
    stopped: Path, small_data: Path, name: str
) -> None:
    path = stopped / "checkpoints" / "iter_0000003" / name
    if name == "common.pt" and not path.exists():
        pytest.skip("this megatron-core keeps common state in the shards")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={stopped}", *layout(ulysses=2)]
    messages = run_ranks(2, refuse, argv, timeout=60)
    assert len(set(messages)) == 1 and name in messages[0] and "iter_0000003" in messages[0]
    path.unlink()
    messages = run_ranks(2, refuse, argv, timeout=60)
    assert len(set(messages)) == 1 and "iter_0000003" in messages[0]


def test_a_latest_that_names_nothing_is_refused(stopped: Path, small_data: Path) -> None:
    latest = stopped / "checkpoints" / "latest_checkpointed_iteration.txt"
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={stopped}"]
    for text, message in (("77", "names iteration 77"), ("x", "not the number of an iteration")):
        latest.write_text(text)
        assert message in run_ranks(1, refuse, argv, timeout=60)[0]
