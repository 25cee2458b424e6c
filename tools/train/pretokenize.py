"""Trains the 8192-entry tokenizer, makes the chat examples, and writes the token stream the training reads.

Owns the special tokens and their ids, the share of chat text, and the file format of the stream (uint16 ids, xz, in
chunks). Knows nothing of the model. Called after `corpus.py`:

    python tools/train/pretokenize.py --work DIR          # DIR/tokenizer/*, DIR/tokens/*.xz, DIR/tokens/heldout.npz
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from chat import Function, conversation, functions
from corpus import SPECIAL_STRINGS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCABULARY = 8192
CONTROL, TAGS = SPECIAL_STRINGS[:10], SPECIAL_STRINGS[10:]
FIRST_SPECIAL = VOCABULARY - len(SPECIAL_STRINGS)
IDS = {text: FIRST_SPECIAL + i for i, text in enumerate(SPECIAL_STRINGS)}
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 26, "lc": 0, "lp": 1, "pb": 1}]
HERE = Path(__file__).resolve().parent


def textbook(seed: int) -> list[str]:
    """Code documents and conversations made of the functions of textbook.py."""
    rng, pool = random.Random(seed), list(functions((HERE / "textbook.py").read_text()))
    codes = ["\n\n\n".join(rng.choice((f.body, f.body, f.bare)) for f in rng.sample(pool, 10)) for _ in range(150)]
    return [document(c + "\n") for c in codes] + [conversation(pool, rng) for _ in range(1200)]


def read_jsonl(path: Path) -> Iterator[dict[str, str]]:
    """The records of a JSON-lines file."""
    with open(path) as source:
        for line in source:
            yield json.loads(line)


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """A byte-level BPE with GLM's pre-tokenizer expression and special tokens; encode() prefixes [gMASK]<sop>."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=FIRST_SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                                  show_progress=False, max_token_length=24)
    tokenizer.train_from_iterator(texts, trainer)
    assert tokenizer.get_vocab_size() == FIRST_SPECIAL, tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in TAGS])
    assert all(tokenizer.token_to_id(t) == i for t, i in IDS.items())
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[gMASK] <sop> $A", pair="[gMASK] <sop> $A $B",
        special_tokens=[("[gMASK]", IDS["[gMASK]"]), ("<sop>", IDS["<sop>"])],
    )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    template = (HERE / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").write_text(template)
    config = {
        "added_tokens_decoder": {
            str(i): {"content": t, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
                     "special": t in CONTROL}
            for t, i in IDS.items()
        },
        "additional_special_tokens": list(CONTROL), "clean_up_tokenization_spaces": False, "do_lower_case": False,
        "eos_token": "<|endoftext|>", "extra_special_tokens": {}, "model_max_length": 8192,
        "pad_token": "<|endoftext|>", "padding_side": "left", "remove_space": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _functions_of(text: str) -> list[Function]:
    return list(functions(text))


def chat_texts(texts: list[str], count: int, seed: int) -> list[str]:
    """`count` conversations made from the functions of the given files."""
    rng = random.Random(seed)
    with ProcessPoolExecutor(1) as pool:
        found = [f for group in pool.map(_functions_of, texts, chunksize=64) for f in group]
    found = [f for f in found if not any(s in f.body for s in SPECIAL_STRINGS)]
    print(json.dumps({"functions": len(found)}), flush=True)
    return [conversation(found, rng) for _ in range(count)]


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Concatenated ids of whole documents (which carry their own special tokens)."""
    out = []
    for start in range(0, len(texts), 256):
        for e in tokenizer.encode_batch_fast(texts[start : start + 256], add_special_tokens=False):
            out.append(np.asarray(e.ids, dtype=np.uint16))
    return np.concatenate(out)


def write_chunk(tokens: np.ndarray, path: Path) -> int:
    """Compresses a chunk of the stream; returns its compressed size in bytes."""
    data = lzma.compress(tokens.astype("<u2").tobytes(), format=lzma.FORMAT_XZ, filters=XZ_FILTERS)
    path.write_bytes(data)
    return len(data)


def read_chunk(path: Path) -> np.ndarray:
    """The inverse of write_chunk."""
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype="<u2")


def document(text: str) -> str:
    """A file as a training document."""
    return "[gMASK]<sop>" + text + "<|endoftext|>"


def held_out_prompts(tokenizer: Tokenizer, records: list[dict[str, str]], seed: int) -> dict[str, list[list[int]]]:
    """200 raw prompts by length (50 each of 32, 128, 512 and 1536 tokens, cut at the start of a line's token)."""
    rng, prompts = random.Random(seed), {}
    encoded = [tokenizer.encode(r["text"]).ids for r in records]
    for length in (32, 128, 512, 1536):
        usable = [ids for ids in encoded if len(ids) >= length + 300]
        prompts[str(length)] = [ids[:length] for ids in rng.sample(usable, 50)]
    return prompts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--limit-megabytes", type=float, default=60.0, help="most compressed bytes of the stream")
    parser.add_argument("--chat-share", type=float, default=0.12, help="share of tokens in chat form")
    parser.add_argument("--most-characters", type=float, default=350e6, help="a random subset of the files up to this")
    args = parser.parse_args()
    rng, out = random.Random(11), args.work / "tokens"
    out.mkdir(parents=True, exist_ok=True)
    records = list(read_jsonl(args.work / "corpus" / "train.jsonl"))
    kept, total = [], 0
    for record in records:
        if total + len(record["text"]) <= args.most_characters:
            kept.append(record)
            total += len(record["text"])
    chats = chat_texts([r["text"] for r in kept[:20000]], int(total / 3.8 * args.chat_share / (1 - args.chat_share) / 240), 3)
    print(json.dumps({"files": len(kept), "characters": total, "chats": len(chats),
                      "chat_characters": sum(map(len, chats))}), flush=True)
    sample = [r["text"] for r in rng.sample(kept, min(len(kept), 3500))] + chats[:3000]
    for s in SPECIAL_STRINGS:
        sample = [t.replace(s, "\n") for t in sample]
    tokenizer = train_tokenizer(iter(sample))
    save_tokenizer(tokenizer, args.work / "tokenizer")
    print("tokenizer ready", flush=True)
    kept.sort(key=lambda r: (r["package"], r["path"]))
    stream = encode(tokenizer, [document(r["text"]) for r in kept])
    chat_stream = encode(tokenizer, chats + textbook(29))
    print(json.dumps({"code_tokens": len(stream), "chat_tokens": len(chat_stream)}), flush=True)
    pieces = 10
    starts = np.flatnonzero(stream == IDS["[gMASK]"])
    edges = [0] + [int(starts[np.searchsorted(starts, len(stream) * i // pieces)]) for i in range(1, pieces)]
    chunks = [stream[a:b] for a, b in zip(edges, [*edges[1:], len(stream)], strict=True)] + [chat_stream]
    with ProcessPoolExecutor(2) as pool:
        sizes = list(pool.map(write_chunk, chunks, [out / f"train-{i:02d}.xz" for i in range(len(chunks))]))
    print(json.dumps({"compressed": sizes, "total": sum(sizes)}), flush=True)
    assert sum(sizes) <= args.limit_megabytes * 1e6, "over the limit: lower --most-characters"
    held = sorted(read_jsonl(args.work / "corpus" / "heldout.jsonl"), key=lambda r: r["path"])
    held_stream = encode(tokenizer, [document(r["text"]) for r in held])
    np.savez_compressed(out / "heldout.npz", tokens=held_stream, bytes=sum(len(r["text"].encode()) for r in held))
    (out / "prompts.json").write_text(json.dumps(held_out_prompts(tokenizer, held, 17)))
    held_functions = [f for r in held for f in functions(r["text"])]
    held_chats = [conversation(held_functions, random.Random(23 + i)) for i in range(300)]
    np.save(out / "heldout_chat.npy", encode(tokenizer, held_chats))


if __name__ == "__main__":
    main()
