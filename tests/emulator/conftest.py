"""Fixtures of the emulator's tests: those of the ops' tests, whose cases they run."""

from tests.ops.conftest import no_gradients, uninitialised_is_nan

__all__ = ["no_gradients", "uninitialised_is_nan"]
