"""Reads the PTX that NVRTC writes: functions, their statements, registers and memory, as plain values.

Owns the grammar, so far as the compiler and our inline assembly use it. Knows neither what an opcode does nor how it runs.
Called by `program`, which makes the emulator's code of it. Source of the grammar: PTX ISA 9.0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_LABEL = re.compile(r"([\w$.%]+)\s*:(?!:)")
_REG = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.DOTALL)
_FAMILY = re.compile(r"([%\w$]+)<(\d+)>$")
_VARIABLE = re.compile(
    r"\.(?P<space>param|shared|local|global|const)\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+"
    r"(?P<name>[\w$%.]+)(?P<count>\[\d*\])?(?:\s*=\s*(?P<value>.*))?$",
    re.DOTALL,
)
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+(.*)")
_OPCODE = re.compile(r"(?:@(!?)\s*([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)
_CALL = re.compile(r"(?:\(([^)]*)\)\s*,\s*)?([\w$]+)\s*(?:,\s*\(([^)]*)\))?\s*$", re.DOTALL)

BYTES = {
    **dict.fromkeys(("b8", "u8", "s8"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 8),
    "pred": 0,
}


class PtxError(Exception):
    """PTX that this reader or the emulator does not know; the message names the line."""


@dataclass(frozen=True)
class Register:
    """A virtual register; `bytes` 0 is a predicate. `negated`: as the source of a predicate it stands behind a `!`."""

    name: str
    bytes: int
    negated: bool = False


@dataclass(frozen=True)
class Address:
    """[base + offset], perhaps with coordinates behind it. `base`: a register, the name of a variable, or None."""

    operand: Register | str | None
    offset: int
    coordinates: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Special:
    """%tid.x and its like."""

    name: str


Operand = Register | Address | Special | int | float | str | tuple["Operand", ...] | None
"""An int or a float is an immediate, a str a name, a tuple a vector, None the sink `_`."""


@dataclass(frozen=True)
class Statement:
    """One instruction: its opcode with all modifiers, operands in the order they stand, its guard, and where it stands."""

    opcode: str
    operands: tuple[Operand, ...]
    guard: Register | None
    line: int
    source: tuple[str, int] | None
    text: str


@dataclass
class Variable:
    """A piece of parameter, shared, local or global memory."""

    name: str
    space: str
    bytes: int
    align: int
    value: bytes = b""


@dataclass
class Function:
    """A kernel or a function that one calls. `labels`: name -> index of the statement that follows it."""

    name: str
    entry: bool
    parameters: list[Variable] = field(default_factory=list)
    results: list[Variable] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)


@dataclass
class Module:
    functions: dict[str, Function]
    variables: dict[str, Variable]


@dataclass
class _Scope:
    """Braces inside a function: inline assembly declares names there that others declare again."""

    number: int
    registers: dict[str, Register] = field(default_factory=dict)
    families: dict[str, int] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)


def parse(text: str) -> Module:
    """The module that `text` describes. Raises PtxError for what it does not know."""
    return _Reader(text).module()


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = re.sub(r"//[^\n]*", "", text)
        self._at, self._line = 0, 1
        self._files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', text))
        self._source: tuple[str, int] | None = None
        self._scopes = 0

    def module(self) -> Module:
        functions: dict[str, Function] = {}
        variables: dict[str, Variable] = {}
        while (piece := self._piece("module")) is not None:
            kind, text, _ = piece
            if kind == "open" and (".entry" in text or ".func" in text):
                function = self._function(text)
                functions[function.name] = function
            elif kind == "open":
                self._skip_braces()
            elif kind == "statement" and (found := _variable(text)) is not None:
                variables[found.name] = found
        return Module(functions, variables)

    def _piece(self, where: str) -> tuple[str, str, int] | None:
        """The next piece: ("statement", text before `;`), ("open", text before `{`), ("close", ""), ("label", name)."""
        text, start, begun, depth = self._text, self._at, 0, 0
        while self._at < len(text):
            c = text[self._at]
            if c == "\n":
                self._line += 1
                so_far = text[start : self._at].strip()
                if so_far.startswith((".loc", ".file", ".version", ".target", ".address_size")):
                    self._at += 1
                    self._directive(so_far)
                    start, begun = self._at, 0
                    continue
            elif not begun and not c.isspace():
                begun = self._line
            if c == ";":
                self._at += 1
                return "statement", text[start : self._at - 1].strip(), begun
            if c == ":" and where == "function" and text[self._at + 1] != ":":
                if found := _LABEL.fullmatch(text[start : self._at + 1].strip()):
                    self._at += 1
                    return "label", found[1], begun
                self._at += 1
                continue
            if c == "{":
                before = text[start : self._at].strip()
                if not before or (where == "module" and "=" not in before):
                    self._at += 1
                    return "open", before, begun
                depth += 1
            elif c == "}":
                if not depth:
                    self._at += 1
                    return "close", "", begun
                depth -= 1
            self._at += 1
        return None

    def _directive(self, text: str) -> None:
        if (found := _LOC.match(text)) and int(found[2]):
            self._source = (self._files.get(found[1], "?").rpartition("/")[2], int(found[2]))

    def _skip_braces(self) -> None:
        depth = 1
        while depth:
            self._line += self._text[self._at] == "\n"
            depth += {"{": 1, "}": -1}.get(self._text[self._at], 0)
            self._at += 1

    def _function(self, header: str) -> Function:
        signature = re.search(r"\.(entry|func)\s*(?:\(([^)]*)\))?\s*([\w$]+)\s*(?:\(([^)]*)\))?", header, re.DOTALL)
        if signature is None:
            raise PtxError(f"line {self._line}: no function in {header!r}")
        function = Function(signature[3], signature[1] == "entry")
        for listed, into in ((signature[2], function.results), (signature[4], function.parameters)):
            for one in (listed or "").split(","):
                if one.strip():
                    into.append(_variable(one.strip()) or _unknown(one, self._line))
        raw: list[tuple[str, int, tuple[str, int] | None, tuple[_Scope, ...]]] = []
        scopes = [_Scope(0)]
        while (piece := self._piece("function")) is not None:
            kind, text, line = piece
            if kind == "open":
                self._scopes += 1
                scopes.append(_Scope(self._scopes))
            elif kind == "close":
                scopes.pop()
                if not scopes:
                    break
            elif kind == "label":
                name = text if len(scopes) == 1 else f"{text}@{scopes[-1].number}"
                scopes[-1].names[text] = name
                function.labels[name] = len(raw)
            elif text.startswith(".reg"):
                _declare(text, scopes[-1])
            elif text.startswith("."):
                if (found := _variable(text)) is not None:
                    scopes[-1].names[found.name] = name = (
                        found.name if len(scopes) == 1 else f"{found.name}@{scopes[-1].number}"
                    )
                    found.name = name
                    function.variables[name] = found
            elif text:
                raw.append((text, line, self._source, tuple(scopes)))
        for text, line, source, inside in raw:
            function.statements.append(_statement(text, line, source, inside))
        return function


def _unknown(text: str, line: int) -> Variable:
    raise PtxError(f"line {line}: {text!r} is no declaration that this reader knows")


def _variable(text: str) -> Variable | None:
    found = _VARIABLE.search(re.sub(r"\.(?:visible|extern|weak|ptr|attribute\([^)]*\))\s*", "", text))
    if found is None:
        return None
    size = BYTES[found["type"]]
    count = 1 if found["count"] is None else int(found["count"][1:-1] or 0)
    value = b""
    if found["value"]:
        values = re.findall(r"-?\w+", found["value"])
        value = b"".join((_number(one) & (1 << 8 * size) - 1).to_bytes(size, "little") for one in values)
    return Variable(found["name"], found["space"], size * count, int(found["align"] or size), value)


def _number(text: str) -> int:
    if text[:2] in ("0f", "0F", "0d", "0D"):
        return int(text[2:], 16)
    return int(text.rstrip("U"), 0)


def _declare(text: str, scope: _Scope) -> None:
    found = _REG.match(text)
    if found is None:
        raise PtxError(f"{text!r} declares no register that this reader knows")
    size = BYTES[found[1]]
    for name in found[2].split(","):
        name = name.strip()
        if family := _FAMILY.match(name):
            scope.families[family[1]] = size
        else:
            scope.registers[name] = Register(name if not scope.number else f"{name}@{scope.number}", size)


def _statement(text: str, line: int, source: tuple[str, int] | None, scopes: tuple[_Scope, ...]) -> Statement:
    found = _OPCODE.match(text)
    if found is None:
        raise PtxError(f"line {line}: {text!r}")
    guard = None
    if found[2]:
        register = _operand(found[2], scopes, line)
        assert isinstance(register, Register)
        guard = Register(register.name, 0, bool(found[1]))
    operands: tuple[Operand, ...]
    if found[3].startswith("call"):
        call = _CALL.match(found[4])
        if call is None:
            raise PtxError(f"line {line}: a call that this reader does not know: {text!r}")
        lists = [
            tuple(_operand(one.strip(), scopes, line) for one in (part or "").split(",") if one.strip())
            for part in (call[1], call[3])
        ]
        operands = (call[2], lists[0], lists[1])
    else:
        parts = _parts(found[4]) if found[4].strip() else []
        operands = tuple(_operand(part.strip(), scopes, line) for part in parts)
    return Statement(found[3], operands, guard, line, source, " ".join(text.split()))


def _parts(text: str) -> list[str]:
    """What commas outside of brackets separate."""
    parts, depth = [""], 0
    for c in text:
        depth += {"[": 1, "{": 1, "(": 1, "]": -1, "}": -1, ")": -1}.get(c, 0)
        if c == "," and not depth:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def _operand(text: str, scopes: tuple[_Scope, ...], line: int) -> Operand:
    if text == "_":
        return None
    if text.startswith("{"):
        return tuple(_operand(part.strip(), scopes, line) for part in text[1:-1].split(","))
    if text.startswith("["):
        return _address(text[1:-1].strip(), scopes, line)
    if "|" in text:
        return tuple(_operand(part.strip(), scopes, line) for part in text.split("|"))
    if text.startswith("!"):
        register = _operand(text[1:].strip(), scopes, line)
        assert isinstance(register, Register)
        return Register(register.name, register.bytes, True)
    if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
        return Float(int(text[2:], 16), 4)
    if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
        return Float(int(text[2:], 16), 8)
    if re.match(r"-?\d+\.\d*$", text):
        return float(text)
    if re.match(r"-?(0[xX][0-9a-fA-F]+|\d+)U?$", text):
        return int(text.rstrip("U"), 0)
    for scope in reversed(scopes):
        if text in scope.registers:
            return scope.registers[text]
        family = text.rstrip("0123456789")
        if family in scope.families and family != text:
            return Register(text, scope.families[family])
        if text in scope.names:
            return scope.names[text]
    if text.startswith("%"):
        return Special(text[1:])
    return text


class Float(int):
    """The bits of a floating-point immediate, and how many bytes they are."""

    bytes: int

    def __new__(cls, bits: int, size: int) -> Float:
        made = super().__new__(cls, bits)
        made.bytes = size
        return made


def _address(text: str, scopes: tuple[_Scope, ...], line: int) -> Address:
    coordinates: tuple[Operand, ...] = ()
    if found := re.match(r"([^,]+),\s*(\{.*\})$", text, re.DOTALL):
        text = found[1].strip()
        vector = _operand(found[2], scopes, line)
        assert isinstance(vector, tuple)
        coordinates = vector
    base, _, offset = text.partition("+")
    operand = _operand(base.strip(), scopes, line)
    if isinstance(operand, int):
        return Address(None, int(operand) + (int(offset, 0) if offset else 0), coordinates)
    assert isinstance(operand, Register | str), text
    return Address(operand, int(offset, 0) if offset else 0, coordinates)
