"""An engine of two ranks on the CPU: it gives one rank's tokens, and ends in time, by name and without orphans, when a rank
is killed, stopped, slept or fails, wherever that meets it."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from legato.config import CacheConfig, Config, ExecutionConfig, ScheduleConfig
from legato.engine.ranks.watch import RankLost
from legato.llm import LLM
from legato.types import SamplingParams
from tests.processes import is_alive

pytestmark = pytest.mark.full
PATIENCE_S = 2.0


def config(ranks: int) -> Config:
    return Config(
        cache=CacheConfig(tokens=4096),
        schedule=ScheduleConfig(context=1024),
        execution=ExecutionConfig(device="cpu", threads=1, tensor_parallel=ranks, rank_patience=PATIENCE_S),
    )


def pid_of(llm: LLM) -> int:
    """Of rank 1's process."""
    return llm._engine.runner._ranks.board.signs(1).pid


@pytest.fixture
def pair() -> Iterator[LLM]:
    llm = LLM(config=config(2))
    yield llm
    llm._engine.runner._ranks.close()


def test_two_ranks_give_the_tokens_of_one(pair: LLM) -> None:
    alone = LLM(config=config(1))
    prompts = ["def fibonacci(n):", "import os\n", "class Queue:"]
    for params in (
        SamplingParams(max_tokens=48, temperature=0.0),
        SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=5, presence_penalty=0.5),
        SamplingParams(max_tokens=12, temperature=1.0, seed=3, regex="[0-9]+"),
    ):
        one, two = alone.generate(prompts, params), pair.generate(prompts, params)
        assert [completion.token_ids for completion in one] == [completion.token_ids for completion in two]
    pid = pid_of(pair)
    assert is_alive(pid)
    pair._engine.runner._ranks.close()
    assert not is_alive(pid)


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGKILL, "rank 1 is lost: killed by SIGKILL"), (signal.SIGSTOP, "rank 1 hangs: ")],
    ids=["killed", "stopped"],
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_rank_that_is_lost_while_tokens_come_is_named_in_time(number: int, words: str, seed: int, pair: LLM) -> None:
    hurt: list[float] = []

    def hurt_it() -> None:
        hurt.append(time.monotonic())
        os.kill(pid_of(pair), number)

    timer = threading.Timer(random.Random(seed).uniform(0.1, 2.0), hurt_it)
    timer.start()
    with pytest.raises(RankLost, match=words):
        while True:
            pair.generate(["def f(x):"], SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True))
    assert time.monotonic() - hurt[0] < 5
    with pytest.raises(RankLost, match=words):
        pair.generate(["again"], SamplingParams(max_tokens=1))


def test_a_rank_that_is_lost_while_nothing_runs_is_named_at_the_next_request(pair: LLM) -> None:
    pid = pid_of(pair)
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.5)
    with pytest.raises(RankLost, match="rank 1 is lost: killed by SIGKILL"):
        pair.generate(["def f(x):"], SamplingParams(max_tokens=4))
    assert not is_alive(pid)


HURTS_ITSELF = """
import os, pathlib, time
from legato.engine.ranks import follow
from legato.runtime.runner import Runner
launch, launched = Runner.launch, []

def hurt(self, plan):
    launched.append(plan)
    if len(launched) == 12:
        pathlib.Path(os.environ["HURT_AT"]).write_text(str(time.monotonic()))
        {what}
    return launch(self, plan)

Runner.launch = hurt
follow.main()
"""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("raise MemoryError('not enough for this step')", "rank 1 failed: MemoryError: not enough for this step"),
        ("time.sleep(60)", r"rank 1 hangs: others have waited .* s for it in collective"),
        ("os._exit(7)", "rank 1 is lost: exited with code 7"),
        (
            "import dataclasses; plan = dataclasses.replace(plan, epoch=plan.epoch + 1)",
            r"rank 1 computed other tokens than rank 0, in step 1\d or before",
        ),
    ],
    ids=["raises", "sleeps", "exits", "diverges"],
)
def test_what_goes_wrong_in_a_rank_is_told_by_rank_0(
    what: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HURT_AT", str(tmp_path / "hurt_at"))
    code = HURTS_ITSELF.format(what=what)
    boot = f"import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); exec({textwrap.dedent(code)!r})"
    monkeypatch.setattr("legato.engine.ranks.lead.BOOT", boot)
    llm = LLM(config=config(2))
    pid = pid_of(llm)
    with pytest.raises(RankLost, match=words):
        while True:
            llm.generate(["def f(x):"], SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True))
    assert time.monotonic() - float((tmp_path / "hurt_at").read_text()) < 5
    llm._engine.runner._ranks.close()
    assert not is_alive(pid)


def test_a_rank_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    boot = (
        "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); import legato.engine.ranks.follow as f\n"
        "def no(*_, **__): raise ValueError('no memory for the weights')\nf.join = no\nf.main()"
    )
    monkeypatch.setattr("legato.engine.ranks.lead.BOOT", boot)
    with pytest.raises(RankLost, match="rank 1 failed: ValueError: no memory for the weights"):
        LLM(config=config(2))


def test_no_rank_outlives_rank_0() -> None:
    """Rank 0 is killed: it can do nothing any more."""
    code = textwrap.dedent(
        """
        import sys, time
        sys.path.insert(0, sys.argv[1])
        from tests.engine.ranks.test_lost import LLM, config, pid_of
        if __name__ == "__main__":
            llm = LLM(config=config(2))
            print(pid_of(llm), flush=True)
            time.sleep(60)
        """
    )
    root = str(Path(__file__).parents[3])
    lead = subprocess.Popen([sys.executable, "-c", code, root], stdout=subprocess.PIPE, text=True, cwd=root)
    assert lead.stdout is not None
    pid = int(lead.stdout.readline())
    assert is_alive(pid)
    lead.kill()
    lead.wait()
    for _ in range(300):
        if not is_alive(pid):
            return
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("rank 1 outlived rank 0 by three seconds")
