"""The bytes of an iteration, counted again by hand from the tensors of the shipped checkpoint."""

from __future__ import annotations

import pytest

from legato.bench.roofline import Traffic, traffic
from legato.engine.start import open_checkpoint


@pytest.fixture(scope="module")
def stored() -> Traffic:
    return traffic(open_checkpoint(None))


def test_weights_are_all_the_bytes_of_the_checkpoint_but_the_embedding(stored: Traffic) -> None:
    checkpoint = open_checkpoint(None)
    embedding = checkpoint.tensors["model.embed_tokens.weight"].nbytes
    counted = stored.trunk + stored.mtp + stored.experts + stored.mtp_experts + stored.head
    # Resident and stored sizes differ by the weights that the model widens to float32 (router, gates) only.
    assert counted == pytest.approx(checkpoint.nbytes - embedding, rel=0.02)
    experts = sum(info.nbytes for name, info in checkpoint.tensors.items() if ".mlp.experts." in name)
    assert stored.experts + stored.mtp_experts == pytest.approx(experts, rel=0.02)
    assert stored.head == checkpoint.tensors["lm_head.weight"].nbytes


def test_one_row_reads_its_own_experts_and_no_drafts(stored: Traffic) -> None:
    alone = stored.iteration(batch=1, num_drafts=0, context=0)
    assert alone == pytest.approx(stored.trunk + stored.head + stored.experts * 2 / 8)


def test_drafts_read_the_mtp_layer_and_the_head_once_each(stored: Traffic) -> None:
    share = [1 - (6 / 8) ** rows for rows in range(7)]
    verify = stored.trunk + stored.head + stored.experts * share[6]
    extend = stored.mtp + stored.head + stored.mtp_experts * share[6]
    step = stored.mtp + stored.head + stored.mtp_experts * share[1]
    assert stored.iteration(1, 5, 0) == pytest.approx(verify + extend + 4 * step)
    assert stored.iteration(1, 1, 0) == pytest.approx(
        stored.trunk
        + stored.head
        + stored.experts * share[2]
        + stored.mtp
        + stored.head
        + stored.mtp_experts * share[2]
    )


def test_the_selection_bounds_what_a_longer_context_reads(stored: Traffic) -> None:
    at = [stored.iteration(1, 0, context) for context in (0, 256, 1256)]
    assert at[1] - at[0] == pytest.approx(256 * (stored.index_row + stored.latent_row))
    assert at[2] - at[1] == pytest.approx(1000 * stored.index_row)
    # 2 full layers of 132 bytes; 6 layers of (512 + 64) bfloat16 values.
    assert (stored.index_row, stored.latent_row) == (2 * 132, 6 * 2 * 576)


def test_more_users_share_weights(stored: Traffic) -> None:
    assert stored.iteration(8, 5, 100) < 8 * stored.iteration(1, 5, 100)
    assert stored.iteration(8, 5, 100) > stored.iteration(1, 5, 100)


def test_float32_resident_weights_are_counted_as_such() -> None:
    wide = traffic(open_checkpoint(None), element_bytes=4)
    assert wide.head == 4 * 8192 * 256 and wide.experts == 4 * 5 * 8 * 3 * 256 * 256
