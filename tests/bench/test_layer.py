"""`legato bench layer` at toy sizes on the CPU, and how a recording becomes the moments of one layer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from legato.bench.layer import fields, measure, moments
from legato.bench.share import drawn, first_layers
from legato.bench.steady import SliceError, Work
from legato.bench.trace import Span
from legato.cli.layer import bench_layer, kinds_of
from legato.cli.slice import Asked, Shown
from legato.config import ConfigError
from legato.model.convert import Target
from legato.model.spec import ModelSpec
from legato.parallel import Mesh
from tests.tiny import tiny_checkpoint, tiny_config

CPU = torch.device("cpu")
WORK = Work(batch=1, context=70, num_drafts=2, iterations=1, distinct_experts=None, latent="auto", ops={})


@pytest.fixture(scope="module")
def tiny() -> ModelSpec:
    return first_layers(ModelSpec.from_config(tiny_config(index_head_dim=128), name="tiny"), 4)


def test_a_layer_is_measured_and_recorded(tiny: ModelSpec) -> None:
    share = drawn(tiny, Mesh(1, 2), Target.NVFP4, CPU, torch.float32)
    kinds = {kind for index, kind in enumerate(tiny.indexer_kinds) if not tiny.is_dense(index)}
    for kind in kinds:
        figure = measure(share, WORK, kind, CPU)
        line = fields(share, WORK, figure, None, {"format": "nvfp4"})
        assert line["case"] == {"tp": 2, "kind": kind, "format": "nvfp4"} and line["median_us"] > 0
        assert line["layers_in_chain"] >= line["layers_distinct"] >= 1
        assert 2 <= line["experts_reached"] <= 6, "three rows of two choices each"
        assert line["moments"] == [] and line["kernels"] is None
        assert 0 < line["bytes"] < sum(layer.mlp.experts.nbytes for layer in share.weights.layers[-1:]) * 10  # type: ignore[union-attr]


def test_a_share_without_such_a_layer_says_so(tiny: ModelSpec) -> None:
    with pytest.raises(SliceError, match="no sparse one of kind"):
        measure(drawn(first_layers(tiny, 1), Mesh(0, 2), None, CPU, torch.float32), WORK, "shared", CPU)


def test_the_command_names_the_kinds(tmp_path: Path) -> None:
    where = tmp_path / "layer.jsonl"
    model = str(tiny_checkpoint(tmp_path, index_head_dim=128))
    asked = Asked(model, None, 2, 0, None, False, "nvfp4", "stored", "stored", "cpu", None)
    (line,) = bench_layer(asked, WORK, kinds_of("shared"), Shown(0, where, None, 0))
    assert json.loads(where.read_text())["median_us"] == line["median_us"] > 0 and line["case"]["kind"] == "shared"
    with pytest.raises(ConfigError, match="--kind"):
        kinds_of("shared,half")


def test_moments_are_counted_from_the_end_of_the_layer_before() -> None:
    times = (0, 10_000), (8_000, 30_000), (29_000, 42_000), (41_000, 60_000)
    spans = [Span("ab"[number % 2], *time, number) for number, time in enumerate(times)]
    found = moments(spans, 2)
    assert [(one.name, one.start_us, one.stop_us) for one in found] == [("a", -1.0, 12.0), ("b", 11.0, 30.0)]
    with pytest.raises(SliceError, match="not 2 layers"):
        moments(spans[:3], 2)
