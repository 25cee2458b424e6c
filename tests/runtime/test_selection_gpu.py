"""Texts longer than a selection, on a GPU in bfloat16: the Hopper kernels of the selection and of attention give the reference's
tokens. Every token is compared, and each that differs is printed with its margin."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from legato.checkpoints import HELD_OUT
from legato.engine.loop import Engine
from legato.schedule import Request
from legato.server.text.tokenizer import Tokenizer
from tests.runtime import on_gpu
from tests.runtime.on_gpu import CHECKPOINT, GREEDY, LENGTH, NEAR_TIE, SPEC, engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

KERNELS = {"attention_inputs", "index_scores", "sparse_mla", "top_k"}
LENGTHS = (300, 450, 700, 1000, 1500)
Text = tuple[int, ...]


@cache
def texts() -> tuple[Text, ...]:
    """Held-out texts one after the other, cut to lengths beyond `index_topk`."""
    tokenizer = Tokenizer.open(CHECKPOINT.source)
    parts = [tokenizer.encode_prompt(json.loads(line)["text"]) for line in HELD_OUT.read_text().splitlines()]
    starts = range(0, len(parts), len(parts) // len(LENGTHS))
    joined = [[token for part in parts[start:] + parts[:start] for token in part] for start in starts]
    return tuple(tuple(tokens[:length]) for tokens, length in zip(joined, LENGTHS, strict=False))


@cache
def reference(latent: str) -> tuple[list[list[int]], list[list[float]]]:
    """Greedy tokens behind `texts()` by the reference ops in float32, on the GPU but without any kernel of ours, and the margin
    between the best two logits at each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_gpu, "targets_of", lambda device: ())
        served = engine(num_drafts=0, latent=latent, graphs=False)
        tokens: list[list[int]] = [[] for _ in texts()]
        margins: list[list[float]] = [[] for _ in texts()]
        for index, text in enumerate(texts()):
            served.submit(Request(str(index), text, replace(GREEDY, logprobs=2), (), 0))
        while served.has_work:
            for progress in served.turn():
                index = int(progress.request_id)
                tokens[index] += progress.tokens
                margins[index] += [entry.top[0][1] - entry.top[1][1] for entry in progress.logprobs or ()]
    return tokens, margins


def differing(served: Engine, prompts: Sequence[Text], expected: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    """(text, position, token found) of each of the expected tokens that does not follow the text and the expected ones before
    it: behind a difference the text goes on with what was expected."""
    found: list[tuple[int, int, int]] = []
    begins = dict.fromkeys(range(len(prompts)), 0)
    while begins:
        made: dict[int, list[int]] = {text: [] for text in begins}
        for text, begin in begins.items():
            so_far = prompts[text] + tuple(expected[text][:begin])
            served.submit(Request(str(text), so_far, replace(GREEDY, max_tokens=LENGTH - begin), (), 0))
        while served.has_work:
            for progress in served.turn():
                made[int(progress.request_id)] += progress.tokens
        waiting: dict[int, int] = {}
        for text, begin in begins.items():
            pairs = enumerate(zip(made[text], expected[text][begin:], strict=True), begin)
            at, token = next(((at, one) for at, (one, other) in pairs if one != other), (LENGTH, 0))
            if at < LENGTH:
                found.append((text, at, token))
            if at + 1 < LENGTH:
                waiting[text] = at + 1
        begins = waiting
    return sorted(found)


@pytest.mark.parametrize("latent", ["bfloat16", "fp8"])
def test_every_token_behind_long_texts_is_the_references_or_a_near_tie(latent: str):
    prompts = texts()
    assert all(len(prompt) > SPEC.index_topk for prompt in prompts)
    expected, margins = reference(latent)
    served = engine(dtype="bfloat16", latent=latent)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        found = differing(served, prompts, expected)
    assert {event.key for event in profile.key_averages()} >= KERNELS
    for text, at, token in found:
        line = {"latent": latent, "prompt_tokens": len(prompts[text]), "position": at}
        line |= {"token": token, "reference": expected[text][at], "margin": round(margins[text][at], 5)}
        print(json.dumps(line))
    close = sum(margin < NEAR_TIE["bfloat16"] for of_one in margins for margin in of_one)
    total = sum(map(len, expected))
    print(json.dumps({"latent": latent, "tokens": total, "differ": len(found), "near ties": close}))
    assert all(margins[text][at] < NEAR_TIE["bfloat16"] for text, at, _ in found)


def test_attention_to_all_tokens_would_give_others(monkeypatch: pytest.MonkeyPatch):
    """What the test above would see if nothing were selected."""
    prompts = texts()
    expected, margins = reference("bfloat16")
    monkeypatch.setattr(on_gpu, "SPEC", replace(SPEC, index_topk=2 * max(LENGTHS)))
    found = differing(engine(dtype="bfloat16", num_drafts=0), prompts, expected)
    clear = [margins[text][at] for text, at, _ in found if margins[text][at] > NEAR_TIE["bfloat16"]]
    print(
        json.dumps(
            {"all tokens attended": len(found), "beyond near ties": len(clear), "largest margin": max(clear, default=0)}
        )
    )
    assert clear
