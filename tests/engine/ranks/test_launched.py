"""Ranks that torchrun has started: what it says is read or refused, and they make one engine."""

import subprocess
import sys
from pathlib import Path

import pytest

from legato.config import Config, ConfigError, ExecutionConfig, RankAddress, rank_from_environment
from legato.engine.ranks.follow import check_size

SAID = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


def test_what_torchrun_says() -> None:
    assert rank_from_environment(SAID) == RankAddress(1, 2, "127.0.0.1", 29500, serves_store=False)
    alone = {**SAID, "TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert rank_from_environment({**alone, "RANK": "0"}) == RankAddress(0, 2, "127.0.0.1", 29500, serves_store=True)
    assert rank_from_environment(alone) == RankAddress(1, 2, "127.0.0.1", 29500, serves_store=False)


def test_other_launchers_words_mean_nothing_here() -> None:
    assert rank_from_environment({name: value for name, value in SAID.items() if "ELASTIC" not in name}) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [({"LOCAL_WORLD_SIZE": "1"}, "several hosts"), ({"RANK": "one"}, "no rank"), ({"MASTER_PORT": ""}, "no rank")],
)
def test_what_is_no_rank_here_is_refused(changed: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rank_from_environment({**SAID, **changed})


def test_torchrun_and_the_settings_must_agree() -> None:
    launched = rank_from_environment(SAID)
    assert launched is not None
    check_size(Config(execution=ExecutionConfig(tensor_parallel=2)), launched)
    with pytest.raises(ConfigError, match="use --tp 2"):
        check_size(Config(), launched)


def test_sums_have_a_least_number_of_rows_in_two_shots() -> None:
    with pytest.raises(ConfigError, match="two_shot_rows must be at least 1, got 0"):
        Config(execution=ExecutionConfig(two_shot_rows=0))


@pytest.mark.full
def test_torchrun_makes_one_engine() -> None:
    arguments = ["generate", "--device", "cpu", "--threads", "1", "--context", "1024", "-t", "0", "--max-tokens", "24"]
    prompt = "def fibonacci(n):"
    root = Path(__file__).parents[3]
    alone = subprocess.run(
        [sys.executable, "-m", "legato", *arguments, prompt], capture_output=True, text=True, timeout=120, cwd=root
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "legato"]
    ranks = subprocess.run(
        [*launcher, *arguments, "--tp", "2", prompt], capture_output=True, text=True, timeout=180, cwd=root
    )
    assert alone.returncode == ranks.returncode == 0, ranks.stderr
    assert ranks.stdout == alone.stdout and prompt in ranks.stdout
