"""Text in, text out: tokenizer, chat template, incremental text, and later HTTP.

Never sees a tensor; knows the engine only through `engine.messages` and `types`. `LLM` and the command line call it.
"""
