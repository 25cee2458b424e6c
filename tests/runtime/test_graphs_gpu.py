"""Decoding as CUDA graphs on the shipped checkpoint: the tokens of the CPU, nothing that waits, nothing that grows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from legato.bench.trace import Trace, figures
from legato.schedule import Request
from legato.types import SamplingParams
from tests.runtime.on_gpu import GREEDY, PROMPTS, SAMPLED, engine, flips, prompts, run, taken

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 5, 7])
def test_greedy_tokens_are_those_of_the_cpu(num_drafts: int):
    assert len(flips(run(engine(num_drafts=num_drafts), PROMPTS, GREEDY), "float32")) <= 1


def test_greedy_tokens_in_bfloat16_leave_at_near_ties_only():
    flips(run(engine(dtype="bfloat16"), PROMPTS, GREEDY), "bfloat16")


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_neither_graphs_nor_overlap_change_a_token(params: SamplingParams, dtype: str):
    # paced prompts are cut by measured times, and in bfloat16 a row's bits may depend on how many rows of prompts there are
    served = engine(dtype=dtype, slowdown=0.0)
    graphs = run(served, PROMPTS, params)
    served.flush_cache()
    assert run(served, PROMPTS, params) == graphs, "the same seeds give the same tokens again"
    assert run(engine(dtype=dtype, graphs=False, slowdown=0.0), PROMPTS, params) == graphs
    if dtype == "float32":  # in bfloat16 a row's bits may depend on how many rows of prompts there are, as they do here
        assert run(engine(dtype=dtype, overlap=False), PROMPTS, params) == graphs


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_do_not_depend_on_batch_mates(params: SamplingParams):
    served = engine()
    together = run(served, PROMPTS, params)
    alone = [run(served, [text], params, 1000 + index)[0] for index, text in enumerate(PROMPTS)]
    assert alone == together


def test_the_steady_state_never_waits_and_takes_no_memory():
    served = engine(dtype="bfloat16")
    served.submit(Request("r", PROMPTS[0], SamplingParams(max_tokens=7000, temperature=0.0), (), 0))
    for _ in range(12):  # until every letter of the prompt's iterations has been read
        served.turn()
    turns, before = 0, taken()
    torch.cuda.set_sync_debug_mode("error")
    try:
        while turns < 1000 and served.has_work:
            served.turn()
            turns += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert turns == 1000
    assert taken() == before


def test_prompts_among_decoding_requests_wait_for_nothing_either():
    served = engine(dtype="bfloat16")
    run(served, PROMPTS, GREEDY)
    served.flush_cache()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(served, PROMPTS, GREEDY)
        run(served, PROMPTS, SAMPLED)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_call_of_the_driver_waits():
    served = engine(dtype="bfloat16")
    served.submit(Request("r", PROMPTS[0], SamplingParams(max_tokens=4000, temperature=0.0), (), 0))
    for _ in range(8):
        served.turn()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(60):
            served.turn()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    trace = Trace.of(profile.profiler.kineto_results.events())
    # The profiler itself waits once when it stops.
    assert sum(trace.waits().values()) <= 2, trace.waits()
    assert not trace.allocations(), trace.allocations()
    found = figures(trace)
    print(found, trace.copies())
    assert found.num_iterations >= 55


def test_two_hundred_requests_with_aborts_leave_nothing_behind():
    served = engine(dtype="bfloat16")
    drawn = random.Random(1)
    run(served, PROMPTS, GREEDY)
    served.flush_cache()
    served.turn()
    before, allocated = served.gauges, torch.cuda.memory_allocated()
    waiting = {f"q{index}": text for index, text in enumerate(prompts(200, seed=2, longest=400))}
    running: dict[str, int] = {}
    ended = 0
    while waiting or served.has_work:
        while waiting and len(running) < 24 and drawn.random() < 0.5:
            name, text = waiting.popitem()
            params = replace(GREEDY if drawn.random() < 0.5 else SAMPLED, max_tokens=drawn.randrange(1, 60))
            served.submit(Request(name, text, params, (), drawn.randrange(1 << 40)))
            running[name] = 0
        if running and drawn.random() < 0.1:
            served.abort(drawn.choice(list(running)))
        for progress in served.turn():
            if progress.finish_reason is not None:
                del running[progress.request_id]
                ended += 1
    assert ended == 200
    served.flush_cache()
    served.turn()
    assert served.gauges == before
    assert torch.cuda.memory_allocated() == allocated
