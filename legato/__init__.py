"""Legato: a serving engine for GLM-5.2.

Owns the public names and the version, and nothing else: `import legato` is instant and imports no torch (PEP 562).
"""

__version__ = "0.1.0"
