"""Text in, text out: tokenizer, chat template, the structure of an answer, and the HTTP APIs in front of them.

Never sees a tensor; knows the engine only through `engine.messages` and `types`. `LLM` and the command line call it.
"""
