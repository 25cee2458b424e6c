"""Lean drafts: only what drafts is quantised again, and no token of the target changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from legato.checkpoints import SMALL as SHIPPED
from legato.config import Config, ConfigError, resolve
from legato.engine.start import build_engine
from legato.model.checkpoint import Checkpoint
from legato.model.inventory import stored_spec
from legato.model.lean import (
    DraftWeights,
    Saving,
    draft_head,
    input_projection,
    lean_experts,
    lean_formats,
    settled,
)
from legato.model.mtp import Mtp
from legato.model.requantization import Requantization
from legato.model.weights import GlmWeights, MoeWeights, Residency, load_weights
from legato.ops import mtp_inputs, mtp_looked_up
from legato.parallel import Mesh
from legato.quant import DenseExperts, DenseWeight, Format, Fp8BlockWeight, Nvfp4Experts
from legato.quant.weight import Weight
from legato.schedule import Request
from legato.types import SamplingParams
from tests.tiny import tiny_checkpoint

SMALL = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"], "first_k_dense_replace": 1, "n_routed_experts": 4}


def load(checkpoint: Checkpoint, drafts: DraftWeights, resident: Residency = Residency.STORED) -> GlmWeights:
    spec = stored_spec(checkpoint)
    return load_weights(
        checkpoint, spec, device="cpu", dtype=torch.float32, resident=resident, again=Requantization(drafts)
    )


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_only_what_drafts_is_quantised_again(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint(tmp_path, **SMALL))
    stored, lean = load(checkpoint, DraftWeights.STORED), load(checkpoint, DraftWeights.LEAN)
    assert stored.draft_head is None and stored.mtp is not None and lean.mtp is not None
    mlp, drafting = lean.layers[1].mlp, lean.mtp.layer.mlp
    assert isinstance(mlp, MoeWeights) and isinstance(drafting, MoeWeights)
    assert isinstance(mlp.experts, DenseExperts) and isinstance(lean.lm_head, DenseWeight)
    assert isinstance(drafting.experts, Nvfp4Experts)
    assert lean.draft_head is not None and isinstance(lean.draft_head.weight, Fp8BlockWeight)
    assert isinstance(lean.mtp.eh_proj.weight, Fp8BlockWeight) and lean.draft_head.ids is None
    exact = stored.mtp.layer.mlp
    assert isinstance(exact, MoeWeights) and isinstance(exact.experts, DenseExperts)
    again = drafting.experts.dequantize(torch.float32)
    assert 0 < relative_error(again.w13, exact.experts.w13) < 0.15
    assert 0 < relative_error(again.w2, exact.experts.w2) < 0.15
    for found, expected in (
        (lean.mtp.eh_proj.weight, stored.mtp.eh_proj.weight),
        (lean.draft_head.weight, stored.lm_head),
    ):
        assert 0 < relative_error(found.dequantize(torch.float32), expected.dequantize(torch.float32)) < 0.05


def test_what_has_few_bits_stays_as_it_is(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(tiny_checkpoint(tmp_path, "nvfp4", **SMALL))
    moe = load(checkpoint, DraftWeights.STORED).layers[1].mlp
    assert isinstance(moe, MoeWeights)
    assert lean_experts(moe.experts) is moe.experts
    spec = stored_spec(checkpoint)
    mtp = f"model.layers.{spec.num_layers}."
    formats = {f"{mtp}mlp.experts.0.up_proj": Format.FP8_BLOCK, "lm_head": Format.DENSE}
    assert lean_formats(formats, spec, DraftWeights.STORED) == formats
    assert lean_formats(formats, spec, DraftWeights.LEAN) == formats | {f"{mtp}mlp.experts.0.up_proj": Format.NVFP4}


def test_auto_is_the_fastest_where_kernels_read_what_is_stored() -> None:
    assert DraftWeights.parse(settled("auto", Residency.STORED)) == DraftWeights.FASTEST
    assert DraftWeights.parse(settled("auto", Residency.DENSE)) == DraftWeights.STORED
    assert DraftWeights.parse(settled("lean", Residency.DENSE)) == DraftWeights.LEAN


def test_savings_are_named_in_words(tmp_path: Path) -> None:
    assert DraftWeights.parse("stored") == DraftWeights.STORED and DraftWeights.parse("lean") == DraftWeights.LEAN
    assert DraftWeights.parse("head, table").savings == {Saving.HEAD, Saving.TABLE}
    (tmp_path / "ids.json").write_text("[7, 3, 3]")
    assert DraftWeights.parse(f"lean,vocabulary={tmp_path / 'ids.json'}") == replace(
        DraftWeights.LEAN, vocabulary=(3, 7)
    )
    assert DraftWeights.parse("vocabulary=3").vocabulary == (0, 1, 2)
    (tmp_path / "none.json").write_text("{}")
    for wrong in (
        "thin",
        "lean,vocabulary=",
        "vocabulary=0",
        f"vocabulary={tmp_path}/none.json",
        f"vocabulary={tmp_path}/missing.json",
    ):
        with pytest.raises(ConfigError, match="draft weights"):
            DraftWeights.parse(wrong)


class _Halves:
    """Two ranks in one process: what one of them gathers is the other's shard, made by the same function."""

    def __init__(self, mesh: Mesh, other: Callable[[Tensor], Tensor]) -> None:
        self.mesh, self._other = mesh, other

    def all_gather(self, shard: Tensor, dim: int) -> Tensor:
        shards = [shard, self._other(shard)]
        return torch.cat(shards if self.mesh.rank == 0 else shards[::-1], dim)


@pytest.mark.parametrize("words", ["table", "table,split", "split", "table,split,projection"])
def test_the_projection_gives_the_same_with_a_table_and_split(words: str) -> None:
    generator = torch.Generator().manual_seed(0)
    matrix, embed, hidden = (torch.randn(*shape, generator=generator) for shape in ((256, 512), (50, 256), (3, 256)))
    matrix /= 16
    enorm, hnorm = 1 + 0.1 * torch.randn(2, 256, generator=generator)
    ids, positions = torch.tensor([4, 0, 49]), torch.tensor([8, 0, 9])
    whole = mtp_inputs(ids, positions, hidden, embed, enorm, hnorm, 1e-5) @ matrix.t()
    parts: list[Tensor] = []
    size = 2 if "split" in words else 1
    for rank in range(size):
        made = input_projection(DenseWeight(matrix), embed, enorm, 1e-5, DraftWeights.parse(words), Mesh(rank, size))
        assert made.weight.out_features == 256 // size
        if made.table is None:
            parts.append(made.weight.linear(mtp_inputs(ids, positions, hidden, embed, enorm, hnorm, 1e-5)))
        else:
            part, normed = mtp_looked_up(ids, positions, hidden, made.table, hnorm, 1e-5)
            assert made.table.shape == (50, 256 // size) and not part[1].any()
            parts.append(made.weight.linear(normed, part))
    assert relative_error(torch.cat(parts, 1), whole) < (0.05 if "projection" in words else 1e-5)


def test_drafts_choose_among_fewer_tokens(tmp_path: Path) -> None:
    """Whatever the ranks, every id of the list has the logit that the whole head gives it, and no others have one but those that
    round their number up."""
    checkpoint = Checkpoint.open(tiny_checkpoint(tmp_path, **SMALL))
    spec = stored_spec(checkpoint)
    whole = load(checkpoint, DraftWeights.STORED)
    assert whole.mtp is not None
    hidden = torch.randn(2, whole.embed.shape[1], generator=torch.Generator().manual_seed(0))
    wanted = Mtp(spec, whole.mtp, whole.embed, whole.lm_head.dequantize(torch.float32)).logits(hidden)
    ids = tuple(range(3, spec.vocab_size, 7))
    drafts = DraftWeights(vocabulary=ids)
    source = _Rows(whole.lm_head.dequantize(torch.float32))
    heads = [draft_head(source, whole.lm_head, spec, drafts, Mesh(rank, 2)) for rank in range(2)]
    assert heads[0] is not None and heads[1] is not None and heads[0].weight.out_features % 64 == 0
    shards = {rank: heads[rank].weight.linear(hidden) for rank in range(2)}  # type: ignore[union-attr]
    for rank in range(2):
        communicator = _Halves(Mesh(rank, 2), lambda shard, rank=rank: shards[1 - rank])
        found = Mtp(spec, whole.mtp, whole.embed, heads[rank], communicator).logits(hidden)  # type: ignore[arg-type]
        others = sorted(set(range(spec.vocab_size)) - set(ids))[: 2 * heads[0].weight.out_features - len(ids)]
        known = sorted({*ids, *others})
        assert torch.allclose(found[:, known], wanted[:, known], atol=1e-5)
        assert int(found.isfinite().sum()) == 2 * len(known) and found.shape == wanted.shape
    with pytest.raises(ConfigError, match="is not below"):
        draft_head(source, whole.lm_head, spec, DraftWeights(vocabulary=(spec.vocab_size,)), Mesh(0, 1))


def test_the_head_of_drafts_holds_an_id_once(tmp_path: Path) -> None:
    """In FP8 blocks two rows of one id could differ, and which one counts would differ from rank to rank."""
    spec = stored_spec(Checkpoint.open(tiny_checkpoint(tmp_path, **SMALL)))
    head = DenseWeight(torch.randn(spec.vocab_size, 128, generator=torch.Generator().manual_seed(0)))
    for count in (1, 65, 127, spec.vocab_size - 64):
        drafts = DraftWeights.parse(f"head,vocabulary={count}")
        made = [draft_head(_Rows(head.tensor), head, spec, drafts, Mesh(rank, 2)) for rank in range(2)]
        for one in made:
            assert one is not None and one.ids is not None and 2 * one.weight.out_features == one.ids.shape[0]
            assert one.ids.unique().shape == one.ids.shape and one.ids[:count].tolist() == list(range(count))
    every = DraftWeights.parse(f"vocabulary={spec.vocab_size - 1}")
    assert draft_head(_Rows(head.tensor), head, spec, every, Mesh(0, 3)) is None, "no others are left to fill it up"


class _Rows:
    """A source that has one head."""

    dtype = torch.float32

    def __init__(self, head: Tensor) -> None:
        self._head = head

    def rows(self, module: str, ids: tuple[int, ...]) -> Weight:
        return DenseWeight(self._head[list(ids)])


@pytest.mark.full
def test_lean_drafts_change_no_token_and_few_acceptances() -> None:
    checkpoint = Checkpoint.open(SHIPPED)
    spec = stored_spec(checkpoint)
    settings = resolve(Config(), max_position=spec.max_position, has_mtp=True, cuda_available=False)
    settings = replace(settings, num_drafts=5, context=1024, cache_tokens=8192)
    params = SamplingParams(max_tokens=96, temperature=0.0, ignore_eos=True)
    texts: list[list[int]] = []
    lengths: list[float] = []
    variants = ("stored", "experts", "projection", "table", "head", "lean", "lean,table", "lean,table,vocabulary=2048")
    for words in variants:
        drafts = DraftWeights.parse(words)
        engine = build_engine(spec, load(checkpoint, drafts, Residency.DENSE), settings)
        tokens: list[int] = []
        for number in range(4):
            engine.submit(Request(f"r{number}", tuple(range(100 + number, 140 + number)), params, (), number))
        while engine.has_work:
            for progress in engine.turn():
                tokens += progress.tokens
        texts.append(sorted(tokens))
        lengths.append(engine.stats.accept_length)
    print("accept length:", ", ".join(f"{words} {length:.3f}" for words, length in zip(variants, lengths, strict=True)))
    assert all(text == texts[0] for text in texts)
    assert min(lengths[:-1]) > 0.85 * lengths[0], "the last has a quarter of the tokens to choose among"
