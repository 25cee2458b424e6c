"""The device's table of running requests, read and written by the iteration itself, and where a token lies in the caches.

Owns the gather of a row's tokens (`table`), where the rows of a decode batch stand (`decode`), what is accepted and what that
leaves for the draft layer (`accept`), and the step to the next iteration with its letter to the host (`letter`). Knows no request
and no plan. Called by `legato.runtime`.
"""

from __future__ import annotations

from legato.ops.rows.accept import ACCEPT_CASES, accept_rows, cut, extend_rows, seed_rows
from legato.ops.rows.decode import DECODE_CASES, chain_rows, decode_rows
from legato.ops.rows.letter import LETTER_CASES, LETTER_EXTRA, write_letter
from legato.ops.rows.table import TABLE_CASES, advance_rows, cache_slots, gather_rows

__all__ = [
    "CASES",
    "LETTER_EXTRA",
    "accept_rows",
    "advance_rows",
    "cache_slots",
    "chain_rows",
    "cut",
    "decode_rows",
    "extend_rows",
    "gather_rows",
    "seed_rows",
    "write_letter",
]

CASES = (*TABLE_CASES, *DECODE_CASES, *ACCEPT_CASES, *LETTER_CASES)
