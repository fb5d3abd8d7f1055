"""A transformer in numbers: what the planner must know of a model, and its parameter counts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class MoEShape:
    """Mixture-of-experts layers.

    Args:
        num_experts: routed experts of a layer.
        top_k: routed experts that each token visits.
        ffn_hidden_size: of one routed expert.
        shared_ffn_hidden_size: of all shared experts together; 0: none.
        num_dense_layers: leading layers that keep the dense MLP (DeepSeek's first three).
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    num_dense_layers: int = 0


@dataclass(frozen=True, kw_only=True)
class MLAShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): low-rank Q and KV.

    Args:
        q_lora_rank: rank of the query projection; None: a full projection.
        kv_lora_rank: width of the compressed key/value latent.
        rope_head_dim: rotary part of a query or key head, the key's shared by all heads.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    rope_head_dim: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer.

    Args:
        head_dim: of queries and keys (with MLA: with the rotary part).
        value_head_dim: of values and outputs; 0: as `head_dim`.
        gated_mlp: SwiGLU or the like, with three matrices; else two.
        layer_norm: LayerNorm with bias; else RMSNorm.
        linear_bias: biases in every linear layer. `qkv_bias`: in Q, K and V only.
        hidden_dropout: dropout masks are kept (GPT-3); modern models have none.
        learned_positions: size of the table of learned positions; 0: rotary.
    """

    name: str
    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    value_head_dim: int = 0
    gated_mlp: bool = True
    layer_norm: bool = False
    linear_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    hidden_dropout: bool = False
    learned_positions: int = 0
    max_positions: int = 0
    rotary_base: float = 10000.0
    moe: MoEShape | None = None
    mla: MLAShape | None = None

    def __hash__(self) -> int:
        """Of a few fields: the search looks a model up 100,000 times, mostly the same object."""
        return hash((self.num_layers, self.hidden_size, self.num_attention_heads))

    @property
    def value_dim(self) -> int:
        return self.value_head_dim or self.head_dim

    @property
    def num_moe_layers(self) -> int:
        return self.num_layers - self.moe.num_dense_layers if self.moe else 0

    # -- parameters of one layer, over all tensor-parallel ranks --------------------------------

    @cached_property
    def sharded_attention_parameters(self) -> int:
        """Weights of attention that tensor parallelism divides, KV duplication not counted."""
        h, q = self.hidden_size, self.num_attention_heads
        out = q * self.value_dim * h
        if self.mla:
            nope = self.head_dim - self.mla.rope_head_dim
            up = self.mla.kv_lora_rank * q * (nope + self.value_dim)
            return (self.mla.q_lora_rank or h) * q * self.head_dim + up + out
        return h * q * self.head_dim + out + self.kv_parameters

    @cached_property
    def kv_parameters(self) -> int:
        """Weights of the K and V projections; Megatron repeats them when K < T."""
        if self.mla:
            return 0
        return self.hidden_size * self.num_query_groups * (self.head_dim + self.value_dim)

    @cached_property
    def replicated_attention_parameters(self) -> int:
        """Norms, MLA's down projections, and biases of row-parallel layers."""
        h, per_norm = self.hidden_size, 2 if self.layer_norm else 1
        count = 2 * h * per_norm
        if self.qk_norm:
            count += 2 * self.head_dim * per_norm
        if self.mla:
            q_rank, kv_rank = self.mla.q_lora_rank, self.mla.kv_lora_rank
            count += h * (kv_rank + self.mla.rope_head_dim) + kv_rank
            count += (h + 1) * q_rank if q_rank else 0
        return count + (2 * h if self.linear_bias else 0)

    @cached_property
    def bias_parameters(self) -> int:
        """Biases that tensor parallelism divides."""
        heads = self.num_attention_heads * self.head_dim
        heads += self.num_query_groups * (self.head_dim + self.value_dim)
        count = heads if self.linear_bias or self.qkv_bias else 0
        return count + (self.mlp_matrices - 1) * self.ffn_hidden_size * self.linear_bias

    @property
    def mlp_matrices(self) -> int:
        return 3 if self.gated_mlp else 2

    def mlp_parameters(self, ffn_hidden_size: int) -> int:
        return self.mlp_matrices * self.hidden_size * ffn_hidden_size

    @property
    def expert_parameters(self) -> int:
        """Weights of all routed experts of one MoE layer."""
        if not self.moe:
            return 0
        return self.moe.num_experts * self.mlp_parameters(self.moe.ffn_hidden_size)

    @property
    def router_parameters(self) -> int:
        return self.moe.num_experts * self.hidden_size if self.moe else 0

    @property
    def embedding_parameters(self) -> int:
        """One table of V x h; the output layer is another unless the embeddings are tied."""
        return self.vocab_size * self.hidden_size

    @cached_property
    def layer_parameters(self) -> float:
        """Mean over the layers."""
        return (self.total_parameters - self._outside_layers) / self.num_layers

    @property
    def _outside_layers(self) -> int:
        tables = 1 if self.tied_embeddings else 2
        final_norm = self.hidden_size * (2 if self.layer_norm else 1)
        positions = self.learned_positions * self.hidden_size
        return tables * self.embedding_parameters + final_norm + positions

    @cached_property
    def total_parameters(self) -> int:
        attention = self.sharded_attention_parameters + self.replicated_attention_parameters
        count = self.num_layers * (attention + self.bias_parameters)
        dense = self.num_layers - self.num_moe_layers
        count += dense * self.mlp_parameters(self.ffn_hidden_size)
        if self.moe:
            shared = self.mlp_parameters(self.moe.shared_ffn_hidden_size)
            each = self.expert_parameters + self.router_parameters + shared
            count += self.num_moe_layers * each
        return count + self._outside_layers

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that a token meets: of the routed experts, the top k."""
        if not self.moe:
            return self.total_parameters
        idle = self.moe.num_experts - self.moe.top_k
        per_expert = self.mlp_parameters(self.moe.ffn_hidden_size)
        return self.total_parameters - self.num_moe_layers * idle * per_expert

    # -- arithmetic ------------------------------------------------------------------------------

    def matrix_flops_per_token(self) -> float:
        """Forward multiply-adds x 2 of all weight matrices, the output layer counted once.

        `2h q d + 2h k d + 3 h f` per layer, times 2, for a dense SwiGLU model: Megatron's
        convention (megatron.training.training.num_floating_point_operations).
        """
        attention = self.sharded_attention_parameters
        if self.mla:
            attention += self.hidden_size * (self.mla.kv_lora_rank + self.mla.rope_head_dim)
            attention += self.hidden_size * (self.mla.q_lora_rank or 0)
        count = self.num_layers * attention + self.embedding_parameters
        dense = self.num_layers - self.num_moe_layers
        count += dense * self.mlp_parameters(self.ffn_hidden_size)
        if self.moe:
            width = self.moe.top_k * self.moe.ffn_hidden_size + self.moe.shared_ffn_hidden_size
            count += self.num_moe_layers * self.mlp_parameters(width)
        return 2.0 * count

    def attention_flops_per_token(self, seq_length: int) -> float:
        """Forward FLOPs of QK^T and PV, causal: a token meets s/2 others on average."""
        width = self.num_attention_heads * (self.head_dim + self.value_dim)
        return self.num_layers * width * float(seq_length)

    def flops_per_token(self, seq_length: int) -> float:
        """Model FLOPs of a training step per token: 3 x forward, causal, no recomputation."""
        return 3 * (self.matrix_flops_per_token() + self.attention_flops_per_token(seq_length))
