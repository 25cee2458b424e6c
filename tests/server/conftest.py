"""The tiny tokenizer and template as fixtures."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from legato.server.chat import ChatTemplate
from legato.server.text import Tokenizer
from tests import tiny_text


@pytest.fixture(scope="session")
def description() -> dict[str, Any]:
    """The parsed tokenizer.json."""
    return tiny_text.description()


@pytest.fixture(scope="session")
def backend(description: dict[str, Any]) -> Backend:
    """The same tokenizer in the tokenizers library, control tokens and all: the oracle."""
    return Backend.from_str(json.dumps(description))


@pytest.fixture(scope="session")
def tokenizer(description: dict[str, Any]) -> Tokenizer:
    return Tokenizer(description)


@pytest.fixture(scope="session")
def template_source() -> str:
    return tiny_text.TEMPLATE.read_text()


@pytest.fixture(scope="session")
def template(tokenizer: Tokenizer, template_source: str) -> ChatTemplate:
    return ChatTemplate(template_source, tokenizer)
