"""UlyssesAttention as a module like any other: copies, state, and an output to go on with."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import run_ranks
from ulysses_mc import ParallelConfigError
from ulysses_mc.layers import UlyssesAttention


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def changed_in_place(joint: bool) -> None:
    options = {f"joint_{name}": draw(2, 3, 4, 8) for name in ("query", "key", "value")}
    results = []
    for in_place in (False, True):
        leaves = [draw(2, 4, 4, 8).requires_grad_() for _ in range(3)]
        outs = UlyssesAttention(dist.group.WORLD)(*leaves, **(options if joint else {}))
        for out in outs if joint else (outs,):
            if in_place:
                out.mul_(2)
                out += leaves[0][:, :1]
            else:
                out = out * 2 + leaves[0][:, :1]
            (out**2).sum().backward(retain_graph=True)
        results.append([leaf.grad for leaf in leaves])
    for found, right in zip(*results, strict=True):
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("joint", [False, True])
def test_an_output_may_be_changed_in_place(joint) -> None:
    run_ranks(2, changed_in_place, joint)


def copied_and_saved() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), UlyssesAttention(dist.group.WORLD))
    for again in (copy.copy(model[1]), copy.deepcopy(model[1]), copy.deepcopy(model)[1]):
        assert again is not model[1] and again.group is dist.group.WORLD
    for save in (pickle.dumps, lambda whole: torch.save(whole, io.BytesIO())):
        with pytest.raises(ParallelConfigError, match=r"torch.save\(model.state_dict\(\), path\)"):
            save(model)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file))
    assert set(model.state_dict()) == {"0.weight", "0.bias"}


def test_copies_share_the_group_and_the_state_is_saved() -> None:
    run_ranks(1, copied_and_saved)
