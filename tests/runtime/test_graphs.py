"""Buckets, seats, the batch that is made on the device alone, and the mailbox: what holds without a GPU."""

from __future__ import annotations

import weakref
from dataclasses import fields, replace

import pytest
import torch

from legato.checkpoints import SMALL
from legato.config import Config, ConfigError, ExecutionConfig, Switch, resolve
from legato.model.checkpoint import Checkpoint
from legato.model.glm import Glm
from legato.model.inventory import stored_spec
from legato.model.spec import ModelSpec
from legato.model.weights import GlmWeights, LayerWeights, MlpWeights, MoeWeights, Residency, load_weights
from legato.plan import Admit, Plan
from legato.runtime.batch import Layout, build_batch, decode_batch
from legato.runtime.graphs import Seats, bucket_of, buckets
from legato.runtime.mailbox import DEPTH, Letter, Line, Mailbox, MailboxError, Ring, Written
from legato.runtime.rows import Rows
from legato.runtime.runner import Runner
from legato.runtime.speculate import Verified
from legato.runtime.warmup import first_of_every_kind, prompt_sizes, run_prompt

CPU = torch.device("cpu")
K = 5


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return stored_spec(Checkpoint.open(str(SMALL)))


@pytest.fixture
def rows(spec: ModelSpec) -> Rows:
    """Rows 1..4 at different lengths; row 3 has finished, row 4 decodes without drafts."""
    settings = resolve(Config(), max_position=spec.max_position, has_mtp=True, cuda_available=False)
    rows = Rows.allocate(replace(settings, max_running=4))
    for row in range(1, 5):
        rows.admit(Admit(row, (row, row + 4), 128, (), 0.0, 0, 1.0, 0.0, row, -1, num_drafts=0 if row == 4 else None))
        rows.tokens[row] = torch.arange(8) + 10 * row
        rows.lengths[row] = 20 * row
        rows.drafted[row] = K
    rows.done[3] = True
    return rows


def test_buckets_are_powers_of_two_that_hold_everyone():
    assert buckets(16) == (1, 2, 4, 8, 16) and buckets(5) == (1, 2, 4, 8) and buckets(1) == (1,)
    assert [bucket_of(n) for n in (1, 2, 3, 4, 5, 8, 9, 16)] == [1, 2, 4, 4, 8, 8, 16, 16]


def test_a_batch_made_on_the_device_is_the_one_made_on_the_host(rows, spec):
    decodes = (2, 3, 1)  # all of them with K drafts: else rows are repeated on a device, and left out on the host
    ours = decode_batch(torch.tensor(decodes), rows, spec, Layout.of(3, K, CPU))
    theirs = build_batch(Plan(0, (), (), decodes, num_drafts=K), rows, spec)
    assert ours.samplers is not None and theirs.samplers is not None
    for one, other in ((ours, theirs), (ours.step, theirs.step), (ours.samplers, theirs.samplers)):
        for field in fields(one):
            mine, its = getattr(one, field.name), getattr(other, field.name)
            if isinstance(mine, torch.Tensor) and field.name != "page_table":  # as wide as it is, or as is seen
                assert torch.equal(mine, its), field.name


def test_padding_stores_nothing_and_a_row_without_drafts_accepts_none(rows, spec):
    rows.num_drafts[0] = rows.drafted[0] = K  # as nothing keeps it from being
    batch = decode_batch(torch.tensor([4, 0, 0]), rows, spec, Layout.of(3, K, CPU))
    assert batch.samplers is not None
    assert batch.samplers.num_drafts.tolist() == [0, K, K] and batch.samplers.base.tolist() == [80, 0, 0]
    # They run what the first place runs: nothing of their own is read.
    assert batch.ids.view(3, -1).unique(dim=0).shape[0] == 1 and set(batch.step.request.tolist()) == {4}
    # Row 4 verifies no drafts: behind its first row nothing new is run, and nothing stored.
    assert (batch.step.slots[1:] == -1).all() and batch.step.slots[0] >= 0
    assert batch.step.positions.tolist() == [80] * 18 and batch.step.lengths.tolist() == [81] * 18


def test_rows_behind_the_likely_drafts_repeat_the_first(rows, spec):
    rows.drafted[1] = 2
    batch = decode_batch(torch.tensor([1, 2]), rows, spec, Layout.of(2, K, CPU))
    assert batch.samplers is not None and batch.samplers.num_drafts.tolist() == [2, K]
    assert batch.ids[: K + 1].tolist() == [10, 11, 12, 10, 10, 10]
    assert batch.step.positions[: K + 1].tolist() == [20, 21, 22, 20, 20, 20]
    assert (batch.step.slots[: K + 1] >= 0).tolist() == [True] * 3 + [False] * 3
    host = build_batch(Plan(0, (), (), (1, 2), num_drafts=K), rows, spec)
    assert host.samplers is not None and host.samplers.num_drafts.tolist() == [2, K]
    assert host.ids.tolist() == [10, 11, 12, *range(20, 26)], "a CPU leaves them out"


def test_seats_change_only_with_the_composition():
    seats = Seats(4, CPU)
    assert seats.seat((3, 1, 2)) == 4 and seats.places.tolist() == [3, 1, 2, 0]
    assert seats.seat((3, 1, 2)) == 4 and seats.num_changes == 1
    assert seats.seat((2,)) == 1 and seats.places.tolist() == [2, 0, 0, 0] and seats.num_changes == 2
    for wrong in ((), (1, 2, 3, 4, 1)):
        with pytest.raises(ValueError, match="4 places"):
            seats.seat(wrong)


def verified() -> Verified:
    sampled = torch.tensor([[5, 6, 7], [8, 9, 1]])
    yes, no = torch.tensor([True, False]), torch.tensor([False, True])
    counts = torch.tensor([2, 0]), torch.tensor([2, 1]), torch.tensor([3, 0])
    return Verified(torch.zeros(2, 3, 4), sampled, *counts, yes, no, torch.tensor([[3, 4], [1, 2]]))


def written() -> Written:
    ring = Ring(2, 3, 2, CPU)
    ring.write(verified())
    return ring.take()


def test_a_letter_says_what_was_verified():
    letter = Mailbox(4, 8, CPU).post(written())
    lines = [Line((5, 6, 7), (3, 4), 3, 2, 2, True, False), Line((8, 9, 1), (1, 2), 0, 0, 1, False, True)]
    assert letter.read() == lines
    letter.lines.zero_()
    assert letter.read() == lines, "it was read before its place was used again"


def test_letters_of_a_ring_are_told_apart():
    ring, mailbox = Ring(2, 3, 2, CPU), Mailbox(4, 8, CPU)
    for _ in range(2 * DEPTH + 1):
        ring.write(verified())
        mailbox.post(ring.take()).read()
    with pytest.raises(MailboxError, match=f"letter {2 * DEPTH + 2} arrived as {DEPTH + 2}"):
        mailbox.post(ring.take()).read()  # no iteration wrote it


def test_an_unread_letter_is_never_overwritten():
    mailbox = Mailbox(4, 8, CPU)
    letters = [mailbox.post(written()) for _ in range(DEPTH)]
    with pytest.raises(MailboxError, match="wait to be read"):
        mailbox.post(written())
    letters[0].read()
    mailbox.post(written())


def test_a_letter_on_its_way_is_polled():
    class Event:
        looks = 0

        def query(self) -> bool:
            self.looks += 1
            return self.looks > 3

    event, sent = Event(), written()
    letter = Letter(sent.lines, sent.number, sent.num_tokens, event, sent.lines)  # type: ignore[arg-type]
    assert len(letter.read()) == 2
    assert event.looks == 4


def test_letters_say_how_far_apart_they_came():
    """By the device's clock: the host may be late."""

    class Event:
        def __init__(self, at: float) -> None:
            self.at = at

        def elapsed_time(self, other: Event) -> float:
            return other.at - self.at

    sent = written()
    arguments = sent.lines, sent.number, sent.num_tokens
    assert Letter(*arguments, Event(12.5), None, Event(5.0)).seconds() == 0.0075  # type: ignore[arg-type]
    assert Letter(*arguments, Event(12.5), None).seconds() is None, "the first"  # type: ignore[arg-type]
    assert Mailbox(4, 8, CPU).post(sent).seconds() is None, "a CPU has no clock"


def test_a_letter_that_has_been_read_keeps_nothing_of_the_device():
    sent = written()
    letter = Letter(sent.lines.clone(), sent.number, sent.num_tokens, None, sent.lines)
    on_device = weakref.ref(sent.lines)
    del sent
    assert on_device() is not None, "it may still be on its way"
    letter.read()
    assert on_device() is None


def test_a_rehearsal_runs_the_fewest_layers_that_hold_every_kind(spec: ModelSpec):
    def layer(mlp: type) -> LayerWeights:
        made = object.__new__(LayerWeights)
        object.__setattr__(made, "mlp", object.__new__(mlp))
        return made

    layers = [layer(MlpWeights), *(layer(MoeWeights) for _ in range(6))]
    kinds = ("full", "shared", "shared", "full", "shared", "shared", "shared")
    weights = object.__new__(GlmWeights)
    for name in (field.name for field in fields(GlmWeights)):
        object.__setattr__(weights, name, layers if name == "layers" else None)
    short = first_of_every_kind(Glm(replace(spec, num_layers=7, indexer_kinds=kinds), weights))
    assert short.spec.num_layers == len(short.weights.layers) == 4, "dense and full, sparse and shared, sparse and full"
    assert short.spec.indexer_kinds == kinds[:4]


def test_warming_up_leaves_no_trace(spec: ModelSpec):
    weights = load_weights(
        Checkpoint.open(str(SMALL)), spec, device="cpu", dtype=torch.float32, resident=Residency.DENSE
    )
    settings = resolve(Config(), max_position=spec.max_position, has_mtp=True, cuda_available=False)
    runner = Runner(spec, weights, replace(settings, cache_tokens=128, max_running=1))
    held = {field.name: getattr(runner.rows, field.name) for field in fields(runner.rows)}
    held |= {f"latent {layer}": cache.latent for layer, cache in enumerate(runner.iteration.caches)}
    before = {name: tensor.clone() for name, tensor in held.items()}
    with torch.inference_mode():
        run_prompt(runner, 20, ("greedy", "general"))
    assert [name for name, tensor in held.items() if not torch.equal(tensor, before[name])] == []


def test_what_a_device_decides():
    def settled(device: str, graphs: Switch = "auto") -> tuple[bool, str]:
        config = Config(execution=ExecutionConfig(device=device, graphs=graphs))
        settings = resolve(config, max_position=512, has_mtp=True, cuda_available=True)
        return settings.graphs, settings.dtype

    assert settled("cuda") == (True, "bfloat16") and settled("cuda", "off") == (False, "bfloat16")
    assert settled("cpu") == (False, "float32")
    with pytest.raises(ConfigError, match="graphs on"):
        settled("cpu", "on")


def test_prompts_are_warmed_up_at_both_sides_of_every_border():
    assert prompt_sizes(512)[:10] == (1, 2, 3, 4, 5, 6, 7, 8, 9, 16) and prompt_sizes(512)[-3:] == (256, 257, 512)
    assert prompt_sizes(12) == (1, 2, 3, 4, 5, 6, 7, 8, 9, 12)
