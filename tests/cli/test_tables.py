"""Tables of figures: a number is never cut, however little room there is."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from legato.cli.tables import table


@pytest.mark.parametrize("width", [60, 80, 200])
def test_numbers_stay_whole_where_text_takes_several_lines(width: int) -> None:
    shown = table(("rope_interleaved",), ("us", "tokens/s per device", "% roofline"), "")
    shown.add_row("rows=6 heads=64 width=256 start=192", "12345.67", "109876.5", "103", "reference, 12 kernels")
    console = Console(file=io.StringIO(), width=width)
    console.print(shown)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert {"12345.67", "109876.5", "103"} <= set(text.split())
    assert "…" not in text and max(map(len, text.splitlines())) <= width
