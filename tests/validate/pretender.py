"""A server without a model that answers as a good one would, and can be given single faults: what `legato validate` must find.

Tokens are words (with the blank before them); drafts come in steps of three. Each fault is one deviation, named as in `FAULTS`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from typing import Any

CONTEXT = 20_000
VOCABULARY = 1000

FAULTS = {
    "stream loses a chunk": "stream equals whole",
    "seed ignored": "seeds",
    "batch changes text": "alone or together",
    "zero logprobs": "logprobs",
    "infinite logprobs": "logprobs",
    "stop missed": "stop strings",
    "one token too many": "lengths",
    "bias ignored": "banned tokens",
    "no prefix cache": "prefix cache",
    "arguments cut in the stream": "forced tool call",
    "number as text": "forced tool call",
    "schema ignored": "JSON schema",
    "goes on alone": "client leaves",
    "500 for bad requests": "bad requests",
    "long prompts are cut": "too long a prompt",
    "drafts change tokens": "self-check",
    "tags leak": "clean text",
    "empty answers": "empty answers",
    "cannot add": "arithmetic",
    "cannot copy": "copying",
    "forgets": "needle in a long text",
    "bad drafts": "accept length",
    "not healthy": "health",
}
"""Fault -> the check that must find it."""


class Refusal(Exception):
    """A status and a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Pretender:
    """The ASGI application."""

    def __init__(self, *faults: str, model: str = "glm-5.2") -> None:
        assert set(faults) <= set(FAULTS)
        self.faults, self.model = set(faults), model
        self.replayed = 0 if "goes on alone" in faults else 4
        self.running = self.rounds = self.accepted = self.open = 0
        self.cached: set[str] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        try:
            await self._route(scope["path"], body, send)
        except Refusal as refusal:
            await reply(send, refusal.status, {"error": {"message": str(refusal)}})
        except (KeyError, TypeError, ValueError) as error:
            status = 500 if "500 for bad requests" in self.faults else 400
            await reply(send, status, {"error": {"message": f"bad request: {error!r}"}})

    async def _route(self, path: str, body: bytes, send: Any) -> None:
        if path == "/health":
            await reply(send, 503 if "not healthy" in self.faults else 200, {})
        elif path == "/v1/models":
            await reply(send, 200, {"data": [{"id": self.model, "max_model_len": CONTEXT}]})
        elif path == "/metrics":
            await reply(send, 200, self._metrics().encode())
        elif path == "/tokenize":
            await reply(send, 200, {"tokens": [number_of(json.loads(body)["prompt"])]})
        elif path == "/v1/chat/completions":
            await self._chat(json.loads(body), send)
        else:
            raise Refusal(404, "no such path")

    def _metrics(self) -> str:
        positions = "".join(
            f'legato_accepted_tokens_at_total{{position="{p}"}} {self.accepted * share}\n'
            f'legato_drafted_tokens_at_total{{position="{p}"}} {self.rounds}\n'
            for p, share in enumerate((0.24, 0.22, 0.2, 0.18, 0.16))
        )
        return (
            f"legato_requests_running {self.running}\nlegato_draft_rounds_total {self.rounds}\n"
            f"legato_accepted_tokens_total {self.accepted}\nlegato_selfcheck_requests_total {self.replayed}\n"
            f"legato_selfcheck_divergences_total {int('drafts change tokens' in self.faults)}\n{positions}"
        )

    async def _chat(self, request: dict[str, Any], send: Any) -> None:
        check(request)
        prompt = request["messages"][-1]["content"]
        length = len(prompt.split())
        if length > CONTEXT and "long prompts are cut" not in self.faults:
            raise Refusal(400, f"the prompt has {length} tokens; the context is {CONTEXT}")
        self.open += 1
        await asyncio.sleep(0.01)
        try:
            answer = self._answer(request, prompt)
        finally:
            self.open -= 1
        is_cached = prompt in self.cached and "no prefix cache" not in self.faults
        self.cached.add(prompt)
        self.rounds += 10
        self.accepted += 6 if "bad drafts" in self.faults else 38
        usage = {
            "prompt_tokens": length, "completion_tokens": answer["tokens"],
            "prompt_tokens_details": {"cached_tokens": length - 1 if is_cached else 0},
        }  # fmt: skip
        if request.get("stream"):
            await self._stream(request, answer, usage, send)
        else:
            message = {"role": "assistant", "content": answer["content"], "tool_calls": answer["calls"]}
            choice = {
                "message": message,
                "finish_reason": answer["reason"],
                "logprobs": {"content": answer["logprobs"]},
            }
            await reply(send, 200, {"choices": [choice], "usage": usage})

    def _answer(self, request: dict[str, Any], prompt: str) -> dict[str, Any]:
        calls, content = self._calls(request, prompt), ""
        if not calls:
            content = self._known(request, prompt) or self._words(request, prompt)
        if "tags leak" in self.faults:
            content += "</think>"
        limit = request.get("max_tokens") or 1000
        pieces = re.findall(r"\s*\S+", content)
        if request.get("ignore_eos"):
            pieces = (pieces * (limit // max(1, len(pieces)) + 1))[:limit]
        elif request.get("response_format") is None:
            pieces = pieces[:limit]
        reason = "length" if len(pieces) == limit else "tool_calls" if calls else "stop"
        content = "".join(pieces)
        for stop in request.get("stop") or []:
            if "stop missed" not in self.faults and stop in content:
                content, reason = content[: content.find(stop)], "stop"
        if "empty answers" in self.faults and "colleague" in prompt:
            content = ""
        value = {"zero logprobs": 0.0, "infinite logprobs": -9e999}
        logprob = next((value[fault] for fault in self.faults if fault in value), -0.5)
        top = [{"token": "a", "logprob": logprob}, {"token": "b", "logprob": logprob - 2}]
        entries = [{"token": piece, "logprob": logprob, "top_logprobs": top} for piece in pieces]
        count = len(pieces) + (1 if "one token too many" in self.faults and request.get("ignore_eos") else 0)
        return {"content": content, "calls": calls, "reason": reason, "tokens": count, "logprobs": entries}

    def _words(self, request: dict[str, Any], prompt: str) -> str:
        """Words that depend on the prompt, and on the seed where there is a temperature."""
        key = prompt
        if request.get("temperature") and "seed ignored" not in self.faults:
            key += str(request.get("seed"))
        if self.open > 3 and "batch changes text" in self.faults:
            key += "crowd"
        digest = hashlib.sha256(key.encode()).digest()
        banned = {int(token) for token in request.get("logit_bias") or {}} if "bias ignored" not in self.faults else ()
        words = [f" w{byte}" for byte in digest[:16]]
        return "".join(word for word in words if number_of(word) not in banned)

    def _known(self, request: dict[str, Any], prompt: str) -> str:
        if request.get("response_format"):
            return "junk" if "schema ignored" in self.faults else '{"name": "Ann", "age": 3, "tall": true}'
        if found := re.search(r"What is (\d+) \+ (\d+)", prompt):
            return str(int(found[1]) + int(found[2]) + ("cannot add" in self.faults))
        if prompt.startswith("Repeat exactly"):
            return prompt.partition("\n")[2].replace("0x7F", "0x7f" if "cannot copy" in self.faults else "0x7F")
        if "Anna is 34" in prompt:
            return '{"name": "Anna", "age": 34, "city": "Lyon"}'
        if "lighthouse door?" in prompt:
            is_early = prompt.find("7314-kestrel") < len(prompt) // 3
            return "unknown" if is_early and "forgets" in self.faults else "7314-kestrel"
        return ""

    def _calls(self, request: dict[str, Any], prompt: str) -> list[dict[str, Any]]:
        found = re.search(r"in (Paris|Oslo) for (?:the next )?(\d) days", prompt)
        if not request.get("tools") or not found:
            return []
        days: Any = found[2] if "number as text" in self.faults else int(found[2])
        arguments = json.dumps({"city": found[1], "days": days})
        return [{"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}]

    async def _stream(self, request: dict[str, Any], answer: dict[str, Any], usage: Any, send: Any) -> None:
        self.running += 1
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        pieces = re.findall(r"\s*\S+", answer["content"]) if answer["content"].strip() else []
        if "".join(pieces) != answer["content"]:
            pieces = [answer["content"]]
        steps = ["".join(pieces[start : start + 3]) for start in range(0, len(pieces), 3)]
        if "stream loses a chunk" in self.faults and len(steps) > 2:
            del steps[1]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}, *({"content": step} for step in steps)]
        for index, call in enumerate(answer["calls"]):
            arguments = call["function"]["arguments"]
            if "arguments cut in the stream" in self.faults:
                arguments = arguments[:-1]
            deltas.append(
                {"tool_calls": [{"index": index, **call, "function": {"name": "get_weather", "arguments": ""}}]}
            )
            deltas += [
                {"tool_calls": [{"index": index, "function": {"arguments": part}}]}
                for part in (arguments[:7], arguments[7:])
            ]
        chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
        chunks += [{"choices": [{"delta": {}, "finish_reason": answer["reason"]}]}, {"choices": [], "usage": usage}]
        for chunk in chunks:
            await send(
                {"type": "http.response.body", "body": f"data: {json.dumps(chunk)}\n\n".encode(), "more_body": True}
            )
        if "goes on alone" not in self.faults or not request.get("ignore_eos"):
            self.running -= 1
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def check(request: dict[str, Any]) -> None:
    """Raises for a body that is none."""
    assert isinstance(request, dict)
    limits = {"max_tokens": (1, 10**6), "temperature": (0, 2), "top_p": (0, 1), "n": (1, 8), "top_logprobs": (0, 20)}
    for name, (low, high) in limits.items():
        if not low <= request.get(name, low) <= high:
            raise ValueError(name)
    if not request["messages"] or request["messages"][-1]["role"] not in ("user", "system"):
        raise ValueError("messages")
    if any(int(token) >= VOCABULARY for token in request.get("logit_bias") or {}):
        raise ValueError("logit_bias")
    wanted = request.get("response_format")
    if wanted and not isinstance(wanted["json_schema"]["schema"], dict):
        raise ValueError("schema")


def number_of(word: str) -> int:
    """A token id for a word."""
    return int(hashlib.sha256(word.encode()).hexdigest(), 16) % VOCABULARY


async def reply(send: Any, status: int, body: Any) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
