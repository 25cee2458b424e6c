"""Every route against its own OpenAPI document, as schemathesis reads it: no server error, no reply outside its schema."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from legato.server.api.service import ModelText
from legato.server.app import create_app
from legato.server.engine.client import GenerationRequest
from legato.server.settings import ServerSettings
from legato.server.telemetry.metrics import Metrics
from legato.server.text.tokenizer import Folder
from tests.server.fake_engine import FakeEngine
from tests.server.live import Live

SMALL = Path(__file__).resolve().parents[2] / "legato" / "checkpoints" / "small"
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
    "response_schema_conformance", "negative_data_rejection", "unsupported_method", "allow_header_conformance",
)  # fmt: skip
"""All but `positive_data_acceptance`: that a regular expression compiles, or that a prompt fits, no schema can say."""


@pytest.mark.clients
def test_every_route_keeps_to_its_document(tmp_path: Path) -> None:
    text = ModelText.open(Folder(SMALL))

    def script(request: GenerationRequest) -> list[list[int]]:
        ids = text.tokenizer.encode_template("Let me see.</think>The answer is 5.<|user|>")
        return [ids[at : at + 3] for at in range(0, len(ids), 3)]

    async def start() -> tuple[Any, Callable[[], Awaitable[None]]]:
        async def end() -> None: ...

        engine: Any = FakeEngine(script)
        return create_app(engine, text, ServerSettings(), Metrics("small")), end

    live = Live(start)
    try:
        with urllib.request.urlopen(f"{live.url}/openapi.json", timeout=120) as document:
            assert document.status == 200  # made when it is first asked for, which schemathesis waits 10 s for
        program = Path(sys.executable).with_name("schemathesis")
        command = [str(program), "run", f"{live.url}/openapi.json", "--checks", ",".join(CHECKS)]
        command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "30", "--seed", "1"]
        command += ["--suppress-health-check", "all", "--continue-on-failure", "--warnings", "off"]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1800)
    finally:
        live.close()
    assert result.returncode == 0, result.stdout[-8000:]
