"""The reader of PTX: names that inline assembly declares again in its own braces, operands, variables, lines of the source."""

from __future__ import annotations

import pytest

from tests.emulator.ptx import Address, PtxError, Register, Special, parse

TEXT = """
.version 9.0
.target sm_90a
.address_size 64
.global .align 4 .b8 table[6] = {1, 2, 255, 4, 5, 6};
.extern .shared .align 16 .b8 memory[];
.visible .entry twice(
	.param .u64 twice_param_0,
	.param .align 64 .b8 twice_param_1[128]
)
.maxntid 64, 1, 1
{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<9>;
	.reg .b64 	%rd<4>;
	.loc	1 12 3
	ld.param.u64 	%rd1, [twice_param_0];
	mov.u32 	%r1, %tid.x;
$L__BB0_1:
	// begin inline asm
	{
.reg .pred p;
again: setp.ne.b32 p, %r1, 0; @!p bra again;
}
	{ .reg .pred p; again: setp.eq.b32 p, %r2, -1; @p bra again; }
	// end inline asm
	.loc	1 14 3, function_name $L__info_string0, inlined_at 1 12 3
	st.global.v2.f32 	[%rd1+-8], {%r1, 0f3F800000};
	cp.async.bulk.tensor.2d.shared::cluster.global [%r3], [%rd2, {%r1, 5}], [%r4], %rd3;
	@%p1 bra 	$L__BB0_1;
	ret;
}
	.file	1 "/somewhere/twice.cu"
"""


def test_a_kernel_is_read() -> None:
    module = parse(TEXT)
    assert module.variables["table"].value == bytes([1, 2, 255, 4, 5, 6]) and module.variables["memory"].bytes == 0
    kernel = module.functions["twice"]
    assert [(one.bytes, one.align) for one in kernel.parameters] == [(8, 8), (128, 64)]
    first, second, compare, branch, other, again, store, box, back, _ = kernel.statements
    assert first.source == ("twice.cu", 12) and second.operands == (Register("%r1", 4), Special("tid.x"))
    assert compare.operands[0] != other.operands[0], "two registers, each in its own braces"
    assert branch.guard is not None and branch.guard.negated and again.guard is not None and not again.guard.negated
    assert branch.operands != again.operands and kernel.labels[str(branch.operands[0])] == 2
    assert store.operands[0] == Address(Register("%rd1", 8), -8) and store.source == ("twice.cu", 14)
    assert store.line == TEXT[: TEXT.index("st.global")].count("\n") + 1 and int(store.operands[1][1]) == 0x3F800000
    assert len(box.operands) == 4 and box.operands[1] == Address(Register("%rd2", 8), 0, (Register("%r1", 4), 5))
    assert kernel.labels[str(back.operands[0])] == 2


def test_what_is_no_declaration_is_named() -> None:
    with pytest.raises(PtxError, match="declares no register"):
        parse(".visible .entry f()\n{\n.reg nonsense;\n}\n")
