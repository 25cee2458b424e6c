"""What `quantization_config` claims about each module. The files decide; a claim that disagrees becomes a warning.

Owns the spellings of exclusion lists. Must not read files. Called by the inventory.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from legato.quant.formats import Format

_ALIASES = {"indexers_proj": "indexer.weights_proj"}
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa")}
_LISTS = ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers")
SHOWN = 3


@dataclass(frozen=True)
class Exclusions:
    """An exclusion list, ready to be asked about many modules.

    An entry names a module exactly, as a parent, as the end of its path, as a glob (`*`), as a regular expression
    (`re:...`), by a fused name, or by the released list's misspelling `indexers_proj`.
    """

    names: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    @staticmethod
    def of(entries: Iterable[str]) -> Exclusions:
        names: set[str] = set()
        globs: list[str] = []
        patterns: list[re.Pattern[str]] = []
        for spelling in (spelling for entry in entries for spelling in _spellings(entry)):
            if spelling.startswith("re:"):
                try:
                    patterns.append(re.compile(spelling[3:]))
                except re.error:
                    continue
            elif "*" in spelling or "?" in spelling:
                globs.append(fnmatch.translate(spelling))
            else:
                names.add(spelling.removesuffix(".weight"))
        if globs:
            patterns.append(re.compile("|".join(globs)))
        return Exclusions(frozenset(names), tuple(patterns))

    def __contains__(self, module: str) -> bool:
        steps = module.split(".")
        parents = (".".join(steps[:end]) for end in range(1, len(steps) + 1))
        tails = (".".join(steps[start:]) for start in range(1, len(steps)))
        if any(name in self.names for name in (*parents, *tails)):
            return True
        return any(pattern.match(module) for pattern in self.patterns)


def exclusions(config: Mapping[str, object]) -> Exclusions | None:
    """The configuration's exclusion list, or None where it declares no quantisation."""
    declared = config.get("quantization_config")
    if not isinstance(declared, Mapping):
        return None
    block = cast("Mapping[str, object]", declared)
    entries: list[str] = []
    for key in _LISTS:
        value = block.get(key)
        if isinstance(value, (list, tuple)):
            entries.extend(str(entry) for entry in cast("Sequence[object]", value))
    return Exclusions.of(entries)


def _spellings(entry: str) -> list[str]:
    spellings = [entry]
    for alias, name in (*_ALIASES.items(), *((fused, part) for fused, names in _FUSED.items() for part in names)):
        if re.search(rf"(^|\.){alias}($|\.|\*)", entry):
            spellings.append(entry.replace(alias, name))
    return spellings


def disagreements(config: Mapping[str, object], formats: Mapping[str, Format]) -> list[str]:
    """Warnings, at most one per direction, for modules whose stored format is not what `quantization_config` says.

    ModelOpt configurations quantise linears only, so the router gate, which no list names, is not reported.
    """
    entries = exclusions(config)
    quantized = [module for module, stored in formats.items() if stored is not Format.DENSE]
    if entries is None:
        return _warning("are quantised, but config.json has no quantization_config", quantized)
    excluded = {module: module in entries for module in formats if not module.endswith("mlp.gate")}
    listed = [module for module in quantized if excluded.get(module, False)]
    unlisted = [module for module, out in excluded.items() if not out and formats[module] is Format.DENSE]
    warnings = _warning("are quantised, but config.json excludes them from quantisation", listed)
    return warnings + _warning("are not quantised, but config.json does not exclude them", unlisted)


def _warning(text: str, modules: Sequence[str]) -> list[str]:
    if not modules:
        return []
    shown = ", ".join(modules[:SHOWN]) + (", ..." if len(modules) > SHOWN else "")
    return [f"{len(modules)} modules {text}: {shown}. The files are believed."]
