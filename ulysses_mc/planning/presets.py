"""Published models, by name. Numbers are those of each model's own config file or paper."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from .model import MLAShape, ModelShape, MoEShape
from .problems import Problem, RequestError


def _gpt(name: str, layers: int, hidden: int, heads: int, vocab: int = 51200) -> ModelShape:
    """GPT-3's shape: LayerNorm, GELU of 4h, biases, dropout, 2,048 learned positions."""
    return ModelShape(
        name=name, num_layers=layers, hidden_size=hidden, num_attention_heads=heads,
        num_query_groups=heads, head_dim=hidden // heads, ffn_hidden_size=4 * hidden,
        vocab_size=vocab, gated_mlp=False, layer_norm=True, linear_bias=True,
        tied_embeddings=True, hidden_dropout=True, learned_positions=2048, max_positions=2048,
    )  # fmt: skip


def _llama(
    name: str, layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int,
    **more: Any,
) -> ModelShape:  # fmt: skip
    """RMSNorm, SwiGLU, rotary positions, no biases, no dropout."""
    more = {"head_dim": hidden // heads, "rotary_base": 500000.0, "max_positions": 131072, **more}
    return ModelShape(
        name=name, num_layers=layers, hidden_size=hidden, num_attention_heads=heads,
        num_query_groups=groups, ffn_hidden_size=ffn, vocab_size=vocab, **more,
    )  # fmt: skip


def _qwen25(
    name: str, layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int = 152064,
    tied: bool = False,
) -> ModelShape:  # fmt: skip
    return _llama(name, layers, hidden, heads, groups, ffn, vocab, qkv_bias=True,
                  tied_embeddings=tied, rotary_base=1e6)  # fmt: skip


def _qwen3(name: str, layers: int, hidden: int, heads: int, groups: int, ffn: int,
           tied: bool = False, moe: MoEShape | None = None) -> ModelShape:  # fmt: skip
    return _llama(name, layers, hidden, heads, groups, ffn, 151936, head_dim=128, qk_norm=True,
                  tied_embeddings=tied, rotary_base=1e6, max_positions=40960, moe=moe)  # fmt: skip


def _deepseek(name: str, layers: int, hidden: int, heads: int, ffn: int, vocab: int,
              q_rank: int | None, moe: MoEShape) -> ModelShape:  # fmt: skip
    return _llama(name, layers, hidden, heads, heads, ffn, vocab, head_dim=192,
                  value_head_dim=128, rotary_base=10000.0, max_positions=163840, moe=moe,
                  mla=MLAShape(q_lora_rank=q_rank, kv_lora_rank=512, rope_head_dim=64))  # fmt: skip


def _moe(experts: int, top_k: int, ffn: int, shared: int = 0, dense: int = 0) -> MoEShape:
    return MoEShape(num_experts=experts, top_k=top_k, ffn_hidden_size=ffn,
                    shared_ffn_hidden_size=shared, num_dense_layers=dense)  # fmt: skip


_ALL = [
    # GPT-3 (arXiv 2005.14165, table 2.1) and Megatron's (arXiv 2205.05198, table 3).
    _gpt("gpt3-125m", 12, 768, 12),
    _gpt("gpt3-350m", 24, 1024, 16),
    _gpt("gpt3-760m", 24, 1536, 16),
    _gpt("gpt3-1.3b", 24, 2048, 16),  # the paper's 24 heads do not divide 2048
    _gpt("gpt3-2.7b", 32, 2560, 32),
    _gpt("gpt3-6.7b", 32, 4096, 32),
    _gpt("gpt3-13b", 40, 5120, 40),  # the paper's h is 5140, which 40 heads do not divide
    _gpt("gpt3-175b", 96, 12288, 96),
    _gpt("megatron-22b", 48, 6144, 64),
    _gpt("megatron-530b", 105, 20480, 128),
    _gpt("megatron-1t", 128, 25600, 160),
    # meta-llama config.json files.
    _llama("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, rotary_base=1e4, max_positions=4096),
    _llama("llama-2-13b", 40, 5120, 40, 40, 13824, 32000, rotary_base=1e4, max_positions=4096),
    _llama("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, rotary_base=1e4, max_positions=4096),
    _llama("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, max_positions=8192),
    _llama("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, max_positions=8192),
    _llama("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256),
    _llama("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256),
    _llama("llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256),
    _llama("llama-3.2-1b", 16, 2048, 32, 8, 8192, 128256, tied_embeddings=True),
    _llama("llama-3.2-3b", 28, 3072, 24, 8, 8192, 128256, tied_embeddings=True),
    _llama("llama-3.3-70b", 80, 8192, 64, 8, 28672, 128256),
    # Qwen config.json files.
    _qwen25("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151936, tied=True),
    _qwen25("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151936, tied=True),
    _qwen25("qwen2.5-7b", 28, 3584, 28, 4, 18944),
    _qwen25("qwen2.5-14b", 48, 5120, 40, 8, 13824),
    _qwen25("qwen2.5-32b", 64, 5120, 40, 8, 27648),
    _qwen25("qwen2.5-72b", 80, 8192, 64, 8, 29568),
    _qwen3("qwen3-8b", 36, 4096, 32, 8, 12288),
    _qwen3("qwen3-32b", 64, 5120, 64, 8, 25600),
    _qwen3("qwen3-30b-a3b", 48, 2048, 32, 4, 6144, moe=_moe(128, 8, 768)),
    _qwen3("qwen3-235b-a22b", 94, 4096, 64, 4, 12288, moe=_moe(128, 8, 1536)),
    # mistralai config.json files.
    _llama("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, rotary_base=1e6, max_positions=32768,
           moe=_moe(8, 2, 14336)),
    _llama("mixtral-8x22b", 56, 6144, 48, 8, 16384, 32768, rotary_base=1e6, max_positions=65536,
           moe=_moe(8, 2, 16384)),
    # deepseek-ai config.json files.
    _deepseek("deepseek-v2-lite", 27, 2048, 16, 10944, 102400, None, _moe(64, 6, 1408, 2816, 1)),
    _deepseek("deepseek-v2", 60, 5120, 128, 12288, 102400, 1536, _moe(160, 6, 1536, 3072, 1)),
    _deepseek("deepseek-v3", 61, 7168, 128, 18432, 129280, 1536, _moe(256, 8, 2048, 2048, 3)),
]  # fmt: skip

PRESETS = {model.name: model for model in _ALL}


def preset(name: str) -> ModelShape:
    """The model of that name; case, '_' and a leading 'organisation/' do not matter.

    Raises:
        RequestError: no such model; the nearest names are given.
    """
    wanted = name.lower().replace("_", "-").rpartition("/")[2]
    for suffix in ("", "-instruct", "-hf", "-base", "-v0.1"):
        if wanted.removesuffix(suffix) in PRESETS:
            return PRESETS[wanted.removesuffix(suffix)]
    near = get_close_matches(wanted, PRESETS, n=3, cutoff=0.5)
    if name.endswith(".json"):
        raise RequestError([Problem(f"{name}: no such file", "a Hugging Face config.json")])
    raise RequestError(
        [
            Problem(
                f"model {name!r} is no known name, and no file of that name exists",
                "a model is a known name, the path of a Hugging Face config.json, or Megatron "
                "flags (--megatron-args)",
                " or ".join(near) or "a name that ulysses-mc plan --models lists",
            )
        ]
    )
