"""Grammars: which tokens may come next, position by position over a verify window, and exactly where they stand afterwards.

Owns compilation (through llguidance) and the gate of one request: free until reasoning has ended, then a matcher that is moved by
accepted tokens and by nothing else. Works on token ids and bytes; no tensor but the unpacked mask. Called by `runtime.draw`, the
runner, and `legato.llm` (which knows the tokenizer).
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from legato.runtime.staging import to_device
from legato.types import Grammar, ParameterError

MAX_INDENT = 32
"""Between its parts JSON text may hold one space, or one line break and this much indentation: nothing that can run away."""
CACHED_GRAMMARS = 64
MAX_LENGTH = 2**20
"""Characters of a grammar. The time to compile one grows with them."""
MAX_PROPERTIES = 2000
"""Of one object of a JSON schema. Any number of them may be left out, and so any may come next: that costs time and memory."""
LIMITS = LLParserLimits(
    max_grammar_size=50_000,  # symbols; compiling takes 3 s there, and its square beyond
    max_items_in_row=5 * MAX_PROPERTIES,
    step_max_items=50 * MAX_PROPERTIES,
    verbose_errors=False,
)
"""Where a limit is met behind the start, a grammar is lost and nothing but the end is allowed: so they are wide."""
LOG = logging.getLogger(__name__)
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a grammar must know of the tokenizer: the bytes of each of W token ids (empty: never allowed), which ids are control
    tokens (allowed only where a grammar names them), which end the text, and how ordinary text is split into tokens.

    Where a grammar leaves one way to go on (a property name, say), that text is allowed in the tokenizer's own split only: the
    one that the model has been trained on."""

    tokens: tuple[bytes, ...]
    control_ids: frozenset[int]
    end_ids: tuple[int, ...]
    encode: Callable[[str], list[int]]


class _Tokens:
    """A vocabulary in the shape that llguidance reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted(vocabulary.control_ids)
        self.eos_token_id = vocabulary.end_ids[0]
        self._encode = vocabulary.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.decode("utf-8", "replace") if isinstance(text, bytes) else text)


class Grammars:
    """Compiles grammars for one vocabulary, and keeps the last few. `check` may run in a thread beside everything else."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    def knows(self, grammar: Grammar) -> bool:
        """Whether a grammar has been compiled and kept."""
        return (grammar.kind, grammar.text) in self._compiled

    def check(self, grammar: Grammar) -> None:
        """Compiles a grammar.

        Raises:
            ParameterError: it cannot be compiled, or nothing can begin under it; the message names the field and says why.
        """
        self._matcher(grammar)

    def gate(self, grammar: Grammar, generated: Sequence[int] = ()) -> Gate:
        """A new request's gate, moved past what it has generated already. Raises `ParameterError` as `check` does."""
        gate = Gate(self._matcher(grammar), self.vocabulary, grammar.after)
        gate.accept(generated)
        return gate

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        key = (grammar.kind, grammar.text)
        with self._lock:
            if (matcher := self._compiled.get(key)) is not None:
                self._compiled.move_to_end(key)
                return matcher
        matcher = self._compile(grammar)
        with self._lock:
            self._compiled[key] = matcher
            while len(self._compiled) > CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return matcher

    def _compile(self, grammar: Grammar) -> LLMatcher:
        if len(grammar.text) > MAX_LENGTH:
            raise ParameterError(
                grammar.kind,
                f"may have {MAX_LENGTH} characters, got {len(grammar.text)}: allow more, by a simpler rule",
            )
        if grammar.kind == "json_schema" and (count := most_properties(json.loads(grammar.text))) > MAX_PROPERTIES:
            raise ParameterError(grammar.kind, f"an object may have {MAX_PROPERTIES} properties, got one with {count}")
        if not self.vocabulary.end_ids:
            raise ParameterError(grammar.kind, "needs a checkpoint that names its end tokens")
        if self._tokenizer is None:
            ends = list(self.vocabulary.end_ids)
            # llguidance asks for its own base class, and reads these attributes of it.
            tokens = cast(Any, _Tokens(self.vocabulary))
            self._tokenizer = LLTokenizer(tokens, n_vocab=len(self.vocabulary.tokens), eos_token=ends)
        try:
            matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0, limits=LIMITS)
        except ValueError as error:
            raise ParameterError(grammar.kind, str(error)) from error
        if matcher.is_error():
            raise ParameterError(grammar.kind, matcher.get_error().strip())
        if (fault := self._fault_at_start(matcher)) is not None:
            raise ParameterError(grammar.kind, f"nothing that fits it can be generated ({fault})")
        return matcher

    def _fault_at_start(self, matcher: LLMatcher) -> str | None:
        """Why nothing can begin: a grammar may compile that has no first token, or is lost behind the only one that it has."""
        start = matcher.deep_copy()
        mask = int.from_bytes(start.compute_bitmask(), "little")
        only = mask.bit_length() - 1
        if not start.is_error() and mask == 1 << only and only not in self.vocabulary.end_ids:
            start.consume_token(only)
        return start.get_error().splitlines()[0] if start.is_error() else None


def most_properties(schema: object) -> int:
    """The number of properties of the object that has the most, anywhere in a JSON schema."""
    most, found = 0, [schema]
    while found:
        match found.pop():
            case dict() as fields:
                properties = fields.get("properties")
                most = max(most, len(properties) if isinstance(properties, dict) else 0)
                found += fields.values()
            case list() as items:
                found += items
            case _:
                pass
    return most


def _source(grammar: Grammar) -> str:
    if grammar.kind == "json_schema":
        bounded = {"whitespace_pattern": rf" |\r?\n[ \t]{{0,{MAX_INDENT}}}", "whitespace_flexible": True}
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=cast(Any, bounded))
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(grammar.text)


class Gate:
    """The grammar of one request and where it stands: behind exactly the tokens that were accepted.

    Before `after` has been seen all ordinary tokens are allowed, and the matcher sees nothing of them. Of control tokens only
    `after` is: neither can the answer end there, nor can a part of it begin.
    """

    def __init__(self, compiled: LLMatcher, vocabulary: Vocabulary, after: int | None) -> None:
        self._compiled, self._vocabulary, self._after = compiled, vocabulary, after
        self._matcher = compiled.deep_copy()
        self._is_open, self._is_lost = after is not None, False
        self._seen: list[int] = []

    @property
    def is_open(self) -> bool:
        """Whether the grammar has not begun."""
        return self._is_open

    def accept(self, tokens: Sequence[int]) -> None:
        """Moves on by what was emitted. End ids end the request and do not concern the grammar."""
        for token in tokens:
            if token in self._vocabulary.end_ids:
                return
            if self._is_open:
                self._is_open = token != self._after
                continue
            self._seen.append(token)
            if not self._is_lost and not self._matcher.consume_token(token):
                LOG.warning("grammar lost at token %d: %s", len(self._seen), self._matcher.get_error().strip())
                self._is_lost = True

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """Bit masks of the allowed tokens: before the first draft, behind the first, and so on, up to the first illegal one.

        Bit i % 8 of byte i // 8 is token i. The gate stands where it stood when this returns.
        """
        masks, consumed, is_open = [self._mask(self._is_open)], 0, self._is_open
        for token in drafts:
            if token in self._vocabulary.end_ids:
                break
            if is_open:
                is_open = token != self._after
            elif self._is_lost or self._matcher.is_stopped() or self._matcher.try_consume_tokens([token]) != 1:
                break
            else:
                consumed += 1
            masks.append(self._mask(is_open))
        stepped_back = not consumed or self._matcher.rollback(consumed)
        if not self._is_lost and (not stepped_back or self._matcher.is_error()):
            self._rebuild()
        return masks

    def _mask(self, is_open: bool) -> bytes:
        if not is_open and not self._is_lost and not self._matcher.is_error():
            return self._matcher.compute_bitmask()
        return self._free if is_open else self._only_end

    @cached_property
    def _free(self) -> bytes:
        """All tokens but end ids and control tokens other than `after`."""
        mask = bytearray(b"\xff" * self._mask_size)
        for token in (self._vocabulary.control_ids | set(self._vocabulary.end_ids)) - {self._after}:
            mask[token // 8] &= ~(1 << token % 8)
        return bytes(mask)

    @cached_property
    def _only_end(self) -> bytes:
        """Behind an error nothing but the end is left."""
        mask = bytearray(self._mask_size)
        for token in self._vocabulary.end_ids:
            mask[token // 8] |= 1 << token % 8
        return bytes(mask)

    @property
    def _mask_size(self) -> int:
        return -(-len(self._vocabulary.tokens) // 8)

    def _rebuild(self) -> None:
        """Back to the accepted tokens by the long way, where the matcher cannot step back (a limit was hit on the way)."""
        self._matcher = self._compiled.deep_copy()
        self._matcher.try_consume_tokens(self._seen)


def allowed_tokens(masks: Sequence[bytes], vocab_size: int, device: torch.device = _CPU) -> Tensor:
    """Bit masks as a tensor [n, W] of bool on `device`, which unpacks them; tokens past the end of a mask are not allowed."""
    size = -(-vocab_size // 8)
    data = bytearray(b"".join(mask[:size].ljust(size, b"\0") for mask in masks))
    packed = to_device(torch.frombuffer(data, dtype=torch.uint8), device).view(len(masks), size, 1)
    bits = (packed >> torch.arange(8, dtype=torch.uint8, device=device)) & 1
    return bits.view(len(masks), size * 8)[:, :vocab_size].bool()
