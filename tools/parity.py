"""Do two devices (or two settings) give the same greedy tokens? Runs real prompts on one, and compares two such runs.

A token that differs counts as equal only at a near-tie: where the two best logits of the first run lie within the stated bound.
Every such flip is listed with its margin; what follows a flip in the same text is not compared.

    python tools/parity.py run --device cpu --out cpu.json
    python tools/parity.py run --device cuda --out cuda.json
    python tools/parity.py compare cpu.json cuda.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from legato.checkpoints import HELD_OUT
from legato.config import CacheConfig, Config, ExecutionConfig, ScheduleConfig
from legato.llm import LLM
from legato.types import SamplingParams

NEAR_TIE = 1e-3
"""Bound on the margin of the two best logits, in nats."""


def run(arguments: argparse.Namespace) -> None:
    """Generates and writes tokens and margins, one list per prompt."""
    config = Config(
        cache=CacheConfig(latent=arguments.latent),
        execution=ExecutionConfig(device=arguments.device, dtype=arguments.dtype),
        schedule=ScheduleConfig(max_running=arguments.batch),
    )
    llm = LLM(arguments.model, config=config, num_drafts=arguments.drafts)
    prompts = [json.loads(line)["text"] for line in arguments.prompts.read_text().splitlines()]
    ids = [llm.encode(prompt) for prompt in prompts][: arguments.count]
    # Texts that cross index_topk and page edges: the first ones are prefixed with the ones before them.
    for n in range(min(4, len(ids) - 1)):
        ids[n] = tuple(token for part in ids[n : n + 4] for token in part)
    params = SamplingParams(max_tokens=arguments.tokens, temperature=0.0, logprobs=2, ignore_eos=True)
    started = time.perf_counter()
    completions = llm.generate(ids, params)
    stats = llm.stats
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if arguments.device.startswith("cuda") else platform.processor(),
        "torch": torch.__version__,
        "settings": {k: str(v) for k, v in vars(arguments).items() if k not in ("call", "out")},
        "seconds": time.perf_counter() - started,
        "accept_length": stats.accept_length,
        "prompt_tokens": [completion.prompt_tokens for completion in completions],
        "tokens": [completion.token_ids for completion in completions],
        "margins": [
            [entry.top[0][1] - entry.top[1][1] for entry in completion.logprobs or ()] for completion in completions
        ],
    }
    arguments.out.write_text(json.dumps(report))
    print(f"{report['device']}: {stats.emitted_tokens} tokens, accept length {stats.accept_length:.2f}")


def compare(arguments: argparse.Namespace) -> int:
    """Prints every first difference with its margin; fails unless each is a near-tie."""
    first, second = (json.loads(path.read_text()) for path in (arguments.first, arguments.second))
    compared = flips = wrong = 0
    for prompt, (ours, theirs, margins) in enumerate(
        zip(first["tokens"], second["tokens"], first["margins"], strict=True)
    ):
        same = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), len(ours))
        compared += same
        if same < len(ours):
            near = margins[same] <= NEAR_TIE
            flips, wrong = flips + near, wrong + (not near)
            kind = "near-tie" if near else "DIFFERENT"
            print(
                f"prompt {prompt}, token {same}: {ours[same]} against {theirs[same]}, margin {margins[same]:.2e}: {kind}"
            )
    tightest = min(min(margins) for margins in first["margins"])
    print(
        f"{compared} tokens equal, {flips} near-ties (margin <= {NEAR_TIE}), {wrong} different; smallest margin {tightest:.2e}"
    )
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--model", default=None)
    runner.add_argument("--device", default="cpu")
    runner.add_argument("--dtype", default="float32")
    runner.add_argument("--latent", default="bfloat16")
    runner.add_argument("--drafts", type=int, default=5)
    runner.add_argument("--batch", type=int, default=16)
    runner.add_argument("--count", type=int, default=12)
    runner.add_argument("--tokens", type=int, default=64)
    runner.add_argument("--prompts", type=Path, default=HELD_OUT)
    runner.add_argument("--out", type=Path, required=True)
    runner.set_defaults(call=run)
    comparer = commands.add_parser("compare")
    comparer.add_argument("first", type=Path)
    comparer.add_argument("second", type=Path)
    comparer.set_defaults(call=compare)
    arguments = parser.parse_args()
    return arguments.call(arguments) or 0


if __name__ == "__main__":
    sys.exit(main())
