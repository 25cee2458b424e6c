"""What opcodes that threads issue together become, and those that copy, wait and multiply: the second half of `opcodes`.

Owns the same as `opcodes`, of barriers, mbarriers, copies, exchanges within a warp and matrices. Called by `program`.
"""

from __future__ import annotations

from tests.emulator.opcodes import BYTES, Constant, Label, Lower, Lowered, Lowering
from tests.emulator.ptx import Address, Operand, PtxError, Register, Statement

__all__ = ["Constant", "FullLowering", "Label", "Lowered"]

_MODES = {"up": 0, "down": 1, "bfly": 2, "idx": 3}
_VOTES = {"ballot": 0, "any": 1, "all": 2, "uni": 3}
_REDUCTIONS = {"add": 0, "min.u32": 1, "max.u32": 2, "min.s32": 3, "max.s32": 4, "and": 5, "or": 6, "xor": 7}
_MATRIX_TYPES = {"bf16": 0, "f16": 1, "e4m3": 2}


def _pair(operand: Operand) -> tuple[Operand, Operand]:
    return (operand[0], operand[1]) if isinstance(operand, tuple) else (operand, None)


class FullLowering(Lowering):
    """Every opcode that is emulated."""

    def _register(self, operand: Operand, size: int = 4) -> Lower:
        return self.value(operand, size)

    def _op_shfl(self, s: Statement, parts: list[str]) -> None:
        to, valid = _pair(s.operands[0])
        members, given = self._register(s.operands[4]), [self._register(one) for one in s.operands[1:4]]
        self._emit("shfl", members, self._register(to), self.value(valid, 0), *given, _MODES[parts[2]], written=(1, 2))

    def _op_vote(self, s: Statement, parts: list[str]) -> None:
        size = 4 if parts[2] == "ballot" else 0
        to, p, members = self.value(s.operands[0], size), self.value(s.operands[1], 0), self._register(s.operands[2])
        self._emit("vote", members, to, p, _VOTES[parts[2]], written=(1,))

    def _op_redux(self, s: Statement, parts: list[str]) -> None:
        mode = parts[2] if parts[2] in _REDUCTIONS else f"{parts[2]}.{parts[3]}"
        to, value, members = (self._register(one) for one in s.operands)
        self._emit("redux", members, to, value, _REDUCTIONS[mode], written=(1,))

    def _op_match(self, s: Statement, parts: list[str]) -> None:
        to, alike = _pair(s.operands[0])
        size = BYTES[parts[-1]]
        value, members = self.value(s.operands[1], size), self._register(s.operands[2])
        self._emit(
            "match",
            members,
            self._register(to),
            self.value(alike, 0),
            value,
            size,
            int(parts[1] == "all"),
            written=(1, 2),
        )

    def _op_elect(self, s: Statement, parts: list[str]) -> None:
        to, elected = _pair(s.operands[0])
        self._emit("elect", self._register(s.operands[1]), self._register(to), self.value(elected, 0), written=(1, 2))

    def _op_activemask(self, s: Statement, parts: list[str]) -> None:
        self._generic(s, "activemask", s.operands)

    # ---- barriers of a block and of a cluster

    def _op_bar(self, s: Statement, parts: list[str]) -> None:
        if "warp" in parts:
            self._emit("bar.warp.sync", self._register(s.operands[0]))
            return
        if "cluster" in parts:
            self._emit(f"barrier.cluster.{parts[2]}", int("aligned" in parts))
            return
        aligned = int(parts[0] == "bar" or "aligned" in parts)
        if "red" in parts:
            to, vote = s.operands[0], self.value(s.operands[-1], 0)
            mode = {"popc": 2, "and": 3, "or": 4}[next(part for part in parts if part in ("popc", "and", "or"))]
            number, threads = s.operands[1], s.operands[2] if len(s.operands) == 4 else None
            result = self.value(to, 4 if mode == 2 else 0)
            self._emit(
                "barrier", aligned, self._register(number), self._register(threads), mode, result, vote, written=(4,)
            )
            return
        number, threads = s.operands[0], s.operands[1] if len(s.operands) > 1 else None
        self._emit(
            "barrier", aligned, self._register(number), self._register(threads), int("arrive" in parts), None, None
        )

    _op_barrier = _op_bar

    def _op_mbarrier(self, s: Statement, parts: list[str]) -> None:
        what, own, operands = parts[1], int("shared::cluster" not in parts), list(s.operands)
        if what == "init":
            self._emit("mbarrier.init", *self.place(s.operands[0]), self._register(s.operands[1]))
        elif what == "inval":
            self._emit("mbarrier.inval", *self.place(s.operands[0]))
        elif what == "expect_tx":
            self._emit("mbarrier.expect_tx", *self.place(s.operands[0]), None, self._register(s.operands[1]), own, None)
        elif what == "arrive":
            state = self.value(operands[0], 8)
            given = self._register(operands[2]) if len(operands) > 2 else None
            expects = "expect_tx" in parts
            place = self.place(operands[1])
            self._emit(
                "mbarrier.arrive",
                *place,
                None if expects else given,
                given if expects else None,
                own,
                state,
                written=(6,),
            )
        elif what in ("test_wait", "try_wait"):
            parity = "parity" in parts
            passed, place = self.value(s.operands[0], 0), self.place(s.operands[1])
            name = "mbarrier.test.parity" if parity else "mbarrier.test.state"
            self._emit(name, *place, passed, self.value(s.operands[2], 4 if parity else 8), written=(3,))
        else:
            raise PtxError(f"line {s.line}: not emulated: {s.text}")

    # ---- copies

    def _op_cp(self, s: Statement, parts: list[str]) -> None:
        if "im2col" in parts or parts[1] != "async" or "reduce" in parts:
            raise PtxError(f"line {s.line}: not emulated: {s.text}")
        if "commit_group" in parts:
            self._emit("cp.async.bulk.commit_group" if "bulk" in parts else "cp.async.commit_group")
        elif "wait_group" in parts:
            assert isinstance(s.operands[0], int)
            self._emit("cp.async.bulk.wait_group" if "bulk" in parts else "cp.async.wait_group", int(s.operands[0]))
        elif "wait_all" in parts:
            self._emit("cp.async.wait_all")
        elif "mbarrier" in parts and "arrive" in parts:
            self._emit("cp.async.mbarrier.arrive", *self.place(s.operands[0]), None, 8, 0, int("noinc" in parts))
        elif "tensor" in parts:
            self._tensor(s, parts)
        elif "bulk" in parts and parts[3].startswith("shared"):
            barrier, _, offset = self.place(s.operands[3])
            places = (*self.place(s.operands[0]), *self.place(s.operands[1]))
            shared = int(parts[4].startswith("shared"))
            self._emit(
                "cp.async.bulk",
                *places,
                self._register(s.operands[2]),
                barrier,
                offset,
                shared,
                self._blocks(s, parts, 4),
            )
        elif "bulk" in parts and parts[3] == "global":
            self._emit(
                "cp.async.bulk.store",
                *self.place(s.operands[0]),
                *self.place(s.operands[1]),
                self._register(s.operands[2]),
            )
        else:
            taken: Lower = None
            ignore: Lower = None
            size = s.operands[2]
            assert isinstance(size, int)
            for one in s.operands[3:]:
                if isinstance(one, Register) and not one.bytes:
                    ignore = one
                elif isinstance(one, int) or (isinstance(one, Register) and one.bytes == 4):
                    taken = self._register(one)
            self._emit("cp.async", *self.place(s.operands[0]), *self.place(s.operands[1]), int(size), taken, ignore)

    def _tensor(self, s: Statement, parts: list[str]) -> None:
        if not parts[5].startswith("shared"):
            raise PtxError(f"line {s.line}: not emulated: {s.text}")
        source = s.operands[1]
        assert isinstance(source, Address)
        barrier, _, offset = self.place(s.operands[2])
        at = [self._register(one) for one in source.coordinates]
        places = (*self.place(s.operands[0]), *self.place(Address(source.operand, source.offset)))
        self._emit("cp.async.bulk.tensor", *places, barrier, offset, self._blocks(s, parts, 3), len(at), *at)

    def _blocks(self, s: Statement, parts: list[str], place: int) -> Lower:
        """To which blocks of the cluster a copy goes, as a mask of 16 bits; None: to the one that its address says."""
        return self.value(s.operands[place], 2) if "multicast::cluster" in parts else None

    # ---- matrices

    def _op_ldmatrix(self, s: Statement, parts: list[str]) -> None:
        to = self._vector(s.operands[0], 4)
        base, _, offset = self._short(s.operands[1])
        self._emit("ldmatrix", base, offset, len(to), int("trans" in parts), *to, written=tuple(range(4, 4 + len(to))))

    def _op_stmatrix(self, s: Statement, parts: list[str]) -> None:
        values = self._vector(s.operands[1], 4)
        base, _, offset = self._short(s.operands[0])
        self._emit("stmatrix", base, offset, len(values), int("trans" in parts), *values)

    def _short(self, operand: Operand) -> tuple[Lower, int, int]:
        """An address in shared memory as 32 bits."""
        base, size, offset = self.place(operand)
        if size == 8:
            assert isinstance(base, Register)
            short = self._temporary(4)
            self._emit("cvt.u32.u64", short, base, written=(0,), guard=None)
            return short, 4, offset
        return base, size, offset

    def _op_movmatrix(self, s: Statement, parts: list[str]) -> None:
        self._generic(s, "movmatrix", s.operands)

    def _op_mma(self, s: Statement, parts: list[str]) -> None:
        shape, types = parts[3], parts[6:]
        if (
            (shape, types[1])
            not in (
                ("m16n8k16", "bf16"),
                ("m16n8k16", "f16"),
                ("m16n8k8", "bf16"),
                ("m16n8k8", "f16"),
                ("m16n8k32", "e4m3"),
            )
            or types[0] != "f32"
            or types[3] != "f32"
        ):
            raise PtxError(f"line {s.line}: not emulated: {s.text}")
        d, a, b, c = (self._vector(one, 4) for one in s.operands)
        self._emit("mma", _MATRIX_TYPES[types[1]], len(a), len(b), *d, *a, *b, *c, written=(3, 4, 5, 6))

    def _op_wgmma(self, s: Statement, parts: list[str]) -> None:
        if parts[1] == "commit_group":
            self._emit("wgmma.commit")
        elif parts[1] == "wait_group":
            assert isinstance(s.operands[0], int)
            self._emit("wgmma.wait", int(s.operands[0]))
        else:
            shape, types = parts[4], parts[5:]
            if types[0] != "f32" or types[1] != types[2]:
                raise PtxError(f"line {s.line}: not emulated: {s.text}")
            sums = self._vector(s.operands[0], 4)
            a, b, adds, *scales = s.operands[1:]
            left = self._vector(a, 4) if isinstance(a, tuple) else (self.value(a, 8),)
            numbers = [int(one) for one in scales if isinstance(one, int)]
            numbers += [1, 1][len(numbers) :]
            transposed = numbers[2:]
            in_registers = int(isinstance(a, tuple))
            # One that stands alone is B's: an A in registers cannot be.
            transposed = [0, *transposed] if len(transposed) == 1 else transposed or [0, 0]
            add = self.value(adds, 0)
            columns = int(shape.partition("n")[2].partition("k")[0])
            head = (
                columns,
                _MATRIX_TYPES[types[1]],
                in_registers,
                *numbers[:2],
                *transposed,
                add,
                *left,
                self.value(b, 8),
            )
            places = tuple(range(len(head), len(head) + len(sums)))
            self._emit("wgmma", *head, *sums, written=places, both=True, loose=places)
