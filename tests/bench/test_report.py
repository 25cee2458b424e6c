"""Measurements read back: damaged lines are named, history finds what was measured twice, the page holds everything it says."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from legato.bench import lines, timeline, verdicts
from legato.bench.load.prompts import Source
from legato.bench.load.run import Load
from legato.bench.pareto import Point, Sweep, bound, measure
from legato.bench.roofline import Traffic
from legato.cli.flags import numbers
from legato.config import ConfigError
from tests.bench.load import still
from tests.bench.load.fake_server import FakeServer, Script

SETTING = {"gpu": None, "commit": "abc", "dirty": False, "command": "legato bench <it>", "date": "2026-11-29T10:00:00"}


def figure(us: float, commit: str, date: str, **changes: Any) -> dict[str, Any]:
    base = {"bench": "ops", "name": "top_k", "implementation": "sm90", "case": {"rows": 6}, "correct": True}
    return {**base, "median_us": us, "commit": commit, "date": date, "gpu": "H200", **changes}


def written(path: Path, found: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    return path


def test_folders_are_read_whole_and_requests_are_no_figures(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    written(tmp_path / "a" / "x.jsonl", [{"bench": "serve", "request": {}}, {"bench": "serve", "summary": {}}])
    written(tmp_path / "y.jsonl", [figure(1.0, "c", "d")])
    found = lines.read([tmp_path])
    assert len(found) == 3 and len(lines.of(found, "serve")) == 1 and found[0]["file"].endswith("x.jsonl")


@pytest.mark.parametrize(
    ("text", "message"), [("{", "line 1: is not JSON"), ("[1]", "which bench"), ("{}", "which bench")]
)
def test_damaged_records_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        lines.read([path])


def test_lines_of_a_folder_that_are_no_measurements_are_named(tmp_path: Path) -> None:
    written(tmp_path / "x.jsonl", [{"margin": 1}, figure(1.0, "c", "d")])
    told: list[str] = []
    assert [line["median_us"] for line in lines.read([tmp_path], told.append)] == [1.0]
    assert told == [f"{tmp_path / 'x.jsonl'}: 1 of 2 lines left out: they do not say which bench"]


def test_the_same_figure_measured_again_replaces_the_earlier_one() -> None:
    case = {"tp": 8, "rank": 0, "weights": "dummy"}
    old = figure(9.0, "a", "2026-01-01", bench="slice", case=case, context=8192, distinct_experts=44.0)
    new = {**old, "median_us": 7.0, "date": "2026-01-02", "case": {**case, "drafts": "stored"}, "distinct_experts": 44}
    lean = {**old, "case": {**case, "drafts": "lean"}}
    longer = {**old, "context": 80_000}
    assert lines.latest([old, new, lean, longer]) == [new, lean, longer]
    (history,) = timeline.series([old, new, lean, longer])
    assert [us for _, _, us in history.points] == [9.0, 7.0] and history.is_whole


def test_what_measurements_come_to_is_said_in_words() -> None:
    def point(k: int | None, users: int, one: float, of_all: float) -> dict[str, Any]:
        return {"k": k, "case": {"concurrency": users}, "user_tokens_per_s": one, "tokens_per_s_per_device": of_all}

    points = [point(0, 1, 20.0, 20.0), point(3, 1, 30.0, 30.0), point(0, 4, 9.0, 36.0), point(3, 4, 8.0, 32.0)]
    assert verdicts.pareto(points) == [
        "1 user: K = 3 is fastest for each, 30 tokens/s, 1.50 times K = 0.", "4 users: K = 0 is most in all, 36 tokens/s.",
    ]  # fmt: skip
    assert verdicts.pareto([{**points[0], "k": None}, points[1]]) == [
        "1 user: K = 3 is fastest for each, 30 tokens/s, 1.50 times the server's K.",
        "1 user: K = 3 is most in all, 30 tokens/s, 1.50 times the server's K.",
    ]  # fmt: skip
    case = {"tp": 8, "layers": 78}
    common = {"case": case, "k": 5, "batch": 1, "distinct_experts": 44}
    found = [{**common, "name": name, "context": context, "median_us": us} for name, context, us in (
        ("four bits", 1024, 7000.0), ("four bits", 8192, 8000.0), ("eight bits", 8192, 10000.0),
    )]  # fmt: skip
    assert verdicts.share(found, lambda line: line["name"]) == [
        "Of 2 measured alike, four bits is fastest: 1.25 times as fast as eight bits.",
        "four bits: from 1,024 to 8,192 tokens an iteration goes from 7.00 to 8.00 ms (1.14 times).",
    ]
    taken = [
        ("overlap", "settled first", 4096, 1.1),
        ("one graph", "three graphs", 4096, 1.01),
        ("draft weights", "fewer bits", 4096, 0.9),
        ("IndexShare", "own", 4096, 0.96),
        ("IndexShare", "own", 1_000_000, 1.05),
    ]
    ablated = [
        {"decision": decision, "implementation": name, "context": context, "times": times}
        for decision, name, context, times in taken
    ]
    assert verdicts.ablate(ablated) == [
        "What pays: overlap (settled first: 1.10 times as long); IndexShare (own at 1,000,000 tokens: 1.05 times as long).",
        "No difference within 2 %: three graphs.",
        "Faster than as it is: own at 4,096 tokens (0.96 times as long).",
        "Faster than as it is: fewer bits (0.90 times as long).",
    ]


def test_missing_and_empty_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        lines.read([tmp_path / "none"])
    with pytest.raises(ConfigError, match="no measurements"):
        lines.read([tmp_path])


def test_history_is_the_best_of_each_commit_and_leaves_wrong_results_out() -> None:
    found = timeline.series(
        [
            figure(40.0, "a", "2026-01-01", implementation="reference"),
            figure(20.0, "b", "2026-01-02"),
            figure(22.0, "b", "2026-01-02"),
            figure(1.0, "c", "2026-01-03", correct=False),
            figure(9.0, "d", "2026-01-03", gpu="H100"),
            figure(9.0, "d", "2026-01-03", case={"rows": 7}),
            figure(10.0, "e", "2026-01-04"),
        ]
    )
    assert [[point[2] for point in row.points] for row in found] == [[40.0, 20.0, 10.0]]
    assert found[0].speedup == 4.0


def test_lists_of_numbers() -> None:
    assert numbers("--lengths", "128, 1K,2k") == (128, 1024, 2048) and numbers("--drafts", "") == ()
    with pytest.raises(ConfigError, match="--drafts"):
        numbers("--drafts", "1,x")


async def swept(endpoint: Any, load: Load, sweep: Sweep, *arguments: str) -> list[Point]:
    return [point async for point in measure(endpoint, load, sweep, arguments, lambda _: None)]


def test_a_sweep_measures_each_number_of_users_on_a_running_server(tmp_path: Path) -> None:
    from legato.bench.load.arrivals import ClosedLoop
    from legato.bench.load.endpoint import Endpoint

    load = Load(Source("synthetic", input_tokens=5), 1, ClosedLoop(1), warmup=0)

    async def both() -> tuple[list[Point], int]:
        async with FakeServer(Script(first_s=0.02, gap_s=0.02, chunk_tokens=(2, 2, 2), metrics=True)) as server:
            points = await swept(Endpoint(server.url, "", max_tokens=16), load, Sweep((), (1, 3), 2))
            return points, len(server.seen)

    points, asked = still.run(both())
    assert [point.result.summary.requests for point in points] == [2, 6] and asked == 8
    assert points[1].tokens_per_s == pytest.approx(3 * points[0].tokens_per_s)
    assert points[0].iteration_s == pytest.approx(0.02)
    assert bound(Traffic(None, 1, 1, 1, 1, 1, 1, 1, 1), 1e9, points[0], 10) is None, "K is the server's own secret"


def test_a_server_that_does_not_come_up_is_quoted() -> None:
    from legato.bench.load.arrivals import ClosedLoop
    from legato.bench.load.endpoint import Endpoint

    load = Load(Source("synthetic"), 1, ClosedLoop(1))
    with pytest.raises(ConfigError, match="no-such-flag"):
        asyncio.run(swept(Endpoint("", ""), load, Sweep((0,), (1,)), "--no-such-flag"))


def summary(ttft: float | None = 0.1) -> dict[str, Any]:
    spread = {"mean": ttft, "p50": ttft, "p90": ttft, "p99": ttft, "largest": ttft, "count": 1}
    kinds = dict.fromkeys(("ttft", "tpot", "chunk_gap", "e2e", "lag"), spread)
    return {**kinds, "requests": 4, "failed": 1, "tokens_per_s": 50.0, "goodput_per_s": None}


@pytest.mark.parametrize(("allowed", "scale"), [(120.0, "linear"), (1200.0, "log")])
def test_points_far_below_their_roofline_are_not_pressed_into_a_corner(allowed: float, scale: str) -> None:
    pytest.importorskip("matplotlib")
    from legato.bench import plots

    point = {"case": {"concurrency": 2}, "k": 5, "user_tokens_per_s": 30.0, "tokens_per_s_per_device": 55.0}
    bound_ = {"user_tokens_per_s": 60.0, "tokens_per_s_per_device": allowed}
    (axis,) = plots.pareto([{**point, "roofline": bound_}]).axes
    assert axis.get_xscale() == axis.get_yscale() == scale


def test_speed_is_compared_case_by_case_and_wrong_results_are_left_out() -> None:
    pytest.importorskip("matplotlib")
    from legato.bench import plots

    def line(implementation: str, rows: int, us: float, correct: bool = True) -> dict[str, Any]:
        case = {"rows": rows, "n": 8, "k": 4}
        times = {"median_us": us, "isolated_us": 2 * us, "correct": correct}
        return {"name": "linear", "implementation": implementation, "case": case, **times}

    found = [line("ours", rows, 2.0) for rows in (1, 2, 4, 8)] + [
        line("theirs", rows, 3.0 * rows) for rows in (1, 2, 4)
    ]
    found += [line("theirs", 8, 0.1, correct=False), line("theirs", 16, 5.0)]
    chain, alone = plots.speed_up(found).axes
    for axis in (chain, alone):
        assert axis.lines[-2].get_label() == "geometric mean of all"
        assert axis.lines[-2].get_xydata() == pytest.approx(np.array([[1, 1.5], [2, 3.0], [4, 6.0]]))
    assert [text.get_text() for text in chain.texts] == ["1.50", "3.00", "6.00"]


def test_the_page_shows_every_benchmark_and_names_what_it_leaves_out() -> None:
    pytest.importorskip("matplotlib")
    from legato.bench import report

    serve_case = {"arrivals": "closed <loop>", "prompts": "held-out", "max_tokens": 8}
    found = [
        {**SETTING, "bench": "serve", "name": "m", "case": serve_case, "summary": summary(), "accept_length": {"value": 2.5}},
        {**SETTING, "bench": "serve", "name": "m", "case": serve_case, "summary": summary(None), "accept_length": None},
        {
            **SETTING, "bench": "pareto", "name": "m", "case": {"concurrency": 2}, "k": 5, "median_us": 9e4, "summary": summary(),
            "user_tokens_per_s": 30.0, "tokens_per_s_per_device": 55.0, "accept_length": 2.0,
            "roofline": {"user_tokens_per_s": 60.0, "tokens_per_s_per_device": 120.0},
        },
        {
            **SETTING, "bench": "isl", "name": "m", "implementation": "cpu", "k": 5, "context": 512, "median_us": 7e4,
            "accept_length": 3.0, "accept_length_simulated": True, "tokens_per_s": 40.0, "prefill_s": 1.0, "floor_us": 3e4,
        },
        {**SETTING, **figure(5.0, "a", "2026-11-29"), "roofline_percent": 50.0},
        {**SETTING, **figure(5.0, "a", "2026-11-29"), "correct": False, "roofline_percent": 99.0, "name": "wrong_op"},
        {**SETTING, "bench": "soak"},
    ]  # fmt: skip
    page = report.page(found)
    assert page.count("<svg") == 4 and "Not shown here: soak" in page and "simulated" in page
    assert "closed &lt;loop&gt;" in page and "closed <loop>" not in page and "legato bench &lt;it&gt;" in page
    assert not re.search(r"(src|href)=[\"']?https?:", page), "self-contained"
    assert "2.50" in page and page.count("What it does not show") == 4
