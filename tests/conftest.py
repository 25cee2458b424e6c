"""What holds for every test: draws are the same at every run and in every order, and no test is judged by how long it draws.

Knows nothing of what is tested. `make check-full` draws anew each time: `--hypothesis-profile anew`.
"""

import sys

import pytest
from hypothesis import HealthCheck, settings

# A machine that others use too may take seconds for a draw, or for an example.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **PATIENT)
settings.register_profile("anew", derandomize=False, **PATIENT)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def same_draws() -> None:
    """PyTorch's own generator starts anew, whichever tests ran before in this process. Tests without PyTorch do not import it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
