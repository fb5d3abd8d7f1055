"""Rotary embeddings of Megatron models for tokens in any order."""

from __future__ import annotations

from typing import Any

import torch

from ..parallel_state.errors import ParallelConfigError
from .core_attention import UlyssesCoreAttention
from .packed import PackedDocuments


def wire_rope(model: Any) -> None:
    """Lets a Megatron model take tokens in any layout, as `packed_seq_params` describes them.

    Each rank then rotates its queries and keys by the positions of its own tokens in their
    documents; without packed documents, or with Megatron's layout, all is as before. Models
    without rotary embeddings (`learned_absolute`, `none`) take their positions from
    `position_ids`, but need this call too.

    Args:
        model: a Megatron model, or its chunks as a list, not yet wrapped.

    Raises:
        ParallelConfigError: multi-token prediction, multi-latent attention or Mamba, which
            know of Megatron's own layout only.
    """
    chunks = model if isinstance(model, (list, tuple)) else [model]
    modules = [module for chunk in chunks for module in chunk.modules()]
    cores = [module for module in modules if isinstance(module, UlyssesCoreAttention)]
    _check(modules, [chunk.config for chunk in chunks])
    for module in modules:
        rope = getattr(module, "rotary_pos_emb", None)
        if isinstance(rope, torch.nn.Module) and cores and not isinstance(rope, DocumentRope):
            module.rotary_pos_emb = DocumentRope(rope, cores[0].group.rank())
    for core in cores:
        core.any_layout = True


class DocumentRope(torch.nn.Module):
    """Megatron's rotary embedding, by the position of every token in its document.

    A model asks its rotary embedding for the length of the sequence, then for the angles of as
    many tokens. Here the answer to the first is the documents themselves.
    """

    def __init__(self, rope: torch.nn.Module, rank: int) -> None:
        super().__init__()
        self.rope: Any = rope
        self.rank = rank

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> Any:
        documents = packed_seq_params
        if isinstance(documents, PackedDocuments) and not documents.is_megatrons_order:
            return documents
        return self.rope.get_rotary_seq_len(
            inference_context,
            transformer,
            transformer_input,
            transformer_config,
            packed_seq_params,
            **kwargs,
        )

    def forward(self, max_seq_len: Any, *args: Any, **kwargs: Any) -> Any:
        """[s_r, 1, 1, d], with the factor of the logits beside it where YaRN has one."""
        if not isinstance(max_seq_len, PackedDocuments):
            return self.rope(max_seq_len, *args, **kwargs)
        documents = max_seq_len
        assert documents.layout is not None
        whole = self.rope(documents.max_seqlen_q, packed_seq=True)  # packed: not cut by rank
        angles, *factor = whole if isinstance(whole, tuple) else (whole,)
        positions = documents.layout.positions(self.rank, documents.bounds)
        own = angles[torch.tensor(positions, dtype=torch.long, device=angles.device)]
        return (own, *factor) if factor else own

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("rope"), name)


def _check(modules: list[torch.nn.Module], configs: list[Any]) -> None:
    found = {
        "mtp_num_layers": any(getattr(config, "mtp_num_layers", None) for config in configs),
        "multi_latent_attention": any(config.multi_latent_attention for config in configs),
        "position_embedding_type='mrope'": any(
            type(module).__name__ == "MultimodalRotaryEmbedding" for module in modules
        ),
        "Mamba": any(type(module).__name__ == "MambaMixer" for module in modules),
    }
    refused = [name for name, present in found.items() if present]
    if refused:
        raise ParallelConfigError(
            f"wire_rope of a model with {', '.join(refused)}.",
            rule="these take the order of the tokens for Megatron's own",
            nearest="pad_documents(batch, 2 x ulysses_parallel_size) and "
            "SequenceLayout.zigzag_packed, without wire_rope.",
        )
