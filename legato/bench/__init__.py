"""Measurements: ops against their roofline, iterations of an engine or of one rank's share, servers under load, long soaks.

Owns how time is taken (`timing`), what a figure must carry (`record`) and the benchmarks behind `legato bench`. Nothing
of the engine imports it.
"""
