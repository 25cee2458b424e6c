"""Sources of prompts: the same seed gives the same sessions, stated entropy is the entropy, bad files say what is wrong."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from legato.bench.load.prompts import HELD_OUT, Source
from legato.config import ConfigError


@pytest.mark.parametrize("name", ["synthetic", "random", "held-out", "agents"])
def test_a_seed_fixes_every_session(name: str) -> None:
    assert Source(name, seed=3).sessions(5) == Source(name, seed=3).sessions(5) != Source(name, seed=4).sessions(5)


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_synthetic_words_carry_the_stated_entropy(bits: int) -> None:
    (session,) = Source("synthetic", input_tokens=100_000, entropy_bits=bits).sessions(1)
    counts = Counter(session.turns[0].split()[:-1])
    total = counts.total()
    measured = -sum(count / total * math.log2(count / total) for count in counts.values())
    assert len(counts) == 2**bits and measured == pytest.approx(bits, abs=0.01)


def test_lengths_are_as_asked() -> None:
    for name in ("synthetic", "held-out"):
        assert {len(session.turns[0]) for session in Source(name, input_tokens=1250).sessions(4)} == {5000}


def test_held_out_prompts_are_used_once_before_any_is_used_again() -> None:
    count = len(HELD_OUT.read_text().splitlines())
    everything = Source("held-out").sessions(2 * count)
    assert len({session.turns for session in everything[:count]}) == count
    assert Counter(session.turns for session in everything).most_common(1)[0][1] == 2


def test_agents_share_their_system_prompt(tmp_path: Path) -> None:
    sessions = Source("agents", turns=4).sessions(3)
    assert len({session.system for session in sessions}) == 1 and {len(session.turns) for session in sessions} == {4}
    assert len({session.turns[0] for session in sessions}) == 3


def test_files(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\n\ntwo\n")
    assert {session.turns for session in Source(str(lines)).sessions(2)} == {("one",), ("two",)}
    records = tmp_path / "prompts.jsonl"
    records.write_text(
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"},'
        ' {"role": "assistant", "content": "x"}, {"role": "user", "content": "b"}]}\n'
    )
    (session,) = Source(str(records)).sessions(1)
    assert session.turns == ("a", "b") and session.system == "s"


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "holds no prompt"), ("{", "line 1: is not JSON"), ("[]", "text, prompt or messages"), ('{"messages": [3]}', "role"),
     ('{"messages": [{"role": "system", "content": "s"}]}', "no message of a user")],
)  # fmt: skip
def test_bad_files_say_what_is_wrong(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        Source(str(path)).sessions(1)


def test_missing_files_and_bad_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Source(str(tmp_path / "none.jsonl")).sessions(1)
    for bad in ({"entropy_bits": 0.0}, {"entropy_bits": 17.0}, {"turns": 0}, {"input_tokens": 0}):
        with pytest.raises(ConfigError):
            Source("synthetic", **bad)
