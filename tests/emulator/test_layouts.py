"""What the kernels' own Python code makes of inputs that lie in memory as no kernel reads them: the reference's numbers, or an
error; never a misaligned access, or a gap taken for a number."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("tests.ops.nvrtc")

from legato.ops.catalog import cases
from legato.ops.op import implemented
from tests.emulator.launch import EmulationError, emulated
from tests.emulator.native import compiler

pytestmark = [pytest.mark.full, pytest.mark.skipif(compiler() is None, reason="needs g++")]

#: A case of each op that launches its kernel.
NAMES = (
    "rms_norm rows=6 width=2048 bfloat16",
    "mtp_inputs rows=1 width=6144 bfloat16",
    "embed_norm rows=1 width=6144 bfloat16",
    "mtp_looked_up rows=1 part=768 width=6144 bfloat16",
    "linear_bf16_normed rows=6 n=512 k=384 bfloat16",
    "linear_fp8_block_normed rows=6 n=512 k=384 bfloat16",
    "linear_swiglu rows=6 n=512 k=384 bfloat16",
    "linear_bf16 rows=6 n=512 k=384 bfloat16 residual",
    "linear_fp8_block rows=6 n=512 k=384 bfloat16 residual",
    "linear_bf16 rows=33 n=592 k=640 bfloat16 residual",
    "linear_fp8_block rows=64 n=592 k=640 bfloat16 residual",
    "linear_heads rows=6 heads=8 n=512 k=192 bfloat16",
    "prologue_shared rows=6 heads=4 nope=64 bfloat16 latent=bfloat16",
    "prologue_full rows=16 heads=4 nope=64 bfloat16 latent=uint8 keys=uint8",
    "index_scores rows=6 lengths=64,65,3,191 uint8",
    "top_k mixed k=64 lengths=0..1000",
    "sparse_mla rows=1 heads=8 width=2048 bfloat16 cache=bfloat16",
    "sparse_mla rows=1 heads=8 width=2048 bfloat16 cache=uint8",
    "mark_selected start=70 rows=61 width=40",
    "masked_mha start=150 rows=61 heads=3 width=100 bfloat16",
    "moe_bf16 rows=6 choices=2 experts=8 f=128 d=128 bfloat16 shared",
    "moe_fp8_block rows=6 choices=2 experts=8 f=128 d=128 bfloat16 shared in FP8",
    "moe_nvfp4 rows=6 choices=2 experts=8 f=128 d=128 bfloat16 shared",
    "moe_int4 rows=6 choices=2 experts=8 f=128 d=128 bfloat16",
    "greedy rows=6 vocab=1001",
    "sample rows=12 vocab=1000",
    "likelihood rows=6 vocab=1001",
    "best_of_keys ranks=8 rows=96",
    "advance_rows requests=16 width=8 weighed",
    "decode_rows requests=16 width=6",
    "chain_rows requests=16 steps=4",
    "seed_rows requests=1 rows=6 hidden=6144 width=2048 bfloat16",
    "accept_rows requests=16 width=6",
    "extend_rows requests=16 width=6 known=0",
    "write_letter requests=16 width=6 drafts=5",
    "add_rms_norm rows=6 width=256 bfloat16",
    "all_reduce_add_norm rows=6 width=6144 ranks=8 rank=5 bfloat16",
)
Place = tuple[tuple[int, ...], Callable[[Tensor], Tensor]]


def places(x: Tensor) -> dict[str, Place]:
    """Where `x` may lie: the shape of the memory around it, and its part of that."""
    found: dict[str, Place] = {}
    if x.numel() and x.dim():
        found["from the second place on"] = (x.numel() + 9,), lambda around: around[1 : 1 + x.numel()].view(x.shape)
        found["in every second place"] = (*x.shape, 2), lambda around: around[..., 0]
    if x.numel() and x.dim() > 1:
        for more in (3, 64):
            wider = (*x.shape[:-1], x.shape[-1] + more)
            found[f"in rows longer by {more}"] = wider, lambda around: around[..., : x.shape[-1]]
        found["by columns"] = (x.shape[1], x.shape[0], *x.shape[2:]), lambda around: around.transpose(0, 1)
    return found


def moved(x: Tensor, place: Place) -> Tensor:
    """`x` there; every bit around it is one, which is NaN, -1 or True."""
    shape, part = place
    around = torch.empty(shape, dtype=x.dtype)
    if x.dtype == torch.bool:
        around.fill_(True)
    else:
        around.view(torch.uint8).fill_(255)
    return part(around).copy_(x)


def tensors(arguments: tuple[Any, ...]) -> Iterator[tuple[int, str, Tensor]]:
    """The tensors of a call: its arguments ("" for a field), and the fields of those."""
    for index, value in enumerate(arguments):
        if isinstance(value, Tensor):
            yield index, "", value
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                if isinstance(one := getattr(value, field.name), Tensor):
                    yield index, field.name, one


def with_moved(arguments: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The same call with one of its tensors in one of its places, and which."""
    for index, field, tensor in tensors(arguments):
        for where, place in places(tensor).items():
            put = moved(tensor, place)
            changed = dataclasses.replace(arguments[index], **{field: put}) if field else put
            yield f"argument {index} {field} {where}", (*arguments[:index], changed, *arguments[index + 1 :])


@pytest.mark.parametrize("name", NAMES)
def test_inputs_that_lie_elsewhere_are_refused_or_give_the_same(name: str) -> None:
    implemented("sm90")
    (case,) = (case for case in cases() if case.name == name)
    implementation = case.op.implementations["sm90"]
    expected = case.outputs(case.op.reference, case.inputs("cpu"))
    wrong: list[str] = []
    launched = 0
    for what, arguments in with_moved(case.inputs("cpu")):
        arguments = copy.deepcopy(arguments)  # some are written to
        with torch.inference_mode(), emulated() as emulation:
            try:
                found = case.outputs(implementation.run, case.packed(implementation, arguments))
                problem = case.mismatch(found, expected)
            except EmulationError as error:
                problem = str(error)
            except (ValueError, RuntimeError):  # what it will not read, or PyTorch cannot view
                problem = None
        launched += len(emulation.launched)
        if problem is not None:
            wrong.append(f"{what}: {problem}")
    assert not wrong, "\n".join(wrong)
    assert launched, "no kernel was launched: this case shows nothing"
