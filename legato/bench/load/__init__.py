"""Load on an OpenAI-compatible server, and what its users would feel.

Owns arrivals, prompts, the timing of streamed replies and their statistics. Knows a server by its HTTP answers only: any engine's
endpoint will do. Called by `legato bench serve` and `legato bench pareto`.
"""
