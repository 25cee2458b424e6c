"""The memory plan for reading: tables of `legato.model.footprint` with their conditions.

Owns wording and layout. Must not compute. Called by the command line; `text` is the same without a terminal.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from legato.model.faults import Problem
from legato.model.footprint import Footprint, RankPlan


def text(footprint: Footprint, width: int = 120) -> str:
    """The plan as plain text of at most `width` columns."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False)
    console.print(render(footprint))
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def render(footprint: Footprint) -> RenderableType:
    """The plan as something a rich console prints: summary, faults, memory per rank, caches, conditions."""
    parts: list[RenderableType] = [_summary(footprint)]
    parts += [Text(f"warning: {warning}", style="yellow") for warning in footprint.warnings]
    parts += [Text(f"fault: {fault}", style="red") for fault in faults(footprint.problems)]
    if footprint.plans:
        parts += [_memory(footprint), _contexts(footprint), _conditions(footprint)]
    if footprint.refusal is not None:
        parts.append(Text(f"cannot run: {footprint.refusal}", style="bold red"))
    return Group(*parts)


def faults(problems: Sequence[Problem]) -> list[str]:
    """Every fault; those that differ only in layer or expert numbers are told once, with their count."""
    alike: dict[tuple[str, str, str], list[Problem]] = {}
    for problem in problems:
        key = (re.sub(r"\.\d+\.", ".*.", problem.tensor), problem.expected, problem.found)
        alike.setdefault(key, []).append(problem)
    return [str(same[0]) + (f" (and {len(same) - 1} more like it)" if len(same) > 1 else "") for same in alike.values()]


def size(nbytes: int) -> str:
    """Bytes in decimal units: 755.6 GB, 4.2 MB, 312 B."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB"):
        if abs(value) < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} GB"


def _summary(footprint: Footprint) -> RenderableType:
    spec = footprint.spec
    lines = [f"{footprint.label}: {size(footprint.stored_bytes)} in safetensors files"]
    if spec is not None:
        mtp = " + MTP layer" if spec.has_mtp else ", no MTP layer"
        lines.append(
            f"{footprint.num_parameters:,} parameters, {spec.num_layers} layers{mtp} "
            f"({spec.num_full} with an indexer), {spec.num_experts} experts, {spec.experts_per_token} per token"
        )
        formats = ", ".join(f"{count} x {name}" for name, count in footprint.formats.items())
        lines.append(f"linear weights as stored: {formats or 'none'}")
    lines += [f"ignored: {count} tensors ({reason})" for reason, count in footprint.ignored.items()]
    return Text("\n".join(lines))


def _memory(footprint: Footprint) -> Table:
    """Rows are parts, columns are group sizes."""
    table = Table(title="Memory per GPU", title_justify="left")
    table.add_column("part")
    for plan in footprint.plans:
        table.add_column(_gpus(plan.ranks), justify="right")
    parts = list(dict.fromkeys(part for plan in footprint.plans for part in plan.weight_bytes))
    for part in parts:
        table.add_row(part, *(size(plan.weight_bytes.get(part, 0)) for plan in footprint.plans))
    table.add_section()
    table.add_row("weights", *(size(plan.total_weight_bytes) for plan in footprint.plans))
    table.add_row("reserve", *(size(plan.reserve_bytes) for plan in footprint.plans))
    table.add_row("left for caches", *(size(plan.free_bytes) for plan in footprint.plans))
    return table


def _contexts(footprint: Footprint) -> Table:
    """Rows are group sizes, columns are latent formats."""
    cache = footprint.cache
    assert cache is not None
    title = f"Longest context, in tokens ({cache.index_keys:,} bytes of each are index keys)"
    table = Table(title=title, title_justify="left")
    table.add_column()
    latents = [(latent, per_token) for latent in ("bf16", "fp8") if (per_token := cache.per_token(latent)) is not None]
    for latent, per_token in latents:
        table.add_column(f"{latent} latents, {per_token:,} bytes/token", justify="right")
    for plan in footprint.plans:
        table.add_row(_gpus(plan.ranks), *(_context(plan, latent) for latent, _ in latents))
    return table


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _context(plan: RankPlan, latent: str) -> str:
    if plan.refusal is not None:
        return "-"
    longest, capacity = plan.longest_context[latent], plan.capacity_tokens[latent]
    return f"{longest:,}" if longest == capacity else f"{longest:,} of {capacity:,}"


def _conditions(footprint: Footprint) -> Text:
    plan = footprint.plans[0]
    lines = [
        f"Conditions: {size(footprint.gpu_bytes)} per GPU, of which {size(plan.reserve_bytes)} are set aside (context, "
        "graphs, activations, index scores), as an engine does unless --memory-fraction says otherwise; weights keep the "
        "format of the checkpoint, kv_b as bf16; embedding, latent projections, indexer, router and caches are replicated; "
        "a of b: the model's limit, of the tokens there is room for; 1 GB = 10^9 bytes."
    ]
    lines += [f"{_gpus(entry.ranks)}: cannot run: {entry.refusal}" for entry in footprint.plans if entry.refusal]
    return Text("\n".join(lines))
