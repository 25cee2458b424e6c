"""What several files here share: tokenizers and templates, a server around a script or a real engine, the openai client."""

from __future__ import annotations

import importlib
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from legato.config import Config, ExecutionConfig, ScheduleConfig
from legato.server.api.service import ModelText
from legato.server.app import create_app
from legato.server.engine.client import EngineClient
from legato.server.settings import SamplingDefaults, ServerSettings
from legato.server.telemetry.metrics import Metrics
from legato.server.text.chat_template import ChatTemplate
from legato.server.text.tokenizer import Folder, Tokenizer
from tests import tiny_text
from tests.server.live import Live
from tests.server.scripted import Server

SMALL = Path(__file__).resolve().parents[2] / "legato" / "checkpoints" / "small"


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


GLM_5_3 = """\
{%- set effort = reasoning_effort if reasoning_effort is defined and reasoning_effort in ['low', 'high'] else 'max' -%}
{%- set keep = clear_thinking is defined and not clear_thinking -%}
[gMASK]<sop><|system|>Reasoning Effort: {{ effort | capitalize }}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
<|assistant|><think>{% if keep %}{{ message.reasoning_content }}{% endif %}</think>{{ message.content }}
{%- else -%}
<|{{ message.role }}|>{{ message.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|><think>{%- endif -%}
"""
"""What GLM-5.3's template differs in, after public descriptions of it: effort low, high or max, no switch for reasoning."""


@pytest.fixture(scope="session")
def template_5_3(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate(GLM_5_3, tokenizer)


@pytest.fixture(scope="session")
def small_text() -> ModelText:
    """The text side of the checkpoint that ships with the package."""
    return ModelText.open(Folder(SMALL))


@pytest.fixture(scope="session")
def real() -> Iterator[Live]:
    """A server around a real engine in its own process, for all tests: the checkpoint of the package, in a context of 2048."""

    async def start() -> tuple[Any, Callable[[], Awaitable[None]]]:
        config = Config(schedule=ScheduleConfig(context=2048, max_running=4), execution=ExecutionConfig(threads=1))
        client = await EngineClient.start(config)
        files = Folder(Path(client.info.folder))
        metrics = Metrics("small", num_drafts=client.info.num_drafts, cache_tokens=client.info.cache_tokens)
        metrics.watch(lambda: client.last_report)
        settings = ServerSettings(model_names=("small",), defaults=SamplingDefaults.of_checkpoint(files.text))
        return create_app(client, ModelText.open(files), settings, metrics), client.close

    live = Live(start)
    yield live
    live.close()


@pytest.fixture(scope="module")
def openai() -> Any:
    """The client's package: its import takes long, so it is left to the process that runs these tests."""
    return importlib.import_module("openai")


@pytest.fixture(scope="module")
def openai_client(real: Live, openai: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def shared(small_text: ModelText) -> Iterator[Server]:
    """A scripted server, which the tests of a file share."""
    server = Server(small_text, ServerSettings())
    yield server
    server.close()


@pytest.fixture
def server(shared: Server) -> Server:
    """The same, as if new."""
    shared.reset()
    return shared


@pytest.fixture
def made(small_text: ModelText) -> Iterator[Callable[[ServerSettings], Server]]:
    """Servers with settings of their own."""
    servers: list[Server] = []

    def make(settings: ServerSettings) -> Server:
        servers.append(Server(small_text, settings))
        return servers[-1]

    yield make
    for each in servers:
        each.close()
