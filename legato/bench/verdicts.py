"""What a benchmark's lines come to, in a few sentences: what is better, and by how much.

Owns the words. Reads lines, draws and measures nothing. Called by `legato bench report`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from legato.bench.lines import Line

WITHIN = 0.02
"""What differs by less is called no difference."""


def pareto(lines: Sequence[Line]) -> list[str]:
    """Which number of drafts is best for the fewest and for the most users, against the fewest drafts."""
    ends = sorted({line["case"]["concurrency"] for line in lines})
    words = [
        _best_drafts([line for line in lines if line["case"]["concurrency"] == users], users, key, what)
        for users, key, what in (
            (ends[0], "user_tokens_per_s", "fastest for each"),
            (ends[-1], "tokens_per_s_per_device", "most in all"),
        )
    ]
    return [*dict.fromkeys(words)]


def _best_drafts(lines: Sequence[Line], users: int, key: str, what: str) -> str:
    best, least = max(lines, key=lambda line: line[key]), min(lines, key=lambda line: line["k"] or 0)
    drafts, fewest = (("the server's K" if line["k"] is None else f"K = {line['k']}") for line in (best, least))
    against = f", {best[key] / least[key]:.2f} times {fewest}" if drafts != fewest else ""
    return f"{_count(users, 'user')}: {drafts} is {what}, {best[key]:,.0f} tokens/s{against}."


def isl(lines: Sequence[Line]) -> list[str]:
    """What a longer prompt costs."""
    first, last = (choose(lines, key=lambda line: line["context"]) for choose in (min, max))
    return [
        f"{_grown(first, last).capitalize()}; the first token comes after {1e3 * first['prefill_s']:,.0f} and "
        f"{1e3 * last['prefill_s']:,.0f} ms."
    ]


def share(lines: Sequence[Line], name: Callable[[Line], str]) -> list[str]:
    """Which curve is fastest where several were measured alike, and what a longer context costs each."""
    return [*_fastest(lines, name), *_growths(lines, name)]


def _growths(lines: Sequence[Line], name: Callable[[Line], str]) -> Iterator[str]:
    for label in dict.fromkeys(name(line) for line in lines):
        own = sorted((line for line in lines if name(line) == label), key=lambda line: line["context"])
        if own[0]["context"] < own[-1]["context"]:
            yield f"{label}: {_grown(own[0], own[-1])}."


def _fastest(lines: Sequence[Line], name: Callable[[Line], str]) -> Iterator[str]:
    alike: dict[tuple[object, ...], dict[str, float]] = {}
    for line in lines:
        key = (line["case"]["tp"], line["case"]["layers"], line["k"], line["batch"], line["context"])
        alike.setdefault((*key, line["distinct_experts"]), {})[name(line)] = line["median_us"]
    if not alike or len(most := max(alike.values(), key=len)) < 2:
        return
    ranked = sorted(most.items(), key=lambda item: item[1])
    (best, least_us), (worst, most_us) = ranked[0], ranked[-1]
    yield f"Of {len(ranked)} measured alike, {best} is fastest: {most_us / least_us:.2f} times as fast as {worst}."


def _grown(first: Line, last: Line) -> str:
    times = last["median_us"] / first["median_us"]
    return (
        f"from {first['context']:,} to {last['context']:,} tokens an iteration goes from {first['median_us'] / 1e3:.2f} to "
        f"{last['median_us'] / 1e3:.2f} ms ({times:.2f} times)"
    )


def ablate(lines: Sequence[Line]) -> list[str]:
    """What pays, the most first, and what makes no difference."""
    taken = sorted((line for line in lines if line["decision"] != "as it is"), key=lambda line: -line["times"])
    taken = [line for line in taken if line["implementation"] != "as it is"]
    at = {id(line): _at(line, taken) for line in taken}
    paying = [
        f"{line['decision']} ({line['implementation']}{at[id(line)]}: {line['times']:.2f} times as long)"
        for line in taken
        if line["times"] > 1 + WITHIN
    ]
    even = [f"{line['implementation']}{at[id(line)]}" for line in taken if abs(line["times"] - 1) <= WITHIN]
    costs = [line for line in taken if line["times"] < 1 - WITHIN]
    words = [f"What pays: {'; '.join(paying)}."] if paying else []
    words += [f"No difference within {100 * WITHIN:g} %: {'; '.join(even)}."] if even else []
    return words + [
        f"Faster than as it is: {line['implementation']}{at[id(line)]} ({line['times']:.2f} times as long)."
        for line in costs
    ]


def _at(line: Line, lines: Sequence[Line]) -> str:
    """The context, where the same was measured at several."""
    alike = (line["decision"], line["implementation"])
    contexts = {other["context"] for other in lines if (other["decision"], other["implementation"]) == alike}
    return f" at {line['context']:,} tokens" if len(contexts) > 1 else ""


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
