"""Which fused norm and optimizer are used: by their contents, and said with the reason."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.megatron.small_gpt import Setting

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")

from ulysses_mc import megatron_on_cpu  # noqa: E402
from ulysses_mc.layers import Norm, fused, norm, norms_in_use  # noqa: E402

# Constructors as in the repository NVIDIA/apex, apex/normalization/fused_layer_norm.py.
APEX = """
import torch
class _Norm(torch.nn.Module):
    def __init__(self, normalized_shape, eps=1e-5, elementwise_affine=True, memory_efficient=False):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(normalized_shape))
class FusedRMSNorm(_Norm): ...
class FusedLayerNorm(_Norm): ...
"""


# As in apex/optimizers/fused_adam.py.
ADAM = """
class FusedAdam:
    def __init__(self):
        import amp_C
"""


@pytest.fixture
def apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a package of that name, whose optimizers are given."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)  # not installed

    def write(adam: str) -> None:
        optimizers = tmp_path / "apex" / "optimizers"
        optimizers.mkdir(parents=True)
        (optimizers / "__init__.py").write_text("from .fused_adam import FusedAdam\n")
        (optimizers / "fused_adam.py").write_text(adam)
        (tmp_path / "apex" / "normalization.py").write_text(APEX)
        (tmp_path / "apex" / "__init__.py").write_text("")

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_apex_is_taken_if_it_is_nvidias(kind: str, apex: Any) -> None:
    apex(ADAM)
    choice = fused.norm_in_use.__wrapped__(kind, False, True)
    assert choice.name == f"apex's Fused{kind}"
    inspect.signature(choice.kind).bind(8, eps=1e-5)
    assert fused.norm_in_use.__wrapped__(kind, True, True).name == f"PyTorch's {kind}"


STRANGER = "class FusedAdam: ...\n"


def test_a_stranger_of_that_name_is_not(apex: Any) -> None:
    apex(STRANGER)
    choice = fused.norm_in_use.__wrapped__("RMSNorm", False, True)
    assert choice.name == "PyTorch's RMSNorm"
    assert "not apex: NVIDIA's apex is not installed" in str(choice)


def test_a_stranger_called_transformer_engine_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    stranger: Any = ModuleType("transformer_engine.pytorch")
    stranger.RMSNorm = torch.nn.RMSNorm
    monkeypatch.setitem(sys.modules, stranger.__name__, stranger)
    monkeypatch.setitem(sys.modules, "transformer_engine", ModuleType("transformer_engine"))
    choice = fused.norm_in_use.__wrapped__("RMSNorm", False, True)
    assert choice.name == "PyTorch's RMSNorm"
    assert "not TransformerEngine: transformer_engine.pytorch.RMSNorm is something" in str(choice)


def test_norms_are_named_with_the_reason() -> None:
    config = Setting().transformer_config()
    layers = torch.nn.ModuleList([Norm(config, 8), torch.nn.Linear(8, 8), Norm(config, 8)])
    assert all(isinstance(layers[i], norm.RMSNorm) for i in (0, 2))
    said = ["PyTorch's RMSNorm (not TransformerEngine: no GPU; not apex: no GPU)"]
    assert norms_in_use(layers) == norms_in_use([layers[0], layers]) == said
    assert norms_in_use(layers[1]) == []


@pytest.mark.parametrize(
    ("text", "name"),
    [(ADAM, "apex's FusedAdam"), (STRANGER, "apex.optimizers.fused_adam.FusedAdam, which is none")],
)
def test_apexs_adam_by_its_kernels(text: str, name: str, apex: Any) -> None:
    apex(text)
    adam = import_module("apex.optimizers").FusedAdam
    assert str(fused.adam_choice(adam)).startswith(name)


def test_pytorchs_adam() -> None:
    for adam in (torch.optim.Adam, torch.optim.AdamW):
        assert str(fused.adam_choice(adam)).startswith(f"PyTorch's {adam.__name__} (not Trans")


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at a machine without a GPU")
def test_megatrons_adam_on_a_cpu() -> None:
    with megatron_on_cpu():
        assert str(fused.adam_in_use()).startswith("PyTorch's AdamW (not TransformerEngine, apex:")
