"""The books of the clients, and how they are compared with those of the server.

Owns what counts as seen. A request whose client stayed is counted to the token on both sides. One whose client left is known
within bounds only: how far it came when the server noticed, or whether it ran at all. Called by `legato.bench.soak_http.run`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from legato.bench.soak_http.asks import CONTEXT, LONG, Ask
from legato.bench.soak_http.replies import Reply

ENDINGS = ("stop", "length", "tool_calls", "deadline", "abort", "error")
_SAMPLE = re.compile(r"^legato_(\w+?)(?:\{(.*?)\})?\s+(\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Scrape(dict[tuple[str, str], float]):
    """`/metrics` at one moment: values by name (without `legato_`) and by the value of the label beside the model, if any."""

    @staticmethod
    def of(text: str) -> Scrape:
        """Reads Prometheus text."""
        scrape = Scrape()
        for name, labels, value in _SAMPLE.findall(text):
            words = [word for label, word in _LABEL.findall(labels) if label != "model_name"]
            scrape[name, words[0] if words else ""] = float(value)
        return scrape

    def gauge(self, name: str) -> float:
        """A value without a label. Raises KeyError where there is none."""
        return self[name, ""]

    def total(self, name: str) -> int:
        """A counter, over all its labels."""
        return int(sum(value for (each, _), value in self.items() if each == name))

    def since(self, before: Scrape) -> Scrape:
        """By how much each value has grown."""
        return Scrape({key: value - before.get(key, 0.0) for key, value in self.items()})


@dataclass(slots=True)
class Bounds:
    """A number known to lie within two others."""

    least: int = 0
    most: int = 0

    def add(self, least: int, most: int | None = None) -> None:
        """Adds a part; `most` left out: the part is known."""
        self.least += least
        self.most += least if most is None else most

    def __contains__(self, value: int) -> bool:
        return self.least <= value <= self.most

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least} to {self.most}"


@dataclass(slots=True)
class Ledger:
    """What the clients have seen. `late_refusals`: those that found the queue full and were told so within a stream."""

    kinds: Counter[str] = field(default_factory=Counter[str])
    statuses: Counter[int] = field(default_factory=Counter[int])
    conducts: Counter[str] = field(default_factory=Counter[str])
    ends: dict[str, Bounds] = field(default_factory=lambda: {reason: Bounds() for reason in ENDINGS})
    refused: dict[str, Bounds] = field(
        default_factory=lambda: {kind: Bounds() for kind in ("invalid", "too_large", "queue_full")}
    )
    prompt: Bounds = field(default_factory=Bounds)
    completion: Bounds = field(default_factory=Bounds)
    cached: Bounds = field(default_factory=Bounds)
    late_refusals: int = 0
    wrong: list[str] = field(default_factory=list[str])

    def sent(self, ask: Ask) -> None:
        """A request goes out."""
        self.kinds[ask.kind] += 1
        self.conducts[ask.conduct] += 1

    def answered(self, ask: Ask, reply: Reply) -> None:
        """A reply was read to its end."""
        for choice in reply.choices.values():
            if choice.reason not in self.ends:
                self.wrong.append(f"{ask.kind}: an answer ended with {choice.reason!r}")
                return
            self.ends[choice.reason].add(1)
        if len(reply.choices) != ask.num_choices or reply.used is None:
            self.wrong.append(f"{ask.kind}: {len(reply.choices)} choices of {ask.num_choices}, usage {reply.used}")
            return
        used = reply.used
        if ask.max_tokens * ask.num_choices < used.completion:
            self.wrong.append(f"{ask.kind}: {used.completion} tokens, more than were asked for")
        self.prompt.add(
            used.prompt * ask.num_choices
        )  # each choice is a request to the engine; usage has the prompt once
        self.completion.add(used.completion)
        # Usage says what the first choice found in the cache; the others may have found up to all of it.
        self.cached.add(used.cached, used.cached + (ask.num_choices - 1) * used.prompt)

    def refusal(self, ask: Ask, status: int) -> None:
        """A request was refused. A route or a model that is not there is no refused request."""
        match status:
            case 429 if ask.num_choices > 1:
                # One of its samples found the queue full; the others were refused too, or had begun and were ended.
                self.refused["queue_full"].add(1, ask.num_choices)
                self.ends["abort"].add(0, ask.num_choices - 1)
                self._maybe(ask)
            case 429:
                self.refused["queue_full"].add(1)
            case 413:
                self.refused["too_large"].add(1)
            case 404:
                pass
            case _:
                self.refused["invalid"].add(1)

    def left(self, ask: Ask, reply: Reply) -> None:
        """The client went away after some of the reply. It would have been `LONG`, so the server cannot have ended it before."""
        self.ends["abort"].add(1)
        self.prompt.add(ask.num_prompt or 0)
        self.cached.add(0, ask.num_prompt)
        self.completion.add(1 if reply.used is None else reply.used.completion, LONG)

    def walked_off(self, ask: Ask) -> None:
        """The client went away before anything came: the request may have run, or been refused, or neither."""
        self.ends["abort"].add(0, 1)
        self.refused["queue_full"].add(0, 1)
        self._maybe(ask)

    def _maybe(self, ask: Ask) -> None:
        most = CONTEXT if ask.num_prompt is None else ask.num_prompt
        self.prompt.add(0, most * ask.num_choices)
        self.cached.add(0, most * ask.num_choices)
        self.completion.add(0, ask.max_tokens * ask.num_choices)

    def disagreements(self, counted: Scrape) -> list[str]:
        """Where the server's counters, over the time of these books, say something else."""
        pairs: list[tuple[str, Bounds, int]] = [
            ("prompt tokens", self.prompt, counted.total("prompt_tokens_total")),
            ("cached tokens", self.cached, counted.total("prompt_tokens_cached_total")),
            ("generated tokens", self.completion, counted.total("generation_tokens_total")),
        ]
        for reason, seen in self.ends.items():
            pairs.append((f"requests that ended with {reason}", seen, int(counted["requests_total", reason])))
        for kind, seen in self.refused.items():
            pairs.append((f"requests refused as {kind}", seen, int(counted["requests_refused_total", kind])))
        others = counted.total("requests_refused_total") - sum(
            int(counted["requests_refused_total", kind]) for kind in self.refused
        )
        pairs.append(("requests refused as anything else", Bounds(), others))
        return [
            f"{what}: clients saw {seen}, the server counted {value}"
            for what, seen, value in pairs
            if value not in seen
        ]

    def summary(self, counted: Scrape) -> Mapping[str, object]:
        """Both sides, for a record."""
        return {
            "kinds": dict(self.kinds),
            "conducts": dict(self.conducts),
            "late_refusals": self.late_refusals,
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "seen": {
                "prompt_tokens": str(self.prompt),
                "cached_tokens": str(self.cached),
                "completion_tokens": str(self.completion),
                **{reason: str(seen) for reason, seen in self.ends.items()},
                **{kind: str(seen) for kind, seen in self.refused.items()},
            },
            "counted": {
                "prompt_tokens": counted.total("prompt_tokens_total"),
                "cached_tokens": counted.total("prompt_tokens_cached_total"),
                "completion_tokens": counted.total("generation_tokens_total"),
                **{reason: int(counted["requests_total", reason]) for reason in self.ends},
                **{kind: int(counted["requests_refused_total", kind]) for kind in self.refused},
            },
        }
