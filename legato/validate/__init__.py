"""The first run against somebody's server: does it answer rightly, does it draft as it should, which known faults does it have.

Speaks the OpenAI API and nothing else, so that any server can be asked; imports no torch. Called by `legato validate`.
"""
