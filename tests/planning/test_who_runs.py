"""plan and explain say no more and no less than what runs: this package, the example, Megatron."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ulysses_mc.cli import main
from ulysses_mc.planning import GPUS, PRESETS, Job, Limits, search
from ulysses_mc.planning.advice import advice, broken_by_all
from ulysses_mc.planning.example_read import read_yaml, run_from_config
from ulysses_mc.planning.explain import as_text, explain
from ulysses_mc.planning.job import head_layout
from ulysses_mc.planning.megatron_read import read_megatron
from ulysses_mc.planning.model import ModelShape
from ulysses_mc.planning.problems import RequestError
from ulysses_mc.planning.run_problems import all_problems

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
         "--group-query-attention --num-query-groups 2 --max-position-embeddings 64 "
         "--position-embedding-type rope ")  # fmt: skip


def text_of(problems: Any) -> str:
    return "\n".join(map(str, problems))


def config(**sections: dict[str, Any]) -> dict[str, Any]:
    return {"model": {"vocab_size": 512}, **sections}


def test_ring_is_planned_only_with_heads_that_megatron_takes() -> None:
    """TransformerEngine's a2a+p2p asserts that the all-to-all divides both kinds of heads."""
    job = Job(model=PRESETS["llama-3.1-70b"], gpu=GPUS["h100"], num_gpus=64, seq_length=1 << 17,
              global_batch_size=32)  # fmt: skip
    plan = search(job)
    for estimate in plan.ranked:
        s = estimate.setting
        layout = head_layout(job.model, s.tp, s.ulysses)
        assert s.ring == 1 or getattr(layout, "kind", "") == "even", s
    assert any("this package has no ring" in d.reason.line for d in plan.dropped)
    assert plan.best is not None and plan.best.setting.ring > 1
    ours = next(i for i, e in enumerate(plan.ranked, 1) if e.setting.ring == 1)
    assert f"its best is number {ours}, " in "\n".join(advice(plan))


def test_layouts_that_are_offered_instead_are_no_dead_end() -> None:
    job = Job(model=PRESETS["llama-3.1-8b"], gpu=GPUS["h200"], num_gpus=64, seq_length=1 << 17,
              global_batch_size=64)  # fmt: skip
    lines = [d.reason.line for d in search(job, Limits(ulysses=64)).dropped]
    assert lines and all("ulysses 8 x ring 8 instead" in line for line in lines)


def test_rules_that_no_layout_meets_are_told_with_what_does() -> None:
    job = Job(model=PRESETS["llama-3.1-8b"], gpu=GPUS["h100"], num_gpus=8, seq_length=8191,
              global_batch_size=8)  # fmt: skip
    found = broken_by_all(search(job, Limits(ulysses=8)))
    assert "seq_length 8176 or 8192" in text_of(found)
    assert not broken_by_all(search(replace(job, num_gpus=1, seq_length=1 << 20)))


def test_explain_refuses_the_ring_that_the_layers_refuse() -> None:
    run = run_from_config(config(parallel={"ring_parallel_size": 2}), "c.yaml")
    assert "they refuse ring_parallel_size > 1" in text_of(all_problems(run))
    stock = read_megatron(SMALL + "--context-parallel-size 2 --cp-comm-type p2p")
    assert not all_problems(stock)


def test_explain_refuses_the_heads_that_stock_megatron_refuses() -> None:
    flags = SMALL + "--context-parallel-size 4 --cp-comm-type a2a "
    said = text_of(all_problems(read_megatron(flags)))
    assert "Megatron's own a2a wants" in said
    assert "--spec ulysses_mc.layers.specs gpt_layer_te" in said
    assert not all_problems(read_megatron(flags + "--spec ulysses_mc.layers.specs gpt_layer_te"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("--max-position-embeddings 64", ""), "--max-position-embeddings is missing"),
        (("embeddings 64", "embeddings 63"), "--max-position-embeddings is 63"),
        (("--num-layers 4", "--num-layers 4 --decoder-first-pipeline-num-layers 1"), "by hand"),
    ],
)
def test_explain_refuses_what_megatrons_arguments_refuse(
    change: tuple[str, str], said: str
) -> None:
    assert said in text_of(all_problems(read_megatron(SMALL.replace(*change))))


def test_padding_that_the_example_does_by_itself_is_no_problem() -> None:
    sections = config(model={"seq_length": 250, "vocab_size": 512},
                      parallel={"ulysses_parallel_size": 4})  # fmt: skip
    run = run_from_config(sections, "c.yaml")
    assert run.seq_length == 256 and not all_problems(run)
    assert "samples of 250 tokens are padded to 256" in as_text(explain(run))


def test_every_value_the_example_knows_is_accepted_and_no_other() -> None:
    for name in ("auto", "spec", "sdpa"):
        run = run_from_config(config(model={"local_attention": name, "vocab_size": 512}), "c")
        assert not all_problems(run)
    bad = {
        "device": "tpu", "data": 7, "optimizer": {"lr": "abc", "adam_beta1": 7},
        "training": {"seed": "x", "train_iters": -4, "precision": "fp8"},
        "model": {"position_embedding_type": "alibi", "transformer": {"frob": 3}},
        "batch": {"sequence_length": 3, "global_batch_size": 10**30},
        "checkpoint": {"resume": "maybe"}, "logging": {"interval": 0},
    }  # fmt: skip
    said = text_of(all_problems(run_from_config(bad, "c")))
    for part in ("device is 'tpu'", "data is 7", "lr is 'abc'", "adam_beta1 is 7", "seed is 'x'",
                 "train_iters is -4", "'fp8'", "'alibi'", "'batch.sequence_length'",
                 "model.seq_length", "global_batch_size is 1000", "resume is 'maybe'",
                 "interval is 0"):  # fmt: skip
        assert part in said, part
    if importlib.util.find_spec("megatron"):
        assert "'model.transformer.frob'" in said
    assert not all_problems(run_from_config(config(optimizer={"lr": "3e-4"}), "c"))


def test_a_key_that_stands_twice_is_told(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "c.yaml").write_text("optimizer:\n  lr: 1\n  lr: 2\n")
    with pytest.raises(RequestError, match=r"c\.yaml: optimizer\.lr stands there twice, .* line 3"):
        read_yaml(tmp_path / "c.yaml")


def test_an_assumed_vocabulary_is_said_to_be_one(tmp_path: Path) -> None:
    sections = {"data": {"path": [str(tmp_path / "text")]}}
    assert "is assumed" in as_text(explain(run_from_config(sections, "c")))
    (tmp_path / "data.json").write_text('{"vocab_size": 32000}')
    run = run_from_config(sections, "c")
    assert run.model.vocab_size == 32000 and "is assumed" not in as_text(explain(run))


def test_hybrid_stacks() -> None:
    sections = config(model={"kind": "hybrid", "hybrid_layer_pattern": "M*|M-", "vocab_size": 512},
                      parallel={"ulysses_parallel_size": 2})  # fmt: skip
    run = run_from_config(sections, "c")
    assert run.model.num_layers == 4 and "Mamba layers" in text_of(all_problems(run))
    sections["model"]["hybrid_layer_pattern"] = "*-*-"
    run = run_from_config(sections, "c")
    assert not all_problems(run) and "hybrid stacks are not modelled" in as_text(explain(run))


def test_explain_on_a_gpu_says_that_it_fits_and_how_long_a_step_takes() -> None:
    text = as_text(explain(run_from_config(config(), "c"), GPUS["h100"]))
    assert "fits h100: 79.1 GiB" in text and "step time on h100" in text and "MFU" in text


@pytest.mark.parametrize("model", ["deepseek-v2-lite", "deepseek-v3"])
def test_yaml_of_a_latent_attention_model_is_read_as_the_same(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a q_lora_rank too: Megatron's default is one of 512."""
    yaml = pytest.importorskip("yaml")
    shape: ModelShape = PRESETS[model]
    arguments = ["plan", model, "--seq-length", "4K", "--gpus", "1024", "--gpu", "h200", "--tp",
                 "4", "--pp", "1", "--ulysses", "1", "--ring", "1", "--yaml"]  # fmt: skip
    assert main(arguments) == 0
    run = run_from_config(yaml.safe_load(capsys.readouterr().out), "planned")
    assert not run.problems and run.model.mla == shape.mla


def test_preflight_takes_layers_with_both_ends_counted() -> None:
    """What plan writes where layers do not divide: embedding and loss count as a layer each."""
    ends = {"account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True}  # fmt: skip
    for layers, fields, right in ((4, ends, True), (4, {}, False), (6, ends, False)):
        sections = config(
            model={"num_layers": layers, "transformer": fields, "vocab_size": 512},
            parallel={"pipeline_model_parallel_size": 3},
        )
        run = run_from_config(sections, "c")
        assert bool(all_problems(run)) != right, layers
