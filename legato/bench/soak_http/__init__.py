"""`legato serve` under many clients for a long time, and whether everything it took has come back.

Owns what the clients ask, how they read replies, the books, and the comparison with what the server counted. Knows the server by
HTTP alone, and by its processes' memory where it started them. Run as `python -m legato.bench.soak_http`.
"""
