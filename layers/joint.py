"""Joint attention: tokens that every rank holds whole (text) beside the ones that are split.

As in MMDiT and video models: text and image tokens attend to each other in one softmax. Every
rank takes its heads of the text, so each text token is counted once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..exchange import Cut
from ..parallel_state.errors import ParallelConfigError
from ..sequence_layout import SequenceLayout
from .checks import check_qkv


@dataclass(frozen=True)
class JointTokens:
    """Query, key and value of the tokens that every rank holds, [b, j, h or k, d or d_v].

    Args:
        front: whether they come before the split tokens in the sequence, or after them.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    front: bool

    @classmethod
    def of(
        cls,
        query: torch.Tensor | None,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        position: str,
    ) -> JointTokens | None:
        """None if there are none.

        Raises:
            ParallelConfigError: some of the three are missing, or the position is unknown.
        """
        if query is None and key is None and value is None:
            return None
        if query is None or key is None or value is None or position not in ("front", "rear"):
            given = [n for n, t in zip("qkv", (query, key, value), strict=True) if t is not None]
            raise ParallelConfigError(
                f"Joint attention with {', '.join(given)} at {position!r}.",
                rule="joint_query, joint_key and joint_value come together, and joint_position "
                "is 'front' or 'rear'",
            )
        if query.dim() == 3:  # packed: a batch of one
            query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
        check_qkv(query.shape, key.shape, value.shape)
        return cls(query, key, value, position == "front")

    def beside(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> JointTokens:
        """In the type of the split tokens' query, key and value.

        Raises:
            ParallelConfigError: other batch size, heads or head dims than those.
        """
        own, split = (self.query, self.key, self.value), (query, key, value)
        for name, tensor, like in zip(("query", "key", "value"), own, split, strict=True):
            if (tensor.size(0), *tensor.shape[2:]) != (like.size(0), *like.shape[2:]):
                raise ParallelConfigError(
                    f"joint_{name} of shape {list(tensor.shape)} beside {name} {list(like.shape)}.",
                    rule="joint tokens have the batch size, heads and head dims of the others",
                    nearest=f"{[like.size(0), tensor.size(1), *like.shape[2:]]}.",
                )
        dtype = query.dtype
        return JointTokens(
            self.query.to(dtype), self.key.to(dtype), self.value.to(dtype), self.front
        )

    def attach(
        self, by_heads: torch.Tensor, replicated: torch.Tensor, heads: range
    ) -> torch.Tensor:
        """[b, s, h_r, d] and [b, j, h, d] -> [b, j + s, h_r, d], each rank its own heads."""
        own = replicated.narrow(2, heads.start, len(heads))
        return torch.cat([own, by_heads] if self.front else [by_heads, own], 1)

    def detach(self, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[b, j + s, h_r, d_v] -> [b, s, h_r, d_v] and [b, j, h_r, d_v]."""
        joint, split = self.query.size(1), out.size(1) - self.query.size(1)
        if self.front:
            return out[:, joint:], out[:, :joint]
        return out[:, :split], out[:, split:]

    def for_every_rank(
        self, out: torch.Tensor, heads: tuple[range, ...]
    ) -> tuple[torch.Tensor, Cut]:
        """A copy of [b, j, h_r, d_v] for every rank, as one more piece of the way back.

        The adjoint of handing out copies is the sum of their gradients: every rank's gradient
        is its share, and the shares add up to the whole.
        """
        ranks, tokens = len(heads), out.size(1)
        layout = SequenceLayout.from_lengths([tokens] * ranks)
        return out.repeat(1, ranks, 1, 1), Cut(layout, heads)  # [b, P * j, h_r, d_v]
