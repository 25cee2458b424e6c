"""Log lines: one JSON object each, secrets and paths replaced (in tracebacks too); progress of loading without a terminal."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from rich.console import Console

from legato.cli import logs
from legato.cli.progress import LoadingDisplay, size_of
from legato.cli.serve_checks import Logs
from legato.engine.messages import Loading


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("legato").setLevel(logging.NOTSET)
    logging.raiseExceptions = True


def written(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_json_lines_keep_fields_and_hide_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(
        Logs("json", "info", False), {"sesame": "***", "/home/anna": "~", "/home/anna/models/glm": "glm"}, sys.stderr
    )
    log = logging.getLogger("legato.some")
    log.info("key %s for %s", "sesame", "/home/anna/models/glm/x", extra={"fields": {"status": 200, "none": None}})
    log.debug("not shown")
    logging.getLogger("some.library").info("not shown")
    try:
        raise ValueError("sesame in /home/anna/x")
    except ValueError:
        log.exception("it broke")
    first, second = (json.loads(line) for line in written(capsys))
    assert first["message"] == "key *** for glm/x" and first["status"] == 200 and "none" not in first
    assert first["level"] == "info" and first["logger"] == "legato.some" and first["time"].endswith("Z")
    assert "ValueError: *** in ~/x" in second["traceback"] and second["level"] == "error"


def test_text_lines_end_with_their_fields(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(Logs("text", "warning", False), {}, sys.stderr)
    log = logging.getLogger("legato.some")
    log.info("not shown")
    log.warning("slow", extra={"fields": {"ms": 3}})
    (line,) = written(capsys)
    assert line.endswith(" warning: slow ms=3")


def test_lines_of_the_engines_process_become_records(capfd: pytest.CaptureFixture[str]) -> None:
    script = "import sys; sys.stderr.write('engine: ERROR legato.engine.x: lost /home/anna/x\\nTraceback')"
    before = os.readlink("/proc/self/fd/2")
    with logs.stderr_as_records() as stderr:
        logs.configure(Logs("json", "info", False), {"/home/anna": "~"}, stderr)
        subprocess.run([sys.executable, "-c", script], check=True)
    assert os.readlink("/proc/self/fd/2") == before
    first, second = (json.loads(line) for line in capfd.readouterr().err.splitlines())
    assert (first["level"], first["logger"], first["message"]) == ("error", "legato.engine.x", "lost ~/x")
    assert (second["level"], second["logger"], second["message"]) == ("warning", "legato.engine", "Traceback")


def test_loading_is_told_by_stage_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure(Logs("text", "info", False), {}, sys.stderr)
    display = LoadingDisplay(Console(file=io.StringIO()))
    display.show(Loading("importing"))
    for done in range(5):
        display.show(Loading(f"layer {done}", done * 10**9, 5 * 10**9))
    display.show(Loading("warm-up"))
    display.close()
    assert [line.partition("info: ")[2] for line in written(capsys)] == [
        "loading: importing", "loading: weights, 0.0 of 5.0 GB", "loading: warm-up",
    ]  # fmt: skip


def test_loading_is_a_bar_in_a_terminal() -> None:
    screen = io.StringIO()
    display = LoadingDisplay(Console(file=screen, force_terminal=True, width=100))
    display.show(Loading("importing"))
    display.show(Loading("layer 1", 3_100_000, 4_500_000))
    display.close()
    assert "weights" in screen.getvalue() and "3.1 of 4.5 MB" in screen.getvalue()
    assert size_of(3_100_000_000, 4_500_000_000) == "3.1 of 4.5 GB"
