"""The checkpoints that ship with the package.

Owns where they are, nothing else. The engine opens `SMALL` when no model is named.
"""

from pathlib import Path

SMALL = Path(__file__).parent / "small"
"""A small trained checkpoint of GLM-5.2's architecture; its README says what it was trained on and what it can do."""
