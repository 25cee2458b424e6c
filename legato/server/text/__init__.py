"""Text to token ids and back: the tokenizer, chat templates, the messages they render, and text that comes in pieces.

Knows nothing of HTTP or the engine. `LLM`, the command line and every API call it.
"""
