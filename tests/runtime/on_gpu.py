"""Engines of the shipped checkpoint on a GPU and on the CPU, texts for them, and how their tokens are compared.

Tokens are compared request by request up to the first that differs, which is allowed only at a near-tie: where the CPU's best two
logits are closer than what the arithmetic of the device can move them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from legato.checkpoints import SMALL
from legato.config import Config, Resolved, resolve
from legato.engine.loop import Engine
from legato.engine.start import build_engine, targets_of
from legato.model.checkpoint import Checkpoint
from legato.model.inventory import stored_spec
from legato.model.weights import GlmWeights, Residency, load_weights
from legato.ops import bind, gumbel
from legato.ops.compiled import compilations
from legato.schedule import Request
from legato.types import SamplingParams, TokenLogprob

LENGTH = 64
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.125}
"""Margins between the best two logits under which a device's rounding may choose the other one."""
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=LENGTH, temperature=0.9, top_p=0.9, top_k=50, min_p=0.02)

CHECKPOINT = Checkpoint.open(str(SMALL))
SPEC = stored_spec(CHECKPOINT)


@cache
def weights(device: str, dtype: str, targets: tuple[str, ...]) -> GlmWeights:
    """In the order that the ops of `targets` read."""
    bind(targets)
    return load_weights(CHECKPOINT, SPEC, device=device, dtype=getattr(torch, dtype), resident=Residency.DENSE)


def engine(device: str = "cuda", dtype: str = "float32", num_drafts: int = 5, **changes: object) -> Engine:
    torch.backends.cuda.matmul.allow_tf32 = False
    targets = targets_of(device)
    loaded, spec = weights(device, dtype, targets), SPEC
    bind(targets)
    if not num_drafts:
        loaded, spec = replace(loaded, mtp=None), replace(spec, has_mtp=False)
    base: Resolved = resolve(Config(), max_position=SPEC.max_position, has_mtp=True, cuda_available=device == "cuda")
    sizes = {"cache_tokens": 32768, "max_running": 8, "chunk_tokens": 128, **changes}
    settings = replace(base, dtype=dtype, num_drafts=num_drafts, **sizes)  # type: ignore[arg-type]
    return build_engine(spec, loaded, settings)


def prompts(count: int, seed: int = 0, longest: int = 300) -> list[tuple[int, ...]]:
    """Token ids in loops of their own, so that the checkpoint has something to go on with."""
    drawn = random.Random(seed)
    texts: list[tuple[int, ...]] = []
    for _ in range(count):
        phrase = [drawn.randrange(100, SPEC.vocab_size - 200) for _ in range(drawn.randrange(3, 30))]
        length = drawn.randrange(1, longest)
        texts.append(tuple((phrase * length)[:length]))
    return texts


PROMPTS = prompts(8)


def run(served: Engine, texts: Sequence[tuple[int, ...]], params: SamplingParams, seed: int = 1000) -> list[list[int]]:
    for index, text in enumerate(texts):
        served.submit(Request(f"r{index}", text, params, (), seed + index))
    tokens: dict[str, list[int]] = {f"r{index}": [] for index in range(len(texts))}
    while served.has_work:
        for progress in served.turn():
            tokens[progress.request_id] += progress.tokens
    return list(tokens.values())


@cache
def on_cpu() -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens without drafts, and the margin at each."""
    served = engine("cpu", num_drafts=0)
    torch.set_num_threads(2)  # small products: more threads wait for each other
    params = replace(GREEDY, logprobs=2)
    for index, text in enumerate(PROMPTS):
        served.submit(Request(f"r{index}", text, params, (), index))
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    margins: list[list[float]] = [[] for _ in PROMPTS]
    while served.has_work:
        for progress in served.turn():
            index = int(progress.request_id[1:])
            tokens[index] += progress.tokens
            margins[index] += [entry.top[0][1] - entry.top[1][1] for entry in progress.logprobs or ()]
    bind(targets_of("cuda"))  # as the engines on the GPU are bound
    return tokens, margins


def flips(found: Sequence[Sequence[int]], dtype: str) -> list[tuple[int, int, float]]:
    """(request, position, margin) of the first token of each request that is not the CPU's. Fails at one that is no near-tie."""
    differences: list[tuple[int, int, float]] = []
    for index, (ours, theirs, margins) in enumerate(zip(found, *on_cpu(), strict=True)):
        assert len(ours) == len(theirs)
        for position, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            if one != other:
                assert margins[position] < NEAR_TIE[dtype], f"request {index}, position {position}: {one}, CPU {other}"
                differences.append((index, position, margins[position]))
                break
    print(f"{len(differences)} of {len(found)} requests leave the CPU's tokens at a near-tie: {differences}")
    return differences


def with_margins(served: Engine, request: Request) -> tuple[list[int], list[float]]:
    """The tokens of a request that runs alone, and how close each choice was: between the best two logits, or what the draw made
    of them."""
    params = replace(request.params, logprobs=20)
    served.submit(replace(request, params=params))
    tokens: list[int] = []
    entries: list[TokenLogprob] = []
    while served.has_work:
        for progress in served.turn():
            tokens += progress.tokens
            entries += progress.logprobs or ()
    margins: list[float] = []
    for index, entry in enumerate(entries):
        values = dict(entry.top) | {entry.token_id: entry.logprob}
        if params.temperature:
            where = torch.tensor([request.seed]), torch.tensor([len(request.prompt) + index])
            noise = gumbel.reference(*where, SPEC.vocab_size)[0]
            values = {token: value / params.temperature + float(noise[token]) for token, value in values.items()}
        # What stands above the drawn token was cut off by top_k, top_p or min_p.
        chosen = values.pop(entry.token_id)
        margins.append(chosen - max((value for value in values.values() if value <= chosen), default=-math.inf))
    return tokens, margins


def taken() -> dict[str, int]:
    """What a process that is ready should take no more of."""
    return {
        "allocations": torch.cuda.memory_stats()["allocation.all.allocated"],
        "bytes": torch.cuda.memory_allocated(),
        "reserved bytes": torch.cuda.memory_reserved(),
        "kernels compiled": compilations(),
    }
