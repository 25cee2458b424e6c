"""A row's bits never depend on the other rows: not on how many there are, nor on which, nor on where the row stands.

Each entry below gives a pool of 37 rows and a function of some of them. Every row is first computed alone; then it must
come out bit for bit the same from calls of 6, 8, 9, 16 and 37 rows, at every place, among others drawn at random.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from legato import ops
from legato.ops.cache import index_cache, latent_cache
from legato.ops.case import Draw
from legato.ops.gemm.stored import fp8_weight, int4_weight, nvfp4_weight
from legato.ops.prologue import IndexNorm, LatentNorm, Places

POOL = 37
COUNTS = (1, 6, 8, 9, 16, 37)


@dataclass(frozen=True)
class Rowwise:
    rows: tuple[Tensor, ...]
    run: Callable[..., Tensor | tuple[Tensor, ...]]

    def __call__(self, places: Tensor) -> tuple[Tensor, ...]:
        made = self.run(*(rows[places] for rows in self.rows))
        return made if isinstance(made, tuple) else (made,)


def _linear(width: int, depth: int, dtype: torch.dtype = torch.float32) -> Callable[[Draw], Rowwise]:
    def make(draw: Draw) -> Rowwise:
        weight = draw.normal(width, depth, dtype=dtype)
        residual = draw.normal(POOL, width, dtype=dtype)
        return Rowwise((draw.normal(POOL, depth, dtype=dtype), residual), lambda x, r: ops.linear_bf16(x, weight, r))

    return make


def _transposed(width: int, depth: int) -> Callable[[Draw], Rowwise]:
    def make(draw: Draw) -> Rowwise:
        weight = draw.normal(depth, width).t()
        return Rowwise((draw.normal(POOL, depth),), lambda x: ops.linear_bf16(x, weight))

    return make


def _packed(width: int, depth: int) -> Callable[[Draw], Rowwise]:
    def make(draw: Draw) -> Rowwise:
        weight = ops.linear_bf16.pack(draw.normal(width, depth))
        return Rowwise((draw.normal(POOL, depth),), lambda x: ops.linear_bf16(x, weight))

    return make


def _fp8(draw: Draw) -> Rowwise:
    weight = fp8_weight(draw, 576, 256)
    return Rowwise((draw.normal(POOL, 256),), lambda x: ops.linear_fp8_block(x, *weight))


def _nvfp4(draw: Draw) -> Rowwise:
    weight = (*nvfp4_weight(draw, 96, 64), draw.uniform(96, low=1e-4, high=4e-4))
    return Rowwise((draw.normal(POOL, 64),), lambda x: ops.linear_nvfp4(x, *weight))


def _int4(draw: Draw) -> Rowwise:
    weight = int4_weight(draw, 96, 256)
    return Rowwise((draw.normal(POOL, 256),), lambda x: ops.linear_int4(x, *weight))


def _heads(heads: int, width: int, depth: int) -> Callable[[Draw], Rowwise]:
    def make(draw: Draw) -> Rowwise:
        weight = draw.normal(heads, depth, width).transpose(1, 2)
        return Rowwise((draw.normal(POOL, heads, depth),), lambda x: ops.linear_heads(x, weight))

    return make


def _rms(width: int) -> Callable[[Draw], Rowwise]:
    def make(draw: Draw) -> Rowwise:
        weight = draw.normal(width)
        return Rowwise((draw.normal(POOL, width),), lambda x: ops.rms_norm(x, weight, 1e-5))

    return make


def _add_rms(width: int) -> Callable[[Draw], Rowwise]:
    def make(draw: Draw) -> Rowwise:
        weight = draw.normal(width)
        rows = (draw.normal(POOL, width), draw.normal(POOL, width))
        return Rowwise(rows, lambda x, delta: ops.add_rms_norm(x, delta, weight, 1e-5))

    return make


def _mtp(draw: Draw) -> Rowwise:
    embed, norms = draw.normal(50, 256), (draw.normal(256), draw.normal(256))
    ids, positions = (draw.integers(POOL, low=0, high=3, dtype=torch.int64) for _ in range(2))
    rows = ids, positions, draw.normal(POOL, 256)
    return Rowwise(rows, lambda some, at, hidden: ops.mtp_inputs(some, at, hidden, embed, *norms, 1e-5))


def _embed(draw: Draw) -> Rowwise:
    embed, weight = draw.normal(50, 256), draw.normal(256)
    ids = draw.integers(POOL, low=0, high=50, dtype=torch.int64)
    return Rowwise((ids,), lambda some: ops.embed_norm(some, embed, weight, 1e-5))


def _looked_up(draw: Draw) -> Rowwise:
    table, norm = draw.normal(50, 128), draw.normal(256)
    ids, positions = (draw.integers(POOL, low=0, high=3, dtype=torch.int64) for _ in range(2))
    rows = ids, positions, draw.normal(POOL, 256)
    return Rowwise(rows, lambda some, at, hidden: ops.mtp_looked_up(some, at, hidden, table, norm, 1e-5))


def _layer_norm(draw: Draw) -> Rowwise:
    weight, bias = draw.normal(128), draw.normal(128)
    return Rowwise((draw.normal(POOL, 128),), lambda x: ops.layer_norm(x, weight, bias, 1e-6))


def _rope(rotate: Callable[..., Tensor], dim: int, heads: int, width: int) -> Callable[[Draw], Rowwise]:
    def make(draw: Draw) -> Rowwise:
        def run(x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            cos, sin = ops.rope_angles(positions, 8e6, dim)
            return rotate(x, cos, sin, width - dim), cos, sin

        return Rowwise((draw.normal(POOL, heads, width), draw.integers(POOL, low=0, high=1 << 20)), run)

    return make


def _swiglu(width: int) -> Callable[[Draw], Rowwise]:
    return lambda draw: Rowwise((draw.normal(POOL, 2 * width, scale=4.0),), ops.swiglu)


def _route(experts: int, k: int, hidden: int) -> Callable[[Draw], Rowwise]:
    def make(draw: Draw) -> Rowwise:
        weight, bias = draw.normal(experts, hidden, scale=0.1), draw.normal(experts, scale=0.3)
        return Rowwise((draw.normal(POOL, hidden),), lambda x: ops.route(x, weight, bias, k, 2.5))

    return make


def _moe(experts: int, choices: int, width: int, hidden: int) -> Callable[[Draw], Rowwise]:
    def make(draw: Draw) -> Rowwise:
        w13, w2 = draw.normal(experts, 2 * width, hidden, scale=0.1), draw.normal(experts, hidden, width, scale=0.1)
        if experts == 8:
            w13, w2 = ops.moe_bf16.pack(w13, w2)
        ids = draw.uniform(POOL, experts).argsort(1)[:, :choices].to(torch.int32)
        ids[5, 0], ids[9] = -1, -1
        rows = draw.normal(POOL, hidden), ids, draw.uniform(POOL, choices)
        return Rowwise(rows, lambda x, chosen, weights: ops.moe_bf16(x, chosen, weights, w13, w2))

    return make


def _moe_nvfp4(draw: Draw) -> Rowwise:
    w13, w2 = nvfp4_weight(draw, 8, 128, 64), nvfp4_weight(draw, 8, 64, 64)
    scales = draw.uniform(8, 2, low=1e-4, high=4e-4), draw.uniform(8, low=1e-4, high=4e-4)
    rows = draw.normal(POOL, 64), draw.integers(POOL, 2, low=-1, high=8), draw.uniform(POOL, 2)
    return Rowwise(rows, lambda x, ids, w: ops.moe_nvfp4(x, ids, w, *w13, scales[0], *w2, scales[1]))


def _sparse_mla(dtype: torch.dtype, heads: int, width: int) -> Callable[[Draw], Rowwise]:
    def make(draw: Draw) -> Rowwise:
        cache = latent_cache(draw, dtype)
        slots, counts = draw.integers(POOL, width, low=-1, high=384), draw.integers(POOL, low=0, high=width + 1)
        rows = draw.normal(POOL, heads, 576, scale=0.5), slots, counts
        return Rowwise(rows, lambda q, s, c: ops.sparse_mla(q, cache, s, c, 0.0625, 512))

    return make


def _sparse_mla_tiny(draw: Draw) -> Rowwise:
    cache = draw.normal(3, 64, 48)
    rows = draw.normal(POOL, 4, 48), draw.integers(POOL, 8, low=0, high=192), draw.integers(POOL, low=0, high=9)
    return Rowwise(rows, lambda q, s, c: ops.sparse_mla(q, cache, s, c, 0.158, 32))


def _sparse_mla_beginnings(draw: Draw) -> Rowwise:
    """Every row takes a beginning of one list, as the rows of a short request do."""
    cache, whole = latent_cache(draw, torch.float32), draw.distinct(256, 384)
    counts = draw.integers(POOL, low=0, high=257)
    slots = torch.where(torch.arange(256) < counts[:, None], whole, -1).to(torch.int32)
    rows = draw.normal(POOL, 4, 576, scale=0.5), slots, counts
    return Rowwise(rows, lambda q, s, c: ops.sparse_mla(q, cache, s, c, 0.0625, 512))


def _sparse_mha(draw: Draw) -> Rowwise:
    cache, kv_b = latent_cache(draw, torch.float32), draw.normal(4, 96, 512, scale=0.05)
    rows = draw.normal(POOL, 4, 128), draw.integers(POOL, 16, low=0, high=384), draw.integers(POOL, low=0, high=17)
    return Rowwise(rows, lambda q, s, c: ops.sparse_mha(q, kv_b, cache, s, c, 128**-0.5))


def _scores(dtype: torch.dtype) -> Callable[[Draw], Rowwise]:
    """Rows of four requests; a row's neighbours are of its own request and of others, longer and shorter."""

    def make(draw: Draw) -> Rowwise:
        cache = index_cache(draw, dtype, 24)
        table = draw.distinct(24, 24).view(4, 6)
        lengths = draw.integers(POOL, low=0, high=385)
        lengths[:4] = draw.listed(1, 64, 65, 384)
        rows = draw.normal(POOL, 32, 128), draw.normal(POOL, 32), draw.integers(POOL, low=0, high=4), lengths

        def run(q: Tensor, gates: Tensor, request: Tensor, visible: Tensor) -> tuple[Tensor, ...]:
            if dtype == torch.uint8:
                q, gates = ops.quantize_index_query(q, gates)
            scores = ops.index_scores(q, gates, cache, table, request, visible)
            return scores, *ops.top_k(scores, visible, 48, table, request)

        return Rowwise(rows, run)

    return make


def _store(dtype: torch.dtype) -> Callable[[Draw], Rowwise]:
    """What is read back after a store, of latents and of index keys."""

    def make(draw: Draw) -> Rowwise:
        rows = draw.normal(POOL, 512), draw.normal(POOL, 64), draw.normal(POOL, 128), draw.distinct(POOL, 384)

        def run(latent: Tensor, rope: Tensor, keys: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
            cache = torch.zeros(6, 64, 656 if dtype == torch.uint8 else 576, dtype=dtype)
            ops.store_latent(cache, latent, rope, slots)
            index = torch.zeros(6, 8448, dtype=torch.uint8)
            ops.store_index_keys(index, keys, slots)
            pages = ops.gather_index_pages(index, torch.arange(6)).view(384, 128)
            return ops.gather_latent(cache, slots), pages[slots.long()]

        return Rowwise(rows, run)

    return make


def _prologue(draw: Draw) -> Rowwise:
    """A full layer: queries, index queries and gates, and what is read back of both caches."""
    w_uk, norm = draw.normal(4, 64, 512, scale=0.1), LatentNorm(draw.normal(512), 1e-5)
    index_norm = IndexNorm(draw.normal(128), draw.normal(128), 1e-6)
    cos, sin = ops.rope_angles(draw.integers(POOL, low=0, high=1 << 20), 8e6, 64)
    rows = draw.normal(POOL, 128 + 576 + 160), draw.normal(POOL, 4 * 128 + 4096), cos, sin, draw.distinct(POOL, 384)

    def run(qkv: Tensor, q: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        cache, keys = torch.zeros(6, 64, 656, dtype=torch.uint8), torch.zeros(6, 8448, dtype=torch.uint8)
        made = ops.prologue_full(qkv, q, w_uk, norm, index_norm, Places(cos, sin, slots), cache, keys)
        pages = ops.gather_index_pages(keys, torch.arange(6)).view(384, 128)
        return made[0], made[1].float(), made[2], ops.gather_latent(cache, slots), pages[slots.long()]

    return Rowwise(rows, run)


def _normed(draw: Draw) -> Rowwise:
    norm, weight = draw.normal(128), ops.linear_bf16_normed.pack(draw.normal(832, 128))
    return Rowwise((draw.normal(POOL, 128),), lambda x: ops.linear_bf16_normed(x, norm, 1e-5, weight))


def _normed_fp8(draw: Draw) -> Rowwise:
    norm, weight = draw.normal(256), fp8_weight(draw, 192, 256)
    return Rowwise((draw.normal(POOL, 256),), lambda x: ops.linear_fp8_block_normed(x, norm, 1e-5, *weight))


def _best(draw: Draw) -> Rowwise:
    dense, stored = ops.linear_bf16_best.pack(draw.normal(576, 256)), fp8_weight(draw, 192, 256)
    return Rowwise(
        (draw.normal(POOL, 256),),
        lambda x: (*ops.linear_bf16_best(x, dense, 7, 570), *ops.linear_fp8_block_best(x, *stored, 7, 190)),
    )


def _gated(draw: Draw) -> Rowwise:
    weight = ops.linear_swiglu.pack(draw.normal(512, 128))
    return Rowwise((draw.normal(POOL, 128),), lambda x: ops.linear_swiglu(x, weight))


def _sample(vocab: int) -> Callable[[Draw], Rowwise]:
    def make(draw: Draw) -> Rowwise:
        kind = torch.arange(POOL) % 6
        rows = (
            draw.normal(POOL, vocab, scale=3.0),
            torch.where(kind == 0, 0.0, draw.uniform(POOL, low=0.5, high=1.5)),
            torch.where((kind == 2) | (kind == 5), 20, 0).to(torch.int32),
            torch.where((kind == 3) | (kind == 5), 0.9, 1.0),
            torch.where(kind >= 4, 0.05, 0.0),
            draw.integers(POOL, low=0, high=1 << 60, dtype=torch.int64),
            draw.integers(POOL, low=0, high=1 << 20, dtype=torch.int64),
        )
        return Rowwise(rows, lambda *some: (ops.sample(*some), ops.gumbel(some[-2], some[-1], vocab)))

    return make


def _penalize(draw: Draw) -> Rowwise:
    """Rows with other counts, prompts and penalties each."""
    counts, in_prompt = draw.integers(POOL, 1001, low=0, high=4), draw.uniform(POOL, 1001) < 0.3
    penalties = (draw.uniform(POOL, low=0.5, high=1.8), *(draw.uniform(POOL, low=-2, high=2) for _ in range(2)))
    return Rowwise((draw.normal(POOL, 1001, scale=3.0), counts, in_prompt, *penalties), ops.penalize)


def _logprobs(draw: Draw) -> Rowwise:
    rows = draw.normal(POOL, 1001), draw.integers(POOL, low=0, high=1001, dtype=torch.int64)
    return Rowwise(rows, lambda logits, tokens: ops.logprobs(logits, tokens, 5))


# The small checkpoint's widths, those of the tiny models of the tests, and widths that fit no block at all.
SHAPES = (
    (832, 256),
    (512, 128),
    (256, 1024),
    (8192, 256),
    (8, 256),
    (32, 256),
    (24, 64),
    (72, 48),
    (80, 64),
    (257, 100),
)
ENTRIES: dict[str, Callable[[Draw], Rowwise]] = {
    **{f"linear {width}x{depth}": _linear(width, depth) for width, depth in SHAPES},
    "linear bfloat16": _linear(320, 256, torch.bfloat16),
    **{f"linear transposed {width}x{depth}": _transposed(width, depth) for width, depth in ((832, 256), (72, 48))},
    **{f"linear packed {width}x{depth}": _packed(width, depth) for width, depth in ((832, 256), (8192, 256), (48, 24))},
    "linear_bf16_normed": _normed,
    "linear_fp8_block_normed": _normed_fp8,
    "linear_best": _best,
    "linear_swiglu": _gated,
    "prologue_full": _prologue,
    "mtp_inputs": _mtp,
    "embed_norm": _embed,
    "mtp_looked_up": _looked_up,
    "linear_fp8_block": _fp8,
    "linear_nvfp4": _nvfp4,
    "linear_int4": _int4,
    **{f"linear_heads {shape}": _heads(*shape) for shape in ((4, 512, 64), (4, 64, 512), (4, 32, 24), (3, 20, 12))},
    **{f"rms_norm {width}": _rms(width) for width in (256, 512, 48, 100, 6144)},
    **{f"add_rms_norm {width}": _add_rms(width) for width in (256, 100)},
    "layer_norm": _layer_norm,
    "rope main": _rope(ops.rope_interleaved, 64, 4, 128),
    "rope key": _rope(ops.rope_interleaved, 64, 1, 64),
    "rope tiny": _rope(ops.rope_interleaved, 16, 4, 40),
    "rope tiny key": _rope(ops.rope_interleaved, 16, 1, 16),
    "rope narrow": _rope(ops.rope_interleaved, 6, 3, 8),
    "rope half": _rope(ops.rope_half, 16, 4, 40),
    **{f"swiglu {width}": _swiglu(width) for width in (256, 32, 100, 12288)},
    "route 8": _route(8, 2, 256),
    "route 256": _route(256, 8, 128),
    "moe 8": _moe(8, 2, 256, 256),
    "moe 16": _moe(16, 2, 32, 64),
    "moe 3": _moe(3, 2, 64, 48),
    "moe_nvfp4": _moe_nvfp4,
    "sparse_mla float32": _sparse_mla(torch.float32, 4, 256),
    "sparse_mla bfloat16": _sparse_mla(torch.bfloat16, 8, 64),
    "sparse_mla uint8": _sparse_mla(torch.uint8, 4, 64),
    "sparse_mla tiny": _sparse_mla_tiny,
    "sparse_mla beginnings": _sparse_mla_beginnings,
    "sparse_mha": _sparse_mha,
    "scores float32": _scores(torch.float32),
    "scores uint8": _scores(torch.uint8),
    "store bfloat16": _store(torch.bfloat16),
    "store uint8": _store(torch.uint8),
    "sample 2048": _sample(2048),
    "sample 1001": _sample(1001),
    "logprobs": _logprobs,
    "penalize": _penalize,
}


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8) if x.is_floating_point() else x


# Also with two threads, where a library may cut the work elsewhere. One thread is enough for the others, and does not
# wait for a core that another test holds.
THREADED = ("linear 832x256", "linear 257x100", "linear packed 8192x256", "swiglu 12288", "moe 8", "scores float32")


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "threads"), [(name, 1) for name in ENTRIES] + [(name, 2) for name in THREADED], indirect=["threads"]
)
def test_a_row_has_the_same_bits_in_any_company(name: str, threads: int) -> None:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    rowwise = ENTRIES[name](Draw(generator, torch.device("cpu")))
    alone = [rowwise(torch.tensor([row])) for row in range(POOL)]
    expected = tuple(torch.cat([made[output] for made in alone]) for output in range(len(alone[0])))
    for count in COUNTS:
        company = torch.randperm(POOL, generator=generator)[:count]
        # Turned round so that a row is seen at every place of a block.
        for turn in range(count if count <= 8 else 2):
            places = company.roll(turn)
            for output, (found, whole) in enumerate(zip(rowwise(places), expected, strict=True)):
                same = (
                    (_bits(found) == _bits(whole[places])).flatten(1).all(1)
                    if found.dim() > 1
                    else found == whole[places]
                )
                assert bool(same.all()), f"output {output}, {count} rows: rows {places[~same].tolist()} differ"


def test_without_blocks_the_property_fails_here() -> None:
    """The negative control: a plain product does depend on the number of rows, or this file proves nothing on this CPU."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(832, 256, generator=generator), torch.randn(POOL, 256, generator=generator)
    whole = x @ weight.T
    if all(torch.equal((x[:count] @ weight.T), whole[:count]) for count in range(1, POOL)):
        pytest.skip("this CPU's library treats rows alike whatever their number")
