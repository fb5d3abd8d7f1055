"""Options of a pretraining run that takes a second."""

SMALL = [
    "--device=cpu", "--logging.tensorboard=false", "--checkpoint.interval=3",
    "--training.train_iters=6", "--batch.global_batch_size=8", "--batch.micro_batch_size=2",
    "--model.hidden_size=32", "--model.num_attention_heads=8", "--model.num_query_groups=4",
    "--model.seq_length=30", "--evaluation.interval=3", "--evaluation.iters=2",
    "--optimizer.lr_warmup_iters=2", "--data.split=9,1,0",
]  # fmt: skip


def layout(**sizes: int) -> list[str]:
    return [f"--parallel.{name}_parallel_size={size}" for name, size in sizes.items()]
