"""The tokenizer: agreement with the tokenizers library, no control tokens from text, and files that are missing or damaged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from legato.server.text.tokenizer import GUARD, Folder, Tokenizer, TokenizerError, well_formed
from tests.tiny_text import CONTROL, TAGS

TEXTS = [
    "", " ", "\n", "\r\n", "def f(x):\n    return x\n", "  leading", "trailing  ", "tab\tand\x00nul", "Größe", "你好，世界",
    "naïve café", "🎉", "👨‍👩‍👧", "e\u0301", "12345 001", "'re we'll", "x" * 200, "<", "[", "<|", "|>", "<|user", "a<b>c[d]",
]  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=repr)
def test_ordinary_text_has_the_ids_of_the_library(text: str, tokenizer: Tokenizer, backend: Backend) -> None:
    ids = tokenizer.encode(text)
    assert ids == backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_prompt(text) == backend.encode(text).ids


@pytest.mark.parametrize("control", CONTROL + TAGS)
def test_typed_control_tokens_stay_text(control: str, tokenizer: Tokenizer, backend: Backend) -> None:
    assert backend.encode(control, add_special_tokens=False).ids == [tokenizer.control[control]]  # the trap is real
    for text in (control, f"a{control}b", control * 3, f" {control}\n"):
        ids = tokenizer.encode(text)
        assert not set(ids) & set(tokenizer.control.values())
        assert tokenizer.decode(ids) == text
        guarded = tokenizer.guard(text)
        assert tokenizer.encode_template(guarded) == ids
    assert tokenizer.encode_template(f"x{control}y") == backend.encode(f"x{control}y", add_special_tokens=False).ids


@pytest.mark.parametrize("control", CONTROL + TAGS)
def test_control_tokens_do_not_form_across_borders(control: str, tokenizer: Tokenizer) -> None:
    """Two guarded strings side by side, or one beside text of the template, never make a control token."""
    for cut in range(1, len(control)):
        left, right = control[:cut], control[cut:]
        for rendered in (
            tokenizer.guard(left) + tokenizer.guard(right),
            left + tokenizer.guard(right),
            tokenizer.guard(left) + right,
        ):
            assert not set(tokenizer.encode_template(rendered)) & set(tokenizer.control.values()), (left, right)


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from([*CONTROL, *TAGS, "<", ">", "[", "]", "|", "user", " ", "é", "🎉", "\ud800", "\udfff"])
    )
)
def test_guarded_text_never_makes_control_tokens(parts: list[str], tokenizer: Tokenizer) -> None:
    text = "".join(parts)
    ids = tokenizer.encode_template("<|user|>" + tokenizer.guard(text) + "<|assistant|>")
    assert ids[0] == tokenizer.control["<|user|>"] and ids[-1] == tokenizer.control["<|assistant|>"]
    assert ids[1:-1] == tokenizer.encode(text)
    assert tokenizer.decode(ids) == well_formed(text)


def test_whole_word_entries_cannot_smuggle_control_tokens(description: dict[str, Any]) -> None:
    """`ignore_merges` maps a whole pre-token to its entry in the vocabulary: control tokens listed there must not be found."""
    description = copy.deepcopy(description)
    model: dict[str, Any] = {**description["model"], "ignore_merges": True}
    model["vocab"]["<sop>"] = 604
    tokenizer = Tokenizer(
        {
            **description,
            "model": model,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        }
    )
    assert not set(tokenizer.encode("<sop>")) & set(tokenizer.control.values())


def test_hidden_and_visible_control_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_template("<|assistant|><think>hm</think>yes<|endoftext|>")
    assert tokenizer.decode(ids) == "<think>hm</think>yes"
    assert tokenizer.control_text(tokenizer.control["<|user|>"]) == "<|user|>"
    assert tokenizer.control_text(0) is None


def test_bytes_of_every_token_agree_with_the_library(tokenizer: Tokenizer, backend: Backend) -> None:
    for index in range(tokenizer.vocab_size):
        assert tokenizer.token_bytes(index).decode("utf-8", "replace") == backend.decode([index])
    assert (
        tokenizer.token_bytes(tokenizer.vocab_size) == tokenizer.token_bytes(10**9) == tokenizer.token_bytes(-1) == b""
    )


def test_invalid_utf8_is_replaced(tokenizer: Tokenizer, backend: Backend) -> None:
    ids = tokenizer.encode("🎉")
    assert tokenizer.decode(ids[:1]) == backend.decode(ids[:1]) == "\ufffd"


def test_lone_surrogates_are_replaced(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(f"a{GUARD}b")) == "a\ufffdb"
    assert tokenizer.decode(tokenizer.encode("\ud83c\udf89")) == "🎉"


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, description: dict[str, Any]) -> Path:
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    return tmp_path


def test_tokenizer_json_is_enough(folder: Path, tokenizer: Tokenizer) -> None:
    opened = Tokenizer.open(Folder(folder))
    assert opened.encode("def f():") == tokenizer.encode("def f():")
    assert opened.stop_ids == frozenset() and opened.vocab_size == 620


@pytest.mark.parametrize(
    "config",
    [
        {"tokenizer_class": "TokenizersBackend"},
        {"tokenizer_class": "NoSuchTokenizer", "auto_map": {"AutoTokenizer": ["x.Y", None]}},
        {"extra_special_tokens": ["<|user|>"], "additional_special_tokens": [{"content": "<|user|>"}]},
        {"eos_token": {"content": "<|endoftext|>"}, "bos_token": None},
    ],
)
def test_tokenizer_config_cannot_break_it(folder: Path, config: dict[str, Any]) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.open(Folder(folder)).decode(Tokenizer.open(Folder(folder)).encode("x")) == "x"


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [600, 607, 609]}, {}, {600, 607, 609}),
        ({"eos_token_id": 600}, {"eos_token_id": [607]}, {600, 607}),
        (None, {"eos_token_id": 609}, {609}),
        ({"eos_token_id": None}, None, set()),
    ],
)
def test_stop_ids_come_from_either_file(folder: Path, generation: Any, config: Any, expected: set[int]) -> None:
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            (folder / name).write_text(json.dumps(value))
    assert Tokenizer.open(Folder(folder)).stop_ids == expected


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", None, "no such file"),
        ("tokenizer.json", "{", "not valid JSON"),
        ("tokenizer.json", "[]", "not an object"),
        ("tokenizer.json", "{}", "no such file"),
        ("tokenizer.json", '{"decoder": {"type": "ByteLevel"}}', "model"),
        (
            "tokenizer.json",
            '{"decoder": {"type": "ByteLevel"}, "model": {"type": "Nonsense"}}',
            "not the file of a usable",
        ),
        ("tokenizer.json", '{"decoder": {"type": "Metaspace"}, "model": {}}', "byte-level BPE"),
        ("generation_config.json", '{"eos_token_id": "no"}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": [true]}', "eos_token_id"),
        ("generation_config.json", '{"eos_token_id": [2, 999999]}', "eos_token_id 999999"),
    ],
)
def test_damaged_files_are_named(folder: Path, name: str, content: str | None, words: str) -> None:
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.open(Folder(folder))
    assert words in str(caught.value) and str(folder / name) in str(caught.value)
