"""Every setting of an engine, as a frozen tree of small values, and the one place that settles "auto".

Owns defaults and their validation; the only reader of environment variables. Knows nothing of models beyond the numbers
handed to `resolve`. The CLI and `LLM` fill it; the engine reads it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

LatentFormat = Literal["auto", "float32", "bfloat16", "fp8"]
DenseFormatName = Literal["stored", "fp8"]
IndexFormat = Literal["auto", "float32", "fp8"]
DType = Literal["auto", "float32", "bfloat16"]
Switch = Literal["auto", "on", "off"]

MAX_DRAFTS = 7
DEFAULT_DRAFTS = 5
AUTO_DEPTHS = (1, 3, 5, 7)
"""Numbers of drafts between which an engine chooses by what it measures."""
MAX_RANKS = 8
"""Ranks that can share a model: the GPUs of one host."""
PAGE_SIZE = 64
CPU_SCORE_BYTES, GPU_SCORE_BYTES = 1 << 26, 1 << 30
"""Budgets of index scores unless one is set: 64 MiB on a CPU, 1 GiB on a GPU."""
CPU_CHUNK_TOKENS, GPU_CHUNK_TOKENS = 512, 2048
"""Rows of prompts in a pass unless it is set. Every pass reads nearly all experts, so on a GPU it should be worth it; there
running requests do not wait for a whole pass."""


class ConfigError(ValueError):
    """A setting that cannot work. The message names the setting, its value and what is allowed."""


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The two paged caches.

    Attributes:
        latent, index: their formats. "auto" is bfloat16 latents on a GPU, float32 ones on a CPU, where converting costs more than
            the memory, and fp8 index keys.
        tokens: capacity over all requests. `None`: `max_running` full contexts, at most 64 Ki tokens on a CPU, and on a GPU a
            million or what it has room for.
        prefix: whether full pages are kept and found again by later requests.
        host_tokens: room in host memory for pages that are evicted; 0: none.
        memory_fraction: in place of `tokens`, the share of a GPU's memory that weights and caches fill together; kernels, graphs
            and repacked weights need some of the rest.
    """

    latent: LatentFormat = "auto"
    index: IndexFormat = "auto"
    tokens: int | None = None
    prefix: bool = True
    host_tokens: int = 0
    memory_fraction: float | None = None


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """Limits of the scheduler.

    Attributes:
        max_running: most requests in one iteration.
        chunk_tokens: rows of prompts in one pass through the layers; `None`: 2048 on a GPU, 512 on a CPU.
        context: longest prompt plus output; `None`: what the checkpoint states.
        max_waiting: most requests that wait before further ones are refused (0: what cannot run at once is refused); `None`: any
            number.
        slowdown: while a prompt runs, an iteration of the others takes at most so many times its own time, since the prompt goes
            through a few layers at a time between iterations. 0: prompts run whole chunks beside the others; `None`: 2 on a GPU,
            0 on a CPU.
    """

    max_running: int = 16
    chunk_tokens: int | None = None
    context: int | None = None
    max_waiting: int | None = None
    slowdown: float | None = None


@dataclass(frozen=True, slots=True)
class ExecutionConfig:
    """Where and how tensors are computed.

    Attributes:
        device: auto, cpu, cuda or cuda:N.
        dtype: of activations and dense weights; "auto" is bfloat16 on a GPU, for which its kernels are made, float32 on a CPU.
        overlap: whether an iteration is planned while the one before it runs ("auto": on a GPU).
        graphs: whether decoding runs as CUDA graphs ("auto": on a GPU).
        kernel_cache: directory of compiled kernels; `None`: ~/.cache/legato/kernels.
        threads: of the CPU; `None`: one core less than there are, at most 4.
        ops: implementations of single ops in place of those that would be bound, such as `{"attend": "reference"}`.
        score_bytes: most memory for index scores, which grow with rows times context: the indexer takes as few rows at a time as
            that needs. `None`: 64 MiB on a CPU, 1 GiB on a GPU.
        tensor_parallel: ranks that share the model, each on a GPU of its own (on a CPU: in a process of its own).
        rank_patience: seconds that ranks wait for one that does not come, before the engine gives up.
        two_shot_rows: their sums of at least so many rows go in two shots (the same bits); `None`: as many as links
            make faster (`legato.ops.reduce.inbox.two_shots_pay_from`).
        draft_weights: the MTP layer "stored", "lean" (experts in NVFP4, input projection and drafts' head in FP8), or with
            savings by name (see `legato.model.lean`); "auto": all where kernels read weights as stored. No token changes.
        dense_format: weights of attention, dense layers and shared experts as stored, or those that are unquantised in "fp8"
            (blocks of 128x128, at load; tokens may change).
    """

    device: str = "auto"
    dtype: DType = "auto"
    overlap: Switch = "auto"
    graphs: Switch = "auto"
    kernel_cache: str | None = None
    threads: int | None = None
    ops: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    score_bytes: int | None = None
    tensor_parallel: int = 1
    rank_patience: float = 3.0
    two_shot_rows: int | None = None
    draft_weights: str = "auto"
    dense_format: DenseFormatName = "stored"


@dataclass(frozen=True, slots=True)
class Config:
    """An engine's settings.

    Attributes:
        model: directory or hub id; `None`: the checkpoint that ships with Legato.
        num_drafts: K, how many tokens the MTP layer drafts per iteration, 0..7; `None`: 5, or 0 where the checkpoint has no MTP
            layer; "auto": 1, 3, 5 or 7, whichever brings most tokens per second, by what the engine measures as it runs.
        draft_threshold: drafts that are less likely (0..1), together with those before them, are not verified.
        verify_speculation: share (0..1) of requests that are replayed without drafts when they have finished, to see that the
            tokens are the same; it costs that share of the work again.

    Raises:
        ConfigError: a value is out of range; the message names the setting.
    """

    model: str | None = None
    num_drafts: int | Literal["auto"] | None = None
    draft_threshold: float = 0.0
    cache: CacheConfig = CacheConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    execution: ExecutionConfig = ExecutionConfig()
    verify_speculation: float = 0.0

    def __post_init__(self) -> None:
        if self.num_drafts not in (None, "auto") and not 0 <= self.num_drafts <= MAX_DRAFTS:
            raise ConfigError(f"num_drafts must be auto or between 0 and {MAX_DRAFTS}, got {self.num_drafts}")
        if not 0.0 <= self.draft_threshold <= 1.0:
            raise ConfigError(f"draft_threshold must be a probability between 0 and 1, got {self.draft_threshold}")
        if self.schedule.slowdown is not None and not (
            self.schedule.slowdown == 0 or 1.1 <= self.schedule.slowdown <= 1000
        ):
            raise ConfigError(f"slowdown must be 0 (never), or 1.1 to 1000 times, got {self.schedule.slowdown}")
        if not 0.0 <= self.verify_speculation <= 1.0:
            raise ConfigError(f"verify_speculation must be a share between 0 and 1, got {self.verify_speculation}")
        if self.schedule.max_running < 1:
            raise ConfigError(f"max_running must be at least 1, got {self.schedule.max_running}")
        if self.schedule.chunk_tokens is not None and self.schedule.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens must be at least 1, got {self.schedule.chunk_tokens}")
        if self.schedule.max_waiting is not None and self.schedule.max_waiting < 0:
            raise ConfigError(f"max_waiting cannot be negative, got {self.schedule.max_waiting}")
        if self.schedule.context is not None and self.schedule.context < 2:
            raise ConfigError(f"context must be at least 2, got {self.schedule.context}")
        if self.cache.tokens is not None and self.cache.tokens < PAGE_SIZE:
            raise ConfigError(f"cache tokens must be at least one page of {PAGE_SIZE}, got {self.cache.tokens}")
        if self.cache.memory_fraction is not None and not 0 < self.cache.memory_fraction <= 1:
            raise ConfigError(f"memory_fraction must be above 0 and at most 1, got {self.cache.memory_fraction}")
        if self.cache.memory_fraction is not None and self.cache.tokens is not None:
            raise ConfigError("cache tokens and memory_fraction both say how large the cache is: give one")
        if self.cache.host_tokens < 0:
            raise ConfigError(f"host_tokens cannot be negative, got {self.cache.host_tokens}")
        if self.cache.host_tokens and not self.cache.prefix:
            raise ConfigError(
                f"host_tokens {self.cache.host_tokens} needs the prefix cache, which is off: switch it on, or use 0"
            )
        if self.execution.score_bytes is not None and self.execution.score_bytes < 1 << 20:
            raise ConfigError(f"score_bytes must be at least one MiB (1048576), got {self.execution.score_bytes}")
        if not 1 <= self.execution.tensor_parallel <= MAX_RANKS:
            raise ConfigError(
                f"tensor_parallel must be between 1 and {MAX_RANKS}, got {self.execution.tensor_parallel}"
            )
        if self.execution.tensor_parallel > 1 and ":" in self.execution.device:
            raise ConfigError(
                f"device {self.execution.device} is one GPU, and tensor_parallel {self.execution.tensor_parallel} takes as many:"
                " use --device cuda"
            )
        if not 0.1 <= self.execution.rank_patience <= 3600:
            raise ConfigError(f"rank_patience must be 0.1 to 3600 seconds, got {self.execution.rank_patience}")
        if self.execution.two_shot_rows is not None and self.execution.two_shot_rows < 1:
            raise ConfigError(f"two_shot_rows must be at least 1, got {self.execution.two_shot_rows}")
        if self.execution.threads is not None and self.execution.threads < 1:
            raise ConfigError(f"threads must be at least 1, got {self.execution.threads}")


@dataclass(frozen=True, slots=True)
class Resolved:
    """The same settings with nothing left open: what the engine is built from. `num_drafts`: the most that an iteration makes."""

    device: str
    dtype: Literal["float32", "bfloat16"]
    latent: Literal["float32", "bfloat16", "fp8"]
    index: Literal["float32", "fp8"]
    num_drafts: int
    max_running: int
    chunk_tokens: int
    context: int
    cache_tokens: int
    overlap: bool
    threads: int | None
    ops: Mapping[str, str]
    graphs: bool = False
    kernel_cache: str | None = None
    prefix_cache: bool = True
    host_tokens: int = 0
    score_bytes: int = CPU_SCORE_BYTES
    max_waiting: int | None = None
    verify_speculation: float = 0.0
    draft_weights: str = "auto"
    dense_format: DenseFormatName = "stored"
    draft_threshold: float = 0.0
    slowdown: float = 0.0
    is_adaptive: bool = False

    @property
    def depths(self) -> tuple[int, ...]:
        """Numbers of drafts that an iteration may have, ascending."""
        return AUTO_DEPTHS if self.is_adaptive else (self.num_drafts,)

    @property
    def num_pages(self) -> int:
        """Pages to allocate: the capacity, plus the dummy page 0."""
        return -(-self.cache_tokens // PAGE_SIZE) + 1

    @property
    def host_pages(self) -> int:
        """Slots of host memory for evicted pages."""
        return -(-self.host_tokens // PAGE_SIZE)


def score_rows(score_bytes: int, context: int) -> int:
    """How many rows at a time the indexer may score against `context` tokens: 8 bytes for each, since the reference of the
    selection ranks scores as 64-bit integers. One row is always possible."""
    return max(1, score_bytes // (8 * PAGE_SIZE * -(-context // PAGE_SIZE)))


def resolve(config: Config, *, max_position: int, has_mtp: bool, cuda_available: bool) -> Resolved:
    """Settles every "auto" once.

    Args:
        config: the user's settings.
        max_position: longest context that the checkpoint states.
        has_mtp: whether the checkpoint has an MTP layer to draft with.
        cuda_available: whether a CUDA device can be used.

    Raises:
        ConfigError: a setting contradicts the checkpoint or the machine.
    """
    execution, schedule = config.execution, config.schedule
    device = execution.device
    if device == "auto":
        device = "cuda" if cuda_available else "cpu"
    if device.split(":")[0] == "cuda" and not cuda_available:
        raise ConfigError("device cuda was asked for, but this PyTorch finds no CUDA device; use --device cpu")
    if device.split(":")[0] not in ("cuda", "cpu"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {device}")
    if config.num_drafts and not has_mtp:
        raise ConfigError(f"num_drafts {config.num_drafts} needs an MTP layer, and the checkpoint has none; use 0")
    on_cpu = device == "cpu"
    if on_cpu and execution.graphs == "on":
        raise ConfigError("graphs on was asked for, but a CPU runs none; use auto or off")
    context = schedule.context if schedule.context is not None else max_position
    if context > max_position:
        raise ConfigError(f"context {context} is longer than the {max_position} tokens the checkpoint states")
    cache_tokens = config.cache.tokens
    if cache_tokens is None:
        cache_tokens = min(schedule.max_running * (context + PAGE_SIZE), 64 * 1024 if on_cpu else 1024 * 1024)
        cache_tokens = max(cache_tokens, context + PAGE_SIZE)
    return Resolved(
        device=device,
        dtype=("float32" if on_cpu else "bfloat16") if execution.dtype == "auto" else execution.dtype,
        latent=("float32" if on_cpu else "bfloat16") if config.cache.latent == "auto" else config.cache.latent,
        index="fp8" if config.cache.index == "auto" else config.cache.index,
        num_drafts=_drafts(config, has_mtp),
        max_running=schedule.max_running,
        chunk_tokens=schedule.chunk_tokens or (CPU_CHUNK_TOKENS if on_cpu else GPU_CHUNK_TOKENS),
        context=context,
        cache_tokens=cache_tokens,
        overlap=execution.overlap == "on" or (execution.overlap == "auto" and not on_cpu),
        graphs=execution.graphs != "off" and not on_cpu,
        kernel_cache=execution.kernel_cache,
        threads=_cpu_threads(os.cpu_count() or 1) if on_cpu and execution.threads is None else execution.threads,
        ops=execution.ops,
        prefix_cache=config.cache.prefix,
        host_tokens=config.cache.host_tokens,
        score_bytes=execution.score_bytes or (CPU_SCORE_BYTES if on_cpu else GPU_SCORE_BYTES),
        max_waiting=schedule.max_waiting,
        verify_speculation=config.verify_speculation,
        draft_weights=execution.draft_weights,
        dense_format=execution.dense_format,
        draft_threshold=config.draft_threshold,
        slowdown=(0.0 if on_cpu else 2.0) if schedule.slowdown is None else schedule.slowdown,
        is_adaptive=config.num_drafts == "auto",
    )


def _drafts(config: Config, has_mtp: bool) -> int:
    """The most drafts of an iteration."""
    if config.num_drafts == "auto":
        return AUTO_DEPTHS[-1]
    if config.num_drafts is None:
        return DEFAULT_DRAFTS if has_mtp else 0
    return config.num_drafts


def _cpu_threads(num_cores: int) -> int:
    """One core stays free, and four are enough for decoding: when a thread has to wait for a busy core, all wait with it."""
    return max(1, min(4, num_cores - 1))


def from_environment(config: Config, environ: Mapping[str, str] | None = None) -> Config:
    """Fills settings that the user left open from `LEGATO_MODEL` and `LEGATO_DEVICE`."""
    environ = os.environ if environ is None else environ
    if config.model is None and environ.get("LEGATO_MODEL"):
        config = replace(config, model=environ["LEGATO_MODEL"])
    if config.execution.device == "auto" and environ.get("LEGATO_DEVICE"):
        config = replace(config, execution=replace(config.execution, device=environ["LEGATO_DEVICE"]))
    return config


@dataclass(frozen=True, slots=True)
class RankAddress:
    """Who a process is among the ranks of an engine, and where they meet: at a store at `host` and `port`, which this process
    opens (`serves_store`) or finds open."""

    rank: int
    size: int
    host: str
    port: int
    serves_store: bool


def rank_from_environment(environ: Mapping[str, str] | None = None) -> RankAddress | None:
    """What `torchrun` says in the environment; `None` for a process that it has not started.

    Raises:
        ConfigError: what it says is no rank on this host.
    """
    environ = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    try:
        rank, size, local = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise ConfigError(f"torchrun has started this process, but says no rank: {error}") from error
    if local != size:
        raise ConfigError(f"torchrun has started {size} ranks on several hosts; the ranks of an engine share one host")
    has_store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return RankAddress(rank, size, host, port, serves_store=rank == 0 and not has_store)


def api_key_from_environment(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The key in `LEGATO_API_KEY`, where there is one: unlike a flag, other users of the machine cannot see it."""
    key = (os.environ if environ is None else environ).get("LEGATO_API_KEY", "")
    return (key,) if key else ()
