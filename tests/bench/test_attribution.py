"""Which op a kernel belongs to, what an op had to read, and files for Perfetto."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from legato.bench import perfetto
from legato.bench.attribution import OUTSIDE, Call, Piece, bytes_needed, noted, op_times, pieces, storages
from legato.bench.share import drawn, first_layers
from legato.bench.slice import accept_length_at
from legato.bench.steady import Work, steady
from legato.bench.trace import Span
from legato.model.spec import ModelSpec
from legato.ops import linear_bf16, moe_bf16
from legato.ops.gemm.sm90_packing import Kept
from legato.parallel import Mesh
from legato.runtime.batch import build_batch
from legato.runtime.draw import PlainDraw, choose_greedy
from tests.tiny import tiny_config

CPU = torch.device("cpu")


def spans(*names: str) -> list[Span]:
    return [Span(name, 10 * place, 10 * place + 8, place) for place, name in enumerate(names)]


def test_kernels_between_marks_belong_to_the_call() -> None:
    recorded = spans("copy", "sinc", "linear", "reduce", "sinc", "copy", "sinc", "sinc")
    found = pieces(recorded, [Call("linear_bf16", 500), Call("route", 7)])
    assert found == [
        Piece("copy", OUTSIDE, 0), Piece("linear", "linear_bf16", 500), Piece("reduce", "linear_bf16", 0),
        Piece("copy", OUTSIDE, 0),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="8 marks were recorded around 1 calls"):
        pieces([*recorded, *spans("sinc", "sinc", "sinc", "sinc")], [Call("linear_bf16", 500)])


def test_of_a_weight_kept_in_two_forms_one_is_read() -> None:
    packed, stored, x = torch.zeros(8), torch.zeros(8), torch.zeros(4)
    kept = Kept(packed, stored)
    held = storages([kept])
    assert bytes_needed(linear_bf16, (x, kept, None), held) == packed.nbytes
    assert bytes_needed(linear_bf16, (x, stored, None), held) == stored.nbytes


def test_routed_experts_count_as_reached_and_a_shared_one_kept_twice_counts_once() -> None:
    """Eight experts, three reached; as stored the shared one is as large as packed, and longer than there are experts."""
    w13, w2 = torch.zeros(8, 4, 16), torch.zeros(8, 16, 2)
    gate_up, down = Kept(torch.zeros(1, 64), torch.zeros(4, 16)), Kept(torch.zeros(1, 32), torch.zeros(16, 2))
    arguments = torch.zeros(2, 16), torch.tensor([[0, 5], [5, 7]]), torch.ones(2, 2), w13, w2, gate_up, down
    routed = (w13.nbytes + w2.nbytes) * 3 // 8
    assert bytes_needed(moe_bf16, arguments, storages(arguments[3:])) == routed + gate_up.nbytes + down.nbytes


def test_ops_are_ranked_by_the_time_their_bytes_do_not_explain() -> None:
    """Two ops launch a kernel of one name; the graph also writes a letter, which was not attributed."""
    attributed = [
        Piece("linear", "linear_bf16", 4000),
        Piece("linear", "linear_draft", 1000),
        Piece("copy", OUTSIDE, 0),
    ]
    iteration = [
        Span("linear", 0, 5_000, 1), Span("linear", 4_000, 9_000, 1), Span("letter", 9_000, 10_000, 1),
        Span("copy", 10_000, 11_000, 1),
    ]  # fmt: skip
    found = {one.op: one for one in op_times(iteration, attributed, bytes_per_us=1000)}
    assert {name: (one.us, one.floor_us, one.above_us) for name, one in found.items()} == {
        "linear_draft": (4.0, 1.0, 3.0), "linear_bf16": (5.0, 4.0, 1.0), OUTSIDE: (2.0, 0.0, 2.0),
    }  # fmt: skip
    assert sum(one.us for one in found.values()) == 11.0
    assert op_times(iteration, attributed, None)[0].op == "linear_bf16", "without a rate all of the time counts"


@torch.inference_mode()
def test_an_iterations_calls_read_weights_and_caches_and_count_no_rows() -> None:
    spec = first_layers(ModelSpec.from_config(tiny_config(index_head_dim=128), name="tiny"), 4)
    share = drawn(spec, Mesh(0, 2), None, CPU, torch.float32)
    standing = steady(share, Work(1, 70, 2, 1, None, "auto", {}), CPU)
    runner = standing.runner
    runner.launch(standing.plan).outcome()  # packed forms are made at the first call
    batch = build_batch(standing.plan, runner.rows, spec)
    with noted([share.weights]) as found:
        runner.iteration.run(batch.within(1 << 26), runner.rows, PlainDraw(choose_greedy), 2)
    assert linear_bf16.bound.run is linear_bf16.reference, "put back"
    calls = found.calls()
    of = {name: [call.num_bytes for call in calls if call.op == name] for name in {call.op for call in calls}}
    latent = 4 * (spec.kv_lora_rank + spec.rope_dim)
    assert len(of["sparse_mla"]) == spec.num_layers + 2 and all(
        spec.index_topk * latent <= size <= 3 * spec.index_topk * latent for size in of["sparse_mla"][:-1]
    ), "at least one row's tokens, at most three rows' different ones"
    keys = {size / 132 for size in of["index_scores"]}  # 128 bytes and a scale each
    assert len(keys) == 1 and keys < {74, 75, 76}, "70 tokens, one to three of the first iteration, and three rows"
    one = share.weights.layers[-1].mlp.experts
    per_expert = one.nbytes // one.num_experts
    assert all(size % per_expert == 0 and 0 < size <= one.nbytes for size in of["moe_bf16"])
    assert of["accept_rows"] == [0] and of["advance_rows"] == [0]
    assert share.weights.layers[0].attention.qkv.tensor.untyped_storage().data_ptr() in storages([share.weights])


def test_spans_that_overlap_lie_on_tracks_of_their_own(tmp_path: Path) -> None:
    perfetto.write(tmp_path / "t.json.gz", {"one": [Span("a", 5_000, 9_000, 1), Span("b", 8_000, 9_500, 1)]}, "here")
    read = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))
    events = [event for event in read["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["ts"], event["dur"], event["tid"]) for event in events] == [
        ("a", 0.0, 4.0, 1), ("b", 3.0, 1.5, 2),
    ]  # fmt: skip
    assert read["otherData"]["note"] == "here"


def test_fewer_drafts_are_accepted_with_the_same_chance_each() -> None:
    assert accept_length_at(3.61, 5, 5) == 3.61 and accept_length_at(3.61, 5, 0) == 1.0
    assert accept_length_at(1 + 0.5 + 0.25, 2, 1) == pytest.approx(1.5)
    assert accept_length_at(6.0, 5, 3) == pytest.approx(4.0)
