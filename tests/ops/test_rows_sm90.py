"""The bookkeeping of an iteration on Hopper. Without a GPU: the source compiles without spills, and what is refused."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("tests.ops.nvrtc")

from legato.ops.rows import sm90


def test_the_source_compiles_without_spills():
    for kernel in (sm90._DECODE, sm90._CHAIN, sm90._ACCEPT, sm90._EXTEND, sm90._SEED, sm90._ADVANCE, sm90._LETTER):
        used = kernel.usage("sm_90a")
        assert used.registers <= 64 and used.spill_store_bytes == used.spill_load_bytes == 0, kernel.name


def test_tables_of_another_type_are_refused():
    wide, narrow = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"chain_rows: base is torch\.int32"):
        sm90.chain_rows_sm90(wide, narrow, wide, 4, 8e6, 64)
    with pytest.raises(ValueError, match=r"letters .* for 2 requests of 3 tokens"):
        flags = torch.zeros(2, dtype=torch.bool)
        letters = torch.zeros(8, 2, 6, dtype=torch.int64)
        tokens = torch.zeros(2, 3, dtype=torch.int64)
        sm90.write_letter_sm90(letters, wide[:1], tokens, tokens, wide, wide, wide, flags, flags)
