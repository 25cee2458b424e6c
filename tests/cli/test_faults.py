"""Faults that a user can put right, through the real command line: quick, one message on stderr, exit code 2, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from legato.__main__ import app
from legato.cli import preflight
from legato.cli.faults import FAULTS
from legato.config import Config
from tests.cli.command_line import CommandLine, Ran, started
from tests.processes import processor_seconds_of_children
from tests.tiny import tiny_config
from tests.tiny_text import VOCABULARY, save_text_files

LIMIT_SECONDS = 5


@pytest.fixture(scope="module")
def legato() -> Iterator[CommandLine]:
    command = CommandLine()
    yield command
    command.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint without tensors: what is refused here is refused before they are read."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config(vocab_size=VOCABULARY)))
    save_text_files(folder)
    return folder


def fault_of(result: Ran) -> str:
    """The message of a command that must be refused before torch is imported."""
    assert result.returncode == 2, (result.stdout, result.stderr)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr and result.stderr.strip()
    assert not result.imported_torch, "a fault comes before torch"
    return result.stderr


def test_a_fault_is_quick() -> None:
    """From a user's finger to the message, interpreter and all: a wrong word, and a model that is not there."""
    for arguments in (("genrate", "x"), ("generate", "-m", "/no/such/folder", "x")):
        before = processor_seconds_of_children()
        fault_of(started(*arguments))
        seconds = processor_seconds_of_children() - before
        assert seconds < LIMIT_SECONDS, f"took {seconds:.1f} s of processor time: on a quiet machine, of the clock too"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "--temprature", "0", "x"], ["--temprature", "--temperature"]),
        (["generate", "--max-token", "3", "x"], ["--max-token", "--max-tokens"]),
        (["chat", "--no-thinkin"], ["--no-thinkin", "--no-thinking"]),
        (["genrate", "x"], ["genrate", "generate"]),
        (["generate"], ["PROMPT"]),
        (["generate", "--temperature", "warm", "x"], ["--temperature"]),
        (["generate", "--temperature=-1", "x"], ["temperature", "between 0 and 100"]),
        (["generate", "--top-p", "0", "x"], ["top_p", "above 0"]),
        (["generate", "--max-tokens", "0", "x"], ["max_tokens", "at least 1"]),
        (["generate", "--stop", "", "x"], ["stop", "empty string"]),
        (["generate", "--num-drafts", "8", "x"], ["num_drafts", "between 0 and 7"]),
        (["generate", "--op", "attend", "x"], ["--op", "attend=reference"]),
        (["generate", "--output", "xml", "x"], ["--output", "json"]),
        (["quantize", "a", "b", "-f", "fp9"], ["--format", "nvfp4"]),
        (["generate", "--tp", "3", "x"], ["num_attention_heads", "4 attention heads", "3 ranks"]),
    ],
    ids=" ".join,
)
def test_wrong_flags(legato: CommandLine, arguments: list[str], words: list[str]) -> None:
    message = fault_of(legato(*arguments))
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "command",
    [("generate", "-m", "{}", "x"), ("chat", "-m", "{}"), ("plan", "{}"), ("quantize", "{}", "out", "-f", "fp8")],
)
@pytest.mark.parametrize("unknown", ["no-such-folder", "/no/such/folder", "x" * 300, "no such/hub id"])
def test_unknown_model(legato: CommandLine, command: tuple[str, ...], unknown: str) -> None:
    message = fault_of(legato(*(part.format(unknown) for part in command)))
    assert unknown in message and "hub id of the form owner/name" in message


def test_unreachable_hub(tmp_path: Path) -> None:
    """The hub's library reads its settings when it is imported."""
    message = fault_of(started("generate", "-m", "no/such-model", "x", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path)))
    assert "no/such-model" in message and "give a folder" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config.json": None}, ["config.json", "no such file"]),
        ({"config.json": "{"}, ["config.json", "JSON"]),
        ({"config.json": '{"model_type": "deepseek_v32"}'}, ["deepseek_v32"]),
        ({"config.json": "{}"}, ["model_type"]),
        ({"tokenizer.json": None}, ["tokenizer.json", "no such file"]),
        ({"tokenizer.json": "{"}, ["tokenizer.json", "JSON"]),
        ({"config.json": b"\xff\xfe"}, ["config.json", "in UTF-8"]),
    ],
    ids=str,
)
def test_damaged_folder(legato: CommandLine, change: dict[str, Any], words: list[str], model: Path) -> None:
    for name, content in change.items():
        (model / name).unlink()
        if content is not None:
            (model / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    message = fault_of(legato("generate", "--model", str(model), "x"))
    assert all(word in message for word in words), message


def test_no_tensors(model: Path) -> None:
    """Found behind the import of torch: in this process, which has it."""
    result = CliRunner().invoke(app, ["generate", "--model", str(model), "x"])
    assert isinstance(result.exception, FAULTS) and "safetensors" in str(result.exception)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_full_disk() -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "legato", "--version"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.returncode == 2
    assert result.stderr == "legato: not everything could be written: [Errno 28] No space left on device\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_folder(legato: CommandLine, model: Path) -> None:
    model.chmod(0)
    try:
        assert "ermission" in fault_of(legato("generate", "--model", str(model), "x"))
    finally:
        model.chmod(0o755)


def test_what_cannot_be_read_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without file permissions, which do not bind root."""

    def denied(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(FAULTS, match=r"config\.json: .*Permission denied"):
        preflight.check(Config(model=str(model)))


def test_folder_that_is_a_file(legato: CommandLine, model: Path) -> None:
    assert "a file" in fault_of(legato("plan", str(model / "config.json")))


def test_too_long_a_context(legato: CommandLine, model: Path) -> None:
    assert "longer than" in fault_of(legato("generate", "--model", str(model), "--context", "999999999", "x"))
    words = "one two three four five six seven eight nine"
    message = fault_of(legato("generate", "--model", str(model), "--context", "8", words))
    assert "maximum context length is 8 tokens" in message


def test_no_chat_template(legato: CommandLine, model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    assert "cannot chat" in fault_of(legato("chat", "--model", str(model)))


def test_template_argument_that_is_not_read(legato: CommandLine, model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert "enable_thinking" in fault_of(legato("chat", "--model", str(model), "--no-thinking"))


def test_help_and_version_need_no_torch(legato: CommandLine) -> None:
    version, shown = legato("--version"), legato("--help")
    assert version.stdout.startswith("legato ") and "generate" in shown.stdout
    assert not version.imported_torch and not shown.imported_torch
