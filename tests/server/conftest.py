"""A small byte-level BPE with GLM's control tokens and GLM-5.2's template, made on the spot: text tests need no checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from legato.server.chat import ChatTemplate
from legato.server.text import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
CONTROL = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>",
)  # fmt: skip
TAGS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<tool_response>", "</tool_response>",
)  # fmt: skip
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train() -> Backend:
    """600 entries trained on this very file and the architecture test, then the control tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([Path(__file__).read_text(), "The user is a person. Größe äöü 你好世界 " * 20], trainer)
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in TAGS])
    prefix = [(text, backend.token_to_id(text)) for text in ("[gMASK]", "<sop>")]
    backend.post_processor = processors.TemplateProcessing(single="[gMASK] <sop> $A", special_tokens=prefix)
    return backend


@pytest.fixture(scope="session")
def description() -> dict[str, Any]:
    """The parsed tokenizer.json."""
    return json.loads(train().to_str())


@pytest.fixture(scope="session")
def backend(description: dict[str, Any]) -> Backend:
    """The same tokenizer in the tokenizers library, control tokens and all: the oracle."""
    return Backend.from_str(json.dumps(description))


@pytest.fixture(scope="session")
def tokenizer(description: dict[str, Any]) -> Tokenizer:
    return Tokenizer(description)


@pytest.fixture(scope="session")
def template_source() -> str:
    return (ROOT / "tests" / "server" / "chat_template.jinja").read_text()


@pytest.fixture(scope="session")
def template(tokenizer: Tokenizer, template_source: str) -> ChatTemplate:
    return ChatTemplate(template_source, tokenizer)
