"""Makes the emulator's code of a kernel's PTX: instructions that its machine knows, with places for their registers.

Owns the lowering of control flow, liveness and the places of registers. What single opcodes become is in `opcodes`; how the
result runs is the machine's (machine.h). Called by `launch`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from tests.emulator.ptx import Function, Module, PtxError, Register
from tests.emulator.together import Constant, FullLowering, Label, Lowered

_NO_OPERAND = -(1 << 31)
_LANES = 32


@dataclass
class Code:
    """A kernel as the machine takes it. `lines`: PTX line -> (file, line) of the source. `parameters`: (offset, bytes) each."""

    names: str
    code: np.ndarray
    operands: np.ndarray
    constants: np.ndarray
    specials: np.ndarray
    sizes: np.ndarray
    global_memory: bytes
    parameters: tuple[tuple[int, int], ...]
    lines: dict[int, tuple[str, int]]
    static_shared_bytes: int


@dataclass
class _Places:
    """Where registers stand: offsets in a warp's registers by name, numbers of predicates."""

    offsets: dict[str, int] = field(default_factory=dict)
    predicates: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    num_predicates: int = 1  # the first one is false


def lower(module: Module, kernel: str, signatures: dict[str, str]) -> Code:
    """The code of `kernel` and of all functions that it may call. Raises PtxError for an opcode that is not emulated."""
    if kernel not in module.functions:
        raise PtxError(f"no kernel {kernel}; there are {', '.join(module.functions)}")
    entry = module.functions[kernel]
    functions = [entry, *(function for function in module.functions.values() if not function.entry)]
    lowering = FullLowering(module, entry, signatures)
    lowered = [(function, lowering.function(function)) for function in functions]
    places = _Places()
    for name in lowering.specials:
        places.offsets[f"%{name}"] = places.bytes
        places.bytes += 4 * _LANES
    for function, instructions in lowered:
        _place(function, instructions, places)
    return _assemble(lowering, lowered, places)


def _blocks(instructions: list[Lowered], labels: dict[str, int]) -> list[tuple[int, int, list[int]]]:
    """(first, end, successors) of the basic blocks."""
    starts = {0, *labels.values()}
    for index, one in enumerate(instructions):
        if one.name in ("bra", "ret", "exit"):
            starts.add(index + 1)
    ordered = sorted(start for start in starts if start < len(instructions))
    number = {start: index for index, start in enumerate(ordered)}
    blocks = []
    for start, end in zip(ordered, [*ordered[1:], len(instructions)]):
        last = instructions[end - 1]
        targets = [
            number[labels[operand.name]]
            for operand in last.operands
            if isinstance(operand, Label) and last.name == "bra"
        ]
        falls = end < len(instructions) and not (last.name in ("bra", "ret", "exit") and last.guard is None)
        blocks.append((start, end, targets + ([number[end]] if falls else [])))
    return blocks


def _place(function: Function, instructions: list[Lowered], places: _Places) -> None:
    """Gives every register of a function a place; two share one where they are never alive together (in one thread)."""
    blocks = _blocks(instructions, function.labels)
    number: dict[str, int] = {}
    registers: list[Register] = []
    for one in instructions:
        for register in (*one.reads(), *one.writes()):
            if register.name not in number and not register.name.startswith("%%"):
                number[register.name] = len(registers)
                registers.append(register)
    uses, kills = [], []
    for start, end, _ in blocks:
        use = kill = 0
        for one in instructions[start:end]:
            for register in one.reads():
                if (at := number.get(register.name)) is not None and not kill >> at & 1:
                    use |= 1 << at
            for register in one.writes():
                at = number[register.name]
                if one.guard is None:
                    kill |= 1 << at
                elif not kill >> at & 1:
                    use |= 1 << at  # where the guard says no, what it was goes on
        uses.append(use)
        kills.append(kill)
    live_in = [0] * len(blocks)
    live_out = [0] * len(blocks)
    changed = True
    while changed:
        changed = False
        for index in range(len(blocks) - 1, -1, -1):
            out = 0
            for successor in blocks[index][2]:
                out |= live_in[successor]
            live_out[index] = out
            into = uses[index] | (out & ~kills[index])
            if into != live_in[index]:
                live_in[index], changed = into, True
    first, last = [1 << 60] * len(registers), [-1] * len(registers)
    for index, (start, end, _) in enumerate(blocks):
        for mask, at in ((live_in[index], start), (live_out[index], end)):
            while mask:
                bit = mask & -mask
                which = bit.bit_length() - 1
                first[which], last[which] = min(first[which], at), max(last[which], at)
                mask ^= bit
        for at in range(start, end):
            for register in (*instructions[at].reads(), *instructions[at].writes()):
                if (which := number.get(register.name)) is not None:
                    first[which], last[which] = min(first[which], at), max(last[which], at)
    _scan(function.name, registers, first, last, places)


def _scan(function: str, registers: list[Register], first: list[int], last: list[int], places: _Places) -> None:
    free: dict[int, list[int]] = {0: [], 2: [], 4: [], 8: []}
    ends: list[tuple[int, int, int]] = []  # last use, size, place
    for which in sorted(range(len(registers)), key=lambda index: first[index]):
        register = registers[which]
        while ends and ends[0][0] < first[which]:
            _, size, place = heapq.heappop(ends)
            heapq.heappush(free[size], place)
        size = register.bytes
        if free[size]:
            place = heapq.heappop(free[size])
        elif size:
            place = places.bytes
            places.bytes += size * _LANES
        else:
            place = places.num_predicates
            places.num_predicates += 1
        (places.offsets if size else places.predicates)[f"{function} {register.name}"] = place
        heapq.heappush(ends, (last[which], size, place))


def _assemble(lowering: FullLowering, lowered: list[tuple[Function, list[Lowered]]], places: _Places) -> Code:
    starts, at = {}, 0
    for function, instructions in lowered:
        starts[function.name] = at
        at += len(instructions)
    names: dict[str, int] = {}
    constants: dict[tuple[int, int], int] = {}
    constant_bytes = bytearray()
    code: list[tuple[int, ...]] = []
    operands: list[int] = []
    lines: dict[int, tuple[str, int]] = {}

    def place(function: str, name: str, of: dict[str, int]) -> int:
        return of[name] if name.startswith("%%") else of[f"{function} {name}"]

    def constant(value: Constant) -> int:
        key = (value.bytes, value.bits & (1 << 8 * value.bytes) - 1)
        if key not in constants:
            constants[key] = len(constant_bytes)
            constant_bytes.extend(key[1].to_bytes(value.bytes, "little") * _LANES)
            constant_bytes.extend(bytes(-len(constant_bytes) % 64))
        return ~constants[key]

    for function, instructions in lowered:
        begin = starts[function.name]
        leaders = {begin, *(begin + index for index in function.labels.values())}
        for index, one in enumerate(instructions):
            if one.source is not None:
                lines[one.line] = one.source
            first = len(operands)
            for operand in one.operands:
                match operand:
                    case None:
                        operands.append(_NO_OPERAND)
                    case Register(name, 0, negated):
                        operands.append(2 * place(function.name, name, places.predicates) + negated)
                    case Register(name):
                        operands.append(place(function.name, name, places.offsets))
                    case Constant(size=0):
                        operands.append(int(bool(operand.bits)))  # the first predicate, or not it
                    case Constant():
                        operands.append(constant(operand))
                    case Label(name):
                        operands.append(starts[name] if name in starts else begin + function.labels[name])
                    case int():
                        operands.append(operand)
            touched = len(operands)
            operands += [
                place(function.name, register.name, places.offsets) for register in one.touched() if register.bytes == 4
            ]
            guard = (
                -1
                if one.guard is None
                else 2 * place(function.name, one.guard.name, places.predicates) + one.guard.negated
            )
            is_leader = begin + index in leaders or (index > 0 and instructions[index - 1].name == "call")
            number = names.setdefault(one.name, len(names))
            code.append((number, guard, one.line, int(is_leader), first, touched, len(operands) - touched))
    specials = [part for name in lowering.specials for part in (lowering.specials[name], places.offsets[f"%{name}"])]
    sizes = [-(-places.bytes // 64) * 64, places.num_predicates, lowering.local_bytes, lowering.shared_bytes, 0]
    return Code(
        "".join(f"{name}\n" for name in names),
        np.array(code, dtype=np.int32),
        np.array([*operands, 0], dtype=np.int32),
        np.frombuffer(bytes(constant_bytes) or bytes(64), dtype=np.uint8).copy(),
        np.array(specials or [0, 0], dtype=np.int32)[: len(specials)],
        np.array(sizes, dtype=np.int64),
        bytes(lowering.global_memory),
        tuple(lowering.parameters),
        lines,
        lowering.shared_bytes,
    )
