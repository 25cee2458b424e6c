"""Tests: the same folders as legato/."""
