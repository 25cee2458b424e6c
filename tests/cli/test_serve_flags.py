"""The flags of `legato serve`: every alias means exactly what it says or is refused by name; files lose against flags."""

from __future__ import annotations

import json
import re
import shlex
import socket
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from legato.cli import aliases, flags
from legato.cli.faults import FAULTS
from legato.cli.serve_checks import SHIPPED_NAME, Prepared, prepare, served_name
from legato.cli.serve_command import ServeCommand
from legato.cli.serve_flags import ServeFlags
from legato.cli.serve_port import take
from legato.config import ConfigError
from legato.server.settings import SettingsError

SGLANG_H200 = (
    "--model-path m --speculative-algorithm EAGLE --speculative-num-steps 5 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 6 --reasoning-parser glm45 --tool-call-parser glm47 --host 0.0.0.0 --port 30001"
)
VLLM_H200 = (
    "m --kv-cache-dtype fp8 --speculative-config.method mtp --speculative-config.num_speculative_tokens 5 "
    "--tool-call-parser glm47 --reasoning-parser glm45 --enable-auto-tool-choice --served-model-name glm-5.2-fp8"
)


def parsed(*words: str) -> ServeFlags:
    """What a command line means; raises what is wrong with it."""
    found: list[ServeFlags] = []
    app = typer.Typer()
    app.command("serve", cls=ServeCommand)(flags.command(found.append, "Serves.", ServeFlags))
    app.command("other")(lambda: None)
    result = CliRunner().invoke(app, ["serve", *words])
    if isinstance(result.exception, FAULTS):
        raise result.exception
    assert result.exit_code == 0, result.output
    return found[0]


def prepared(flags: ServeFlags) -> Prepared:
    return prepare(flags, take(flags))


def refused(*words: str) -> str:
    with pytest.raises(FAULTS) as caught:
        flags = parsed(*words)
        flags.engine()
        flags.server()
    return str(caught.value)


def test_the_published_commands_work_on_one_gpu() -> None:
    """The commands of SGLang's cookbook and vLLM's recipe for 8 x H200, less what needs several GPUs."""
    sglang, vllm = parsed(*shlex.split(SGLANG_H200)), parsed(*shlex.split(VLLM_H200))
    assert sglang.engine().model == vllm.engine().model == "m"
    assert sglang.engine().num_drafts == vllm.engine().num_drafts == 5
    assert vllm.engine().cache.latent == "fp8" and sglang.engine().cache.latent == "auto"
    assert (sglang.server().listen.host, sglang.server().listen.port) == ("0.0.0.0", 30001)
    assert sglang.server().replies.reasoning_parser == "glm45" and vllm.server().replies.tool_parser == "glm47"
    assert vllm.server().model_names == ("glm-5.2-fp8",)
    assert parsed(*shlex.split(SGLANG_H200), "--tp", "8").engine().execution.tensor_parallel == 8
    assert parsed(*shlex.split(VLLM_H200), "--tensor-parallel-size", "8").engine().execution.tensor_parallel == 8
    assert "--dp-size 8" in refused(*shlex.split(SGLANG_H200), "--dp-size", "8")
    assert parsed(*shlex.split(SGLANG_H200), "--mem-fraction-static", "0.8").engine().cache.memory_fraction == 0.8


@pytest.mark.parametrize(
    ("words", "attribute", "value"),
    [
        ("--context-length 4096", "context", 4096),
        ("--max-model-len 128K", "context", 131072),
        ("--max-model-len 128k", "context", 128000),
        ("--max_model_len=4096", "context", 4096),
        ("--max-running-requests 7", "max_running", 7),
        ("--max-num-seqs 7", "max_running", 7),
        ("--chunked-prefill-size 256", "chunk_tokens", 256),
        ("--max-num-batched-tokens 8k", "chunk_tokens", 8000),
        ("--max-queued-requests 9", "max_waiting", 9),
        ("--max-total-tokens 65536", "cache_tokens", 65536),
        ("--gpu-memory-utilization 0.9", "memory_fraction", 0.9),
        ("--two-shot-rows 16", "two_shot_rows", 16),
        ("--kv-cache-dtype bf16", "latent", "bfloat16"),
        ("--kv-cache-dtype fp8_e4m3", "latent", "fp8"),
        ("--disable-radix-cache", "prefix_cache", False),
        ("--no-enable-prefix-caching", "prefix_cache", False),
        ("--enable-prefix-caching", "prefix_cache", True),
        ("--disable-overlap-schedule", "overlap", "off"),
        ("--no-async-scheduling", "overlap", "off"),
        ("--enforce-eager", "graphs", "off"),
        ("--disable-cuda-graph", "graphs", "off"),
        ("-k3", "num_drafts", 3),
        ("-k=3", "num_drafts", 3),
        ("--num-speculative-tokens 2", "num_drafts", 2),
        ("--speculative-num-draft-tokens 4", "num_drafts", 3),
        ('--speculative-config \'{"method":"mtp","num_speculative_tokens":4}\'', "num_drafts", 4),
        ("--tp-size 2 --dp-size 1 -pp 1", "tensor_parallel", 2),
        ("-tp 4", "tensor_parallel", 4),
        ("--tensor-parallel-size=8", "tensor_parallel", 8),
        ("--page-size 64 --enable-metrics --trust-remote-code", "device", "auto"),
        ("--shutdown-timeout 5", "drain_timeout", 5.0),
        ('--allowed-origins \'["http://a", "http://b"]\'', "cors_origin", ["http://a", "http://b"]),
        ("--disable-uvicorn-access-log", "access_log", False),
        ("m --api-key a b --port 1", "api_key", ["a", "b"]),
        ("--served-model-name a --served-model-name b", "served_model_name", ["a", "b"]),
    ],
)
def test_an_alias_means_what_it_says(words: str, attribute: str, value: object) -> None:
    assert getattr(parsed(*shlex.split(words)), attribute) == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--data-parallel-size 8", ["--data-parallel-size 8", "--tp"]),
        ("--speculative-eagle-topk 4", ["--speculative-eagle-topk 4", "chain"]),
        ("--context 4096 --max-model-len 8192", ["--context 4096 and --max-model-len 8192", "give one"]),
        ("--port 1 --port 2", ["--port 1 and --port 2"]),
        ("--enable-prefix-caching --disable-radix-cache", ["--enable-prefix-caching and --disable-radix-cache"]),
        ("--speculative-num-steps 3 --speculative-num-steps 5", ["--speculative-num-steps 3", "give one"]),
        ("--speculative-algorithm NGRAM", ["NGRAM", "MTP"]),
        ("--speculative-num-steps 5 --speculative-num-draft-tokens 8", ["contradict", "means 5", "means 7"]),
        ("--speculative-num-steps 9", ["9 drafts", "0 to 7"]),
        ("--speculative-num-steps five", ["--speculative-num-steps", "five"]),
        ('--speculative-config \'{"model":"x","method":"mtp"}\'', ["--speculative-config.model"]),
        ("--speculative-config []", ["--speculative-config", "object"]),
        ("--speculative-config {", ["--speculative-config", "JSON"]),
        ("-k 3 --speculative-num-steps 3", ["--num-drafts", "--speculative-num-steps"]),
        ("--kv-cache-dtype fp8_e5m2", ["--kv-cache-dtype", "fp8_e5m2", "bfloat16"]),
        ("--max-model-len -1", ["--max-model-len", "-1"]),
        ("--chunked-prefill-size -1", ["--chunked-prefill-size", "-1"]),
        ("--gpu-memory-utilization 90", ["memory_fraction", "at most 1", "90"]),
        ("--gpu-memory-utilization 0.9 --cache-tokens 640", ["cache tokens and memory_fraction", "give one"]),
        ("--kv-cache-memory-bytes 9", ["--kv-cache-memory-bytes", "--memory-fraction"]),
        ("--quantization fp8", ["--quantization", "config.json"]),
        ("--enable-lora", ["--enable-lora"]),
        ("--hicache-ratio 2", ["--hicache-ratio"]),
        ("--attention-backend flashmla", ["--attention-backend", "--op"]),
        ("--max-num-seq 3", ["--max-num-seq", "did you mean --max-num-seqs"]),
        ("--tool-cal-parser glm47", ["--tool-cal-parser", "--tool-call-parser"]),
        ("--colour blue", ["--colour", "--help"]),
        ("--enable-metrics=1", ["--enable-metrics", "no value"]),
        ("--port", ["--port", "needs a value"]),
        ("a b", ["one model", "a and b"]),
        ("a --model b", ["one model", "a and b"]),
        ("--served-model-name a b --model c", ["one model", "b and c"]),
        ("--max-running 0", ["max_running", "0"]),
        ("--port 70000", ["port", "70000"]),
        ("--tool-call-parser hermes", ["tool_parser", "hermes"]),
        ("--metrics-compat tgi", ["metrics_compat", "tgi"]),
        ("--ssl-certfile nowhere.pem", ["--ssl-certfile", "nowhere.pem", "No such file"]),
        ("--ssl-keyfile nowhere.pem", ["--ssl-keyfile", "nowhere.pem"]),
        ("--api-key-file nowhere", ["--api-key-file", "nowhere"]),
        ("--api-key ' '", ["api_keys"]),
        ("--verify-speculation 2", ["verify_speculation", "2"]),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(words: str, said: list[str]) -> None:
    message = refused(*shlex.split(words))
    assert all(word in message for word in said), message


def test_every_alias_and_every_refusal_is_reachable() -> None:
    """No alias maps to a flag that is not there, none hides one that is, and each refusal says its flag."""
    app = typer.Typer()
    app.command("serve", cls=ServeCommand)(flags.command(lambda _: None, "Serves.", ServeFlags))
    command = typer.main.get_command(app)
    assert isinstance(command, ServeCommand)
    own = command.own_flags()
    tables = [aliases.ALIASES, aliases.SWITCHES, aliases.REFUSED]
    for table in tables:
        assert not own & set(table)
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))
    for pairs in aliases.SWITCHES.values():
        assert {name for name, _ in pairs} <= own
    for name in aliases.REFUSED:
        assert name in refused(name, "1")


def write(folder: Path, text: str) -> str:
    path = folder / "serve.yaml"
    path.write_text(text)
    return str(path)


def test_a_file_gives_defaults_and_flags_win(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        "model: from-file\nport: 30001\nmax_running_requests: 4\nprefix-cache: false\nserved-model-name: [a, b]\n"
        "op: {attend: reference}\nspeculative-config: {method: mtp, num_speculative_tokens: 3}\nlog-format: json\n"
        "enable-auto-tool-choice: true\nrequest-timeout: null\ndevice: cpu\n",
    )
    flags = parsed("--config", file)
    assert flags.engine().model == "from-file" and flags.port == 30001 and flags.max_running == 4
    assert flags.prefix_cache is False and flags.served_model_name == ["a", "b"] and flags.num_drafts == 3
    assert flags.op == ["attend=reference"] and flags.log_format == "json" and flags.request_timeout is None
    flags = parsed("mine", "--config", file, "--port", "1", "--prefix-cache", "--served-model-name", "c", "-k", "0")
    assert flags.engine().model == "mine" and flags.port == 1 and flags.prefix_cache is True
    assert flags.served_model_name == ["c"] and flags.num_drafts == 0 and flags.max_running == 4


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot: 1", ["prot", "did you mean --port"]),
        ("port: 1\nport: 2", ["port", "twice"]),
        ("port: [1, 2]", ["port", "one value"]),
        ("port: true", ["port", "takes a value"]),
        ("pp: 8", ["pp", "--tp"]),
        ("- port", ["mapping"]),
        ("port: {a: 1}", ["port", "mapping"]),
        ("a: [", ["valid YAML"]),
        ("config: other.yaml", ["config", "cannot name another"]),
        ("enable-auto-tool-choice: false", ["enable-auto-tool-choice", "cannot be turned off"]),
        ("enable-metrics: 3", ["enable-metrics", "no value"]),
        ("any-model: false", ["any-model", "cannot be turned off"]),
        ("speculative-eagle-topk: 4", ["chain"]),
    ],
)
def test_a_faulty_file_is_refused_with_its_name(tmp_path: Path, text: str, said: list[str]) -> None:
    message = refused("--config", write(tmp_path, text))
    assert all(word in message for word in [*said, "serve.yaml"]), message


def test_what_is_said_twice_alike_is_fine(tmp_path: Path) -> None:
    file = write(tmp_path, "port: 7")
    flags = parsed("--context-length", "4096", "--max-model-len", "4096", "--port", "5", "--port=5", "--config", file)
    assert (flags.context, flags.port) == (4096, 5)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    file = write(tmp_path, "# nothing\n")
    assert parsed("--config", file) == parsed()
    assert "No such file" in refused("--config", str(tmp_path / "nowhere.yaml"))
    assert "once" in refused("--config", file, "--config", file)


def test_keys_come_from_flags_file_and_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("# team\nb\n\n c \n")
    monkeypatch.setenv("LEGATO_API_KEY", "d")
    settings = parsed("--api-key", "a", "--api-key-file", str(tmp_path / "keys")).server()
    assert settings.access.api_keys == ("a", "b", "c", "d")
    assert not {"a'", "b'", "c'", "d'"} & set(re.findall(r"\w'", repr(settings))), "keys are not shown"
    (tmp_path / "keys").write_text("# none\n")
    assert "holds no key" in refused("--api-key-file", str(tmp_path / "keys"))


def test_names_are_never_paths(tmp_path: Path) -> None:
    (tmp_path / "GLM-5.2-FP8").mkdir()
    assert served_name(str(tmp_path / "GLM-5.2-FP8")) == "GLM-5.2-FP8"
    assert served_name(str(tmp_path / "GLM-5.2-FP8") + "/") == "GLM-5.2-FP8"
    assert served_name("zai-org/GLM-5.2-FP8") == "zai-org/GLM-5.2-FP8"
    assert served_name(None) == SHIPPED_NAME


def test_the_port_is_taken_before_anything_loads() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SettingsError, match=f"port: {port} on 127.0.0.1 is in use"):
            prepared(parsed("--port", str(port), "--model", "there/is-no-such"))
    ready = prepared(parsed("--port", "0"))
    with ready.sock:
        assert ready.settings.model_names == (SHIPPED_NAME,)
        with socket.create_connection(ready.sock.getsockname(), timeout=5):
            pass


def test_an_address_that_is_not_ours_is_refused() -> None:
    with pytest.raises(SettingsError, match="host"):
        prepared(parsed("--host", "192.0.2.1", "--port", "0"))
    with pytest.raises(SettingsError, match="host"):
        prepared(parsed("--host", "no such host", "--port", "0"))


def test_a_certificate_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("nothing")
    with pytest.raises(SettingsError, match=r"cert\.pem"):
        prepared(parsed("--port", "0", "--ssl-certfile", str(tmp_path / "cert.pem")))


def test_a_refused_model_gives_the_port_back(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for _ in range(2):
        with pytest.raises(FAULTS, match="llama"):
            prepared(parsed(str(tmp_path), "--port", str(port)))


def test_config_errors_are_the_users() -> None:
    assert issubclass(ConfigError, FAULTS) and issubclass(SettingsError, FAULTS)
