"""Declaring, attaching and binding ops."""

import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import legato.ops.op as op_module
from legato.ops.op import BindError, Op, bind, op, registered


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Op]]:
    """A registry of its own with two ops in the folders `rows` and `prologue`."""
    fresh: dict[str, Op] = {}
    monkeypatch.setattr(op_module, "_REGISTRY", fresh)

    def double(x: int) -> int:
        """Twice x."""
        return 2 * x

    def negate(x: int) -> int:
        return -x

    double.__module__, negate.__module__ = "legato.ops.rows", "legato.ops.prologue"
    op(double)
    op(reference_ok=True)(negate)
    yield fresh


def test_an_op_is_its_reference_until_bound(registry):
    assert registry["double"](4) == 8
    assert registry["double"].__doc__ == "Twice x."
    assert registry["double"].folder == "rows"
    assert "reference" in repr(registry["double"])


def test_bind_takes_the_first_target_that_has_an_implementation(registry):
    double = registry["double"]
    double.on("fast")(lambda x: x + x)
    double.on("faster")(lambda x: 1000)
    chosen = bind(["faster", "fast"])
    assert chosen.chosen == {"double": "faster", "negate": "reference"}
    assert double(4) == 1000
    bind(["fast", "faster"])
    assert double(4) == 8 and double.bound.target == "fast"
    bind([])
    assert double.bound.target == "reference"


def test_overrides_by_op_and_by_folder(registry):
    registry["double"].on("fast")(lambda x: 77)
    assert bind(["fast"], {"double": "reference"}).chosen["double"] == "reference"
    assert bind([], {"rows": "fast"}).chosen["double"] == "fast"
    # The op's own entry beats its folder's.
    assert bind([], {"rows": "fast", "double": "reference"}).chosen["double"] == "reference"


def test_an_implementation_whose_packages_are_missing_is_named(registry, monkeypatch):
    def missing(name: str) -> None:
        raise ImportError("needs the extra that has it")

    monkeypatch.setattr(op_module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(op_module.importlib, "import_module", missing)
    with pytest.raises(BindError, match="rows=rare cannot be imported: needs the extra that has it"):
        bind([], {"double": "rare"})


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        ({"duoble": "reference"}, "double"),
        ({"prolog": "reference"}, "prologue"),
        ({"double": "fats"}, "fast"),
        ({"prologue": "nonsense"}, "reference"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(registry, overrides, hint):
    registry["double"].on("fast")(lambda x: 77)
    with pytest.raises(BindError, match=hint):
        bind([], overrides)
    assert registry["double"].bound.target == "reference", "a refused bind must change nothing"


def test_a_missing_implementation_warns_when_it_is_first_wanted(registry):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bind(["sm100"]).fallbacks == ("double",)
        assert registry["negate"](3) == -3, "reference_ok ops never warn"
    with pytest.warns(UserWarning, match="double has no implementation for sm100") as caught:
        assert registry["double"](3) == 6
        assert registry["double"](4) == 8
    assert len(caught) == 1
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bind([])
        registry["double"](3)
        # An explicit override is a decision, not a gap.
        assert bind(["faster"], {"double": "reference"}).fallbacks == ()


def test_only_files_named_for_the_target_are_imported(registry, monkeypatch):
    imported: list[str] = []

    def find_spec(name: str) -> object | None:
        return object() if name.endswith("rows.fast") else None

    def import_module(name: str) -> types.ModuleType:
        imported.append(name)
        registry["double"].implementations.pop("fast", None)
        registry["double"].on("fast")(lambda x: 5)
        return types.ModuleType(name)

    monkeypatch.setattr(op_module.importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(op_module.importlib, "import_module", import_module)
    assert bind(["fast"]).chosen["double"] == "fast"
    assert set(imported) == {"legato.ops.rows.fast"}


def test_declaring_or_attaching_twice_is_refused(registry):
    registry["double"].on("fast")(lambda x: x)
    with pytest.raises(BindError, match="fast"):
        registry["double"].on("fast")(lambda x: x)

    def double(x: int) -> int:
        return x

    with pytest.raises(BindError, match="twice"):
        op(double)


def test_pack_and_plan_are_the_bound_implementations(registry):
    double = registry["double"]
    assert double.pack("w") == "w" and double.pack("w", "s") == ("w", "s") and double.plan(3) is None
    double.on("fast", pack=lambda *w: w[::-1], plan=lambda rows: rows + 1)(lambda x: x)
    bind(["fast"])
    assert double.pack("w", "s") == ("s", "w") and double.plan(3) == 4


def test_the_real_ops_all_bind_to_their_references():
    chosen = bind([]).chosen
    assert len(chosen) == len(registered()) >= 30
    assert set(chosen.values()) == {"reference"}
    assert all(declared.__doc__ for declared in registered())


def test_a_cpu_process_imports_no_kernel_language():
    code = "import sys, legato.ops; sys.exit(' '.join({'cuda.core', 'legato.ops.build'} & set(sys.modules)) or 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr


def test_an_op_belongs_to_the_folder_it_lies_in() -> None:
    """Whatever file of the folder declares it: targets are looked up by folder."""
    folders = {path.name for path in Path(op_module.__file__).parent.iterdir() if path.is_dir()}
    assert {declared.folder for declared in registered()} <= folders
