"""The memory that the ranks of a host share: the plans, one after the other, and each rank's signs of life.

Owns the layout, and the hash that says whether a rank has read every plan as it was written. Must not know what a plan is: it
carries bytes. Imports no torch. Called by `lead`, `follow` and `watch`.

Layout, in pages of 4096 bytes: page 0 is rank 0's word to all; one page of signs for each rank; then the slots. A step is one
slot, or as many as it needs; slots are of one size and used in turn. A slot's sequence number is written last, and its hash
covers all steps before it too: a rank that has missed or misread one can agree with nothing that follows.

Words that one process writes while others read are stored and loaded whole, through a view of 8-byte words: `struct` writes
them byte by byte after a zero, and a reader would see times and counts that never were.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

PAGE = 4096
SLOT_BYTES = 16384
NUM_SLOTS = 128
DIGEST_BYTES = 16
_HEADER = struct.Struct("<QIII")
"""Of a slot: sequence, part, parts, length; the digest follows."""
PAYLOAD_AT = _HEADER.size + DIGEST_BYTES
PAYLOAD_BYTES = SLOT_BYTES - PAYLOAD_AT
_TEXT_AT, _TEXT_BYTES = 256, 2048
_OUTCOME_AT = 128

MISREAD_S = 0.5
"""How long a slot whose hash is wrong is read again: its bytes may still be on their way."""


class BoardError(RuntimeError):
    """Memory cannot be shared here, or what was read from it is not what was written."""


class Signs:
    """One rank's page: written by that rank, read by all.

    Words: process id, time of the last beat (ns, monotonic: one clock for the host), slots read, collectives entered, and the
    number of the last settled step with a digest of what it brought.
    """

    def __init__(self, memory: mmap.mmap, words: memoryview[int], at: int) -> None:
        self.memory, self.words, self.at = memory, words, at

    def _get(self, word: int) -> int:
        return self.words[self.at // 8 + word]

    def _set(self, word: int, value: int) -> None:
        self.words[self.at // 8 + word] = value

    @property
    def pid(self) -> int:
        return self._get(0)

    @pid.setter
    def pid(self, value: int) -> None:
        self._set(0, value)

    @property
    def beat_ns(self) -> int:
        return self._get(1)

    def beat(self) -> None:
        """A sign of life, now."""
        self._set(1, time.monotonic_ns())

    @property
    def taken(self) -> int:
        """Slots read."""
        return self._get(2)

    @taken.setter
    def taken(self, value: int) -> None:
        self._set(2, value)

    @property
    def collectives(self) -> int:
        """Collectives entered."""
        return self._get(3)

    @collectives.setter
    def collectives(self, value: int) -> None:
        self._set(3, value)

    @property
    def outcome(self) -> tuple[int, bytes]:
        """The last settled step and the digest of what it brought; read twice, since the two are not one word."""
        while True:
            start = self.at + _OUTCOME_AT
            number = self._get(_OUTCOME_AT // 8)
            digest = bytes(self.memory[start + 8 : start + 8 + DIGEST_BYTES])
            if number == self._get(_OUTCOME_AT // 8):
                return number, digest

    def settle(self, number: int, digest: bytes) -> None:
        start = self.at + _OUTCOME_AT
        self._set(_OUTCOME_AT // 8, 0)
        self.memory[start + 8 : start + 8 + DIGEST_BYTES] = digest
        self._set(_OUTCOME_AT // 8, number)

    @property
    def fault(self) -> str:
        """Why this rank gave up; empty while it has not."""
        length = self._get(_TEXT_AT // 8)
        start = self.at + _TEXT_AT + 8
        return bytes(self.memory[start : start + length]).decode(errors="replace")

    def give_up(self, reason: str) -> None:
        data = reason.encode()[:_TEXT_BYTES]
        start = self.at + _TEXT_AT + 8
        self.memory[start : start + len(data)] = data
        self._set(_TEXT_AT // 8, len(data))


class Board:
    """The shared memory of `num_ranks` ranks. Made by rank 0, opened by the others by its path."""

    def __init__(self, descriptor: int, memory: mmap.mmap, num_ranks: int) -> None:
        self._descriptor, self._memory = descriptor, memory
        self._words = memoryview(memory).cast("Q")
        self.num_ranks = num_ranks
        self._digest = bytes(DIGEST_BYTES)
        self._sequence = 0

    @staticmethod
    def create(num_ranks: int) -> Board:
        """New memory without a name: it goes when the last process that has it goes. Raises BoardError."""
        if sys.platform != "linux":
            raise BoardError(f"several ranks share memory through Linux's memfd; this is {sys.platform}")
        descriptor = os.memfd_create("legato-ranks")
        os.ftruncate(descriptor, _size(num_ranks))
        board = Board(descriptor, mmap.mmap(descriptor, _size(num_ranks)), num_ranks)
        board.signs(0).pid = os.getpid()
        return board

    @staticmethod
    def open(path: str, num_ranks: int) -> Board:
        """The memory that rank 0 has made. Raises BoardError where it is not there, or is that of another number of ranks."""
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError as error:
            raise BoardError(f"rank 0's memory cannot be opened: {path}: {error.strerror}") from error
        if (found := Path(path).stat().st_size) != _size(num_ranks):
            raise BoardError(f"rank 0's memory has {found} bytes, {num_ranks} ranks need {_size(num_ranks)}")
        return Board(descriptor, mmap.mmap(descriptor, found), num_ranks)

    @property
    def path(self) -> str:
        """By which processes of the same user open it, as long as this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def signs(self, rank: int) -> Signs:
        return Signs(self._memory, self._words, PAGE * (1 + rank))

    @property
    def published(self) -> int:
        """Slots written by rank 0 so far."""
        return self._words[0]

    @property
    def is_closed(self) -> bool:
        """Rank 0 needs no one any more."""
        return self._words[1] != 0

    def close(self) -> None:
        """Rank 0 needs no one any more: the others leave."""
        self._words[1] = 1

    @property
    def is_guarded(self) -> bool:
        """Rank 0 is to be ended when it hangs: someone waits for its end. Else it may have been suspended by its user."""
        return self._words[2] != 0

    def guard(self) -> None:
        """Rank 0 is to be ended when it hangs."""
        self._words[2] = 1

    def publish(self, step: bytes, pause: Callable[[], None]) -> None:
        """Writes a step for all other ranks. Calls `pause` while a rank has not read what its slots still hold; `pause` may
        raise."""
        parts = [step[first : first + PAYLOAD_BYTES] for first in range(0, len(step), PAYLOAD_BYTES)] or [b""]
        for part, payload in enumerate(parts):
            while self._sequence - min(self.signs(rank).taken for rank in range(1, self.num_ranks)) >= NUM_SLOTS:
                pause()
            self._digest = chained(self._digest, payload)
            start = self._slot(self._sequence)
            self._sequence += 1
            _HEADER.pack_into(self._memory, start, 0, part, len(parts), len(payload))
            self._memory[start + _HEADER.size : start + PAYLOAD_AT + len(payload)] = self._digest + payload
            self._words[start // 8] = self._sequence
            self._words[0] = self._sequence

    def take(self, rank: int, pause: Callable[[], None]) -> bytes:
        """The next step, waiting for it: calls `pause`, which may raise, until it is there.

        Raises BoardError where what is read does not continue what was read before.
        """
        step = bytearray()
        while True:
            start = self._slot(self._sequence)
            while self._words[start // 8] != self._sequence + 1:
                pause()
            part, parts, payload = self._read(start)
            self._sequence += 1
            self.signs(rank).taken = self._sequence
            step += payload
            if part == parts - 1:
                return bytes(step)

    def _read(self, start: int) -> tuple[int, int, bytes]:
        began = time.monotonic()
        while True:
            _, part, parts, length = _HEADER.unpack_from(self._memory, start)
            data = bytes(self._memory[start + _HEADER.size : start + PAYLOAD_AT + min(length, PAYLOAD_BYTES)])
            digest, payload = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
            if digest == chained(self._digest, payload):
                self._digest = digest
                return part, parts, payload
            if time.monotonic() - began > MISREAD_S:
                raise BoardError(f"step {self._sequence + 1} does not continue what this rank has read: hashes differ")
            time.sleep(0.001)

    def _slot(self, sequence: int) -> int:
        return PAGE * (1 + self.num_ranks) + SLOT_BYTES * (sequence % NUM_SLOTS)


def chained(before: bytes, payload: bytes) -> bytes:
    """The hash of everything up to and including `payload`, from that of everything before it."""
    return hashlib.blake2b(before + payload, digest_size=DIGEST_BYTES).digest()


def _size(num_ranks: int) -> int:
    return PAGE * (1 + num_ranks) + SLOT_BYTES * NUM_SLOTS
