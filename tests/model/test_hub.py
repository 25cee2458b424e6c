"""Hub ids against a hub of our own on 127.0.0.1: what is fetched, what never is, and how failures read.

The hub library reads HF_ENDPOINT when it is imported, so the client runs in its own interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from safetensors.torch import save_file

from tests.tiny import Tensors, save_checkpoint, tiny_config, tiny_tensors

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = tiny_config(num_hidden_layers=3, indexer_types=["full", "shared", "full"], n_routed_experts=4)
MTP_FILE = "model-00002-of-00002.safetensors"

CLIENT = """
import json, sys
from dataclasses import replace
import torch
from legato.model.checkpoint import Checkpoint
from legato.model.faults import CheckpointError
from legato.model.footprint import plan
from legato.model.inventory import stored_spec
from legato.model.weights import Residency, load_weights

def load(name, mtp):
    checkpoint = Checkpoint.open(name)
    spec = replace(stored_spec(checkpoint), has_mtp=mtp)
    weights = load_weights(checkpoint, spec, device="cpu", dtype=torch.float32, resident=Residency.DENSE)
    return [float(weights.embed.double().sum()), weights.mtp is not None]

answers = []
for step, name in json.loads(sys.argv[1]):
    try:
        if step == "plan":
            found = plan(name)
            answers.append([found.stored_bytes, len(found.problems), found.refusal])
        else:
            answers.append(load(name, step == "load"))
    except CheckpointError as error:
        answers.append(str(error))
    print("MARK", len(answers), flush=True)
    if step == "plan" or step == "load trunk":
        sys.stdin.readline()
print("ANSWERS", json.dumps(answers))
"""


class Hub(ThreadingHTTPServer):
    """Serves `root/owner/name` as repositories and keeps a log of `METHOD file [range]`."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.root = root
        self.log: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    """The few calls of the hub's interface that a download makes."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.split("?")[0].strip("/").split("/")
        if path[:2] == ["api", "models"]:
            self._repository("/".join(path[2:4]))
        else:
            self._file("/".join(path[:2]), "/".join(path[4:]))

    do_HEAD = do_GET

    def _repository(self, name: str) -> None:
        folder = self.server.root / name
        if not folder.is_dir():
            self._send(401 if name.startswith("secret") else 404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return
        siblings = [{"rfilename": entry.name} for entry in sorted(folder.iterdir())]
        body = json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
        self._send(200, body, {"Content-Type": "application/json"})

    def _file(self, name: str, file: str) -> None:
        wanted = self.headers.get("Range")
        self.server.log.append(f"{self.command} {file}" + (" range" if wanted else ""))
        path = self.server.root / name / file
        if not path.is_file():
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return
        body = path.read_bytes()
        headers = {"ETag": f'"{file}-{len(body)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if wanted:
            start, _, end = wanted.removeprefix("bytes=").partition("-")
            last = min(int(end), len(body) - 1) if end else len(body) - 1
            headers["Content-Range"] = f"bytes {start}-{last}/{len(body)}"
            self._send(206, body[int(start) : last + 1], headers)
        else:
            self._send(200, body, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


def save_by_layer(folder: Path, tensors: Tensors) -> None:
    """The MTP layer in a file of its own."""
    save_checkpoint(folder, CONFIG, tensors, shards=1)
    (folder / "model-00001-of-00001.safetensors").unlink()
    files = {"model-00001-of-00002.safetensors": False, MTP_FILE: True}
    weight_map: dict[str, str] = {}
    for file, is_mtp in files.items():
        part = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.3.") == is_mtp}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "README.md").write_text("a file that is not needed")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    save_by_layer(tmp_path / "hub" / "acme" / "tiny", tiny_tensors(CONFIG))
    save_by_layer(tmp_path / "hub" / "acme" / "cut", tiny_tensors(CONFIG))
    shutil_cut = tmp_path / "hub" / "acme" / "cut" / MTP_FILE
    shutil_cut.unlink()
    server = Hub(tmp_path / "hub")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


class Client:
    """The interpreter that talks to the hub; it waits after each step that asks for it."""

    def __init__(self, hub: Hub, home: Path, steps: list[tuple[str, str]]) -> None:
        environment = os.environ | {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "120",
            "HF_HUB_ETAG_TIMEOUT": "120",
            "no_proxy": "127.0.0.1",
        }
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, json.dumps(steps)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env=environment,
        )

    def wait(self) -> None:
        """Until the next step is done."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("MARK")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def answers(self) -> list:
        assert self.process.stdout is not None
        output = self.process.stdout.read()
        assert self.process.wait(timeout=400) == 0
        return json.loads(output.split("ANSWERS", 1)[1])


def test_hub(hub: Hub, tmp_path: Path) -> None:
    name = "acme/tiny"
    steps = [
        ("plan", name),
        ("load trunk", name),
        ("load", name),
        ("load", "acme/absent"),
        ("load", "acme/cut"),
        ("load", "secret/model"),
    ]
    client = Client(hub, tmp_path / "home", steps)
    client.wait()
    planned = [entry for entry in hub.log if entry.startswith("GET")]
    assert {"GET config.json", "GET model.safetensors.index.json", f"GET {MTP_FILE} range"} <= set(planned)
    assert not [entry for entry in planned if entry.endswith(".safetensors")], "a plan reads headers only"
    hub.log.clear()
    client.go_on()
    client.wait()
    assert "GET model-00001-of-00002.safetensors" in hub.log
    assert f"GET {MTP_FILE}" not in hub.log, "without drafting, the MTP layer's file is not needed"
    hub.log.clear()
    client.go_on()
    planned_answer, trunk, full, absent, cut, secret = client.answers()
    assert f"GET {MTP_FILE}" in hub.log
    assert "GET model-00001-of-00002.safetensors" not in hub.log, "the cached shard serves again"
    assert not [entry for entry in hub.log if "README" in entry]
    tensors = tiny_tensors(CONFIG)
    assert planned_answer == [sum(tensor.nbytes for tensor in tensors.values()), 0, None]
    assert trunk == [float(tensors["model.embed_tokens.weight"].double().sum()), False]
    assert full == [trunk[0], True]
    assert absent.startswith("acme/absent: expected a repository on the hub")
    assert "Check the spelling" in absent
    assert f"{MTP_FILE}: expected a shard listed in model.safetensors.index.json, found no such file" in cut
    assert secret.startswith("secret/model: expected")

    hub.shutdown()
    hub.server_close()
    offline = Client(hub, tmp_path / "home", [("load", name), ("load", "acme/other")])
    offline.wait()
    cached, never_seen = offline.answers()
    assert cached == full, "what is in the cache loads without a connection"
    assert "expected a reachable hub or a cached copy" in never_seen
