"""A lost rank is seen, in time, and named with its cause; one that is merely slow is not."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from legato.engine.ranks import watch as watching
from legato.engine.ranks.board import Board
from legato.engine.ranks.watch import Lags, RankLost, Watch, ended_as, hung


@pytest.fixture
def board() -> Board:
    board = Board.create(3)
    for rank in (1, 2):
        board.signs(rank).beat()
    return board


class Child:
    """A child that ends when it is told to."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.killed = False

    def poll(self) -> int | None:
        return self.code

    def kill(self) -> None:
        self.killed = True


@pytest.fixture
def children() -> dict[int, Child]:
    return {1: Child(), 2: Child()}


@pytest.fixture
def watch(board: Board, children: dict[int, Child]) -> Iterator[Watch]:
    watch = Watch(board, children)
    yield watch
    watch.close()


def within(seconds: float) -> Iterator[None]:
    """Turns of a loop that waits for something, until the time is up."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield
        time.sleep(0.01)


def lost(watch: Watch) -> str:
    """What is raised, within twenty seconds."""
    for _ in within(20):
        try:
            watch.raise_if_lost()
        except RankLost as error:
            return str(error)
    raise AssertionError("nothing was seen")


def test_nothing_is_seen_where_nothing_is(watch: Watch) -> None:
    watch.patience_s = 30
    time.sleep(0.2)
    watch.raise_if_lost()
    error = ValueError("of its own")
    assert watch.explain(error) is error


@pytest.mark.parametrize(("code", "words"), [(-9, "killed by SIGKILL"), (3, "exited with code 3")])
def test_a_death_is_named_and_the_others_are_ended(
    watch: Watch, children: dict[int, Child], code: int, words: str
) -> None:
    children[2].code = code
    assert lost(watch) == f"rank 2 is lost: {words}"
    assert children[1].killed
    assert str(watch.explain(RuntimeError("connection closed by peer"))) == f"rank 2 is lost: {words}"


def test_the_reason_that_a_rank_gives_is_told(watch: Watch, board: Board, children: dict[int, Child]) -> None:
    board.signs(1).give_up("CheckpointError: no such file")
    children[1].code = 1
    assert lost(watch) == "rank 1 failed: CheckpointError: no such file"


def test_a_rank_that_is_no_child_is_known_by_its_process(board: Board) -> None:
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    board.signs(1).pid = sleeper.pid
    watch = Watch(board, {})
    try:
        time.sleep(0.2)
        watch.raise_if_lost()
        sleeper.kill()
        assert lost(watch) == "rank 1 is lost: its process is gone"
    finally:
        watch.close()
        sleeper.kill()
        sleeper.wait()


def test_who_still_waits_after_a_loss_is_told_by_the_watch(
    watch: Watch, children: dict[int, Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "STUCK_S", 0.05)
    told: list[str] = []
    watch.on_stuck = lambda error: told.append(str(error))
    children[1].code = 0
    for _ in within(20):
        if told:
            break
    time.sleep(4 * watching.PERIOD_S)
    assert told == ["rank 1 is lost: exited with code 0"]


def test_silence_is_a_hang(board: Board) -> None:
    now = board.signs(1).beat_ns / 1e9
    assert hung(board, Lags(), 3.0, now + 2.9) is None
    assert hung(board, Lags(), 3.0, now + 3.5) == "rank 1 hangs: no sign of life for 3.5 s"


def test_a_rank_that_others_wait_for_in_a_collective_hangs(board: Board) -> None:
    lags = Lags()
    for rank, entered in enumerate((41, 41, 40)):
        board.signs(rank).collectives = entered
    assert hung(board, lags, 0.5, 100.0) is None
    assert hung(board, lags, 0.5, 100.4) is None
    assert hung(board, lags, 0.5, 100.6) == "rank 2 hangs: others have waited 0.6 s for it in collective 41"


def test_a_rank_that_lags_but_moves_does_not_hang(board: Board) -> None:
    lags = Lags()
    for moment in range(20):
        board.signs(0).collectives = board.signs(1).collectives = 10 + moment
        board.signs(2).collectives = 9 + moment
        assert hung(board, lags, 0.5, 100 + 0.4 * moment) is None
    board.signs(2).collectives = board.signs(0).collectives
    assert hung(board, lags, 0.5, 200.0) is None, "it has caught up"


def test_rank_0_may_hang_too(board: Board) -> None:
    lags = Lags()
    board.signs(1).collectives = board.signs(2).collectives = 1
    hung(board, lags, 0.5, 100.0)
    assert str(hung(board, lags, 0.5, 101.0)).startswith("rank 0 hangs: others have waited")


def test_a_step_that_is_not_taken_is_a_hang(board: Board) -> None:
    lags, reader = Lags(), Board.open(board.path, 3)
    board.publish(b"one", lambda: None)
    reader.take(1, lambda: None)
    hung(board, lags, 0.5, 100.0)
    assert hung(board, lags, 0.5, 100.6) == "rank 2 hangs: it has not taken step 1 for 0.6 s"


def test_endings_in_words() -> None:
    assert [ended_as(code) for code in (None, 0, 1, -15)] == [
        "its process is gone",
        "exited with code 0",
        "exited with code 1",
        "killed by SIGTERM",
    ]
