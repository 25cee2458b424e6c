"""What `legato serve` refuses before anything loads, once it has the port: what the checkpoint's small files say.

Owns what is known before the engine starts. Imports neither torch nor an HTTP library. Called by `legato.__main__`.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from pathlib import Path

from legato.checkpoints import SMALL
from legato.cli import preflight
from legato.cli.serve_flags import LogFormat, LogLevel, ServeFlags
from legato.cli.serve_port import Taken
from legato.config import Config
from legato.server.settings import SamplingDefaults, ServerSettings, name_of

SHIPPED_NAME = "legato-small"


@dataclass(frozen=True, slots=True)
class Logs:
    """How the server logs."""

    format: LogFormat
    level: LogLevel
    access: bool


@dataclass(frozen=True, slots=True)
class Prepared:
    """What can be started: every setting, and the socket that holds the port."""

    config: Config
    settings: ServerSettings
    logs: Logs
    sock: socket.socket
    traces: str | None = None


def prepare(flags: ServeFlags, taken: Taken) -> Prepared:
    """Checks the checkpoint's small files; gives the port back where they cannot be served.

    Raises:
        ConfigError, SettingsError, CheckpointError, SpecError, TokenizerError: each says what is wrong and what to do.
    """
    settings, sock = taken.settings, taken.sock
    try:
        checked = preflight.check(taken.config)
        SamplingDefaults.of_checkpoint(checked.source.text)
    except BaseException:
        sock.close()
        raise
    if not settings.model_names:
        settings = replace(settings, model_names=(served_name(taken.config.model),))
    logs = Logs(flags.log_format, flags.log_level, flags.access_log)
    return Prepared(checked.config, settings, logs, sock, flags.otlp_traces_endpoint)


def served_name(model: str | None) -> str:
    """What a model is called that was given no name: as `name_of` has it, but the checkpoint of the package."""
    if model is None or Path(model).expanduser().absolute() == SMALL:
        return SHIPPED_NAME
    return name_of(model)
