"""Random numbers, sampling, verification: known answers, distributions with a control that must fail, and independence."""

import math

import pytest
import torch
from torch import Tensor

from legato import ops
from legato.ops.sample.philox import philox_4x32, uniform

WORD = 0xFFFFFFFF


# Source: the known-answer file of the Random123 distribution, philox4x32 with 10 rounds.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([WORD] * 4, [WORD] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, words) -> None:
    def word(value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int64)

    a, b, c, d = (word(value) for value in counter)
    made = philox_4x32((a, b, c, d), (word(key[0]), word(key[1])))
    assert [int(value) for value in made] == words


def test_uniforms_stay_inside_and_depend_on_each_key() -> None:
    seed, position = torch.tensor([0, 1, 1, 1 << 40, -1]), torch.tensor([0, 0, 1, 0, 1 << 35])
    u = uniform(seed, position, 5000)
    assert float(u.min()) > 0 and float(u.max()) < 1
    assert abs(float(u.mean()) - 0.5) < 0.01 and abs(float(u.var()) - 1 / 12) < 0.005
    assert len({tuple(row[:4].tolist()) for row in u}) == 5
    # The number of a token does not depend on the size of the vocabulary.
    assert torch.equal(uniform(seed, position, 77), u[:, :77])


def test_gumbel_has_the_gumbel_distribution() -> None:
    noise = ops.gumbel(torch.tensor([7]), torch.tensor([9]), 200_000)[0].double()
    assert abs(float(noise.mean()) - 0.5772) < 0.01 and abs(float(noise.var()) - math.pi**2 / 6) < 0.03
    assert bool(noise.isfinite().all())


def chi_square(tokens: Tensor, expected: Tensor) -> tuple[float, float]:
    """-> (statistic, what it exceeds once in about three million draws from `expected`: Wilson and Hilferty, z = 5)."""
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    assert int(counts[expected == 0].sum()) == 0, "a token of probability zero was drawn"
    counts, expected = counts[expected > 0], expected[expected > 0].double() * len(tokens)
    freedom = max(1, len(expected) - 1)
    limit = freedom * (1 - 2 / (9 * freedom) + 5 * math.sqrt(2 / (9 * freedom))) ** 3
    return float(((counts - expected) ** 2 / expected).sum()), limit


DRAWS = 8_000
LOGITS = torch.tensor([2.0, 1.5, 1.5, 0.3, -0.2, -1.0, 0.9, 0.0, 1.1, -2.0, 0.4, 0.4])


def drawn(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, seed: int = 3
) -> Tensor:
    """One token for each of many positions."""
    rows = logits.expand(DRAWS, -1) if logits.dim() == 1 else logits
    filters = torch.full((DRAWS,), top_k), torch.full((DRAWS,), top_p), torch.full((DRAWS,), min_p)
    position = torch.arange(DRAWS)
    return ops.sample(rows, torch.full((DRAWS,), temperature), *filters, torch.full((DRAWS,), seed), position)


def kept_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    order = sorted(range(len(LOGITS)), key=lambda token: (-float(LOGITS[token]), token))[: top_k or None]
    weights = [math.exp(float(LOGITS[token]) / temperature) for token in order]
    shares = [weight / sum(weights) for weight in weights]
    count = next((at + 1 for at in range(len(shares)) if sum(shares[: at + 1]) >= top_p), len(shares))
    kept = [(token, share) for token, share in zip(order[:count], shares, strict=False) if share >= min_p * shares[0]]
    out = torch.zeros(len(LOGITS))
    for token, share in kept:
        out[token] = share / sum(share for _, share in kept)
    return out


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(0, 1.0, 0.0), (4, 1.0, 0.0), (0, 0.75, 0.0), (0, 1.0, 0.2), (6, 0.85, 0.25)]
)
def test_samples_follow_the_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    statistic, limit = chi_square(
        drawn(LOGITS, temperature, top_k, top_p, min_p), kept_distribution(temperature, top_k, top_p, min_p)
    )
    assert statistic < limit


def test_the_test_has_teeth() -> None:
    """A temperature wrong by a fifth and a token that is never drawn are both noticed."""
    statistic, limit = chi_square(drawn(LOGITS, 1.2), kept_distribution(1.0, 0, 1.0, 0.0))
    assert statistic > limit
    without_one = LOGITS.clone()
    without_one[9] = -math.inf
    statistic, limit = chi_square(drawn(without_one, 1.0), kept_distribution(1.0, 0, 1.0, 0.0))
    assert statistic > limit


def test_neighbouring_positions_and_seeds_are_independent() -> None:
    expected = kept_distribution(1.0, 0, 1.0, 0.0)
    tokens, other = drawn(LOGITS, 1.0, seed=3), drawn(LOGITS, 1.0, seed=4)
    joint = torch.outer(expected, expected).flatten()
    for pairs in (tokens[:-1:2] * 12 + tokens[1::2], tokens * 12 + other):
        statistic, limit = chi_square(pairs, joint)
        assert statistic < limit


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [-0.0, 0.0, -1.0, -1.0], [-math.inf, -math.inf, 3.0, 3.0]])
    rows = len(logits)
    zeros, ones, off = torch.zeros(rows), torch.ones(rows), torch.zeros(rows, dtype=torch.int32)
    tokens = ops.sample(logits, zeros, off, ones, zeros, torch.arange(rows), torch.arange(rows))
    assert tokens.tolist() == [1, 0, 2] and tokens.dtype == torch.int64


def test_top_k_keeps_exactly_k_of_equals() -> None:
    flat = torch.zeros(DRAWS, 10)
    assert set(drawn(flat, 1.0, top_k=3).tolist()) == {0, 1, 2}
    assert set(drawn(flat, 1.0, top_k=100).tolist()) == set(range(10))


def test_extreme_filters_keep_the_best() -> None:
    for filters in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        assert set(drawn(LOGITS, 1.5, **filters).tolist()) == {0}, filters


@pytest.mark.parametrize("temperature", [1e-3, 0.7])
def test_masked_tokens_are_never_drawn(temperature: float) -> None:
    logits = LOGITS.clone()
    logits[[0, 5]] = -math.inf
    for filters in ({}, {"top_p": 0.95}, {"top_k": 11}, {"min_p": 0.001}):
        assert not {0, 5} & set(drawn(logits, temperature, **filters).tolist())


@pytest.mark.parametrize(
    ("sampled", "drafts", "offered", "accepted"),
    [
        ([5, 6, 7], [5, 6], 2, 2),
        ([5, 6, 7], [5, 9], 2, 1),
        ([5, 6, 7], [9, 6], 2, 0),
        ([5, 6, 7], [5, 6], 1, 1),
        ([5, 6, 7], [5, 6], 0, 0),
        ([5], [], 0, 0),
        ([1, 2, 3, 4], [1, 0, 3], 3, 1),
    ],
)
def test_verify(sampled, drafts, offered, accepted) -> None:
    drafts = torch.tensor([drafts], dtype=torch.int64).view(1, -1)
    assert ops.verify(torch.tensor([sampled]), drafts, torch.tensor([offered])).tolist() == [accepted]


def _chain(shared_noise: bool) -> tuple[Tensor, float, Tensor]:
    """Two tokens from a target with one round of two drafts: (pairs, mean accepted, pairs had the drafts been believed)."""
    generator = torch.Generator().manual_seed(5)
    target, draft = (torch.randn(7, 6, generator=generator) * 1.2 for _ in range(2))
    draft = target + 0.8 * draft  # row 0 is for the first token, row 1 + t for the one after t
    seed = torch.arange(DRAWS)

    def pick(logits: Tensor, position: int, of: Tensor) -> Tensor:
        ones, off = torch.ones(DRAWS), torch.zeros(DRAWS, dtype=torch.int32)
        return ops.sample(logits, ones, off, ones, torch.zeros(DRAWS), of, torch.full((DRAWS,), position))

    guess = seed if shared_noise else seed + 1_000_000
    first = pick(draft[0].expand(DRAWS, -1), 1, guess)
    second = pick(draft[1 + first], 2, guess)
    rows = [target[0].expand(DRAWS, -1), target[1 + first], target[1 + second]]
    sampled = torch.stack([pick(logits, 1 + at, seed) for at, logits in enumerate(rows)], 1)
    accepted = ops.verify(sampled, torch.stack((first, second), 1), torch.full((DRAWS,), 2))
    # With nothing accepted the round emits one token, and the next one starts from it.
    after = torch.where(accepted > 0, sampled[:, 1], pick(target[1 + sampled[:, 0]], 2, seed))
    return sampled[:, 0] * 6 + after, float(accepted.double().mean()), first * 6 + second


def test_speculation_keeps_the_distribution_and_shared_noise_raises_acceptance() -> None:
    generator = torch.Generator().manual_seed(5)
    target = torch.randn(7, 6, generator=generator) * 1.2
    expected = (target[0].softmax(0)[:, None] * target[1:].softmax(1)).flatten()
    lengths = {}
    for shared_noise in (True, False):
        pairs, lengths[shared_noise], believed = _chain(shared_noise)
        statistic, limit = chi_square(pairs, expected)
        assert statistic < limit
        # The negative control: drafts taken at their word follow the draft's distribution, and it shows.
        statistic, limit = chi_square(believed, expected)
        assert statistic > limit
    assert lengths[True] > 1.5 * lengths[False]
