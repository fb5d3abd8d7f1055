"""Which fused norm and optimizer are used: by their contents, and said with the reason."""

from __future__ import annotations

import inspect
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron.small_gpt import Setting

pytestmark = pytest.mark.megatron
pytest.importorskip("megatron.core")

from ulysses_mc import megatron_on_cpu  # noqa: E402
from ulysses_mc.layers import Norm, fused, norm  # noqa: E402

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


@pytest.fixture
def apex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a package of that name; NVIDIA's if `optimizers` are asked for."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", None)  # not installed

    def write(optimizers: str) -> None:
        for name, text in (("normalization", APEX), ("optimizers", optimizers)):
            (tmp_path / "apex" / name).mkdir(parents=True)
            (tmp_path / "apex" / name / "__init__.py").write_text(text)
        (tmp_path / "apex" / "__init__.py").write_text("")

    yield write
    for name in [name for name in sys.modules if name.split(".")[0] == "apex"]:
        del sys.modules[name]


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_apex_is_taken_if_it_is_nvidias(kind: str, apex: Any) -> None:
    apex("from .fused_adam import FusedAdam\n")
    choice = fused.norm_in_use.__wrapped__(kind, False, True)
    assert choice.name == f"apex's Fused{kind}"
    inspect.signature(choice.kind).bind(8, eps=1e-5)
    assert fused.norm_in_use.__wrapped__(kind, True, True).name == f"PyTorch's {kind}"


def test_a_stranger_of_that_name_is_not(apex: Any) -> None:
    apex("# sessions and widgets\n")
    choice = fused.norm_in_use.__wrapped__("RMSNorm", False, True)
    assert choice.name == "PyTorch's RMSNorm"
    assert "not apex: NVIDIA's apex is not installed" in str(choice)


def test_said_once(caplog: pytest.LogCaptureFixture) -> None:
    fused.norm_in_use.cache_clear()
    config = Setting().transformer_config()
    with caplog.at_level(logging.INFO, "ulysses_mc"):
        for _ in range(3):
            assert isinstance(Norm(config, 8), norm.RMSNorm)
    assert [r.getMessage() for r in caplog.records] == [
        "norm: PyTorch's RMSNorm (not TransformerEngine: no GPU; not apex: no GPU)"
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at a machine without a GPU")
def test_megatrons_adam_on_a_cpu() -> None:
    with megatron_on_cpu():
        assert str(fused.adam_in_use()).startswith("PyTorch's AdamW (not TransformerEngine, apex:")
