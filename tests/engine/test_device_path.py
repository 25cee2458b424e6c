"""What a GPU's engine does differently, on a CPU: prompts apart from decoding rows and cut by layers, padded batches, iterations
in two parts under a grammar, numbers of drafts that change, drafts that are not likely enough. The tokens stay the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from legato.engine.loop import Engine
from legato.llm import vocabulary_of
from legato.plan import Plan
from legato.runtime.decode import Decoder
from legato.runtime.grammar import Grammars
from legato.runtime.runner import Runner
from legato.schedule import Request
from legato.types import SamplingParams
from tests.engine.conftest import Shipped, requests, run

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
WARM = replace(GREEDY, temperature=0.9, top_p=0.9)


def engine_of(shipped: Shipped, **changes: Any) -> tuple[Engine, list[Plan]]:
    """An engine that runs as on a GPU, kernel by kernel; and the plans it launches."""
    engine = shipped.engine(**{"max_running": 3, "chunk_tokens": 64, "overlap": True, "slowdown": 2.0} | changes)
    runner, plans = engine.runner, list[Plan]()
    assert isinstance(runner, Runner)
    runner.decoder = Decoder(runner.iteration, runner.rows, runner.settings)
    launch = runner.launch

    def noted(plan: Plan) -> Any:
        plans.append(plan)
        return launch(plan)

    runner.launch = noted  # type: ignore[method-assign]
    return engine, plans


@pytest.fixture(scope="module")
def batch(prompts: list[tuple[int, ...]]) -> list[Request]:
    """Short and long ones, greedy and sampled, with drafts of their own or none, and one whose log-probabilities are wanted."""
    some = requests([prompts[n] for n in (0, 5, 1)], GREEDY) + requests([prompts[n] for n in (4, 2)], WARM)
    asked = (None, 2, None, 0, None)
    wanted = replace(GREEDY, logprobs=2)
    named = [replace(one, id=f"q{n}", seed=n, num_drafts=asked[n]) for n, one in enumerate(some)]
    return [*named[:2], replace(named[2], params=wanted), *named[3:]]


@pytest.fixture(scope="module")
def plain(shipped: Shipped, batch: list[Request]) -> list[list[int]]:
    return run(shipped.engine(num_drafts=0, chunk_tokens=512), batch)


def test_prompts_are_cut_by_layers_and_change_nothing(shipped, batch, plain):
    engine, plans = engine_of(shipped)
    assert run(engine, batch) == plain
    cut = [plan for plan in plans if plan.layers is not None]
    assert all(plan.extends for plan in cut)
    assert any(plan.decodes and plan.layers.start for plan in cut), "they run between iterations"
    assert {plan.layers.stop for plan in cut} > {shipped.spec.num_layers + 1}
    prompt_tokens = sum(len(request.prompt) for request in batch)
    assert engine.stats.prompt_tokens == prompt_tokens - engine.stats.hit_tokens, "counted once"


@pytest.mark.full
def test_a_prompt_that_is_dropped_half_way_leaves_nothing(shipped, batch, plain):
    engine, plans = engine_of(shipped)
    engine.submit(batch[0])
    gone = replace(batch[1], id="gone")
    said: list[int] = []
    while engine.has_work:
        for progress in engine.turn():
            said += progress.tokens if progress.request_id == batch[0].id else ()
        if len(said) > 2 and gone is not None:
            engine.submit(gone)
            gone = None
        if plans[-1].layers is not None and plans[-1].layers.stop <= shipped.spec.num_layers:
            engine.abort("gone")
    assert said == plain[0] and any(plan.drops for plan in plans)
    assert engine.runner._pass is None, "nothing is held of it"
    assert run(engine, batch) == plain
    engine.flush_cache()
    assert engine.gauges.free_pages == engine.runner.settings.num_pages - 1 and not engine.gauges.used_rows


def test_chunks_that_were_not_begun_are_refused(shipped, batch):
    engine, plans = engine_of(shipped)
    run(engine, batch[:2])
    later = next(plan for plan in plans if plan.layers is not None and plan.layers.start)
    with pytest.raises(RuntimeError, match=rf"goes on at layer {later.layers.start} with chunks that are not there"):
        engine.runner.launch(later)


@pytest.mark.parametrize(
    ("threshold", "device_path"),
    [
        (0.3, False),
        pytest.param(0.3, True, marks=pytest.mark.full),
        pytest.param(1.0, True, marks=pytest.mark.full),
        pytest.param(1.0, False, marks=pytest.mark.full),
    ],
)
def test_unlikely_drafts_are_not_verified(shipped, batch, plain, threshold, device_path):
    changes = {"draft_threshold": threshold, "num_drafts": 7}
    engine = engine_of(shipped, **changes)[0] if device_path else shipped.engine(max_running=3, **changes)
    assert run(engine, batch) == plain
    stats = engine.stats
    verified = stats.drafted_tokens / sum(stats.accepted_at)
    assert verified < (0.1 if threshold == 1.0 else 5.5), "tokens per round that were offered"
    accepted = sum(count * times for count, times in enumerate(stats.accepted_at))
    assert threshold == 1.0 or accepted > 0.4 * stats.drafted_tokens, "what is offered is mostly accepted"


@pytest.mark.full
def test_the_number_of_drafts_may_change_at_every_iteration(shipped, batch, plain):
    engine, plans = engine_of(shipped, num_drafts=7, is_adaptive=True)
    assert run(engine, batch) == plain
    assert len({plan.num_drafts for plan in plans if plan.decodes}) > 1
    mixed = shipped.engine(num_drafts=7, is_adaptive=True)
    assert run(mixed, batch) == plain


KINDS = {
    "regex": {"regex": r"\+[0-9]{2} [0-9]{3}( or mail)?", "presence_penalty": 1.0},
    "none": {},
}
MORE = {
    "schema": {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    "behind": {"regex": "(ab ){2,9}", "grammar_after": 198, "logit_bias": {198: 6.0}, "temperature": 0.9},
    "banned": {"bad_token_ids": tuple(range(64, 120)), "logprobs": 1},
}


@pytest.mark.parametrize("kinds", [KINDS, pytest.param(KINDS | MORE, marks=pytest.mark.full)], ids=["few", "all"])
def test_grammars_are_followed_in_two_parts(shipped, kinds):
    prompt, ends = tuple(shipped.tokenizer.encode_prompt("def parse(self):\n ")), tuple(shipped.tokenizer.stop_ids)
    some = [
        Request(name, prompt, SamplingParams(**{"max_tokens": 12, "temperature": 0.0} | fields), ends, 23)
        for name, fields in kinds.items()
    ]
    grammars = Grammars(vocabulary_of(shipped.tokenizer, shipped.spec.vocab_size))
    plain = shipped.engine(num_drafts=0)
    engine, _ = engine_of(shipped)
    plain.runner.grammars = engine.runner.grammars = grammars
    assert run(engine, some) == run(plain, some)
    assert engine.stats.accept_length > 1.1
