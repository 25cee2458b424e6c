"""The shipped checkpoint behind the border, in a pool of less than two requests: the same as in one's own process."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from legato.checkpoints import SMALL
from legato.config import CacheConfig, Config
from legato.llm import vocabulary_of
from legato.runtime.grammar import Grammars
from legato.schedule import Request
from legato.server.engine.client import EngineClient, EngineFailed, GenerationRequest, RequestRefused
from legato.types import SamplingParams, TokenLogprob, samples_of
from tests.engine.conftest import Shipped

POOL = 3 * 64
"""3 pages; requests here grow to 2."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "integer", "maximum": 99}},
    "required": ["answer"],
    "additionalProperties": False,
}


class Process:
    """One engine's process for the module, and the event loop that it is used from."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self.stages: list[str] = []
        config = Config(cache=CacheConfig(tokens=POOL))
        self.client: EngineClient = self.run(
            EngineClient.start(config, on_progress=lambda loading: self.stages.append(loading.stage))
        )

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(asyncio.wait_for(work, 400))

    def close(self) -> None:
        self.run(self.client.close())
        self._runner.close()


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.close()


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: dict[int, TokenLogprob] = field(default_factory=dict)

    def add(self, gained: Any) -> None:
        """Progress of either side: they have the same fields."""
        self.tokens += gained.tokens
        self.reason = gained.finish_reason
        self.logprobs += gained.logprobs or ()
        if gained.prompt_logprobs is not None:
            start, some = gained.prompt_logprobs.start, gained.prompt_logprobs.logprobs
            self.prompt_logprobs.update(enumerate(some, start))


async def ask(client: EngineClient, asked: GenerationRequest) -> Answer:
    answer = Answer()
    async for gained in client.generate(asked):
        answer.add(gained)
    return answer


async def ask_all(client: EngineClient, asked: list[GenerationRequest]) -> list[Answer]:
    return list(await asyncio.gather(*(ask(client, one) for one in asked)))


def here(shipped: Shipped, asked: list[GenerationRequest]) -> list[Answer]:
    """The same by an engine in this process, with room for all."""
    engine = shipped.engine()
    engine.runner.grammars = Grammars(vocabulary_of(shipped.tokenizer, shipped.spec.vocab_size))
    answers = {f"r{n}": Answer() for n in range(len(asked))}
    for n, one in enumerate(asked):
        engine.submit(Request(f"r{n}", one.prompt, one.params, one.stop_ids, one.seed or one.params.seed or 0))
    while engine.has_work:
        for progress in engine.turn():
            answers[progress.request_id].add(progress)
    return list(answers.values())


def test_what_is_ready_says_what_it_is(process: Process) -> None:
    info = process.client.info
    assert info.folder == info.model == str(SMALL)
    assert (info.cache_tokens, info.num_drafts, info.device, info.vocab_size) == (POOL, 5, "cpu", 8192)
    assert info.load_seconds > 0 and (info.latent, info.index) == ("float32", "fp8")
    assert process.stages[0] == "importing" and len(process.stages) > 1


def test_the_same_tokens_as_without_the_border(
    process: Process, shipped: Shipped, held_out: list[tuple[int, ...]]
) -> None:
    """Greedy and seeded, n samples, penalties, grammars, log-probabilities; all at once, with pages short."""
    seeded = SamplingParams(temperature=0.9, top_p=0.9, seed=11, max_tokens=20)
    kinds = [
        GREEDY,
        replace(GREEDY, logprobs=3, prompt_logprobs=2, max_tokens=12),
        replace(GREEDY, presence_penalty=0.5, logit_bias={198: -100, 11: 2.5}, min_tokens=8),
        replace(seeded, json_schema=SCHEMA, logit_bias={198: -100}),
        replace(GREEDY, regex="[a-z ]{3,30}", stop=("never sent",)),
        *samples_of(replace(seeded, n=2)),
    ]
    text = tuple(token for prompt in held_out for token in prompt)
    starts = [text[100 * n :][: (48, 57)[n % 2]] for n in range(6)]
    ends = tuple(sorted(shipped.tokenizer.stop_ids))
    asked = [
        GenerationRequest(starts[n], params, ends, seed=5 if params.seed is None else None)
        for n, params in enumerate(kinds[:5])
    ] + [GenerationRequest(starts[5], params, ends) for params in kinds[5:]]
    answers = process.run(ask_all(process.client, asked))
    assert answers == here(shipped, asked)
    assert len(answers[1].logprobs) == len(answers[1].tokens) and len(answers[1].prompt_logprobs) == 56
    assert isinstance(json.loads(shipped.tokenizer.decode(answers[3].tokens))["answer"], int)
    assert answers[5].tokens != answers[6].tokens
    report = process.run(process.client.report())
    assert report.counters.evicted_pages > 0
    assert not report.running and not report.waiting and not report.used_pages
    assert report.total_pages == POOL // 64


def test_refusals_of_a_real_engine(process: Process) -> None:
    for params, field_name in (
        (replace(GREEDY, regex="("), "regex"),
        (replace(GREEDY, json_schema={"type": "no such type"}), "json_schema"),
        (replace(GREEDY, logit_bias={8192: 1.0}), "logit_bias"),
        (replace(GREEDY, max_tokens=POOL), "max_tokens"),
    ):
        with pytest.raises(RequestRefused) as refused:
            process.run(ask(process.client, GenerationRequest((1, 2, 3), params)))
        assert refused.value.field == field_name
    assert process.run(ask(process.client, GenerationRequest((1, 2, 3), replace(GREEDY, max_tokens=2)))).reason


def test_cached_tokens_and_flush(process: Process, held_out: list[tuple[int, ...]]) -> None:
    client, prompt = process.client, held_out[3][:80]
    asked = GenerationRequest(prompt, replace(GREEDY, max_tokens=2))

    async def hits() -> int:
        return max([gained.cached_tokens async for gained in client.generate(asked)])

    process.run(client.flush_cache())
    assert [process.run(hits()) for _ in range(2)] == [0, 64]
    assert process.run(client.flush_cache()) >= 1
    assert process.run(hits()) == 0


@pytest.mark.full
def test_profile(process: Process, tmp_path: Path) -> None:
    client = process.client
    process.run(client.start_profile(str(tmp_path / "new")))
    process.run(ask(client, GenerationRequest((1,), replace(GREEDY, max_tokens=1))))
    path = Path(process.run(client.stop_profile()))
    assert path.parent == tmp_path / "new"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert any("mm" in event.get("name", "") for event in events)


@pytest.mark.full
def test_a_checkpoint_that_cannot_be_loaded(tmp_path: Path) -> None:
    """The text is that of the fault; it comes from the other process."""
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineFailed, match=r"config\.json") as failed:
        asyncio.run(EngineClient.start(Config(model=str(tmp_path))))
    assert failed.value.error == "CheckpointError"


def test_killed_at_work(process: Process, held_out: list[tuple[int, ...]]) -> None:
    """The last test of the module: it ends what the others used."""
    client = process.client

    async def kill() -> None:
        endless = replace(GREEDY, max_tokens=120, ignore_eos=True)
        asked = [GenerationRequest(prompt[:50], endless) for prompt in held_out[:3]]
        readers = [asyncio.create_task(ask(client, one)) for one in asked]
        while not (await client.report()).running:
            await asyncio.sleep(0.01)
        os.kill(client.pid, signal.SIGKILL)
        ends = await asyncio.wait_for(asyncio.gather(*readers, return_exceptions=True), 20.0)
        assert all(isinstance(end, EngineFailed) and "SIGKILL" in str(end) for end in ends)

    process.run(kill())
    assert client.state == "failed"
