"""The tokens that texts use most, as a file for `--draft-weights vocabulary=FILE`.

    python tools/frequent_tokens.py --count 32768 --out frequent.json texts/*.md src/**/*.py

Counts the tokens of text files under a checkpoint's tokenizer and writes the ids of the most frequent as a JSON array, with the
special tokens (chat markers, stops), which texts do not hold. Prints how much of the texts they cover.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from legato.engine.start import open_checkpoint
from legato.model.inventory import stored_spec
from legato.server.text.tokenizer import Tokenizer

PIECE = 1 << 14
"""Characters that are tokenised at once."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--model", default=None, help="whose tokenizer; by default that of the checkpoint that ships")
    parser.add_argument("--count", type=int, default=32768, help="of tokens, special ones included")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    checkpoint = open_checkpoint(given.model)
    tokenizer, vocab_size = Tokenizer.open(checkpoint.source), stored_spec(checkpoint).vocab_size
    counts: Counter[int] = Counter()
    for path in given.texts:
        text = path.read_text(errors="replace")
        for first in range(0, len(text), PIECE):
            counts.update(tokenizer.encode(text[first : first + PIECE]))
    special = {id for id in range(vocab_size) if tokenizer.control_text(id) is not None}
    chosen = special | {id for id, _ in counts.most_common(max(0, given.count - len(special)))}
    given.out.write_text(json.dumps(sorted(chosen)) + "\n")
    covered = sum(count for id, count in counts.items() if id in chosen) / max(1, sum(counts.values()))
    print(f"{len(chosen)} of {vocab_size} tokens cover {100 * covered:.2f} % of {sum(counts.values()):,}")


if __name__ == "__main__":
    main()
