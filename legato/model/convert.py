"""Writing a BF16 checkpoint again in a quantised format, in the naming and with the configuration of the public
releases.

Owns which weights are quantised per target, sharding and the files written. Must not know how a format computes
(`legato.quant`). Called by `legato quantize`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from safetensors.torch import save_file

from legato.model.checkpoint import INDEX_FILE, ITEM_BYTES, SINGLE_FILE, Checkpoint, Progress, no_progress
from legato.model.faults import CheckpointError, Problem
from legato.model.inventory import Inventory, stored_spec, survey
from legato.model.names import Expected, Group, Kind, expected
from legato.model.quantization_config import quantization_blocks
from legato.model.spec import ModelSpec
from legato.quant import Format, Weight, quantize_fp8_block, quantize_int4, quantize_nvfp4
from legato.quant.formats import column_multiple, parts
from legato.quant.stored import spell

DEFAULT_SHARD_BYTES = 5_000_000_000

COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "LICENSE",
)
WRITTEN = ("config.json", "hf_quant_config.json", INDEX_FILE, *COPIED)


class Target(Enum):
    """What to write. FP8: every linear but the few that zai-org/GLM-5.2-FP8 keeps. NVFP4: routed experts of the decoder
    layers, the rest BF16, as nvidia/GLM-5.2-NVFP4. INT4: the same experts in groups of 128, the rest BF16
    (compressed-tensors layout). INT4_FP8: the same experts, the rest as FP8 (w4afp8 layout)."""

    FP8 = "fp8"
    NVFP4 = "nvfp4"
    INT4 = "int4"
    INT4_FP8 = "int4-fp8"


class Existing(Enum):
    """What to do with a destination that has files: refuse, or replace the files of a checkpoint and keep all
    others."""

    REFUSE = "refuse"
    REPLACE = "replace"


@dataclass(frozen=True)
class Written:
    """What `convert` did. `error` is the relative Frobenius error over all quantised weights."""

    folder: Path
    files: tuple[str, ...]
    total_bytes: int
    num_quantized: int
    num_kept: int
    error: float


QUANTIZERS: dict[Format, Callable[[torch.Tensor], Weight]] = {
    Format.FP8_BLOCK: quantize_fp8_block,
    Format.NVFP4: quantize_nvfp4,
    Format.INT4_PACKED: quantize_int4,
    Format.INT4_NIBBLES: quantize_int4,
}


def layout(target: Target, entry: Expected, spec: ModelSpec) -> Format:
    """The format in which a target stores one linear."""
    is_expert = entry.group is Group.EXPERTS and entry.layer != spec.num_layers
    if target is Target.NVFP4:
        return Format.NVFP4 if is_expert else Format.DENSE
    if target is Target.INT4:
        return Format.INT4_PACKED if is_expert else Format.DENSE
    if target is Target.INT4_FP8 and is_expert:
        return Format.INT4_NIBBLES
    kept = entry.group in (Group.HEAD, Group.ROUTER) or entry.name.endswith(("indexer.weights_proj", "eh_proj"))
    return Format.DENSE if kept else Format.FP8_BLOCK


def convert(
    source: Checkpoint,
    destination: Path,
    target: Target,
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    existing: Existing = Existing.REFUSE,
    progress: Progress = no_progress,
) -> Written:
    """Quantises `source` (BF16 or F32) into `destination`, which appears complete or not at all.

    No shard exceeds `shard_bytes` unless a single tensor does. Tensors that the model ignores are not copied. NVFP4 is
    written without `input_scale`: that needs calibration data, and Legato does not quantise activations.
    Raises `CheckpointError` for a faulty or already quantised source, for dimensions that the format cannot hold, and
    for a destination in use.
    """
    _refuse_used(destination, existing)
    spec = stored_spec(source)
    inventory = survey(source, spec)
    inventory.require()
    entries = expected(spec)
    formats = {entry.name: layout(target, entry, spec) for entry in entries if entry.kind is Kind.LINEAR}
    _refuse_unfit(entries, formats, inventory, source)
    shards = _shards(entries, formats, shard_bytes)
    destination.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{destination.name}-", dir=destination.parent))
    try:
        writer = _Writer(source, inventory, formats, staging, progress)
        for index, shard in enumerate(shards):
            writer.shard(_shard_name(index, len(shards)), shard)
        _write_texts(source, spec, target, formats, writer, staging)
        check = Checkpoint.open(staging)
        survey(check, spec).require()
        files = tuple(sorted(entry.name for entry in staging.iterdir()))
        _publish(staging, destination)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    quantized = sum(stored is not Format.DENSE for stored in formats.values())
    total = sum((destination / name).stat().st_size for name in files)
    return Written(destination, files, total, quantized, len(entries) - quantized, writer.error)


def _refuse_used(destination: Path, existing: Existing) -> None:
    if existing is Existing.REFUSE and destination.exists() and any(destination.iterdir()):
        remedy = "Choose another folder, or replace the checkpoint in it explicitly."
        raise CheckpointError(Problem(str(destination), "", "an empty or absent folder", "files", remedy))


def _refuse_unfit(
    entries: Sequence[Expected], formats: dict[str, Format], inventory: Inventory, source: Checkpoint
) -> None:
    problems: list[Problem] = []
    for entry in entries:
        if entry.kind is not Kind.LINEAR:
            continue
        stored = inventory.linears[entry.name].format
        if stored is not Format.DENSE:
            remedy = "Quantise from the BF16 release: quantising twice loses more than either format."
            problems.append(Problem(source.label, entry.name, "a BF16 or F32 weight", stored.value, remedy))
        multiple = column_multiple(formats[entry.name])
        if entry.shape[1] % multiple:
            needs = f"a multiple of {multiple} columns for {formats[entry.name].value}"
            problems.append(Problem(source.label, entry.name, needs, str(entry.shape[1]), "Choose another format."))
    if problems:
        raise CheckpointError(*problems)


def _is_bias(entry: Expected) -> bool:
    return entry.name.endswith("e_score_correction_bias")


def _entry_bytes(entry: Expected, formats: dict[str, Format]) -> int:
    """Bytes of one entry in the output."""
    if entry.kind is Kind.FLOAT:
        return (4 if _is_bias(entry) else 2) * torch.Size(entry.shape).numel()
    rows, columns = entry.shape
    needed = [part for part in parts(formats[entry.name], rows, columns, {}) if not part.optional]
    return sum(ITEM_BYTES[part.dtypes[0]] * torch.Size(part.shape).numel() for part in needed)


def _shards(entries: Sequence[Expected], formats: dict[str, Format], shard_bytes: int) -> list[list[Expected]]:
    """Consecutive entries up to `shard_bytes` each, headers included (about 150 bytes per tensor)."""
    shards: list[list[Expected]] = []
    filled = shard_bytes
    for entry in entries:
        size = _entry_bytes(entry, formats) + 4 * 150
        if not shards or filled + size > shard_bytes:
            shards.append([])
            filled = 1024
        shards[-1].append(entry)
        filled += size
    return shards


def _shard_name(index: int, count: int) -> str:
    return SINGLE_FILE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


class _Writer:
    """Quantises and writes shard after shard, one shard in memory at a time."""

    def __init__(
        self,
        source: Checkpoint,
        inventory: Inventory,
        formats: dict[str, Format],
        folder: Path,
        progress: Progress,
    ) -> None:
        self.source, self.inventory, self.formats, self.folder, self.progress = (
            source,
            inventory,
            formats,
            folder,
            progress,
        )
        self.weight_map: dict[str, str] = {}
        self.total_size = 0
        self._done_bytes = 0
        self._squares = [0.0, 0.0]

    @property
    def error(self) -> float:
        difference, norm = self._squares
        return (difference / norm) ** 0.5 if norm else 0.0

    def shard(self, file: str, entries: list[Expected]) -> None:
        tensors = {name: tensor.contiguous() for entry in entries for name, tensor in self._tensors(entry)}
        save_file(tensors, str(self.folder / file), metadata={"format": "pt"})
        (self.folder / file).chmod(0o644)  # safetensors creates its files readable by their owner only
        self.weight_map |= dict.fromkeys(tensors, file)
        self.total_size += sum(tensor.nbytes for tensor in tensors.values())

    def _tensors(self, entry: Expected) -> Iterator[tuple[str, torch.Tensor]]:
        if entry.kind is Kind.FLOAT:
            yield entry.name, self._read(entry.name).to(torch.float32 if _is_bias(entry) else torch.bfloat16)
            return
        tensor = self._read(f"{entry.name}.weight")
        stored = self.formats[entry.name]
        if stored is Format.DENSE:
            yield f"{entry.name}.weight", tensor.to(torch.bfloat16)
            return
        weight = QUANTIZERS[stored](tensor)
        self._measure(entry, tensor.float(), weight)
        for suffix, part in spell(weight, stored).items():
            yield f"{entry.name}.{suffix}", part

    def _measure(self, entry: Expected, tensor: torch.Tensor, weight: Weight) -> None:
        difference = float((weight.dequantize(torch.float32) - tensor).double().square().sum())
        norm = float(tensor.double().square().sum())
        if not difference <= norm * 4:
            raise CheckpointError(
                Problem(self.source.label, entry.name, "finite weights", "NaN or infinity", "The source is damaged.")
            )
        self._squares[0] += difference
        self._squares[1] += norm

    def _read(self, name: str) -> torch.Tensor:
        tensor = self.source.read(name)
        self._done_bytes += self.source.tensors[name].nbytes
        self.progress(self._done_bytes, self.inventory.nbytes, name)
        return tensor


def _write_texts(
    source: Checkpoint, spec: ModelSpec, target: Target, formats: dict[str, Format], writer: _Writer, folder: Path
) -> None:
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    config["num_nextn_predict_layers"] = int(spec.has_mtp)
    block, hf_quant = quantization_blocks(target.value, formats, spec)
    config["quantization_config"] = block
    _write_json(folder / "config.json", config)
    if hf_quant is not None:
        _write_json(folder / "hf_quant_config.json", hf_quant)
    index = {"metadata": {"total_size": writer.total_size}, "weight_map": dict(sorted(writer.weight_map.items()))}
    _write_json(folder / INDEX_FILE, index)
    available = set(source.source.names())
    for name in COPIED:
        if name in available:
            shutil.copyfile(source.file(name), folder / name)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _publish(staging: Path, destination: Path) -> None:
    """Moves the finished files in; files of an older checkpoint that are not overwritten disappear, others stay."""
    destination.mkdir(parents=True, exist_ok=True)
    new = {entry.name for entry in staging.iterdir()}
    for entry in staging.iterdir():
        os.replace(entry, destination / entry.name)
    for old in destination.iterdir():
        if old.name not in new and (old.name in WRITTEN or old.suffix == ".safetensors"):
            old.unlink()
