"""Two torchrun agents as two nodes, in network namespaces: one is cut off, and when it is back, or
another in its place, the run goes on by itself. Needs root and iproute2."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("jsonargparse")
from tests.examples.small_run import SMALL, layout
from tests.examples.test_training import losses, train
from tests.faults.killing import broken_checkpoints
from tests.faults.launching import Agent, agents, end
from tests.support.pool import run_ranks

pytestmark = pytest.mark.megatron

MINUTES = float(os.environ.get("FAULT_MINUTES", "0.4"))  # that a collective may take
OPTIONS = [
    *SMALL, *layout(ulysses=2), "--evaluation.interval=0", "--checkpoint.interval=4",
    "--batch.global_batch_size=4", "--logging.plot=false", "--training.train_iters=24",
    "--model.num_layers=2", f"--parallel.distributed_timeout_minutes={MINUTES}",
]  # fmt: skip


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_networks() -> Iterator[list[str]]:
    """Namespaces ulysses-a (10.77.7.1) and ulysses-b (10.77.7.2), joined by a cable."""
    names = ["ulysses-a", "ulysses-b"]
    for name in names:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "cable",
           "netns", names[1])  # fmt: skip
        for number, name in enumerate(names, 1):
            ip("-n", name, "addr", "add", f"10.77.7.{number}/24", "dev", "cable")
            plug(name, "up")
            ip("-n", name, "link", "set", "lo", "up")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', error)}")
    try:
        yield names
    finally:
        for name in names:
            ip("netns", "del", name)


def plug(name: str, state: str) -> None:
    ip("-n", name, "link", "set", "cable", state)


def start(node: int, name: str, log: Path, *options: str) -> Agent:
    """Node 0 or 1 of the run, in the network namespace `name`."""
    return Agent(
        ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d",
         "--rdzv-id=two-nodes", "--rdzv-endpoint=10.77.7.1:29500",
         f"--local-addr=10.77.7.{node + 1}", f"--rdzv-conf=is_host={node == 0}",
         "examples/pretrain_gpt.py",
         *OPTIONS, *options],
        log,
        prefix=["ip", "netns", "exec", name],
        GLOO_SOCKET_IFNAME="cable", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )  # fmt: skip


@pytest.mark.parametrize("back", ["node", "cable"] if "FAULT_SEEDS" in os.environ else ["node"])
def test_a_node_that_is_cut_off(small_data: Path, tmp_path: Path, back: str) -> None:
    argv = [f"--data.path=[{small_data}/text]", f"--output={tmp_path}/run"]
    checkpoints = tmp_path / "run/checkpoints"
    with two_networks() as names, ExitStack() as stack:
        nodes = [start(n, names[n], tmp_path / f"{n}.log", *argv) for n in (0, 1)]
        stack.enter_context(agents(*nodes))
        nodes[0].wait_for("iteration        5/", 300)
        plug(names[1], "down")
        for rank, node in enumerate(nodes):
            node.wait_for(f"error: rank {rank}: ", 60 * 5)
        said = [node.output() for node in nodes]
        print(*(line for text in said for line in text.splitlines() if "error: " in line), sep="\n")
        assert "error: rank 0: rank 1 is missing: killed, or on a node that is gone or" in said[0]
        assert "groups of rank 0 that cannot go on: ulysses [0, 1]" in said[0]
        assert "error: rank 1: the rendezvous store at 10.77.7.1:" in said[1]
        assert "does not answer: this node is cut off from it" in said[1]
        assert broken_checkpoints(checkpoints) == []
        reached = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())

        if back == "node":
            end(nodes[1])
            nodes[1] = start(1, names[1], tmp_path / "other.log", *argv)
            stack.enter_context(agents(nodes[1]))
        plug(names[1], "up")
        assert [node.wait(60 * 5) for node in nodes] == [0, 0], nodes[0].output()
        went_on = f"continuing after iteration {reached}, "  # says rank 0, on either node
        assert any(went_on in node.output() for node in nodes)
    records = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    alone = [*OPTIONS, *argv, f"--output={tmp_path}/alone"]
    assert losses(records) == losses(run_ranks(2, train, alone, timeout=120)[0])
