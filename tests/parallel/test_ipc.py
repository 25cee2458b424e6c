"""Ranks that are processes and write into each other's memory: what they compute, under skew, and when one does not come.

On one GPU two processes take turns of milliseconds, so that many pairs of inboxes are used at once; with two GPUs each process
has its own.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="the cuda extra is not installed")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
RANK = Path(__file__).with_name("ipc_rank.py")


def run(task: str, calls: int = 0, ranks: int = 2, lanes: int = 1) -> list[dict]:
    """What each rank printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), str(ranks), str(port), task, str(calls), str(lanes)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # No pair's call stands in another's queue, and ranks do not take each other's processors.
            env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "32", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(ranks)
    ]
    try:
        ended = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, ended, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return [json.loads(printed.splitlines()[-1]) for printed, _ in ended]


def test_sums_and_gathers_are_the_reference_s() -> None:
    assert [result["wrong"] for result in run("parity", calls=40)] == [0, 0]


def test_calls_under_skew() -> None:
    results = run("skewed", 100_000, lanes=1 if torch.cuda.device_count() > 1 else 16)
    print(results)
    assert [result["wrong"] for result in results] == [0, 0]
    assert all(result["calls"] >= 100_000 for result in results)


def test_a_graph_holds_sums_and_gathers_of_many_rows() -> None:
    assert [result["wrong"] for result in run("captured", calls=20)] == [0, 0]


def test_eight_ranks_in_one_shot_and_in_two() -> None:
    """Every other group of inboxes sums in two shots. So few groups that all of their blocks always have a place: a block of two
    shots needs a multiprocessor to itself, and while it waits for one nothing behind it is placed. With 16 groups ranks have
    waited for each other like that for ever."""
    results = run("mixed", 1_600, ranks=8, lanes=4)
    print(results)
    assert [(result["wrong"], result["parity"]) for result in results] == [(0, [0, 0])] * 8


def test_a_rank_that_never_calls_is_named() -> None:
    waiting, _ = run("absent")
    assert waiting["error"].startswith("rank 1 did not take part in time in collective 0, as rank 0 saw")
    assert waiting["nan"] and 0.4 < waiting["seconds"] < 3
