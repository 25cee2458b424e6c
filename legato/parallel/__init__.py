"""Ranks: who takes part in a model's computation, and how their partial results meet."""
