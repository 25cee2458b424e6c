"""What one rank measures of the collectives that an iteration makes, and of NCCL's beside them.

Owns the chains that are timed. Must not know what becomes of the figures. Started by `legato.bench.collective`, once per GPU,
as `python -m legato.bench.collective_rank RANK RANKS PORT`; prints one JSON object per figure.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from legato.bench.timing import sample_replays
from legato.config import RankAddress
from legato.ops import add_rms_norm, all_reduce_add_norm, linear_bf16
from legato.ops.op import implemented
from legato.ops.reduce import Recorded
from legato.ops.reduce.inbox import InboxShape
from legato.parallel.distributed import DistributedRank
from legato.parallel.ipc import IpcRank, connect
from legato.parallel.meeting import StoreMeeting
from legato.parallel.mesh import Mesh

WIDTH, EPS = 6144, 1e-5
ROWS = (1, 6, 16, 64, 128, 256, 512)
#: Steps of a chain, and pairs of weights that it takes in turn: together past the L2.
STEPS, PAIRS = 48, 8
#: The products before each sum: those of a rank of 8 into and out of attention. Outputs and inputs.
INTO, OUT_OF = (2624, WIDTH), (WIDTH, 2048)
MOST_CHAIN_ROWS = 16
SKEWS_US = (2.0, 10.0, 50.0)
_SAMPLES, _DRAWS = 100, 10
_PATIENCE_SECONDS = 20.0

Sum = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(partial, residual) -> (h, normed)."""


@dataclass(frozen=True)
class Bench:
    """One rank with its peers: what it multiplies, sums and meets with. `two_shot`: inboxes whose sums go in two shots."""

    ipc: IpcRank
    two_shot: IpcRank
    library: DistributedRank
    meet: StoreMeeting
    pairs: Sequence[tuple[Tensor, Tensor]]
    weight: Tensor

    def inputs(self, rows: int, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
        """The residual, which all ranks have, and every rank's partial sums."""
        draw = torch.Generator("cpu").manual_seed(seed)
        drawn = [torch.randn(rows, WIDTH, generator=draw) for _ in range(self.ipc.mesh.size + 1)]
        residual, *partials = (tensor.to("cuda", torch.bfloat16) for tensor in drawn)
        return residual, partials

    def through_inboxes(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.ipc.add_norm(partial, residual, self.weight, EPS)

    def in_two_shots(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self.two_shot.add_norm(partial, residual, self.weight, EPS)

    def ways(self) -> tuple[tuple[str, Sum], ...]:
        """The sums that are compared, by name."""
        return ("sm90", self.through_inboxes), ("sm90, two shots", self.in_two_shots), ("nccl", self.by_nccl)

    def check(self) -> None:
        """Raises RankLostError where a wait was given up."""
        self.ipc.check()
        self.two_shot.check()

    def by_nccl(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """NCCL's own sum, in place and in its own order, then this GPU's add and norm."""
        distributed.all_reduce(partial, group=self.library.group)
        return add_rms_norm(residual, partial, self.weight, EPS)

    def alone(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return add_rms_norm(residual, partial, self.weight, EPS)

    def products(self, x: Tensor, step: int) -> Tensor:
        into, out_of = self.pairs[step % PAIRS]
        return linear_bf16(linear_bf16(x, into)[:, : OUT_OF[1]], out_of)


def main(rank: int, ranks: int, port: int) -> None:
    """Measures everything and prints it."""
    torch.cuda.set_device(rank)
    for op in implemented("sm90"):
        if op.folder in ("reduce", "gemm"):
            op.bound = op.implementations["sm90"]
    mesh = Mesh(rank, ranks)
    meet = StoreMeeting.at(RankAddress(rank, ranks, "127.0.0.1", port, serves_store=rank == 0), 120)
    distributed.init_process_group(
        "nccl", store=meet.store, rank=rank, world_size=ranks, device_id=torch.device("cuda", rank)
    )
    library = DistributedRank(mesh)
    shapes = InboxShape(ranks, WIDTH), InboxShape(ranks, WIDTH, two_shot_rows=1)
    ipc, two_shot = (connect(mesh, meet, shape, _PATIENCE_SECONDS, library) for shape in shapes)
    torch.manual_seed(0)
    with torch.inference_mode():
        bench = Bench(ipc, two_shot, library, meet, _pairs(), 1 + 0.3 * torch.randn(WIDTH, device="cuda").bfloat16())
        for figure in (*_alone(bench), *_in_chain(bench), *_under_skew(bench)):
            print(json.dumps(figure), flush=True)
    meet(b"")
    if rank == 0:
        time.sleep(1)  # it serves the store in which the others meet


def _pairs() -> list[tuple[Tensor, Tensor]]:
    def weight(outputs: int, inputs: int) -> Tensor:
        return linear_bf16.pack((torch.randn(outputs, inputs, device="cuda") * inputs**-0.5).bfloat16())

    return [(weight(*INTO), weight(*OUT_OF)) for _ in range(PAIRS)]


def _fault(bench: Bench, add: Sum, rows: int) -> str | None:
    """What is wrong with one sum through inboxes, against the reference, bit by bit in h."""
    residual, partials = bench.inputs(rows, seed=1)
    h, normed = add(partials[bench.ipc.mesh.rank], residual)
    want_h, want = all_reduce_add_norm.reference(
        partials[0], residual, bench.weight, EPS, Recorded((), tuple(partials[1:]))
    )
    bench.check()
    if not torch.equal(h, want_h):
        return f"{int((h != want_h).sum())} numbers of h differ from the reference"
    worst = float(((normed.float() - want.float()).abs() / want.float().abs().clamp(min=2**-8)).max())
    return None if worst <= 2**-7 else f"normed is off by {worst:.3g}"


def _alone(bench: Bench) -> Iterator[dict[str, Any]]:
    """Sums one after the other, nothing between them."""
    for rows in ROWS:
        residual, partials = bench.inputs(rows)
        for name, add in bench.ways():
            fault = None if name == "nccl" else _fault(bench, add, rows)  # NCCL adds in an order of its own

            def steps(add: Sum = add, h: Tensor = residual, x: Tensor = partials[bench.ipc.mesh.rank]) -> None:
                x = x.clone()  # NCCL sums in place
                for _ in range(STEPS):
                    h, x = add(x, h)

            yield _figure("alone", name, rows, _per_step(bench, steps), fault)


def _in_chain(bench: Bench) -> Iterator[dict[str, Any]]:
    """What a sum adds to a chain of products that stream weights: the chain with it less the chain without."""
    for rows in (rows for rows in ROWS if rows <= MOST_CHAIN_ROWS):
        residual, partials = bench.inputs(rows)

        def steps(add: Sum | None, h: Tensor = residual, x: Tensor = partials[bench.ipc.mesh.rank]) -> None:
            for step in range(STEPS):
                x = bench.products(x, step)
                if add is not None:
                    h, x = add(x, h)

        without = _median(_per_step(bench, lambda: steps(None)))
        for name, add in (*bench.ways(), ("add_rms_norm alone", bench.alone)):
            times = _per_step(bench, lambda add=add: steps(add))
            bench.check()
            yield _figure("chain", name, rows, [us - without for us in times], None, chain_us=without)


def _under_skew(bench: Bench) -> Iterator[dict[str, Any]]:
    """As in the chain, where each rank pauses before its products, each time for another while: what is added to the chain
    beyond the longest pause of each step."""
    rank, ranks, rows = bench.ipc.mesh.rank, bench.ipc.mesh.size, 6
    residual, partials = bench.inputs(rows)

    def steps(add: Sum | None, cycles: Sequence[int]) -> None:
        h, x = residual, partials[rank]
        for step, pause in enumerate(cycles):
            torch.cuda._sleep(pause)  # pyright: ignore[reportPrivateUsage]
            x = bench.products(x, step)
            if add is not None:
                h, x = add(x, h)

    def chain(add: Sum | None, cycles: Sequence[int], samples: int = 20) -> list[float]:
        return _per_step(bench, lambda: steps(add, cycles), samples)

    short, long = 4000, 44000
    base = _median(chain(None, [short] * STEPS))
    rate = (long - short) / (_median(chain(None, [long] * STEPS)) - base)  # cycles per microsecond
    base -= short / rate
    for most in SKEWS_US:
        draw = torch.Generator().manual_seed(int(most))
        added: list[float] = []
        for _ in range(_DRAWS):
            pauses = torch.rand(ranks, STEPS, generator=draw) * most + short / rate
            longest = float(pauses.max(0).values.mean())
            times = chain(bench.through_inboxes, [int(us * rate) for us in pauses[rank].tolist()])
            added += [us - longest - base for us in times]
        bench.ipc.check()
        yield _figure(f"chain, skew up to {most:g} us", "sm90", rows, added, None, chain_us=base)


def _per_step(bench: Bench, steps: Callable[[], None], samples: int = _SAMPLES) -> list[float]:
    """Microseconds per step of replays of a graph; all ranks replay equally often."""
    steps()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks the device things in another thread.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        steps()
    bench.meet(b"")
    return [us / STEPS for us in sample_replays(graph, samples)]


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _figure(
    where: str, implementation: str, rows: int, samples: Sequence[float], fault: str | None, **more: float
) -> dict[str, Any]:
    return {
        "op": "all_reduce_add_norm",
        "width": WIDTH,
        "where": where,
        "implementation": implementation,
        "rows": rows,
        "samples": list(samples),
        "fault": fault,
        **more,
    }


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:4]))
