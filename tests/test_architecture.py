"""The rules of the house as tests: who may import whom, what stays free of torch, names, docstrings and sizes.

Reads source text only (and starts two short interpreters). `lint-imports` checks the layers; this file checks what it cannot.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "legato"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "checkpoints" not in path.parts)

FORBIDDEN_NAMES = {
    "utils",
    "util",
    "helpers",
    "helper",
    "common",
    "misc",
    "base",
    "core",
    "manager",
    "handler",
    "impl",
    "v2",
}
TORCH_FREE = (
    "config",
    "plan",
    "types",
    "schedule",
    "server",
    "server/engine/client",
    "engine/messages",
    "engine/channel",
    "engine/loop",
    "engine/process",
    "engine/serving",
    "cli/options",
    "cli/preflight",
    "cli/faults",
)
LOCAL_IMPORTS_ALLOWED = {"__main__.py", "ops/op.py", "cli/bench_commands.py", "cli/share_commands.py"}
SERVER_MAY_IMPORT = ("legato.server", "legato.engine.messages", "legato.types", "legato.config")
OPS_MAY_IMPORT = ("legato.ops",)
IMPORT_NOTHING_OF_OURS = ("types.py", "config.py")
SMELL_LINES = 300
HARD_LINES = 450
"""Near 300 lines is a smell that the report prints; from here on a file must be split. Kernels are exempt."""


def name_of(path: Path) -> str:
    """`legato/ops/op.py` as `ops/op.py`: how the rules above name a module."""
    return path.relative_to(PACKAGE).as_posix()


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_kernel(path: Path) -> bool:
    return re.fullmatch(r"ops/\w+/(sm\d+\w*|\w*_sm\d+\w*|cutedsl)\.py", name_of(path)) is not None


@cache
def tree_of(path: Path) -> ast.Module:
    """A module's source, parsed once."""
    return ast.parse(path.read_text(), str(path))


@cache
def imports_of(path: Path) -> list[tuple[int, str]]:
    """Every import in a file, wherever it stands, as (line, absolute dotted name)."""
    found: list[tuple[int, str]] = []
    package = dotted(path).split(".") if path.name == "__init__.py" else dotted(path).split(".")[:-1]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*prefix, *([node.module] if node.module else [])])
            if source == "legato":
                found += [(node.lineno, f"legato.{alias.name}") for alias in node.names]
            else:
                found.append((node.lineno, source))
    return found


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def wrong_imports(prefix: str, allowed: tuple[str, ...]) -> list[str]:
    """Imports of ours, by modules under `prefix`, that are outside `allowed`."""
    return [
        f"{name_of(path)}:{line} imports {module}"
        for path in MODULES
        if name_of(path).startswith(prefix)
        for line, module in imports_of(path)
        if is_within(module, ("legato",)) and not is_within(module, allowed)
    ]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_module_opens_with_a_docstring(path: Path) -> None:
    text = ast.get_docstring(tree_of(path)) or ""
    assert text, f"{name_of(path)} has no docstring: say what it owns, what it must not know, who calls it"
    if path.name != "__init__.py":
        assert len(text.splitlines()) >= 2, (
            f"{name_of(path)}: one line is not enough for owns / must not know / who calls it"
        )


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_names_say_what_they_hold(path: Path) -> None:
    parts = re.split(r"[/_.]", name_of(path).removesuffix(".py"))
    assert not FORBIDDEN_NAMES & set(parts), f"{name_of(path)}: a package is a noun of the domain or a verb of the loop"


def test_no_function_local_imports() -> None:
    local = [
        f"{name_of(path)}:{inner.lineno}"
        for path in MODULES
        if name_of(path) not in LOCAL_IMPORTS_ALLOWED
        for outer in ast.walk(tree_of(path))
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(outer)
        if isinstance(inner, ast.Import | ast.ImportFrom)
    ]
    assert not local


def test_server_knows_the_engine_by_its_messages_only() -> None:
    assert not wrong_imports("server/", SERVER_MAY_IMPORT)


def test_ops_import_nothing_of_ours() -> None:
    assert not wrong_imports("ops/", OPS_MAY_IMPORT)


@pytest.mark.parametrize("name", IMPORT_NOTHING_OF_OURS)
def test_ground_modules_import_nothing_of_ours(name: str) -> None:
    assert not wrong_imports(name, ())


def test_plan_imports_types_only() -> None:
    assert not wrong_imports("plan.py", ("legato.types",))


def test_no_torch_where_decisions_and_text_are_made() -> None:
    wrong = [
        f"{name_of(path)}:{line}"
        for path in MODULES
        if name_of(path).startswith(TORCH_FREE)
        for line, module in imports_of(path)
        if is_within(module, ("torch", "triton", "cuda"))
    ]
    assert not wrong


@pytest.mark.parametrize(
    "module", ["legato", "legato.__main__", *(f"legato.{name.replace('/', '.')}" for name in TORCH_FREE)]
)
def test_import_leaves_torch_out(module: str) -> None:
    path = ROOT / module.replace(".", "/")
    if not (path.with_suffix(".py").exists() or (path / "__init__.py").exists()):
        pytest.skip(f"{module} does not exist yet")
    code = f"import sys, {module}; sys.exit(' '.join({{'torch', 'transformers'}} & set(sys.modules)) or 0)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert result.returncode == 0, result.stderr


def test_kernels_are_imported_by_binding_only() -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {module}"
        for path in MODULES
        if not is_kernel(path) and name_of(path) not in ("ops/build.py", "parallel/ipc.py")
        for line, module in imports_of(path)
        if re.search(r"\.(sm\d+|cutedsl)", module) or is_within(module, ("triton", "cuda", "cutlass"))
    ]
    assert not wrong


def test_the_build_of_kernels_is_imported_by_kernels_only() -> None:
    wrong = [
        f"{name_of(path)}:{line} imports {module}"
        for path in MODULES
        if not is_kernel(path) and name_of(path) != "ops/build.py"
        for line, module in imports_of(path)
        if is_within(module, ("legato.ops.build",))
    ]
    assert not wrong, "whatever every machine imports must not reach cuda.core"


def test_environment_is_read_in_one_place() -> None:
    wrong = [
        name_of(path)
        for path in MODULES
        if name_of(path) != "config.py" and re.search(r"\bos\.(environ|getenv)\b|\bimport environ\b", path.read_text())
    ]
    assert not wrong, "config.py is the only reader of environment variables"


def test_repository_speaks_of_legato_alone() -> None:
    """No machine's paths and no registry hosts in tracked text."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    paths = r"(?<![\w.])/" + r"work/|/opt/" + r"(wheels|pypi)"
    hosts = r"files\.python" + r"hosted|py" + r"pi\.org|download\.py" + r"torch"
    pattern = re.compile(f"{paths}|{hosts}")
    wrong = []
    for name in tracked:
        path = ROOT / name
        if (
            path.suffix in {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".json", ".jinja", ".cu", ""}
            and path.is_file()
        ):
            if path.stat().st_size > 1_000_000:
                continue
            if match := pattern.search(path.read_text(errors="replace")):
                wrong.append(f"{name}: {match.group()}")
    assert not wrong


def test_file_sizes(record_property: Callable[[str, object], None]) -> None:
    sizes = {name_of(path): len(path.read_text().splitlines()) for path in MODULES if not is_kernel(path)}
    smells = {name: lines for name, lines in sizes.items() if lines > SMELL_LINES}
    record_property("near_the_limit", smells)
    if smells:
        print(
            "files over", SMELL_LINES, "lines:", ", ".join(f"{name} {lines}" for name, lines in sorted(smells.items()))
        )
    assert not {name: lines for name, lines in sizes.items() if lines > HARD_LINES}
