# pyright: basic
"""Choosing tokens on Hopper: `sm90_sample.cu`, a cluster of blocks for each row, without a sort.

Owns the launches. Knows no request. Imported by `bind` only.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from legato.ops.build import Kernel, Launch, Source
from legato.ops.sample import best_of_keys, greedy, greedy_keys, likelihood, sample

THREADS = 512
#: Bytes of a block's slice at most, beside 8 KiB for the exchange.
_MOST_BYTES = 200 * 1024
_SOURCE = Path(__file__).with_name("sm90_sample.cu")


@cache
def kernels(cluster: int) -> tuple[Kernel, Kernel, Kernel]:
    """`greedy` of float32 and of bfloat16, and `sample`, for clusters of so many blocks."""
    source = Source(_SOURCE, {"CLUSTER": cluster, "THREADS": THREADS})
    return (
        Kernel(source, "greedy", non_portable_cluster=cluster > 8),
        Kernel(source, "greedy_bf16", non_portable_cluster=cluster > 8),
        Kernel(source, "sample", shared_bytes=_MOST_BYTES, non_portable_cluster=cluster > 8),
    )


@cache
def keys_kernels(cluster: int) -> tuple[Kernel, Kernel]:
    """`greedy_keys` of float32 and of bfloat16, likewise."""
    source = Source(_SOURCE, {"CLUSTER": cluster, "THREADS": THREADS})
    names = "greedy_keys", "greedy_keys_bf16"
    return tuple(Kernel(source, name, non_portable_cluster=cluster > 8) for name in names)  # type: ignore[return-value]


@cache
def best_kernel() -> Kernel:
    """`best_of_keys`, which knows no clusters."""
    return Kernel(Source(_SOURCE, {"CLUSTER": cluster_of(1), "THREADS": THREADS}), "best_of_keys")


@cache
def likelihood_kernel(cluster: int) -> Kernel:
    """`likelihood`, likewise."""
    source = Source(_SOURCE, {"CLUSTER": cluster, "THREADS": THREADS})
    return Kernel(source, "likelihood", non_portable_cluster=cluster > 8)


def cluster_of(rows: int) -> int:
    """Blocks for each row: 16 while all of them run at once, half as many for more rows. No token depends on it."""
    return 16 if rows <= 8 else 8


def slice_of(width: int, cluster: int) -> int:
    """Numbers of a row that each block takes: whole groups of four, which share a draw of the noise."""
    return -(-width // (4 * cluster)) * 4


def _launch(rows: int, cluster: int, shared_bytes: int = 0) -> Launch:
    return Launch((rows * cluster,), (THREADS,), (cluster,), shared_bytes, programmatic=True)


def _dense(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _best(logits: Tensor, of_float: Kernel, of_bfloat16: Kernel, *more: int) -> Tensor:
    """One launch of either kernel for rows of any width; a number for each row."""
    logits = _dense(logits if logits.dtype is torch.bfloat16 else logits.to(torch.float32))
    rows, width = logits.shape
    found = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        cluster = cluster_of(rows)
        run = of_bfloat16 if logits.dtype is torch.bfloat16 else of_float
        stride = ctypes.c_int64(logits.stride(0))
        run(_launch(rows, cluster), logits, found, width, stride, slice_of(width, cluster), *more)
    return found


@greedy.on("sm90")
def greedy_sm90(logits: Tensor) -> Tensor:
    """One launch. [T, W] of any width; other types than float32 and bfloat16 are converted first."""
    return _best(logits, *kernels(cluster_of(logits.shape[0]))[:2])


@greedy_keys.on("sm90")
def greedy_keys_sm90(logits: Tensor, first: int) -> Tensor:
    """As `greedy`."""
    return _best(logits, *keys_kernels(cluster_of(logits.shape[0])), first)


@best_of_keys.on("sm90")
def best_of_keys_sm90(keys: Tensor) -> Tensor:
    """One launch; keys int64, a rank's side by side (all ranks' may be the same ones)."""
    ranks, rows = keys.shape
    if keys.dtype != torch.int64 or (rows > 1 and keys.stride(1) != 1):
        raise ValueError(f"best_of_keys: keys are {keys.dtype}, strides {keys.stride()}; expected int64 rows")
    tokens = torch.empty(rows, dtype=torch.int64, device=keys.device)
    if rows:
        how = Launch(grid=(-(-rows // 128),), block=(min(128, -(-rows // 32) * 32),), programmatic=True)
        best_kernel()(how, keys, tokens, ranks, rows, keys.stride(0))
    return tokens


@sample.on("sm90")
def sample_sm90(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """One launch, behind a conversion to float32. Rows that do not fit the shared memory of a cluster (about 400,000 tokens)
    go to the reference."""
    logits = _dense(logits.to(torch.float32))
    rows, width = logits.shape
    cluster = cluster_of(rows)
    slice_len = slice_of(width, cluster)
    if 4 * slice_len > _MOST_BYTES:
        return sample.reference(logits, temperature, top_k, top_p, min_p, seed, position)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    parameters = (temperature.float(), top_k.int(), top_p.float(), min_p.float(), seed.long(), position.long())
    if rows:
        how = _launch(rows, cluster, 4 * slice_len)
        _, _, draw = kernels(cluster)
        draw(
            how, logits, *map(Tensor.contiguous, parameters), tokens, width, ctypes.c_int64(logits.stride(0)), slice_len
        )
    return tokens


@likelihood.on("sm90")
def likelihood_sm90(logits: Tensor, tokens: Tensor) -> Tensor:
    """One launch, behind a conversion to float32. [T, W] of any width."""
    logits, tokens = _dense(logits.to(torch.float32)), tokens.long().contiguous()
    rows, width = logits.shape
    found = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        cluster = cluster_of(rows)
        stride = ctypes.c_int64(logits.stride(0))
        weigh = likelihood_kernel(cluster)
        weigh(_launch(rows, cluster), logits, tokens, found, width, stride, slice_of(width, cluster))
    return found
