"""The measurement of the server's cost: times that text tells, delays that are read from a stream, and one small run of it."""

from __future__ import annotations

import json

import pytest

from legato.bench import server_cost
from legato.bench.paced_engine import PERIOD, TICK_S, TOKENS, seconds_since, spelled
from legato.bench.server_cost import Arrivals, Figures, Window, delays_of, main


@pytest.mark.parametrize("sent", [0.0, 1.23456, 149.9, 987654.321])
@pytest.mark.parametrize("delay", [0.0, 0.00042, 3.5])
def test_a_time_survives_being_spelled(sent: float, delay: float) -> None:
    assert len(spelled(sent)) == TOKENS
    assert seconds_since(spelled(sent), sent + delay) == pytest.approx(delay, abs=2 * TICK_S)
    assert PERIOD * TICK_S > 60


def test_a_text_that_is_no_time_is_refused() -> None:
    with pytest.raises(ValueError, match="is no time"):
        seconds_since("abc", 0.0)


def chunk(content: str | None = None, **more: object) -> bytes:
    choices = [] if content is None else [{"delta": {"content": content}}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


def test_delays_count_from_the_piece_that_completes_a_chunk() -> None:
    first, second = chunk(spelled(10.0)), chunk(spelled(10.5))
    usage = chunk(usage={"completion_tokens": 9}) + b"data: [DONE]\n\n"
    pieces = [(10.1, b"HTTP/1.1 200 OK\r\n\r\n" + chunk("a") + first[:20]), (10.2, first[20:] + second[:5])]
    delays, tokens = delays_of(Arrivals([*pieces, (10.6, second[5:]), (10.7, usage)]))
    assert delays == pytest.approx([0.2, 0.1], abs=2 * TICK_S) and tokens == 9


def test_a_chunk_costs_what_a_long_stream_costs_beyond_a_brief_one() -> None:
    figures = Figures()
    long = Window(10, 2.0, 10 * (0.003 + server_cost.CHUNKS * 50e-6), 0.0, [0.001])
    figures.take(Window(10, 1.0, 0.02, 0.0), Window(10, 1.0, 0.03, 0.0), long)
    assert figures.whole_us == pytest.approx([2000]) and figures.stream_us == pytest.approx([3000])
    assert figures.chunk_us == pytest.approx([50]) and figures.delay_us == pytest.approx([1000]) and not figures.wrong


@pytest.mark.full
def test_a_run_from_end_to_end_and_a_missed_bar(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(server_cost, "BAR_US", 0.001)
    path = tmp_path / "cost.jsonl"
    arguments = ["--concurrency", "2", "--windows", "1", "--requests", "4", "--out", str(path)]
    assert main(arguments) == 1 and "MISSED" in capsys.readouterr().out
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["name"] for line in lines] == [
        "request, whole", "request, streamed", "chunk, streamed", "delay of a chunk",
    ]  # fmt: skip
    assert all(line["correct"] and line["median_us"] > 0 and line["commit"] for line in lines)
