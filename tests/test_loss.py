"""The loss functions against torch's own, and the memory that chunks are there to bound."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ulysses_mc import ParallelConfigError, cross_entropy, linear_cross_entropy
from ulysses_mc.loss import masked_sum

TOKENS, D, VOCABULARY = 50, 6, 40


class LargestTensor(TorchDispatchMode):
    """The most elements that any operator's result had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.fixture
def data() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    labels = torch.randint(0, VOCABULARY, (5, 10))
    labels[torch.rand(5, 10) < 0.3] = -100
    weights = torch.rand(5, 10)
    weights[0] = 0
    return {
        "hidden": torch.randn(5, 10, D).double().requires_grad_(),
        "weight": torch.randn(VOCABULARY, D).double().requires_grad_(),
        "bias": torch.randn(VOCABULARY).double().requires_grad_(),
        "labels": labels,
        "weights": weights,
    }


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 7, 1024, None])
def test_sum_count_and_gradients_are_torchs(data, weighted: bool, chunk_size: int | None) -> None:
    hidden, weight, bias, labels = (data[n] for n in ("hidden", "weight", "bias", "labels"))
    weights = data["weights"] if weighted else None
    leaves = (hidden, weight, bias)
    each = F.cross_entropy(F.linear(hidden, weight, bias).mT, labels, reduction="none")
    right_sum = (each * (1 if weights is None else weights)).sum()  # 0 at label -100
    ones = torch.ones(5, 10) if weights is None else weights
    right_count = ones[labels != -100].double().sum()
    expected = torch.autograd.grad(right_sum, leaves)

    if chunk_size is None:
        total, count = cross_entropy(F.linear(hidden, weight, bias), labels, weights)
    else:
        total, count = linear_cross_entropy(
            hidden, weight, labels, weights, bias=bias, chunk_size=chunk_size
        )
    torch.testing.assert_close((total, count), (right_sum, right_count))
    for ours, theirs in zip(torch.autograd.grad(total, leaves), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_no_tensor_has_more_rows_of_logits_than_a_chunk(data) -> None:
    arguments = data["hidden"], data["weight"], data["labels"]
    with LargestTensor() as chunked:
        linear_cross_entropy(*arguments, chunk_size=4)[0].backward()
    with LargestTensor() as at_once:
        linear_cross_entropy(*arguments)[0].backward()
    assert chunked.elements <= max(4 * VOCABULARY, TOKENS * D, VOCABULARY * D)
    assert at_once.elements == int((data["labels"] != -100).sum()) * VOCABULARY


def test_low_precision_is_summed_in_float32(data) -> None:
    hidden, weight = data["hidden"].bfloat16().detach(), data["weight"].bfloat16().detach()
    total, count = linear_cross_entropy(hidden, weight, data["labels"], chunk_size=5)
    assert total.dtype == torch.float32 and count.dtype == torch.float64


def both(labels: torch.Tensor, weights: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Sum and count of `cross_entropy` and `linear_cross_entropy`, of 2 x 3 tokens alike."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(*n, generator=generator) for n in ((2, 3, 4), (5, 4)))
    return [
        *cross_entropy(F.linear(hidden, weight), labels, weights),
        *linear_cross_entropy(hidden, weight, labels, weights),
    ]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16])
def test_labels_of_every_integer_type(dtype: torch.dtype) -> None:
    labels = torch.tensor([[0, 1, 2], [3, 4, -100 if dtype.is_signed else 0]])
    assert torch.equal(torch.stack(both(labels.to(dtype))), torch.stack(both(labels)))


@pytest.mark.parametrize(
    "labels",
    [torch.rand(2, 3, 5), torch.ones(2, 3), torch.ones(2, 3).bool(), torch.ones(2, 3).bfloat16()],
)
def test_labels_that_are_no_integers_are_refused(labels: torch.Tensor) -> None:
    hidden, weight = torch.zeros(2, 3, 4), torch.zeros(5, 4)
    for call in (
        lambda: cross_entropy(F.linear(hidden, weight), labels),
        lambda: linear_cross_entropy(hidden, weight, labels),
    ):
        with pytest.raises(ParallelConfigError, match=rf"{labels.dtype}[\s\S]*shape \[2, 3\]"):
            call()


@pytest.mark.parametrize("shape", [(2,), (2, 2), (3, 2), (6,), (1, 3), (2, 3, 1), (2, 3, 5), ()])
@pytest.mark.parametrize("name", ["labels", "weights"])
def test_other_shapes_than_the_tokens_are_refused(shape: tuple[int, ...], name: str) -> None:
    wrong, right = torch.ones(shape).long(), torch.ones(2, 3).long()
    labels, weights = (wrong, None) if name == "labels" else (right, wrong)
    hidden, weight = torch.zeros(2, 3, 4), torch.zeros(5, 4)
    with pytest.raises(ParallelConfigError, match=f"{name} of shape .* for logits of shape"):
        cross_entropy(F.linear(hidden, weight), labels, weights)
    with pytest.raises(ParallelConfigError, match=r"hidden has \[2, 3\] tokens"):
        linear_cross_entropy(hidden, weight, labels, weights)


def test_weights_of_another_shape_than_the_losses_are_refused() -> None:
    with pytest.raises(ParallelConfigError, match=r"weights of shape \[3\] for losses"):
        masked_sum(torch.ones(3, 3), torch.ones(3))  # would weigh rows, not tokens


@pytest.mark.parametrize("chunk_size", [0, -1, 2.0, True, None])
def test_a_chunk_size_that_is_no_count_is_refused(data, chunk_size) -> None:
    with pytest.raises(ParallelConfigError, match=rf"chunk_size is {chunk_size}[\s\S]*1 or more"):
        linear_cross_entropy(data["hidden"], data["weight"], data["labels"], chunk_size=chunk_size)
