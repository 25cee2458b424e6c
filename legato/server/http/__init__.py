"""HTTP, whatever is asked: the port, what stands before every route, how bodies are read, faults told and events written.

Knows no route and nothing of answers. The routes in `server.api` build on it; `server.run` and `server.app` put it together.
"""
