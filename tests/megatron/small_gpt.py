"""A small GPT, trained by Megatron's own parts, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

VOCABULARY, SEQUENCE = 64, 32
MLA = dict(  # of a config with multi-head latent attention
    multi_latent_attention=True,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=6,
    rope_type="rope",
)
# Tokens that multi-token prediction leaves out. Megatron-core 0.19 scales its loss by the tokens
# that *this rank* loses when labels are shifted once more; with these ones, two ranks in Megatron's
# order lose none, nor does one.
UNPREDICTED = [0, 8, 24]


@dataclass(frozen=True)
class Setting:
    """Sizes of the parallel grid, and what else changes how the same model is computed."""

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    bf16: bool = False
    batch: int = 4  # sequences of the global batch
    micro_batch: int = 1  # sequences that a rank takes at a time
    clip_grad: float = 1.0
    lr: float = 1e-2
    adam_eps: float = 1e-8
    config: dict[str, Any] = field(default_factory=dict)  # TransformerConfig, where it differs
    positions: str = "rope"
    tied: bool = False
    pattern: str | None = None  # the layers of a hybrid model, in place of a GPT

    def initialize(self) -> None:
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(
            self.tp,
            self.pp,
            self.vpp,
            context_parallel_size=self.cp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
        )
        self.seed()

    @staticmethod
    def seed() -> None:
        from megatron.core import tensor_parallel

        torch.manual_seed(0)
        tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)

    def transformer_config(self) -> Any:
        from megatron.core.transformer.transformer_config import (
            MLATransformerConfig,
            TransformerConfig,
        )

        dtype = torch.bfloat16 if self.bf16 else torch.float32
        values: dict[str, Any] = dict(
            num_layers=4,
            hidden_size=32,
            num_attention_heads=4,
            use_cpu_initialization=True,
            tensor_model_parallel_size=self.tp,
            pipeline_model_parallel_size=self.pp,
            virtual_pipeline_model_parallel_size=self.vpp,
            context_parallel_size=self.cp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=self.etp,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            pipeline_dtype=dtype,
            params_dtype=dtype,
            bf16=self.bf16,
            normalization="RMSNorm",
            add_bias_linear=False,
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            bias_activation_fusion=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
            calculate_per_token_loss=True,
            # Two stages exchange two messages each way at a time when interleaved; batched, they
            # would be mistaken for one another (Megatron-LM refuses that, the core does not).
            overlap_p2p_comm=self.vpp is not None,
            batch_p2p_comm=self.vpp is None,
        )
        latent = self.config.get("multi_latent_attention")
        return (MLATransformerConfig if latent else TransformerConfig)(**(values | self.config))


def local_spec(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        normalization=config.normalization,
    )


def gpt_chunks(setting: Setting, spec: Callable[[Any], Any] = local_spec) -> list[Any]:
    """This rank's model chunks (one per virtual pipeline stage), weights equal at every setting."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel

    config, chunks = setting.transformer_config(), []
    for stage in range(setting.vpp or 1):
        virtual = stage if setting.vpp else None
        at = dict(ignore_virtual=False, vp_stage=virtual)
        model = GPTModel(
            config,
            spec(config),
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            position_embedding_type=setting.positions,  # type: ignore[arg-type]
            pre_process=parallel_state.is_pipeline_first_stage(**at),
            post_process=parallel_state.is_pipeline_last_stage(**at),
            share_embeddings_and_output_weights=setting.tied,
            mtp_block_spec=mtp_block(config, spec, virtual),
            vp_stage=virtual,
        )
        chunks.append(model)
    return chunks


def mtp_block(config: Any, spec: Callable[[Any], Any], vp_stage: int | None) -> Any:
    """Multi-token prediction with the same kind of layer, where the config asks for it."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    if not config.mtp_num_layers:
        return None
    return get_gpt_mtp_block_spec(
        config, spec(config), use_transformer_engine=False, vp_stage=vp_stage
    )


def hybrid_chunks(setting: Setting, spec: Callable[[Any], Any], pattern: str) -> list[Any]:
    """A HybridModel (0.19) or MambaModel (0.16), whole, with the layers of `pattern`."""
    options = dict(
        vocab_size=VOCABULARY, max_sequence_length=SEQUENCE, position_embedding_type="rope"
    )
    config = setting.transformer_config()
    try:
        from megatron.core.models.hybrid.hybrid_model import HybridModel
    except ImportError:
        from megatron.core.models.mamba.mamba_model import MambaModel

        return [MambaModel(config, spec(config), hybrid_override_pattern=pattern, **options)]
    return [HybridModel(config, spec(config), hybrid_layer_pattern=pattern, **options)]


class Trainer:
    """Megatron's DDP, optimizer and pipeline schedule around the chunks of a model."""

    def __init__(
        self,
        setting: Setting,
        chunks: list[Any],
        read: Callable[[Setting, int], Iterator[Any]] | None = None,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        self.batches, self.forward_step = read or batches, forward or forward_step
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        self.setting, config = setting, chunks[0].config
        if setting.bf16:
            chunks = [Float16Module(config, chunk) for chunk in chunks]
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=setting.distributed_optimizer,
            overlap_grad_reduce=setting.overlap_grad_reduce,
        )
        self.model = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
        optimizer_config = OptimizerConfig(
            optimizer="adam",
            lr=setting.lr,
            adam_eps=setting.adam_eps,
            clip_grad=setting.clip_grad,
            bf16=setting.bf16,
            use_distributed_optimizer=setting.distributed_optimizer,
            params_dtype=config.params_dtype,
        )
        self.optimizer = get_megatron_optimizer(optimizer_config, self.model)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        if setting.overlap_grad_reduce:
            (config.no_sync_func,) = (chunk.no_sync for chunk in self.model)

    def forward_backward(self, step: int) -> float:
        """Gradients of one global batch; its mean loss, equal on all ranks of the last stage."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        own = self.setting.batch // parallel_state.get_data_parallel_world_size()
        data = [self.batches(self.setting, step) for _ in self.model]
        reports = get_forward_backward_func()(
            forward_step_func=self.forward_step,
            data_iterator=data if self.setting.vpp else data[0],
            model=self.model if self.setting.vpp else self.model[0],
            num_microbatches=own // self.setting.micro_batch,
            seq_length=SEQUENCE,
            micro_batch_size=self.setting.micro_batch,
            decoder_seq_length=SEQUENCE,
        )
        total = torch.zeros(2)
        for report in reports:  # empty on all but the last pipeline stage
            total += report["loss"]
        dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
        return (total[0] / total[1]).item()

    def step(self, step: int) -> tuple[float, float]:
        """One step of training: (loss, gradient norm)."""
        loss = self.forward_backward(step)
        updated, grad_norm, _ = self.optimizer.step()
        assert updated
        return loss, float(grad_norm)

    def train(self, steps: int) -> list[tuple[float, float]]:
        return [self.step(step) for step in range(steps)]


def tokens_of(step: int, batch: int) -> torch.Tensor:
    """[batch, SEQUENCE + 1]: every token is said twice, so that there is something to learn."""
    tokens = torch.randint(
        0, VOCABULARY, (batch, SEQUENCE + 1), generator=torch.Generator().manual_seed(step + 1)
    )
    tokens[:, 1::2] = tokens[:, 0:-1:2]
    return tokens


def batches(setting: Setting, step: int) -> Iterator[dict[str, torch.Tensor]]:
    """This data-parallel rank's micro-batches, context-parallel ranks cut."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_data_parallel_world_size()
    own = setting.batch // ranks
    start = parallel_state.get_data_parallel_rank() * own
    for rows in tokens_of(step, setting.batch)[start : start + own].split(setting.micro_batch):
        batch = {
            "tokens": rows[:, :-1],
            "labels": rows[:, 1:],
            "position_ids": torch.arange(SEQUENCE).expand(len(rows), -1),
        }
        yield {name: zigzag(tensor, 1) for name, tensor in batch.items()}


def zigzag(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Megatron's order: rank r of P has chunks r and 2P - 1 - r of 2P."""
    from megatron.core import parallel_state

    ranks, rank = (
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_context_parallel_rank(),
    )
    if ranks == 1:
        return tensor
    chunks = tensor.chunk(2 * ranks, dim)
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], dim)


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any) -> tuple[Any, Any]:
    from megatron.core import parallel_state

    batch = next(data)
    more = {}
    if getattr(getattr(model, "config", None), "mtp_num_layers", None):  # or a function around one
        mask = torch.ones(1, SEQUENCE)
        mask[:, UNPREDICTED] = 0
        more["loss_mask"] = zigzag(mask, 1)
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], **more)

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        total, count = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int)
        report = torch.stack([total.detach(), count.float()])
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(report, group=group)
        return total, count, {"loss": report}

    return losses, loss
