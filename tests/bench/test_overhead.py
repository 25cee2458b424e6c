"""The measurement of the host's overhead: its load runs as it says, its texts are checked, its bars can be missed."""

from __future__ import annotations

import json

import pytest

from legato.bench import overhead
from legato.bench.overhead import InstantRunner, Load, Measurement, main
from legato.plan import Emission


def test_a_window_counts_only_turns_that_decode_and_nothing_else() -> None:
    load = Load(batch=4, prompt=600, output=200)
    measured = Measurement(load).window(150)
    assert len(measured.decode) == 150 < len(measured.turns)
    assert set(measured.decode) <= set(measured.turns)
    assert not measured.wrong


def test_wrong_text_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = InstantRunner._decode

    def forgetful(self, number, row) -> Emission:
        emission = decode(self, number, row)
        return Emission(number, (0,) * len(emission.tokens), emission.done, emission.accepted, emission.drafted)

    monkeypatch.setattr(InstantRunner, "_decode", forgetful)
    assert Measurement(Load(batch=2, prompt=64, output=40)).window(60).wrong > 0


def test_a_missed_bar_fails_and_a_line_says_the_conditions(monkeypatch, tmp_path, capsys) -> None:
    path = tmp_path / "new" / "overhead.jsonl"
    arguments = ["--batch", "1", "--windows", "2", "--turns", "50", "--out", str(path)]
    monkeypatch.setattr(overhead, "BARS_US", {1: 1e9})
    assert main(arguments) == 0
    monkeypatch.setattr(overhead, "BARS_US", {1: 0.1})
    assert main(arguments) == 1
    assert "MISSED" in capsys.readouterr().out
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 2
    wanted = {
        "bench",
        "name",
        "case",
        "batch",
        "median_us",
        "p20_us",
        "p80_us",
        "correct",
        "gpu",
        "commit",
        "dirty",
        "command",
    }
    assert wanted <= set(lines[0])
    assert lines[0]["correct"] and lines[0]["p20_us"] <= lines[0]["median_us"] <= lines[0]["p80_us"]
