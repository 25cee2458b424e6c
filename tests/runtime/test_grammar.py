"""The grammar gate: what it allows at every place of a verify window, and that it stands behind the accepted tokens exactly."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from legato.checkpoints import SMALL
from legato.llm import vocabulary_of
from legato.runtime.grammar import MAX_INDENT, MAX_PROPERTIES, Gate, Grammars, Vocabulary, allowed_tokens
from legato.server.text.tokenizer import Folder, Tokenizer
from legato.types import Grammar, ParameterError

WIDTH = 6
MANY = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(MAX_PROPERTIES + 1)}}
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}, "why": {"type": "array", "items": {"type": "string"}}},
    "required": ["answer", "why"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
TEXT = '{"answer": 42, "why": ["it is", "so"]}'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.open(Folder(SMALL))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return vocabulary_of(tokenizer, 8192)


@pytest.fixture(scope="module")
def grammars(vocabulary: Vocabulary) -> Grammars:
    return Grammars(vocabulary)


@pytest.fixture(scope="module")
def think(tokenizer: Tokenizer) -> int:
    return tokenizer.control["</think>"]


def allowed(mask: bytes) -> set[int]:
    return set(allowed_tokens([mask], 8192)[0].nonzero().view(-1).tolist())


def state(gate: Gate) -> set[int]:
    """Everything that shows of where a gate stands: what it allows next."""
    return allowed(gate.masks([])[0])


def illegal_at(gate: Gate, tokens: list[int], rng: random.Random) -> int:
    """A token that the gate does not allow behind `tokens`."""
    legal = allowed(gate.masks(tokens)[len(tokens)])
    return rng.choice([token for token in range(8172) if token not in legal])


@pytest.mark.parametrize("reasoning", [0, 3])
@pytest.mark.parametrize("width", range(1, WIDTH + 1))
def test_accepted_batches_split_anywhere(
    grammars: Grammars, tokenizer: Tokenizer, think: int, reasoning: int, width: int
) -> None:
    """The end of reasoning and the first tokens of the answer in one iteration, cut at every place, with all drafts right, or an
    illegal one at every depth: the gate stands where a gate does that was moved token by token."""
    rng = random.Random(width)
    before = [*tokenizer.encode("so { we")[:reasoning], think]
    text = [*before, *tokenizer.encode(TEXT)]
    grammar = Grammar(JSON.kind, JSON.text, think)
    states = []
    walker = grammars.gate(grammar)
    for token in text:
        states.append(state(walker))
        walker.accept([token])
    states.append(state(walker))
    for first in range(1, width + 1):
        gate, at = grammars.gate(grammar), 0
        while at < len(text):
            count = first if at == 0 else min(width, len(text) - at)
            drafts = text[at : at + count]
            # Up to `depth` the drafts are right; the next one is illegal where a grammar holds, and there the window ends.
            depth = rng.randrange(count + 1)
            wrong = [] if at + depth < len(before) else [illegal_at(gate, drafts[:depth], rng)]
            masks = gate.masks([*drafts[:depth], *wrong, *drafts[depth:]][:WIDTH])
            if wrong and depth < WIDTH:
                assert len(masks) == depth + 1
            assert [allowed(mask) for mask in masks[: depth + 1]] == states[at : at + depth + 1]
            assert state(gate) == states[at], "looking ahead moved the gate"
            gate.accept(drafts)
            at += count
            assert state(gate) == states[at]
    assert states[-1] == set(grammars.vocabulary.end_ids), "a complete text can only end"


@pytest.mark.parametrize("depth", range(WIDTH))
def test_an_illegal_draft_is_found_at_its_place(grammars: Grammars, tokenizer: Tokenizer, depth: int) -> None:
    text, rng = tokenizer.encode(TEXT), random.Random(depth)
    for at in range(len(text) - depth):
        gate = grammars.gate(JSON, text[:at])
        drafts = text[at : at + depth]
        wrong = illegal_at(gate, drafts, rng)
        masks = gate.masks([*drafts, wrong, *text[at + depth :]])
        assert len(masks) == depth + 1
        assert wrong not in allowed(masks[depth])
        assert all(token in allowed(mask) for token, mask in zip(drafts, masks, strict=False))
        assert state(gate) == state(grammars.gate(JSON, text[:at]))


def test_random_walks_step_back_exactly(grammars: Grammars) -> None:
    """Legal random text, looked ahead of by other legal random text: the same as without ever looking ahead."""
    rng = random.Random(5)
    for grammar in (
        JSON,
        Grammar("regex", "(ab|[0-9]{2,5}|x y)*z"),
        Grammar("grammar", 'start: ("a" | "(" start ")")+'),
    ):
        gate, plain = grammars.gate(grammar), grammars.gate(grammar)
        for _ in range(60):
            ahead: list[int] = []
            for _ in range(rng.randrange(WIDTH)):
                ahead.append(rng.choice(sorted(allowed(gate.masks(ahead)[-1]))))
                if len(gate.masks(ahead)) <= len(ahead):
                    break
            choices = state(gate)
            assert choices == state(plain)
            token = rng.choice(sorted(choices))
            if token in grammars.vocabulary.end_ids:
                break
            gate.accept([token])
            plain.accept([token])


def test_reasoning_is_free_but_holds_no_other_control_token(grammars: Grammars, think: int) -> None:
    """Neither the end of the answer nor the start of a call, which would be outside the grammar."""
    gate = grammars.gate(Grammar("regex", "yes", think))
    assert state(gate) == set(range(8192)) - grammars.vocabulary.control_ids | {think}
    assert set(grammars.vocabulary.end_ids) < grammars.vocabulary.control_ids
    gate.accept([5, 6, 7])
    assert gate.is_open
    gate.accept([8, think])
    assert not gate.is_open and state(gate) != set()
    assert all(b"yes".startswith(grammars.vocabulary.tokens[token]) for token in state(gate))
    # A second one is text like any other: not allowed here.
    assert think not in state(gate)


def test_a_gate_resumes_behind_what_was_generated(grammars: Grammars, tokenizer: Tokenizer, think: int) -> None:
    text = [1, 2, think, *tokenizer.encode(TEXT)]
    grammar = Grammar(JSON.kind, JSON.text, think)
    walked = grammars.gate(grammar)
    for at, token in enumerate(text):
        assert state(grammars.gate(grammar, text[:at])) == state(walked)
        walked.accept([token])


def test_whitespace_is_bounded(grammars: Grammars, tokenizer: Tokenizer) -> None:
    spaces = [tokenizer.encode(" ")[0], tokenizer.encode("\n")[0], tokenizer.encode("\t")[0]]
    for prefix in ("{", '{"answer":', '{"answer": 1, "why": ["a"'):
        gate = grammars.gate(JSON, tokenizer.encode(prefix))
        count = 0
        while some := state(gate) & set(spaces):
            gate.accept([min(some)])
            count += 1
            assert count <= MAX_INDENT + 1
        assert count >= 8, "indented text is still possible"
        assert state(gate), "and something else is always possible"


def test_control_tokens_are_never_text(grammars: Grammars, tokenizer: Tokenizer) -> None:
    gate = grammars.gate(JSON, tokenizer.encode('{"answer": 1, "why": ["'))
    assert not state(gate) & grammars.vocabulary.control_ids
    assert state(grammars.gate(Grammar("grammar", 'start: <tool_call> "a"'))) == {tokenizer.control["<tool_call>"]}


def test_a_user_cannot_lift_the_bound_on_whitespace(grammars: Grammars, tokenizer: Tokenizer) -> None:
    schema = {**SCHEMA, "x-guidance": {"whitespace_pattern": "[ ]+", "whitespace_flexible": True}}
    gate = grammars.gate(Grammar("json_schema", json.dumps(schema)), tokenizer.encode("{"))
    gate.accept(tokenizer.encode(" "))
    assert tokenizer.encode(" ")[0] not in state(gate)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type": "nothing"}'),
        ("json_schema", '{"type": 5}'),
        ("json_schema", "[]"),
        ("json_schema", '{"$ref": "#/nowhere"}'),
        ("json_schema", '{"not": {"type": "string"}}'),
        ("json_schema", '{"type": "string", "pattern": "("}'),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}'),
        ("regex", "("),
        ("regex", "a{3,1}"),
        ("regex", "(?=a)b"),
        ("grammar", ""),
        ("grammar", 'start: "a" b'),
        ("grammar", 'start "a"'),
        ("regex", r"[^\s\S]"),
        ("regex", r"a[^\s\S]"),
        ("json_schema", '{"$ref": "#"}'),
        ("grammar", "start: start"),
        ("grammar", 'start: "a" start'),
        ("grammar", 'start: "a" x\nx: "b" x'),
    ],
)
def test_a_bad_grammar_is_refused_by_name_and_harms_nothing(grammars: Grammars, kind, text: str) -> None:
    with pytest.raises(ParameterError) as caught:
        grammars.check(Grammar(kind, text))
    assert caught.value.name == kind and len(str(caught.value)) > len(kind) + 5
    assert state(grammars.gate(JSON))


@pytest.mark.parametrize(
    ("kind", "text", "first"),
    [
        ("regex", "", "end"),
        ("grammar", 'start: ""', "end"),
        ("regex", "a", "a"),
        ("grammar", 'start: "a" start?', "a"),
        ("regex", r"[^\s\S]|a", "a"),
        ("json_schema", '{"type": "array", "items": {"$ref": "#"}}', "["),
    ],
)
def test_a_grammar_with_one_way_to_begin_is_taken(
    kind, text: str, first: str, grammars: Grammars, tokenizer: Tokenizer
) -> None:
    grammars.check(Grammar(kind, text))
    ends = set(grammars.vocabulary.end_ids)
    expected = ends if first == "end" else set(tokenizer.encode(first))
    assert expected <= state(grammars.gate(Grammar(kind, text)))


@pytest.mark.full
def test_a_regex_that_no_matcher_can_hold_is_refused(grammars: Grammars) -> None:
    with pytest.raises(ParameterError, match=r"^regex: nothing that fits it can be generated"):
        grammars.check(Grammar("regex", "((a{1000}){1000}){1000}"))
    assert state(grammars.gate(JSON))


def test_without_end_tokens_there_is_no_grammar(vocabulary: Vocabulary) -> None:
    with pytest.raises(ParameterError, match="end tokens"):
        Grammars(replace(vocabulary, end_ids=())).check(JSON)


def test_masks_as_tensors() -> None:
    mask = allowed_tokens([b"\x05", b"\xff\xff\xff"], 12)
    assert mask.tolist() == [[True, False, True] + [False] * 9, [True] * 12]


def test_a_grammar_longer_than_any_is_refused_at_once(grammars: Grammars) -> None:
    with pytest.raises(ParameterError, match="may have 1048576 characters, got 1048577"):
        grammars.check(Grammar("regex", "a" * (2**20 + 1)))


def test_objects_of_many_properties_are_followed_and_of_too_many_refused(
    grammars: Grammars, tokenizer: Tokenizer
) -> None:
    few = {**MANY, "properties": dict(list(MANY["properties"].items())[:600])}
    gate = grammars.gate(Grammar("json_schema", json.dumps(few)))
    for token in tokenizer.encode('{"p5": "x", "p599": "y"}'):
        assert token in state(gate)
        gate.accept([token])
    with pytest.raises(
        ParameterError, match=f"json_schema: an object may have {MAX_PROPERTIES} properties, got one with"
    ):
        grammars.check(Grammar("json_schema", json.dumps({"items": [MANY]})))
