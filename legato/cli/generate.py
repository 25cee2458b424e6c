"""`legato generate`: completes prompts and prints the text, then the speed and the accept length.

Owns the printing: text on stdout as it comes, everything else on stderr. Called by `legato.__main__`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console

from legato.cli.loading import load, speed
from legato.config import Config
from legato.llm import LLM
from legato.types import Completion, SamplingParams


def run(config: Config, prompts: Sequence[str], params: SamplingParams, output: str) -> None:
    """Loads the model, generates, and prints as `output` says: "text" (one prompt is streamed) or "json" (a line each)."""
    console = Console(stderr=True)
    llm = load(config, console)
    if output == "json":
        for completion in llm.generate(list(prompts), params):
            print(json.dumps(as_json(completion), ensure_ascii=False))
    elif len(prompts) == params.n == 1:
        stream(llm, prompts[0], params)
    else:
        several = [prompt for prompt in prompts for _ in range(params.n)]
        for prompt, completion in zip(several, llm.generate(list(prompts), params), strict=True):
            print(f"{prompt}{completion.text}\n")
    sys.stdout.flush()
    console.print(speed(llm.stats), style="dim", highlight=False)


def stream(llm: LLM, prompt: str, params: SamplingParams) -> None:
    """Prints the prompt and then its continuation as it is generated."""
    print(prompt, end="", flush=True)
    for delta in llm.stream(prompt, params):
        print(delta.text, end="", flush=True)
    print()


def as_json(completion: Completion) -> dict[str, Any]:
    """A completion as a JSON object; logprobs only where they were asked for."""
    fields = asdict(completion)
    return {name: value for name, value in fields.items() if value is not None}
