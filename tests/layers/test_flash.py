"""FlashAttention as a local attention: its contract, as recorded from the released packages.

No kernel runs here. In its place stands a function with the recorded signature that does what
the package documents, by the oracle; so a wrong name, order or meaning of an argument shows.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.support.oracle import attention
from tests.support.sharded import check_against_oracle, draw, draw_qkv
from ulysses_mc import ParallelConfigError
from ulysses_mc.layers import explain_backend
from ulysses_mc.layers.local import flash, flash_attention, flash_backends

RELEASES = json.loads(Path(__file__).with_name("flash_signatures.json").read_text())
BACKENDS = {b.name: b for b in (flash_backends.FA2, flash_backends.FA3, flash_backends.FA4)}
TOO_OLD = ("flash-attn-4 4.0.0b25", "flash-attn-4 4.0.0b8")
CAPABILITY = {"FlashAttention-2": (8, 0), "FlashAttention-3": (9, 0), "FlashAttention-4": (10, 0)}


class Kernel:
    """`flash_attn_func` or `flash_attn_varlen_func` of one release."""

    def __init__(self, release: dict[str, Any], name: str) -> None:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        recorded = release[name]
        required = [inspect.Parameter(n, kind) for n in recorded["required"]]
        optional = [inspect.Parameter(n, kind, default=None) for n in recorded["optional"]]
        self.signature = inspect.Signature(required + optional)
        self.release, self.calls, self.given = release, 0, dict[str, Any]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.signature.bind(*args, **kwargs).arguments  # TypeError: not in its signature
        self.calls, self.given = self.calls + 1, given
        q, k, v = (given[name] for name in "qkv")
        check_tensors(q, k, v, self.release["backend"])
        assert {"softmax_scale", "causal", "window_size", "softcap", "deterministic"} <= set(given)
        slopes = given.get("alibi_slopes")
        assert slopes is None or slopes.dtype == torch.float32
        out = attention(
            q, k, v,
            scale=given["softmax_scale"],
            causal=given["causal"],
            window=self.window(given["window_size"]),
            softcap=given["softcap"],
            alibi_slopes=slopes,
            sinks=given.get("learnable_sink"),
            cu_seqlens=documents(given, "q"),
            cu_seqlens_kv=documents(given, "k"),
        ).to(q.dtype)  # fmt: skip
        return (out, None) if self.release["backend"] == "FlashAttention-4" else out

    def window(self, sides: tuple[Any, Any]) -> tuple[int, int]:
        """-1 or None, not both, stands for no limit."""
        unlimited = None if self.release["backend"] == "FlashAttention-4" else -1
        assert all(side == unlimited or side >= 0 for side in sides)
        left, right = (-1 if side is None else side for side in sides)
        return left, right


def check_tensors(q: Any, k: Any, v: Any, backend: str) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert all(x.size(-1) % 8 == 0 and x.stride(-1) == 1 for x in (q, k, v))
    own_kernel = backend != "FlashAttention-2" and (q.size(-1), v.size(-1)) == (192, 128)
    assert q.size(-1) == v.size(-1) or own_kernel


def documents(given: dict[str, Any], side: str) -> list[int] | None:
    bounds = given.get(f"cu_seqlens_{side}")
    if bounds is None:
        return None
    assert bounds.dtype == torch.int32
    assert given[f"max_seqlen_{side}"] == bounds.diff().max()
    assert bounds[-1] == given[side].size(0)
    values: list[int] = bounds.tolist()
    return values


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Puts recorded releases in the place of what is importable, and a GPU of theirs."""

    def install(*releases: dict[str, Any], capability: Any = None) -> dict[str, list[Kernel]]:
        kernels = {
            release["backend"]: [
                Kernel(release, name) for name in ("flash_attn_func", "flash_attn_varlen_func")
            ]
            for release in releases
        }
        found = {BACKENDS[name].modules: tuple(pair) for name, pair in kernels.items()}
        monkeypatch.setattr(
            flash_backends, "_functions", lambda modules: found.get(modules, "not installed")
        )
        for release in releases:
            if "_flash_attn_bwd" in release:
                interface: Any = ModuleType("flash_attn.cute.interface")
                interface._flash_attn_bwd = backward = lambda: None
                backward.__signature__ = Kernel(release, "_flash_attn_bwd").signature  # type: ignore[attr-defined]
                monkeypatch.setitem(sys.modules, interface.__name__, interface)
        flash_backends._backward_takes_sinks.cache_clear()
        capability = capability or CAPABILITY[releases[0]["backend"]]
        monkeypatch.setattr(flash, "_capability", lambda device: capability)
        return kernels

    yield install
    flash_backends._backward_takes_sinks.cache_clear()


S, HEADS, KV = 9, 4, 2
SLOPES, SINKS = draw(HEADS, seed=9).abs(), draw(HEADS, seed=10)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True, "scale": 0.3},
    "window": {"window": (2, 1)},
    "open window": {"window": (-1, 1)},
    "causal window": {"causal": True, "window": (2, -1), "deterministic": True},
    "documents": {"cu_seqlens": [0, 3, 8, 9], "causal": True},
    "documents, padding, window": {"cu_seqlens": torch.tensor([0, 6, 7]), "window": (1, 0)},
    "softcap": {"softcap": 0.7, "causal": True, "window": (3, 0)},
    "slopes": {"alibi_slopes": SLOPES, "softcap": 0.7, "cu_seqlens": [0, 4, 9]},
    "slopes, window": {"alibi_slopes": SLOPES, "causal": True, "window": (3, 0)},
    "sinks": {"sinks": SINKS, "causal": True, "window": (3, 0)},
    "documents, deterministic": {"cu_seqlens": [0, 4, 9], "causal": True, "deterministic": True},
    "dropout": {"dropout_p": 0.3, "causal": True},
    "dropout, documents": {"dropout_p": 0.3, "cu_seqlens": [0, 4, 9], "deterministic": True},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release["release"])
def test_every_argument_is_one_of_the_release(release, case, install) -> None:
    options = dict(CASES[case])
    backend = BACKENDS[release["backend"]]
    kernels = install(release)[backend.name]
    tensors = draw_qkv(2, S, HEADS, KV, d=8, dv=6)
    halves = [tensor.half() for tensor in tensors]
    if not set(options) - {"causal"} <= backend.options:
        with pytest.raises(ParallelConfigError, match="it has no"):
            flash_attention(*halves, **options)
        return
    if {"sinks", "softcap"} & options.keys() and release["release"] in TOO_OLD:
        with pytest.raises(ParallelConfigError, match=r"older than 4\.0\.0b26"):
            flash_attention(*halves, **options)
        return
    out = flash_attention(*halves, **options)
    packed = "cu_seqlens" in options
    assert [kernel.calls for kernel in kernels] == [not packed, packed]
    given = kernels[packed].given
    assert given["deterministic"] == options.pop("deterministic", False)
    # What is dropped is the kernel's business, so that here nothing is.
    assert given.get("dropout_p", 0.0) == options.pop("dropout_p", 0.0)
    expected = attention(*halves, **options)
    if packed:
        expected[:, int(options["cu_seqlens"][-1]) :] = 0
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release["release"])
@pytest.mark.parametrize("documents", [None, ([0, 2, 4], [0, 4, 9])])
def test_other_key_length(release, documents, install) -> None:
    install(release)
    query, (_, key, value) = draw(2, 4, HEADS, 8).half(), draw_qkv(2, S, HEADS, KV, d=8)
    packed = dict(zip(("cu_seqlens", "cu_seqlens_kv"), documents or (), strict=False))
    tensors = (query, key.half(), value.half())
    out = flash_attention(*tensors, causal=True, **packed)
    expected = attention(*tensors, causal=True, **packed)
    torch.testing.assert_close(out.double(), expected, rtol=2e-3, atol=2e-3)


def test_value_dimensions_that_have_a_kernel_are_not_padded(install) -> None:
    for release in RELEASES:
        (kernel, _) = install(release)[release["backend"]]
        query, key, value = (x.half() for x in draw_qkv(1, 4, 2, 2, d=192, dv=128))
        assert flash_attention(query, key, value).shape == (1, 4, 2, 128)
        assert kernel.calls == 1


# -- which one is used, and why not the others ------------------------------------------------

ALL = (RELEASES[0], RELEASES[3], RELEASES[5])
CHOICES = [
    ((9, 0), {}, "FlashAttention-3", {"FlashAttention-4": "FlashAttention-3 is preferred"}),
    ((10, 0), {}, "FlashAttention-4", {"FlashAttention-3": "needs compute capability 9.x"}),
    ((8, 0), {}, "FlashAttention-2", {"FlashAttention-4": "9.x or 10.x or 11.x, the GPU has 8.0"}),
    ((9, 0), {"alibi_slopes": SLOPES}, "FlashAttention-2", {"FlashAttention-3": "no alibi_slopes"}),
    ((9, 0), {"sinks": SINKS}, "FlashAttention-4", {"FlashAttention-3": "it has no sinks"}),
    ((9, 0), {"dropout_p": 0.1}, "FlashAttention-2", {"FlashAttention-4": "it has no dropout_p"}),
    ((9, 0), {"dropout_p": 0.1, "softcap": 1.0}, None, {"FlashAttention-2": "without dropout"}),
    (
        (9, 0),
        {"alibi_slopes": SLOPES.clone().requires_grad_()},
        None,
        {"FlashAttention-2": "no gradient of alibi_slopes"},
    ),
    ((9, 0), {"dtype": torch.float32}, None, {"FlashAttention-2": "neither float16 nor"}),
    ((10, 0), {"head_dim": 256}, "FlashAttention-2", {"FlashAttention-4": "256 is above 128"}),
    ((9, 0), {"causal": True}, "FlashAttention-3", {}),
    ((10, 0), {"head_dim": 192, "value_head_dim": 128}, "FlashAttention-4", {}),
    ((7, 5), {}, None, {"FlashAttention-2": "the GPU has 7.5"}),
]


@pytest.mark.parametrize(("capability", "options", "chosen", "reasons"), CHOICES, ids=str)
def test_the_choice_is_explained(capability, options, chosen, reasons, install) -> None:
    install(*ALL)
    explanation = explain_backend(capability=capability, **options)
    assert explanation.chosen == chosen
    assert len(explanation.passed_over) == (3 if chosen is None else 2)
    for name, reason in reasons.items():
        assert reason in explanation.passed_over[name]
        assert f"{name} passed over: " in str(explanation)


GIVEN = [  # on a GPU where FlashAttention-4 is preferred; whether an old one is passed over
    ({"sinks": SINKS}, "no sinks"),
    ({"softcap": 1.0}, "no softcap"),
    ({"softcap": 1.0, "sinks": SINKS}, "no sinks and no softcap"),
    ({"window": (3, 0), "deterministic": True}, ""),
]


@pytest.mark.parametrize(("options", "reason"), GIVEN, ids=str)
@pytest.mark.parametrize("release", RELEASES[5:], ids=lambda release: release["release"])
def test_an_old_one_is_passed_over_where_it_is_wrong(release, options, reason, install) -> None:
    install(release)
    explanation = explain_backend(capability=(10, 0), **options)
    if reason and release["release"] in TOO_OLD:
        assert f"older than 4.0.0b26: its backward pass has {reason}" in str(explanation)
        assert explanation.chosen is None
    else:
        assert explanation.chosen == "FlashAttention-4"


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at a machine without a GPU")
def test_on_this_machine() -> None:
    assert set(explain_backend().passed_over.values()) == {"no GPU"}
    with pytest.raises(ParallelConfigError, match="FlashAttention-2: no GPU"):
        flash_attention(*(x.half() for x in draw_qkv(1, 4, 2, 2)))


def test_found_by_its_functions_not_by_its_name(tmp_path, monkeypatch) -> None:
    (tmp_path / "stranger_attn.py").write_text("# something else of that name\n")
    (tmp_path / "broken_attn.py").write_text("raise OSError('undefined symbol: x')\n")
    (tmp_path / "good_attn.py").write_text("flash_attn_func = flash_attn_varlen_func = len\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    look = flash_backends._functions.__wrapped__
    assert "stranger_attn is something else" in look(("stranger_attn",))
    assert "undefined symbol" in look(("broken_attn",))
    assert "not installed" in look(("no_such_attn",))
    assert look(("no_such_attn", "good_attn")) == (len, len)


def test_refused_before_anything_is_sent() -> None:
    """An option that it never takes, named with those that do."""
    with pytest.raises(ParallelConfigError, match="flash_attention with attention_bias"):
        check_against_oracle(
            2, draw_qkv(1, 8, 4, 4), local_attention=flash_attention,
            attention_bias=draw(1, 4, 8, 8),
        )  # fmt: skip
