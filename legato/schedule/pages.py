"""Whose page is whose: free, granted to one request, cached and shared, or quarantined until an iteration has come back.

Owns the one pool of cache pages and the prefix tree over it; every page has one owner at any time. Called by the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from legato.plan import Move
from legato.schedule.pool import Pool
from legato.schedule.prefix import Freed, Node, PrefixTree


@dataclass(slots=True)
class Holding:
    """One running request's pages, in the order of its text.

    Those in `borrowed` belong to the tree; `anchor` locks them, and no page that the request does not use. `absent`: the end of
    what was found, which is on the host; `Pages.seat` gives it pages.
    """

    pages: list[int]
    borrowed: set[int]
    anchor: Node
    absent: list[Node]

    @property
    def num_found(self) -> int:
        """Pages of the start of the text that need not be run."""
        return len(self.pages) + len(self.absent)


@dataclass(slots=True)
class CacheCounters:
    """Of `prompt_tokens` admitted since the start `hit_tokens` were found in the cache, `host_hit_tokens` of them on the host."""

    prompt_tokens: int = 0
    hit_tokens: int = 0
    host_hit_tokens: int = 0
    evicted_pages: int = 0


@dataclass(slots=True)
class Pages:
    """Pages 1..`capacity` of `page_size` tokens. With `reuse` off nothing is found again and nothing is kept.

    `host_capacity`: evicted pages that are kept in host memory.
    """

    capacity: int
    page_size: int
    reuse: bool
    host_capacity: int = 0
    counters: CacheCounters = field(default_factory=CacheCounters)
    pool: Pool = field(init=False)
    tree: PrefixTree = field(init=False)

    def __post_init__(self) -> None:
        self.pool, self.tree = Pool(self.capacity), PrefixTree(self.page_size, self.host_capacity)

    @property
    def num_available(self) -> int:
        """Pages that can be granted now: free ones, and cached ones that no running request shares."""
        return self.pool.num_free + self.tree.num_evictable

    @property
    def num_cached(self) -> int:
        return self.tree.num_pages

    @property
    def num_on_host(self) -> int:
        return self.tree.slots.num_granted

    def needed(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def find(self, salt: str, tokens: Sequence[int], max_pages: int) -> Holding:
        """What the cache holds of the start of a text; at least one token of it is left to run.

        Args:
            salt: only text that was cached under the same salt is found.
            tokens: the whole text.
            max_pages: most pages to find.
        """
        anchor = self.tree.lock(salt, tokens, max_pages if self.reuse else 0)
        path = anchor.path()
        pages = [node.page for node in path if node.page]
        return Holding(pages, set(pages), anchor, path[len(pages) :])

    def seat(self, holding: Holding, taken: tuple[int, ...]) -> None:
        """Completes what was found with pages that were taken: first for what is on the host, then for what will be run."""
        count = len(holding.absent)
        for node, page in zip(holding.absent, taken[:count], strict=True):
            self.tree.restore(node, page)
        holding.borrowed.update(taken[:count])
        holding.pages.extend(taken)
        holding.absent.clear()
        self.counters.host_hit_tokens += count * self.page_size

    def take_moves(self) -> tuple[Move, ...]:
        """Copies that must run before what is granted from now on is used, in order, once."""
        moves, self.tree.moves = tuple(self.tree.moves), []
        return moves

    def take(self, count: int) -> tuple[int, ...] | None:
        """`count` pages, evicting as many cached ones as that needs; `None` while they are too few or still in quarantine."""
        if count > self.num_available + self.pool.num_quarantined:
            return None
        self._reclaim(self.tree.evict(count - self.pool.num_free - self.pool.num_quarantined))
        return self.pool.take(count)

    def commit(self, holding: Holding, tokens: Sequence[int], committed: int) -> None:
        """Shares the full pages among the first `committed` tokens, which no iteration will write again.

        The token after them must be known. Where the tree has the same text already, the request keeps its own copy to itself: a
        lock on the tree's copy would keep pages from everyone that nobody reads, and from this request too.
        """
        while self._has_more(holding, committed) and not self.tree.has_next(holding.anchor, tokens):
            self._share(holding, tokens)

    def release(self, holding: Holding, tokens: Sequence[int], committed: int, last_epoch: int) -> None:
        """Gives everything back; iterations up to `last_epoch` may still touch it. What is committed stays cached, once."""
        while self._has_more(holding, committed):
            self._share(holding, tokens)
        own = tuple(page for page in holding.pages if page not in holding.borrowed)
        self.pool.give_back(own, last_epoch)
        self._unlock(holding, last_epoch)

    def forget(self, holding: Holding) -> None:
        """Undoes `find`."""
        self._unlock(holding, -1)

    def flush(self) -> int:
        """Empties the cache; returns how many pages it held. Running requests go on, and what they compute is not cached."""
        count = self.tree.num_pages + self.num_on_host
        for page, epoch in self.tree.flush():
            self.pool.give_back((page,), epoch)
        return count

    def _has_more(self, holding: Holding, committed: int) -> bool:
        anchor = holding.anchor
        return self.reuse and not anchor.is_detached and (anchor.depth + 1) * self.page_size <= committed

    def _share(self, holding: Holding, tokens: Sequence[int]) -> None:
        page = holding.pages[holding.anchor.depth]
        holding.anchor, is_taken = self.tree.extend(holding.anchor, tokens, page)
        if is_taken:
            holding.borrowed.add(page)

    def _unlock(self, holding: Holding, last_epoch: int) -> None:
        for page, epoch in self.tree.unlock(holding.anchor, last_epoch):
            self.pool.give_back((page,), epoch)

    def _reclaim(self, freed: Freed) -> None:
        self.counters.evicted_pages += len(freed)
        for page, epoch in freed:
            self.pool.give_back((page,), epoch)
