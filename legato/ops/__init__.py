"""The vocabulary of GLM-5.2's mathematics: every computation as a function whose body, in plain PyTorch, is its
meaning.

Read the folders in this order and you have read the model: pointwise, gemm, cache, prologue, score, select, attend,
experts, sample, rows, reduce. Imports torch and nothing of ours. Called by `legato.quant`, `legato.model` and `legato.runtime`.
"""

from legato.ops.attend import mark_selected, masked_mla, sparse_mha, sparse_mla
from legato.ops.cache import gather_index_pages, gather_latent, store_index_keys, store_latent
from legato.ops.experts import moe_bf16, moe_fp8_block, moe_int4, moe_nvfp4, route
from legato.ops.gemm import (
    linear_bf16,
    linear_bf16_normed,
    linear_draft,
    linear_fp8_block,
    linear_fp8_block_normed,
    linear_heads,
    linear_int4,
    linear_nvfp4,
    linear_swiglu,
)
from legato.ops.op import BindError, Bindings, Op, bind, registered
from legato.ops.pointwise import (
    embed_norm,
    layer_norm,
    mtp_inputs,
    mtp_looked_up,
    rms_norm,
    rope_angles,
    rope_half,
    rope_interleaved,
    swiglu,
)
from legato.ops.prologue import prologue_bf16, prologue_full, prologue_shared, quantize_index_query
from legato.ops.reduce import add_rms_norm, all_gather, all_reduce_add_norm
from legato.ops.rows import (
    LETTER_EXTRA,
    accept_rows,
    advance_rows,
    cache_slots,
    chain_rows,
    cut,
    decode_rows,
    extend_rows,
    gather_rows,
    seed_rows,
    write_letter,
)
from legato.ops.sample import (
    best_of_keys,
    greedy,
    greedy_keys,
    gumbel,
    likelihood,
    logprobs,
    penalize,
    sample,
    verify,
)
from legato.ops.score import index_scores
from legato.ops.select import top_k

__all__ = [
    "LETTER_EXTRA",
    "BindError",
    "Bindings",
    "Op",
    "accept_rows",
    "add_rms_norm",
    "advance_rows",
    "all_gather",
    "all_reduce_add_norm",
    "best_of_keys",
    "bind",
    "cache_slots",
    "chain_rows",
    "cut",
    "decode_rows",
    "embed_norm",
    "extend_rows",
    "gather_index_pages",
    "gather_latent",
    "gather_rows",
    "greedy",
    "greedy_keys",
    "gumbel",
    "index_scores",
    "layer_norm",
    "likelihood",
    "linear_bf16",
    "linear_bf16_normed",
    "linear_draft",
    "linear_fp8_block",
    "linear_fp8_block_normed",
    "linear_heads",
    "linear_int4",
    "linear_nvfp4",
    "linear_swiglu",
    "logprobs",
    "mark_selected",
    "masked_mla",
    "moe_bf16",
    "moe_fp8_block",
    "moe_int4",
    "moe_nvfp4",
    "mtp_inputs",
    "mtp_looked_up",
    "penalize",
    "prologue_bf16",
    "prologue_full",
    "prologue_shared",
    "quantize_index_query",
    "registered",
    "rms_norm",
    "rope_angles",
    "rope_half",
    "rope_interleaved",
    "route",
    "sample",
    "seed_rows",
    "sparse_mha",
    "sparse_mla",
    "store_index_keys",
    "store_latent",
    "swiglu",
    "top_k",
    "verify",
    "write_letter",
]
