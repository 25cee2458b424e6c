"""The checkpoints that ship with the package.

Owns where they are, and where the texts are that they were not trained on; nothing else. The engine opens `SMALL` when no model
is named.
"""

from pathlib import Path

SMALL = Path(__file__).parent / "small"
"""A small trained checkpoint of GLM-5.2's architecture; its README says what it was trained on and what it can do."""

HELD_OUT = Path(__file__).parent / "heldout_prompts.jsonl"
"""Python code that it was not trained on, as JSON lines with a `text` each."""
