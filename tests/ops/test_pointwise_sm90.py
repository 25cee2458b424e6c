"""Norms, the MTP layer's input and SwiGLU on Hopper: rows in odd places, and what is handed on."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("tests.ops.nvrtc")

from legato.ops.pointwise import mtp_inputs, rms_norm, sm90, swiglu

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_the_source_compiles_without_spills() -> None:
    for name in ("rms_norm", "embed_norm", "mtp_inputs", "mtp_looked_up", "swiglu"):
        usage = sm90.kernel(name, 6144)[0].usage("sm_90a")
        assert usage.spill_store_bytes == usage.spill_load_bytes == 0


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """All but one in ten thousand equal, and those by one unit in the last place of bfloat16."""
    away = (found.float() - expected.float()).abs()
    few = int((away > 0).sum()) <= max(2, away.numel() // 10_000)
    return few and bool((away <= 2.0**-7 * expected.float().abs()).all())


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("width", [6144, 2048, 512, 256, 72, 24576])
def test_rows_in_odd_places(width: int, uninitialised_is_nan: None) -> None:
    """Slices of wider rows, rows at odd addresses, three dimensions, none at all; a row's bits alone and in company."""
    generator = torch.Generator("cuda").manual_seed(width)
    weight = (1 + 0.2 * torch.randn(width, device="cuda", generator=generator)).bfloat16()
    wide = (torch.randn(37, 2 * width + 8, device="cuda", generator=generator) * 3).bfloat16()
    for x in (wide[:, :width], wide[:, 8 : width + 8], wide[:, 1 : width + 1], wide[:, :width].view(37, 1, width)):
        found = sm90.run_rms_norm(x, weight, 1e-5)
        assert near(found, rms_norm.reference(x, weight, 1e-5))
        assert torch.equal(sm90.run_rms_norm(x[5:6], weight, 1e-5), found[5:6])
    assert sm90.run_rms_norm(wide[:0, :width], weight, 1e-5).shape == (0, width)
    for gate_up in (wide[:, : 2 * width], wide[:, 8:]):
        assert near(sm90.run_swiglu(gate_up), swiglu.reference(gate_up))
    exact = torch.randn(3, width, device="cuda")
    assert torch.equal(sm90.run_rms_norm(exact, weight, 1e-5), rms_norm.reference(exact, weight, 1e-5))


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("rows", [1, 6, 37])
def test_what_the_mtp_layer_reads(rows: int) -> None:
    embed = torch.randn(100, 256, device="cuda").bfloat16()
    embed[7] = float("nan")  # a token that only stands at position 0: its embedding is not read
    norms = [(1 + 0.2 * torch.randn(256, device="cuda")).bfloat16() for _ in range(2)]
    ids = torch.randint(8, 100, (rows,), device="cuda")
    positions = torch.randint(0, 2, (rows,), device="cuda")
    hidden = torch.randn(rows, 512, device="cuda").bfloat16()[:, 128:384]
    expected = mtp_inputs.reference(ids, positions, hidden, embed, *norms, 1e-5)
    assert near(sm90.run_mtp_inputs(ids, positions, hidden, embed, *norms, 1e-5), expected)
    ids[positions == 0] = 7
    assert near(sm90.run_mtp_inputs(ids, positions, hidden, embed, *norms, 1e-5), expected)
