"""Writing quantised checkpoints: naming, configuration, shards, and that nothing half-written is left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from legato.model import convert as convert_module
from legato.model.checkpoint import INDEX_FILE, Checkpoint
from legato.model.convert import Existing, Target, Written, convert
from legato.model.declared import Exclusions
from legato.model.faults import CheckpointError
from legato.model.inventory import stored_spec, survey
from legato.quant import Format, quantize_fp8_block, quantize_nvfp4
from tests.tiny import FP8_MODULES, quantized, save_checkpoint, tiny_config, tiny_tensors, wide_config

CONFIG = wide_config(num_hidden_layers=3, indexer_types=["full", "shared", "full"])
MTP = "model.layers.3."


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("source") / "bf16", CONFIG, tiny_tensors(CONFIG))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text('{"temperature": 1.0}')
    (folder / "notes.txt").write_text("not part of a checkpoint")
    return folder


@pytest.fixture(scope="module")
def written(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Target, Written]:
    root = tmp_path_factory.mktemp("written")
    return {
        target: convert(Checkpoint.open(source), root / target.value, target, shard_bytes=300_000) for target in Target
    }


def formats(folder: Path) -> dict[str, Format]:
    checkpoint = Checkpoint.open(folder)
    inventory = survey(checkpoint, stored_spec(checkpoint))
    inventory.require()
    assert inventory.warnings == [], "quantization_config and files must agree"
    return {name: entry.format for name, entry in inventory.linears.items()}


def is_expert(module: str) -> bool:
    return ".experts." in module and not module.startswith(MTP)


def test_fp8_quantises_what_the_release_does(written: dict[Target, Written]) -> None:
    for module, stored in formats(written[Target.FP8].folder).items():
        assert (stored is Format.FP8_BLOCK) == module.endswith(FP8_MODULES), module
    config = json.loads((written[Target.FP8].folder / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["fmt"], config["weight_block_size"]) == ("fp8", "e4m3", [128, 128])
    kept = Exclusions.of(config["modules_to_not_convert"])
    for module in (
        "lm_head",
        "model.embed_tokens",
        "model.layers.2.mlp.gate",
        MTP + "eh_proj",
        "model.layers.0.input_layernorm",
    ):
        assert module in kept
    assert "model.layers.0.self_attn.indexer.weights_proj" in kept
    assert "model.layers.0.self_attn.indexer.wk" not in kept


def test_nvfp4_quantises_the_routed_experts_of_the_decoder_only(written: dict[Target, Written]) -> None:
    folder = written[Target.NVFP4].folder
    for module, stored in formats(folder).items():
        assert stored is (Format.NVFP4 if is_expert(module) else Format.DENSE), module
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    hf_quant = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert (config["quant_method"], config["quant_algo"]) == ("modelopt", "NVFP4")
    assert config["ignore"] == hf_quant["exclude_modules"]
    assert {"model.layers.0.*", "model.layers.2.self_attn*", MTP + "*", "lm_head"} <= set(config["ignore"])
    names = {name for name in Checkpoint.open(folder).tensors if ".experts.0.up_proj" in name and ".2." in name}
    prefix = "model.layers.2.mlp.experts.0.up_proj."
    assert names == {prefix + suffix for suffix in ("weight", "weight_scale", "weight_scale_2")}


@pytest.mark.parametrize(
    ("target", "expert", "rest"),
    [(Target.INT4, Format.INT4_PACKED, Format.DENSE), (Target.INT4_FP8, Format.INT4_NIBBLES, Format.FP8_BLOCK)],
)
def test_int4_layouts(target: Target, expert: Format, rest: Format, written: dict[Target, Written]) -> None:
    stored = formats(written[target].folder)
    assert {entry for module, entry in stored.items() if is_expert(module)} == {expert}
    assert stored["model.layers.0.self_attn.o_proj"] is rest
    assert stored[MTP + "mlp.experts.0.up_proj"] is rest
    assert stored["lm_head"] is Format.DENSE
    config = json.loads((written[target].folder / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == ("compressed-tensors" if target is Target.INT4 else "w4afp8")


def test_values_are_the_quantisers(source: Path, written: dict[Target, Written]) -> None:
    name = "model.layers.2.mlp.experts.1.down_proj"
    tensor = Checkpoint.open(source).read(f"{name}.weight")
    fp8, nvfp4 = (Checkpoint.open(written[target].folder) for target in (Target.FP8, Target.NVFP4))
    expected = quantize_fp8_block(tensor)
    assert torch.equal(fp8.read(f"{name}.weight").view(torch.uint8), expected.weight.view(torch.uint8))
    assert torch.equal(fp8.read(f"{name}.weight_scale_inv"), expected.scale_inv)
    packed = quantize_nvfp4(tensor)
    assert torch.equal(nvfp4.read(f"{name}.weight"), packed.packed)
    assert float(nvfp4.read(f"{name}.weight_scale_2")) == float(packed.scale_2[0])
    assert torch.equal(nvfp4.read("model.norm.weight"), Checkpoint.open(source).read("model.norm.weight"))
    bias = nvfp4.tensors["model.layers.2.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == "F32"
    assert 0.02 < written[Target.FP8].error < 0.04 < written[Target.NVFP4].error < written[Target.INT4].error < 0.15


def test_shards_index_and_files(source: Path, written: dict[Target, Written]) -> None:
    for target, result in written.items():
        shards = sorted(result.folder.glob("*.safetensors"))
        assert len(shards) > 2
        assert all(shard.stat().st_mode & 0o777 == 0o644 for shard in shards)
        assert all(shard.stat().st_size <= 300_000 for shard in shards), target
        assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
        index = json.loads((result.folder / INDEX_FILE).read_text())
        checkpoint = Checkpoint.open(result.folder)
        assert index["metadata"]["total_size"] == checkpoint.nbytes
        assert set(index["weight_map"]) == set(checkpoint.tensors)
        assert result.total_bytes == sum((result.folder / name).stat().st_size for name in result.files)
        assert set(result.files) == {path.name for path in result.folder.iterdir()}
        for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
            assert (result.folder / name).read_bytes() == (source / name).read_bytes()
        assert not (result.folder / "notes.txt").exists()


def test_one_shard_has_the_plain_name(source: Path, tmp_path: Path) -> None:
    result = convert(Checkpoint.open(source), tmp_path / "one", Target.FP8)
    assert [name for name in result.files if name.endswith(".safetensors")] == ["model.safetensors"]
    assert formats(result.folder)


def test_refusals_leave_nothing_behind(source: Path, written: dict[Target, Written], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a BF16 or F32 weight, found fp8"):
        convert(Checkpoint.open(written[Target.FP8].folder), tmp_path / "twice", Target.NVFP4)
    narrow = tiny_config(num_hidden_layers=3, indexer_types=["full", "shared", "full"])
    small = save_checkpoint(tmp_path / "narrow", narrow, tiny_tensors(narrow))
    with pytest.raises(CheckpointError, match="a multiple of 128 columns for int4"):
        convert(Checkpoint.open(small), tmp_path / "unfit", Target.INT4)
    broken = tiny_tensors(CONFIG)
    broken["model.layers.2.mlp.experts.0.up_proj.weight"][0, 0] = float("nan")
    damaged = save_checkpoint(tmp_path / "nan", CONFIG, broken)
    with pytest.raises(CheckpointError, match=r"experts\.0\.up_proj: expected finite weights"):
        convert(Checkpoint.open(damaged), tmp_path / "half", Target.NVFP4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nan", "narrow"]


def test_a_destination_in_use_is_kept_or_replaced(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place"
    first = convert(Checkpoint.open(source), place, Target.NVFP4, shard_bytes=300_000)
    (place / "README.md").write_text("the model card")
    with pytest.raises(CheckpointError, match="replace the checkpoint in it explicitly"):
        convert(Checkpoint.open(source), place, Target.FP8)

    def fail(*_: object, **__: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(convert_module, "save_file", fail)
        with pytest.raises(OSError, match="disk full"):
            convert(Checkpoint.open(source), place, Target.FP8, existing=Existing.REPLACE)
    assert set(first.files) | {"README.md"} == {path.name for path in place.iterdir()}
    assert formats(place)
    second = convert(Checkpoint.open(source), place, Target.FP8, existing=Existing.REPLACE)
    assert set(second.files) | {"README.md"} == {path.name for path in place.iterdir()}
    assert formats(place)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["place"]


def test_float32_sources_and_absent_mtp(tmp_path: Path) -> None:
    tensors = tiny_tensors(CONFIG, dtype=torch.float32)
    trunk = {name: tensor for name, tensor in tensors.items() if not name.startswith(MTP)}
    source = save_checkpoint(tmp_path / "source", CONFIG, trunk)
    result = convert(Checkpoint.open(source), tmp_path / "out", Target.NVFP4)
    checkpoint = Checkpoint.open(result.folder)
    assert checkpoint.tensors["model.norm.weight"].dtype == "BF16"
    assert checkpoint.config["num_nextn_predict_layers"] == 0
    assert not stored_spec(checkpoint).has_mtp


def test_the_layout_is_that_of_the_test_factory(written: dict[Target, Written]) -> None:
    """Two independent spellings of the releases: this converter's and the factory's of tests/tiny.py."""
    for target, kind in ((Target.FP8, "fp8"), (Target.NVFP4, "nvfp4")):
        stored = quantized(CONFIG, tiny_tensors(CONFIG), kind)
        names = {name for name in stored if not name.endswith("input_scale")}
        checkpoint = Checkpoint.open(written[target].folder)
        assert set(checkpoint.tensors) == names
        assert all(checkpoint.tensors[name].shape == tuple(stored[name].shape) for name in names)
