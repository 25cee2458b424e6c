"""Documentation as tests: code in it runs or parses, commands and links exist, the command reference is the generated one.

A fenced block marked `run` after its language is executed; other `python` blocks must parse, and every `legato` and `make`
command in other `sh` blocks must name a subcommand, flags and a target that exist.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup

from legato.__main__ import app
from legato.checkpoints import SMALL
from legato.model.spec import ModelSpec

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("docs", "examples", "legato", "records", "tools")
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"(?<!!)\[[^\]]+\]\(([^)\s]+)\)")
OWN_PATH = re.compile(r"`((?:legato|docs|tests|tools|records)/[\w./*{},-]+)`")
SHAPE = re.compile(r"\[([A-Z0-9][A-Za-z0-9+*/ ,()_-]*)\]")
LEGEND_ROW = re.compile(r"^\| ([A-Z]) \|", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    marks: tuple[str, ...]
    text: str

    @property
    def id(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.text.strip().splitlines()[0][:40] if self.text.strip() else ''}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for info, text in FENCE.findall(page.read_text()):
            language, *marks = info.split() or [""]
            yield Block(page, language, tuple(marks), text)


BLOCKS = list(blocks())
COMMANDS = typer.main.get_command(app)


def block_ids(block: Block) -> str:
    return block.id


@pytest.mark.parametrize("block", [b for b in BLOCKS if "run" in b.marks], ids=block_ids)
def test_blocks_marked_run_do_run(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: to import torch again and again takes longer than the blocks."""
    assert block.language == "python", "only Python can be marked"
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, block.id, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=block_ids)
def test_python_parses(block: Block) -> None:
    ast.parse(block.text)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "sh"], ids=block_ids)
def test_commands_exist(block: Block) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for line in re.sub(r"\\\n", " ", block.text).splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words[:1] == ["make"]:
            assert all(re.search(rf"^{target}:", makefile, re.M) for target in words[1:]), line
        elif words[:1] == ["legato"]:
            check_flags(words[1:], line)


def check_flags(words: list[str], line: str) -> None:
    assert isinstance(COMMANDS, TyperGroup)
    if not words or words[0].startswith("-"):
        return
    assert words[0] in COMMANDS.commands, f"no such subcommand: {line}"
    command = COMMANDS.commands[words[0]]
    if isinstance(command, TyperGroup):
        assert words[1:] and words[1] in command.commands, f"no such subcommand: {line}"
        command = command.commands[words[1]]
    known = {"--help"}
    for parameter in command.params:
        known |= {*parameter.opts, *parameter.secondary_opts}
    for word in words[1:]:
        if re.match(r"--?[a-z]", word):
            assert word.partition("=")[0] in known, f"no such flag: {word} in {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_paths_resolve(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    broken: list[str] = []
    for target in LINK.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    for name in OWN_PATH.findall(text):
        if "{" not in name and not (list(ROOT.glob(name.rstrip("/"))) if "*" in name else (ROOT / name).exists()):
            broken.append(name)
    assert not broken


def anchors(file: Path) -> set[str]:
    """Anchors of a page's headings, as Markdown renderers make them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", file.read_text()), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_shapes_is_the_only_legend() -> None:
    legends = [page for page in PAGES if len(LEGEND_ROW.findall(page.read_text())) >= 3]
    assert legends == [ROOT / "docs" / "shapes.md"]


def test_every_shape_letter_is_in_the_legend() -> None:
    legend = set(LEGEND_ROW.findall((ROOT / "docs" / "shapes.md").read_text()))
    unknown: set[str] = set()
    for path in (ROOT / "legato").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            for shape in SHAPE.findall(ast.get_docstring(node) or ""):
                letters = set(re.findall(r"(?<![A-Za-z_])([A-Z])(?![A-Za-z_])", shape))
                unknown |= {f"{path.relative_to(ROOT)}: [{shape}]" for _ in letters - legend}
    assert not unknown


def test_legend_states_the_shipped_checkpoint() -> None:
    spec = ModelSpec.from_config(json.loads((SMALL / "config.json").read_text()))
    rows = re.findall(r"^\| ([A-Z]) \|[^|]*\|[^|]*\| ([^|]*) \|$", (ROOT / "docs" / "shapes.md").read_text(), re.M)
    widths = {
        "D": spec.hidden_size, "H": spec.num_heads, "Q": spec.q_lora_rank, "C": spec.kv_lora_rank, "R": spec.rope_dim,
        "N": spec.nope_dim, "V": spec.v_dim, "I": spec.index_heads, "X": spec.index_dim, "S": spec.index_topk,
        "E": spec.num_experts, "A": spec.experts_per_token, "W": spec.vocab_size, "L": f"up to {spec.max_position}",
        "F": f"{spec.expert_intermediate}; {spec.dense_intermediate}",
    }  # fmt: skip
    assert {letter: said for letter, said in rows if letter in widths} == {
        letter: str(n) for letter, n in widths.items()
    }


def test_command_reference_is_the_generated_one(tmp_path: Path) -> None:
    """`make docs` writes it."""
    page = tmp_path / "cli.md"
    command = [
        sys.executable,
        "-m",
        "typer",
        "legato.__main__",
        "utils",
        "docs",
        "--name",
        "legato",
        "--output",
        str(page),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=400)
    assert page.read_text() == (ROOT / "docs" / "cli.md").read_text()


def test_the_map_of_the_server_names_every_file() -> None:
    """Each row names what lies in `legato/server` on its left, and what lies in that package on its right."""
    page = (ROOT / "docs" / "request.md").read_text()
    rows = re.findall(
        r"^\| (`.+?) \| (.+) \|$", page.partition("The server's packages")[2].partition("In code")[0], re.M
    )
    server = ROOT / "legato" / "server"
    listed = {name: told for left, told in rows for name in names_in(left)}
    assert set(listed) == names_below(server)
    for name, told in listed.items():
        if (server / name).is_dir():
            assert names_below(server / name) <= set(names_in(told)), name


def names_in(cell: str) -> list[str]:
    return re.findall(r"`(\w+)/?`", cell)


def names_below(folder: Path) -> set[str]:
    return {path.stem for path in folder.iterdir() if not path.stem.startswith("__")}
