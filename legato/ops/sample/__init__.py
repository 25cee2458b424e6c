"""From logits to tokens: sampling that is a function of (logits, parameters, seed, position) alone, and acceptance of
drafts.

Owns penalties, the noise, the filters, the choice, verification and log-probabilities. Knows no request. Called by
`legato.runtime`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from legato.ops.case import EXACT, Case, Draw, Tolerance, Where
from legato.ops.invariant import map_elements
from legato.ops.op import op
from legato.ops.sample.likelihood import LIKELIHOOD_CASES, likelihood
from legato.ops.sample.penalty import PENALTY_CASES, penalize
from legato.ops.sample.philox import uniform
from legato.ops.sample.ranks import RANKS_CASES, best_of_keys, greedy_keys
from legato.ops.select.ordering import first_k, ordered_keys

__all__ = [
    "CASES", "best_of_keys", "greedy", "greedy_keys", "gumbel", "likelihood", "logprobs", "penalize", "sample", "verify",
]  # fmt: skip


@op(reference_ok=True)
def gumbel(seed: Tensor, position: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise -log(-log u), one number per token id, keyed by (seed, position, token id).

    seed [B] int64, position [B] int64 (of the token being chosen) -> float32 [B, W]. Philox4x32-10 makes u (see
    `philox.uniform`). Adding it to log-probabilities and taking the argmax draws from them (Gumbel 1954), and two
    models that share the noise tend to choose the same token, which is why drafts use it too.
    """
    return map_elements(_gumbel_of, uniform(seed, position, vocab))


def _gumbel_of(u: Tensor) -> Tensor:
    return u.log().neg_().log_().neg_()


@op
def greedy(logits: Tensor) -> Tensor:
    """The best token of each row, ties to the lowest id. logits [T, W] float32 or bfloat16 -> tokens [T] int64."""
    return logits.argmax(-1)


@op
def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> Tensor:
    """One token per row.

    logits [T, W]; temperature [T] float32; top_k [T] int32 (0 = off); top_p [T] float32 (1 = off); min_p [T] float32 (0
    = off); seed [T] and position [T] int64 -> tokens [T] int64.
    Temperature 0: the argmax, ties to the lowest id. Otherwise the argmax over the kept tokens of logits / temperature
    + gumbel: a draw from the softmax over them. Kept: the top_k best (ties to the lowest id), of those the fewest whose
    renormalised probabilities reach top_p (at least one), of those the tokens with at least min_p times the best one's
    probability. The same logits, parameters, seed and position give the same token, whatever the other rows are.
    """
    if logits.device.type != "cpu":
        return _sample_all(logits, temperature, (top_k, top_p, min_p), seed, position)
    tokens = logits.argmax(-1)
    drawn = (temperature > 0).nonzero().view(-1)
    if drawn.numel():
        scaled = logits[drawn].to(torch.float32) / temperature[drawn].unsqueeze(1)
        kept = _filtered(scaled, top_k[drawn], top_p[drawn], min_p[drawn])
        tokens[drawn] = (kept + gumbel.reference(seed[drawn], position[drawn], logits.shape[1])).argmax(-1)
    return tokens


def _sample_all(
    logits: Tensor, temperature: Tensor, filters: tuple[Tensor, Tensor, Tensor], seed: Tensor, position: Tensor
) -> Tensor:
    """Every row drawn and filtered, whether it asks for it or not, and then the right result kept: the shapes depend on no
    value, so a captured graph may hold it."""
    is_drawn = (temperature > 0).unsqueeze(1)
    scaled = logits.to(torch.float32) / torch.where(is_drawn, temperature.unsqueeze(1), 1.0)
    top_k, top_p, min_p = filters
    is_filtered = ((top_k > 0) | (top_p < 1) | (min_p > 0)).unsqueeze(1)
    kept = torch.where(is_filtered, _cut_tail(scaled, top_k, top_p, min_p), scaled)
    noisy = kept + gumbel(seed, position, logits.shape[1])
    return torch.where(is_drawn, noisy, logits.to(torch.float32)).argmax(-1)


def _filtered(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`scaled` with -inf at every token that the filters remove; rows with all filters off stay as they are."""
    active = ((top_k > 0) | (top_p < 1) | (min_p > 0)).nonzero().view(-1)
    if not active.numel():
        return scaled
    kept = scaled.clone()
    kept[active] = _cut_tail(scaled[active], top_k[active], top_p[active], min_p[active])
    return kept


def _cut_tail(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The same with every row filtered; a filter that is off removes nothing."""
    top_k, top_p, min_p = top_k.unsqueeze(1), top_p.unsqueeze(1), min_p.unsqueeze(1)
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    ordered = ordered.masked_fill((rank >= top_k) & (top_k > 0), -torch.inf)
    probabilities = torch.softmax(ordered, dim=-1)
    before = probabilities.cumsum(-1) - probabilities
    removed = ((before >= top_p) & (top_p < 1) & (rank > 0)) | (probabilities < min_p * probabilities[:, :1])
    return torch.full_like(ordered, -torch.inf).scatter_(1, ids, ordered.masked_fill(removed, -torch.inf))


@op(reference_ok=True)
def verify(sampled: Tensor, drafts: Tensor, num_drafts: Tensor) -> Tensor:
    """How many drafts the target's own samples confirm: the longest prefix with sampled[b, r] == drafts[b, r].

    sampled [B, K+1] int64 (row r: the target's token after r drafts), drafts [B, K] int64, num_drafts [B] -> accepted
    [B] int64, at most num_drafts. The emitted tokens are sampled[b, : accepted + 1], each the target's own sample given
    what precedes it, so the output's distribution is the target's at any temperature.
    """
    width = drafts.shape[1]
    offered = torch.arange(width, device=drafts.device) < num_drafts.unsqueeze(1)
    return (offered & (sampled[:, :width] == drafts)).to(torch.int64).cumprod(1).sum(1)


@op(reference_ok=True)
def logprobs(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, at temperature 1 and without filters, of the chosen tokens and of the `top` most likely.

    logits [T, W], tokens [T] int64 -> (chosen [T] float32, top_ids [T, top] int64 best first with ties to the lowest
    id, top_values [T, top] float32).
    """
    values = torch.log_softmax(logits.to(torch.float32), dim=-1)
    chosen = values.gather(1, tokens.unsqueeze(1)).squeeze(1)
    top_ids = first_k(ordered_keys(values), top)
    return chosen, top_ids, values.gather(1, top_ids)


def _greedy_case(rows: int, vocab: int, on: Where = "any") -> Case:
    """Whole numbers, so that the best are many."""
    return Case(
        greedy,
        f"greedy rows={rows} vocab={vocab}",
        lambda draw: (draw.normal(rows, vocab).round(),),
        EXACT,
        bytes=rows * vocab * 4,
        on=on,
    )


def _sample_case(rows: int, vocab: int, on: Where = "any") -> Case:
    """Row by row: greedy, plain, top_k, top_p, min_p, all of them."""

    def make(draw: Draw) -> tuple[Any, ...]:
        kind = torch.arange(rows, device=draw.device) % 6
        temperature = torch.where(kind == 0, 0.0, draw.uniform(rows, low=0.3, high=1.5))
        top_k = torch.where((kind == 2) | (kind == 5), 20, 0).to(torch.int32)
        top_p = torch.where((kind == 3) | (kind == 5), 0.9, 1.0)
        min_p = torch.where(kind >= 4, 0.05, 0.0)
        seed, position = (draw.integers(rows, low=0, high=1 << 40, dtype=torch.int64) for _ in range(2))
        return draw.normal(rows, vocab, scale=3.0), temperature, top_k, top_p, min_p, seed, position

    return Case(sample, f"sample rows={rows} vocab={vocab}", make, EXACT, bytes=rows * vocab * 4, on=on)


def _verify_case(requests: int, drafts: int) -> Case:
    def make(draw: Draw) -> tuple[Any, ...]:
        sampled = draw.integers(requests, drafts + 1, low=0, high=3, dtype=torch.int64)
        offered = draw.integers(requests, drafts, low=0, high=3, dtype=torch.int64)
        keep = draw.uniform(requests, drafts) < 0.7
        return sampled, torch.where(keep, sampled[:, :drafts], offered), draw.integers(requests, low=0, high=drafts + 1)

    return Case(verify, f"verify requests={requests} drafts={drafts}", make, EXACT, bytes=requests * drafts * 16)


CASES = (
    *(
        Case(
            gumbel,
            f"gumbel rows={rows} vocab={vocab}",
            lambda draw, rows=rows, vocab=vocab: (
                draw.integers(rows, low=-(1 << 62), high=1 << 62, dtype=torch.int64),
                draw.integers(rows, low=0, high=1 << 40, dtype=torch.int64),
                vocab,
            ),
            Tolerance(1e-6, 1e-6),
            bytes=rows * vocab * 4,
        )
        for rows, vocab in ((1, 8192), (6, 1001))
    ),
    *(_greedy_case(rows, vocab) for rows, vocab in ((1, 8192), (6, 1001))),
    *(_greedy_case(rows, 154880, "gpu") for rows in (1, 6, 96)),
    *(_sample_case(rows, vocab) for rows, vocab in ((1, 8192), (12, 1000))),
    *(_sample_case(rows, 154880, "gpu") for rows in (1, 6, 24)),
    *RANKS_CASES,
    *LIKELIHOOD_CASES,
    *PENALTY_CASES,
    *(_verify_case(requests, drafts) for requests, drafts in ((1, 5), (40, 5), (3, 0), (8, 7))),
    *(
        Case(
            logprobs,
            f"logprobs rows={rows} top={top}",
            lambda draw, rows=rows, top=top: (
                draw.normal(rows, 1000, scale=3.0),
                draw.integers(rows, low=0, high=1000, dtype=torch.int64),
                top,
            ),
            Tolerance(1e-5, 1e-5),
        )
        for rows, top in ((1, 0), (6, 20))
    ),
)
