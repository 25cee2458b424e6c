"""Checks that any model passes on a server that works: the wire format, sampling controls, streams, limits, the cache.

Owns these questions; each names the kind of fault, reported of other servers, that it would find. Called by `validate.run`.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from contextlib import aclosing
from typing import Any

from legato.validate.check import Check, Failed, NotApplicable, expect
from legato.validate.target import Answer, Target, Unexpected

GREEDY: dict[str, Any] = {"temperature": 0, "seed": 7}
PROMPTS = (
    "Write a Python function that adds two numbers.",
    "Explain in two sentences why the sky is blue.",
    "List three uses of a paper clip.",
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "tall": {"type": "boolean"},
    },
    "required": ["name", "age", "tall"],
    "additionalProperties": False,
}
NEAR_TIE = 0.05
"""Log-probability margin of the two best tokens below which rounding may decide between them."""
IDLE_S = 10.0
LONG = "The harbour was quiet that morning, and the boats lay side by side. " * 40


async def health(target: Target) -> str:
    """Alive, and the model is listed."""
    status, _ = await target.get("/health")
    expect(status == 200, f"/health answers {status}")
    status, data = await target.get("/v1/models")
    names = [model["id"] for model in json.loads(data)["data"]] if status == 200 else []
    expect(target.model in names, f"/v1/models lists {names}, not {target.model}")
    return f"{target.model} is listed"


async def stream_equals_whole(target: Target) -> str:
    """The same request, whole and streamed."""
    steps = 0
    for prompt in PROMPTS:
        whole = await target.ask(prompt, **GREEDY, max_tokens=96)
        streamed = await target.stream(prompt, **GREEDY, max_tokens=96)
        _same("whole and streamed replies", whole, streamed)
        expect(
            whole.usage.get("completion_tokens") == streamed.usage.get("completion_tokens"),
            f"usage says {whole.usage} for the whole reply and {streamed.usage} for the stream",
        )
        steps += streamed.num_chunks
    return f"{len(PROMPTS)} prompts, {steps} chunks"


async def seeds(target: Target) -> str:
    """The same seed twice at temperature 1, and another one."""
    first, second, other = [
        await target.ask(PROMPTS[1], temperature=1, top_p=1, seed=seed, max_tokens=48) for seed in (11, 11, 12)
    ]
    expect(first.said == second.said, f"seed 11 gave {first.text[:60]!r}, then {second.text[:60]!r}")
    expect(first.said != other.said, "seeds 11 and 12 gave the same text: the seed is ignored")
    return "the same seed gives the same text, another one another"


async def alone_or_together(target: Target) -> str:
    """Greedy replies alone and eight at once; where they part, the two best tokens must be near each other."""
    fields = {**GREEDY, "max_tokens": 48, "logprobs": True, "top_logprobs": 2}
    alone = [await target.ask(prompt, **fields) for prompt in PROMPTS]
    together = await asyncio.gather(*(target.ask(PROMPTS[number % 3], **fields) for number in range(8)))
    ties = 0
    for number, answer in enumerate(together):
        reference = alone[number % 3]
        if answer.said == reference.said:
            continue
        margin = _margin_where_they_part(reference, answer)
        expect(
            margin is not None and margin < NEAR_TIE,
            f"{PROMPTS[number % 3]!r} was answered otherwise beside seven others, where the best token led by {margin}",
        )
        ties += 1
    return f"8 at once equal to alone{f', but for {ties} near-ties (rounding)' if ties else ''}"


def _margin_where_they_part(one: Answer, other: Answer) -> float | None:
    for mine, theirs in zip(one.logprobs, other.logprobs):
        if mine["token"] != theirs["token"]:
            best = sorted((entry["logprob"] for entry in mine.get("top_logprobs", [])), reverse=True)
            return best[0] - best[1] if len(best) > 1 else None
    return None


async def logprobs(target: Target) -> str:
    """Finite, one per token, the greedy token the likeliest, and not all the same."""
    answer = await target.ask(PROMPTS[0], **GREEDY, max_tokens=40, logprobs=True, top_logprobs=3)
    entries = answer.logprobs
    expect(bool(entries), "logprobs were asked for and there are none")
    values = [entry["logprob"] for entry in entries]
    expect(all(isinstance(value, int | float) and math.isfinite(value) for value in values), f"not finite: {values}")
    expect(all(value <= 1e-6 for value in values), f"above 0: {max(values)}")
    expect(any(value < -1e-4 for value in values), "every log-probability is 0")
    for entry in entries:
        best = max((rival["logprob"] for rival in entry.get("top_logprobs", [])), default=entry["logprob"])
        expect(
            entry["logprob"] >= best - NEAR_TIE, f"greedy token {entry['token']!r} at {entry['logprob']}, best {best}"
        )
    count = answer.usage.get("completion_tokens", 0)
    expect(abs(len(entries) - count) <= 4, f"{len(entries)} entries for {count} tokens")
    return f"{len(entries)} tokens, mean {sum(values) / len(values):.3f}"


async def stop_strings(target: Target) -> str:
    """Strings from the middle of an answer, given as stops: it ends just before them, whatever a step brings."""
    fields = {**GREEDY, "max_tokens": 80, "chat_template_kwargs": {"enable_thinking": False}}
    whole = await target.ask(PROMPTS[0], **fields)
    if len(whole.content) < 24:
        raise NotApplicable(f"the answer is too short to be cut: {whole.content!r}")
    tried = 0
    for part in range(1, 7):
        start = part * len(whole.content) // 8
        stop = whole.content[start : start + 5]
        expected = whole.content[: whole.content.find(stop)]
        for ask in (target.ask, target.stream):
            answer = await ask(PROMPTS[0], **fields, stop=[stop])
            expect(
                answer.content == expected and answer.finish_reason == "stop",
                f"stop {stop!r} gave {answer.content[-40:]!r} ({answer.finish_reason}), not {expected[-40:]!r} (stop)",
            )
        tried += 1
    return f"{tried} stop strings, whole and streamed"


async def lengths(target: Target) -> str:
    """Exactly `max_tokens` tokens where nothing else may end the text."""
    for limit in (1, 2, 7, 16):
        answer = await target.ask(PROMPTS[1], **GREEDY, max_tokens=limit, ignore_eos=True)
        count = answer.usage.get("completion_tokens")
        expect(count == limit, f"max_tokens {limit} gave {count} tokens")
        expect(answer.finish_reason == "length", f"max_tokens {limit} ended with {answer.finish_reason}")
    return "1, 2, 7 and 16 tokens"


async def banned_tokens(target: Target) -> str:
    """A token that the greedy text holds, banned: it is gone, at drafted positions too."""
    fields = {**GREEDY, "max_tokens": 48, "logprobs": True}
    whole = await target.ask(PROMPTS[0], **fields)
    words = [entry["token"] for entry in whole.logprobs]
    word = max(set(words) - {""}, key=words.count, default="")
    status, data = await target.post(
        "/tokenize", json.dumps({"model": target.model, "prompt": word, "add_special_tokens": False}).encode()
    )
    tokens = json.loads(data).get("tokens") if status == 200 else None
    if not tokens or len(tokens) != 1:
        raise NotApplicable(f"/tokenize gives no single id for {word!r} ({status})")
    answer = await target.ask(PROMPTS[0], **fields, logit_bias={str(tokens[0]): -100})
    left = [entry["token"] for entry in answer.logprobs].count(word)
    expect(left == 0, f"{word!r} is banned by logit_bias and stands there {left} times")
    return f"{word!r} appeared {words.count(word)} times, banned 0 times"


async def prefix_cache(target: Target) -> str:
    """A long prompt a second time: the same answer, and most of the prompt from the cache."""
    prompt = f"{LONG}\n\nRepeat the last sentence."
    cold, warm = [await target.ask(prompt, **GREEDY, max_tokens=32) for _ in range(2)]
    _same("answers to the same prompt, cold and from the cache,", cold, warm)
    length = warm.usage.get("prompt_tokens", 0)
    cached = (warm.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is None:
        raise NotApplicable("usage says nothing of cached tokens; the answers are the same")
    expect(cached >= length // 2, f"{cached} of {length} prompt tokens came from the cache")
    return f"{cached} of {length} tokens cached, same answer"


async def forced_call(target: Target) -> str:
    """A tool call that must be made: named, identified, with arguments that fit the schema, whole and streamed."""
    fields = {**GREEDY, "max_tokens": 400, "tools": [WEATHER]}
    choice = {"type": "function", "function": {"name": "get_weather"}}
    whole = await target.ask("What will the weather be in Paris for 3 days?", **fields, tool_choice=choice)
    streamed = await target.stream("What will the weather be in Paris for 3 days?", **fields, tool_choice=choice)
    for answer in (whole, streamed):
        expect(len(answer.calls) >= 1, f"no call, but {answer.text[:80]!r}")
        ids = [call["id"] for call in answer.calls]
        expect(all(ids) and len(set(ids)) == len(ids), f"ids of calls: {ids}")
        expect(answer.finish_reason == "tool_calls", f"finish_reason is {answer.finish_reason}")
        for call in answer.calls:
            arguments = _json(call["function"]["arguments"])
            expect(call["function"]["name"] == "get_weather", f"called {call['function']['name']!r}")
            expect(
                isinstance(arguments, dict)
                and set(arguments) == {"city", "days"}
                and isinstance(arguments["city"], str)
                and type(arguments["days"]) is int,
                f"arguments {call['function']['arguments']!r} do not fit the schema",
            )
    _same("whole and streamed calls", whole, streamed)
    return whole.calls[0]["function"]["arguments"]


async def schema(target: Target) -> str:
    """Text that must fit a JSON schema, with reasoning before it and without."""
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    seen: list[str] = []
    for thinking in (False, True):
        answer = await target.ask(
            "Describe a person as JSON.",
            **GREEDY,
            max_tokens=1024,
            response_format=wanted,
            chat_template_kwargs={"enable_thinking": thinking},
        )
        if thinking and answer.finish_reason == "length" and not answer.content:
            seen.append("reasoning did not end within 1024 tokens")
            continue
        value = _json(answer.content)
        fits = isinstance(value, dict) and set(value) == set(SCHEMA["properties"])
        expect(
            fits and isinstance(value["name"], str) and type(value["age"]) is int and type(value["tall"]) is bool,
            f"with thinking {thinking}: {answer.content[:120]!r} does not fit the schema",
        )
        seen.append(answer.content)
    return "; ".join(seen)


async def abort(target: Target) -> str:
    """A stream that is left: nothing runs soon afterwards, and the next request is right."""
    async with aclosing(target.chunks(PROMPTS[2], temperature=1, max_tokens=4000, ignore_eos=True)) as chunks:
        async for chunk in chunks:
            if chunk.get("choices"):
                break
    names = ("legato_requests_running", "vllm:num_requests_running", "sglang:num_running_reqs")
    deadline = time.monotonic() + IDLE_S
    while True:
        counters = await target.counters()
        running = next((counters[name] for name in names if name in counters), None)
        if running is None:
            raise NotApplicable("/metrics says nothing of running requests")
        if running == 0:
            break
        if time.monotonic() >= deadline and counters.get("legato_selfcheck_requests_total"):
            raise NotApplicable(f"{running:g} run; the server replays requests without drafts, and those count too")
        expect(time.monotonic() < deadline, f"{running:g} requests still run {IDLE_S:g} s after the client left")
        await asyncio.sleep(0.25)
    await target.ask(PROMPTS[2], **GREEDY, max_tokens=4)
    return "nothing runs after the client has left"


BAD: tuple[tuple[str, dict[str, Any] | bytes], ...] = (
    ("negative max_tokens", {"max_tokens": -1}),
    ("temperature -1", {"temperature": -1}),
    ("top_p 2", {"top_p": 2}),
    ("a text as temperature", {"temperature": "warm"}),
    ("n 0", {"n": 0}),
    ("top_logprobs 1000000", {"logprobs": True, "top_logprobs": 1_000_000}),
    ("logit_bias beyond the vocabulary", {"logit_bias": {"99999999": 1}}),
    ("no messages", {"messages": []}),
    ("an unknown role", {"messages": [{"role": "wizard", "content": "x"}]}),
    ("a schema that is none", {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}}),
    ("broken JSON", b'{"messages": ['),
)


async def bad_requests(target: Target) -> str:
    """Each is refused with a message, and the server goes on."""
    for name, change in BAD:
        fields = {"model": target.model, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
        body = change if isinstance(change, bytes) else json.dumps({**fields, **change}).encode()
        status, data = await target.post("/v1/chat/completions", body)
        expect(400 <= status < 500, f"{name}: answered {status}, not 4xx")
        error = _json(data.decode("utf-8", "replace"))
        said = error.get("error") if isinstance(error, dict) else None
        expect(isinstance(said, dict) and bool(said.get("message")), f"{name}: no error.message in {data[:120]!r}")
    await target.ask(PROMPTS[0], **GREEDY, max_tokens=4)
    return f"{len(BAD)} bad requests refused, the next one served"


async def too_long(target: Target) -> str:
    """A prompt longer than the context is refused with both numbers, not cut and not a crash."""
    _, data = await target.get("/v1/models")
    listed = next((model for model in json.loads(data)["data"] if model["id"] == target.model), {})
    limit = listed.get("max_model_len")
    if not isinstance(limit, int) or limit > 300_000:
        raise NotApplicable(f"the context is not stated, or long ({limit})")
    try:
        answer = await target.ask("word " * (limit + 64), **GREEDY, max_tokens=4)
    except Unexpected as refused:
        message = str(refused)
        expect(message.startswith(("400", "413")), f"answered {message[:120]}")
        expect(str(limit) in message, f"the refusal does not name the limit of {limit}: {message[:160]}")
        return message[:120]
    raise Failed(f"a prompt beyond the context of {limit} was answered: {answer.text[:60]!r}")


async def selfcheck(target: Target) -> str:
    """What the server's own replays without drafts have found."""
    counters = await target.counters()
    checked = counters.get("legato_selfcheck_requests_total", 0.0)
    if not checked:
        raise NotApplicable("the server replays nothing; start it with --verify-speculation 0.1")
    diverged = counters.get("legato_selfcheck_divergences_total", 0.0)
    expect(diverged == 0, f"{diverged:g} of {checked:g} replays without drafts gave other tokens")
    return f"{checked:g} requests replayed without drafts, none differed"


async def clean_text(target: Target) -> str:
    """No control token stood in any answer of this run."""
    expect(not target.leaks, f"{len(target.leaks)} times, first {target.leaks[0] if target.leaks else ''}")
    return f"none in {target.num_answers} answers"


async def empty_answers(target: Target) -> str:
    """No answer of this run ended by itself with neither text nor a call."""
    expect(target.num_empty == 0, f"{target.num_empty} of {target.num_answers} answers were empty")
    return f"none of {target.num_answers}"


def _same(what: str, one: Answer, other: Answer) -> None:
    for name, mine, theirs in zip(("reasoning", "content", "tool calls", "finish reason"), one.said, other.said):
        expect(mine == theirs, f"{what} differ in {name}: {str(mine)[:80]!r} and {str(theirs)[:80]!r}")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise Failed(f"{text[:120]!r} is no JSON") from None


CHECKS = (
    Check("health", "a server that is up but cannot serve", health),
    Check("stream equals whole", "text or tool calls that depend on where steps cut them", stream_equals_whole),
    Check("seeds", "seeds ignored under speculation", seeds),
    Check("alone or together", "tokens that depend on the batch", alone_or_together),
    Check("logprobs", "log-probabilities all zero or infinite under speculation", logprobs),
    Check("stop strings", "stop strings missed within a step of several tokens", stop_strings),
    Check("lengths", "a token too many or too few at the limit", lengths),
    Check("banned tokens", "sampling controls ignored at drafted positions", banned_tokens),
    Check("prefix cache", "prefix reuse lost, or drafts broken after it", prefix_cache),
    Check("forced tool call", "empty, cut or mistyped tool arguments", forced_call),
    Check("JSON schema", "grammar and reasoning or drafts out of step", schema),
    Check("client leaves", "generation that goes on after its client has left", abort),
    Check("bad requests", "one malformed request that harms the server", bad_requests),
    Check("too long a prompt", "over-long prompts that are cut, or crash", too_long),
    Check("self-check", "drafts that change tokens", selfcheck),
)
AT_THE_END = (
    Check("clean text", "control tokens in what users see", clean_text),
    Check("empty answers", "answers that are all reasoning and no content", empty_answers),
)
"""What can only be said about all answers of a run."""
