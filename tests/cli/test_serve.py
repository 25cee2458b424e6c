"""`legato serve` as a process: quick refusals, 503 while it loads, what it says, how it ends."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import children_of, processor_seconds_of_children
from tests.server import chromium

pytestmark = pytest.mark.full

KEY = "sesame-open"
START_S = 180


class Served:
    """A running `legato serve` on the checkpoint that ships with the package."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.out, self.err = folder / "stdout", folder / "stderr"
        self.url = f"http://127.0.0.1:{free_port()}"
        self.tls: ssl.SSLContext | None = None
        self.while_loading: dict[int, Any] = {}
        port = self.url.rpartition(":")[2]
        command = [sys.executable, "-m", "legato", "serve", "--port", port, "--threads", "1", *flags]
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=err, env={**os.environ, "OMP_NUM_THREADS": "1", "LEGATO_API_KEY": ""}
            )

    def trust(self, certificate: Path) -> None:
        """It speaks TLS, and this is its certificate."""
        self.url = self.url.replace("http:", "https:")
        self.tls = ssl.create_default_context(cafile=str(certificate))

    def wait_ready(self) -> None:
        """Until the ready line; what /health says meanwhile is kept by status."""
        deadline = time.monotonic() + START_S
        while not self.out.read_text().endswith("\n"):
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < deadline, self.err.read_text()
            with contextlib.suppress(OSError):
                status, body = self.ask("/health")
                self.while_loading[status] = json.loads(body)
            time.sleep(0.1)

    def ask(self, path: str, body: Any = None, key: str | None = KEY) -> tuple[int, bytes]:
        """Status and body of the answer."""
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url + path, data, headers)
            with urllib.request.urlopen(request, timeout=120, context=self.tls) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def metrics(self) -> dict[str, float]:
        """Sums over all labels but buckets, by name."""
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(self.ask("/metrics")[1].decode()):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0) + sample.value
        return sums

    def end(self, number: int = signal.SIGTERM) -> int:
        """Its exit code."""
        self.process.send_signal(number)
        return self.process.wait(120)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("serve")
    flags = ["--log-format", "json", "--access-log", "--api-key", KEY, "--metrics-compat", "vllm,sglang"]
    server = Served(folder, *flags)
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


CHAT = {"messages": [{"role": "user", "content": "Add two numbers."}], "temperature": 0, "max_tokens": 24}


def test_the_port_answers_while_the_model_loads(served: Served) -> None:
    said = served.while_loading[503]
    assert said["status"] == "loading" and said["error"]["code"] == "loading" and said["loading"]["stage"]


def test_the_ready_line_says_what_is_served(served: Served) -> None:
    line = served.out.read_text()
    assert re.fullmatch(
        r"legato is ready after [\d.]+ s: legato-small on cpu, context 8192, cache 65536 tokens \(float32\), "
        r"index scores in 64 MiB, 5 drafts, http://127\.0\.0\.1:\d+\n",
        line,
    ), line


def test_logs_are_json_without_keys_or_paths(served: Served) -> None:
    assert served.ask("/v1/models?api_key=" + KEY)[0] == 200
    deadline, asked = time.monotonic() + 60, list[dict[str, Any]]()
    while not asked:  # a line is written when its answer has been sent
        assert time.monotonic() < deadline
        lines = [json.loads(line) for line in served.err.read_text().splitlines()]
        assert {"time", "level", "logger", "message"} <= set(lines[0])
        asked = [line for line in lines if line.get("path") == "/v1/models"]
    assert asked[-1]["status"] == 200 and asked[-1]["request_id"].startswith("req-")
    text = served.err.read_text()
    assert KEY not in text and str(Path(__file__).parents[2]) not in text


def test_metrics_agree_with_usage(served: Served) -> None:
    before = served.metrics()
    status, body = served.ask("/v1/chat/completions", CHAT)
    assert status == 200, body
    usage = json.loads(body)["usage"]
    status, _ = served.ask("/v1/chat/completions", {**CHAT, "temperature": -1})
    assert status == 400
    deadline = time.monotonic() + 60
    while (after := served.metrics())["legato_requests_running"] and time.monotonic() < deadline:
        time.sleep(0.3)

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("legato_generation_tokens_total") == usage["completion_tokens"]
    assert grown("legato_prompt_tokens_total") == usage["prompt_tokens"]
    assert (
        grown("vllm:generation_tokens_total") == grown("sglang:generation_tokens_total") == usage["completion_tokens"]
    )
    assert grown("legato_requests_total") == 1 and grown("legato_requests_refused_total") == 1
    assert 0 < grown("legato_accepted_tokens_total") <= grown("legato_drafted_tokens_total")
    assert after["legato_requests_running"] == after["legato_requests_waiting"] == 0
    for name in ("queue", "prefill", "decode", "e2e"):
        assert grown(f"legato_{name}_seconds_count") == 1
    parts = sum(grown(f"legato_{name}_seconds_sum") for name in ("queue", "prefill", "decode"))
    assert 0 < parts <= grown("legato_e2e_seconds_sum")
    assert after["legato_startup_total_seconds"] >= after["legato_startup_load_seconds"] > 0


def test_the_page_is_open_and_its_numbers_are_not(served: Served) -> None:
    with urllib.request.urlopen(served.url + "/", timeout=30) as answer:
        policy = answer.headers["content-security-policy"]
        text = answer.read().decode()
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not re.search(r"(src|href)=\"(?!/page/|/openapi\.json)", text), "nothing is loaded from elsewhere"
    assert not re.search(r"<style|\son\w+=|\sstyle=|<script(?! type=\"module\" src=)", text)
    for name in re.findall(r"/page/[\w.]+", text):
        assert served.ask(name, key=None)[0] == 200
    assert served.ask("/page/__init__.py", key=None)[0] == 404
    assert served.ask("/page/..%2f__init__.py", key=None)[0] == 404
    assert served.ask("/metrics.json", key=None)[0] == 401
    seen = json.loads(served.ask("/metrics.json")[1])
    assert seen["model"] == "legato-small" and seen["num_drafts"] == 5 and seen["engine"]["total_pages"] > 0


def test_a_connection_outlives_the_patience_of_its_client(served: Served) -> None:
    """Clients close an idle connection after 5 s; had the server done so, a request on its way would be lost."""
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=120)
    connection.request("GET", "/ping")
    connection.getresponse().read()
    first = connection.sock
    time.sleep(6)
    connection.request("GET", "/ping")
    assert connection.getresponse().status == 200 and connection.sock is first


def test_a_port_in_use_is_refused_at_once(served: Served) -> None:
    port = served.url.rpartition(":")[2]
    before = processor_seconds_of_children()
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "legato", "serve", "--port", port],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    seconds = processor_seconds_of_children() - before
    assert result.returncode == 2 and result.stdout == ""
    modules = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time")}
    messages = [line for line in result.stderr.splitlines() if not line.startswith("import time")]
    assert messages == [
        f"legato: port: {port} on 127.0.0.1 is in use; stop what listens there, or choose another (0: any free one)"
    ]
    assert not {"torch", "fastapi", "uvicorn", "transformers", "huggingface_hub"} & modules
    assert seconds < 2, f"took {seconds:.1f} s of processor time: on a quiet machine, of the clock too"


@pytest.mark.full
@pytest.mark.skipif(chromium.executable() is None, reason="no Chromium on this machine")
def test_the_page_in_a_browser(served: Served, tmp_path: Path) -> None:
    """The key is asked for, a chat streams, a tool call shows, an answer can be stopped, the dashboard moves."""
    with chromium.Page(tmp_path / "profile") as page:
        page.view(1360, 860)
        page.open(served.url + "/")
        page.wait("document.querySelector('dialog[open]')")
        page.type("#key", "wrong")
        page.press("Enter")
        page.wait("document.querySelector('#key-note').textContent.includes('not accepted')")
        page.type("#key", KEY)
        page.press("Enter")
        page.wait("document.querySelector('#model').textContent === 'legato-small'")
        page.wait_for_complaints(2)
        refused = [text for text in page.complaints if "401" in text]
        assert len(refused) == len(page.complaints) >= 2

        page.run(
            "document.querySelector('#temperature').value = '0', document.querySelector('#max-tokens').value = '60'"
        )
        before = page.run("document.querySelector('#totals').textContent")
        page.type("#message", "Add two numbers.")
        page.press("Enter")
        page.wait("document.querySelector('.message.user').textContent === 'Add two numbers.'")
        page.wait("document.querySelector('.reasoning, .message.assistant .text')")
        page.wait("document.querySelector('.note')")
        assert re.search(r"\d+ tokens · first after [\d.]+ s", page.run("document.querySelector('.note').textContent"))
        page.wait(f"document.querySelector('#totals').textContent !== {json.dumps(before)}")
        page.wait("document.querySelectorAll('#requests tr').length >= 1")
        page.wait("document.querySelector('#positions b').textContent.endsWith('%')")

        page.run(
            "document.querySelector('#example-tools').click(), document.querySelector('#tool-choice').value = 'required', "
            "document.querySelector('#thinking').value = 'off'"
        )
        page.type("#message", "What is the weather in Paris?")
        page.press("Enter")
        page.wait("document.querySelector('.call textarea')")
        assert page.run("document.querySelector('.call b').textContent") == "get_weather"
        assert "city" in json.loads(page.run("document.querySelector('.call pre').textContent"))
        page.type(".call textarea", "sunny")
        page.run(
            "document.querySelector('#tool-choice').value = 'none', document.querySelector('#max-tokens').value = ''"
        )
        page.run("[...document.querySelectorAll('button')].find((b) => b.textContent === 'Send result').click()")
        page.wait("document.querySelectorAll('.note').length === 3")

        page.type("#message", "Tell me a long story.")
        page.press("Enter")
        page.wait("!document.querySelector('#stop').hidden")
        page.press("Escape")
        page.wait("document.querySelectorAll('.note').length === 4")
        page.wait("document.querySelector('#running').textContent === '0'")
        page.view(420, 820, "dark")
        page.run("document.querySelector('#view-dashboard').click()")
        assert page.run("getComputedStyle(document.querySelector('#chat')).display") == "none"
        assert page.run("document.documentElement.scrollWidth") <= 420
        assert page.run(
            "(({scrollWidth, clientWidth}) => scrollWidth <= clientWidth)(document.querySelector('.scroll'))"
        )
        assert page.complaints == refused
    deadline = time.monotonic() + 60
    while served.metrics()["legato_requests_running"]:  # as of the engine's last report
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.mark.full
def test_what_only_the_engine_can_refuse_is_the_users_fault_too(tmp_path: Path) -> None:
    server = Served(tmp_path, "--op", "attend=nothing")
    try:
        assert server.process.wait(START_S) == 2
    finally:
        server.kill()
    assert server.out.read_text() == ""
    lines = [line for line in server.err.read_text().splitlines() if "loading: " not in line]
    assert lines == ["legato: ops: attend has no implementation 'nothing'; it has reference"]


@pytest.mark.full
def test_a_dead_engine_ends_the_server_with_its_cause(tmp_path: Path) -> None:
    server = Served(tmp_path)
    try:
        server.wait_ready()
        (engine,) = children_of(server.process.pid)
        os.kill(engine, signal.SIGKILL)
        assert server.process.wait(60) == 1
        last = server.err.read_text().splitlines()[-1]
        assert last.startswith("legato: the engine failed: ") and "SIGKILL" in last, last
    finally:
        server.kill()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl, to make a certificate")
def test_tls_several_keys_and_named_origins(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)]
    subprocess.run([*made, *names], check=True, capture_output=True)
    (tmp_path / "keys").write_text("second\n")
    flags = ["--ssl-certfile", str(cert), "--ssl-keyfile", str(key), "--cors-origin", "https://a.example"]
    server = Served(tmp_path, *flags, "--api-key", KEY, "--api-key-file", str(tmp_path / "keys"))
    server.trust(cert)
    try:
        server.wait_ready()
        assert server.out.read_text().rstrip().endswith(server.url)
        statuses = [server.ask("/v1/models", key=known)[0] for known in (KEY, "second", "third", None)]
        assert statuses == [200, 200, 401, 401]
        assert server.ask("/v1/chat/completions", {**CHAT, "max_tokens": 2}, "second")[0] == 200
        for origin, allowed in (("https://a.example", "https://a.example"), ("https://b.example", None)):
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            request = urllib.request.Request(server.url + "/v1/models", headers={**asked, "x-api-key": KEY})
            with urllib.request.urlopen(request, timeout=120, context=server.tls) as answer:
                assert answer.headers.get("access-control-allow-origin") == allowed
        with pytest.raises((urllib.error.URLError, ConnectionError)):  # not TLS
            urllib.request.urlopen(server.url.replace("https", "http") + "/health", timeout=120)
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urllib.request.urlopen(server.url + "/health", timeout=120)
        assert server.end() == 0
    finally:
        server.kill()


def test_sigterm_lets_a_stream_finish_and_refuses_new_requests(served: Served) -> None:
    """The last test of this file: it ends the server that the others use."""
    body = json.dumps({**CHAT, "stream": True, "max_tokens": 400, "ignore_eos": True}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(served.url + "/v1/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=120) as stream:
        first = stream.readline()
        served.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 60
        while served.ask("/health")[0] == 200:
            assert time.monotonic() < deadline
        assert served.ask("/v1/chat/completions", CHAT)[0] == 503
        rest = stream.read()
    assert first.startswith(b"data: ") and rest.rstrip().endswith(b"data: [DONE]")
    assert b'"finish_reason":"length"' in rest
    assert served.process.wait(60) == 0, served.err.read_text()


def test_a_second_signal_cuts_what_runs_and_says_so(tmp_path: Path) -> None:
    server = Served(tmp_path, "--drain-timeout", "60")
    try:
        server.wait_ready()
        body = json.dumps({**CHAT, "stream": True, "max_tokens": 4000, "ignore_eos": True}).encode()
        request = urllib.request.Request(
            server.url + "/v1/chat/completions", body, {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as stream:
            stream.readline()
            server.process.send_signal(signal.SIGTERM)
            while server.ask("/health")[0] == 200:
                time.sleep(0.05)
            code = server.end()
            rest = stream.read()
    finally:
        server.kill()
    assert code == 0
    assert b"stopped before the answer was complete" in rest and b"has failed" not in rest
    assert "at the second signal: 1 running requests are cut" in server.err.read_text()
