"""What a model writes, token by token: reasoning, content and tool calls, or plain text; and the grammar it may be held to.

Knows nothing of HTTP. `LLM`, the command line and `server.generation` read answers with it.
"""
