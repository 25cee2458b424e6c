"""Measurements of Legato itself: ops against their roofline, whole iterations, host overhead.

Owns how time is taken (`timing`), what a figure must carry (`record`) and the benchmarks behind `legato bench`. Nothing
of the engine imports it.
"""
