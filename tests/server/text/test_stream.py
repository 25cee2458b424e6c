"""Incremental text: the same result for every way to cut the tokens into steps, and nothing shown too early."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from legato.server.text.stream import StopMatcher, TextStream
from legato.server.text.tokenizer import Tokenizer


def all_cuts(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to cut a sequence into consecutive non-empty steps."""
    for mask in itertools.product((False, True), repeat=max(len(items) - 1, 0)):
        steps = [[items[0]]] if items else []
        for item, starts_step in zip(items[1:], mask):
            if starts_step:
                steps.append([])
            steps[-1].append(item)
        yield steps


def run(tokenizer: Tokenizer, steps: list[list[int]], stop: Sequence[str]) -> tuple[str, int, str | None, list[str]]:
    """Streams `steps`; returns the text, how many tokens counted, the stop string, and the text after each step."""
    stream = TextStream(tokenizer, stop)
    text, count, found, seen = "", 0, None, []
    for step in steps:
        delta = stream.push(step)
        text, count, found = text + delta.text, count + delta.num_tokens, found or delta.stop
        seen.append(text)
    if found is None:
        delta = stream.finish()
        text, found = text + delta.text, delta.stop
    return text, count, found, seen


def expected(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """By definition: the first character at which some stop string is complete; of those the longest."""
    for end in range(len(text) + 1):
        completed = [string for string in stop if text[:end].endswith(string)]
        if completed:
            longest = max(completed, key=len)
            return text[: end - len(longest)], longest
    return text, None


CASES = [
    ("The user is a person", ["a", "is", ","]),
    ("The user is a person", ["person", " a per", "erso"]),
    ("The user is", [" is", "user is", "s"]),
    ("你好世界🎉!", ["世", "🎉"]),
    ("你好世界🎉!", ["界🎉!"]),
    ("aaaaaab", ["aab"]),
    ("abcabcabd", ["abcabd"]),
    ("x\n\n\ny", ["\n\n"]),
    ("Größe äöü", ["öß", "äöüx"]),
    ("nothing here", ["zzz", "here!"]),
    ("🎉🎉", []),
]


@pytest.mark.parametrize(("text", "stop"), CASES)
def test_every_cut_gives_the_same_text(text: str, stop: list[str], tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text)[:10]
    text = tokenizer.decode(ids)
    right, right_stop = expected(text, stop)
    one_by_one = run(tokenizer, [[index] for index in ids], stop)
    assert one_by_one[0] == right and one_by_one[2] == right_stop
    for steps in all_cuts(ids):
        streamed, count, found, seen = run(tokenizer, steps, stop)
        assert (streamed, count, found) == one_by_one[:3]
        assert all(right.startswith(shown) for shown in seen)


@pytest.mark.parametrize("order", list(itertools.permutations(["a", "is", ",", "s a"])))
def test_order_of_stop_strings_does_not_matter(order: tuple[str, ...], tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The user is a")
    assert run(tokenizer, [ids], order)[:3] == run(tokenizer, [ids], ("a", "is", ",", "s a"))[:3]


def test_tokens_after_the_stop_do_not_count(tokenizer: Tokenizer) -> None:
    ids = [index for character in "abXcdef" for index in tokenizer.encode(character)]
    for offset in range(5):
        text, count, found, _ = run(tokenizer, [ids[:offset], ids[offset:]], ["X"])
        assert (text, count, found) == ("ab", 3, "X")
    stream = TextStream(tokenizer, ["X"])
    stream.push(ids)
    assert stream.push(ids).num_tokens == 0 and stream.finish().text == ""


def test_possible_starts_are_held_back(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["</end>"])
    shown = [stream.push(tokenizer.encode(character)).text for character in "a</en</enx"]
    assert shown == ["a", "", "", "", "", "</en", "", "", "", "</enx"]


def test_unfinished_characters_are_held_back(tokenizer: Tokenizer) -> None:
    token_of = {tokenizer.token_bytes(index): index for index in range(tokenizer.vocab_size)}
    ids = [token_of[bytes([byte])] for byte in "🎉".encode()]
    stream = TextStream(tokenizer)
    assert [stream.push([index]).text for index in ids] == ["", "", "", "🎉"]
    stream.push(ids[:3])
    assert stream.finish().text == "\ufffd"


def test_a_stop_string_may_hold_a_replacement_character(tokenizer: Tokenizer) -> None:
    half = tokenizer.encode("🎉")[:1]
    stream = TextStream(tokenizer, ["\ufffd"])
    assert stream.push([*tokenizer.encode("a"), *half]).text == "a"
    assert stream.finish().stop == "\ufffd"


def test_empty_steps_and_hidden_tokens(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["ab"])
    assert stream.push([]).num_tokens == 0
    hidden = tokenizer.control["<|user|>"]
    first = stream.push([*tokenizer.encode("a"), hidden])
    assert (first.text, first.num_tokens) == ("", 2)
    assert stream.push(tokenizer.encode("b")).stop == "ab"
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_random_tokens_cuts_and_stops(data: st.DataObject, tokenizer: Tokenizer) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    text = tokenizer.decode(ids)
    pieces = st.sampled_from([text[i : i + n] for i in range(len(text)) for n in (1, 2, 5)] or ["x"])
    stop = data.draw(st.lists(st.one_of(pieces, st.text(min_size=1, max_size=3)), max_size=4))
    steps: list[list[int]] = [[]]
    for index in ids:
        if data.draw(st.booleans()):
            steps.append([])
        steps[-1].append(index)
    streamed, count, found, seen = run(tokenizer, steps, stop)
    right, right_stop = expected(text, stop)
    assert (streamed, found) == (right, right_stop)
    assert count == run(tokenizer, [[index] for index in ids], stop)[1]
    assert all(right.startswith(shown) for shown in seen)
