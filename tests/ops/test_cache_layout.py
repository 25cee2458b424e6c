"""The bytes of the two caches: where everything lies, how it is rounded, and what a store leaves alone."""

import math
import struct

import pytest
import torch

from legato import ops
from legato.ops.cache.layout import INDEX_PAGE_BYTES, LATENT_BYTES, power_of_two_scale


def test_sizes() -> None:
    assert LATENT_BYTES == 656 and INDEX_PAGE_BYTES == 8448


@pytest.mark.parametrize("exponent", range(-20, 20))
def test_scales_are_powers_of_two_rounded_up(exponent: int) -> None:
    exact = 448.0 * 2.0**exponent
    above = torch.nextafter(torch.tensor(exact), torch.tensor(math.inf))
    below = torch.nextafter(torch.tensor(exact), torch.tensor(0.0))
    found = power_of_two_scale(torch.stack((below, torch.tensor(exact), above)))
    floor = power_of_two_scale(torch.zeros(1)).item()
    # One step above is lost where amax / 448 rounds back to the power of two; then the value saturates by less than half a code.
    assert found[0] == max(2.0**exponent, floor) and found[1] == max(2.0**exponent, floor)
    assert found[2] in (max(2.0**exponent, floor), max(2.0 ** (exponent + 1), floor))
    assert power_of_two_scale(torch.tensor([exact * 1.001]))[0] == max(2.0 ** (exponent + 1), floor)


def test_scale_of_nothing_is_the_floor() -> None:
    floor = 2.0 ** math.ceil(math.log2(1e-4 / 448))
    assert power_of_two_scale(torch.tensor([0.0, 1e-30, 1e-4])).tolist() == [floor] * 3


def test_a_packed_latent_byte_by_byte() -> None:
    cache = torch.full((2, 64, 656), 0xAA, dtype=torch.uint8)
    latent = torch.zeros(1, 512)
    latent[0, :128], latent[0, 128:256], latent[0, 256:384] = 448.0, 449.0, -1.0
    latent[0, 1] = 17.0  # half way between 16 and 18: the even code, 16
    rope = torch.arange(64, dtype=torch.float32)[None] + 0.001
    ops.store_latent(cache, latent, rope, torch.tensor([64 + 5]))
    row = bytes(cache[1, 5].tolist())
    assert row[0] == 0x7E and row[1] == 0x58  # 448; 16 = 2^4
    assert row[128] == 0x76  # 449 / 2 rounds to 224
    assert row[256] == 0xF8  # -1 under a scale of 2^-8 is -256
    assert row[384:512] == bytes(128)


def test_the_scale_is_the_least_power_of_two_that_holds_the_group() -> None:
    cache = torch.zeros(1, 64, 656, dtype=torch.uint8)
    latent = torch.zeros(1, 512)
    latent[0, 0], latent[0, 128], latent[0, 256] = 448.0, 449.0, -1.0
    ops.store_latent(cache, latent, torch.zeros(1, 64), torch.tensor([0]))
    scales = struct.unpack("<4f", bytes(cache[0, 0, 512:528].tolist()))
    assert scales == (1.0, 2.0, 2.0**-8, 2.0**-22)


def test_the_rope_key_is_bfloat16_after_the_scales() -> None:
    cache = torch.zeros(1, 64, 656, dtype=torch.uint8)
    rope = torch.linspace(-3, 3, 64)[None]
    ops.store_latent(cache, torch.zeros(1, 512), rope, torch.tensor([63]))
    stored = cache[0, 63, 528:].clone().view(torch.bfloat16)
    assert torch.equal(stored, rope[0].to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_a_store_touches_its_slots_alone(dtype: torch.dtype) -> None:
    width = 656 if dtype == torch.uint8 else 576
    cache = torch.full((3, 64, width), 7, dtype=dtype)
    slots = torch.tensor([190, -1, 0, -5, 64])
    ops.store_latent(cache, torch.randn(5, 512), torch.randn(5, 64), slots)
    touched = (cache != 7).any(-1).view(-1).nonzero().view(-1).tolist()
    assert touched == [0, 64, 190]


def test_an_index_page_byte_by_byte() -> None:
    cache = torch.full((3, 8448), 0xAA, dtype=torch.uint8)
    keys = torch.stack((torch.full((128,), 448.0), torch.full((128,), -1.0)))
    ops.store_index_keys(cache, keys, torch.tensor([2 * 64 + 63, 64]))
    assert bytes(cache[2, 63 * 128 : 64 * 128].tolist()) == b"\x7e" * 128
    assert struct.unpack("<f", bytes(cache[2, 8192 + 4 * 63 : 8192 + 4 * 64].tolist())) == (1.0,)
    assert bytes(cache[1, :128].tolist()) == b"\xf8" * 128  # -256, under a scale of 2^-8
    assert struct.unpack("<f", bytes(cache[1, 8192:8196].tolist())) == (2.0**-8,)
    untouched = torch.ones_like(cache, dtype=torch.bool)
    untouched[2, 63 * 128 : 64 * 128] = untouched[2, 8192 + 4 * 63 : 8192 + 4 * 64] = False
    untouched[1, :128] = untouched[1, 8192:8196] = False
    assert bool((cache[untouched] == 0xAA).all())


@pytest.mark.parametrize(("seed", "size"), [(0, 1.0), (1, 1e-6), (2, 1e4)])
def test_rounding_error_is_within_half_a_code(seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(64, 128, generator=generator) * size
    cache = torch.zeros(1, 8448, dtype=torch.uint8)
    ops.store_index_keys(cache, keys, torch.arange(64))
    found = ops.gather_index_pages(cache, torch.tensor([0]))[0]
    scale = power_of_two_scale(keys.abs().amax(1, keepdim=True))
    # e4m3 has 3 mantissa bits, and steps of 2^-9 below 2^-6.
    assert bool(((found - keys).abs() <= torch.maximum(keys.abs() * 2.0**-4, scale * 2.0**-10)).all())


def test_layouts_that_do_not_fit_are_refused() -> None:
    one = torch.tensor([0])
    for cache, latent, rope in (
        (torch.zeros(1, 64, 656, dtype=torch.uint8), torch.zeros(1, 32), torch.zeros(1, 16)),
        (torch.zeros(1, 64, 576), torch.zeros(1, 32), torch.zeros(1, 16)),
        (torch.zeros(1, 64, 576, dtype=torch.float16), torch.zeros(1, 512), torch.zeros(1, 64)),
        (torch.zeros(1, 32, 576), torch.zeros(1, 512), torch.zeros(1, 64)),
    ):
        with pytest.raises(ValueError, match=r"latent cache|656-byte"):
            ops.store_latent(cache, latent, rope, one)
    for cache, keys in (
        (torch.zeros(1, 8448, dtype=torch.uint8), torch.zeros(1, 32)),
        (torch.zeros(1, 8448, dtype=torch.int8), torch.zeros(1, 128)),
        (torch.zeros(1, 64, 128), torch.zeros(1, 32)),
    ):
        with pytest.raises(ValueError, match="index cache"):
            ops.store_index_keys(cache, keys, one)


def test_tiny_widths_in_float() -> None:
    cache = torch.zeros(2, 64, 48)
    latent, rope = torch.randn(3, 32), torch.randn(3, 16)
    slots = torch.tensor([100, 1, 64], dtype=torch.int32)
    ops.store_latent(cache, latent, rope, slots)
    assert torch.equal(ops.gather_latent(cache, slots), torch.cat((latent, rope), 1))
    index = torch.zeros(2, 64, 32)
    ops.store_index_keys(index, latent, slots)
    assert torch.equal(ops.gather_index_pages(index, torch.tensor([1, -1, 0]))[0, 36], latent[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_attention_sees_nothing_but_what_is_selected(dtype: torch.dtype) -> None:
    """Garbage, NaN included, in every token that no row selects changes no bit."""
    generator = torch.Generator().manual_seed(0)
    cache = torch.zeros(4, 64, 656 if dtype == torch.uint8 else 576, dtype=dtype)
    ops.store_latent(
        cache, torch.randn(256, 512, generator=generator), torch.randn(256, 64, generator=generator), torch.arange(256)
    )
    slots = torch.randperm(100, generator=generator)[:48].view(3, 16).to(torch.int32) + 100
    slots[0, 3] = -1
    counts = torch.tensor([16, 5, 0])
    q = torch.randn(3, 4, 576, generator=generator)
    clean = ops.sparse_mla(q, cache, slots, counts, 0.0625, 512)
    used = torch.zeros(256, dtype=torch.bool)
    for row in range(3):
        used[[slot for slot in slots[row, : counts[row]].tolist() if slot >= 0]] = True
    flat = cache.view(256, -1)
    flat[~used] = 0xFF if dtype == torch.uint8 else math.nan
    slots[1, 5:], slots[2, 2] = 0, 7
    assert torch.equal(ops.sparse_mla(q, cache, slots, counts, 0.0625, 512), clean)
    assert not clean[2].any() and not clean.isnan().any()


def test_a_bad_token_spoils_only_the_rows_that_select_it() -> None:
    """Rows that share a beginning, the last of them reaching a token that is not a number."""
    generator = torch.Generator().manual_seed(2)
    cache = torch.randn(1, 64, 576, generator=generator)
    slots = torch.arange(8, dtype=torch.int32).expand(3, 8)
    counts, q = torch.tensor([6, 7, 8]), torch.randn(3, 4, 576, generator=generator)
    clean = ops.sparse_mla(q, cache, slots, counts, 0.0625, 512)
    cache[0, 7] = math.nan
    found = ops.sparse_mla(q, cache, slots, counts, 0.0625, 512)
    assert torch.equal(found[:2], clean[:2]) and found[2].isnan().all()


def test_absorbed_and_expanded_attention_agree() -> None:
    generator = torch.Generator().manual_seed(1)
    cache = torch.randn(2, 64, 48, generator=generator, dtype=torch.float32)
    kv_b = torch.randn(4, 24 + 32, 32, generator=generator) * 0.2
    q = torch.randn(5, 4, 24 + 16, generator=generator)
    slots = torch.randint(0, 128, (5, 8), generator=generator, dtype=torch.int32)
    counts = torch.tensor([8, 8, 3, 0, 1])
    expanded = ops.sparse_mha(q, kv_b, cache, slots, counts, 40**-0.5)
    latent_q = torch.cat((ops.linear_heads(q[..., :24], kv_b[:, :24].transpose(1, 2)), q[..., 24:]), -1)
    latent = ops.sparse_mla(latent_q, cache, slots, counts, 40**-0.5, 32)
    assert torch.allclose(ops.linear_heads(latent, kv_b[:, 24:]), expanded, atol=2e-6, rtol=1e-5)
