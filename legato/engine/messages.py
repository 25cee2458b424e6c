"""What crosses the border between the server's process and the engine's: every message, and how it becomes bytes.

Owns the vocabulary and the framing (length, then msgpack) and nothing else: no sockets, no tensors, no HTTP. Imported by
`server.engine.client` on one side and `engine.process` on the other; the two sides share no other code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, Literal, TypeVar

import msgspec

from legato.config import Config
from legato.types import FinishReason, SamplingParams, Stats, TokenLogprob

RefusalKind = Literal["invalid", "never_fits", "queue_full"]
"""`invalid`: a field cannot be honoured; `never_fits`: longer than context or cache; `queue_full`: to be sent again later."""

CommandKind = Literal["flush_cache", "reset_stats", "report", "start_profile", "stop_profile"]

HEADER_BYTES = 4
MAX_FRAME_BYTES = 1 << 30
"""A longer frame is a broken stream: what was read as its length is not one."""


class MessageError(ValueError):
    """Bytes that are no message. Nothing behind them can be trusted."""


class Start(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message to the engine: its settings, and the level (of `logging`) below which it does not log."""

    config: Config
    log_level: int = 30


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request. Answered by `Refused`, or by `Gained` until one of its entries carries a finish reason.

    `timeout_s` counts from when the engine reads the message; it then ends with the reason "deadline".
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...]
    seed: int
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    num_drafts: int | None = None


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Ends a request before the next iteration; ids that have ended are ignored."""

    id: str


class Command(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Something to do between two iterations, answered by `Done` with the same ticket. `argument`: the folder of a profile."""

    ticket: int
    kind: CommandKind
    argument: str = ""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The process ends, with exit code 0. Requests that are open are dropped without an answer."""


class EngineInfo(msgspec.Struct, frozen=True):
    """What was started.

    Attributes:
        model: the name or path that the checkpoint was asked for by.
        folder: where its small files (configuration, tokenizer, chat template) are on this machine.
        device: as PyTorch names it; of several ranks, its kind and how many there are.
        context: longest prompt and output together, in tokens.
        cache_tokens: capacity over all requests.
        num_drafts: K.
        max_running: most requests in one iteration.
        vocab_size: ids are below it.
        load_seconds: from the start of the process until it was ready.
        latent, index: formats of the two caches.
        score_bytes: most memory of one tensor of index scores.
    """

    model: str
    folder: str
    device: str
    context: int
    cache_tokens: int
    num_drafts: int
    max_running: int
    vocab_size: int
    load_seconds: float
    latent: str
    index: str
    score_bytes: int = 0


class Loading(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Start-up goes on: `done` of `total` bytes of `stage`. `total` 0: not known."""

    stage: str
    done: int = 0
    total: int = 0


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Requests can be sent."""

    info: EngineInfo


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of the prompt's tokens from position `start` on; position 0 has none."""

    start: int
    logprobs: tuple[TokenLogprob, ...]


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """What one iteration brought to one request. The first one of a request brings nothing: it says that the engine has taken it.

    Attributes:
        finish_reason: set on the last one only, which may carry tokens too.
        accepted, drafted: drafts that the model agreed with, of those that were verified.
        cached_tokens: tokens of the prompt that were found in the prefix cache.
        queued_seconds: from when the engine read the request until it first ran; `None`: it has not, or it is not known.
    """

    request_id: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    accepted: int = 0
    drafted: int = 0
    cached_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    queued_seconds: float | None = None


class Gained(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What one turn brought, to everyone."""

    progress: tuple[Progress, ...]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A request that was not taken. `field` names what is wrong with it where a single field is (else it is empty)."""

    id: str
    kind: RefusalKind
    field: str
    message: str


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A command was carried out; `value` is its result. `error` is not empty where it could not be."""

    ticket: int
    value: int | str | None = None
    error: str = ""


class Counters(msgspec.Struct, frozen=True):
    """Since the process started; none of them ever goes down, `reset_stats` or not.

    Attributes:
        submitted: requests that were taken.
        refused: requests that were not, by kind.
        finished: requests that ended, by reason. Taken = finished + running + waiting.
        iterations: of the engine.
        prompt_tokens: tokens of prompts that were run (again after a preemption).
        cached_tokens: tokens that were found in the prefix cache instead.
        generated_tokens: tokens that requests gained.
        drafted_tokens, accepted_tokens: drafts that were verified, and those that the model agreed with.
        decode_rounds: how often a drafting request was decoded: mean accept length = 1 + accepted_tokens / decode_rounds.
        preemptions: requests sent back to wait.
        evicted_pages: cached pages given up for others.
        checked, diverged: requests replayed without drafts, and those of them that gave other tokens.
        collapsed: requests whose drafting was suspicious.
    """

    submitted: int = 0
    refused: Mapping[str, int] = {}
    finished: Mapping[str, int] = {}
    iterations: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    decode_rounds: int = 0
    preemptions: int = 0
    evicted_pages: int = 0
    checked: int = 0
    diverged: int = 0
    collapsed: int = 0


class Report(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How the engine is: its heartbeat. Sent twice a second while it works, when it falls idle, and once a second then.

    Attributes:
        stats: counters since the last reset.
        counters: counters that are never reset.
        running, waiting: requests.
        used_pages: pages held by running requests alone, or in quarantine until an iteration has come back.
        free_pages: pages with nothing in them.
        cached_pages: pages of the prefix cache, those that running requests share among them.
        total_pages: used + free + cached.
        iteration_seconds: of the last iteration.
        median_iteration_seconds: of the last few hundred; 0 before the first one.
    """

    stats: Stats
    counters: Counters
    running: int = 0
    waiting: int = 0
    used_pages: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    total_pages: int = 0
    iteration_seconds: float = 0.0
    median_iteration_seconds: float = 0.0


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The last message of a process that ends with a non-zero exit code.

    `error` is the type of what was raised ("CheckpointError"), `reason` its text, unchanged where it was written for users.
    """

    reason: str
    error: str = ""


ToEngine = Start | Submit | Abort | Command | Stop
FromEngine = Loading | Ready | Gained | Refused | Done | Report | Failed

M = TypeVar("M")


def _plain(value: object) -> Any:
    """Read-only mappings, which msgspec does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be sent")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)


def frame(message: ToEngine | FromEngine) -> bytes:
    """The bytes of one message: 4 bytes of length (big-endian), then msgpack.

    Raises:
        MessageError: a value has no form there (a lone surrogate in a text, a whole number beyond 64 bits).
    """
    try:
        payload = _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(str(error)) from error
    return len(payload).to_bytes(HEADER_BYTES, "big") + payload


_TO_ENGINE: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_FROM_ENGINE: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def _read(decoder: msgspec.msgpack.Decoder[M], payload: bytes) -> M:
    try:
        return decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise MessageError(f"a frame of {len(payload)} bytes is no message: {error}") from error


def check(message: ToEngine) -> None:
    """Raises `MessageError` where the engine could not read a message: a value is not of its field's type."""
    _read(_TO_ENGINE, frame(message)[HEADER_BYTES:])


class Frames(Generic[M]):
    """Cuts a stream of bytes into messages of one direction, however it was cut on its way."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[M]:
        """The messages that are complete with `data`. Raises `MessageError`."""
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= HEADER_BYTES:
                body = start + HEADER_BYTES
                length = int.from_bytes(self._buffer[start:body], "big")
                if length > MAX_FRAME_BYTES:
                    raise MessageError(f"a frame of {length} bytes: the stream is broken")
                if len(self._buffer) < body + length:
                    break
                start = body + length
                yield _read(self._decoder, bytes(self._buffer[body:start]))
        finally:
            del self._buffer[:start]


def to_engine() -> Frames[ToEngine]:
    """Reads what the server's side wrote."""
    return Frames(_TO_ENGINE)


def from_engine() -> Frames[FromEngine]:
    """Reads what the engine's side wrote."""
    return Frames(_FROM_ENGINE)
