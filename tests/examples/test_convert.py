"""Conversion to and from Hugging Face safetensors: equal logits, and the same bits back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("jsonargparse")
pytest.importorskip("transformers")
import torch

from examples.pretraining.errors import UserError
from tests.examples.small_run import SMALL, layout
from tests.examples.test_training import contents, losses, train
from tests.support.pool import run_ranks

pytestmark = [pytest.mark.megatron, pytest.mark.huggingface]

SHORT = ["--training.train_iters=1", "--evaluation.interval=0", "--model.num_layers=2"]
MODELS = {
    "fp32": [],
    "bf16-tied-wide-heads": [
        "--training.precision=bf16",
        "--model.share_embeddings_and_output_weights=true",
        "--model.transformer={kv_channels: 8, layernorm_epsilon: 1e-6}",
    ],
}


def there_and_back(checkpoint: Path, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Converts to Llama and back; logits [b, s, vocabulary] of Megatron's model and of Llama."""
    from transformers import LlamaForCausalLM

    from examples.pretraining import checkpoint as checkpoints
    from examples.pretraining import conversion, run
    from ulysses_mc.parallel_state import ParallelConfig, initialize_model_parallel

    tokens = torch.arange(60).reshape(2, 30) * 7 % 100
    with run.on_device(torch.device("cpu")), run.quiet():
        initialize_model_parallel(ParallelConfig(), use_megatron=True)
        conversion.to_hf(checkpoint, folder / "llama")
        conversion.from_hf(folder / "llama", folder / "back")
        config, _ = conversion._saved_config(checkpoint)
        model = conversion._model(config, 128)
        checkpoints.load_weights(checkpoint, [model])
        with torch.no_grad():
            positions = torch.arange(30).expand(2, 30)
            ours = model.float()(tokens, positions, None)
            llama = LlamaForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
            return ours, llama(input_ids=tokens).logits


@pytest.mark.parametrize("name", MODELS)
def test_there_and_back(small_data: Path, tmp_path: Path, name: str) -> None:
    argv = [*SMALL, *SHORT, *MODELS[name], f"--data.path=[{small_data}/text]"]
    parallel = layout(tensor_model=2)
    run_ranks(2, train, [*argv, *parallel, f"--output={tmp_path}/run"], timeout=90)
    source = tmp_path / "run/checkpoints/iter_0000001"
    ours, llamas = run_ranks(1, there_and_back, source, tmp_path, timeout=90)[0]
    assert ours.shape == (2, 30, 128) and ours.std() > 0.05
    torch.testing.assert_close(llamas, ours, rtol=0, atol=1e-5)

    before = run_ranks(1, contents, source, timeout=90)[0]
    back = run_ranks(1, contents, tmp_path / "back/checkpoints/iter_0000000", timeout=90)[0]
    weights = {n: t for n, t in back.items() if isinstance(t, torch.Tensor)}
    assert len(weights) == (8 if "tied" in name else 9)
    for key, tensor in weights.items():
        assert tensor.equal(before[key]) and tensor.dtype == before[key].dtype, key

    # A run that starts from the converted weights, under two layouts.
    start = [
        *argv[:-1], f"--config={tmp_path}/back/model.yaml", argv[-1], "--checkpoint.interval=0",
        f"--checkpoint.load={tmp_path}/back/checkpoints",
    ]  # fmt: skip
    one = run_ranks(1, train, [*start, f"--output={tmp_path}/one"], timeout=90)[0]
    two = run_ranks(2, train, [*start, *parallel, f"--output={tmp_path}/two"], timeout=90)[0]
    assert losses(two) == pytest.approx(losses(one), rel=1e-6 if name == "fp32" else 1e-3)
    facts = json.loads((tmp_path / "llama/config.json").read_text())
    assert facts["vocab_size"] == 128
    for layers in (1, 3):
        changed = json.dumps({**facts, "num_hidden_layers": layers})
        (tmp_path / "llama/config.json").write_text(changed)
        assert "do not fit its config.json" in run_ranks(1, refused, tmp_path / "llama")[0]


def refused(folder: Path) -> str:
    from examples.pretraining import conversion

    with pytest.raises(UserError) as caught:
        conversion.from_hf(folder, folder / "new")
    return str(caught.value)


def test_what_is_no_llama_is_refused(tmp_path: Path) -> None:
    from examples.pretraining import conversion

    facts: dict[str, Any] = {"model_type": "gpt2"}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match="model_type 'gpt2'"):
        conversion.from_hf(tmp_path, tmp_path / "out")
    for text in ("", "[]", '{"model_type": "llama"}', "\0"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=r"config\.json"):
            conversion.from_hf(tmp_path, tmp_path / "out")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "partial_rotary_factor": 0.5}')
    with pytest.raises(UserError, match=r"partial_rotary_factor 0\.5"):
        conversion.from_hf(tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match="is already there"):
        conversion.to_hf(tmp_path, tmp_path / "config.json")
    with pytest.raises(UserError, match="not a checkpoint of this example"):
        conversion.to_hf(tmp_path, tmp_path / "out")


def refusals(folder: Path) -> dict[str, str]:
    """What would come out as another model."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    llama = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True)
    LlamaForCausalLM(llama).save_pretrained(folder)
    file, config = folder / "model.safetensors", folder / "config.json"
    weights, facts = load_file(file), json.loads(config.read_text())
    found = {}

    def change(name: str, other: dict[str, Any], **config_keys: Any) -> None:
        save_file({**weights, **other}, file, {"format": "pt"})
        config.write_text(json.dumps({**facts, **config_keys}))
        found[name] = refused(folder)

    change("head", {"lm_head.weight": torch.randn(32, 16)})
    change("mixed", {"model.norm.weight": torch.ones(16, dtype=torch.bfloat16)})
    change("half", {name: tensor.half() for name, tensor in weights.items()})
    change("theta", {}, rope_parameters={"rope_type": "default", "rope_theta": 100.9})
    change("vocabulary", {}, ulysses_mc={"vocab_size": 33})
    return found


def test_what_would_come_out_as_another_model_is_refused(tmp_path: Path) -> None:
    (found,) = run_ranks(1, refusals, tmp_path / "llama", timeout=90)
    for name, text in {
        "head": "says tie_word_embeddings, but lm_head.weight is not the embedding",
        "mixed": "hold BF16 and F32: it takes weights that are all F32 or all BF16",
        "half": "hold F16: it takes",
        "theta": "rope_theta 100.9: Megatron's rotary_base is a whole number",
        "vocabulary": "ulysses_mc.vocab_size 33 of an embedding of 32 rows",
    }.items():
        assert text in found[name], found[name]


def weights_are_what_the_file_holds(folder: Path) -> None:
    """config.json asks for another dtype."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from examples.pretraining import conversion, run
    from ulysses_mc.parallel_state import ParallelConfig, initialize_model_parallel

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    initialize_model_parallel(ParallelConfig(), use_megatron=True)
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2)).save_pretrained(folder / "llama")
    config = folder / "llama/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "bfloat16"}))
    with run.on_device(torch.device("cpu")), run.quiet():
        conversion.from_hf(folder / "llama", folder / "ours")
        conversion.to_hf(folder / "ours/checkpoints", folder / "back")
    before, after = (
        LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float32).state_dict()
        for name in ("llama", "back")
    )
    for name, tensor in before.items():
        assert tensor.equal(after[name]), name


def test_the_weights_say_their_precision(tmp_path: Path) -> None:
    run_ranks(1, weights_are_what_the_file_holds, tmp_path, timeout=90)
