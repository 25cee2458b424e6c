"""The launches of an iteration against figures worked out by hand."""

import itertools

import pytest

from legato.bench.launches import BF16_BITS, GLM_5_2, Rank, distinct_experts, iteration
from legato.model.spec import ModelSpec
from tests import release

SPEC = ModelSpec.from_config(GLM_5_2)


def test_the_shape_is_that_of_the_release() -> None:
    published = ModelSpec.from_config(release.CONFIG)
    assert {**vars(SPEC), "name": "", "eos_ids": ()} == {**vars(published), "name": "", "eos_ids": ()}


def test_bytes_of_a_rank_of_8() -> None:
    """19.1 GB per iteration: 16.0 to verify six rows, 0.9 to extend the drafts, 0.53 for each of four chain steps."""
    launches = iteration(Rank(SPEC, 8), 5)
    total = sum(launch.weight_bytes for launch in launches)
    assert total == pytest.approx(19.1e9, rel=0.01)
    starts = [index for index, launch in enumerate(launches) if launch.name == "eh_proj"]
    assert len(starts) == 5 and [launches[index].rows for index in starts] == [6, 1, 1, 1, 1]
    verify = sum(launch.weight_bytes for launch in launches[: starts[0]])
    assert verify == pytest.approx(16.0e9, rel=0.005)
    parts = [*starts, len(launches)]
    steps = [sum(launch.weight_bytes for launch in launches[a:b]) for a, b in itertools.pairwise(parts)]
    assert steps[0] == pytest.approx(0.9e9, rel=0.05) and steps[1] == pytest.approx(0.535e9, rel=0.03)
    assert len(set(steps[1:])) == 1


def test_shapes_of_single_launches() -> None:
    by_name = {launch.name: launch for launch in reversed(iteration(Rank(SPEC, 8), 5))}
    assert (by_name["q_b"].outputs, by_name["q_b"].inputs) == (2048 + 4096, 2048)
    assert (by_name["o_proj"].outputs, by_name["o_proj"].inputs) == (6144, 2048)
    assert by_name["experts"].weight_bytes == pytest.approx(3 * 256 * 6144 * (44.4 * 4.5 / 8 + 2), rel=0.003)
    assert by_name["lm_head"].outputs == 19360 and by_name["top_k"].weight_bytes == 0
    counts = [launch.name for launch in iteration(Rank(SPEC, 8), 5)]
    assert counts.count("add_norm") == 2 * counts.count("attend") and len(counts) == 902
    assert counts.count("top_k") == 21 + 1 and counts.count("dense_down") == 3 and counts.count("attend") == 78 + 5


def test_distinct_experts() -> None:
    assert distinct_experts(SPEC, 1) == 8
    assert distinct_experts(SPEC, 6) == pytest.approx(44.4, abs=0.1)


def test_without_drafts_the_mtp_layer_does_not_run() -> None:
    assert not any(launch.name == "eh_proj" for launch in iteration(Rank(SPEC, 1), 0, BF16_BITS))


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="num_heads = 64"):
        Rank(SPEC, 3)
