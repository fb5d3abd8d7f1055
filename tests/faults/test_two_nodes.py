"""Two torchrun agents as two nodes, in network namespaces; one is cut off, and the run goes on
later. Needs root and iproute2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("jsonargparse")
from tests.examples.small_run import SMALL, layout
from tests.examples.test_training import losses, train
from tests.faults.killing import broken_checkpoints
from tests.faults.launching import Agent, agents
from tests.support.pool import run_ranks

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(sys.version_info >= (3, 12), reason="does not depend on Megatron's version"),
]

MINUTES = float(os.environ.get("FAULT_MINUTES", "0.4"))  # that a collective may take
OPTIONS = [
    *SMALL, *layout(ulysses=2), "--evaluation.interval=0", "--checkpoint.interval=4",
    "--batch.global_batch_size=4", "--logging.plot=false", "--training.train_iters=24",
    f"--parallel.distributed_timeout_minutes={MINUTES}",
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


def start(names: list[str], folder: Path, attempt: str, *options: str) -> list[Agent]:
    """The same run from both nodes."""
    return [
        Agent(
            ["--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}", "--rdzv-backend=c10d",
             f"--rdzv-id={attempt}", "--rdzv-endpoint=10.77.7.1:29500",
             f"--local-addr=10.77.7.{number + 1}", f"--rdzv-conf=is_host={number == 0}",
             "examples/pretrain_gpt.py",
             *OPTIONS, *options],
            folder / f"{attempt}{number}.log",
            prefix=["ip", "netns", "exec", name],
            GLOO_SOCKET_IFNAME="cable",
        )
        for number, name in enumerate(names)
    ]  # fmt: skip


def test_a_node_that_is_cut_off(small_data: Path, tmp_path: Path) -> None:
    argv = [f"--data.path=[{small_data}/text]", f"--output={tmp_path}/run"]
    with two_networks() as names:
        first = start(names, tmp_path, "first", *argv)
        with agents(*first):
            first[0].wait_for("iteration        5/", 300)
            plug(names[1], "down")
            assert first[0].wait(60 * 5) != 0
            # Its torchrun waits for minutes on a rendezvous that does not answer; its rank ends.
            first[1].wait_for("error: rank 1: ", 60 * 5)
        said = [agent.output() for agent in first]
        print(*(line for text in said for line in text.splitlines() if "error: " in line), sep="\n")
        assert "error: rank 0: rank 1 is missing: killed, or on a node that is gone or" in said[0]
        assert "groups of rank 0 that cannot go on: ulysses [0, 1]" in said[0]
        assert "error: rank 1: the rendezvous store at 10.77.7.1:" in said[1]
        assert "does not answer: this node is cut off from it" in said[1]
        checkpoints = tmp_path / "run/checkpoints"
        assert broken_checkpoints(checkpoints) == []
        reached = int((checkpoints / "latest_checkpointed_iteration.txt").read_text())

        plug(names[1], "up")
        second = start(names, tmp_path, "second", *argv)
        with agents(*second):
            assert [agent.wait(60 * 5) for agent in second] == [0, 0], second[0].output()
        assert f"continuing after iteration {reached}, " in second[0].output()
    records = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    alone = [*OPTIONS, *argv, f"--output={tmp_path}/alone"]
    assert losses(records) == losses(run_ranks(2, train, alone, timeout=120)[0])
