"""The tokenizer: text to token ids and back, from `tokenizer.json` alone.

Owns the border between text and control tokens: text from a user can never become a control token, only a chat template can
write one. Knows nothing of messages, templates or the model. `server.text.chat_template` and `server.text.stream` build on it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, cast

import tokenizers

TOKENIZER_FILE = "tokenizer.json"

GUARD = "\udfff"
"""A lone surrogate: it can stand in a Python string but in no UTF-8 text, so nobody can send it."""

TAGS = frozenset(
    {
        "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
        "<tool_response>", "</tool_response>",
    }
)  # fmt: skip
"""Control tokens that structure an answer: they stay visible in decoded text, however the tokenizer marks them."""


class TokenizerError(ValueError):
    """The tokenizer files of a model cannot be used. The message names the file and what to do."""


class TextFiles(Protocol):
    """Where the small files of a checkpoint are. `label` says where, for messages."""

    @property
    def label(self) -> str: ...

    def text(self, name: str) -> str | None:
        """The content of a file, or `None` where there is no such file."""
        ...


class Folder:
    """The files of a local directory."""

    def __init__(self, path: Path) -> None:
        self.label = str(path)
        self._path = path

    def text(self, name: str) -> str | None:
        """The content of a file, or `None` where there is no such file. Raises `TokenizerError` if it cannot be read."""
        try:
            return (self._path / name).read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{self._path / name}: cannot be read ({error})") from error


def json_object(files: TextFiles, name: str) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no such file.

    Raises:
        TokenizerError: the file holds no JSON object.
    """
    text = files.text(name)
    if text is None:
        return {}
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise TokenizerError(f"{files.label}/{name}: is not valid JSON ({error}); is the download complete?") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{files.label}/{name}: holds a JSON {type(value).__name__}, not an object")
    return cast(dict[str, Any], value)


def well_formed(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates replaced by U+FFFD, so that it has a UTF-8 form."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


class Tokenizer:
    """Byte-level BPE of one checkpoint.

    Ordinary text goes through a tokenizer that does not know the control tokens, so `<|user|>` typed by a user is split into
    ordinary tokens. Control tokens come from `encode_template` only. Single-character added tokens count as ordinary text.

    Attributes:
        control: every added token, text to id.
        stop_ids: ids that end a generation, from `generation_config.json` and `config.json` (either may hold them).
        names: the named special tokens of `tokenizer_config.json`, such as `eos_token`.
    """

    def __init__(
        self, description: Mapping[str, Any], stop_ids: Iterable[int] = (), names: Mapping[str, str] | None = None
    ):
        """Builds the tokenizer from the parsed `tokenizer.json`.

        Raises:
            TokenizerError: it is no byte-level BPE, or the tokenizers library refuses it.
        """
        if not _is_byte_level(description.get("decoder")):
            raise TokenizerError("only byte-level BPE is supported (decoder type ByteLevel)")
        added = [token for token in description.get("added_tokens") or [] if len(token["content"]) > 1]
        self.control: dict[str, int] = {token["content"]: token["id"] for token in added}
        self.stop_ids = frozenset(stop_ids)
        self.names = dict(names or {})
        hidden = (token["id"] for token in added if token.get("special") and token["content"] not in TAGS)
        self._bytes: dict[int, bytes] = dict.fromkeys(hidden, b"")
        self._text_of_control = {index: text for text, index in self.control.items()}
        try:
            self._plain = tokenizers.Tokenizer.from_str(json.dumps(_without_control(description, self.control)))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(str(error)) from error
        ordinary = self._plain.get_vocab_size(with_added_tokens=True)
        self.vocab_size = max([ordinary, *(index + 1 for index in self.control.values())])

    @classmethod
    def open(cls, files: TextFiles) -> Tokenizer:
        """The tokenizer of a checkpoint. `tokenizer.json` is enough; the other files are read if present.

        Raises:
            TokenizerError: there is no `tokenizer.json`, or a file is damaged.
        """
        description = json_object(files, TOKENIZER_FILE)
        where = f"{files.label}/{TOKENIZER_FILE}"
        if not description:
            raise TokenizerError(
                f"{where}: no such file, or an empty one; copy the {TOKENIZER_FILE} of the checkpoint there"
            )
        stop_ids, names = _stop_ids(files), _names(files)
        try:
            tokenizer = cls(description, stop_ids, names)
        except (TokenizerError, KeyError, TypeError) as error:
            reason = error if isinstance(error, TokenizerError) else f"missing or odd field {error}"
            raise TokenizerError(f"{where}: is not the file of a usable tokenizer: {reason}") from error
        for index, origin in stop_ids.items():
            if index >= tokenizer.vocab_size:
                raise TokenizerError(
                    f"{origin}: eos_token_id {index} is none of the {tokenizer.vocab_size} tokens of {TOKENIZER_FILE}: do these "
                    "files belong together?"
                )
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of ordinary text: control tokens in it are split like any other text, and nothing is added."""
        return list(self._plain.encode(well_formed(text), add_special_tokens=False).ids)

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a whole prompt of ordinary text: `encode` and the ids that the tokenizer's post-processor puts around it."""
        return list(self._plain.encode(well_formed(text), add_special_tokens=True).ids)

    def guard(self, text: str) -> str:
        """`text` marked so that no part of it becomes, or takes part in, a control token in `encode_template`.

        `GUARD` characters are put behind each character that a control token can start with and before each that one can end
        with. They are no whitespace, so templates may strip, split and join guarded strings; `encode_template` removes them.
        """
        before, after = self._closers, self._openers
        return self._hazards.sub(
            lambda match: (GUARD if match[0] in before else "") + match[0] + (GUARD if match[0] in after else ""),
            well_formed(text),
        )

    def encode_template(self, rendered: str) -> list[int]:
        """Ids of a rendered template: control tokens outside guarded text become their ids, the rest is ordinary text."""
        ids: list[int] = []
        for piece in self._control_pattern.split(rendered):
            if piece in self.control:
                ids.append(self.control[piece])
            elif piece:
                ids += self.encode(piece.replace(GUARD, ""))
        return ids

    def token_bytes(self, index: int) -> bytes:
        """The bytes that token `index` stands for: empty for hidden control tokens and for ids that the tokenizer lacks."""
        known = self._bytes.get(index)
        if known is None:
            known = self._bytes[index] = self._look_up(index)
        return known

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` without hidden control tokens; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def control_text(self, index: int) -> str | None:
        """The text of a control token, or `None` for an ordinary one."""
        return self._text_of_control.get(index)

    def _look_up(self, index: int) -> bytes:
        control = self._text_of_control.get(index)
        if control is not None:
            return control.encode()
        token = self._plain.id_to_token(index) if index >= 0 else None
        return b"" if token is None else bytes(map(_BYTE_OF.__getitem__, token))

    @cached_property
    def _openers(self) -> frozenset[str]:
        return frozenset(text[0] for text in self.control)

    @cached_property
    def _closers(self) -> frozenset[str]:
        return frozenset(text[-1] for text in self.control)

    @cached_property
    def _hazards(self) -> re.Pattern[str]:
        characters = self._openers | self._closers
        return re.compile(f"[{''.join(map(re.escape, sorted(characters)))}]" if characters else r"(?!)")

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        longest_first = sorted(self.control, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})" if longest_first else r"((?!))")


def _byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet of GPT-2: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    fields = cast(dict[str, Any], decoder)
    if fields.get("type") == "Sequence":
        return any(map(_is_byte_level, fields.get("decoders") or []))
    return fields.get("type") == "ByteLevel"


def _without_control(description: Mapping[str, Any], control: Mapping[str, int]) -> dict[str, Any]:
    """`tokenizer.json` of a tokenizer that cannot produce a control token: neither as added token nor as whole-word entry."""
    model = dict(description["model"])
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {token: index for token, index in model["vocab"].items() if token not in control}
    kept = [token for token in description.get("added_tokens") or [] if token["content"] not in control]
    return {**description, "added_tokens": kept, "model": model, "truncation": None, "padding": None}


def _stop_ids(files: TextFiles) -> dict[int, str]:
    """The ids that end a generation, and the file that names each."""
    found: dict[int, str] = {}
    for name in ("generation_config.json", "config.json"):
        value: Any = json_object(files, name).get("eos_token_id")
        ids = cast(list[Any], value if isinstance(value, list) else [] if value is None else [value])
        where = f"{files.label}/{name}"
        if any(isinstance(index, bool) or not isinstance(index, int) or index < 0 for index in ids):
            raise TokenizerError(f"{where}: eos_token_id must be a token id or a list of them, got {value!r}")
        found |= dict.fromkeys(ids, where)
    return found


def _names(files: TextFiles) -> dict[str, str]:
    """The named tokens of tokenizer_config.json, each a string or an object with `content`. Its class is not read."""
    config = json_object(files, "tokenizer_config.json")
    names: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value: Any = config.get(key)
        text: Any = cast(dict[str, Any], value).get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            names[key] = text
    return names
