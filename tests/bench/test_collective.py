"""The benchmark of collectives without a GPU: what is made of the ranks' figures, and what is refused."""

import sys
from pathlib import Path

import pytest

from legato.bench.collective import measure_ranks, outputs, slowest
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


def test_ranks_that_wait_for_each_other_may_print_more_than_a_pipe_holds(tmp_path: Path) -> None:
    waits = (
        f"import time; from pathlib import Path\nwhile not Path({str(tmp_path / 'done')!r}).exists(): time.sleep(0.01)"
    )
    prints = f"from pathlib import Path; print('x' * 300_000); Path({str(tmp_path / 'done')!r}).touch()"
    first, second = outputs([[sys.executable, "-c", waits], [sys.executable, "-c", prints]], 300)
    assert (len(first), len(second.strip())) == (0, 300_000)


def test_a_rank_that_fails_or_does_not_end_is_an_error() -> None:
    with pytest.raises(BenchError, match="rank 0 failed: no device"):
        outputs([[sys.executable, "-c", "raise SystemExit('no device')"]], 300)
    with pytest.raises(BenchError, match="not done after 0 s"):
        outputs([[sys.executable, "-c", "import time; time.sleep(60)"]], 0.2)
