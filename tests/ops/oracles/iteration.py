"""Choosing tokens, and the bookkeeping of an iteration."""

import math
import struct

import torch

from tests.ops.oracles.pointwise import rope_angles
from tests.ops.oracles.registry import double, oracle


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds on Python integers."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (q >> 32) ^ b ^ k, q & 0xFFFFFFFF, (p >> 32) ^ d ^ m, p & 0xFFFFFFFF
        k, m = (k + 0x9E3779B9) & 0xFFFFFFFF, (m + 0xBB67AE85) & 0xFFFFFFFF
    return [a, b, c, d]


@oracle
def gumbel(seed, position, vocab):
    rows = []
    for key, place in zip((seed.long() & (2**64 - 1 >> 1)).tolist(), position.tolist(), strict=True):
        key += 0 if int(seed[len(rows)]) >= 0 else 1 << 63
        words: list[int] = []
        for block in range(-(-vocab // 4)):
            words += philox([block, 0, place & 0xFFFFFFFF, place >> 32], [key & 0xFFFFFFFF, key >> 32])
        rows.append([-math.log(-math.log(((word >> 9) + 0.5) / 2**23)) for word in words[:vocab]])
    return torch.tensor(rows, dtype=torch.float64)


@oracle
def sample(logits, temperature, top_k, top_p, min_p, seed, position):
    noise = gumbel(seed, position, logits.shape[1])
    tokens = []
    for row in range(logits.shape[0]):
        values = logits[row].double().tolist()
        order = sorted(range(len(values)), key=lambda token: (-values[token], token))
        if temperature[row] == 0:
            tokens.append(order[0])
            continue
        scaled = [value / float(temperature[row]) for value in values]
        order = order[: int(top_k[row]) or None]
        weights = [math.exp(scaled[token] - scaled[order[0]]) for token in order]
        shares, reached, kept = [weight / sum(weights) for weight in weights], 0.0, []
        for token, share in zip(order, shares, strict=True):
            if kept and top_p[row] < 1 and reached >= float(top_p[row]):
                break
            reached += share
            if share >= float(min_p[row]) * shares[0]:
                kept.append(token)
        tokens.append(max(kept, key=lambda token: (scaled[token] + float(noise[row, token]), -token)))
    return torch.tensor(tokens)


@oracle
def penalize(logits, generated, in_prompt, repetition, frequency, presence):
    out = double(logits)
    for row in range(out.shape[0]):
        for token in range(out.shape[1]):
            times, value = int(generated[row, token]), float(out[row, token])
            if times or bool(in_prompt[row, token]):
                value = value / float(repetition[row]) if value > 0 else value * float(repetition[row])
            if times:
                value -= float(frequency[row]) * times + float(presence[row])
            out[row, token] = value
    return out


@oracle
def verify(sampled, drafts, num_drafts):
    accepted = []
    for row in range(sampled.shape[0]):
        count = 0
        while count < int(num_drafts[row]) and sampled[row, count] == drafts[row, count]:
            count += 1
        accepted.append(count)
    return torch.tensor(accepted)


@oracle
def likelihood(logits, tokens):
    return double(logits).softmax(1).gather(1, tokens[:, None])[:, 0]


@oracle
def logprobs(logits, tokens, top):
    values = double(logits) - double(logits).exp().sum(-1, keepdim=True).log()
    ids = [sorted(range(logits.shape[1]), key=lambda token: (-row[token], token))[:top] for row in logits.tolist()]
    ids = torch.tensor(ids, dtype=torch.int64).view(logits.shape[0], top)
    return values.gather(1, tokens[:, None])[:, 0], ids, values.gather(1, ids)


@oracle
def cache_slots(page_table, rows, positions):
    slots = []
    for row, position in zip(rows.tolist(), positions.tolist(), strict=True):
        inside = row >= 0 and 0 <= position < 64 * page_table.shape[1]
        page = int(page_table[row, position // 64]) if inside else -1
        slots.append(page * 64 + position % 64 if page >= 0 else -1)
    return torch.tensor(slots)


@oracle
def gather_rows(tokens, lengths, rows, depth):
    pairs = list(zip(rows.tolist(), depth.tolist(), strict=True))
    ids = [int(tokens[row, at]) for row, at in pairs]
    return torch.tensor(ids), torch.tensor([int(lengths[row]) + at for row, at in pairs])


@oracle
def advance_rows(tokens, lengths, done, drafted, rows, base, sampled, counts, ended, drafts, likely, threshold):
    for request, row in enumerate(rows.tolist()):
        count = int(counts[request])
        if count:
            tokens[row, 0] = sampled[request, count - 1]
            mine = [] if drafts is None else drafts[request].tolist()
            for at, draft in enumerate(mine):
                tokens[row, 1 + at] = draft
            together, made = 1.0, 0
            for at in range(len(mine)):
                together *= 1.0 if likely is None else float(likely[request, at])
                made += together >= threshold
            drafted[row] = made
        lengths[row] = int(base[request]) + count
        done[row] = bool(ended[request])
    return tokens, lengths, done, drafted


@oracle
def decode_rows(places, tokens, lengths, done, num_drafts, drafted, page_table, width, theta, rope_dim):
    ids, positions, rows, slots = [], [], [], []
    most = [min(int(asked), int(made), width - 1) for asked, made in zip(num_drafts, drafted, strict=True)]
    for place in places.tolist():
        row = place or int(places[0])
        for depth in range(width):
            at = depth if depth <= most[row] else 0
            ids.append(int(tokens[row, at]))
            rows.append(row)
            positions.append(int(lengths[row]) + at)
            slot = cache_slots(page_table, torch.tensor(rows[-1:]), torch.tensor(positions[-1:]))
            slots.append(-1 if done[place] or at != depth else int(slot))
    at = torch.tensor(positions)
    offered = torch.tensor([most[place] for place in places.tolist()])
    stands = torch.tensor(ids), at, torch.tensor(rows), at + 1, torch.tensor(slots), *rope_angles(at, theta, rope_dim)
    return *stands, torch.tensor([int(lengths[place]) for place in places.tolist()]), offered


@oracle
def chain_rows(places, base, counts, num_steps, theta, rope_dim):
    requests = list(zip(base.tolist(), counts.tolist(), strict=True))
    positions = torch.tensor(
        [at + max(count - 1, 0) + step for step in range(1, num_steps + 1) for at, count in requests]
    )
    rows = torch.tensor(places.tolist() * num_steps)
    nowhere = torch.full_like(rows, -1)
    return positions, rows, positions + 1, nowhere, *rope_angles(positions, theta, rope_dim)


@oracle
def accept_rows(sampled, drafts, num_drafts, rows, base, max_lengths, capacity, stop_ids, done):
    lines = []
    for request, row in enumerate(rows.tolist()):
        mine, offered = sampled[request].tolist(), drafts[request].tolist()[: int(num_drafts[request])]
        accepted = 0
        while accepted < len(offered) and mine[accepted] == offered[accepted]:
            accepted += 1
        emitted, ended, position = 0, int(base[request]) + 1 >= int(max_lengths[row]), int(base[request])
        stops = {token for token in stop_ids[row].tolist() if token >= 0}
        while emitted <= accepted and not ended and position < int(capacity[row]):
            position += 1
            ended = mine[emitted] in stops or position + 1 >= int(max_lengths[row])
            emitted += 1
        was_done = bool(done[row])
        lines.append((accepted, 0 if was_done else emitted, ended or was_done, not was_done))
    accepted, counts, ended, live = zip(*lines, strict=True)
    return torch.tensor(accepted), torch.tensor(counts), torch.tensor(ended), torch.tensor(live)


@oracle
def extend_rows(sampled, counts, row_index, sampler_of, offset, next_ids, slots):
    following, stored = next_ids.tolist(), slots.tolist()
    for row, (request, at) in enumerate(zip(sampler_of.tolist(), offset.tolist(), strict=True)):
        if request >= 0:
            following[row] = int(sampled[request, at])
            stored[row] = -1 if at >= int(counts[request]) else stored[row]
    seed = [int(row_index[request, max(int(count) - 1, 0)]) for request, count in enumerate(counts)]
    return torch.tensor(following), torch.tensor(stored), torch.tensor(seed)


@oracle
def seed_rows(hidden, slots, counts, seed):
    return tuple(torch.stack([rows[at] for at in seed.tolist()]) for rows in (hidden, slots, counts))


@oracle
def write_letter(letters, number, sampled, drafts, counts, accepted, offered, ended, live):
    number += 1
    columns = (counts, accepted, offered, ended, live)
    facts = zip(sampled.tolist(), drafts.tolist(), *(column.tolist() for column in columns), strict=True)
    for request, (tokens, following, *others) in enumerate(facts):
        line = [*tokens, *following, *map(int, others), int(number)]
        letters[int(number) % len(letters), request] = torch.tensor(line)
    return letters, number


@oracle
def greedy_keys(logits, first):
    if not logits.shape[1]:
        return torch.full((len(logits),), -(1 << 63))
    keys = []
    for row in logits.float().tolist():
        bits = int.from_bytes(struct.pack("<f", max(row) + 0.0), "little")
        ordered = bits ^ 0xFFFFFFFF if bits >> 31 else bits | 0x80000000
        keys.append((ordered << 32 | (0xFFFFFFFF - first - row.index(max(row)))) - (1 << 63))
    return torch.tensor(keys)


@oracle
def best_of_keys(keys):
    return torch.tensor([0xFFFFFFFF - max(column) % (1 << 32) for column in keys.T.tolist()])


@oracle
def greedy(logits):
    return torch.tensor([row.index(max(row)) for row in logits.tolist()])
