"""`legato bench ops`: wrong results have no time, records carry their conditions, faults are said."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from legato.__main__ import app
from legato.bench import ops as bench_ops
from legato.bench.ops import BenchError, chosen, described, measure, measure_one
from legato.bench.record import MEASURED_BANDWIDTH, floor_us
from legato.bench.timing import Spread, time_calls
from legato.ops import linear_bf16, rms_norm
from legato.ops.catalog import cases
from legato.ops.op import Implementation
from legato.quant.dense import DenseWeight

CPU = torch.device("cpu")
REQUIRED = {
    "bench", "name", "implementation", "case", "median_us", "p20_us", "p80_us", "bytes", "roofline_percent", "correct",
    "gpu", "driver", "clocks", "commit", "dirty", "command", "date",
}  # fmt: skip


def small(op_name: str):
    return next(case for case in cases() if case.op.name == op_name and case.on == "any")


def test_a_record_line_has_every_field(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ops.jsonl"
    arguments = ["bench", "ops", "pointwise", "--case", "swiglu*", "--device", "cpu", "--json", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.exception
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 3 and set(lines[0]) >= REQUIRED
    first = lines[0]
    assert first["name"] == "swiglu" and first["case"] == {"rows": 1, "width": 256} and first["correct"] is True
    assert 0 < first["p20_us"] <= first["median_us"] <= first["p80_us"]
    assert first["gpu"] is None and first["roofline_percent"] is None, "a CPU has no roofline here"


def test_a_wrong_result_has_no_time() -> None:
    wrong = Implementation("wrong", lambda x, weight, eps: rms_norm.reference(x, weight, eps) * 1.1)
    figure = measure_one(small("rms_norm"), wrong, CPU)
    assert figure.chain is None and "differ" in (figure.fault or "")
    assert figure.fields(None)["correct"] is False and figure.fields(None)["median_us"] is None


def test_a_result_that_goes_wrong_while_timed_has_no_time() -> None:
    calls = []

    def late(x, weight, eps):
        calls.append(1)
        return rms_norm.reference(x, weight, eps) * (1.0 if len(calls) < 3 else 1.1)

    figure = measure_one(small("rms_norm"), Implementation("late", late), CPU)
    assert figure.chain is None and "timed run" in (figure.fault or "")


def test_weights_are_packed_once_before_the_clock_runs() -> None:
    packed, own = [], linear_bf16.implementations["reference"].pack
    assert own is not None

    def pack(weight):
        packed.append(weight.shape)
        return own(weight)

    figure = measure_one(small("linear_bf16"), Implementation("packing", linear_bf16.reference, pack), CPU)
    assert figure.fault is None and len(packed) == 2, "once for parity, once for all timed calls"


def test_what_is_asked_for_and_missing_is_said() -> None:
    with pytest.raises(BenchError, match="gmm"):
        chosen(["gmm"], "*", CPU)
    with pytest.raises(BenchError, match="nothing\\*"):
        chosen([], "nothing*", CPU)
    with pytest.raises(BenchError, match="need a GPU"):
        chosen(["gemm"], "linear_draft*bfloat16", CPU)
    with pytest.raises(BenchError, match="sm1"):
        measure(chosen(["rows"], "*", CPU), "sm1", CPU)


def test_case_names_become_objects() -> None:
    case = next(case for case in cases() if case.name.startswith("linear_bf16 rows=6 n=512"))
    assert described(case) == {"rows": 6, "n": 512, "k": 384, "is": "bfloat16 residual"}


def test_the_floor_is_the_larger_of_bytes_and_arithmetic() -> None:
    assert MEASURED_BANDWIDTH["NVIDIA H200"] == 4.3e12
    assert floor_us("NVIDIA H200", 43_000_000, 0) == pytest.approx(10)
    assert floor_us("NVIDIA H200", 43_000_000, 790_000_000 * 20) == pytest.approx(20)
    assert floor_us(None, 43_000_000, 0) is None and floor_us("another", 1, 1) is None


def test_percentiles() -> None:
    spread = Spread.of([float(i) for i in range(11)], "cpu")
    assert (spread.p20_us, spread.median_us, spread.p80_us) == (2.0, 5.0, 8.0)


def test_times_are_per_call_and_results_are_those_of_the_timed_run() -> None:
    spread, results = time_calls([lambda: 1, lambda: 2], CPU)
    assert results == [1, 2] and spread.method == "cpu" and spread.median_us < 1e4


def test_weights_kept_in_several_forms_count_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied so that calls do not find each other's inputs in the cache must fit half of the free memory."""
    form = DenseWeight(torch.zeros(100))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (16_000, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=0))
    assert bench_ops._copies_that_fit(cases()[0], [(form, torch.zeros(50)), form, 3], torch.device("cuda")) == 8
