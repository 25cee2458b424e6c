"""The flags of `legato serve` as one value, and how they become the settings of engine and server.

Owns names, defaults and help texts of the server's flags; the engine's are those of every subcommand. Imports neither torch nor
an HTTP library. Called by `legato.__main__`, which makes a command of `ServeFlags`, and `cli.serve`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from legato.cli import options
from legato.cli.flags import EngineFlags
from legato.config import Config, ConfigError, api_key_from_environment
from legato.server.settings import (
    Access,
    Listen,
    MetricsDialect,
    ReasoningFields,
    Replies,
    RequestLimits,
    SamplingDefaults,
    ServerSettings,
)

SERVER, ACCESS, REPLIES, LOGS = "Server options", "Access options", "Reply options", "Log options"

HELP = """Serves the OpenAI and Anthropic APIs, with a page at /.

Flags of SGLang and vLLM (--tp-size, --max-model-len, --speculative-config, ...) are understood, or refused with the reason.
Flags, port and the checkpoint's small files are checked before anything loads. SIGTERM lets running requests finish.
"""

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


def flag(panel: str, *names: str, text: str, default: bool = False) -> Any:
    """A flag in a panel of `--help`; its default is shown only where `default` says so."""
    return typer.Option(*names, help=text, rich_help_panel=panel, show_default=default)


@dataclass(frozen=True, slots=True)
class ServeFlags(EngineFlags):
    """What was given, or the default. The settings' own types check the values."""

    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Directory or hub id; the same as --model.", show_default=False),
    ] = None
    model_flag: options.Model = None
    config: Annotated[
        str | None, flag(SERVER, "--config", text="YAML file of flags (names without dashes); flags given here win.")
    ] = None
    host: Annotated[str, flag(SERVER, text="Address to listen on; 0.0.0.0 for all.", default=True)] = "127.0.0.1"
    port: Annotated[int, flag(SERVER, text="Port to listen on; 0 for any free one.", default=True)] = 30000
    served_model_name: Annotated[
        list[str] | None, flag(SERVER, text="Name of the model in requests and replies; may be repeated.")
    ] = None
    any_model: Annotated[
        bool, flag(SERVER, "--any-model", text="Accept any model name in requests, as coding agents need it.")
    ] = False
    ssl_certfile: Annotated[str | None, flag(SERVER, text="Certificate (PEM): serve TLS.")] = None
    ssl_keyfile: Annotated[str | None, flag(SERVER, text="Key of the certificate (PEM).")] = None
    request_timeout: Annotated[
        float | None, flag(SERVER, text="Most seconds that a request may take; by default any.")
    ] = None
    max_body_mb: Annotated[float, flag(SERVER, text="Longest request body, in MiB.", default=True)] = 32.0
    max_header_kb: Annotated[float, flag(SERVER, text="Most header bytes, in KiB.", default=True)] = 64.0
    drain_timeout: Annotated[
        float, flag(SERVER, text="Seconds that running requests get to finish after SIGTERM.", default=True)
    ] = 30.0
    metrics_compat: Annotated[
        list[str] | None,
        flag(SERVER, text="Also emit metrics under the names of vllm, sglang (comma-separated, may be repeated)."),
    ] = None
    profile_folder: Annotated[str | None, flag(SERVER, text="Where /start_profile may write; by default nowhere.")] = (
        None
    )
    api_key: Annotated[
        list[str] | None,
        flag(
            ACCESS, text="Key that requests must carry; may be repeated. LEGATO_API_KEY in the environment is one too."
        ),
    ] = None
    api_key_file: Annotated[
        str | None, flag(ACCESS, text="File with one key per line; unlike a flag, other users cannot see it.")
    ] = None
    guard_metrics: Annotated[bool, flag(ACCESS, "--guard-metrics", text="/metrics needs a key too.")] = False
    admin_routes: Annotated[
        bool,
        flag(
            ACCESS,
            "--admin-routes/--no-admin-routes",
            text="/flush_cache, /abort_request and the profiler.",
            default=True,
        ),
    ] = True
    cors_origin: Annotated[
        list[str] | None, flag(ACCESS, text="Origin whose pages may read replies, * for all; may be repeated.")
    ] = None
    reasoning_fields: Annotated[
        ReasoningFields, flag(REPLIES, text="Fields of a message that carry the reasoning.", default=True)
    ] = "both"
    reasoning_parser: Annotated[str, flag(REPLIES, text="auto, glm45 or glm47: all the same.", default=True)] = "auto"
    tool_parser: Annotated[str, flag(REPLIES, text="auto, glm45 or glm47: all the same.", default=True)] = "auto"
    keepalive: Annotated[
        float, flag(REPLIES, text="Seconds of silence until a stream sends a comment; 0: never.", default=True)
    ] = 15.0
    log_format: Annotated[LogFormat, flag(LOGS, text="text, or one JSON object a line.", default=True)] = "text"
    log_level: Annotated[LogLevel, flag(LOGS, text="Least severe message that is logged.", default=True)] = "info"
    access_log: Annotated[
        bool, flag(LOGS, "--access-log/--no-access-log", text="Log a line per HTTP request.", default=True)
    ] = False
    otlp_traces_endpoint: Annotated[
        str | None, flag(LOGS, text="Send OpenTelemetry traces there (OTLP over HTTP); needs the extra otel.")
    ] = None

    def engine(self) -> Config:
        """The engine's settings. Raises `ConfigError`."""
        return EngineFlags.engine(self if self.model is not None else replace(self, model=self.model_flag))

    def server(self) -> ServerSettings:
        """The server's settings, but for what the checkpoint recommends. Raises `ConfigError`, `SettingsError`."""
        keys = [*(self.api_key or []), *_keys(self.api_key_file), *api_key_from_environment()]
        listen = Listen(
            self.host, self.port, _file("--ssl-certfile", self.ssl_certfile), _file("--ssl-keyfile", self.ssl_keyfile)
        )
        return ServerSettings(
            model_names=tuple(self.served_model_name or ()),
            any_model=self.any_model,
            listen=listen,
            access=Access(
                api_keys=tuple(dict.fromkeys(keys)),
                guard_metrics=self.guard_metrics,
                cors_origins=tuple(self.cors_origin or ()),
                admin_routes=self.admin_routes,
                profile_folder=self.profile_folder,
            ),
            limits=RequestLimits(
                max_body_bytes=round(self.max_body_mb * 2**20),
                max_header_bytes=round(self.max_header_kb * 2**10),
                timeout_s=self.request_timeout,
            ),
            defaults=SamplingDefaults(),
            replies=Replies(
                reasoning_fields=self.reasoning_fields,
                keepalive_s=self.keepalive or None,
                reasoning_parser=self.reasoning_parser,
                tool_parser=self.tool_parser,
            ),
            drain_s=self.drain_timeout,
            metrics_compat=_dialects(self.metrics_compat),
        )


def _dialects(given: list[str] | None) -> frozenset[MetricsDialect]:
    """Names from `--metrics-compat vllm,sglang`; the settings refuse those that do not exist."""
    names = {name.strip() for item in given or [] for name in item.split(",")} - {""}
    return frozenset(names)  # type: ignore[arg-type]


def _keys(path: str | None) -> list[str]:
    """The keys of a file, one per line; empty lines and lines that start with # are left out."""
    if path is None:
        return []
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"--api-key-file {path}: {why}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {path}: holds no key")
    return keys


def _file(name: str, path: str | None) -> str | None:
    """The path of a file that can be read."""
    if path is None:
        return None
    try:
        with Path(path).expanduser().open("rb"):
            return str(Path(path).expanduser())
    except OSError as error:
        raise ConfigError(f"{name} {path}: {error.strerror}") from error
