"""Each damaged checkpoint is refused with an error of its own: file, tensor, expected, found, remedy, and nothing loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from legato.model.checkpoint import INDEX_FILE, Checkpoint
from legato.model.faults import CheckpointError, Problem
from legato.model.inventory import stored_spec
from legato.model.spec import SpecError
from legato.model.weights import Residency, load_weights
from tests.tiny import Tensors, quantized, save_checkpoint, tiny_config, tiny_tensors, wide_config

SIZES = {"num_hidden_layers": 3, "indexer_types": ["full", "shared", "full"], "n_routed_experts": 4}
EXPERT = "model.layers.2.mlp.experts.1.up_proj"
WK = "model.layers.2.self_attn.indexer.wk.weight"


def saved(folder: Path, kind: str, change: Callable[[Tensors], object] = lambda tensors: None, **overrides) -> Path:
    """A checkpoint whose tensors were changed before saving."""
    config = wide_config(**SIZES, **overrides) if kind.startswith("int4") else tiny_config(**SIZES, **overrides)
    tensors = quantized(config, tiny_tensors(config), kind)
    change(tensors)
    return save_checkpoint(folder, config, tensors)


def load(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    resident = Residency.DENSE
    load_weights(checkpoint, stored_spec(checkpoint), device="cpu", dtype=torch.float32, resident=resident)


def faults(folder: Path) -> tuple[Problem, ...]:
    """The problems of a folder that must not load; each one complete."""
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    for problem in caught.value.problems:
        assert problem.file
        assert problem.expected
        assert problem.found
        assert problem.remedy.endswith(".")
    assert str(caught.value.problems[0]) in str(caught.value)
    return caught.value.problems


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX_FILE).read_text())["weight_map"][name]


def set_tensor(name: str, value: torch.Tensor) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.__setitem__(name, value)


def drop(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.pop(name)


CASES: dict[str, tuple[str, Callable[[Tensors], object], str, str, str]] = {
    # name: (format, damage, tensor, expected contains, found contains)
    "missing norm": ("bf16", drop("model.norm.weight"), "model.norm.weight", "[64]", "no such tensor"),
    "missing indexer of a full layer": ("bf16", drop(WK), WK, "[32, 64]", "no such tensor"),
    "one expert's tensor": ("bf16", drop(f"{EXPERT}.weight"), f"{EXPERT}.weight", "[32, 64]", "no such tensor"),
    "one expert's packed tensor": ("nvfp4", drop(f"{EXPERT}.weight"), f"{EXPERT}.weight", "[32, 64]", "no such tensor"),
    "MTP norm": (
        "bf16",
        drop("model.layers.3.shared_head.norm.weight"),
        "model.layers.3.shared_head.norm.weight",
        "[64]",
        "no such tensor",
    ),
    "missing FP8 scale": (
        "fp8",
        drop(f"{EXPERT}.weight_scale_inv"),
        f"{EXPERT}.weight_scale_inv",
        "F32 or BF16 [1, 1] beside weight F8_E4M3 (fp8)",
        "no such tensor",
    ),
    "missing NVFP4 block scale": (
        "nvfp4",
        drop(f"{EXPERT}.weight_scale"),
        f"{EXPERT}.weight_scale",
        "F8_E4M3 [32, 4] beside weight U8 (nvfp4)",
        "no such tensor",
    ),
    "missing NVFP4 global scale": (
        "nvfp4",
        drop(f"{EXPERT}.weight_scale_2"),
        f"{EXPERT}.weight_scale_2",
        "F32 []",
        "no such tensor",
    ),
    "missing INT4 scale": (
        "int4-packed",
        drop(f"{EXPERT}.weight_scale"),
        f"{EXPERT}.weight_scale",
        "beside weight_packed I32",
        "no such tensor",
    ),
    "misshapen": ("bf16", set_tensor(WK, torch.zeros(64, 32)), WK, "shape [32, 64]", "shape [64, 32]"),
    "misshapen scale": (
        "fp8",
        set_tensor(f"{EXPERT}.weight_scale_inv", torch.ones(2, 1)),
        f"{EXPERT}.weight_scale_inv",
        "shape [1, 1]",
        "shape [2, 1]",
    ),
    "NVFP4 with half the groups": (
        "nvfp4",
        set_tensor(f"{EXPERT}.weight_scale", torch.ones(32, 2).to(torch.float8_e4m3fn)),
        f"{EXPERT}.weight_scale",
        "shape [32, 4]",
        "shape [32, 2]",
    ),
    "INT4 with groups of 64": (
        "int4-nibbles",
        set_tensor(f"{EXPERT}.weight_scale_inv", torch.ones(128, 2)),
        f"{EXPERT}.weight_scale_inv",
        "shape [128, 1]",
        "shape [128, 2]",
    ),
    "wrong dtype of a norm": (
        "bf16",
        set_tensor("model.norm.weight", torch.ones(64, dtype=torch.int32)),
        "model.norm.weight",
        "dtype BF16 or F32 or F16",
        "dtype I32",
    ),
    "wrong dtype of a weight": (
        "bf16",
        set_tensor(f"{EXPERT}.weight", torch.ones(32, 64, dtype=torch.int32)),
        f"{EXPERT}.weight",
        "dtype BF16",
        "dtype I32",
    ),
    "wrong dtype of a scale": (
        "nvfp4",
        set_tensor(f"{EXPERT}.weight_scale", torch.ones(32, 4)),
        f"{EXPERT}.weight_scale",
        "dtype F8_E4M3",
        "dtype F32",
    ),
    "unexpected": (
        "bf16",
        set_tensor("model.layers.9.x.weight", torch.ones(2)),
        "model.layers.9.x.weight",
        "only",
        "F32 [2]",
    ),
    "unexpected indexer bias": (
        "bf16",
        set_tensor("model.layers.0.self_attn.q_a_proj.bias", torch.ones(48)),
        "model.layers.0.self_attn.q_a_proj.bias",
        "only tensors of the model",
        "F32 [48]",
    ),
    "stray scale beside BF16": (
        "bf16",
        set_tensor(f"{EXPERT}.weight_scale_inv", torch.ones(1, 1)),
        f"{EXPERT}.weight_scale_inv",
        "no weight_scale_inv beside a weight stored as bf16",
        "F32 [1, 1]",
    ),
    "asymmetric INT4": (
        "int4-packed",
        set_tensor(f"{EXPERT}.weight_zero_point", torch.ones(128, 1)),
        f"{EXPERT}.weight_zero_point",
        "symmetric INT4",
        "F32 [128, 1]",
    ),
    "NaN scale": (
        "fp8",
        set_tensor(f"{EXPERT}.weight_scale_inv", torch.full((1, 1), float("nan"))),
        f"{EXPERT}.weight_scale_inv",
        "finite scales above zero",
        "NaN at [0, 0]",
    ),
    "zero scale": (
        "fp8",
        set_tensor(f"{EXPERT}.weight_scale_inv", torch.zeros(1, 1)),
        f"{EXPERT}.weight_scale_inv",
        "finite scales above zero",
        "0 at [0, 0] over non-zero weights",
    ),
    "NaN block scale": (
        "nvfp4",
        set_tensor(f"{EXPERT}.weight_scale", torch.full((32, 4), float("nan")).to(torch.float8_e4m3fn)),
        f"{EXPERT}.weight_scale",
        "finite scales above zero",
        "NaN at [0, 0]",
    ),
    "zero global scale": (
        "nvfp4",
        set_tensor(f"{EXPERT}.weight_scale_2", torch.tensor(0.0)),
        f"{EXPERT}.weight_scale_2",
        "finite scales above zero",
        "0.0",
    ),
    "infinite INT4 scale": (
        "int4-nibbles",
        set_tensor(f"{EXPERT}.weight_scale_inv", torch.full((128, 1), float("inf"))),
        f"{EXPERT}.weight_scale_inv",
        "finite scales above zero",
        "infinity at [0, 0]",
    ),
    "INT4 shape that contradicts": (
        "int4-packed",
        set_tensor(f"{EXPERT}.weight_shape", torch.tensor([128, 64])),
        f"{EXPERT}.weight_shape",
        "[128, 128]",
        "[128, 64]",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_damaged_tensors(case: str, tmp_path: Path) -> None:
    kind, damage, tensor, expected, found = CASES[case]
    problems = faults(saved(tmp_path, kind, damage))
    assert [problem.tensor for problem in problems] == [tensor]
    assert expected in problems[0].expected
    assert found in problems[0].found
    if "no such tensor" not in found:
        assert problems[0].file.startswith("model-0000")


def test_all_faults_are_listed_at_once(tmp_path: Path) -> None:
    def damage(tensors: Tensors) -> None:
        for expert in range(4):
            del tensors[f"model.layers.2.mlp.experts.{expert}.up_proj.weight"]
            del tensors[f"model.layers.2.mlp.experts.{expert}.gate_proj.weight"]
        del tensors["model.norm.weight"]

    assert len(faults(saved(tmp_path, "bf16", damage))) == 9


def test_the_message_names_everything(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bf16", set_tensor(WK, torch.zeros(3, 3)))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    for word in (shard_of(folder, WK).name, WK, "expected shape [32, 64]", "found shape [3, 3]"):
        assert word in message


def test_more_faults_than_fit_are_counted(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bf16", lambda tensors: [tensors.pop(name) for name in list(tensors)[:20]])
    with pytest.raises(CheckpointError, match="and 12 more faults"):
        load(folder)


@pytest.mark.parametrize("cut", [0, 5, 100, -1])
def test_truncated_file(cut: int, tmp_path: Path) -> None:
    folder = saved(tmp_path, "bf16")
    shard = shard_of(folder, WK)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:cut])
    (problem,) = faults(folder)
    assert problem.file == shard.name
    assert f"{len(whole[:cut])} bytes" in problem.found
    assert "truncated" in problem.remedy


def test_foreign_content(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bf16")
    shard = shard_of(folder, WK)
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n" * 3)
    (problem,) = faults(folder)
    assert problem.file == shard.name
    assert (problem.found, problem.remedy.count("git lfs pull")) == ("a pointer of Git LFS", 1)
    shard.write_bytes(b"PK\x03\x04 an archive, by its name a shard")
    assert "not a safetensors file" in faults(folder)[0].remedy
    shard.write_bytes((20).to_bytes(8, "little") + b"{ this is no JSON   ")
    assert "JSON" in faults(folder)[0].expected
    shard.write_bytes((len(b'{"x": {"dtype": "F32"}}')).to_bytes(8, "little") + b'{"x": {"dtype": "F32"}}')
    assert "data_offsets" in faults(folder)[0].expected


def test_header_that_contradicts_itself(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bf16")
    shard = shard_of(folder, "model.norm.weight")
    raw = shard.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header["model.norm.weight"]["shape"] = [32]
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    (problem,) = faults(folder)
    assert (problem.tensor, problem.found) == ("model.norm.weight", "128 bytes")


def test_missing_shard(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bf16")
    shard = shard_of(folder, WK)
    shard.unlink()
    (problem,) = faults(folder)
    assert problem.file == shard.name
    assert "no such file" in problem.found
    assert "fetch the missing shard" in problem.remedy


def test_duplicate_across_shards(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bf16")
    here, there = shard_of(folder, WK), folder / "model-00003-of-00003.safetensors"
    assert here != there
    save_file(load_file(there) | {WK: torch.zeros(32, 64)}, there)
    (problem,) = faults(folder)
    assert problem.tensor == WK
    assert {problem.file, problem.found} == {there.name, f"it in {here.name} too"}


def test_duplicate_by_prefix(tmp_path: Path) -> None:
    wrapped = WK.replace("model.", "model.language_model.", 1)
    (problem,) = faults(saved(tmp_path, "bf16", set_tensor(wrapped, torch.zeros(32, 64))))
    assert problem.tensor == wrapped
    assert "too" in problem.found


def test_index_that_promises_too_much(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bf16")
    index = json.loads((folder / INDEX_FILE).read_text())
    index["weight_map"]["model.layers.0.extra.weight"] = "model-00001-of-00003.safetensors"
    (folder / INDEX_FILE).write_text(json.dumps(index))
    (problem,) = faults(folder)
    assert (problem.file, problem.tensor) == ("model-00001-of-00003.safetensors", "model.layers.0.extra.weight")


def test_configuration(tmp_path: Path) -> None:
    folder = saved(tmp_path, "bf16")
    text = (folder / "config.json").read_text()
    for damaged, words in (("{", "JSON"), ("[]", "JSON object")):
        (folder / "config.json").write_text(damaged)
        (problem,) = faults(folder)
        assert problem.file == "config.json"
        assert words in problem.expected
    (folder / "config.json").unlink()
    (problem,) = faults(folder)
    assert problem.file.endswith("config.json")
    assert "no such file" in problem.found
    for field, value in (("model_type", "llama"), ("indexer_types", ["shared", "full", "full"])):
        (folder / "config.json").write_text(json.dumps(json.loads(text) | {field: value}))
        with pytest.raises(SpecError, match=field):
            load(folder)


def test_places_without_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text(json.dumps(tiny_config()))
    for where, expected in (("absent", "a folder or a hub id"), ("file", "a folder"), ("empty", ".safetensors")):
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(tmp_path / where)
        assert expected in caught.value.problems[0].expected
        assert where in caught.value.problems[0].file


def test_config_of_another_size(tmp_path: Path) -> None:
    """Every misshapen tensor is told, not only the first."""
    folder = saved(tmp_path, "bf16")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"kv_lora_rank": 64}))
    tensors = {problem.tensor.rpartition("self_attn.")[2] for problem in faults(folder)}
    assert tensors == {"kv_a_proj_with_mqa.weight", "kv_a_layernorm.weight", "kv_b_proj.weight"}


def test_a_missing_or_damaged_input_scale_is_not_used(tmp_path: Path) -> None:
    """Activations are not quantised, so what would scale them cannot matter."""

    def damage(tensors: Tensors) -> None:
        del tensors[f"{EXPERT}.input_scale"]
        tensors["model.layers.2.mlp.experts.0.down_proj.input_scale"] = torch.tensor(float("nan"))

    load(saved(tmp_path, "nvfp4", damage))


def test_scalars_may_be_stored_as_vectors_of_one(tmp_path: Path) -> None:
    load(saved(tmp_path, "nvfp4", set_tensor(f"{EXPERT}.weight_scale_2", torch.ones(1))))
