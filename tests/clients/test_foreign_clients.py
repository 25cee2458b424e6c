"""Other projects' clients, unmodified, each in an environment of its own: `make check-clients` builds them from the pinned
requirements beside each `check.py`, which says what that client must get."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv-clients"
PYTHON_CLIENTS = sorted(path.parent.name for path in HERE.glob("*/check.py"))


@pytest.mark.clients
@pytest.mark.parametrize("client", PYTHON_CLIENTS)
def test_python_client(client: str, server: str, tmp_path: Path) -> None:
    python = ENVIRONMENTS / client / "bin" / "python"
    assert python.exists(), f"{python} is missing: `make check-clients` builds it"
    run([str(python), str(HERE / client / "check.py"), server], tmp_path)


@pytest.mark.clients
def test_npm_clients(server: str, tmp_path: Path) -> None:
    folder = ENVIRONMENTS / "npm"
    assert (folder / "node_modules").exists(), f"{folder} is missing: `make check-clients` builds it"
    # Node looks for modules beside the script.
    script = folder / "check.mjs"
    script.write_bytes((HERE / "npm" / "check.mjs").read_bytes())
    run(["node", str(script), server], tmp_path)


def run(command: list[str], folder: Path) -> None:
    """Runs a client; what it printed is told where it fails."""
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert result.returncode == 0, f"{result.stdout[-4000:]}\n{result.stderr[-6000:]}"
