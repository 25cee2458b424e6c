"""`legato bench ablate` at toy size on the CPU: what is taken away, what stays bound afterwards, and the lines of the record."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from legato.bench.ablate import CLAIMS, OTHER_OPS, WHOLE, Asked, measure
from legato.bench.share import Share, drawn, first_layers
from legato.bench.steady import Work
from legato.cli.ablate import bench_ablate
from legato.cli.slice import Asked as ShareAsked
from legato.cli.slice import Shown
from legato.model.convert import Target
from legato.model.spec import ModelSpec
from legato.ops import top_k
from legato.ops.op import registered
from legato.parallel import Mesh
from tests.tiny import tiny_checkpoint, tiny_config

CPU = torch.device("cpu")


def test_each_decision_is_taken_away_and_put_back() -> None:
    spec = first_layers(ModelSpec.from_config(tiny_config(index_head_dim=128), name="tiny"), 4)
    drawings: list[str] = []
    bound: list[str] = []

    def draw(drafts: str) -> Share:
        drawings.append(drafts)
        return drawn(spec, Mesh(0, 2), Target.NVFP4, CPU, torch.float32)

    work = Work(batch=1, context=70, num_drafts=2, iterations=1, distinct_experts=None, latent="auto", ops={})
    found = []
    for share, one in measure(Asked(work, tuple(CLAIMS), (70, 130), draw, (), CPU)):
        found.append(one.line(share, work, {"format": "nvfp4"}))
        bound.append(top_k.bound.target)
    decisions = [(line["decision"], line["context"]) for line in found]
    # Graphs, cuBLAS' normed product and clusters are a GPU's; the rest runs anywhere.
    assert decisions[:6] == [(WHOLE, 70), ("overlap", 70), *[("IndexShare", 70)] * 2, *[("IndexShare", 130)] * 2]
    assert {"top-k", "draft weights"} <= {decision for decision, _ in decisions} and "one graph" not in dict(decisions)
    assert "torch_topk" in bound and top_k.bound.target == "reference"
    assert drawings == ["stored", "lean"]
    for line in found:
        assert line["median_us"] > 0 and line["times"] == pytest.approx(line["median_us"] / line["whole_us"])
        assert (line["claim"] is None) == (line["decision"] == WHOLE)
    assert all(op.bound.target == "reference" for op in registered())


def test_every_override_names_an_op_there_is() -> None:
    names = {op.name for op in registered()} | {op.folder for op in registered()}
    assert {name for variants in OTHER_OPS.values() for _, overrides in variants for name in overrides} <= names
    assert set(OTHER_OPS) <= set(CLAIMS)


def test_the_command_draws_stored_and_lean_weights(tmp_path: Path) -> None:
    model = str(tiny_checkpoint(tmp_path / "model", "nvfp4", index_head_dim=128))
    asked = ShareAsked(model, None, 2, 0, 4, True, "bf16", "stored", "stored", "cpu", None)
    work = Work(batch=1, context=70, num_drafts=1, iterations=1, distinct_experts=None, latent="auto", ops={})
    found = bench_ablate(asked, work, "draft weights", (70,), Shown(0, tmp_path / "ablate.jsonl", None, 0))
    assert [(line["decision"], line["implementation"]) for line in found] == [
        (WHOLE, WHOLE),
        ("draft weights", "fewer bits"),
    ]
    assert len((tmp_path / "ablate.jsonl").read_text().splitlines()) == 2
