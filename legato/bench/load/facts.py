"""What a server says about itself: accept length and drafts over a run, from whatever it offers.

Owns the names of other engines' counters. A server that offers none is measured all the same, without accept length. Called by
`legato.bench.load.run`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec

from legato.bench.load.endpoint import Endpoint
from legato.bench.load.wire import Wire, WireError

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{([^}]*)\})?\s+([0-9.eE+-]+)", re.MULTILINE)
_DRAFTS = (
    ("legato_draft_rounds_total", "legato_accepted_tokens_total"),
    ("vllm:spec_decode_num_drafts_total", "vllm:spec_decode_num_accepted_tokens_total"),
)
"""Counters of verifications and of accepted drafts, by engine: accept length = 1 + accepted / verifications."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters at one moment, summed over labels, and SGLang's running average of the accept length, if it is there."""

    counters: Mapping[str, float] = field(default_factory=dict[str, float])
    average: float | None = None


@dataclass(frozen=True, slots=True)
class AcceptLength:
    """Tokens per verification over a run, and where that comes from. Below `source` stands what the figure covers."""

    value: float
    source: str


async def snapshot(wire: Wire, endpoint: Endpoint) -> Snapshot:
    """What `/metrics` and `/server_info` say now; nothing where they do not answer."""
    counters: dict[str, float] = {}
    for name, _, value in samples(await _get(wire, endpoint, "/metrics")):
        counters[name] = counters.get(name, 0.0) + value
    return Snapshot(counters, _average(await _get(wire, endpoint, "/server_info")))


def samples(page: bytes) -> list[tuple[str, str, float]]:
    """Name, labels (as they are written) and value of every sample of a page in Prometheus' text format."""
    found = _SAMPLE.findall(page.decode("utf-8", "replace"))
    return [(name, labels, float(value)) for name, labels, value in found]


def accept_length(before: Snapshot, after: Snapshot) -> AcceptLength | None:
    """Over the time between two snapshots; SGLang's average covers the server's whole life. `None`: no speculation seen."""
    for drafts, accepted in _DRAFTS:
        rounds = after.counters.get(drafts, 0.0) - before.counters.get(drafts, 0.0)
        if rounds > 0:
            gained = after.counters.get(accepted, 0.0) - before.counters.get(accepted, 0.0)
            return AcceptLength(1 + gained / rounds, f"{drafts.removesuffix('_total')} over this run")
    if after.average is not None:
        return AcceptLength(after.average, "/server_info, since the server started")
    return None


def speculates(now: Snapshot) -> bool:
    """Whether the server has ever drafted."""
    return any(now.counters.get(drafts, 0.0) > 0 for drafts, _ in _DRAFTS) or (now.average or 0.0) > 1.0


async def _get(wire: Wire, endpoint: Endpoint, path: str) -> bytes:
    """The page, or nothing where there is none."""
    try:
        status, body = await wire.get(endpoint.route(path), endpoint.headers)
    except (WireError, OSError):
        return b""
    return body if status == HTTPStatus.OK else b""


def _average(page: bytes) -> float | None:
    try:
        value: Any = msgspec.json.decode(page)
        average = value["internal_states"][0]["avg_spec_accept_length"]
        return float(average) if average else None
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError):
        return None
