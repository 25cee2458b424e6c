"""The examples say what is true: every metric that the dashboard queries exists, the YAML file is understood, paths are there."""

from __future__ import annotations

import json
import re
from pathlib import Path

from typer.testing import CliRunner

from legato.engine.messages import Counters, Report
from legato.server.telemetry.metrics import Metrics
from legato.types import Stats
from tests.cli.test_serve_flags import parsed

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_the_dashboard_queries_what_is_emitted() -> None:
    metrics = Metrics("glm")
    metrics.watch(lambda: Report(Stats(), Counters()))
    with metrics.request_started() as meter:
        meter.step("content", 1)
        meter.step("content", 2, 1, 5)
        meter.finished("stop", prompt_tokens=1, queued_s=0.0)
    text = metrics.render().decode()
    emitted = set(re.findall(r"^(\w+)[{ ]", text, re.MULTILINE))
    labels = set(re.findall(r"[{,](\w+)=", text))
    dashboard = json.loads((EXAMPLES / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) >= 30
    for query in queries:
        names = re.findall(r"legato_\w+", query)
        assert names and set(names) <= emitted, query
        grouped = {name for group in re.findall(r"by \(([\w, ]+)\)", query) for name in group.split(", ")}
        assert grouped <= labels | {"le"}, query
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}")
    used = {name for query in queries for name in re.findall(r"legato_\w+", query)}
    counters = {name for name in emitted if name.endswith("_total")}
    assert counters - used <= {"legato_reasoning_tokens_total", "legato_drafted_tokens_total"}, "a counter nobody sees"


def test_the_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((EXAMPLES / "grafana.json").read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells


def test_the_file_of_flags_is_understood() -> None:
    flags = parsed("--config", str(EXAMPLES / "serve.yaml"))
    assert flags.engine().model is None and flags.engine().verify_speculation == 0.01
    assert flags.server().metrics_compat == {"vllm", "sglang"} and flags.log_format == "json"


def test_commands_in_unit_and_image_exist() -> None:
    from legato.__main__ import app

    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    for name, line in (("legato.service", r"ExecStart=(.*)"), ("Dockerfile", r"ENTRYPOINT (.*)")):
        found = re.search(line, (EXAMPLES / name).read_text())
        assert found is not None and "serve" in found[1]
        flags = set(re.findall(r"--[a-z-]+", found[1]))
        assert flags and all(flag in shown for flag in flags), flags
