"""What `legato serve` refuses before anything loads: settings, certificate, port, and the checkpoint's small files.

Owns the order of these checks, quickest first. Imports neither torch nor an HTTP library. Called by `legato.__main__`.
"""

from __future__ import annotations

import importlib.util
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from legato.checkpoints import SMALL
from legato.cli import preflight
from legato.cli.serve_flags import LogFormat, LogLevel, ServeFlags
from legato.config import Config, ConfigError, from_environment
from legato.model.hub import is_hub_id
from legato.server.listening import check_tls, listen
from legato.server.settings import SamplingDefaults, ServerSettings

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


def prepare(flags: ServeFlags) -> Prepared:
    """Checks everything that needs no tensors, and takes the port.

    Raises:
        ConfigError, SettingsError, CheckpointError, SpecError, TokenizerError: each says what is wrong and what to do.
    """
    config, settings = from_environment(flags.engine()), flags.server()
    check_tls(settings.listen)
    check_traces(flags.otlp_traces_endpoint)
    sock = listen(settings.listen)
    try:
        checked = preflight.check(config)
        SamplingDefaults.of_checkpoint(checked.source.text)
    except BaseException:
        sock.close()
        raise
    if not settings.model_names:
        settings = replace(settings, model_names=(served_name(config.model),))
    logs = Logs(flags.log_format, flags.log_level, flags.access_log)
    return Prepared(checked.config, settings, logs, sock, flags.otlp_traces_endpoint)


def check_traces(endpoint: str | None) -> None:
    """Refuses an address for traces that is none, or traces without the libraries. Raises `ConfigError`."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp-traces-endpoint must look like http://localhost:4318/v1/traces, got {endpoint}")
    if any(importlib.util.find_spec(name) is None for name in ("opentelemetry", "opentelemetry.sdk")):
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'legato[otel]'")


def served_name(model: str | None) -> str:
    """What a model is called that was given no name: its hub id, or its folder's name, never a path."""
    if model is None or Path(model).expanduser().absolute() == SMALL:
        return SHIPPED_NAME
    path = Path(model).expanduser()
    return model if is_hub_id(model) and not path.is_dir() else path.absolute().name
