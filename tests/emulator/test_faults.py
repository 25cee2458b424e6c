"""The emulator finds what it is for: a barrier or a wait too few, an overrun, a deadlock; and the mended twins pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("tests.ops.nvrtc")

from legato.ops.build import Kernel, Launch, Source
from tests.emulator.launch import EmulationError, emulated
from tests.emulator.native import compiler

# The machine is compiled first, which takes longer than a quick test may.
pytestmark = [pytest.mark.full, pytest.mark.skipif(compiler() is None, reason="needs g++")]

SEEDS = range(8)
THREADS, WORDS = 128, 1024

#: Every thread hands a number to its neighbour across warps; a lane to its neighbour; a copy arrives before it is read.
TEXT = """
typedef unsigned int u32;
extern "C" __global__ void neighbour(int* out) {
  __shared__ int held[128];
  held[threadIdx.x] = threadIdx.x * 3;
#if SYNC
  __syncthreads();
#endif
  out[threadIdx.x] = held[(threadIdx.x + 33) % 128];
}
extern "C" __global__ void lanes(int* out) {
  __shared__ volatile int held[128];
  held[threadIdx.x] = threadIdx.x * 5;
#if SYNC
  __syncwarp();
#endif
  out[threadIdx.x] = held[threadIdx.x ^ 1];
}
extern "C" __global__ void copied(const int* from, int* out) {
  __shared__ __align__(16) int held[512];
  const u32 at = static_cast<u32>(__cvta_generic_to_shared(held + threadIdx.x * 4));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from + threadIdx.x * 4) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
#if SYNC
  asm volatile("cp.async.wait_group 0;" ::: "memory");
#else
  asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
  out[threadIdx.x] = held[threadIdx.x * 4 + 1];
}
extern "C" __global__ void bulk(const int* from, int* out) {
  __shared__ __align__(16) int held[1024];
  __shared__ __align__(8) unsigned long long barrier;
  const u32 to = static_cast<u32>(__cvta_generic_to_shared(held)), ready = static_cast<u32>(__cvta_generic_to_shared(&barrier));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(ready) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 4096;" ::"r"(ready) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 4096, [%2];" ::"r"(to), "l"(from),
                 "r"(ready) : "memory");
  }
  __syncthreads();
#if SYNC
  u32 done = 0;
  while (!done)
    asm volatile("{.reg .pred p;\\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\\nselp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(ready) : "memory");
#endif
  for (int i = threadIdx.x; i < 1024; i += 128) out[i] = held[i];
}
extern "C" __global__ void remote(int* out) {
  __shared__ int held[128];
  u32 rank, own = static_cast<u32>(__cvta_generic_to_shared(held + threadIdx.x)), other, value;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  held[threadIdx.x] = 1000 * rank + threadIdx.x;
  asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(other) : "r"(own), "r"(rank ^ 1));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(other) : "memory");
#if SYNC
  asm volatile("barrier.cluster.arrive.aligned;\\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
  out[blockIdx.x * 128 + threadIdx.x] = value;
}
extern "C" __global__ void overrun(int* out, int first) {
  __shared__ int held[128];
  held[threadIdx.x + first] = 1;
  __syncthreads();
  out[threadIdx.x] = held[threadIdx.x];
}
extern "C" __global__ void beyond(int* out, int first) { out[threadIdx.x + first] = 1; }
extern "C" __global__ void uneven(int* out, int first) {
  if (threadIdx.x / 32 != first) __syncthreads();
  asm volatile("bar.sync 1, 128;" ::: "memory");
  out[threadIdx.x] = 1;
}
"""


def kernel(tmp_path: Path, name: str, is_right: bool) -> Kernel:
    path = tmp_path / "faults.cu"
    path.write_text(TEXT)
    return Kernel(Source(path, {"SYNC": int(is_right)}), name)


def expected(name: str, given: torch.Tensor) -> torch.Tensor:
    thread = torch.arange(THREADS, dtype=torch.int32)
    if name == "neighbour":
        return (thread + 33) % THREADS * 3
    if name == "lanes":
        return (thread ^ 1) * 5
    if name == "copied":
        return given[thread * 4 + 1]
    if name == "bulk":
        return given
    return torch.cat([1000 + thread, thread])


def run(made: Kernel, name: str, seed: int) -> bool:
    """Whether the kernel gave what it should; False, too, where the emulator stopped it."""
    given = torch.arange(WORDS, dtype=torch.int32) * 7
    wanted = expected(name, given)
    out = torch.full_like(wanted, -1)
    how = Launch((2,) if name == "remote" else (1,), (THREADS,), (2,) if name == "remote" else None)
    try:
        with emulated(seed):
            made(how, *((given, out) if name in ("copied", "bulk") else (out,)))
    except EmulationError:
        return False
    return torch.equal(out, wanted)


@pytest.mark.parametrize("name", ["neighbour", "lanes", "copied", "bulk", "remote"])
def test_what_is_missing_shows_for_some_order_and_what_is_right_never_does(tmp_path: Path, name: str) -> None:
    assert all(run(kernel(tmp_path, name, True), name, seed) for seed in SEEDS)
    assert not all(run(kernel(tmp_path, name, False), name, seed) for seed in SEEDS)


@pytest.mark.parametrize(
    ("name", "first", "message"),
    [
        (
            "overrun",
            1,
            r"faults\.cu: overrun .*block \(0, 0, 0\) warp 3, PTX line \d+ \(faults\.cu:\d+\): shared memory out of bounds",
        ),
        ("beyond", 1, r"warp 3, .*global memory out of bounds: 4 bytes"),
        ("uneven", 2, r"(?s)deadlock: no thread can go on.*faults\.cu:\d+\) \(a barrier\)"),
    ],
)
def test_a_fault_is_named_with_its_place(tmp_path: Path, name: str, first: int, message: str) -> None:
    made, out = kernel(tmp_path, name, True), torch.zeros(THREADS, dtype=torch.int32)
    for seed in (0, 3):
        with emulated(seed), pytest.raises(EmulationError, match=message):
            made(Launch((1,), (THREADS,)), out, first)


def test_arguments_are_those_that_the_kernel_declares(tmp_path: Path) -> None:
    made, out = kernel(tmp_path, "beyond", True), torch.zeros(THREADS, dtype=torch.int32)
    with emulated():
        made(Launch((1,), (THREADS,)), out, 0)
        assert out.all()
        with pytest.raises(EmulationError, match="1 arguments for 2 parameters"):
            made(Launch((1,), (THREADS,)), out)
        with pytest.raises(EmulationError, match="an argument of 4 bytes for a parameter of 8"):
            made(Launch((1,), (THREADS,)), 5, 5)
        with pytest.raises(EmulationError, match="cannot be launched"):
            made(Launch((1,), (2048,)), out, 0)
