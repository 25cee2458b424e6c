"""The flags of SGLang and vLLM that `legato serve` understands, each mapped exactly or refused by name with the reason.

Owns that table and nothing else: it turns words into (own flag, value) pairs. Imports no torch. Called by `cli.serve_command` for
the command line and for configuration files. Names of SGLang 0.5.23 and vLLM 0.33, read from their releases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from legato.config import MAX_DRAFTS, ConfigError

Pair = tuple[str, str | None]
"""One of Legato's own flags and its value; `None`: the flag takes none."""

Mapped = Callable[[str, str], list[Pair]]
"""(name as given, value) -> own flags; raises `ConfigError`."""

SEVERAL_GPUS = "several GPUs of one host share one model by --tp, and in no other way"
BY_ITSELF = "Legato chooses by itself; --op overrides a single op"
FROM_CHECKPOINT = "the checkpoint's own config.json says it"


def renamed(flag: str) -> Mapped:
    """Another name of `flag`, with the same values."""
    return lambda name, value: [(flag, value)]


def constant(*allowed: str, reason: str) -> Mapped:
    """Says what Legato does anyway: the `allowed` values change nothing, any other is refused with the reason."""

    def check(name: str, value: str) -> list[Pair]:
        if value.lower() not in allowed:
            raise ConfigError(f"{name} {value} is not supported: {reason}; allowed: {', '.join(allowed)}")
        return []

    return check


def among(flag: str, values: Mapping[str, str], reason: str) -> Mapped:
    """Another name of `flag` whose values are spelt differently."""

    def translate(name: str, value: str) -> list[Pair]:
        if value.lower() not in values:
            raise ConfigError(f"{name} {value} is not supported: {reason}; allowed: {', '.join(values)}")
        return [(flag, values[value.lower()])]

    return translate


def count(flag: str) -> Mapped:
    """Another name of `flag` whose number may end in k, m (powers of 1000) or K, M (powers of 1024), as vLLM writes them."""

    def translate(name: str, value: str) -> list[Pair]:
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", value)
        if found is None:
            raise ConfigError(f"{name} must be a whole number above 0 (131072, 128K), got {value}")
        factor = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}[found[2]]
        number = float(found[1]) * factor
        if number != int(number) or number < 1:
            raise ConfigError(f"{name} must be a whole number above 0, got {value}")
        return [(flag, str(int(number)))]

    return translate


def json_list(flag: str) -> Mapped:
    """Another name of a flag that may be repeated, whose value is one JSON list."""

    def translate(name: str, value: str) -> list[Pair]:
        items = _json(name, value)
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            raise ConfigError(f'{name} must be a JSON list of texts such as ["*"], got {value}')
        return [(flag, item) for item in items]

    return translate


ALIASES: dict[str, Mapped] = {
    "--model-path": renamed("--model"),
    "--context-length": count("--context"),
    "--max-model-len": count("--context"),
    "--max-running-requests": renamed("--max-running"),
    "--max-num-seqs": renamed("--max-running"),
    "--chunked-prefill-size": count("--chunk-tokens"),
    "--max-num-batched-tokens": count("--chunk-tokens"),
    "--max-queued-requests": renamed("--max-waiting"),
    "--max-total-tokens": count("--cache-tokens"),
    "--mem-fraction-static": renamed("--memory-fraction"),
    "--gpu-memory-utilization": renamed("--memory-fraction"),
    "--kv-cache-dtype": among(
        "--latent",
        {
            "auto": "auto", "bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp8": "fp8",
            "fp8_e4m3": "fp8", "fp8_ds_mla": "fp8",
        },
        "the latent cache has no such format",
    ),
    "--tool-call-parser": renamed("--tool-parser"),
    "--allowed-origins": json_list("--cors-origin"),
    "--shutdown-timeout": renamed("--drain-timeout"),
    "--sse-keep-alive-interval": renamed("--keepalive"),
    "--tp-size": renamed("--tp"),
    "--tensor-parallel-size": renamed("--tp"),
    "-tp": renamed("--tp"),
    "--pp": constant("1", reason=SEVERAL_GPUS),
    "--pp-size": constant("1", reason=SEVERAL_GPUS),
    "--pipeline-parallel-size": constant("1", reason=SEVERAL_GPUS),
    "-pp": constant("1", reason=SEVERAL_GPUS),
    "--dp": constant("1", reason=SEVERAL_GPUS),
    "--dp-size": constant("1", reason=SEVERAL_GPUS),
    "--data-parallel-size": constant("1", reason=SEVERAL_GPUS),
    "-dp": constant("1", reason=SEVERAL_GPUS),
    "--ep": constant("1", reason=SEVERAL_GPUS),
    "--ep-size": constant("1", reason=SEVERAL_GPUS),
    "--nnodes": constant("1", reason=SEVERAL_GPUS),
    "--page-size": constant("64", reason="pages hold 64 tokens"),
    "--block-size": constant("64", reason="pages hold 64 tokens"),
    "--stream-interval": constant("1", reason="tokens are sent as soon as they are known"),
    "--schedule-policy": constant("fcfs", reason="requests run by priority, then in order of arrival"),
    "--scheduling-policy": constant("fcfs", "priority", reason="requests run by priority, then in order of arrival"),
    "--load-format": constant("auto", "safetensors", reason="checkpoints are read from safetensors files"),
    "--generation-config": constant("auto", reason="defaults of sampling come from the checkpoint's file"),
    "--tokenizer-mode": constant("auto", reason="the checkpoint's tokenizer.json is used"),
    "--grammar-backend": constant("llguidance", "auto", reason="grammars are run by llguidance"),
    "--guided-decoding-backend": constant("llguidance", "guidance", "auto", reason="grammars are run by llguidance"),
    "--structured-outputs-config.backend": constant("guidance", "auto", reason="grammars are run by llguidance"),
}  # fmt: skip
"""Flags with a value."""

SWITCHES: dict[str, tuple[Pair, ...]] = {
    "--enable-prefix-caching": (("--prefix-cache", None),),
    "--no-enable-prefix-caching": (("--no-prefix-cache", None),),
    "--disable-radix-cache": (("--no-prefix-cache", None),),
    "--disable-overlap-schedule": (("--overlap", "off"),),
    "--enforce-eager": (("--graphs", "off"),),
    "--disable-cuda-graph": (("--graphs", "off"),),
    "--async-scheduling": (("--overlap", "on"),),
    "--no-async-scheduling": (("--overlap", "off"),),
    "--enable-auto-tool-choice": (),
    "--enable-metrics": (),
    "--enable-chunked-prefill": (),
    "--enable-cache-report": (),
    "--enable-prompt-tokens-details": (),
    "--enable-priority-scheduling": (),
    "--trust-remote-code": (),
    "--disable-log-requests": (),
    "--no-enable-log-requests": (),
    "--disable-access-log": (("--no-access-log", None),),
    "--disable-uvicorn-access-log": (("--no-access-log", None),),
}
"""Flags without a value. An empty tuple: it asks for what Legato always does (code in a checkpoint is never run)."""

REFUSED: dict[str, str] = {
    "--kv-cache-memory-bytes": "the cache is sized in tokens: use --cache-tokens or --memory-fraction",
    "--num-gpu-blocks-override": "the cache is sized in tokens: use --cache-tokens or --memory-fraction",
    "--speculative-draft-model-path": "Legato drafts with the checkpoint's own MTP layer; leave it out",
    "--speculative-draft-model": "Legato drafts with the checkpoint's own MTP layer; leave it out",
    "--speculative-accept-threshold-single": "drafts never change what is generated",
    "--speculative-accept-threshold-acc": "drafts never change what is generated",
    "--quantization": f"{FROM_CHECKPOINT}; legato quantize writes another format",
    "--tokenizer": FROM_CHECKPOINT.replace("config.json", "tokenizer.json"),
    "--tokenizer-path": FROM_CHECKPOINT.replace("config.json", "tokenizer.json"),
    "--chat-template": "the checkpoint's own chat template is used",
    "--hf-overrides": FROM_CHECKPOINT,
    "--json-model-override-args": FROM_CHECKPOINT,
    "--override-generation-config": "the checkpoint's generation_config.json is used; requests may say otherwise",
    "--revision": "download the revision and give its folder",
    "--download-dir": "set HF_HOME instead",
    "--seed": "the seed belongs to a request",
    "--random-seed": "the seed belongs to a request",
    "--admin-api-key": "every --api-key opens every route; --no-admin-routes removes the administrative ones",
    "--root-path": "mount the server under a path in the proxy before it",
    "--uds": "Unix sockets are not supported; use --host and --port",
    "--ssl-ca-certs": "client certificates are not supported",
    "--ssl-keyfile-password": "give a key without a password",
    "--log-requests": "what requests say is never logged",
    "--enable-log-requests": "what requests say is never logged",
    "--log-level-http": "use --access-log",
    "--attention-backend": BY_ITSELF,
    "--prefill-attention-backend": BY_ITSELF,
    "--decode-attention-backend": BY_ITSELF,
    "--moe-runner-backend": BY_ITSELF,
    "--moe-a2a-backend": SEVERAL_GPUS,
    "--sampling-backend": BY_ITSELF,
    "--fp8-gemm-backend": BY_ITSELF,
    "--cuda-graph-max-bs": BY_ITSELF,
    "--cuda-graph-bs": BY_ITSELF,
    "--compilation-config": BY_ITSELF,
    "--enable-torch-compile": BY_ITSELF,
    "--no-enable-chunked-prefill": "long prompts always run in chunks; --chunk-tokens sets their size",
    "--enable-expert-parallel": SEVERAL_GPUS,
    "--enable-dp-attention": SEVERAL_GPUS,
    "--distributed-executor-backend": SEVERAL_GPUS,
    "--node-rank": SEVERAL_GPUS,
    "--dist-init-addr": SEVERAL_GPUS,
    "--disable-custom-all-reduce": BY_ITSELF,
    "--cpu-offload-gb": "weights are not offloaded",
    "--swap-space": "the cache is not offloaded; a preempted request runs its text again",
    "--enable-lora": "LoRA adapters are not supported",
    "--lora-paths": "LoRA adapters are not supported",
    "--lora-modules": "LoRA adapters are not supported",
    "--skip-server-warmup": "ready means warm",
    "--default-chat-template-kwargs": "give chat_template_kwargs in the request",
    "--enable-deterministic-inference": "the same seed always gives the same text; leave it out",
    "--enable-trace": "give --otlp-traces-endpoint",
}
"""Flags that cannot be honoured."""

REFUSED_PREFIXES = {
    "--hicache-": "the cache in host memory has one size, in tokens: use --host-tokens",
    "--kv-transfer": "prefill and decode run in one engine",
    "--disaggregation-": "prefill and decode run in one engine",
    "--attn-cp": SEVERAL_GPUS,
    "--lora-": "LoRA adapters are not supported",
    "--max-lora": "LoRA adapters are not supported",
    "--mm-": "the model reads text only",
    "--limit-mm": "the model reads text only",
}

SPECULATIVE = {
    "--speculative-algorithm", "--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens",
    "--speculative-config", "--num-speculative-tokens",
}  # fmt: skip
"""Flags that say together how many tokens are drafted."""

CONFIG_PREFIX = "--speculative-config."
MTP_METHODS = ("eagle", "nextn", "mtp", "deepseek_mtp", "glm_moe_dsa_mtp", "glm4_moe_mtp")


def reason_against(name: str) -> str | None:
    """Why a flag of others is refused; `None` when it is not a known one."""
    by_prefix = (reason for prefix, reason in REFUSED_PREFIXES.items() if name.startswith(prefix))
    return REFUSED.get(name) or next(by_prefix, None)


def is_speculative(name: str) -> bool:
    """Whether the flag is one of those that `drafts` settles together."""
    return name in SPECULATIVE or name.startswith(CONFIG_PREFIX)


def drafts(given: Mapping[str, str]) -> list[Pair]:
    """`--num-drafts`, from the speculative flags that were given.

    SGLang counts draft steps and verified tokens (steps + 1), vLLM speculative tokens (drafts).

    Raises:
        ConfigError: they ask for a tree, another drafter, or contradict one another.
    """
    settings = dict(given)
    wanted: dict[str, int] = {}
    for name, value in _config_entries(settings).items():
        key = name.removeprefix(CONFIG_PREFIX)
        if key == "method":
            settings["--speculative-algorithm"] = value
        elif key == "num_speculative_tokens":
            wanted[name] = _whole(name, value)
        else:
            raise ConfigError(f"{name} is not supported: Legato drafts with the checkpoint's own MTP layer")
    algorithm = settings.get("--speculative-algorithm")
    if algorithm is not None and algorithm.lower() not in MTP_METHODS:
        raise ConfigError(
            f"speculative method {algorithm} is not supported: Legato drafts with the checkpoint's own MTP layer "
            f"({', '.join(MTP_METHODS[:3])})"
        )
    if (width := settings.get("--speculative-eagle-topk")) is not None and width != "1":
        raise ConfigError(f"--speculative-eagle-topk {width} is not supported: drafts are a chain, not a tree; use 1")
    for name, less in (
        ("--speculative-num-steps", 0),
        ("--num-speculative-tokens", 0),
        ("--speculative-num-draft-tokens", 1),
    ):
        if name in settings:
            wanted[name] = _whole(name, settings[name]) - less
    if len(set(wanted.values())) > 1:
        said = ", ".join(f"{name} means {number}" for name, number in wanted.items())
        raise ConfigError(f"the speculative flags contradict one another: {said} drafts per iteration")
    if not wanted:
        return []
    name, number = next(iter(wanted.items()))
    if not 0 <= number <= MAX_DRAFTS:
        raise ConfigError(f"{name} means {number} drafts per iteration; Legato drafts 0 to {MAX_DRAFTS}")
    return [("--num-drafts", str(number))]


def _config_entries(settings: Mapping[str, str]) -> dict[str, str]:
    """The entries of `--speculative-config`, from its JSON and its dotted form alike, under their dotted names."""
    entries = {name: value for name, value in settings.items() if name.startswith(CONFIG_PREFIX)}
    if "--speculative-config" in settings:
        stated = _json("--speculative-config", settings["--speculative-config"])
        if not isinstance(stated, dict):
            raise ConfigError(f"--speculative-config must be a JSON object, got {settings['--speculative-config']}")
        for key, value in stated.items():
            entries.setdefault(CONFIG_PREFIX + key, value if isinstance(value, str) else json.dumps(value))
    return entries


def _whole(name: str, value: str) -> int:
    if not re.fullmatch(r"\d+", value):
        raise ConfigError(f"{name} must be a whole number, got {value}")
    return int(value)


def _json(name: str, value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError as error:
        raise ConfigError(f"{name} must be JSON ({error}), got {value}") from error
