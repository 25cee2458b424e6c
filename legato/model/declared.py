"""What `quantization_config` claims about each module. The files decide; a claim that disagrees becomes a warning.

Owns the spellings of exclusion lists. Must not read files. Called by the inventory.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from typing import cast

from legato.quant.formats import Format

_ALIASES = {"indexers_proj": "indexer.weights_proj"}
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}
_LISTS = ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers")
SHOWN = 3


def exclusions(config: Mapping[str, object]) -> tuple[str, ...] | None:
    """Entries of the exclusion list, or None where the configuration declares no quantisation."""
    declared = config.get("quantization_config")
    if not isinstance(declared, Mapping):
        return None
    block = cast("Mapping[str, object]", declared)
    entries: list[str] = []
    for key in _LISTS:
        value = block.get(key)
        if isinstance(value, (list, tuple)):
            entries.extend(str(entry) for entry in cast("Sequence[object]", value))
    return tuple(entries)


def is_excluded(module: str, entries: Sequence[str]) -> bool:
    """True where an entry names the module: exactly, as a parent, as a glob (`*`), as a regular expression (`re:...`),
    by a fused name or by the released list's misspelling `indexers_proj`."""
    return any(_matches(module, spelling) for entry in entries for spelling in _spellings(entry))


def _spellings(entry: str) -> list[str]:
    spellings = [entry]
    for alias, name in (*_ALIASES.items(), *((fused, part) for fused, names in _FUSED.items() for part in names)):
        if re.search(rf"(^|\.){alias}($|\.|\*)", entry):
            spellings.append(entry.replace(alias, name))
    return spellings


def _matches(module: str, entry: str) -> bool:
    if entry.startswith("re:"):
        try:
            return re.match(entry[3:], module) is not None
        except re.error:
            return False
    if "*" in entry or "?" in entry:
        return fnmatch.fnmatchcase(module, entry) or fnmatch.fnmatchcase(module, entry.rstrip("*") + ".*")
    short = entry.removesuffix(".weight")
    return module == short or module.startswith(short + ".") or module.endswith("." + short)


def disagreements(config: Mapping[str, object], formats: Mapping[str, Format]) -> list[str]:
    """Warnings, at most one per direction, for modules whose stored format is not what `quantization_config` says.

    ModelOpt configurations quantise linears only, so the router gate, which no list names, is not reported.
    """
    entries = exclusions(config)
    quantized = [module for module, stored in formats.items() if stored is not Format.DENSE]
    if entries is None:
        return _warning("are quantised, but config.json has no quantization_config", quantized)
    excluded = {module: is_excluded(module, entries) for module in formats if not module.endswith("mlp.gate")}
    listed = [module for module in quantized if excluded.get(module, False)]
    unlisted = [module for module, out in excluded.items() if not out and formats[module] is Format.DENSE]
    warnings = _warning("are quantised, but config.json excludes them from quantisation", listed)
    return warnings + _warning("are not quantised, but config.json does not exclude them", unlisted)


def _warning(text: str, modules: Sequence[str]) -> list[str]:
    if not modules:
        return []
    shown = ", ".join(modules[:SHOWN]) + (", ..." if len(modules) > SHOWN else "")
    return [f"{len(modules)} modules {text}: {shown}. The files are believed."]
