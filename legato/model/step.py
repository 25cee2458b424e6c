"""What one forward pass needs besides token ids: where each row stands, where it stores, what it may see.

Values only, passed down from layer to layer; IndexShare is one of them (`Selection`). Built by the runtime, read by the layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from legato.config import GPU_SCORE_BYTES


@dataclass(frozen=True, slots=True)
class Prompt:
    """The one request that all rows of a pass belong to, where they follow one another in it.

    Attributes:
        tokens: [L] int32 cache slots of its tokens in order, at least as many as the last row sees.
        pages: [P] int64 its physical pages in order.
    """

    tokens: Tensor
    pages: Tensor


@dataclass(slots=True)
class Plans:
    """What the indexers of all layers that see the same rows share, one for each part of the rows that is scored at a time:
    what `index_scores.plan` and `top_k.plan` made. Empty until the first layer has made them."""

    scores: tuple[Tensor | None, ...] = ()
    selections: tuple[Tensor | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of one forward pass, ragged over requests.

    Attributes:
        positions: [T] int64, of the row's token in its sequence.
        request: [T] int32, the row of `page_table` that belongs to it.
        page_table: [B, P] int32 physical pages of 64 tokens.
        lengths: [T] int32 keys that the row may see: its position + 1 (itself included).
        slots: [T] int32 cache slots that the row's latent and index key are stored in; -1 stores nothing.
        cos, sin: [T, R/2] float32 rotary tables at `positions`.
        score_bytes: most memory for the index scores of a layer; rows are scored a few at a time to keep to it.
        plans: of these very rows, for every layer that sees them, the draft layer's included.
        prompt: the request, where all rows are of one: they may share tokens.
    """

    positions: Tensor
    request: Tensor
    page_table: Tensor
    lengths: Tensor
    slots: Tensor
    cos: Tensor
    sin: Tensor
    score_bytes: int = GPU_SCORE_BYTES
    plans: Plans = field(default_factory=Plans)
    prompt: Prompt | None = None

    def rows(self, rows: slice) -> Step:
        """The same for some of the rows."""
        return Step(
            self.positions[rows],
            self.request[rows],
            self.page_table,
            self.lengths[rows],
            self.slots[rows],
            self.cos[rows],
            self.sin[rows],
            self.score_bytes,
        )


@dataclass(frozen=True, slots=True)
class Together:
    """A selection as masks over a request's tokens, for rows that share them (see `masked_mha`)."""

    tokens: Tensor
    lengths: Tensor
    masks: Tensor


@dataclass(frozen=True, slots=True)
class Selection:
    """The cache slots a row attends to: `slots` [T, S] int32 (-1 fill) of which the first `counts` [T] int32 are valid.

    Full layers make one, shared layers reuse the last full layer's (IndexShare). The count travels along: it must never be
    derived again from a length that has grown since. `together`: the same once more, where the rows of a
    prompt share tokens.
    """

    slots: Tensor
    counts: Tensor
    together: Together | None = None


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's paged caches: `latent` always, `index` (index keys) where the layer runs its own indexer."""

    latent: Tensor
    index: Tensor | None
