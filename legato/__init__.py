"""Legato: a serving engine for GLM-5.2.

Owns the public names and the version, and nothing else: `import legato` is instant and imports no torch; a public name brings
in its module when it is first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from legato.config import Config
    from legato.llm import LLM
    from legato.types import Completion, Delta, SamplingParams, Stats

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "Config", "Delta", "SamplingParams", "Stats"]

_HOMES = {
    "LLM": "legato.llm",
    "Config": "legato.config",
    "Completion": "legato.types",
    "Delta": "legato.types",
    "SamplingParams": "legato.types",
    "Stats": "legato.types",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'legato' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
