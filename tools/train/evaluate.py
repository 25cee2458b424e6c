"""Measures a trained checkpoint: held-out loss dense and sparse, expert use, draft agreement, accept length.

Owns the replay that turns a continuation into accept lengths. A greedy continuation is replayed exactly: a draft is
accepted while it equals the continuation's own token. For sampled continuations the same replay is the one-hot rule (a
draft d is accepted with the target's probability of d). Called by hand:

    python tools/train/evaluate.py --model OUT/bf16 --data DIR/tokens --tokenizer DIR/tokenizer --out metrics.json
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import model as model_module
import numpy as np
import torch
import torch.nn.functional as F
from decode import generate
from export import read_checkpoint
from model import Model, ModelConfig, Runner, linear
from pretokenize import IDS
from tokenizers import Tokenizer
from torch import Tensor

MOST_DRAFTS = 7
CONTINUATION = 256


@torch.no_grad()
def draft_matches(model: Model, rows: Tensor, dtype: torch.dtype, attention: str, steps: int = MOST_DRAFTS) -> Tensor:
    """match [B, S, steps]: whether the draft of step s at row i equals token i + 2 + s (false past the end)."""
    width = rows.shape[1]
    length = -(-width // 128) * 128
    padded = F.pad(rows, (0, length - width + 16))
    out = []
    for part in padded.split(64):
        runner = Runner(model, part.shape[0], length, True, None, True, dtype, attention)
        trunk, _ = runner.trunk(part[:, :length])
        drafts, _, _, _ = runner.mtp_chain(trunk.hidden, part, steps)
        found = [linear(g, model.lm_head).argmax(-1).view(-1, length) == part[:, 2 + s : 2 + s + length]
                 for s, g in enumerate(drafts)]
        out.append(torch.stack(found, -1)[:, :width])
    match = torch.cat(out)
    beyond = torch.arange(width, device=rows.device)[:, None] + 2 + torch.arange(steps, device=rows.device) >= width
    return match & ~beyond


def replay(match: np.ndarray, start: int, end: int, drafts: int) -> tuple[int, int]:
    """(tokens, rounds) of speculative decoding from `start` committed tokens to `end`, K = drafts; full rounds only."""
    n, tokens, rounds = start + 1, 0, 0  # the first new token comes from the prompt's own forward
    while n + drafts + 1 <= end:
        accepted = 0
        while accepted < drafts and match[n - 2, accepted]:
            accepted += 1
        tokens, rounds, n = tokens + accepted + 1, rounds + 1, n + accepted + 1
    return tokens, rounds


def mean_length(counts: list[tuple[int, int]]) -> float:
    """Accept length: all tokens over all rounds."""
    return round(sum(t for t, _ in counts) / max(1, sum(n for _, n in counts)), 4)


def distinct_share(tokens: list[int], n: int = 4) -> float:
    """Different n-grams over all n-grams."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / max(1, len(grams))


@torch.no_grad()
def held_out(model: Model, stream: np.ndarray, total_bytes: int, dtype: torch.dtype, attention: str,
             windows: int, length: int) -> dict[str, Any]:
    """Loss of consecutive windows of the held-out documents, dense and sparse; expert use; draft agreement by position."""
    device = model.norm.device
    count = min(windows, (len(stream) - 16) // length)
    tokens = torch.from_numpy(stream[: count * length + 16].astype(np.int64)).to(device)
    parts = torch.stack([tokens[i * length : (i + 1) * length + 16] for i in range(count)])
    labels = parts[:, 1 : length + 1].clone()
    parts[:, 0], parts[:, 1] = IDS["[gMASK]"], IDS["<sop>"]
    sums, tail = {"dense": 0.0, "sparse": 0.0}, {"dense": 0.0, "sparse": 0.0}
    loads: list[Tensor] | None = None
    agree, right = np.zeros(MOST_DRAFTS), np.zeros(MOST_DRAFTS)
    for part, label in zip(parts.split(8), labels.split(8), strict=True):
        size = part.shape[0]
        for kind in sums:
            runner = Runner(model, size, length, kind == "sparse", None, True, dtype, attention)
            trunk, _ = runner.trunk(part[:, :length])
            logits = linear(trunk.hidden, model.lm_head).float()
            losses = F.cross_entropy(logits, label.flatten(), reduction="none").view(size, length)
            sums[kind] += float(losses[:, 1:].double().sum())
            tail[kind] += float(losses[:, -(length // 4) :].double().mean(1).sum()) / count
        best = logits.argmax(-1).view(size, length)
        loads = trunk.loads if loads is None else [a + b for a, b in zip(loads, trunk.loads, strict=True)]
        drafts, _, _, _ = runner.mtp_chain(trunk.hidden, part, MOST_DRAFTS)
        for s, g in enumerate(drafts):
            guess = linear(g, model.lm_head).argmax(-1).view(size, length)
            agree[s] += float((guess[:, : length - 1 - s] == best[:, 1 + s :]).double().mean(1).sum()) / count
            right[s] += float((guess == part[:, 2 + s : 2 + s + length]).double().mean(1).sum()) / count
    rows = count * (length - 1)
    bytes_per_token = total_bytes / (len(stream) - 3 * int((stream == IDS["[gMASK]"]).sum()))
    result: dict[str, Any] = {"windows": count, "length": length, "bytes_per_token": round(bytes_per_token, 3)}
    for kind, value in sums.items():
        result[f"{kind}_loss"] = round(value / rows, 4)
        result[f"{kind}_bits_per_byte"] = round(value / rows / math.log(2) / bytes_per_token, 4)
        result[f"{kind}_loss_last_quarter"] = round(tail[kind], 4)
    result["sparse_over_dense"] = round(sums["sparse"] / sums["dense"], 4)
    result["expert_share"] = [[round(float(x), 3) for x in load / load.sum()] for load in loads or []]
    result["draft_equals_target_argmax"] = [round(float(x), 4) for x in agree]
    result["draft_equals_text"] = [round(float(x), 4) for x in right]
    return result


def fake_nvfp4(weight: Tensor) -> Tensor:
    """A matrix rounded to NVFP4 and back: groups of 16, e4m3 block scales, one global scale amax / (6 * 448)."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=weight.device)
    blocks = weight.float().unflatten(-1, (-1, 16))
    whole = blocks.abs().amax() / (6 * 448)
    scale = (blocks.abs().amax(-1, keepdim=True) / 6 / whole).to(torch.float8_e4m3fn).float() * whole
    ratio = blocks / scale.clamp(min=1e-12)
    nearest = torch.bucketize(ratio.abs(), (grid[1:] + grid[:-1]) / 2)
    return (grid[nearest] * ratio.sign() * scale).flatten(-2).to(weight.dtype)


@torch.no_grad()
def quantise_experts(model: Model) -> None:
    """Rounds the routed experts of the target layers to NVFP4 in place, as the shipped files hold them."""
    for layer in model.moe_layers()[:-1]:
        for name in ("experts_gate", "experts_up", "experts_down"):
            stack = getattr(layer, name)
            stack.copy_(torch.stack([fake_nvfp4(w) for w in stack]))


def text_of(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    """Decoded ids, special tokens included."""
    return tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def acceptance(model: Model, prompts: dict[str, list[list[int]]], tokenizer: Tokenizer, dtype: torch.dtype,
               attention: str, samples: int) -> dict[str, Any]:
    """Accept lengths at K = 1..7, greedy and at temperature 1, with distinct-4-gram shares; a few texts."""
    flat = [p for group in prompts.values() for p in group]
    sampled = torch.tensor([0.0] * len(flat) + [1.0] * len(flat), device=model.norm.device)
    rows = generate(model, flat + flat, CONTINUATION, sampled, dtype)
    match, result = draft_matches(model, rows, dtype, attention).cpu().numpy(), {}
    host, ends = rows.cpu().numpy(), {IDS[t] for t in ("<|endoftext|>", "<|user|>", "<|observation|>")}
    for kind, base in (("greedy", 0), ("temperature_1", len(flat))):
        spans = []
        for i, prompt in enumerate(flat):
            start, end = len(prompt), len(prompt) + CONTINUATION
            stops = [j for j in range(start, end) if int(host[base + i, j]) in ends]
            spans.append((base + i, start, stops[0] + 1 if stops else end))
        share = [distinct_share(host[r, a:b].tolist()) for r, a, b in spans if b - a >= 32]
        entry: dict[str, Any] = {"distinct_4gram_share": round(float(np.mean(share)), 4),
                                 "continuations_under_half_distinct": round(float(np.mean([x < 0.5 for x in share])), 4),
                                 "mean_tokens": round(float(np.mean([b - a for _, a, b in spans])), 1)}
        for k in range(1, MOST_DRAFTS + 1):
            entry[f"accept_length_k{k}"] = mean_length([replay(match[r], a, b, k) for r, a, b in spans])
        varied = [s for s in spans if s[2] - s[1] >= 32 and distinct_share(host[s[0], s[1] : s[2]].tolist()) >= 0.5]
        entry["accept_length_k5_without_loops"] = mean_length([replay(match[r], a, b, 5) for r, a, b in varied])
        by_length, at = {}, 0
        for length, group in prompts.items():
            by_length[length] = mean_length([replay(match[r], a, b, 5) for r, a, b in spans[at : at + len(group)]])
            at += len(group)
        entry["accept_length_k5_by_prompt_tokens"] = by_length
        step = max(1, len(spans) // max(1, samples))
        entry["samples"] = [{"prompt_end": text_of(tokenizer, host[r, max(0, a - 64) : a]),
                             "text": text_of(tokenizer, host[r, a:b])} for r, a, b in spans[::step]]
        result[kind] = entry
    return result


def fixed_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """A few prompts whose greedy continuation a person can judge: plain code and chat."""
    code = ["def fibonacci(n):", "import os\nimport sys\n\n\ndef main():\n", "class Stack:\n    \"\"\"A simple stack.\"\"\"\n"]
    off, on = "<|assistant|><think></think>", "<|assistant|><think>"
    effort = "<|system|>Reasoning Effort: Max"
    chat = [f"<|user|>Hello{off}", f"{effort}<|user|>Write a Python function `add(a, b)`: add two numbers.{on}",
            f"<|user|>Write a Python function `is_prime`: return True if n is a prime number.{off}"]
    return [tokenizer.encode(t).ids for t in code + chat]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with BF16 safetensors")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=200)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=50, help="prompts of each length")
    parser.add_argument("--attention", choices=("flex", "sdpa"), default="sdpa")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model_module.compile_enabled = False
    model = Model(ModelConfig()).to(device)
    read_checkpoint(model, args.model)
    tokenizer = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json"))
    stored = np.load(args.data / "heldout.npz")
    metrics: dict[str, Any] = {"held_out": held_out(model, stored["tokens"], int(stored["bytes"]), dtype, args.attention,
                                                    args.windows, args.length)}
    args.out.write_text(json.dumps(metrics, indent=1) + "\n")
    prompts = {k: v[: args.prompts] for k, v in json.loads((args.data / "prompts.json").read_text()).items()}
    metrics["acceptance"] = acceptance(model, prompts, tokenizer, dtype, args.attention, samples=8)
    fixed = fixed_prompts(tokenizer)
    rows = generate(model, fixed, 128, torch.zeros(len(fixed), device=device), dtype)
    metrics["fixed_prompts"] = [tokenizer.decode(r[: len(p) + 128].tolist(), skip_special_tokens=False)
                                for p, r in zip(fixed, rows, strict=True)]
    quantise_experts(model)
    nvfp4 = held_out(model, stored["tokens"], int(stored["bytes"]), dtype, args.attention, args.windows, args.length)
    metrics["held_out_nvfp4_experts"] = {k: v for k, v in nvfp4.items() if "loss" in k or "bits" in k}
    args.out.write_text(json.dumps(metrics, indent=1) + "\n")
    print(json.dumps(metrics["held_out_nvfp4_experts"]))
    print(json.dumps(metrics["held_out"]))
    print(json.dumps({k: {n: x for n, x in v.items() if n != "samples"} for k, v in metrics["acceptance"].items()}))
    print("\n=====\n".join(metrics["fixed_prompts"]))


if __name__ == "__main__":
    main()
