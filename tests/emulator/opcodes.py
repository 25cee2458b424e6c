"""What each opcode of PTX becomes: an instruction of the machine, with its operands in the order that the machine reads them.

Owns names and operands of opcodes, and where variables stand in memory. Knows no register's place and no control flow. Called by
`program`. What the instructions do is in the machine's sources, beside the order of their operands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tests.emulator.ptx import (
    BYTES,
    Address,
    Float,
    Function,
    Module,
    Operand,
    PtxError,
    Register,
    Special,
    Statement,
    Variable,
)

#: As `values` in schedule.cpp lists them.
_SPECIALS = (
    *(f"{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
    *("laneid", "warpid", "cluster_ctarank", "cluster_nctarank"),
    *(f"{name}.{axis}" for name in ("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid") for axis in "xyz"),
    *(f"lanemask_{which}" for which in ("eq", "lt", "le", "gt", "ge")),
    *("smid", "nwarpid", "dynamic_smem_size", "total_smem_size"),
)
_SPACES = {"global": 0, "shared": 1, "shared::cta": 1, "shared::cluster": 2, "local": 3, "param": 5}
_GENERIC, _LOCAL, _PARAMETER = 4, 3, 5
_LOOKS = {"volatile", "relaxed", "acquire", "mmio"}
_NOTHING = (
    "fence",
    "membar",
    "griddepcontrol",
    "prefetch",
    "prefetchu",
    "createpolicy",
    "setmaxnreg",
    "discard",
    "applypriority",
)
_ATOMIC = {"add": 0, "min": 1, "max": 2, "and": 3, "or": 4, "xor": 5, "exch": 6, "cas": 7, "inc": 8, "dec": 9}


@dataclass(frozen=True)
class Constant:
    """An immediate as 32 equal values of `size` bytes (0: a predicate)."""

    size: int
    bits: int

    @property
    def bytes(self) -> int:
        return self.size


@dataclass(frozen=True)
class Label:
    name: str


Lower = Register | Constant | Label | int | None


@dataclass(frozen=True)
class Lowered:
    """An instruction of the machine. `written`: which of the operands it writes; those are not read, unless `both` says so.
    `loose`: operands that an asynchronous product takes later, which nobody need wait for."""

    name: str
    operands: tuple[Lower, ...]
    written: frozenset[int]
    guard: Register | None
    line: int
    source: tuple[str, int] | None
    both: bool = False
    loose: frozenset[int] = frozenset()

    def reads(self) -> tuple[Register, ...]:
        read = [
            o for k, o in enumerate(self.operands) if isinstance(o, Register) and (self.both or k not in self.written)
        ]
        return (*read, self.guard) if self.guard is not None else tuple(read)

    def writes(self) -> tuple[Register, ...]:
        return tuple(o for k, o in enumerate(self.operands) if isinstance(o, Register) and k in self.written)

    def touched(self) -> tuple[Register, ...]:
        return tuple(o for k, o in enumerate(self.operands) if isinstance(o, Register) and k not in self.loose)


@dataclass
class Lowering:
    """All functions of a kernel, one after the other."""

    module: Module
    entry: Function
    signatures: dict[str, str]
    specials: dict[str, int] = field(default_factory=dict)
    parameters: list[tuple[int, int]] = field(default_factory=list)
    local_bytes: int = 0
    shared_bytes: int = 0
    global_memory: bytearray = field(default_factory=bytearray)

    def __post_init__(self) -> None:
        self._made: list[Lowered] = []
        self._variables: dict[tuple[str, str], tuple[str, int]] = {}
        self._temporaries = 0
        at = 0
        for one in self.entry.parameters:
            at = -(-at // one.align) * one.align
            self._variables[self.entry.name, one.name] = ("param", at)
            self.parameters.append((at, one.bytes))
            at += one.bytes
        dynamic: list[Variable] = []
        for one in self.module.variables.values():
            if one.space == "shared":
                dynamic.append(one) if not one.bytes else self._share("", one)
            elif one.space in ("global", "const"):
                self.global_memory.extend(bytes(-len(self.global_memory) % max(one.align, 16)))
                self._variables["", one.name] = ("global", len(self.global_memory))
                self.global_memory.extend(one.value.ljust(one.bytes, b"\0"))
        functions = [self.entry, *(one for one in self.module.functions.values() if not one.entry)]
        for function in functions:
            for one in (
                *function.variables.values(),
                *(() if function.entry else (*function.parameters, *function.results)),
            ):
                if one.space == "shared":
                    self._share(function.name, one)
                else:
                    self.local_bytes = -(-self.local_bytes // 16) * 16
                    self._variables[function.name, one.name] = ("local", self.local_bytes)
                    self.local_bytes += one.bytes
            if not function.entry:
                self.specials[f"%return.{function.name}"] = 0
        self.local_bytes = -(-self.local_bytes // 16) * 16
        for one in dynamic:  # behind everything static
            self.shared_bytes = -(-self.shared_bytes // max(one.align, 16)) * max(one.align, 16)
            self._variables["", one.name] = ("shared", self.shared_bytes)

    def _share(self, function: str, one: Variable) -> None:
        at = -(-self.shared_bytes // one.align) * one.align
        self._variables[function, one.name] = ("shared", at)
        self.shared_bytes = at + one.bytes

    def function(self, function: Function) -> list[Lowered]:
        """Its instructions; its labels are made to number these."""
        self._made, self._function = [], function
        starts: list[int] = []
        for statement in function.statements:
            starts.append(len(self._made))
            self._statement = statement
            try:
                self._lower(statement)
            except (KeyError, ValueError, AssertionError, IndexError, TypeError) as error:
                raise PtxError(f"line {statement.line}: not emulated: {statement.text} ({error!r})") from error
        starts.append(len(self._made))
        function.labels = {name: starts[at] for name, at in function.labels.items()}
        self._emit("exit" if function.entry else "trap", guard=None)  # nothing runs past a function's end
        return self._made

    # ---- operands

    def _emit(
        self,
        name: str,
        *operands: Lower,
        written: tuple[int, ...] = (),
        guard: Register | bool | None = True,
        both: bool = False,
        loose: range | tuple[int, ...] = (),
    ) -> None:
        statement = self._statement
        kept = statement.guard if guard is True else guard or None
        self._made.append(
            Lowered(name, operands, frozenset(written), kept, statement.line, statement.source, both, frozenset(loose))
        )

    def _temporary(self, size: int) -> Register:
        self._temporaries += 1
        return Register(f"temporary{self._temporaries}", size)

    def _variable(self, name: str) -> tuple[str, int]:
        found = self._variables.get((self._function.name, name)) or self._variables.get(("", name))
        if found is None:
            raise PtxError(f"line {self._statement.line}: nothing is called {name}: {self._statement.text}")
        return found

    def value(self, operand: Operand, size: int) -> Lower:
        """An operand that is read, of `size` bytes."""
        if isinstance(operand, Register) or operand is None:
            return operand
        if isinstance(operand, Special):
            return self._special(operand.name)
        if isinstance(operand, Float):
            if operand.bytes != size:
                raise PtxError(f"line {self._statement.line}: a float of {operand.bytes} bytes: {self._statement.text}")
            return Constant(size, int(operand))
        if isinstance(operand, int):
            return Constant(size, operand)
        if isinstance(operand, str):
            made = self._temporary(size)
            self._address_of(made, operand)
            return made
        raise PtxError(f"line {self._statement.line}: {operand!r} in {self._statement.text}")

    def _special(self, name: str) -> Register:
        if name == "WARP_SZ":
            raise PtxError("WARP_SZ is not emulated")
        self.specials[f"%{name}"] = _SPECIALS.index(name)
        return Register(f"%%{name}", 4)

    def _address_of(self, made: Register, name: str) -> None:
        space, offset = self._variable(name)
        if space == "local":
            self._emit(f"mov.b{8 * made.bytes}", made, Constant(made.bytes, offset), written=(0,), guard=None)
        else:
            instruction = {
                "shared": f"address.shared.{made.bytes}",
                "param": "address.parameter",
                "global": "address.global",
            }[space]
            self._emit(instruction, made, offset, written=(0,), guard=None)

    def place(self, operand: Operand) -> tuple[Lower, int, int]:
        """Of an address: base, bytes of the base, offset. A variable's address comes into a register first."""
        assert isinstance(operand, Address)
        base = operand.operand
        if isinstance(base, str):
            made = self._temporary(8)
            self._address_of(made, base)
            base = made
        return base, 8 if base is None else base.bytes, operand.offset

    def _memory(self, space: str | None, operand: Operand) -> tuple[int, Lower, int, int]:
        """Of a load or a store: space, base, bytes of the base, offset."""
        number = _GENERIC if space is None else _SPACES[space]
        if isinstance(operand, Address) and isinstance(operand.operand, str):
            kind, at = self._variable(operand.operand)
            if kind in ("param", "local"):
                return (_PARAMETER if kind == "param" else _LOCAL), None, 8, at + operand.offset
        return number, *self.place(operand)

    # ---- statements

    def _lower(self, s: Statement) -> None:
        parts = s.opcode.split(".")
        method: Callable[[Statement, list[str]], None] | None = getattr(self, f"_op_{parts[0]}", None)
        if parts[0] in _NOTHING or s.opcode.startswith(("cp.async.bulk.prefetch", "wgmma.fence")):
            self._emit("nothing")
        elif method is not None:
            method(s, parts)
        else:
            self._generic(s, s.opcode, s.operands)

    def _generic(self, s: Statement, name: str, operands: tuple[Operand, ...]) -> None:
        signature = self.signatures[name]
        results, _, sources = signature.partition(":")
        if len(operands) != len(results) + len(sources):
            raise PtxError(f"line {s.line}: {len(operands)} operands, {signature}: {s.text}")
        lowered: list[Lower] = []
        after: list[tuple[str, Register, Register]] = []
        for index, (operand, size) in enumerate(zip(operands, results + sources)):
            if size == "i":
                assert isinstance(operand, int)
                lowered.append(int(operand))
                continue
            width = 0 if size == "p" else int(size)
            one = self.value(operand, width)
            if isinstance(one, Register) and one.bytes != width:
                if not name.startswith("cvt."):  # only conversions take registers that are wider than their types
                    raise PtxError(f"line {s.line}: a register of {one.bytes} bytes, {signature}: {s.text}")
                if index < len(results):  # a register may be wider than what is written to it
                    narrow, sign = self._temporary(width), "s" if ".s" in name else "u"
                    after.append((f"cvt.{sign}{8 * one.bytes}.{sign}{8 * width}", one, narrow))
                    one = narrow
                else:
                    narrow = self._temporary(width)
                    self._emit(f"cvt.u{8 * width}.u{8 * one.bytes}", narrow, one, written=(0,), guard=None)
                    one = narrow
            lowered.append(one)
        self._emit(name, *lowered, written=tuple(range(len(results))))
        for conversion, wide, narrow in after:
            self._emit(conversion, wide, narrow, written=(0,))

    def _op_mov(self, s: Statement, parts: list[str]) -> None:
        to, source = s.operands
        if isinstance(to, tuple):
            sizes = [one.bytes for one in to if isinstance(one, Register)]
            self._generic(s, f"unpack.{sizes[0]}" + (".4" if len(to) == 4 else ""), (*to, source))
        elif isinstance(source, tuple):
            sizes = [one.bytes for one in source if isinstance(one, Register)]
            self._generic(s, f"pack.{sizes[0]}" + (".4" if len(source) == 4 else ""), (to, *source))
        elif isinstance(source, Special) and source.name in (
            "clock",
            "clock_hi",
            "clock64",
            "globaltimer",
            "globaltimer_lo",
        ):
            assert isinstance(to, Register)
            self._emit(f"clock.{to.bytes}", to, written=(0,))
        elif isinstance(source, str):
            assert isinstance(to, Register)
            self._address_of(to, source)
        else:
            self._generic(s, "mov.pred" if parts[1] == "pred" else f"mov.b{8 * BYTES[parts[1]]}", s.operands)

    def _op_selp(self, s: Statement, parts: list[str]) -> None:
        self._generic(s, f"selp.b{8 * BYTES[parts[1]]}", s.operands)

    def _op_setp(self, s: Statement, parts: list[str]) -> None:
        parts = [part for part in parts if part != "ftz"]
        to, a, b = s.operands[:3]
        first, second = to if isinstance(to, tuple) else (to, None)
        made: Operand = first
        if len(parts) == 4:
            made = self._temporary(0)
        self._generic(s, ".".join([*parts[:2], parts[-1]]), (made, a, b))
        if len(parts) == 4:
            assert isinstance(made, Register)
            if second is not None:
                self._generic(s, f"{parts[2]}.pred", (second, replace(made, negated=True), s.operands[3]))
            self._generic(s, f"{parts[2]}.pred", (first, made, s.operands[3]))
        elif second is not None:
            self._generic(s, "not.pred", (second, first))

    def _op_cvta(self, s: Statement, parts: list[str]) -> None:
        space = next(part for part in parts[1:] if part != "to")
        if space in ("global", "param", "const"):
            self._op_mov(s, ["mov", "b64"])
        else:
            self._generic(s, "cvta.to.window" if parts[1] == "to" else f"cvta.{space.partition('::')[0]}", s.operands)

    def _op_mapa(self, s: Statement, parts: list[str]) -> None:
        self._generic(s, f"mapa.{BYTES[parts[-1]]}", s.operands)

    def _vector(self, operand: Operand, size: int) -> tuple[Lower, ...]:
        return tuple(self.value(one, size) for one in (operand if isinstance(operand, tuple) else (operand,)))

    def _access(self, parts: list[str], address: Operand, values: tuple[Lower, ...]) -> tuple[Lower, ...]:
        space, base, base_bytes, offset = self._memory(next((part for part in parts if part in _SPACES), None), address)
        size = BYTES[parts[-1]]
        widths = {one.bytes for one in values if isinstance(one, Register | Constant)}
        if len(widths) != 1:
            raise PtxError(f"line {self._statement.line}: registers of {widths} bytes: {self._statement.text}")
        bits = offset & (1 << 64) - 1
        low, high = (word - (word >> 31 << 32) for word in (bits & 0xFFFFFFFF, bits >> 32))
        return space, base, base_bytes, low, high, size, int(parts[-1][0] == "s"), len(values), widths.pop()

    def _op_ld(self, s: Statement, parts: list[str]) -> None:
        values = self._vector(s.operands[0], BYTES[parts[-1]])
        access = self._access(parts, s.operands[1], values)
        name = "ld.look" if _LOOKS & set(parts) else "ld"
        self._emit(name, *access, *values, written=tuple(range(len(access), len(access) + len(values))))

    _op_ldu = _op_ld

    def _op_st(self, s: Statement, parts: list[str]) -> None:
        if parts[1] == "async":
            return self._store_async(s, parts)
        values = self._vector(s.operands[1], max(BYTES[parts[-1]], 2))
        self._emit("st", *self._access(parts, s.operands[0], values), *values)

    def _store_async(self, s: Statement, parts: list[str]) -> None:
        size = BYTES[parts[-1]]
        values = self._vector(s.operands[1], size)
        self._emit("st.async", *self.place(s.operands[0]), *self.place(s.operands[2]), size, len(values), size, *values)

    def _op_atom(self, s: Statement, parts: list[str]) -> None:
        if "async" in parts:
            raise PtxError(f"line {s.line}: not emulated: {s.text}")
        given = list(s.operands)
        old, rest = (given[0], given[1:]) if parts[0] == "atom" else (None, given)
        operation = next(part for part in parts if part in _ATOMIC)
        number = 10 if (operation, parts[-1]) == ("add", "f32") else _ATOMIC[operation]
        if parts[-1] not in ("u32", "s32", "b32", "u64", "s64", "b64") and number != 10:
            raise PtxError(f"line {s.line}: not emulated: {s.text}")
        size = BYTES[parts[-1]]
        values = [self.value(one, size) for one in rest[1:]]
        access = self._access(parts, rest[0], tuple(values[:1]))
        other = values[1] if len(values) > 1 else None
        self._emit("atom", *access, number, values[0], other, self.value(old, size), written=(len(access) + 3,))

    _op_red = _op_atom

    def _op_bra(self, s: Statement, parts: list[str]) -> None:
        assert isinstance(s.operands[0], str)
        self._emit("bra", Label(s.operands[0]))

    def _op_call(self, s: Statement, parts: list[str]) -> None:
        name, results, given = s.operands
        assert isinstance(name, str) and isinstance(results, tuple) and isinstance(given, tuple)
        if results or name not in self.module.functions:
            raise PtxError(f"line {s.line}: not emulated: {s.text}")
        callee = self.module.functions[name]
        copies: list[int] = []
        for variable, argument in zip(callee.parameters, given, strict=True):
            assert isinstance(argument, str)
            copies += [self._variable(argument)[1], self._variables[name, variable.name][1], variable.bytes]
        self._emit("call", Label(name), Register(f"%%return.{name}", 4), len(given), *copies)

    def _op_ret(self, s: Statement, parts: list[str]) -> None:
        self._emit("ret", None if self._function.entry else Register(f"%%return.{self._function.name}", 4))

    def _op_exit(self, s: Statement, parts: list[str]) -> None:
        self._emit("exit")

    def _op_trap(self, s: Statement, parts: list[str]) -> None:
        self._emit("trap")

    _op_brkpt = _op_trap

    def _op_nanosleep(self, s: Statement, parts: list[str]) -> None:
        self._emit("nanosleep")
