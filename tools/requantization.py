"""What quantising dense weights at load does to the small checkpoint: loss on held-out text, greedy tokens, accept length.

Prints and writes one JSON line per setting of `--dense-format`. The texts are the held-out prompts of the training record: their
loss is the mean over all tokens but the first of each; continuations start from the shorter ones.

    python tools/requantization.py --out requantization.jsonl
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path
from typing import Any

import torch

from legato.config import Config, ExecutionConfig, ScheduleConfig
from legato.engine.start import open_checkpoint, start
from legato.schedule import Request
from legato.types import SamplingParams

PROMPTS = Path(__file__).parent / "train" / "record" / "prompts.json.gz"


def run(
    dense_format: str, scored: list[tuple[int, ...]], continued: list[tuple[int, ...]], tokens: int
) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """One setting: its figures, and the continuations."""
    config = Config(
        schedule=ScheduleConfig(max_running=8, chunk_tokens=2048),
        execution=ExecutionConfig(dense_format=dense_format),  # type: ignore[arg-type]
    )
    engine = start(config, open_checkpoint(None)).engine
    losses: list[float] = []
    for number, prompt in enumerate(scored):
        engine.submit(Request(f"{number}", prompt, SamplingParams(max_tokens=1, prompt_logprobs=0), (), number))
    while engine.has_work:
        for progress in engine.turn():
            chunk = progress.prompt_logprobs
            losses += [] if chunk is None else [-entry.logprob for entry in chunk.logprobs]
    figures: dict[str, Any] = {"dense_format": dense_format, "loss": sum(losses) / len(losses), "scored": len(losses)}
    made: dict[str, list[int]] = {}
    for temperature in (0.0, 0.8):
        engine.reset_stats()
        for number, prompt in enumerate(continued):
            params = SamplingParams(max_tokens=tokens, temperature=temperature, ignore_eos=True)
            engine.submit(Request(f"{temperature} {number}", prompt, params, (), number))
            made[f"{temperature} {number}"] = []
        while engine.has_work:
            for progress in engine.turn():
                made[progress.request_id] += progress.tokens
        figures[f"accept_length_t{temperature:g}"] = engine.stats.accept_length
    return figures, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scored", type=int, default=40)
    parser.add_argument("--continued", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    by_length = json.loads(gzip.decompress(PROMPTS.read_bytes()))
    prompts = [tuple(ids) for some in by_length.values() for ids in some]
    short = [prompt for prompt in prompts if len(prompt) <= 256]
    scored = prompts[:: max(1, len(prompts) // arguments.scored)][: arguments.scored]
    continued = short[:: max(1, len(short) // arguments.continued)][: arguments.continued]
    before: dict[str, list[int]] = {}
    for dense_format in ("stored", "fp8"):
        began = time.perf_counter()
        figures, made = run(dense_format, scored, continued, arguments.tokens)
        before = before or made
        greedy = [name for name in made if name.startswith("0.0")]
        same = [
            next((i for i, (a, b) in enumerate(zip(made[n], before[n], strict=True)) if a != b), None) for n in greedy
        ]
        figures |= {
            "continued": len(greedy),
            "greedy_equal": sum(first is None for first in same),
            "first_difference": sorted(first for first in same if first is not None),
            "tokens": arguments.tokens,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "seconds": round(time.perf_counter() - began, 1),
        }
        print(json.dumps(figures), flush=True)
        if arguments.out:
            with arguments.out.open("a") as file:
                file.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
