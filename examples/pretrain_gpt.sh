#!/usr/bin/env bash
# Starts examples/pretrain_gpt.py with torchrun, after checking what can be checked without it.
#
#   examples/pretrain_gpt.sh --config examples/configs/cpu_demo.yaml --training.train_iters 500
#
# Without --config (and without CONFIG=...) it runs the demonstration on the GPUs it finds, or on
# 8 CPU processes. Every option of pretrain_gpt.py may follow.
#
# Several nodes: run it on each of them, with the same options and
#   NNODES=4 NODE_RANK=0..3 MASTER_ADDR=first-node [MASTER_PORT=29500]
# Ranks per node: NPROC_PER_NODE (default: the number of GPUs, or what the config needs).
# MAX_RESTARTS=3: after a rank has died, torchrun starts all again; they go on from the checkpoint.
# SIGTERM: every rank finishes its step, a checkpoint is written, the exit code is 0.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Without it, ranks that are started again (MAX_RESTARTS) meet the addresses of the last attempt.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
python=${PYTHON:-python}
options=("$@")

config=${CONFIG:-}
for option in "$@"; do
    case $option in --config | --config=*) config=given ;; esac
done
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ -z "$config" ]; then
    options=(--config "$here/configs/cpu_demo.yaml" "${options[@]}")
    if [ "$gpus" -gt 0 ]; then # the same model on 1, 2, 4 or 8 GPUs of this node
        tensor=1 pipeline=1 ulysses=1 output=runs/gpu_demo
        if [ "$gpus" -ge 2 ]; then ulysses=2; fi
        if [ "$gpus" -ge 4 ]; then tensor=2; fi
        if [ "$gpus" -ge 8 ]; then pipeline=2; fi
        NPROC_PER_NODE=${NPROC_PER_NODE:-$((tensor * pipeline * ulysses))}
        options=("${options[@]:0:2}" --device cuda --output "$output" --training.precision bf16
            --parallel.tensor_model_parallel_size "$tensor"
            --parallel.pipeline_model_parallel_size "$pipeline"
            --parallel.ulysses_parallel_size "$ulysses" "${options[@]:2}")
    fi
elif [ "$config" != given ]; then
    options=(--config "$config" "${options[@]}")
fi

nodes=${NNODES:-1}
processes=${NPROC_PER_NODE:-}
if [ -z "$processes" ]; then # ask the config where there is no GPU to count
    processes=$("$python" "$here/pretrain_gpt.py" --processes "$gpus" "${options[@]}")
fi
"$python" "$here/pretrain_gpt.py" --check $((nodes * processes)) "${options[@]}" >/dev/null

"$python" -m torch.distributed.run --nnodes "$nodes" --nproc-per-node "$processes" \
    --node-rank "${NODE_RANK:-0}" --max-restarts "${MAX_RESTARTS:-0}" \
    $(if [ "$nodes" -gt 1 ]; then
        echo --rdzv-backend c10d --rdzv-id "${JOB_ID:-ulysses}" \
            --rdzv-endpoint "${MASTER_ADDR:?first node}:${MASTER_PORT:-29500}"
    else echo --standalone; fi) \
    "$here/pretrain_gpt.py" "${options[@]}" &
torchrun=$!

# torchrun would kill its ranks 30 s after a SIGTERM; asked directly, they take the time they need.
trap 'pkill -TERM -P "$torchrun" || true' TERM
trap 'kill -INT "$torchrun" 2>/dev/null || true' INT
status=0
wait "$torchrun" || status=$?
while kill -0 "$torchrun" 2>/dev/null; do # a signal ends `wait`, not torchrun
    status=0
    wait "$torchrun" || status=$?
done
exit "$status"
