"""Faults that a user can put right, through the real command line: quick, one message on stderr, exit code 2, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from legato.cli import preflight
from legato.cli.faults import FAULTS
from legato.config import Config
from tests.tiny import tiny_config
from tests.tiny_text import VOCABULARY, save_text_files

LIMIT_SECONDS = 5


def legato(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own, as a user does."""
    return subprocess.run(
        [sys.executable, "-m", "legato", *arguments],
        input=stdin, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "200", **environment},
    )  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint without tensors: what is refused here is refused before they are read."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(tiny_config(vocab_size=VOCABULARY)))
    save_text_files(folder)
    return folder


def refused(*arguments: str, **environment: str) -> str:
    """Runs a command that must be refused; returns the message."""
    start = time.perf_counter()
    result = legato(*arguments, **environment)
    seconds = time.perf_counter() - start
    assert result.returncode == 2, (result.stdout, result.stderr)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr and result.stderr.strip()
    assert seconds < LIMIT_SECONDS * (1 + os.getloadavg()[0] / (os.cpu_count() or 1)), f"took {seconds:.1f} s"
    return result.stderr


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
    ],
    ids=" ".join,
)
def test_wrong_flags(arguments: list[str], words: list[str]) -> None:
    message = refused(*arguments)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    "command",
    [("generate", "-m", "{}", "x"), ("chat", "-m", "{}"), ("plan", "{}"), ("quantize", "{}", "out", "-f", "fp8")],
)
@pytest.mark.parametrize("unknown", ["no-such-folder", "/no/such/folder", "x" * 300, "no such/hub id"])
def test_unknown_model(command: tuple[str, ...], unknown: str) -> None:
    message = refused(*(part.format(unknown) for part in command))
    assert unknown in message and "hub id of the form owner/name" in message


def test_unreachable_hub(tmp_path: Path) -> None:
    message = refused("generate", "-m", "no/such-model", "x", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
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
        ({"config.json": b"\xff\xfe"}, ["config.json", "readable"]),
    ],
    ids=str,
)
def test_damaged_folder(change: dict[str, Any], words: list[str], model: Path) -> None:
    for name, content in change.items():
        (model / name).unlink()
        if content is not None:
            (model / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    message = refused("generate", "--model", str(model), "x")
    assert all(word in message for word in words), message


def test_no_tensors(model: Path) -> None:
    assert legato("generate", "--model", str(model), "x").returncode == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_folder(model: Path) -> None:
    model.chmod(0)
    try:
        assert "ermission" in refused("generate", "--model", str(model), "x")
    finally:
        model.chmod(0o755)


def test_what_cannot_be_read_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same without file permissions, which do not bind root."""

    def denied(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", denied)
    with pytest.raises(FAULTS, match=r"config\.json: .*Permission denied"):
        preflight.check(Config(model=str(model)))


def test_folder_that_is_a_file(model: Path) -> None:
    assert "a file" in refused("plan", str(model / "config.json"))


def test_too_long_a_context(model: Path) -> None:
    assert "longer than" in refused("generate", "--model", str(model), "--context", "999999999", "x")
    message = refused(
        "generate", "--model", str(model), "--context", "8", "one two three four five six seven eight nine"
    )
    assert "the context of 8" in message and "tokens" in message


def test_no_chat_template(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    assert "cannot chat" in refused("chat", "--model", str(model))


def test_template_argument_that_is_not_read(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert "enable_thinking" in refused("chat", "--model", str(model), "--no-thinking")


def test_help_and_version_are_instant() -> None:
    assert legato("--version").stdout.startswith("legato ")
    assert "generate" in legato("--help").stdout
