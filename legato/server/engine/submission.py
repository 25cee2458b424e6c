"""A request on its way to the engine: what it may hold, and the bytes that it becomes.

Owns `GenerationRequest` and every check that needs no engine. What only the engine can know (room, grammars) it refuses itself.
Called by `server.engine.client` and by those who make requests.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

import msgspec

import legato.engine.messages as messages
from legato.config import MAX_DRAFTS
from legato.types import MAX_STOP_IDS, SamplingParams

RefusalKind = Literal["invalid", "never_fits", "queue_full", "draining"]


class RequestRefused(ValueError):
    """A request that the engine does not take.

    `kind`: "invalid", "never_fits", "queue_full", or "draining" (no new requests: it is about to stop). `field` is the name of
    the field that is wrong, where a single one is, else empty.
    """

    def __init__(self, kind: RefusalKind, field: str, message: str) -> None:
        super().__init__(message)
        self.kind: RefusalKind = kind
        self.field, self.message = field, message


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sample of one prompt.

    Attributes:
        prompt: token ids.
        params: how to sample; `n` must be 1, and stop strings are the caller's to find.
        stop_ids: all ids that end it, the checkpoint's and the user's.
        seed: of the sampling noise; `None`: `params.seed`, or a fresh one.
        priority: higher ones run first.
        timeout_s: it ends then with the reason "deadline", wherever it is.
        cache_salt: it shares cached prefixes with requests of the same salt only.
        id: unique among open requests; `None`: one is made.
        num_drafts: how many drafts it verifies per iteration at most, 0 to 7, as far as the engine makes them; 0 decodes
            plainly; `None`: as many as the engine makes.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    priority: int = 0
    timeout_s: float | None = None
    cache_salt: str = ""
    id: str | None = None
    num_drafts: int | None = None


def framed(request_id: str, request: GenerationRequest, vocab_size: int) -> bytes:
    """The bytes of a request's `Submit`. Raises `RequestRefused`: the engine must be able to trust what it reads."""
    params, timeout_s = request.params, request.timeout_s
    _check_whole((field.name, getattr(params, field.name)) for field in fields(params))
    _check_whole([("priority", request.priority)])
    if params.n != 1:
        raise _invalid("n", f"must be 1 in a single request, got {params.n}: send {params.n} requests")
    _check_ids("prompt", request.prompt, vocab_size)
    _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    _check_ids("stop_ids", request.stop_ids, vocab_size)
    if len(request.stop_ids) > MAX_STOP_IDS:
        raise _invalid("stop_ids", f"at most {MAX_STOP_IDS} ids can end a request, got {len(request.stop_ids)}")
    if request.num_drafts is not None and not 0 <= request.num_drafts <= MAX_DRAFTS:
        raise _invalid("num_drafts", f"must be between 0 and {MAX_DRAFTS}, got {request.num_drafts}")
    if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s >= 0):
        raise _invalid("timeout_s", f"must be a number of seconds, 0 or more, got {timeout_s}")
    seed = params.seed if request.seed is None else request.seed
    if seed is None:
        seed = secrets.randbits(63)
    elif not 0 <= seed < 2**63:
        raise _invalid("seed", f"must be between 0 and 2^63 - 1, got {seed}")
    submit = messages.Submit(
        request_id,
        request.prompt,
        _slim(params),
        request.stop_ids,
        seed,
        request.priority,
        timeout_s,
        request.cache_salt,
        request.num_drafts,
    )
    _check_readable(msgspec.structs.replace(submit, prompt=()))
    return messages.frame(submit)


def _slim(params: SamplingParams) -> SamplingParams:
    """Without what the engine does not need, and with a schema as text: any whole number fits there."""
    schema = params.json_schema
    if isinstance(schema, Mapping):
        schema = json.dumps(dict(schema), allow_nan=False)
    return replace(params, stop=(), json_schema=schema)


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    try:
        ids = msgspec.convert(ids, tuple[int, ...])
    except msgspec.ValidationError as error:
        raise _invalid(name, f"must be token ids ({error})") from error
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        place = next(place for place, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise _invalid(name, f"token {place} is {ids[place]}; the vocabulary has {vocab_size}")


def _check_readable(submit: messages.Submit) -> None:
    """What the other side could not read would end it, and everyone else's requests with it."""
    try:
        messages.check(submit)
    except messages.MessageError as error:
        found = re.search(r"(Expected [^-]*) - at `\$\[(\d+)\](?:\.(\w+))?", str(error))
        if found is None:
            raise _invalid("", str(error)) from error
        raise _invalid(found[3] or submit.__struct_fields__[int(found[2]) - 1], found[1].lower()) from error


def _check_whole(values: Iterable[tuple[str, object]]) -> None:
    for name, value in values:
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise _invalid(name, f"must fit 64 bits, got {value}")


def _invalid(name: str, message: str) -> RequestRefused:
    return RequestRefused("invalid", name, f"{name}: {message}" if name else message)
