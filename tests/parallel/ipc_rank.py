"""One rank process of tests/parallel/test_ipc.py: `ipc_rank.py RANK RANKS PORT TASK CALLS LANES`; prints a JSON
object. LANES: groups of inboxes that are used at once."""

import json
import sys
import time

import torch

from legato.config import RankAddress
from legato.ops.op import implemented
from legato.ops.reduce import Recorded, all_reduce_add_norm
from legato.ops.reduce.inbox import InboxShape, RankLostError
from legato.parallel.ipc import connect
from legato.parallel.meeting import StoreMeeting
from legato.parallel.mesh import Mesh

WIDTH, STEPS, EPS = 6144, 50, 1e-5


def draw(seed, rows, ranks):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(rows, WIDTH, generator=generator).bfloat16().cuda() for _ in range(ranks + 1)]
    return 3 * tensors[0], tensors[1:], (1 + 0.3 * torch.randn(WIDTH, generator=generator)).bfloat16().cuda()


def expected(residual, partials, weight):
    return all_reduce_add_norm.reference(partials[0], residual, weight, EPS, Recorded((), tuple(partials[1:])))


def parity(ipcs, calls):
    (ipc,) = ipcs
    wrong = 0
    for call in range(calls):
        residual, partials, weight = draw(call, (6, 1, 16, 128, 200)[call % 5], ipc.mesh.size)
        h, normed = ipc.add_norm(partials[ipc.mesh.rank], residual, weight, EPS)
        found = expected(residual, partials, weight)
        wrong += int((h != found[0]).sum())
        wrong += int(((normed - found[1]).abs() > 2**-7 * found[1].abs() + 2**-8).sum())
        shards = [partial[0, : 1 + call % 9].float() for partial in partials]
        wrong += int((ipc.all_gather(shards[ipc.mesh.rank], 0) != torch.cat(shards)).sum())
        rows = [partial[: 1 + call % 2, :8].float() for partial in partials]
        wrong += int((ipc.all_gather(rows[ipc.mesh.rank], -1) != torch.cat(rows, -1)).sum())
    return {"wrong": wrong}


def skewed(ipcs, calls):
    """Graphs of 50 calls with pauses of up to 15 us on each rank, other pauses between graphs; every sum is checked.

    Each group of inboxes has graphs and a stream of its own: on one GPU processes take turns of milliseconds, and each round of
    turns then brings every group a call further.
    """
    rank, ranks, lanes = ipcs[0].mesh.rank, ipcs[0].mesh.size, len(ipcs)
    residual, _, weight = draw(0, 6, ranks)
    partials = [draw(1 + step, 6, ranks)[1] for step in range(STEPS)]
    sums, h = [], residual
    for step in range(STEPS):
        h, _ = expected(h, partials[step], weight)
        sums.append(h)
    drawn = torch.Generator().manual_seed(100 + rank)
    pauses = torch.randint(0, 30000, (lanes, STEPS + 64), generator=drawn).tolist()
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in ipcs]
    streams = [torch.cuda.Stream() for _ in ipcs]

    def steps(lane):
        h = residual
        for step in range(STEPS):
            torch.cuda._sleep(pauses[lane][step])
            h, _ = ipcs[lane].add_norm(partials[step][rank], h, weight, EPS)
            wrong[lane].add_((h != sums[step]).sum())

    steps(0)
    torch.cuda.synchronize()
    graphs = [torch.cuda.CUDAGraph() for _ in ipcs]
    for lane, graph in enumerate(graphs):
        with torch.cuda.graph(graph, stream=streams[lane]):
            steps(lane)
    torch.cuda.synchronize()
    began, made = time.monotonic(), 0
    while made * lanes < calls:
        for lane, graph in enumerate(graphs):
            with torch.cuda.stream(streams[lane]):
                torch.cuda._sleep(pauses[lane][STEPS + made // STEPS % 64])
                graph.replay()
        made += STEPS
    torch.cuda.synchronize()
    for ipc in ipcs:
        ipc.check()
    return {"wrong": sum(map(int, wrong)), "calls": made * lanes, "lanes": lanes, "seconds": time.monotonic() - began}


def captured(ipcs, calls):
    """One graph of a sum in four launches, a gather of more words than the inbox takes at a time, and a sum: what the end of a
    prompt holds, without a library's help (there is none). Other numbers at each replay."""
    (ipc,) = ipcs
    rank, ranks = ipc.mesh.rank, ipc.mesh.size
    residual, partials, weight = draw(0, 512, ranks)
    own = partials[rank].clone()

    def work():
        h, _ = ipc.add_norm(own, residual, weight, EPS)
        wide = ipc.all_gather(own[:, : WIDTH // ranks], -1)
        return wide, ipc.add_norm(wide, h, weight, EPS)[0]

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        wide, total = work()
    wrong = 0
    for call in range(calls):
        _, partials, _ = draw(call, 512, ranks)
        own.copy_(partials[rank])
        graph.replay()
        h, _ = expected(residual, partials, weight)
        wrong += int((wide != torch.cat([partial[:, : WIDTH // ranks] for partial in partials], -1)).sum())
        wrong += int((total != expected(h, [wide] * ranks, weight)[0]).sum())
    ipc.check()
    return {"wrong": wrong}


def mixed(ipcs, calls):
    """Both of the above where every other group of inboxes sums in two shots."""
    return skewed(ipcs, calls) | {"parity": [parity(ipcs[lane : lane + 1], 8)["wrong"] for lane in (0, 1)]}


def absent(ipcs, calls):
    """The last rank never calls."""
    (ipc,) = ipcs
    residual, partials, weight = draw(0, 6, ipc.mesh.size)
    if ipc.mesh.rank == ipc.mesh.size - 1:
        return {}
    began = time.monotonic()
    h, normed = ipc.add_norm(partials[0], residual, weight, EPS)
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    try:
        ipc.check()
    except RankLostError as error:
        return {"error": str(error), "seconds": seconds, "nan": bool(h.isnan().all() and normed.isnan().all())}
    return {"error": ""}


def main():
    rank, ranks, port, calls, lanes = (int(sys.argv[index]) for index in (1, 2, 3, 5, 6))
    torch.cuda.set_device(rank % torch.cuda.device_count())
    for op in implemented("sm90"):
        if op.folder == "reduce":
            op.bound = op.implementations["sm90"]
    mesh = Mesh(rank, ranks)
    meet = StoreMeeting.at(RankAddress(rank, ranks, "127.0.0.1", port, serves_store=rank == 0), 60)
    tasks = {"parity": parity, "skewed": skewed, "captured": captured, "mixed": mixed, "absent": absent}
    task = tasks[sys.argv[4]]
    patience_s = 0.5 if task is absent else 20
    ipcs = []
    for lane in range(lanes):
        shape = InboxShape(ranks, WIDTH, two_shot_rows=1 if task is mixed and lane % 2 else None)
        ipcs.append(connect(mesh, meet, shape, patience_s, library=None))
    with torch.inference_mode():
        result = task(ipcs, calls)
    torch.cuda.synchronize()
    meet(b"")
    for ipc in ipcs:
        ipc.close()
    print(json.dumps(result), flush=True)
    if rank == 0:
        time.sleep(1)  # it serves the store in which the others meet


if __name__ == "__main__":
    main()
