"""What `legato serve` refuses first: flags, settings, certificate, the port, which is taken here.

Imports neither torch nor anything of the model, so that a flag or a port that is wrong is told at once. Called by
`legato.__main__`.
"""

from __future__ import annotations

import importlib.util
import socket
from dataclasses import dataclass

from legato.cli.serve_flags import ServeFlags
from legato.config import Config, ConfigError, from_environment
from legato.server.http.listening import check_tls, listen
from legato.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Taken:
    """Settings that agree with themselves, and the socket that holds the port."""

    config: Config
    settings: ServerSettings
    sock: socket.socket


def take(flags: ServeFlags) -> Taken:
    """Checks the flags and takes the port.

    Raises:
        ConfigError, SettingsError: each says what is wrong and what to do.
    """
    config, settings = from_environment(flags.engine()), flags.server()
    check_tls(settings.listen)
    check_traces(flags.otlp_traces_endpoint)
    return Taken(config, settings, listen(settings.listen))


def check_traces(endpoint: str | None) -> None:
    """Refuses an address for traces that is none, or traces without the libraries. Raises `ConfigError`."""
    if endpoint is None:
        return
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"--otlp-traces-endpoint must look like http://localhost:4318/v1/traces, got {endpoint}")
    if any(importlib.util.find_spec(name) is None for name in ("opentelemetry", "opentelemetry.sdk")):
        raise ConfigError("--otlp-traces-endpoint needs OpenTelemetry: pip install 'legato[otel]'")
