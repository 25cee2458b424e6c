"""Tables of figures on the terminal: where there is little room text takes several lines, and a number stays whole.

Owns their layout. Called by the subcommands that print measurements.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.table import Table

_HEADING = 10
"""Characters of a number's heading in one line."""


def table(text: Sequence[str], numbers: Sequence[str], *behind: str) -> Table:
    """An empty table by its headings: columns of text, of numbers, and of text again."""
    made = Table(box=None)
    for heading in text:
        made.add_column(heading, overflow="fold")
    for heading in numbers:
        made.add_column("\n".join(textwrap.wrap(heading, _HEADING)), justify="right", no_wrap=True)
    for heading in behind:
        made.add_column(heading, overflow="fold")
    return made
