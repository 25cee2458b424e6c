"""What is asked: sessions of one or more turns, from a file, from the shipped held-out code, or made up with a stated entropy.

Owns the sources and their errors. Knows no server; lengths are in characters, because each server counts tokens in its own way
(the result reports the server's own count). Called by `legato.bench.load.run`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgspec

from legato.checkpoints import HELD_OUT
from legato.config import ConfigError

RANDOM_BITS = 16.0
MOST_BITS = 16.0
CHARACTERS_PER_TOKEN = 4
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation: `turns` are what the user says, one after another, each after the server's reply to the one before.

    `system` opens it (shared by all sessions of an agent trace, so that a prefix cache has something to find).
    """

    turns: tuple[str, ...]
    system: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where sessions come from, as `--prompts` names it.

    Attributes:
        name: "held-out", "synthetic", "random", "agents", or a file.
        input_tokens: about so long a turn, at `CHARACTERS_PER_TOKEN`, where the source can choose; `None`: as it comes.
        entropy_bits: of each synthetic word.
        turns: of each agent session.
        seed: of every choice; the same seed gives the same sessions.
    """

    name: str
    input_tokens: int | None = None
    entropy_bits: float = 8.0
    turns: int = 10
    seed: int = 0

    @property
    def is_random(self) -> bool:
        """Whether the text is noise: a model can neither write nor predict it, and accept lengths over it mean nothing."""
        return self.name == "random"

    @property
    def label(self) -> str:
        """As tables name it, with what it takes to repeat it."""
        match self.name:
            case "synthetic":
                return f"synthetic, {self.entropy_bits:g} bits per word, seed {self.seed}"
            case "agents":
                return f"agent traces of {self.turns} turns, seed {self.seed}"
            case "random":
                return f"random words, {RANDOM_BITS:g} bits each, seed {self.seed}"
            case "held-out":
                return f"held-out code, seed {self.seed}"
            case _:
                return f"{Path(self.name).name}, seed {self.seed}"

    def sessions(self, count: int) -> list[Session]:
        """The first `count` sessions.

        Raises:
            ConfigError: the file is missing, empty or not of the described form, or a number is out of range.
        """
        draw = random.Random(f"{self.name} {self.seed}")
        match self.name:
            case "synthetic" | "random":
                bits = RANDOM_BITS if self.is_random else self.entropy_bits
                words = _vocabulary(bits)
                return [Session((_words(words, self._length(2000), draw),)) for _ in range(count)]
            case "agents":
                return [self._agent(number, draw) for number in range(count)]
            case _:
                path = HELD_OUT if self.name == "held-out" else Path(self.name)
                return [self._cut(session, draw) for session in _repeat(_read(path), count, draw)]

    def _length(self, default: int) -> int:
        return default if self.input_tokens is None else CHARACTERS_PER_TOKEN * self.input_tokens

    def _cut(self, session: Session, draw: random.Random) -> Session:
        """A session of one turn brought to the length that is asked for, with further text from the held-out code."""
        if self.input_tokens is None or len(session.turns) != 1:
            return session
        (text,) = session.turns
        wanted = CHARACTERS_PER_TOKEN * self.input_tokens
        if len(text) < wanted:
            pieces = _held_out()
            while len(text) < wanted:
                text = draw.choice(pieces) + "\n\n" + text
        return Session((text[-wanted:],), session.system)

    def _agent(self, number: int, draw: random.Random) -> Session:
        """One coding agent at work: a long system prompt that all share, then turns that bring a file or a tool's output."""
        pieces = _held_out()
        shared = random.Random(f"agents {self.seed}")
        system = "You are a coding agent. The repository:\n\n" + "\n\n".join(shared.sample(pieces, min(8, len(pieces))))
        length = self._length(600)
        turns = [f"Session {number}. Read this file and continue it:\n\n{draw.choice(pieces)[:length]}"]
        turns += [f"The tool printed:\n\n{draw.choice(pieces)[:length]}\n\nGo on." for _ in range(self.turns - 1)]
        return Session(tuple(turns), system)

    def __post_init__(self) -> None:
        if self.name == "synthetic" and not 0 < self.entropy_bits <= MOST_BITS:
            raise ConfigError(f"--entropy must be above 0 and at most {MOST_BITS:g} bits, got {self.entropy_bits:g}")
        if self.turns < 1:
            raise ConfigError(f"--turns must be at least 1, got {self.turns}")
        if self.input_tokens is not None and self.input_tokens < 1:
            raise ConfigError(f"--input-tokens must be at least 1, got {self.input_tokens}")


@cache
def _held_out() -> tuple[str, ...]:
    """The shipped held-out texts, read once."""
    return tuple(piece for session in _read(HELD_OUT) for piece in session.turns)


def _vocabulary(bits: float) -> list[str]:
    """2^bits different pronounceable words: drawn uniformly, each carries `bits` bits."""
    count = max(1, round(2**bits))
    syllables = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    words: list[str] = []
    for number in range(count):
        word, rest = "", number
        while not word or rest:
            rest, syllable = divmod(rest, len(syllables))
            word += syllables[syllable]
        words.append(word)
    # "ba" is 0, "baba" would be 0 again: numbers are written least significant syllable first, without leading zeros.
    return words


def _words(vocabulary: Sequence[str], characters: int, draw: random.Random) -> str:
    text = draw.choice(vocabulary)
    while len(text) < characters:
        text += " " + draw.choice(vocabulary)
    return text[:characters]


def _repeat(sessions: Sequence[Session], count: int, draw: random.Random) -> Iterator[Session]:
    """`count` sessions in random order; each is used once before any is used again."""
    order: list[Session] = []
    for _ in range(count):
        if not order:
            order = draw.sample(sessions, len(sessions))
        yield order.pop()


def _read(path: Path) -> list[Session]:
    """JSON lines, each `{"text": ...}`, `{"prompt": ...}` or `{"messages": [...]}`; any other file: one prompt per line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"--prompts {path}: cannot be read: {reason}; give a file, held-out, synthetic, agents or random"
        ) from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigError(f"--prompts {path}: holds no prompt")
    if path.suffix not in (".jsonl", ".json"):
        return [Session((line,)) for _, line in numbered]
    return [_parsed(path, number, line) for number, line in numbered]


def _parsed(path: Path, number: int, line: str) -> Session:
    where = f"--prompts {path}, line {number}"
    try:
        value: Any = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: is not JSON ({error})") from error
    if isinstance(value, Mapping):
        fields = cast(Mapping[str, Any], value)
        for name in ("text", "prompt"):
            if isinstance(fields.get(name), str) and fields[name]:
                return Session((fields[name],))
        messages = fields.get("messages")
        if isinstance(messages, list):
            return _conversation(cast("list[Any]", messages), where)
    raise ConfigError(f"{where}: must be an object with text, prompt or messages")


def _conversation(messages: list[Any], where: str) -> Session:
    """Users' messages become turns; replies in the file are left out, because the server gives its own."""
    system: str | None = None
    turns: list[str] = []
    for message in messages:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not isinstance(content, str):
            raise ConfigError(f"{where}: every message needs a role and text content")
        if role == "system":
            system = content
        elif role == "user":
            turns.append(content)
    if not turns:
        raise ConfigError(f"{where}: has no message of a user")
    return Session(tuple(turns), system)
