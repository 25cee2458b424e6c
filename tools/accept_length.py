"""Accept length of the engine on the 200 held-out prompts of the small checkpoint: continuations of 256 tokens.

Prints and writes, beside the accept length, the share of distinct 4-grams and the accept length without the continuations that
loop (fewer than half of their 4-grams distinct), so that loops cannot pass for good drafts.

    python tools/accept_length.py --temperature 0 --drafts 5 --out greedy.json
    python tools/accept_length.py --temperature 1 --drafts 5 --one-hot --out one-hot.json
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from legato.config import Config, ExecutionConfig, ScheduleConfig
from legato.engine.start import open_checkpoint, start
from legato.runtime.batch import Samplers
from legato.runtime.draw import PlainDraw
from legato.runtime.rows import Rows
from legato.schedule import Request
from legato.types import SamplingParams

PROMPTS = Path(__file__).parent / "train" / "record" / "prompts.json.gz"
TOKENS = 256


def one_hot(
    self: PlainDraw, logits: Tensor, rows: Rows, samplers: Samplers, positions: Tensor, drafted: Sequence[Tensor]
) -> Tensor:
    """The draft layer's most likely token, whatever the temperature: the kind of draft that shared noise is compared with."""
    del self, rows, samplers, positions, drafted
    return logits.argmax(-1)


def distinct_share(tokens: Sequence[int]) -> float:
    """Distinct 4-grams over all 4-grams."""
    grams = [tuple(tokens[n : n + 4]) for n in range(len(tokens) - 3)]
    return len(set(grams)) / len(grams) if grams else 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--drafts", type=int, default=5)
    parser.add_argument("--draft-weights", default="stored", help="as of the engine: stored, lean, or savings by name")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each continuation")
    parser.add_argument("--one-hot", action="store_true")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.one_hot:
        PlainDraw.draft = one_hot
    by_length = json.loads(gzip.decompress(PROMPTS.read_bytes()))
    prompts = [tuple(ids) for some in by_length.values() for ids in some]
    prompts = prompts[:: max(1, len(prompts) // arguments.count)][: arguments.count]
    config = Config(
        num_drafts=arguments.drafts,
        schedule=ScheduleConfig(max_running=arguments.batch, chunk_tokens=2048),
        execution=ExecutionConfig(device=arguments.device, draft_weights=arguments.draft_weights),
    )
    checkpoint = open_checkpoint(arguments.model)
    engine = start(config, checkpoint).engine
    params = SamplingParams(max_tokens=arguments.tokens, temperature=arguments.temperature)
    tokens: dict[str, list[int]] = {}
    rounds: dict[str, int] = {}
    stop_ids = (checkpoint.config.get("eos_token_id") or [])[:8]
    for number, prompt in enumerate(prompts):
        engine.submit(Request(f"{number}", prompt, params, tuple(stop_ids), number))
        tokens[f"{number}"], rounds[f"{number}"] = [], 0
    started = time.perf_counter()
    while engine.has_work:
        for progress in engine.turn():
            rounds[progress.request_id] += bool(tokens[progress.request_id])
            tokens[progress.request_id] += progress.tokens
    shares = {name: distinct_share(some) for name, some in tokens.items()}
    plain = [name for name, share in shares.items() if share >= 0.5 and rounds[name]]

    def accept_length(names: Sequence[str]) -> float:
        emitted = sum(len(tokens[name]) - 1 for name in names)
        return emitted / max(1, sum(rounds[name] for name in names))

    report = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "temperature": arguments.temperature,
        "drafts": arguments.drafts,
        "kind": "one-hot" if arguments.one_hot else "shared noise",
        "draft_weights": arguments.draft_weights,
        "prompts": len(prompts),
        "tokens": sum(map(len, tokens.values())),
        "accept_length": accept_length([name for name in tokens if rounds[name]]),
        "accept_length_without_loops": accept_length(plain),
        "continuations_without_loops": len(plain),
        "distinct_4gram_share": sum(shares.values()) / len(shares),
        "accepted_at": engine.stats.accepted_at,
        "seconds": time.perf_counter() - started,
    }
    print(json.dumps(report))
    if arguments.out:
        arguments.out.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
