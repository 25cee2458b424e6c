"""What counts as the user's fault, and how it is reported: one message on stderr, exit code 2, no traceback.

Owns the list of error types that carry a message for users. Imports no torch, so that a fault is reported at once. Called by
`legato.__main__` and the subcommands.
"""

from __future__ import annotations

import sys

from legato.config import ConfigError
from legato.engine.ranks.watch import RankLost
from legato.model.faults import CheckpointError
from legato.model.spec import SpecError
from legato.schedule import RequestError
from legato.server.settings import SettingsError
from legato.server.text.chat_template import ChatError
from legato.server.text.tokenizer import TokenizerError
from legato.types import ParameterError

EXIT_CODE = 2

FAULTS = (
    ChatError,
    CheckpointError,
    ConfigError,
    ParameterError,
    RankLost,
    RequestError,
    SettingsError,
    SpecError,
    TokenizerError,
)
"""Errors whose message says what is wrong and what to do. Anything else is a fault of Legato and keeps its traceback."""


def report(error: Exception) -> None:
    """Prints the one message."""
    print(f"legato: {error}", file=sys.stderr)
