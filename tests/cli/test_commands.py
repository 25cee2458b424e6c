"""The subcommands themselves on a tiny random model: one through the real command line, the rest in this process."""

from __future__ import annotations

import json
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from torch import Tensor
from typer.testing import CliRunner, Result

from legato.__main__ import app
from legato.cli.faults import FAULTS
from legato.ops.gemm import linear_bf16
from legato.ops.op import Implementation
from tests.cli.command_line import started
from tests.tiny import tiny_checkpoint
from tests.tiny_text import VOCABULARY, save_text_files


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    tiny_checkpoint(folder, vocab_size=VOCABULARY, index_head_dim=128)
    save_text_files(folder)
    return str(folder)


def invoke(*arguments: str, stdin: str = "") -> Result:
    """The command in this process, where torch has been imported already."""
    return CliRunner().invoke(app, arguments, input=stdin)


def ran(*arguments: str, stdin: str = "") -> Result:
    result = invoke(*arguments, stdin=stdin)
    assert result.exit_code == 0, (result.exception, result.stderr)
    return result


def test_generate_prints_text_and_speed_apart(model: str) -> None:
    """Text alone on stdout, the same with and without drafts, from an argument and from stdin."""
    arguments = ("generate", "-m", model, "-t", "0", "--max-tokens", "24", "--ignore-eos")
    drafted = started(*arguments, "The user is")
    assert drafted.returncode == 0, drafted.stderr
    assert drafted.stdout.startswith("The user is")
    assert re.search(r"24 tokens, [\d.]+ tokens/s, accept length \d\.\d\d", drafted.stderr)
    plain = ran(*arguments, "--num-drafts", "0", "-", stdin="The user is")
    assert plain.stdout == drafted.stdout
    assert "accept length 1.00" in plain.stderr


def test_generate_as_json_in_a_batch(model: str) -> None:
    result = ran(
        "generate", "-m", model, "--seed", "1", "--max-tokens", "5", "--ignore-eos", "--output", "json", "a", "b c"
    )
    completions = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(completions) == 2
    assert all(completion["finish_reason"] == "length" for completion in completions)
    assert all(len(completion["token_ids"]) == 5 for completion in completions)


def test_generate_prints_every_prompt_of_a_batch(model: str) -> None:
    shown = ran("generate", "-m", model, "--max-tokens", "3", "--ignore-eos", "one", "two").stdout
    assert shown.startswith("one") and "\n\ntwo" in shown


def test_unknown_ops_are_refused(model: str) -> None:
    result = invoke("generate", "-m", model, "--op", "atend=reference", "x")
    assert isinstance(result.exception, FAULTS) and "attend" in str(result.exception)


def test_generate_runs_what_op_names(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--op linear_bf16=cutedsl`: every product of the model is the implementation that the file of that name attached, on
    weights as stored. The package is not needed for that: the reference stands in for its kernel."""
    name, shapes = "legato.ops.gemm.cutedsl", set[tuple[int, int]]()

    def counted(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
        shapes.add((weight.shape[0], weight.shape[1]))
        return linear_bf16.reference(x, weight, residual)

    stand_in = ModuleType(name)
    stand_in.__spec__ = ModuleSpec(name, None)
    monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setitem(linear_bf16.implementations, "cutedsl", Implementation("cutedsl", counted))
    arguments = ("generate", "-m", model, "-t", "0", "--max-tokens", "4", "--ignore-eos", "one")
    shown = ran(*arguments, "--op", "linear_bf16=cutedsl").stdout
    assert len(shapes) > 3, "first product, output, experts' shared weights, head"
    shapes.clear()
    assert ran(*arguments).stdout == shown and not shapes


def test_chat_answers_resets_and_leaves(model: str) -> None:
    spoken = "Hi\n/what\n/reset\n\nWrite <|user|> f\n/exit\nnever\n"
    result = ran("chat", "-m", model, "-t", "0", "--max-tokens", "8", stdin=spoken)
    assert len(re.findall(r"\d+ tokens, ", result.stdout)) == 2
    assert "/reset forgets" in result.stdout


def test_chat_ends_with_its_input(model: str) -> None:
    result = ran("chat", "-m", model, "--no-thinking", "--max-tokens", "4", "--system", "Be brief.", stdin="Hi\n")
    assert re.search(r"\d tokens", result.stdout)


def test_plan_says_what_fits_and_what_does_not(model: str) -> None:
    assert "GPU" in ran("plan", model).stdout
    refused = invoke("plan", model, "--gpus", "1", "--gpu-memory", "0.001")
    assert refused.exit_code == 2 and "cannot run" in refused.stdout


def test_quantize_writes_a_checkpoint_that_generates(model: str, tmp_path: Path) -> None:
    destination = str(tmp_path / "fp8")
    result = ran("quantize", model, destination, "-f", "fp8")
    assert "relative error" in result.stdout
    assert isinstance(invoke("quantize", model, destination, "-f", "fp8").exception, FAULTS)
    assert ran("quantize", model, destination, "-f", "fp8", "--replace", "--shard-size", "0.5").exit_code == 0
    assert len(list((tmp_path / "fp8").glob("*.safetensors"))) > 1
    assert ran("generate", "-m", destination, "--max-tokens", "3", "x").stdout.startswith("x")


def test_generate_takes_every_parameter(model: str, tmp_path: Path) -> None:
    """One batch with most of them: samples of each prompt, bias, bans, penalties, log-probabilities, settings of the engine."""
    result = ran(
        "generate", "-m", model, "--max-tokens", "6", "--min-tokens", "6", "-n", "2", "--seed", "3", "--output", "json",
        "--logprobs", "1", "--presence-penalty", "0.5", "--frequency-penalty", "0.5", "--repetition-penalty", "1.1",
        "--logit-bias", "40=-100", "--logit-bias", "41=50", "--bad-token-id", "41", "--allowed-token-id", "41",
        "--allowed-token-id", "42", "--stop-token-id", "7", "--prompt-logprobs", "0", "--max-running", "2", "--max-waiting", "9",
        "--chunk-tokens", "16", "--cache-tokens", "256", "--context", "64", "--host-tokens", "128", "--score-budget", "2",
        "--verify-speculation", "1", "--overlap", "on", "a", "b",
    )  # fmt: skip
    completions = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(completions) == 4
    assert all(completion["token_ids"] == [42] * 6 for completion in completions), "all but one token are banned"
    assert all(len(completion["logprobs"]) == 6 for completion in completions)
    assert "index scores: 2 MiB budget, tiles of 4,096 rows at context 64" in result.stderr


def test_a_grammar_from_a_file_and_samples_as_text(model: str, tmp_path: Path) -> None:
    file = tmp_path / "expression"
    file.write_text("(ab|cd){2}")
    arguments = ("generate", "-m", model, "-n", "2", "--seed", "5", "--max-tokens", "40")
    for given in (f"@{file}", "(ab|cd){2}"):
        result = ran(*arguments, "--regex", given, "x")
        texts = result.stdout.split("\n\n")[:-1]
        assert len(texts) == 2 and all(re.fullmatch("x(ab|cd){2}", text) for text in texts)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--logit-bias", "5"), "logit_bias: must look like 15=-2.5, got '5'"),
        (("--regex", "@/no/such/file"), "regex: cannot read /no/such/file"),
        (("--regex", "a", "--json-schema", "{}"), "cannot be combined"),
        (("--host-tokens", "64", "--no-prefix-cache"), "host_tokens 64 needs the prefix cache"),
        (("--score-budget", "0"), "score_bytes must be at least one MiB"),
        (("--min-tokens", "5", "--max-tokens", "4"), "min_tokens: 5 is more than max_tokens"),
    ],
)
def test_flags_that_cannot_be_honoured(model: str, arguments: tuple[str, ...], words: str) -> None:
    result = invoke("generate", "-m", model, *arguments, "x")
    assert isinstance(result.exception, FAULTS) and words in str(result.exception)
