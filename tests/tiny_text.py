"""A small byte-level BPE with GLM's control tokens, and GLM-5.2's template: text tests need no trained checkpoint.

`save_text_files` turns a folder with a tiny random model into one that `legato generate` and `legato chat` accept.
"""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

TEMPLATE = Path(__file__).parent / "server" / "chat_template.jinja"
VOCABULARY = 620
CONTROL = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>",
)  # fmt: skip
TAGS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<tool_response>", "</tool_response>",
)  # fmt: skip
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@functools.cache
def train() -> Tokenizer:
    """600 entries trained on this very file, then the control tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([Path(__file__).read_text(), "The user is a person. Größe äöü 你好世界 " * 20], trainer)
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in CONTROL])
    backend.add_tokens([AddedToken(text, normalized=False, special=False) for text in TAGS])
    prefix = [(text, backend.token_to_id(text)) for text in ("[gMASK]", "<sop>")]
    backend.post_processor = processors.TemplateProcessing(single="[gMASK] <sop> $A", special_tokens=prefix)
    return backend


def description() -> dict[str, Any]:
    """The parsed tokenizer.json."""
    return json.loads(train().to_str())


def save_text_files(folder: Path) -> None:
    """Writes tokenizer.json, chat_template.jinja and generation_config.json."""
    train().save(str(folder / "tokenizer.json"))
    shutil.copy(TEMPLATE, folder / "chat_template.jinja")
    ends = [train().token_to_id(text) for text in ("<|endoftext|>", "<|user|>", "<|observation|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
