"""Every setting of the HTTP server, as a frozen tree of small values with their defaults and checks.

Owns what `legato serve` can be told about names, keys, limits and replies; the engine's own settings are in `legato.config`.
Knows nothing of HTTP libraries. The command line fills it, `server.app` and the routes read it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

from legato.types import ParameterError, SamplingParams

ReasoningFields = Literal["both", "reasoning_content", "reasoning"]
MetricsDialect = Literal["vllm", "sglang"]

REASONING_PARSERS = ("glm45", "glm47", "auto")
TOOL_PARSERS = ("glm47", "glm45", "auto")
GENERATION_CONFIG = "generation_config.json"


class SettingsError(ValueError):
    """A server setting that cannot work. The message names the setting, its value and what is allowed."""


def _check(is_right: bool, name: str, value: object, what: str) -> None:
    if not is_right:
        raise SettingsError(f"{name}: {what}, got {value!r}")


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the server listens. With `certfile` it speaks TLS. `port` 0: any free one."""

    host: str = "127.0.0.1"
    port: int = 30000
    certfile: str | None = None
    keyfile: str | None = None

    def __post_init__(self) -> None:
        _check(0 <= self.port <= 65535, "port", self.port, "must be between 0 and 65535")
        _check(self.keyfile is None or self.certfile is not None, "keyfile", self.keyfile, "needs a certfile too")


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask. Without `api_keys` everyone may.

    Attributes:
        api_keys: any of them opens every route but /health, /ready, /ping and (unless `guard_metrics`) /metrics.
        guard_metrics: whether /metrics needs a key too.
        cors_origins: origins whose pages may read replies; `("*",)`: all. Empty: only the server's own page.
        admin_routes: whether /flush_cache, /abort_request, /start_profile and /stop_profile exist.
        profile_folder: where profiles may be written; `None`: profiling is refused.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    guard_metrics: bool = False
    cors_origins: tuple[str, ...] = ()
    admin_routes: bool = True
    profile_folder: str | None = None

    def __post_init__(self) -> None:
        if any(not key.isascii() or not key.strip() for key in self.api_keys):
            raise SettingsError("api_keys: a key must be non-empty ASCII text")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a single request may cost before it reaches the engine.

    Attributes:
        max_body_bytes: longer bodies are refused with 413 while they arrive.
        max_header_bytes: more header bytes are refused with 431.
        body_timeout_s: longest pause within a body; then it is refused with 408. Headers that take longer are cut off.
        max_stop_strings, max_stop_length: stop strings of one request, and characters of each.
        max_choices: `n` times the number of prompts.
        timeout_s: most seconds that a request may take; `None`: no limit. A request may ask for less.
    """

    max_body_bytes: int = 32 * 1024 * 1024
    max_header_bytes: int = 64 * 1024
    body_timeout_s: float = 30.0
    max_stop_strings: int = 16
    max_stop_length: int = 1024
    max_choices: int = 128
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_body_bytes", "max_header_bytes", "max_stop_strings", "max_stop_length", "max_choices"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        _check(0 < self.body_timeout_s < math.inf, "body_timeout_s", self.body_timeout_s, "must be above 0")
        if self.timeout_s is not None:
            _check(0 < self.timeout_s < math.inf, "timeout_s", self.timeout_s, "must be above 0")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that leaves these fields out is sampled with: the checkpoint's recommendation, else no filter at all."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def of_checkpoint(cls, text: Callable[[str], str | None]) -> SamplingDefaults:
        """From `generation_config.json`; `text` gives a file's content or `None`. `do_sample: false` there means greedy.

        Raises:
            SettingsError: the file is no JSON object, or a value is out of range.
        """
        source = text(GENERATION_CONFIG)
        if source is None:
            return cls()
        try:
            stated: Any = json.loads(source)
        except ValueError as error:
            raise SettingsError(f"{GENERATION_CONFIG}: is not valid JSON ({error})") from error
        if not isinstance(stated, dict):
            raise SettingsError(f"{GENERATION_CONFIG}: holds a JSON {type(stated).__name__}, not an object")
        found = cast(dict[str, Any], stated)
        values = {name: found[name] for name in cls.__slots__ if found.get(name) is not None}
        defaults = replace(cls(), **values)
        try:
            SamplingParams(**asdict(defaults))
        except ParameterError as error:
            raise SettingsError(f"{GENERATION_CONFIG}: {error}") from error
        return replace(defaults, temperature=0.0) if found.get("do_sample") is False else defaults


@dataclass(frozen=True, slots=True)
class Replies:
    """How answers look. `reasoning_fields`: in which fields of OpenAI messages the reasoning stands. `keepalive_s`: seconds of
    silence after which a stream sends a comment; `None`: never."""

    reasoning_fields: ReasoningFields = "both"
    keepalive_s: float | None = 15.0
    reasoning_parser: str = "auto"
    tool_parser: str = "auto"

    def __post_init__(self) -> None:
        allowed = get_args(ReasoningFields)
        _check(self.reasoning_fields in allowed, "reasoning_fields", self.reasoning_fields, f"must be one of {allowed}")
        _check(
            self.reasoning_parser in REASONING_PARSERS,
            "reasoning_parser",
            self.reasoning_parser,
            f"must be one of {REASONING_PARSERS}: Legato serves the GLM family",
        )
        _check(
            self.tool_parser in TOOL_PARSERS,
            "tool_parser",
            self.tool_parser,
            f"must be one of {TOOL_PARSERS}: Legato serves the GLM family",
        )
        if self.keepalive_s is not None:
            _check(self.keepalive_s > 0, "keepalive_s", self.keepalive_s, "must be above 0")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Everything that `legato serve` can be told about its HTTP side.

    Attributes:
        model_names: what the model is called; the first is what replies say. Empty: the checkpoint's own name.
        any_model: whether a request may name any model (as coding agents with fixed names do), on every route.
        drain_s: most seconds that running requests get to finish after SIGTERM.
        metrics_compat: whose metric names /metrics repeats Legato's numbers under.
    """

    model_names: tuple[str, ...] = ()
    any_model: bool = False
    listen: Listen = Listen()
    access: Access = Access()
    limits: RequestLimits = RequestLimits()
    defaults: SamplingDefaults = SamplingDefaults()
    replies: Replies = Replies()
    drain_s: float = 30.0
    metrics_compat: frozenset[MetricsDialect] = frozenset()

    def __post_init__(self) -> None:
        _check(self.drain_s >= 0, "drain_s", self.drain_s, "cannot be negative")
        _check(all(self.model_names), "model_names", self.model_names, "a name cannot be empty")
        unknown = set(self.metrics_compat) - set(get_args(MetricsDialect))
        _check(not unknown, "metrics_compat", sorted(unknown), f"must be among {get_args(MetricsDialect)}")


def name_of(model: str) -> str:
    """What a model is called whose name nobody chose: a hub id as it is, a directory by its last part (paths are not told)."""
    path = Path(model).expanduser()
    return Path(os.path.abspath(path)).name if path.is_absolute() or model.startswith(".") or path.is_dir() else model
