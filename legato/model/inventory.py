"""What a checkpoint holds, compared with what the model needs: formats, faults, names ignored by rule, disagreements.

Owns validation of names, shapes and dtypes from headers alone. Must not read data. Called by the loader (which refuses
on any problem) and by the memory plan (which lists them).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from legato.model.checkpoint import Checkpoint, TensorInfo
from legato.model.declared import disagreements
from legato.model.faults import CheckpointError, Problem
from legato.model.names import Expected, Kind, expected, layer_prefix
from legato.model.spec import ModelSpec
from legato.quant.formats import FLOATS, SUFFIXES, UNSUPPORTED, Format, Found, Part, column_multiple, parts, recognise


@dataclass(frozen=True)
class Stored:
    """One linear weight as it lies in the checkpoint: its format and the names of the parts to read."""

    expected: Expected
    format: Format
    names: Mapping[str, str]
    nbytes: int


@dataclass
class Inventory:
    """The result of `survey`. `linears` and `floats` are keyed by the names of `legato.model.names`; `ignored` maps
    names to reasons; `has_mtp` says whether the MTP layer is wanted and there."""

    linears: dict[str, Stored] = field(default_factory=dict[str, Stored])
    floats: dict[str, TensorInfo] = field(default_factory=dict[str, TensorInfo])
    ignored: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[Problem] = field(default_factory=list[Problem])
    warnings: list[str] = field(default_factory=list[str])
    has_mtp: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that loading reads."""
        return sum(entry.nbytes for entry in self.linears.values()) + sum(info.nbytes for info in self.floats.values())

    def require(self) -> None:
        """Raises `CheckpointError` with every problem, if there is one."""
        if self.problems:
            raise CheckpointError(*self.problems)


def survey(checkpoint: Checkpoint, spec: ModelSpec) -> Inventory:
    """Matches every tensor of the headers with the table. Never raises for the content: read `problems`, or call
    `require`."""
    inventory = Inventory()
    by_module = _by_module(checkpoint.tensors)
    ignore = _ignore_rules(spec)
    mtp = layer_prefix(spec.num_layers)
    inventory.has_mtp = spec.has_mtp and _has_layer(checkpoint, mtp, ignore)
    if spec.has_mtp and not inventory.has_mtp:
        inventory.warnings.append(
            f"{checkpoint.label}: the configuration declares an MTP layer, but there is no {mtp}*: no drafting"
        )
    used: set[str] = set()
    for entry in expected(spec):
        if entry.layer == spec.num_layers and not inventory.has_mtp:
            continue
        if entry.kind is Kind.FLOAT:
            _take_float(checkpoint, entry, inventory, used)
        else:
            _take_linear(checkpoint, entry, by_module.get(entry.name, {}), inventory, used)
    _settle_rest(checkpoint, used, ignore, inventory)
    inventory.warnings.extend(
        disagreements(checkpoint.config, {name: entry.format for name, entry in inventory.linears.items()})
    )
    return inventory


def _by_module(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    """`{module: {suffix: info}}` for names that end in the suffix of a linear's part."""
    known = frozenset(SUFFIXES)
    modules: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        module, _, suffix = name.rpartition(".")
        if suffix in known:
            modules.setdefault(module, {})[suffix] = info
    return modules


def _ignore_rules(spec: ModelSpec) -> list[tuple[re.Pattern[str], str]]:
    """The explicit allow-list of names that may be present and are not used. Everything else unknown is a fault."""
    mtp = re.escape(layer_prefix(spec.num_layers))
    shared = "|".join(str(layer) for layer in range(spec.num_layers) if not spec.is_full(layer))
    rules = [
        (rf"{mtp}shared_head\.head\..*", "copy of lm_head, which the MTP layer shares"),
        (rf"{mtp}embed_tokens\..*", "copy of the embedding, which the MTP layer shares"),
        (r".*\.rotary_emb\.inv_freq", "recomputed from rope_theta"),
        (r".*\.(k_scale|v_scale|q_scale|kv_scale)", "cache scale; the caches have their own"),
    ]
    if shared:
        rules.append(
            (
                rf"model\.layers\.({shared})\.self_attn\.indexer\..*",
                "indexer of a layer that reuses an earlier selection",
            )
        )
    if not spec.has_mtp:
        rules.append((rf"{mtp}.*", "the MTP layer is not used"))
    return [(re.compile(pattern), reason) for pattern, reason in rules]


def _ignored(name: str, rules: Iterable[tuple[re.Pattern[str], str]]) -> str | None:
    return next((reason for pattern, reason in rules if pattern.fullmatch(name)), None)


def _take_float(checkpoint: Checkpoint, entry: Expected, inventory: Inventory, used: set[str]) -> None:
    info = checkpoint.tensors.get(entry.name)
    if info is None:
        inventory.problems.append(_missing(checkpoint, entry.name, Part("", FLOATS, entry.shape)))
        return
    used.add(entry.name)
    _check_part(info, Part("", FLOATS, entry.shape), inventory.problems)
    inventory.floats[entry.name] = info


def _take_linear(
    checkpoint: Checkpoint, entry: Expected, infos: Mapping[str, TensorInfo], inventory: Inventory, used: set[str]
) -> None:
    """Recognises the format of one linear from its parts and checks each part."""
    used.update(f"{entry.name}.{suffix}" for suffix in infos)
    found: Found = {suffix: (info.dtype, info.shape) for suffix, info in infos.items()}
    stored = recognise(found)
    rows, columns = entry.shape
    if stored is None:
        inventory.problems.append(_missing(checkpoint, f"{entry.name}.weight", Part("weight", FLOATS, entry.shape)))
        return
    before = len(inventory.problems)
    if columns % column_multiple(stored):
        needs = f"a multiple of {column_multiple(stored)} columns for {stored.value}"
        weight = next(iter(infos.values()))
        remedy = "This model cannot be stored in that format."
        inventory.problems.append(Problem(weight.file, entry.name, needs, f"{columns}", remedy))
        return
    names: dict[str, str] = {}
    wanted = parts(stored, rows, columns, found)
    for part in wanted:
        name = f"{entry.name}.{part.suffix}"
        info = infos.get(part.suffix)
        if info is None:
            if not part.optional:
                inventory.problems.append(_missing(checkpoint, name, part, beside=_weight_of(infos), stored=stored))
            continue
        if part.needed:
            _check_part(info, part, inventory.problems)
            names[part.suffix] = name
        else:
            inventory.ignored[name] = "activations are not quantised"
    known = {part.suffix for part in wanted}
    for suffix, info in infos.items():
        if suffix not in known:
            inventory.problems.append(_stray(info, suffix, stored))
    if len(inventory.problems) == before:
        nbytes = sum(infos[suffix].nbytes for suffix in names)
        inventory.linears[entry.name] = Stored(entry, stored, names, nbytes)


def _weight_of(infos: Mapping[str, TensorInfo]) -> TensorInfo:
    return infos.get("weight") or infos["weight_packed"]


def _check_part(info: TensorInfo, part: Part, problems: list[Problem]) -> None:
    """Shape and dtype of one tensor. A scalar may be stored as [1]."""
    if info.shape == part.shape and info.dtype in part.dtypes:
        return
    shapes = {part.shape, (1,)} if part.shape == () else {part.shape}
    if info.shape not in shapes:
        expected_shape = f"shape {list(part.shape)}"
        remedy = "The checkpoint does not belong to this config.json, or is damaged."
        problems.append(Problem(info.file, info.stored_name, expected_shape, f"shape {list(info.shape)}", remedy))
    elif info.dtype not in part.dtypes:
        wanted = " or ".join(part.dtypes)
        remedy = "Convert the checkpoint again; this dtype is not one the format uses."
        problems.append(Problem(info.file, info.stored_name, f"dtype {wanted}", f"dtype {info.dtype}", remedy))


def _missing(
    checkpoint: Checkpoint, name: str, part: Part, beside: TensorInfo | None = None, stored: Format | None = None
) -> Problem:
    wanted = f"{' or '.join(part.dtypes)} {list(part.shape)}"
    if beside is not None and stored is not None:
        wanted += f" beside {beside.stored_name.rpartition('.')[2]} {beside.dtype} ({stored.value})"
        remedy = "Without its scale the weight is noise: fetch or convert the checkpoint again."
        return Problem(beside.file, name, wanted, "no such tensor", remedy)
    return Problem(
        checkpoint.label, name, wanted, "no such tensor", "The checkpoint is incomplete: fetch or convert it again."
    )


def _stray(info: TensorInfo, suffix: str, stored: Format) -> Problem:
    wanted = UNSUPPORTED.get(suffix, f"no {suffix} beside a weight stored as {stored.value}")
    return Problem(
        info.file, info.stored_name, wanted, f"{info.dtype} {list(info.shape)}", "Convert the checkpoint again."
    )


def _settle_rest(
    checkpoint: Checkpoint, used: set[str], ignore: list[tuple[re.Pattern[str], str]], inventory: Inventory
) -> None:
    """Names that no line of the table asked for: ignored by an explicit rule, or a problem."""
    for name, info in checkpoint.tensors.items():
        if name in used:
            continue
        if (reason := _ignored(name, ignore)) is not None:
            inventory.ignored[name] = reason
            continue
        found = f"{info.dtype} {list(info.shape)}"
        remedy = "Check that config.json belongs to these files; a name is ignored only by an explicit rule."
        inventory.problems.append(Problem(info.file, info.stored_name, "only tensors of the model", found, remedy))


def stored_spec(checkpoint: Checkpoint, name: str = "") -> ModelSpec:
    """The checkpoint's `ModelSpec`, with `has_mtp` false where the configuration declares an MTP layer that is not there.

    Raises `SpecError`.
    """
    spec = ModelSpec.from_config(checkpoint.config, name=name or checkpoint.label)
    present = _has_layer(checkpoint, layer_prefix(spec.num_layers), _ignore_rules(spec))
    return replace(spec, has_mtp=spec.has_mtp and present)


def _has_layer(checkpoint: Checkpoint, prefix: str, ignore: list[tuple[re.Pattern[str], str]]) -> bool:
    return any(name.startswith(prefix) and _ignored(name, ignore) is None for name in checkpoint.tensors)
