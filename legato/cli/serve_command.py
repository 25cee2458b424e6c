"""How `legato serve` reads its words: own flags, the flags of SGLang and vLLM, and a YAML file; the command line wins.

Owns the order of these and every complaint about a flag, each with what was probably meant. Imports no torch. Called by typer for
the `serve` command of `legato.__main__`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from typer.core import TyperArgument, TyperCommand, TyperOption

from legato.cli import aliases
from legato.cli.aliases import Pair
from legato.config import ConfigError

CONFIG = "--config"
SEVERAL_VALUES = ("served_model_name", "api_key")
"""Parameters that vLLM lets several words follow."""


@dataclass(slots=True)
class Words:
    """What the words of one source say: own flags in order and the word that each came from, the flags about drafts, and
    positional words."""

    pairs: list[Pair] = field(default_factory=list[Pair])
    spelled: list[str] = field(default_factory=list[str])
    speculative: dict[str, str] = field(default_factory=dict[str, str])
    positional: list[str] = field(default_factory=list[str])

    def settled(self) -> list[Pair]:
        """Own flags only, those about drafts among them. Raises `ConfigError` where they contradict one another."""
        said = aliases.drafts(self.speculative)
        if said and any(name == said[0][0] for name, _ in self.pairs):
            raise ConfigError(f"{said[0][0]} and {next(iter(self.speculative))} say the same thing: give one of them")
        return self.pairs + said


class ServeCommand(TyperCommand):
    """The command behind `legato serve`: the words are arranged first, and then parsed as typer parses any command's."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Arranges and parses. Raises `ConfigError` for anything that cannot be honoured."""
        if "--help" in args:
            return super().parse_args(ctx, ["--help"])
        reader = Reader([param for param in self.params if isinstance(param, TyperOption)])
        words = reader.words(args)
        pairs, given = words.settled(), words.positional
        files = [value for name, value in pairs if name == CONFIG]
        pairs = [pair for pair in pairs if pair[0] != CONFIG]
        if len(files) > 1:
            raise ConfigError(f"{CONFIG} can be given once, got {len(files)}")
        if files:
            said = {reader.options[name].name for name, _ in pairs} | ({"model_flag"} if given else set())
            kept = [pair for pair in reader.file(str(files[0])) if reader.options[pair[0]].name not in said]
            pairs = kept + pairs
        models = [*given, *(value for name, value in pairs if name == "--model")]
        if len(given) > 1 or (given and len(models) > 1):
            raise ConfigError(f"one model can be served, got {' and '.join(map(str, models))}")
        flat = [name if value is None else f"{name}={value}" for name, value in pairs]
        return super().parse_args(ctx, [*flat, *(["--", *given] if given else [])])

    def own_flags(self) -> set[str]:
        """The spellings that `--help` lists."""
        options = [param for param in self.params if not isinstance(param, TyperArgument)]
        return {name for param in options for name in (*param.opts, *param.secondary_opts)}


class Reader:
    """Turns words into own flags, with the options of the command as the list of what is known."""

    def __init__(self, options: Sequence[TyperOption]) -> None:
        self.options = {name: option for option in options for name in (*option.opts, *option.secondary_opts)}

    def words(self, args: Sequence[str]) -> Words:
        """What a command line says. Raises `ConfigError`."""
        words, rest = Words(), iter(args)
        last: TyperOption | None = None
        for word in rest:
            if word == "--":
                words.positional += rest
            elif word.startswith("-") and word != "-":
                last = self._flag(words, word, rest)
            elif last is not None and last.name in SEVERAL_VALUES and self._has_model(words):
                words.pairs.append((last.opts[0], word))
                words.spelled.append(word)
            else:
                words.positional.append(word)
        self.check_once(words)
        return words

    def file(self, path: str) -> list[Pair]:
        """What a YAML file says: flags without their dashes, `_` as good as `-`. Raises `ConfigError` with the file's name."""
        words = Words()
        for key, value in _entries(path):
            name = "--" + key.replace("_", "-")
            try:
                if name == CONFIG:
                    raise ConfigError("a configuration file cannot name another")
                for entry in self._as_words(name, value):
                    self._flag(words, entry, iter(()))
            except ConfigError as error:
                raise ConfigError(f"{path}: {key}: {error}") from error
        try:
            self.check_once(words)
            return words.settled()
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def _flag(self, words: Words, word: str, rest: Iterator[str]) -> TyperOption | None:
        """Adds one flag, with its value from behind `=` or from `rest`; returns the own option that it is, if it is one."""
        name, equals, inline = word.partition("=")
        if name.startswith("--"):
            head, dot, tail = name.partition(".")
            name = head.replace("_", "-") + dot + tail
        elif name not in self.options and name not in aliases.ALIASES and name[:2] in self.options:
            name, equals, inline = name[:2], "=", word[2:].removeprefix("=")
        option = self.options.get(name)
        if (option is not None and option.is_flag) or name in aliases.SWITCHES:
            if equals:
                raise ConfigError(f"{name} takes no value, got {inline}")
            words.pairs += [(name, None)] if option is not None else aliases.SWITCHES[name]
            words.spelled += [name] * (len(words.pairs) - len(words.spelled))
        elif option is not None or name in aliases.ALIASES or aliases.is_speculative(name):
            value = inline if equals else next(rest, None)
            if value is None:
                raise ConfigError(f"{name} needs a value")
            self._add(words, name, value)
            words.spelled += [f"{name} {value}"] * (len(words.pairs) - len(words.spelled))
        elif reason := aliases.reason_against(name):
            raise ConfigError(f"{name} is not supported: {reason}")
        else:
            raise ConfigError(f"no such flag: {name}{self._suggestion(name)}")
        return option

    def _add(self, words: Words, name: str, value: str) -> None:
        if name in self.options:
            words.pairs.append((self.options[name].opts[0], value))
        elif name in aliases.ALIASES:
            words.pairs += aliases.ALIASES[name](name, value)
        else:
            if words.speculative.get(name, value) != value:
                raise ConfigError(f"{name} {words.speculative[name]} and {name} {value}: give one of them")
            words.speculative[name] = value

    def check_once(self, words: Words) -> None:
        """Raises `ConfigError` where a flag that has one value is given two, be it under two names."""
        said: dict[str, tuple[Any, str]] = {}
        for (name, value), word in zip(words.pairs, words.spelled, strict=True):
            option = self.options[name]
            if option.multiple:
                continue
            meant = (name in option.opts) if value is None else value
            before, first = said.setdefault(str(option.name), (meant, word))
            if before != meant:
                raise ConfigError(f"{first} and {word} contradict each other: give one of them")

    def _has_model(self, words: Words) -> bool:
        return bool(words.positional) or any(name == "--model" for name, _ in words.pairs)

    def _suggestion(self, name: str) -> str:
        """What was probably meant, among the flags that would work."""
        known = [*self.options, *aliases.ALIASES, *aliases.SWITCHES, *aliases.SPECULATIVE]
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.7)
        return f"; did you mean {' or '.join(close)}?" if close else "; legato serve --help lists them"

    def _as_words(self, name: str, value: Any) -> list[str]:
        """A value of YAML as it would be written on a command line."""
        option = self.options.get(name)
        if value is None:
            return []
        if isinstance(value, bool):
            return [self._switch(name, value)]
        if isinstance(value, list):
            if (option is None or not option.multiple) and name != "--allowed-origins":
                raise ConfigError("takes one value, got a list")
            items = cast(list[Any], value)
            return [f"{name}={json.dumps(items)}"] if option is None else [f"{name}={item}" for item in items]
        if isinstance(value, dict):
            if name == "--op":
                return [f"{name}={key}={item}" for key, item in value.items()]
            if name == "--speculative-config":
                return [f"{name}={json.dumps(value)}"]
            raise ConfigError("takes one value, got a mapping")
        return [f"{name}={value}"]

    def _switch(self, name: str, value: bool) -> str:
        """A flag that YAML turns on or off."""
        option = self.options.get(name)
        if name in aliases.ALIASES or aliases.is_speculative(name) or (option is not None and not option.is_flag):
            raise ConfigError(f"takes a value, got {str(value).lower()}")
        if value or (option is None and name not in aliases.SWITCHES):
            return name
        opposites = {"--no-" + name.removeprefix("--")}
        if option is not None:
            opposites = {*(option.secondary_opts if name in option.opts else option.opts)}
        if known := opposites & {*self.options, *aliases.SWITCHES}:
            return min(known)
        raise ConfigError("cannot be turned off; leave it out")


def _entries(path: str) -> list[tuple[str, Any]]:
    """The top-level entries of a YAML file. Raises `ConfigError`: it cannot be read, is no mapping, or names a key twice."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"{CONFIG} {path}: {why}") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{CONFIG} {path}: is not valid YAML: {' '.join(str(error).split())}") from error
    if node is None or value is None:
        return []
    if not isinstance(node, yaml.MappingNode) or not isinstance(value, dict):
        raise ConfigError(f"{CONFIG} {path}: must be a mapping of flags to values, such as port: 30000")
    keys = [str(key.value) for key, _ in node.value]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"{CONFIG} {path}: {twice[0]} stands there twice")
    return [(str(key), item) for key, item in cast(dict[Any, Any], value).items()]
