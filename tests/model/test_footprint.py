"""The memory plan: the releases' known sizes to the byte, cache bytes, contexts, and refusals with their reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from legato.model.checkpoint import Checkpoint
from legato.model.footprint import MTP, Footprint, cache_bytes, plan
from legato.model.footprint_text import faults, size, text
from legato.model.spec import ModelSpec
from tests.release import CONFIG, HeaderSource, release
from tests.tiny import quantized, save_checkpoint, tiny_config, tiny_tensors


@pytest.fixture(scope="module")
def nvfp4() -> Footprint:
    return plan(Checkpoint.of(HeaderSource(release("nvfp4"))))


@pytest.fixture(scope="module")
def fp8() -> Footprint:
    return plan(Checkpoint.of(HeaderSource(release("fp8"))))


@pytest.mark.full
def test_the_releases_have_their_published_sizes(nvfp4: Footprint, fp8: Footprint) -> None:
    """753,329,921,024 parameters without the router's 76 x 256 corrections; 464.8 GB and 755.6 GB on disk."""
    assert nvfp4.num_parameters == fp8.num_parameters == 753_329_921_024 + 76 * 256
    assert size(nvfp4.stored_bytes) == "464.8 GB"
    assert size(fp8.stored_bytes) == "755.6 GB"
    assert nvfp4.problems == fp8.problems == ()
    assert nvfp4.formats == {"bf16": 1544, "nvfp4": 75 * 256 * 3}
    assert nvfp4.ignored == {"activations are not quantised": 75 * 256 * 3}


@pytest.mark.full
def test_weights_per_rank(nvfp4: Footprint, fp8: Footprint) -> None:
    one, two, four, eight = nvfp4.plans
    experts = 75 * 256 * (3 * 2048 * 6144 * 9 // 16 + 3 * 4)
    assert one.weight_bytes["routed experts"] == experts
    assert abs(eight.weight_bytes["routed experts"] - experts / 8) < 75 * 256 * 12
    assert size(one.weight_bytes[MTP]) == "19.9 GB"
    assert one.weight_bytes["embedding"] == eight.weight_bytes["embedding"] == 154880 * 6144 * 2
    assert one.weight_bytes["indexer"] == eight.weight_bytes["indexer"], "the indexer is replicated"
    assert one.weight_bytes["router"] == 75 * (256 * 6144 + 256) * 4, "the router is held in float32"
    assert one.total_weight_bytes > two.total_weight_bytes > four.total_weight_bytes > eight.total_weight_bytes
    assert [entry.refusal is None for entry in nvfp4.plans] == [False, False, True, True]
    assert [entry.refusal is None for entry in fp8.plans] == [False, False, False, True]
    assert one.refusal is not None
    assert "there are 150.0 GB" in one.refusal
    assert nvfp4.refusal is None


def test_cache_bytes() -> None:
    cache = cache_bytes(ModelSpec.from_config(CONFIG))
    assert cache.latent_bf16 == 79 * 1152
    assert cache.latent_fp8 == 79 * 656
    assert cache.index_keys == 22 * 132
    without_mtp = cache_bytes(ModelSpec.from_config(CONFIG | {"num_nextn_predict_layers": 0}))
    assert (without_mtp.latent_bf16, without_mtp.index_keys) == (78 * 1152, 21 * 132)
    tiny = cache_bytes(ModelSpec.from_config(tiny_config()))
    assert tiny.latent_fp8 is None
    assert tiny.per_token("fp8") is None


@pytest.mark.full
def test_contexts(nvfp4: Footprint) -> None:
    eight = nvfp4.plans[-1]
    free = 127_500_000_000 - eight.total_weight_bytes
    assert eight.free_bytes == free
    assert eight.capacity_tokens["bf16"] == free // (64 * (79 * 1152 + 22 * 132)) * 64
    assert eight.longest_context["fp8"] == 1048576 < eight.capacity_tokens["fp8"]


@pytest.mark.full
def test_the_text_says_it_all(nvfp4: Footprint) -> None:
    page = text(nvfp4, width=120)
    for words in (
        "464.8 GB in safetensors files",
        "78 layers + MTP layer (21 with an indexer)",
        "57600 x nvfp4",
        "routed experts",
        "MTP layer",
        "93,912",
        "1,048,576 of",
        "Conditions: 150.0 GB per GPU",
        "1 GPU: cannot run",
    ):
        assert words in page
    assert max(len(line) for line in page.splitlines()) <= 120


def test_nothing_fits() -> None:
    entries = {name: entry for name, entry in release("fp8").items() if ".layers.7" not in name}
    config = CONFIG | {"num_hidden_layers": 7, "indexer_types": CONFIG["indexer_types"][:7], "mlp_layer_types": None}
    small = {name: entry for name, entry in entries.items() if ".layers." not in name or int(name.split(".")[2]) < 7}
    found = plan(Checkpoint.of(HeaderSource(small, config)), gpu_bytes=7_000_000_000)
    assert found.refusal is not None
    assert "no group of 1, 2, 4, 8 GPUs can run it" in found.refusal
    assert found.spec is not None
    assert not found.spec.has_mtp, "layer 7 is not in the file"
    assert "cannot run" in text(found)


def test_ranks_that_do_not_divide(tmp_path: Path) -> None:
    config = tiny_config()
    folder = save_checkpoint(tmp_path, config, quantized(config, tiny_tensors(config), "nvfp4"))
    found = plan(folder, ranks=(1, 2, 4, 8, 3))
    reasons = [entry.refusal or "" for entry in found.plans]
    assert reasons[0] == reasons[1] == ""
    assert "columns of model.layers." in reasons[2]
    assert "down_proj (nvfp4) do not divide by 4 into blocks of 16" in reasons[2]
    assert "4 attention heads do not divide by 8" in reasons[3]
    assert "do not divide by 3" in reasons[4]
    assert found.refusal is None


def test_faults_are_all_told(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = tiny_tensors(config)
    for layer in range(2, 7):
        del tensors[f"model.layers.{layer}.mlp.experts.3.up_proj.weight"]
    tensors["model.layers.1.odd.weight"] = torch.ones(2)
    tensors["model.norm.weight"] = torch.ones(65, dtype=torch.bfloat16)
    tensors["lm_head.weight"] = torch.ones(256, 64, dtype=torch.int64)
    found = plan(save_checkpoint(tmp_path, config, tensors))
    assert len(found.problems) == 8
    lines = faults(found.problems)
    assert len(lines) == 4
    assert any("(and 4 more like it)" in line for line in lines)
    page = text(found, width=400)
    for words in ("odd.weight", "shape [65]", "dtype I64", "experts.3.up_proj.weight"):
        assert words in page
    assert found.refusal is not None
    assert found.refusal.startswith("8 faults")


def test_refusals_are_values(tmp_path: Path) -> None:
    missing = plan(tmp_path / "absent")
    assert missing.refusal is not None
    assert "neither" in missing.refusal
    other = save_checkpoint(tmp_path / "other", tiny_config(model_type="deepseek_v32"), {"x": torch.ones(1)})
    refused = plan(other)
    assert refused.refusal is not None
    assert "DeepSeek-V3.2" in refused.refusal
    assert "cannot run: config.json: model_type" in text(refused, width=300)


def test_the_plan_is_close_to_what_loading_takes(tmp_path: Path) -> None:
    """Parts of one rank add up to the tensors of the checkpoint, give or take what is widened."""
    config = tiny_config()
    found = plan(save_checkpoint(tmp_path, config, tiny_tensors(config)))
    routers = 2 * 64 * 6 * 8
    assert found.plans[0].total_weight_bytes == found.stored_bytes + routers
