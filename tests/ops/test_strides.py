"""Layouts of tensors: what kernels may read as it is, and copies of the rest."""

from __future__ import annotations

import pytest
import torch

from legato.ops.strides import PIECE_BYTES, dense, in_rows, is_dense


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("width", [1, 5, 16, 707])
def test_rows_begin_at_pieces_whatever_their_width(dtype: torch.dtype, width: int) -> None:
    x = (torch.arange(3 * (width + 4)) % 251).to(dtype).view(3, -1)[:, 1 : 1 + width]
    rows = in_rows(x)
    assert torch.equal(rows, x) and rows.stride(1) == 1
    assert all(row.data_ptr() % PIECE_BYTES == 0 for row in rows)


def test_rows_that_serve_stay_where_they_are() -> None:
    wide = torch.zeros(3, 64, dtype=torch.bfloat16)
    assert in_rows(wide[:, 8:21]).data_ptr() == wide[:, 8:].data_ptr()
    assert dense(wide) is wide and is_dense(wide, wide[1:])


def test_what_has_gaps_or_begins_elsewhere_is_copied() -> None:
    x = torch.arange(40.0)
    for some in (x[1:9], x[::2], x.view(8, 5).t()):
        assert not is_dense(x, some)
        assert is_dense(dense(some)) and torch.equal(dense(some), some)
