"""`legato doctor`: wrong ops are found and named, what is missing is said with the fix, and a CPU is no fault."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from legato.__main__ import app
from legato.bench import doctor
from legato.engine import start
from legato.ops import rms_norm, swiglu
from legato.ops.catalog import cases
from legato.ops.op import Implementation

CPU = torch.device("cpu")


def test_a_healthy_cpu() -> None:
    result = CliRunner().invoke(app, ["doctor", "swiglu", "--device", "cpu", "--output", "json"])
    assert result.exit_code == 0, result.exception
    report = json.loads(result.stdout)
    assert {one["name"]: one["verdict"] for one in report["machine"]} == {"python": "ok", "torch": "ok", "gpu": "note"}
    (op,) = report["ops"]
    assert op["implementation"] == "reference" and op["wrong"] == [] and op["cases"] >= 3 and op["median_us"] > 0
    text = CliRunner().invoke(app, ["doctor", "swiglu", "--device", "cpu"]).stdout
    assert "swiglu" in text and "CPU" in text


def test_a_wrong_op_is_named_and_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Implementation("sm90", lambda x: swiglu.reference(x) * 1.5)
    monkeypatch.setattr(doctor, "target_of", lambda device: "sm90")
    monkeypatch.setattr(doctor, "implemented", lambda target: ())
    monkeypatch.setitem(swiglu.implementations, "sm90", bad)
    monkeypatch.delitem(rms_norm.implementations, "sm90", raising=False)  # another test may have imported the kernels
    result = CliRunner().invoke(app, ["doctor", "swiglu", "rms_norm", "--device", "cpu"])
    assert result.exit_code == 1
    assert "wrong  swiglu" in result.stdout and "--op swiglu=reference" in result.stdout
    found = {one.name: one for one in doctor.health(CPU, ["swiglu", "rms_norm"])}
    assert len(found["swiglu"].wrong) == found["swiglu"].num_cases and found["swiglu"].spread is None
    assert found["rms_norm"].wrong == () and found["rms_norm"].implementation == rms_norm.bound.target


def test_an_op_that_raises_is_wrong_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(doctor, "target_of", lambda device: "sm90")
    monkeypatch.setattr(doctor, "implemented", lambda target: ())
    monkeypatch.setitem(swiglu.implementations, "sm90", Implementation("sm90", broken))
    (found,) = doctor.health(CPU, ["swiglu"])
    assert len(found.wrong) == found.num_cases and "no kernel image" in found.wrong[0]


def test_a_few_cases_of_production_size_are_examined() -> None:
    every = [case for case in cases() if case.on != "any" and case.op.name == "linear_bf16"]
    few = doctor._few(every)
    quick = [case.bytes for case in every if case.bytes <= doctor._QUICK_BYTES]
    assert len(few) == 3 < len(quick) < len(every)
    assert few[0].bytes == min(quick) and few[-1].bytes == max(quick), "the largest is timed"
    assert doctor._few([]) == [] and len(doctor._few(every[:1])) <= 1


def test_missing_packages_and_folders_come_with_the_fix(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(start, "CUDA_EXTRA", ("no.such.module",))
    assert start.missing_packages() == ["no.such.module"], "a missing parent is a missing package, not a crash"
    (finding,) = doctor._compiler()
    assert finding.verdict == "fault" and "no.such.module" in finding.found and "pip install" in finding.remedy
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert doctor._cache(blocked / "kernels").verdict == "note"
    assert doctor._cache(tmp_path / "kernels").verdict == "ok"
    assert "HOME" in doctor._cache(None).remedy


def test_unknown_ops_are_refused() -> None:
    result = CliRunner().invoke(app, ["doctor", "nonsense"])
    assert result.exit_code != 0 and "nonsense" in str(result.exception) and "select" in str(result.exception)
    assert "did you mean swiglu" in str(CliRunner().invoke(app, ["doctor", "swigul"]).exception)


def test_a_folder_stands_for_its_ops() -> None:
    assert [one.name for one in doctor.health(CPU, ["select"])] == ["top_k"]
