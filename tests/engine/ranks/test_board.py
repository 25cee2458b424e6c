"""The memory that ranks share: steps arrive whole, in order and unchanged, or the rank that reads them says so."""

import hashlib
import os
import random
import signal
import time

import pytest

from legato.engine.ranks.board import NUM_SLOTS, PAGE, PAYLOAD_BYTES, SLOT_BYTES, Board, BoardError, chained


def never() -> None:
    raise AssertionError("nothing is to be waited for here")


@pytest.fixture
def board() -> Board:
    return Board.create(3)


def opened(board: Board) -> Board:
    """As another process has it."""
    return Board.open(board.path, 3)


def test_steps_of_any_length_arrive_on_every_rank(board: Board) -> None:
    draw = random.Random(1)
    readers = [(1, opened(board)), (2, opened(board))]
    for length in (0, 1, 100, PAYLOAD_BYTES - 1, PAYLOAD_BYTES, PAYLOAD_BYTES + 1, 5 * PAYLOAD_BYTES + 7, 3):
        step = draw.randbytes(length)
        board.publish(step, never)
        assert [reader.take(rank, never) for rank, reader in readers] == [step, step]
    assert board.signs(1).taken == board.signs(2).taken == board.published


def test_slots_are_used_again_and_again_but_not_before_all_have_read_them(board: Board) -> None:
    quick, slow = opened(board), opened(board)
    waited = []

    def until_slow_has_read() -> None:
        waited.append(slow.take(2, never))

    steps = [f"step {number}".encode() for number in range(NUM_SLOTS + 3)]
    read = []
    for step in steps:
        board.publish(step, until_slow_has_read)
        read.append(quick.take(1, never))
    assert read == steps and waited == steps[:3]


def test_waiting_ends_when_the_step_is_there(board: Board) -> None:
    reader = opened(board)
    looks = []

    def look() -> None:
        looks.append(1)
        if len(looks) == 3:
            board.publish(b"late", never)

    assert reader.take(1, look) == b"late" and len(looks) == 3


@pytest.mark.parametrize("place", ["payload", "length", "digest"])
def test_a_step_that_was_changed_is_not_taken(board: Board, place: str) -> None:
    reader = opened(board)
    board.publish(b"first", never)
    reader.take(1, never)
    board.publish(b"second", never)
    slot = PAGE * 4 + SLOT_BYTES
    at = {"length": 16, "digest": 20, "payload": 36}[place]
    board._memory[slot + at] ^= 1
    with pytest.raises(BoardError, match="step 2 does not continue"):
        reader.take(1, never)


def test_a_step_that_was_missed_spoils_what_follows(board: Board) -> None:
    reader = opened(board)
    for step in (b"first", b"second"):
        board.publish(step, never)
    reader._sequence = 1  # as if the first had been read
    with pytest.raises(BoardError, match="step 2 does not continue"):
        reader.take(1, never)


def test_the_hash_covers_everything_before() -> None:
    assert (
        chained(chained(bytes(16), b"a"), b"b")
        == hashlib.blake2b(hashlib.blake2b(bytes(16) + b"a", digest_size=16).digest() + b"b", digest_size=16).digest()
    )


def test_signs_are_each_rank_s_own(board: Board) -> None:
    other = opened(board)
    before = time.monotonic_ns()
    other.signs(2).pid = os.getpid()
    other.signs(2).beat()
    other.signs(2).settle(7, b"0123456789abcdef")
    other.signs(2).give_up("ValueError: größer als 2048 " * 200)
    other.signs(1).collectives += 3
    assert board.signs(2).pid == os.getpid() and board.signs(2).beat_ns >= before
    assert board.signs(2).outcome == (7, b"0123456789abcdef")
    assert board.signs(2).fault.startswith("ValueError: größer") and len(board.signs(2).fault.encode()) <= 2048 + 2
    assert (board.signs(1).collectives, board.signs(1).fault, board.signs(1).pid) == (3, "", 0)


def test_memory_that_is_not_there_or_not_ours_is_refused(board: Board) -> None:
    with pytest.raises(BoardError, match="cannot be opened"):
        Board.open("/proc/self/fd/999", 3)
    with pytest.raises(BoardError, match="2 ranks need"):
        Board.open(board.path, 2)


def test_words_are_seen_whole_by_a_process_that_reads_while_another_writes(board: Board) -> None:
    writer = os.fork()
    if writer == 0:
        signs, enough = board.signs(1), time.monotonic() + 120
        while time.monotonic() < enough:
            signs.beat()
        os._exit(0)
    try:
        signs, seen, ages, until = board.signs(1), set[int](), list[int](), time.monotonic() + 60
        while (len(ages) < 1000 or len(seen) < 50) and time.monotonic() < until:
            if beat := signs.beat_ns:
                ages.append(time.monotonic_ns() - beat)
                seen.add(beat)
    finally:
        os.kill(writer, signal.SIGKILL)
        os.waitpid(writer, 0)
    assert len(ages) >= 1000 and len(seen) >= 50
    assert min(ages) >= 0 and max(ages) < 60e9, "a beat that never was"
