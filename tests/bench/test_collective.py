"""The benchmark of collectives without a GPU: what is made of the ranks' figures, and what is refused."""

import pytest

from legato.bench.collective import measure_ranks, slowest
from legato.bench.ops import BenchError
from legato.cli.bench import bench_ranks
from legato.config import ConfigError


def figure(samples, fault=None, **more):
    return {
        "op": "all_reduce_add_norm",
        "width": 6144,
        "where": "chain",
        "implementation": "sm90",
        "rows": 6,
        "samples": samples,
        "fault": fault,
        **more,
    }


def test_the_slowest_rank_counts_sample_by_sample() -> None:
    first, second = figure([1.0, 9.0, 3.0], chain_us=14.0), figure([2.0, 4.0, 5.0])
    (made,) = slowest([[first], [second]])
    assert (made.num_ranks, made.p20_us, made.median_us, made.p99_us, made.num_samples) == (2, 2.0, 5.0, 9.0, 3)
    fields = made.fields()
    assert fields["case"] == {"rows": 6, "width": 6144, "ranks": 2, "where": "chain"}
    assert fields["bytes"] == 6 * 6144 * 2 and fields["correct"] and fields["chain_us"] == 14.0


def test_what_is_wrong_on_one_rank_is_wrong() -> None:
    (made,) = slowest([[figure([1.0])], [figure([1.0], fault="3 numbers of h differ")]])
    assert made.fault == "3 numbers of h differ" and not made.fields()["correct"]


def test_ranks_that_printed_different_figures_are_not_compared() -> None:
    with pytest.raises(ValueError):
        slowest([[figure([1.0])], []])


@pytest.mark.parametrize("ranks", [1, 99])
def test_more_ranks_than_gpus_are_refused(ranks: int) -> None:
    with pytest.raises(BenchError, match=f"--ranks {ranks}"):
        measure_ranks(ranks)


def test_only_the_folder_of_sums_has_ranks() -> None:
    with pytest.raises(ConfigError, match="legato bench ops reduce --ranks N"):
        bench_ranks(["gemm"], 2, None)
