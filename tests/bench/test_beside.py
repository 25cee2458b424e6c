"""`legato bench slice --prefill --beside` at toy sizes on the CPU: an engine's own iterations, and where they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from legato.__main__ import app
from legato.bench.beside import Beside, measure_beside
from legato.bench.share import drawn, first_layers
from legato.bench.steady import Work
from legato.cli.prefill import prompt_beside
from legato.config import ConfigError
from legato.model.spec import ModelSpec
from legato.parallel import Mesh
from tests.tiny import tiny_checkpoint, tiny_config

CPU = torch.device("cpu")


def test_every_layer_of_every_chunk_runs_between_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.bench.beside.ALONE", 4)
    tiny = first_layers(ModelSpec.from_config(tiny_config(index_head_dim=128), name="tiny"), 3)
    share = drawn(tiny, Mesh(0, 2), None, CPU, torch.float32)
    beside, work = Beside(150, 64, 2.0), Work(2, 10, 1, 1, None, "auto", {})
    figure = measure_beside(share, beside, work, CPU)
    went = [(turn.plan.extends[0].start, layer) for turn in figure.turns for layer in turn.plan.layers or range(4)]
    assert went == [(start, layer) for start in (0, 64, 128) for layer in range(4)], "3 layers and what is behind them"
    assert all(len(turn.plan.decodes) == 2 and turn.seconds > 0 for turn in figure.turns)
    assert figure.turns[0].expected is None, "of the first nothing is known"
    line = figure.fields(share, beside, work, {"format": "bf16"})
    assert line["iterations"] == len(figure.turns) and line["chunk_tokens"] == 64
    assert 0 < line["times_median"] <= line["times_p90"] <= line["times_p99"] <= line["times_most"]
    assert line["worst"][0]["us"] == 1e6 * max(turn.seconds for turn in figure.turns)
    assert 0 < figure.alone < figure.first_token
    json.dumps(line)


def test_short_prompts_find_what_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.bench.beside.ALONE", 4)
    tiny = first_layers(ModelSpec.from_config(tiny_config(index_head_dim=128), name="tiny"), 3)
    share = drawn(tiny, Mesh(0, 2), None, CPU, torch.float32)
    beside, work = Beside(7, 64, 2.0, cached=128), Work(1, 10, 1, 1, None, "auto", {})
    figure = measure_beside(share, beside, work, CPU)
    assert len(figure.first_tokens) == 5 and min(figure.first_tokens) > 0
    assert {(turn.plan.extends[0].start, len(turn.plan.extends[0].tokens)) for turn in figure.turns} == {(128, 7)}
    line = figure.fields(share, beside, work, {})
    assert (line["new_tokens"], line["cached_tokens"], line["first_tokens_s"]) == (7, 128, list(figure.first_tokens))


def test_one_prompt() -> None:
    assert prompt_beside("80K", None, None) == Beside(81920, None, 2.0)
    assert prompt_beside("64@8K", None, 3.0) == Beside(64, None, 3.0, 8192)
    with pytest.raises(ConfigError, match="--beside"):
        prompt_beside("1K,2K", None, None)


def test_without_a_prompt_it_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "slice", "--device", "cpu", "--beside", "1"])
    assert result.exit_code != 0 and "--prefill" in result.output + str(result.exception)


def test_fewer_than_none_are_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "slice", "--device", "cpu", "--prefill", "8K", "--beside", "-1"])
    assert result.exit_code != 0 and "--beside must be at least 0" in result.output + str(result.exception)


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.bench.beside.ALONE", 4)
    path = tmp_path / "beside.jsonl"
    flags = ["bench", "slice", "--device", "cpu", "--dummy", "--tp", "2", "--num-drafts", "1", "--context", "8"]
    flags += ["--prefill", "40", "--chunk", "20", "--beside", "1", "--json", str(path)]
    model = str(tiny_checkpoint(tmp_path / "model", "nvfp4", index_head_dim=128))
    result = CliRunner().invoke(app, [*flags, model])
    assert result.exit_code == 0, result.output
    assert (
        "40 tokens in chunks of 20 beside 1 request of 8 tokens" in result.output
        and "first token after" in result.output
    )
    assert json.loads(path.read_text())["new_tokens"] == 40
