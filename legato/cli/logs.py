"""What the server logs and how: plain lines or JSON, with no secret and no path of this machine in either.

Owns the form of log lines, and what becomes of lines that the engine's process writes to stderr. Called by `cli.serve` once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Generator, Mapping
from typing import Any, TextIO

from legato.cli.serve_checks import Logs

FIELDS = "fields"
"""Attribute of a log record that holds named values besides the message."""


ENGINE_LINE = re.compile(r"engine: (?P<level>[A-Z]+) (?P<name>\S+): (?P<message>.*)")
"""How the engine's process writes its log records."""

STDERR = 2
"""The file descriptor that processes inherit as their standard error."""

LAST_LINES_S = 2.0
"""Seconds that what has been written gets to be logged at the end."""


class Redact(logging.Filter):
    """Puts other text in the place of secrets and paths, in messages and in tracebacks."""

    def __init__(self, replacements: Mapping[str, str]) -> None:
        super().__init__()
        # Longest first: a path that contains another must not be cut by it.
        self._replacements = sorted(
            ((old, new) for old, new in replacements.items() if old), key=lambda pair: -len(pair[0])
        )

    def filter(self, record: logging.LogRecord) -> bool:
        """Changes the record; it is always logged."""
        record.msg, record.args = self.text(record.getMessage()), None
        if record.exc_info:
            record.exc_text = self.text(logging.Formatter().formatException(record.exc_info))
            record.exc_info = None
        return True

    def text(self, text: str) -> str:
        """`text` with everything replaced."""
        for old, new in self._replacements:
            text = text.replace(old, new)
        return text


class TextLines(logging.Formatter):
    """`2026-01-31 12:00:00 warning: message field=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, with a traceback below it where there is one."""
        fields: Mapping[str, Any] = getattr(record, FIELDS, {})
        values = "".join(f" {name}={value}" for name, value in fields.items() if value is not None)
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        trace = f"\n{record.exc_text}" if record.exc_text else ""
        return f"{moment} {record.levelname.lower()}: {record.getMessage()}{values}{trace}"


class JsonLines(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger, message, the record's fields, and the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line = {
            "time": moment,
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in getattr(record, FIELDS, {}).items() if value is not None}
        if record.exc_text:
            line["traceback"] = record.exc_text
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(logs: Logs, replacements: Mapping[str, str], stream: TextIO) -> None:
    """Sends every logger's records to `stream` in the chosen form; libraries are heard from "warning" on.

    Args:
        logs: form and level.
        replacements: secrets and paths, and what stands in their place.
        stream: where lines go.
    """
    logging.raiseExceptions = False  # a reader of the log that went away must not become a log line of its own
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if logs.format == "json" else TextLines())
    handler.addFilter(Redact(replacements))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("legato").setLevel(logs.level.upper())


@contextlib.contextmanager
def stderr_as_records() -> Generator[TextIO]:
    """While it is open, lines that reach file descriptor 2 (the engine's process inherits it) become log records, so that they
    have the form and the redaction of all others. Gives the true stderr.
    """
    true = os.fdopen(os.dup(STDERR), "w", buffering=1, encoding="utf-8")
    read, write = os.pipe()
    os.dup2(write, STDERR)
    os.close(write)
    reader = threading.Thread(target=_log_lines, args=(read,), daemon=True)
    reader.start()
    try:
        yield true
    finally:
        sys.stderr.flush()
        os.dup2(true.fileno(), STDERR)
        reader.join(LAST_LINES_S)


def _log_lines(read: int) -> None:
    """Logs the lines of a pipe until all who could write to it have closed it."""
    with os.fdopen(read, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            found = ENGINE_LINE.match(line)
            level = logging.getLevelNamesMapping().get(found["level"], logging.WARNING) if found else logging.WARNING
            name = found["name"] if found else "legato.engine"
            logging.getLogger(name).log(level, "%s", found["message"] if found else line.rstrip())
