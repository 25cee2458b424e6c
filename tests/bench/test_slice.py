"""`legato bench slice` at toy sizes on the CPU: the engine's own loop over a rank's share, and every figure it must print."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from legato.bench.exchanges import BYTES_OF_ONE, KERNELS_US, LINK_BYTES_PER_US, LINK_US, added
from legato.bench.kernels import by_kernel
from legato.bench.launches import GLM_5_2
from legato.bench.record import Setting, append
from legato.bench.roofline import traffic, traffic_of
from legato.bench.share import drawn, first_layers, routed
from legato.bench.slice import fields, measure, simulated
from legato.bench.steady import SliceError, Work, pack
from legato.bench.trace import Span
from legato.cli.share_commands import Sweep
from legato.cli.slice import Asked, Shown, as_an_engine, bench_slice, by_ranks
from legato.config import ConfigError
from legato.model.checkpoint import Checkpoint
from legato.model.convert import Target
from legato.model.dummy import Recipe
from legato.model.inventory import survey
from legato.model.names import Kind, expected
from legato.model.spec import ModelSpec, SpecError
from legato.ops import bind
from legato.parallel import Mesh
from legato.runtime.cache import CacheLayout
from tests.tiny import tiny_checkpoint, tiny_config

CPU = torch.device("cpu")
NUM_DRAFTS = 2
WORK = Work(batch=2, context=70, num_drafts=NUM_DRAFTS, iterations=2, distinct_experts=None, latent="auto", ops={})


@pytest.fixture(scope="module")
def tiny() -> ModelSpec:
    return first_layers(ModelSpec.from_config(tiny_config(index_head_dim=128), name="tiny"), 4)


def test_a_share_is_measured_and_recorded(tiny: ModelSpec, tmp_path: Path) -> None:
    share = routed(drawn(tiny, Mesh(1, 2), Target.NVFP4, CPU, torch.float32), 3, NUM_DRAFTS + 1)
    pack(share, WORK, CPU)
    figure = measure(share, WORK, CPU, bind(()))
    line = fields(share, WORK, figure, None, {"format": "nvfp4"}) | simulated(figure, 2.5)
    append(tmp_path / "slice.jsonl", [line], Setting.here(CPU))
    read = json.loads((tmp_path / "slice.jsonl").read_text())
    assert read["case"] == {"tp": 2, "rank": 1, "layers": 4, "format": "nvfp4"}
    assert (read["batch"], read["context"], read["k"]) == (2, 70, NUM_DRAFTS)
    assert read["median_us"] > 0 and read["context_synthetic"]
    assert read["accept_length_simulated"] and read["accept_length"] == 2.5
    # Two sums per layer and pass, and the head's gather after each pass: 4 layers, then the MTP layer twice.
    assert read["exchanges"] == 2 * (4 + NUM_DRAFTS) + 1 + NUM_DRAFTS
    modelled = read["exchanges_measured_us"] + read["exchanges_reckoned_us"]
    assert modelled == read["exchanges_modelled_us"] and not read["exchanges_reckoned_us"], "few words"
    assert modelled == pytest.approx(read["exchanges"] * (KERNELS_US[2] + LINK_US[4]))
    assert read["tokens_per_s_simulated"] == pytest.approx(2.5e6 / read["median_us"])
    assert read["tokens_per_s_simulated_with_exchanges"] == pytest.approx(2.5e6 / (read["median_us"] + modelled))
    assert 2 <= read["experts_reached"] <= 8
    assert 1.0 <= figure.emitted <= NUM_DRAFTS + 1, "requests decode from the context that was written"


def test_exchanges_of_more_ranks_cost_more_and_more_words_than_were_measured_are_reckoned() -> None:
    few = 172 * BYTES_OF_ONE
    two, four, eight = (added(172, few, ranks) for ranks in (2, 4, 8))
    assert two.reckoned == four.reckoned == eight.reckoned == 0 and two.total < four.total < eight.total
    assert (
        eight.measured
        == 172 * (KERNELS_US[8] + LINK_US[8])
        == added(172, few, 5).measured
        == added(172, few, 16).measured
    )
    more = added(172, few + 1_000_000, 8)
    assert more.measured == eight.measured and more.reckoned == 7 * 1_000_000 / LINK_BYTES_PER_US
    assert added(0, 0, 1).total == 0


def test_the_floor_of_drawn_weights_is_that_of_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint(tmp_path, "nvfp4"))
    spec = ModelSpec.from_config(checkpoint.config, name="tiny")
    formats = {name: stored.format for name, stored in survey(checkpoint, spec).linears.items()}
    share = drawn(spec, Mesh(0, 2), Target.NVFP4, CPU, torch.float32)
    assert share.traffic == traffic_of(spec, formats, 2)
    of_checkpoint = traffic(checkpoint, 2)
    assert share.traffic.iteration(1, 5, 500) == of_checkpoint.iteration(1, 5, 500)
    # As many experts as even routing reaches on average give the same bytes; half as many, fewer.
    even = 8 * (1 - (1 - 2 / 8) ** 6)
    assert share.traffic.iteration(1, 5, 500, even) == pytest.approx(of_checkpoint.iteration(1, 5, 500))
    assert share.traffic.iteration(1, 5, 500, even / 2) < of_checkpoint.iteration(1, 5, 500)


def test_glm_5_2_has_the_floor_that_was_computed_by_hand() -> None:
    """NVFP4, rank of 8, 8K, 44 experts: 4.44 ms at 4.3 TB/s, kept to a few percent."""
    spec, recipe = ModelSpec.from_config(GLM_5_2, name="GLM-5.2"), Recipe(Target.NVFP4)
    formats = {entry.name: recipe.layout(entry, spec) for entry in expected(spec) if entry.kind is Kind.LINEAR}
    assert traffic_of(spec, formats, 8).iteration(1, 5, 8192, 44) / 4.3e9 == pytest.approx(4.44, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "somewhere", "dims": "glm-5.2"}, "not both"),
        ({"dims": "glm-6"}, "--dims must be one of"),
        ({"format": "int3"}, "--format must be one of"),
        ({"rank": 8}, "--rank and --tp"),
        ({"accept_length": 7.5}, "--simulate-accept-length must be between 1 and k"),
        ({"model": "somewhere", "layers": 2, "dims": None}, "need --dummy"),
    ],
)
def test_flags_that_contradict_are_refused(changes: dict[str, object], message: str) -> None:
    given = {
        "model": None, "dims": None, "tp": 8, "rank": 0, "layers": None, "dummy": False, "format": "nvfp4",
        "drafts": "stored", "dense": "stored",
        "device": "cpu", "accept_length": None,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=message):
        bench_slice(Asked(**{**given, **changes}), [WORK], Shown(0, None, None, 0))


def test_a_share_beyond_the_memory_of_the_device_is_refused_before_it_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legato.cli.slice.host_bytes", lambda: 60_000_000_000)
    monkeypatch.setattr("legato.cli.slice.drawn", lambda *_: pytest.fail("nothing must be drawn"))
    asked = Asked(None, "glm-5.2", 8, 0, None, True, "nvfp4", "stored", "stored", "cpu", None)
    with pytest.raises(ConfigError, match=r"take 62\.\d GB, and the device \(cpu\) has 60\.0 GB of memory: .*--layers"):
        bench_slice(asked, [WORK], Shown(0, None, None, 0))


def test_more_layers_than_there_are_are_refused(tiny: ModelSpec) -> None:
    with pytest.raises(SpecError, match="4 layers; asked for 5"):
        first_layers(tiny, 5)


def test_the_time_of_an_iteration_is_shared_out_among_its_kernels() -> None:
    """A kernel that waits for the one before is charged for what it adds at the end, and gaps go to whoever ends them."""
    spans = [Span("a", 1000, 4000, 1), Span("b", 1500, 6000, 1), Span("c", 2000, 5000, 1), Span("a", 8000, 9000, 1)]
    found = {kernel.name: kernel for kernel in by_kernel(spans)}
    assert {name: kernel.advance_us for name, kernel in found.items()} == {"a": 3.0 + 3.0, "b": 1.0, "c": 1.0}
    assert found["b"].total_us == 4.5 and found["a"].calls == 2
    assert sum(kernel.advance_us for kernel in found.values()) == 8.0


def test_layers_use_latent_caches_in_turn(tiny: ModelSpec) -> None:
    caches = CacheLayout(tiny, "float32", "float32").allocate_in_turn(2, "cpu", 3)
    latents = [cache.latent.data_ptr() for cache in caches]
    assert latents == [latents[0], latents[1], latents[2], latents[0], latents[1]] and len(set(latents)) == 3
    indexes = [cache.index.data_ptr() for cache in caches if cache.index is not None]
    assert len(indexes) == len(set(indexes)) == tiny.num_full + 1


def test_numbers_that_are_none_are_no_measurement(tiny: ModelSpec) -> None:
    share = drawn(tiny, Mesh(0, 2), None, CPU, torch.float32)
    share.weights.norm[0] = torch.nan
    with pytest.raises(SliceError, match="not finite"):
        measure(share, replace(WORK, num_drafts=0, iterations=1), CPU, bind(()))


def test_a_sweep_measures_one_number_of_ranks_after_the_other(tmp_path: Path) -> None:
    model = str(tiny_checkpoint(tmp_path / "model", "nvfp4", index_head_dim=128))
    asked = Asked(model, None, 1, 0, None, False, "nvfp4", "auto", "stored", "cpu", 2.0)
    listed = [replace(WORK, batch=1, iterations=1)]
    found = by_ranks(asked, (2, 1), listed, Shown(0, tmp_path / "isl.jsonl", None, 0))
    assert [(line["case"]["tp"], line["context"]) for line in found] == [(2, 70), (1, 70)]
    assert all(line["tokens_per_s_simulated"] > 0 and line["accept_length_simulated"] for line in found)
    assert {line["case"]["drafts"] for line in found} == {"stored"}, (
        "what was measured is named, not that it was automatic"
    )
    assert len((tmp_path / "isl.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("device", "targets", "drafts", "measured"),
    [
        ("cuda", ("sm90",), "auto", "lean,table,split"),
        ("cuda", (), "auto", "stored"),
        ("cpu", (), "auto", "stored"),
        ("cuda", ("sm90",), "lean", "lean"),
    ],
)
def test_automatic_draft_weights_are_those_of_an_engine(
    monkeypatch: pytest.MonkeyPatch, device: str, targets: tuple[str, ...], drafts: str, measured: str
) -> None:
    def targets_on(name: str) -> tuple[str, ...]:
        assert name == device
        return targets

    monkeypatch.setattr("legato.cli.slice.targets_of", targets_on)
    asked = Asked(None, None, 8, 0, None, False, "nvfp4", drafts, "stored", device, None)
    assert as_an_engine(asked, torch.device(device)).drafts == measured


def test_a_sweep_without_ranks_is_refused(tmp_path: Path) -> None:
    sweep = Sweep(None, "glm-5.2", " ", None, "nvfp4", None, None, "cpu", "auto", [])
    with pytest.raises(ConfigError, match="--tp needs a number"):
        sweep.run("1K", "1", "5", tmp_path / "isl.jsonl")
