"""`legato bench slice --prefill` at toy sizes on the CPU: every chunk runs, where it says, and what cannot be is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from legato.__main__ import app
from legato.bench.prefill import Prompt, measure_prefill, prefill_fields
from legato.bench.share import drawn, first_layers
from legato.bench.steady import Work
from legato.cli.prefill import prompts
from legato.config import ConfigError
from legato.model.spec import ModelSpec
from legato.parallel import Mesh
from legato.plan import Plan
from legato.runtime.runner import Flight, Runner
from tests.tiny import tiny_config

CPU = torch.device("cpu")
WORK = Work(1, 1, 1, 1, None, "auto", {})


@pytest.fixture(scope="module")
def tiny() -> ModelSpec:
    return first_layers(ModelSpec.from_config(tiny_config(index_head_dim=128), name="tiny"), 2)


def test_a_prompt_runs_chunk_by_chunk_behind_its_cached_tokens(
    tiny: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Plan] = []
    launch = Runner.launch

    def noted(self: Runner, plan: Plan) -> Flight:
        seen.append(plan)
        return launch(self, plan)

    monkeypatch.setattr(Runner, "launch", noted)
    share = drawn(tiny, Mesh(0, 2), None, CPU, torch.float32)
    prompt = Prompt(new=20, cached=70, chunk=8, repeats=2)
    figure = measure_prefill(share, prompt, WORK, CPU)
    extends = [extend for plan in seen for extend in plan.extends]
    assert len(extends) == 3 * 3  # an untimed run and two
    assert [(extend.start, len(extend.tokens), extend.next_token is None) for extend in extends[-3:]] == [
        (70, 8, False), (78, 8, False), (86, 4, True),
    ]  # fmt: skip
    assert extends[-3].next_token == extends[-2].tokens[0]
    line = prefill_fields(share, prompt, figure, {"format": "bf16"})
    assert line["tokens_per_s"] == pytest.approx(20e6 / line["median_us"]) and line["cached_synthetic"]
    json.dumps(line)


def test_prompts_are_read() -> None:
    found = prompts("8K, 2K@128K", 512)
    assert [(prompt.new, prompt.cached, prompt.chunk) for prompt in found] == [(8192, 0, 512), (2048, 131072, 512)]
    for text in ("", "0", "8K@x", "1@2@3", "-1", "8,,9"):
        with pytest.raises(ConfigError, match="--prefill"):
            prompts(text, 512)
    with pytest.raises(ConfigError, match="--chunk"):
        prompts("8", 0)


def test_flags_that_say_nothing_of_prompts_are_refused(tmp_path: Path) -> None:
    flags = ["bench", "slice", "--device", "cpu", "--prefill", "8", "--trace", str(tmp_path)]
    result = CliRunner().invoke(app, flags)
    assert result.exit_code != 0 and "--trace" in result.output + str(result.exception)
