# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""`linear_bf16` of up to 16 rows in CuTe DSL, on weights as they are stored: another kernel for the same product.

Owns the kernel and its launch. Asked for by name (`--op linear_bf16=cutedsl`); needs the extra `cutedsl`. What a row's sums are
does not depend on other rows. Source of the language: NVIDIA CUTLASS 4, CuTe DSL. How fast it is beside `sm90.py` is in NOTES.md.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from legato.ops.gemm import linear_bf16
from legato.ops.gemm.library import by_library

try:
    import cutlass
    from cuda.bindings import driver
    from cutlass import BFloat16, Float32, Int32, cute
    from cutlass.cute.nvgpu import warp
    from cutlass.cute.runtime import make_ptr
except ImportError as error:
    raise ImportError(f"{error}: it needs Legato's cutedsl extra: pip install 'legato[cutedsl]'") from error

#: Outputs of a thread block, and the warps that share its K.
STRIP, WARPS = 16, 16
#: K of a block: a lane reads 16 bytes of each of its two outputs.
BLOCK_K = 32
#: Rows that the kernel takes.
MOST_ROWS = 16


class Product:
    """y[T, N] = x[T, K] W[N, K]^T (+ residual) for one N and K and for `tiles` tiles of 8 rows.

    Weights stand on the wide side of mma.m16n8k16. Each warp has a slice of K and loads `ahead` blocks of it before the kernel
    waits for its predecessor; which of the hardware's columns a column of W is does not matter, as x is read alike. Warps' sums
    meet in shared memory, always in the same order.
    """

    def __init__(self, outputs: int, inputs: int, tiles: int, has_residual: int) -> None:
        self.outputs, self.inputs, self.tiles, self.has_residual = outputs, inputs, tiles, has_residual
        self.ahead = min(4, -(-inputs // (BLOCK_K * WARPS)))

    @cute.jit
    def __call__(
        self,
        weight: cute.Pointer,
        x: cute.Pointer,
        residual: cute.Pointer,
        y: cute.Pointer,
        rows: Int32,
        x_stride: Int32,
        residual_stride: Int32,
        stream: driver.CUstream,
    ):
        aligned = cute.assume(x_stride, divby=8)
        w = cute.make_tensor(weight, cute.make_layout((self.outputs, self.inputs), stride=(self.inputs, 1)))
        of_x = cute.make_tensor(x, cute.make_layout((rows, self.inputs), stride=(aligned, 1)))
        added = cute.make_tensor(residual, cute.make_layout((rows, self.outputs), stride=(residual_stride, 1)))
        made = cute.make_tensor(y, cute.make_layout((rows, self.outputs), stride=(self.outputs, 1)))
        self.kernel(w, of_x, added, made, rows).launch(
            grid=(self.outputs // STRIP, 1, 1), block=(WARPS * 32, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, w: cute.Tensor, x: cute.Tensor, residual: cute.Tensor, y: cute.Tensor, rows: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, slice_of_k = thread % 32, thread // 32
        group, place = lane // 4, lane % 4
        tokens = 8 * self.tiles
        shared = cutlass.utils.SmemAllocator()
        # Rows of 20 floats: the lanes of a group hit different banks.
        partial_layout = cute.make_layout((WARPS, tokens, STRIP), stride=(tokens * (STRIP + 4), STRIP + 4, 1))
        partial = shared.allocate_tensor(Float32, partial_layout, 16)
        mma = cute.make_tiled_mma(warp.MmaF16BF16Op(BFloat16, Float32, (STRIP, 8, 16)))
        a = cute.make_rmem_tensor(mma.partition_shape_A((STRIP, 16)), BFloat16)
        b = cute.make_rmem_tensor(mma.partition_shape_B((tokens, 16)), BFloat16)
        sums = cute.make_rmem_tensor(mma.partition_shape_C((STRIP, tokens)), Float32)
        sums.fill(0.0)
        w_pieces = cute.logical_divide(w, (None, cute.make_layout(8)))
        x_pieces = cute.logical_divide(x, (None, cute.make_layout(8)))
        upper_row = block * STRIP + group
        begin = slice_of_k * (self.inputs // BLOCK_K) // WARPS
        end = (slice_of_k + 1) * (self.inputs // BLOCK_K) // WARPS
        upper = cute.make_rmem_tensor(cute.make_layout((8, self.ahead)), BFloat16)
        lower = cute.make_rmem_tensor(cute.make_layout((8, self.ahead)), BFloat16)
        part = cute.make_rmem_tensor(cute.make_layout((8, self.ahead, self.tiles)), BFloat16)
        for i in cutlass.range_constexpr(self.ahead):
            if begin + i < end:
                piece = (begin + i) * 4 + place
                cute.autovec_copy(w_pieces[upper_row, (None, piece)], upper[None, i])
                cute.autovec_copy(w_pieces[upper_row + 8, (None, piece)], lower[None, i])
        cute.arch.griddepcontrol_wait()
        # Not before: as in `sm90_linear.cu`, what starts after a product may read what the product's input was made from.
        cute.arch.griddepcontrol_launch_dependents()
        first = begin
        while first < end:
            for i in cutlass.range_constexpr(self.ahead):
                if first + i < end:
                    for tile in cutlass.range_constexpr(self.tiles):
                        row = cutlass.min(tile * 8 + group, rows - 1)
                        cute.autovec_copy(x_pieces[row, (None, (first + i) * 4 + place)], part[None, i, tile])
            for i in cutlass.range_constexpr(self.ahead):
                if first + i < end:
                    for half in cutlass.range_constexpr(2):
                        for j in cutlass.range_constexpr(2):
                            a[j] = upper[half * 4 + j, i]
                            a[2 + j] = lower[half * 4 + j, i]
                            a[4 + j] = upper[half * 4 + 2 + j, i]
                            a[6 + j] = lower[half * 4 + 2 + j, i]
                            for tile in cutlass.range_constexpr(self.tiles):
                                b[4 * tile + j] = part[half * 4 + j, i, tile]
                                b[4 * tile + 2 + j] = part[half * 4 + 2 + j, i, tile]
                        cute.gemm(mma, sums, a, b, sums)
            first += self.ahead
            for i in cutlass.range_constexpr(self.ahead):
                if first + i < end:
                    piece = (first + i) * 4 + place
                    cute.autovec_copy(w_pieces[upper_row, (None, piece)], upper[None, i])
                    cute.autovec_copy(w_pieces[upper_row + 8, (None, piece)], lower[None, i])
        for tile in cutlass.range_constexpr(self.tiles):
            for i in cutlass.range_constexpr(4):
                partial[slice_of_k, tile * 8 + place * 2 + i % 2, group + i // 2 * 8] = sums[4 * tile + i]
        cute.arch.sync_threads()
        token, output = thread // STRIP, thread % STRIP
        if token < rows:
            total = partial[0, token, output]
            for other in cutlass.range_constexpr(1, WARPS):
                total += partial[other, token, output]
            if cutlass.const_expr(self.has_residual):
                total += residual[token, block * STRIP + output].to(Float32)
            y[token, block * STRIP + output] = total.to(BFloat16)


def _pointer(address: int):
    return make_ptr(BFloat16, address, cute.AddressSpace.gmem, assumed_align=16)


def _stream() -> driver.CUstream:
    return driver.CUstream(torch.cuda.current_stream().cuda_stream)


@cache
def compiled(outputs: int, inputs: int, tiles: int, has_residual: int):
    """The product of one shape, compiled by its first call."""
    numbers = (Int32(1), Int32(inputs), Int32(outputs))
    product = Product(outputs, inputs, tiles, has_residual)
    return cute.compile(product, *(_pointer(16) for _ in range(4)), *numbers, driver.CUstream(0))


def serves(x: Tensor, weight: Tensor, residual: Tensor | None) -> bool:
    """Whether the kernel takes this call: 1 to 16 rows of bfloat16 where 16 bytes can be read at a time."""
    outputs, inputs = weight.shape
    tensors = [x, weight] + ([] if residual is None else [residual])
    return (
        all(tensor.is_cuda and tensor.dtype is torch.bfloat16 and tensor.stride(1) == 1 for tensor in tensors)
        and 0 < x.shape[0] <= MOST_ROWS
        and outputs % STRIP == 0
        and inputs % BLOCK_K == 0
        and x.stride(0) % 8 == 0
        and weight.is_contiguous()
        and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
    )


@linear_bf16.on("cutedsl")
def run(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """Up to 16 rows of bfloat16 with a weight as stored: the kernel. More, or widths that its blocks do not divide: cuBLAS. Other
    types: the reference. A shape is compiled by its first call, which takes a second or two."""
    if not serves(x, weight, residual):
        is_bf16 = x.dtype is weight.dtype is torch.bfloat16 and (residual is None or residual.dtype is torch.bfloat16)
        if not is_bf16:
            return linear_bf16.reference(x, weight, residual)
        return by_library(x, weight, residual)
    (rows, inputs), outputs = x.shape, weight.shape[0]
    y = torch.empty(rows, outputs, dtype=torch.bfloat16, device=x.device)
    added = y if residual is None else residual
    product = compiled(outputs, inputs, 1 if rows <= 8 else 2, int(residual is not None))
    pointers = (_pointer(tensor.data_ptr()) for tensor in (weight, x, added, y))
    product(*pointers, Int32(rows), Int32(x.stride(0)), Int32(added.stride(0)), _stream())
    return y
