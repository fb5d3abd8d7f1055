"""Presets against the published parameter counts; config.json; Megatron's flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ulysses_mc.planning import PRESETS, RequestError, preset
from ulysses_mc.planning.hugging_face import read_hugging_face

# Billions of parameters, from the model cards (safetensors totals) and papers.
PUBLISHED = {
    "gpt3-175b": 174.6, "megatron-22b": 22.07, "megatron-1t": 1008.0, "llama-2-7b": 6.738,
    "llama-2-13b": 13.016, "llama-2-70b": 68.977, "llama-3.1-8b": 8.030, "llama-3.1-70b": 70.554,
    "llama-3.1-405b": 405.853, "llama-3.2-1b": 1.236, "llama-3.2-3b": 3.213,
    "qwen2.5-0.5b": 0.494, "qwen2.5-7b": 7.616, "qwen2.5-14b": 14.770, "qwen2.5-32b": 32.764,
    "qwen2.5-72b": 72.706, "qwen3-8b": 8.191, "qwen3-32b": 32.762, "qwen3-30b-a3b": 30.532,
    "qwen3-235b-a22b": 235.094, "mixtral-8x7b": 46.703, "mixtral-8x22b": 140.630,
    "deepseek-v2-lite": 15.706, "deepseek-v2": 235.741, "deepseek-v3": 671.026,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count(name: str) -> None:
    count = PRESETS[name].total_parameters / 1e9
    assert abs(count / PUBLISHED[name] - 1) < 1e-3


def test_active_parameters_of_experts() -> None:
    assert PRESETS["mixtral-8x7b"].active_parameters / 1e9 == pytest.approx(12.88, abs=0.01)
    assert PRESETS["deepseek-v3"].active_parameters / 1e9 == pytest.approx(37.55, abs=0.1)


def test_names_are_forgiving_and_a_wrong_one_names_the_nearest() -> None:
    assert preset("meta-llama/Llama-3.1-8B-Instruct").name == "llama-3.1-8b"
    assert preset("Qwen/Qwen2.5-7B").name == "qwen2.5-7b"
    with pytest.raises(RequestError, match=r"llama-3\.1-8b"):
        preset("llama3-8b")


LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096,
    "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "vocab_size": 128256, "tie_word_embeddings": False, "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
}  # fmt: skip
DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168,
    "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
    "vocab_size": 129280, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
}  # fmt: skip


def write(folder: Path, config: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (LLAMA, "llama-3.1-8b"),
        (DEEPSEEK, "deepseek-v3"),
        ({**LLAMA, "model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8,
          "num_experts_per_tok": 2}, "mixtral-8x7b"),
        ({"text_config": LLAMA, "model_type": "llava"}, "llama-3.1-8b"),
    ],
)  # fmt: skip
def test_config_json(tmp_path: Path, config: dict[str, Any], name: str) -> None:
    model, known = read_hugging_face(write(tmp_path, config)), PRESETS[name]
    assert model.total_parameters == known.total_parameters
    assert model.flops_per_token(8192) == known.flops_per_token(8192)
    assert read_hugging_face(tmp_path) == model


def test_transformers_own_configs_have_the_same_number_of_parameters() -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from ulysses_mc.planning.hugging_face import model_from_config

    small = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
             "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 200}  # fmt: skip
    for kind in ("llama", "qwen2", "qwen3"):
        config = transformers.AutoConfig.for_model(kind, **small)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        ours = model_from_config(config.to_dict(), name=kind, source=kind)
        assert ours.total_parameters == sum(p.numel() for p in model.parameters()), kind


def test_every_problem_of_a_config_at_once(tmp_path: Path) -> None:
    config = {**LLAMA, "num_key_value_heads": 7, "vocab_size": "many"}
    del config["num_hidden_layers"]
    config["num_hiden_layers"] = 32
    with pytest.raises(RequestError) as caught:
        read_hugging_face(write(tmp_path, config))
    text = str(caught.value)
    assert "3 problems" in text or "4 problems" in text
    assert "unknown key 'num_hiden_layers'" in text and "num_hidden_layers is missing" in text
    assert "vocab_size is 'many'" in text
    assert "7 key/value heads do not divide 32 query heads" in text and "4 or 8" in text


@pytest.mark.parametrize("content", ["{", "[1]", "null"])
def test_no_config(tmp_path: Path, content: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(content)
    with pytest.raises(RequestError, match="JSON object"):
        read_hugging_face(file)
