"""Real training runs of the example: save, resume under the same and another layout, refusals."""

import json
import re
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


def test_a_resumed_run_has_the_learning_rate_of_its_config(stopped: Path, small_data: Path) -> None:
    rates = ["--optimizer.lr=2.5e-4", "--optimizer.min_lr=2.5e-4", "--optimizer.lr_warmup_iters=0"]
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={stopped}", *rates]
    (records,) = run_ranks(1, train, argv + layout(), timeout=120)
    found = {r["iteration"]: r["learning_rate"] for r in records if r["kind"] == "train"}
    assert found[3] != pytest.approx(2.5e-4)
    assert found[5] == found[6] == pytest.approx(2.5e-4)


def resume(argv: list[str], copy: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Goes on with a run; before that, what was loaded is saved again as it lies on the ranks.

    Returns the log, and on a single rank the weights as Megatron's model has them.
    """
    import dataclasses

    import torch
    import torch.distributed as dist

    from examples.pretraining import checkpoint, config, preflight, run
    from tests.megatron.gathering import named_parameters

    options = config.parse(argv).config
    shape = preflight.check(options, dist.get_world_size())
    with run.on_device(torch.device("cpu")), run.quiet():
        trainer = run.prepare(options, shape, torch.device("cpu"))
        assert (trainer.progress.iteration, trainer.progress.consumed_samples) == (3, 24)
        elsewhere = dataclasses.replace(options, output=str(copy))
        parts = trainer.model, trainer.optimizer, trainer.scheduler
        checkpoint.save(elsewhere, shape, trainer.progress, *parts, "samples")
        chunks = [chunk.module for chunk in trainer.model]
        weights = {n: p.detach().clone() for n, p in named_parameters(chunks)}
        assert trainer.train()
        records = trainer.log.records() if trainer.log is not None else []
        return records, weights if dist.get_world_size() == 1 else {}


def contents(path: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, whole, and what is common to all, by Megatron's reader."""
    from megatron.core import dist_checkpointing

    return {
        **dist_checkpointing.load_plain_tensors(str(path)),
        **dist_checkpointing.load_common_state_dict(str(path)),
    }


def loaded(argv: list[str]) -> tuple[list[tuple[Any, ...]], str]:
    """A resumed run before its first step: its groups of parameters, and what it has said."""
    import contextlib
    import io

    import torch

    from examples.pretraining import config, preflight, run

    options = config.parse(argv).config
    said = io.StringIO()
    device = torch.device("cpu")
    with run.on_device(device), run.quiet(), contextlib.redirect_stdout(said):
        trainer = run.prepare(options, preflight.check(options, 1), device)
    keys = "betas", "eps", "weight_decay"
    groups = [g for part in trainer.optimizer.chained_optimizers for g in part.param_groups]
    return [tuple(group[key] for key in keys) for group in groups], said.getvalue()


def test_a_resumed_run_has_the_optimizer_of_its_config(stopped: Path, small_data: Path) -> None:
    argv = [*SMALL, *layout(), f"--data.path=[{small_data}/text]", f"--output={stopped}"]
    ((_, said),) = run_ranks(1, loaded, argv, timeout=120)
    assert "another order" not in said and "6 iterations, 48 samples" in said
    assert (
        said.count("norm: PyTorch's RMSNorm (not") == said.count("optimizer: PyTorch's AdamW") == 1
    )
    changed = ["--optimizer.adam_beta1=0.8", "--optimizer.adam_beta2=0.85",
               "--optimizer.adam_eps=1e-5", "--optimizer.weight_decay=0.02",
               "--training.seed=7", "--batch.global_batch_size=4"]  # fmt: skip
    ((groups, said),) = run_ranks(1, loaded, argv + changed, timeout=120)
    assert {group[:2] for group in groups} == {((0.8, 0.85), 1e-5)}
    assert {group[2] for group in groups} == {0.0, 0.02}  # none for biases and norms
    assert "samples come in another order" in said and "6 iterations, 36 samples" in said


# Megatron files the norms of its local layers under TransformerEngine's names.
FUSED_NAMES = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def assert_same_contents(saved: dict[str, Any], copy: dict[str, Any]) -> None:
    tensors = {name for name, value in saved.items() if hasattr(value, "equal")}
    weights = {name for name in tensors if not name.startswith("optimizer.")}
    states = {
        f"optimizer.state.{state}.{name}"
        for name in weights
        for state in ("param", "exp_avg", "exp_avg_sq")
    }
    assert len(weights) == 9 and states == tensors - weights and saved.keys() == copy.keys()
    for name, value in saved.items():
        assert value.equal(copy[name]) if name in tensors else value == copy[name], name


@pytest.mark.parametrize(
    ("ranks", "sizes"),
    [
        (8, {"ulysses": 4}),
        (4, {"tensor_model": 4}),
        (4, {"pipeline_model": 2, "virtual_pipeline_model": 2, "ulysses": 2}),
        (1, {}),
    ],
    ids=["ulysses4-dp2", "tp4", "pp2-interleaved-ulysses2", "one"],
)
def test_under_another_layout_nothing_changes(
    finished: tuple[Path, Any],
    stopped: Path,
    small_data: Path,
    tmp_path: Path,
    ranks: int,
    sizes: dict[str, int],
) -> None:
    """Weights and Adam's state bit by bit, the same next sample, and the same losses."""
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={stopped}", *layout(**sizes)]
    saved = run_ranks(1, contents, stopped / "checkpoints/iter_0000003", timeout=60)[0]
    records, weights = run_ranks(ranks, resume, argv, tmp_path, timeout=180)[0]
    copy = run_ranks(1, contents, tmp_path / "checkpoints/iter_0000003", timeout=60)[0]
    assert_same_contents(saved, copy)
    for name, weight in weights.items():  # the one rank's model against the file
        layer = re.match(r"decoder\.layers\.(\d+)\.", name)
        key = name.replace(layer[0], "decoder.layers.") if layer else name
        for local, fused in FUSED_NAMES.items():
            key = key.replace(local, fused)
        assert weight.equal(saved[key][int(layer[1])] if layer else saved[key]), name
    for kind in ("train", "valid"):
        assert losses(records, kind) == pytest.approx(losses(finished[1], kind), rel=1e-6)


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
    wrong = "not the number of an iteration"
    texts = {b"77": "names iter_0000077", b"x": wrong, b"\xff\xfe": wrong, "\u00b2".encode(): wrong,
             b"1" * 10**6: wrong, b"": wrong}  # fmt: skip
    for text, message in texts.items():
        latest.write_bytes(text)
        assert message in run_ranks(1, refuse, argv, timeout=60)[0]
    latest.unlink()
    latest.mkdir()
    assert "cannot be read: Is a directory" in run_ranks(1, refuse, argv, timeout=60)[0]


def test_without_latest_the_newest_whole_checkpoint_is_taken(
    stopped: Path, small_data: Path
) -> None:
    """As a run leaves it that was killed between the two renames of its first save."""
    (stopped / "checkpoints" / "latest_checkpointed_iteration.txt").unlink()
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={stopped}"]
    (records,) = run_ranks(1, train, argv, timeout=120)
    assert sorted(losses(records)) == [1, 2, 3, 4, 5, 6]


def test_a_manifest_that_names_too_little_is_refused(stopped: Path, small_data: Path) -> None:
    manifest = stopped / "checkpoints" / "iter_0000003" / "manifest.json"
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={stopped}"]
    for text, reason in {"{}": "it does not name .metadata", "[]": "it is not an object"}.items():
        manifest.write_text(text)
        (message,) = run_ranks(1, refuse, argv, timeout=60)
        assert "manifest.json is damaged: " in message and reason in message


@pytest.mark.parametrize("name", ["__1_0.distcp", "common.pt", "metadata.json"])
def test_a_damaged_file_that_is_not_verified_is_refused_too(
    stopped: Path, small_data: Path, name: str
) -> None:
    path = stopped / "checkpoints" / "iter_0000003" / name
    if not path.exists():
        pytest.skip("not a file of this megatron-core's checkpoints")
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={stopped}", *layout(ulysses=2)]
    for damage in (lambda: path.write_bytes(b"\x80\xff" * (path.stat().st_size // 2)), path.unlink):
        damage()
        messages = run_ranks(2, refuse, [*argv, "--checkpoint.verify=false"], timeout=60)
        assert len(set(messages)) == 1 and "iter_0000003 cannot be read: " in messages[0]


def test_an_optimizer_that_was_split_otherwise_is_refused(stopped: Path, small_data: Path) -> None:
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={stopped}"]
    other = "--optimizer.use_distributed_optimizer=false"
    (message,) = run_ranks(1, refuse, [*argv, other], timeout=60)
    assert "saved with optimizer.use_distributed_optimizer true, which is false here" in message


def test_an_embedding_of_other_rows_is_refused(stopped: Path, small_data: Path) -> None:
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={stopped}"]
    (message,) = run_ranks(1, refuse, [*argv, "--model.make_vocab_size_divisible_by=1"], timeout=60)
    assert "has an embedding of 128 rows, this run one of" in message


def test_half_a_line_in_the_log_stops_no_resume(stopped: Path, small_data: Path) -> None:
    with (stopped / "log.jsonl").open("ab") as stream:
        stream.write(b'{"kind": "train", "iterat\xff')
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={stopped}"]
    (records,) = run_ranks(1, train, argv, timeout=120)
    assert sorted(losses(records)) == [1, 2, 3, 4, 5, 6]


def test_a_run_that_goes_on_with_other_batches_has_the_data_for_them(
    stopped: Path, small_data: Path
) -> None:
    """24 samples are consumed; 3 more steps of 2 would end, counted anew, at sample 12."""
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={stopped}"]
    (records,) = run_ranks(1, train, [*argv, "--batch.global_batch_size=2"], timeout=120)
    assert min(losses(records).values()) > 1
    assert max(r["consumed_samples"] for r in records if r["kind"] == "train") == 30


def test_learned_positions_fit_any_layout(small_data: Path, tmp_path: Path) -> None:
    """30 positions: at Ulysses size 4 samples are padded to 32, the table is not."""
    learned = ["--model.position_embedding_type=learned_absolute", "--model.num_layers=2"]
    argv = [*SMALL, *learned, f"--data.path=[{small_data}/text]", f"--output={tmp_path}"]
    one = run_ranks(1, train, [*argv, "--training.train_iters=3"], timeout=120)[0]
    four = run_ranks(4, train, [*argv, *layout(ulysses=4)], timeout=120)[0]
    assert sorted(losses(four)) == [1, 2, 3, 4, 5, 6]
    again = [*argv[:-1], f"--output={tmp_path}/again"]
    whole = run_ranks(4, train, [*again, *layout(ulysses=4)], timeout=120)[0]
    assert losses(whole)[3] == pytest.approx(losses(one)[3], rel=1e-6)


def test_experts_of_other_ranks_are_refused_for_their_optimizer(
    small_data: Path, tmp_path: Path
) -> None:
    moe = "--model.transformer={num_moe_experts: 4, moe_router_load_balancing_type: none}"
    argv = [*SMALL, moe, "--model.num_layers=1", f"--data.path=[{small_data}/text]"]
    argv += [f"--output={tmp_path}"]
    run_ranks(1, train, [*argv, "--training.train_iters=3"], timeout=120)
    sizes = layout(ulysses=2, expert_model=2)
    messages = run_ranks(2, refuse, [*argv, *sizes], timeout=120)
    assert all("experts apart if expert_model_parallel_size is above 1" in m for m in messages)


DROPOUT = [
    "--model.hidden_dropout=0.1", "--model.attention_dropout=0.1", "--model.num_layers=2",
    "--training.train_iters=4", "--checkpoint.interval=2", "--evaluation.interval=0",
]  # fmt: skip


def stop_and_go_on(argv: list[str], output: Path, again: list[str]) -> Any:
    """Losses of 4 steps; those after going on from step 2; random states then and at the start."""
    import torch
    import torch.distributed as dist

    from examples.pretraining import checkpoint, config, preflight, random_state, run
    from ulysses_mc.parallel_state import destroy_model_parallel

    def start(where: list[str]) -> Any:
        destroy_model_parallel()
        options = config.parse([*argv, *where]).config
        return run.prepare(options, preflight.check(options, dist.get_world_size()), device)

    device = torch.device("cpu")
    with run.on_device(device), run.quiet():
        trainer = start([f"--output={output}/first"])
        trainer.train()
        straight = trainer.log.records() if trainer.log is not None else []
        (output / "first/checkpoints" / checkpoint.LATEST).write_text("2\n")
        dist.barrier()
        load = [f"--output={output}/second", f"--checkpoint.load={output}/first/checkpoints"]
        trainer = start([*load, *again])
        resumed = torch.get_rng_state()
        trainer.train()
        random_state.seed(trainer.config.training.seed)
        fresh = torch.get_rng_state()
        return straight, trainer.log.records() if trainer.log is not None else [], fresh, resumed


def test_dropout_goes_on_where_it_was(small_data: Path, tmp_path: Path) -> None:
    argv = [*SMALL, f"--data.path=[{small_data}/text]", *DROPOUT, *layout(ulysses=2)]
    results = run_ranks(2, stop_and_go_on, argv, tmp_path / "same", [], timeout=90)
    straight, went_on = (losses(records) for records in results[0][:2])
    assert went_on == {n: straight[n] for n in (3, 4)}


def test_dropout_under_another_layout_is_neither_repeated_nor_different_by_rank(
    small_data: Path, tmp_path: Path
) -> None:
    argv = [*SMALL, f"--data.path=[{small_data}/text]", *DROPOUT]
    again = layout(ulysses=2)  # was data parallel
    results = run_ranks(2, stop_and_go_on, argv, tmp_path / "other", again, timeout=90)
    (_, _, fresh, resumed), (_, _, _, other) = results
    assert resumed.equal(other) and not resumed.equal(fresh)


def test_isolated_documents_train_alike_under_any_layout(small_data: Path, tmp_path: Path) -> None:
    """Samples of 30 tokens, padded to 32 where cut. Stages draw their own weights: two of each."""
    argv = [*SMALL, f"--data.path=[{small_data}/text]", "--data.isolate_documents=true"]
    found = []
    for world, sizes in ((2, {}), (8, {"tensor_model": 2, "ulysses": 2})):
        options = [*argv, f"--output={tmp_path / str(world)}", "--checkpoint.interval=0"]
        options += layout(pipeline_model=2, **sizes)
        found.append(run_ranks(world, train, options, timeout=120)[0])
    for kind in ("train", "valid"):
        assert losses(found[1], kind) == pytest.approx(losses(found[0], kind), rel=2e-6)


def test_the_hybrid_config_trains_as_on_one_rank(small_data: Path, tmp_path: Path) -> None:
    """examples/configs/hybrid.yaml, made smaller, at its own tp2 x ulysses2."""
    pytest.importorskip("megatron.core.models.hybrid", reason="megatron-core >= 0.19")
    config = Path(__file__).resolve().parents[2] / "examples/configs/hybrid.yaml"
    found = []
    for world, sizes in ((4, []), (1, layout(tensor_model=1, ulysses=1))):
        options = ["--config", str(config), *SMALL, f"--data.path=[{small_data}/text]", *sizes]
        options += [f"--output={tmp_path / str(world)}"]
        found.append(run_ranks(world, train, options, timeout=120)[0])
    for kind in ("train", "valid"):
        assert losses(found[0], kind) == pytest.approx(losses(found[1], kind), rel=2e-6)
    assert losses(found[0])[6] < losses(found[0])[1]


def train_unwired(argv: list[str]) -> str:
    """With a layer spec of Megatron's that `with_ulysses` was not called for."""
    from examples.pretraining import model
    from tests.megatron.test_wiring import silent_spec
    from ulysses_mc import ParallelConfigError

    with pytest.MonkeyPatch.context() as patch, pytest.raises(ParallelConfigError) as caught:
        patch.setattr(model, "gpt_spec", lambda config, megatron, vp_stage: silent_spec(megatron))
        train(argv)
    return str(caught.value)


def test_layers_that_are_not_wired_are_refused(small_data: Path, tmp_path: Path) -> None:
    argv = [*SMALL, f"--data.path=[{small_data}/text]", f"--output={tmp_path}", *layout(ulysses=2)]
    for message in run_ranks(2, train_unwired, argv, timeout=60):
        assert "layers.0.self_attention.core_attention (Silent)" in message
        assert "every core attention runs between the exchanges" in message


def train_each(argv: list[str], variants: dict[str, list[str]]) -> dict[str, Any]:
    """For each variant: its log, calls of attention and of MLPs, and what it does early.

    Early: gradients are reduced during backward, parameters gathered in forward.
    """
    import torch
    import torch.distributed as dist

    from examples.pretraining import config, preflight, run
    from ulysses_mc.parallel_state import destroy_model_parallel

    device, found = torch.device("cpu"), {}
    for name, options in variants.items():
        calls = {"core_attention": 0, "mlp": 0}

        def count(module: Any, _: Any, calls: dict[str, int] = calls) -> None:
            calls[module.called] += module.training

        destroy_model_parallel()
        settings = config.parse([*argv, *options]).config
        with run.on_device(device), run.quiet():
            trainer = run.prepare(settings, preflight.check(settings, 2), device)
            for path, module in trainer.model[0].named_modules():
                if (last := path.rpartition(".")[2]) in calls:
                    module.called = last
                    module.register_forward_pre_hook(count)
            ddp = trainer.model[0]
            early = ddp.bucket_groups[0].ddp_config.overlap_grad_reduce, ddp.use_forward_hook
            trainer.train()
        dist.barrier()  # all files are written
        found[name] = (
            trainer.log.records() if trainer.log is not None else [], tuple(calls.values()), early,
        )  # fmt: skip
    return found


def test_recomputing_and_overlapping_change_no_loss(small_data: Path, tmp_path: Path) -> None:
    """Bit by bit, with dropout, gradients accumulated, and weights saved and evaluated between."""
    argv = [*SMALL, *layout(ulysses=2), f"--data.path=[{small_data}/text]", *DROPOUT[:3],
            "--training.train_iters=3"]  # fmt: skip
    both = ["--optimizer.overlap_grad_reduce=true", "--optimizer.overlap_param_gather=true"]
    variants = {
        "plain": [],
        "selective": ["--model.recompute=selective", "--checkpoint.interval=0"],
        "full": ["--model.recompute=full", "--checkpoint.interval=0"],
        "overlap": both,
    }
    for name, options in variants.items():
        options.append(f"--output={tmp_path / name}")
    found = run_ranks(2, train_each, argv, variants, timeout=120)[0]
    plain, calls, _ = found["plain"]
    assert sorted(losses(plain)) == [1, 2, 3] and sorted(losses(plain, "valid")) == [3]
    for records, *_ in found.values():
        for kind in ("train", "valid"):
            assert losses(records, kind) == losses(plain, kind)
        assert [r.get("grad_norm") for r in records] == [r.get("grad_norm") for r in plain]
    attention, mlp = calls
    assert attention == mlp == 3 * 4 * 2  # steps, micro-batches, layers
    assert found["selective"][1] == (2 * attention, mlp)
    assert found["full"][1] == (2 * attention, 2 * mlp)
    assert found["plain"][2] == (False, False) and found["overlap"][2] == (True, True)
    saved = [tmp_path / name / "checkpoints/iter_0000003" for name in ("plain", "overlap")]
    assert_same_contents(*(run_ranks(1, contents, path, timeout=60)[0] for path in saved))
