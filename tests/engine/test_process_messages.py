"""Frames: what is written is read, however the bytes are cut; what is no message is refused and never guessed at."""

from __future__ import annotations

import math

import pytest

from legato.config import CacheConfig, Config, ExecutionConfig
from legato.engine import messages
from legato.engine.messages import (
    Abort,
    Command,
    Counters,
    Done,
    EngineInfo,
    Failed,
    Gained,
    Loading,
    MessageError,
    Progress,
    PromptLogprobs,
    Ready,
    Refused,
    Report,
    Start,
    Stop,
    Submit,
    frame,
)
from legato.types import Divergence, SamplingParams, Stats, TokenLogprob

PARAMS = SamplingParams(
    max_tokens=3, seed=2**63 - 1, logit_bias={7: -100.0}, allowed_token_ids=(1, 2), json_schema='{"type": "integer"}'
)
LOGPROB = TokenLogprob(4, -math.inf, ((4, -math.inf), (5, -0.5)))
TO_ENGINE = [
    Start(
        Config(model="/a b", cache=CacheConfig(tokens=64), execution=ExecutionConfig(ops={"attend": "reference"})), 10
    ),
    Submit("é", tuple(range(70_000)), PARAMS, (1,), 2**63 - 1, -3, 0.5, "salt", 0),
    Abort("é"),
    Command(1, "start_profile", "/tmp"),
    Stop(),
]
FROM_ENGINE = [
    Loading("weights", 1, 2),
    Ready(EngineInfo("m", "/f", "cpu", 1, 2, 3, 4, 5, 6.5, "float32", "fp8")),
    Gained((Progress("a", (1, 2), None, 1, 5, 64, (LOGPROB,), PromptLogprobs(1, (LOGPROB,))), Progress("b", (), "abort"))),
    Refused("a", "never_fits", "prompt", "too long"),
    Done(1, 7),
    Report(
        Stats(accepted_at=(1, 2), first_divergence=Divergence("a", 1, 2, None, 0.5)), Counters(finished={"stop": 1}), 1, 2
    ),
    Failed("why", "RuntimeError"),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 1000, 10**7])
def test_any_cut_of_the_stream_gives_the_same_messages(size: int) -> None:
    for written, reader in ((TO_ENGINE, messages.to_engine()), (FROM_ENGINE, messages.from_engine())):
        written = [message for message in written if size > 3 or len(frame(message)) < 10_000]
        stream = b"".join(frame(message) for message in written)
        read = [m for start in range(0, len(stream), size) for m in reader.feed(stream[start : start + size])]
        assert read == written


def test_good_messages_before_a_bad_one_are_read() -> None:
    reader = messages.to_engine()
    read = []
    with pytest.raises(MessageError, match="a frame of 3 bytes is no message"):
        for message in reader.feed(frame(Stop()) + b"\0\0\0\3abc" + frame(Stop())):
            read.append(message)
    assert read == [Stop()]


@pytest.mark.parametrize(
    "stream",
    [
        b"\xff\xff\xff\xff",  # a length beyond any message
        frame(Loading("the other direction")),
        b"\0\0\0\0",
        frame(Abort("a"))[:-1] + b"\xc0",  # an id that is no text
    ],
)
def test_what_is_no_message(stream: bytes) -> None:
    with pytest.raises(MessageError):
        list(messages.to_engine().feed(stream))


def test_what_cannot_be_sent_or_read_is_known_before() -> None:
    with pytest.raises(MessageError, match="surrogates"):
        frame(Abort("\ud800"))
    with pytest.raises(MessageError, match="ints"):
        frame(Submit("a", (2**70,), PARAMS, (), 0))
    messages.check(Submit("a", (1,), PARAMS, (), 0))
    with pytest.raises(MessageError, match="Expected `int`"):
        messages.check(Submit("a", ("1",), PARAMS, (), 0))
    with pytest.raises(MessageError, match="max_tokens"):
        broken = SamplingParams(max_tokens=1)
        object.__setattr__(broken, "max_tokens", 0)
        messages.check(Submit("a", (1,), broken, (), 0))
