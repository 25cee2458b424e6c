"""The end of a prompt padded to a size: the rows, the caches and the letter of the same prompt without padding."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from legato.checkpoints import SMALL
from legato.config import Config, Resolved, resolve
from legato.engine.start import limits_of
from legato.model.checkpoint import Checkpoint
from legato.model.inventory import stored_spec
from legato.model.weights import GlmWeights, Residency, load_weights
from legato.plan import Admit, Emission, Extend, Outcome, Plan
from legato.runtime import prompt_ends
from legato.runtime.batch import PromptEnd, build_batch
from legato.runtime.graphs import Graphs, Key
from legato.runtime.mailbox import Written
from legato.runtime.prompt_ends import PromptEnds, sizes_of
from legato.runtime.runner import Runner

CPU = torch.device("cpu")
SPEC = stored_spec(Checkpoint.open(str(SMALL)))
K = 3
FIRST, REST = tuple(range(300, 341)), tuple(range(341, 354))
ADMIT = Admit(2, (3, 1), 128, (), 0.0, 0, 1.0, 0.0, 7, -1)


def settings(**changes: object) -> Resolved:
    made = resolve(Config(), max_position=SPEC.max_position, has_mtp=True, cuda_available=False)
    return replace(made, max_running=2, cache_tokens=1024, context=256, num_drafts=K, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def weights() -> GlmWeights:
    return load_weights(Checkpoint.open(str(SMALL)), SPEC, device="cpu", dtype=torch.float32, resident=Residency.DENSE)


def begun(weights: GlmWeights) -> Runner:
    """A runner that holds all but the end of a prompt."""
    runner = Runner(SPEC, weights, settings())
    runner.launch(Plan(0, (ADMIT,), (Extend(2, 0, FIRST, REST[0]),), (), num_drafts=K))
    return runner


def ends_of(runner: Runner, graphs: Graphs | None = None) -> PromptEnds:
    return PromptEnds(runner.iteration, runner.rows, (16, 64), 1 << 26, K, Graphs() if graphs is None else graphs)


def whole(ends: PromptEnds, size: int) -> Written:
    """All of what was staged."""
    ends.through(size, range(SPEC.num_layers))
    return ends.finish(size)


def test_sizes_keep_to_the_chunk_and_the_context(weights: GlmWeights) -> None:
    assert sizes_of(settings()) == () and settings().device == "cpu"
    assert sizes_of(settings(device="cuda")) == (16, 64, 128, 256)
    assert sizes_of(settings(device="cuda:1", chunk_tokens=100)) == (16, 64)
    limits = limits_of(settings(device="cuda"), SPEC)
    assert (limits.end_rows, limits.end_layers) == (256, prompt_ends.LAYERS), "the scheduler knows them"
    ends = ends_of(Runner(SPEC, weights, settings()))
    assert [ends.size_of(count) for count in (1, 16, 17, 64, 65)] == [16, 16, 64, 64, None]


def test_the_last_rows_are_those_of_the_prompt_and_padding_stores_nothing(weights: GlmWeights) -> None:
    runner = begun(weights)
    extend = Extend(2, len(FIRST), REST, None)
    end = PromptEnd.of(16, CPU)
    end.stage(Extend(2, 0, tuple(range(16)), None))
    end.stage(extend)  # nothing of what stood there before
    ours, theirs = end.batch(runner.rows, SPEC), build_batch(Plan(0, (), (extend,), ()), runner.rows, SPEC)
    assert ours.samplers is not None and theirs.samplers is not None
    assert torch.equal(ours.ids[-13:], theirs.ids) and torch.equal(ours.next_ids[-13:], theirs.next_ids)
    for field in ("positions", "request", "lengths", "slots", "cos", "sin"):
        assert torch.equal(getattr(ours.step, field)[-13:], getattr(theirs.step, field)), field
    assert (ours.step.slots[:3] == -1).all() and (ours.step.slots[3:] >= 0).all()
    for name in ("rows", "base", "num_drafts", "drafts"):
        assert torch.equal(getattr(ours.samplers, name), getattr(theirs.samplers, name)), name
    assert ours.samplers.row_index.tolist() == [[15]] and theirs.samplers.row_index.tolist() == [[12]]
    assert ours.samplers.sampler_of.tolist() == [-1] * 15 + [0] and not ours.samplers.offset.any()
    with pytest.raises(RuntimeError):
        end.stage(Extend(2, 0, tuple(range(17)), None))


@pytest.mark.parametrize("count", [1, 13, 16])
def test_the_letter_the_table_and_the_caches_are_those_without_padding(weights: GlmWeights, count: int) -> None:
    first, rest = (FIRST + REST)[:-count], (FIRST + REST)[-count:]
    admitted = Plan(0, (ADMIT,), (Extend(2, 0, first, rest[0]),), (), num_drafts=K)
    extend = Extend(2, len(first), rest, None)
    plain, padded = (Runner(SPEC, weights, settings()) for _ in range(2))
    for runner in (plain, padded):
        runner.launch(admitted)
    (part,) = plain.launch(Plan(1, (), (extend,), (), num_drafts=K)).parts
    ends = ends_of(padded)
    with torch.inference_mode():
        ends.stage(16, extend)
        (line,) = padded.mailbox.post(whole(ends, 16)).read()
    assert (line,) == tuple(part.letter.read()) and line.count == 1 and len(line.drafts) == K
    for field in fields(plain.rows):
        assert torch.equal(getattr(plain.rows, field.name), getattr(padded.rows, field.name)), field.name
    for ours, theirs in zip(padded.iteration.caches, plain.iteration.caches, strict=True):
        torch.testing.assert_close(ours.latent, theirs.latent, rtol=1e-5, atol=1e-5)
        if ours.index is not None and theirs.index is not None:
            torch.testing.assert_close(ours.index, theirs.index, rtol=1e-5, atol=1e-5)


class Recorded(Graphs):
    """Graphs as they are on a device: run once, kept, and run again at each launch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[Key, Callable[[], Any]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self.kept

    def capture(self, key: Key, work: Callable[[], Any]) -> Any:
        self.kept[key] = work
        return work()

    def launch(self, key: Key) -> Any:
        return self.kept[key]()


def test_capturing_begins_with_padding_alone(weights: GlmWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_ends, "LAYERS", 4)
    runner, graphs = begun(weights), Recorded()
    ends = ends_of(runner, graphs)
    before = [cache.latent.clone() for cache in runner.iteration.caches]
    ends.stage(16, Extend(2, len(FIRST), REST, None))
    lengths = runner.rows.lengths.clone()
    with torch.inference_mode():
        ends.capture(16)
        assert [(key.bucket, key.layers) for key in graphs.kept] == [
            (16, range(4)),
            (16, range(4, 6)),
            (16, range(6, 7)),
        ]
        for _ in range(2):
            ends.stage(16, Extend(2, len(FIRST), REST, None))
            (line,) = runner.mailbox.post(whole(ends, 16)).read()
            assert line.count == 1, "the letters of the runs before are not the next one"
    assert lengths.tolist() == [0, 0, 0]
    assert all(torch.equal(one[0], cache.latent[0]) for one, cache in zip(before, runner.iteration.caches, strict=True))


@pytest.mark.parametrize("cuts", [(0, 2, 4, 7), (0, 4, 6, 7), (0, 6, 7), (0, 2, 7)])
@pytest.mark.parametrize(("logprobs", "of_prompt"), [(-1, -1), (2, -1), (-1, 0)])
def test_an_end_may_be_cut_where_graphs_end(
    weights: GlmWeights, cuts: tuple[int, ...], logprobs: int, of_prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another's tokens come in between; who wants more than tokens gets it from the same rows."""
    monkeypatch.setattr(prompt_ends, "LAYERS", 2)
    other = replace(ADMIT, row=1, pages=(2,), seed=8)
    beside = Extend(1, 0, FIRST[:7], None)
    asking = replace(ADMIT, logprobs=logprobs, prompt_logprobs=of_prompt)
    admitted = Plan(0, (asking, other), (Extend(2, 0, FIRST, REST[0]), beside), (), num_drafts=K)
    extend = Extend(2, len(FIRST), REST, None)
    plain, cut = (Runner(SPEC, weights, settings()) for _ in range(2))
    for runner in (plain, cut):
        runner.launch(admitted)
    cut.ends = ends_of(cut)
    first = plain.launch(Plan(1, (), (extend,), (), num_drafts=K)).outcome()
    expected = [first.emissions]
    expected += [plain.launch(Plan(2, (), (), (1,), num_drafts=K)).outcome().emissions for _ in cuts[1:]]
    found: list[tuple[Emission, ...]] = []
    outcomes: list[Outcome] = []
    for start, stop in itertools.pairwise(cuts):
        outcome = cut.launch(Plan(1, (), (extend,), (1,), num_drafts=K, layers=range(start, stop))).outcome()
        outcomes.append(outcome)
        found += [tuple(emission for emission in outcome.emissions if emission.row == row) for row in (2, 1)]
    firsts = [emissions for emissions in found[::2] if emissions]
    assert len(outcomes[-1].prompt_logprobs) == len(first.prompt_logprobs) == (of_prompt >= 0)
    for ours_of_prompt, theirs_of_prompt in zip(outcomes[-1].prompt_logprobs, first.prompt_logprobs, strict=True):
        values = [[entry.logprob for entry in chunk.logprobs] for chunk in (ours_of_prompt, theirs_of_prompt)]
        assert len(values[0]) == len(REST) - 1 and values[0] == pytest.approx(values[1], abs=1e-4)
    assert [[emission.tokens for emission in emissions] for emissions in [*firsts, *found[1::2]]] == [
        [emission.tokens for emission in emissions] for emissions in expected
    ]
    (ours,), (theirs,) = firsts[0], expected[0]
    assert (ours.logprobs is None) == (logprobs < 0) == (theirs.logprobs is None)
    for one, other_one in zip(ours.logprobs or (), theirs.logprobs or (), strict=True):
        assert one.logprob == pytest.approx(other_one.logprob, abs=1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other_one.top]


def test_another_end_may_take_the_place_of_one_that_is_dropped_half_way(
    weights: GlmWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same size, behind more tokens than a row selects, so that selections differ; it is cut where selections go on."""
    monkeypatch.setattr(prompt_ends, "LAYERS", 2)
    drawn = random.Random(1)
    text = tuple(drawn.randrange(300, 8000) for _ in range(600))
    assert SPEC.index_topk < 585
    larger = replace(settings(), context=1024, cache_tokens=2048, chunk_tokens=1024)
    admit = replace(ADMIT, pages=tuple(range(1, 11)), max_length=640)
    plain, cut = (Runner(SPEC, weights, larger) for _ in range(2))
    for runner in (plain, cut):
        runner.launch(Plan(0, (admit,), (Extend(2, 0, text[:590], text[590]),), (), num_drafts=K))
    cut.ends = ends_of(cut)
    cut.launch(Plan(1, (), (Extend(2, 585, text[585:], None),), (), num_drafts=K, layers=range(4)))
    extend = Extend(2, 590, text[590:], None)
    expected = plain.launch(Plan(1, (), (extend,), (), num_drafts=K)).outcome().emissions
    for layers in (range(2), range(2, 4), range(4, 7)):
        found = cut.launch(Plan(2, (), (extend,), (), num_drafts=K, layers=layers)).outcome().emissions
    assert [emission.tokens for emission in found] == [emission.tokens for emission in expected]
    for ours, theirs in zip(cut.iteration.caches, plain.iteration.caches, strict=True):
        torch.testing.assert_close(ours.latent[1:], theirs.latent[1:], rtol=1e-4, atol=1e-4)


def test_an_end_is_cut_nowhere_else(weights: GlmWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_ends, "LAYERS", 2)
    runner = begun(weights)
    ends = ends_of(runner)
    ends.stage(16, Extend(2, len(FIRST), REST, None))
    with torch.inference_mode():
        for layers in (range(3), range(1, 4), range(6, 7)):
            with pytest.raises(ValueError, match="not whole parts of 2 layers"):
                ends.through(16, layers)
        ends.through(16, range(0))
