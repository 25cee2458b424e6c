"""The engine's process as the server sees it: started, watched, asked, and heard to its end.

Imports no torch and no HTTP; knows the engine by its messages only. `server.generation` and `server.run` call it.
"""
