"""What Ulysses hands to TEDotProductAttention fits it as the installed megatron-core has it.

Read from its source, so that it holds where TransformerEngine is not installed (megatron-core
0.16.1 here); `tests/transformer_engine` runs the class itself where it is.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from typing import Any

import pytest
import torch

from tests.megatron.small_gpt import MLA, SEQUENCE, Setting, gpt_chunks, local_spec
from tests.support.pool import run_ranks
from ulysses_mc import megatron_on_cpu
from ulysses_mc.planning.megatron_fields import core_folder

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(torch.cuda.is_available(), reason="builds models on CPU ranks"),
]
pytest.importorskip("megatron.core")


@cache
def class_of(file: str, name: str) -> ast.ClassDef:
    folder = core_folder()
    assert folder is not None
    tree = ast.parse((folder / "extensions" / file).read_text())
    (found,) = (n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name)
    return found


def method(cls: ast.ClassDef, name: str) -> ast.FunctionDef:
    (found,) = (n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == name)
    return found


def signature(function: ast.FunctionDef) -> inspect.Signature:
    """Names, order and which have defaults; `self` left out."""
    given, kind = function.args, inspect.Parameter
    names = [*given.posonlyargs, *given.args][1:]
    required = len(names) - len(given.defaults)
    parameters = [
        kind(a.arg, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if i < required else None)
        for i, a in enumerate(names)
    ]
    parameters += [
        kind(a.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else None)
        for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg:
        parameters.append(kind(given.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(parameters)


def te_core() -> ast.ClassDef:
    return class_of("transformer_engine.py", "TEDotProductAttention")


class Recorder(torch.nn.Module):
    """A core attention that keeps what it is built and called with, and returns its values."""

    def __init__(self, **given: Any) -> None:
        super().__init__()
        self.built, self.called = given, list[tuple[Any, Any]]()

    def forward(self, *given: Any, **named: Any) -> torch.Tensor:
        self.called.append((given, named))
        value: torch.Tensor = given[2]
        heads = given[0].size(-2)
        return value.repeat_interleave(heads // value.size(-2), -2).flatten(-2)


def recording_spec(config: Any) -> Any:
    from ulysses_mc.layers import with_ulysses

    spec = local_spec(config)
    spec.submodules.self_attention.submodules.core_attention = Recorder
    return with_ulysses(spec)


def record(config: dict[str, Any]) -> list[tuple[dict[str, Any], list[tuple[Any, Any]]]]:
    """Of each layer of a model, after a forward pass and a call with a bias."""
    from ulysses_mc.layers import UlyssesCoreAttention

    with megatron_on_cpu():
        setting = Setting(cp=2, config=config)
        setting.initialize()
        (model,) = gpt_chunks(setting, recording_spec)
        tokens = torch.zeros(1, SEQUENCE // 2, dtype=torch.long)
        model(tokens, tokens, None, labels=tokens)
        found = []
        for core in model.modules():
            if isinstance(core, UlyssesCoreAttention):
                (query, *_), _ = core.inner.called[0]
                local = query.new_zeros(SEQUENCE // 2, 1, 2 * query.size(2), query.size(3))
                core(local, local, local, attention_bias=torch.zeros(SEQUENCE, SEQUENCE))
                built = {k: v for k, v in core.inner.built.items() if k != "config"}
                inside = core.inner.built["config"]
                built["sizes"] = inside.context_parallel_size, inside.num_attention_heads
                calls = [(len(g), sorted(n)) for g, n in core.inner.called]
                found.append(({k: v if k == "sizes" else None for k, v in built.items()}, calls))
        return found


@pytest.mark.parametrize("config", [{}, MLA], ids=["gqa", "mla"])
def test_every_argument_is_one_of_the_class(config: dict[str, Any]) -> None:
    build, call = (signature(method(te_core(), name)) for name in ("__init__", "forward"))
    for layers in run_ranks(2, record, config, timeout=90):
        assert len(layers) == 4
        for built, calls in layers:
            assert built.pop("sizes") == (1, 2)  # no context parallelism, half of 4 heads
            build.bind(config=None, **built)
            assert len(calls) == 2 and "attention_bias" in calls[1][1]
            for count, names in calls:
                call.bind(*[None] * count, **dict.fromkeys(names))


def test_an_argument_that_it_lacks_would_be_seen() -> None:
    build = signature(method(te_core(), "__init__"))
    with pytest.raises(TypeError, match="unexpected keyword argument 'core'"):
        build.bind(None, 1, None, "self", core="sdpa")


def test_context_parallelism_of_its_own_follows_the_size_in_the_config() -> None:
    """With size 1 in its config it takes no cp group, though a collection names one."""
    init = method(te_core(), "__init__")
    guarded = [
        node
        for test in ast.walk(init)
        if isinstance(test, ast.If)
        and ast.unparse(test.test) == "self.config.context_parallel_size > 1"
        for node in ast.walk(test)
    ]
    uses = [
        node
        for node in ast.walk(init)
        if isinstance(node, ast.Constant) and node.value in ("cp_group", "cp_stream")
    ]
    assert len(uses) >= 2 and all(any(use is node for node in guarded) for use in uses)


def test_transformer_engines_layers_name_it() -> None:
    provider = class_of("transformer_engine_spec_provider.py", "TESpecProvider")
    (answer,) = (
        n for n in ast.walk(method(provider, "core_attention")) if isinstance(n, ast.Return)
    )
    assert answer.value is not None and ast.unparse(answer.value) == "TEDotProductAttention"
