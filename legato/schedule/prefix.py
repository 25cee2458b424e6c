"""The prefix cache: which full pages of earlier text hold the start of a new one.

A tree with one node per page, keyed by the page's tokens and *the token after them*: the draft layer's row at position i depends
on the token at i + 1, so a page's last draft row is right only if that token matches too. Knows pages by number, never what is
in them. Called by `schedule.pages`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Node:
    """One cached page; a root (depth 0) stands for the empty text of one salt and holds no page.

    `locks` counts the running requests whose text starts with this path: a locked page is never evicted. `last_epoch` is the
    last iteration that a former user may still run in. `is_detached` nodes are found by no one and go when their last lock goes.
    """

    depth: int
    key: tuple[int, ...]
    page: int
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict["tuple[int, ...]", "Node"])
    locks: int = 0
    last_use: int = 0
    last_epoch: int = -1
    is_detached: bool = False
    salt: str = ""

    def pages(self) -> list[int]:
        """The pages from the root to here."""
        pages: list[int] = []
        node = self
        while node.parent is not None:
            pages.append(node.page)
            node = node.parent
        return pages[::-1]


Freed = list[tuple[int, int]]
"""Pages that the tree gives up, each with the last iteration that may touch it."""


class PrefixTree:
    """Pages by text, one tree per salt. Recency is the order of calls; there is no clock."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._roots: dict[str, Node] = {}
        self._leaves: list[tuple[int, int, Node]] = []
        self._uses = 0
        self._pushed = 0
        self.num_pages = 0
        self.num_locked = 0

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could give up."""
        return self.num_pages - self.num_locked

    def lock(self, salt: str, tokens: Sequence[int], max_pages: int) -> Node:
        """The longest cached path that `tokens` start with and continue past, at most `max_pages` long; locked for the caller."""
        node = self._roots.setdefault(salt, Node(0, (), 0, None, salt=salt))
        while node.depth < max_pages:
            child = node.children.get(self._key(tokens, node.depth))
            if child is None:
                break
            node = child
        self._uses += 1
        step: Node | None = node
        while step is not None:
            self._hold(step)
            step = step.parent
        return node

    def has_next(self, node: Node, tokens: Sequence[int]) -> bool:
        """Whether the page that follows `node` in `tokens` is cached."""
        return self._key(tokens, node.depth) in node.children

    def extend(self, node: Node, tokens: Sequence[int], page: int) -> tuple[Node, bool]:
        """Moves a lock one page down, to the page that follows `node` in `tokens`.

        Returns:
            The node it moved to, and whether the tree took `page` for it (it does not when it has that text already).
        """
        key = self._key(tokens, node.depth)
        child = node.children.get(key)
        is_new = child is None
        if child is None:
            child = Node(node.depth + 1, key, page, node)
            node.children[key] = child
            self.num_pages += 1
        self._uses += 1
        self._hold(child)
        return child, is_new

    def unlock(self, node: Node, last_epoch: int) -> Freed:
        """Gives a lock back; iterations up to `last_epoch` may still read the path. Returns what detached nodes give up."""
        freed: Freed = []
        self._uses += 1
        leaf, step = node, node
        while step.parent is not None:
            step.locks -= 1
            step.last_epoch = max(step.last_epoch, last_epoch)
            step.last_use = self._uses
            if not step.locks:
                self.num_locked -= 1
                if step.is_detached:
                    freed.append(self._remove(step))
            step = step.parent
        step.locks -= 1
        self._offer(leaf)
        self._forget_root(step)
        return freed

    def evict(self, count: int) -> Freed:
        """Gives up to `count` unlocked pages up, leaves first, the least recently used first."""
        freed: Freed = []
        while len(freed) < count and self._leaves:
            last_use, _, node = heapq.heappop(self._leaves)
            if node.is_detached or node.locks or node.children or node.last_use != last_use:
                continue
            parent = node.parent
            freed.append(self._remove(node))
            assert parent is not None, "a root is never a leaf of the heap"
            parent.last_use = max(parent.last_use, node.last_use)
            self._offer(parent)
            self._forget_root(parent)
        return freed

    def flush(self) -> Freed:
        """Forgets everything: unlocked pages are given up now, locked ones when their requests end. None is found again."""
        freed: Freed = []
        pending = list(self._roots.values())
        self._roots, self._leaves = {}, []
        while pending:
            node = pending.pop()
            pending += node.children.values()
            node.is_detached = True
            if node.parent is not None and not node.locks:
                freed.append(self._remove(node))
        return freed

    def _key(self, tokens: Sequence[int], depth: int) -> tuple[int, ...]:
        """The page's tokens and the one after; shorter, and then equal to no key, where the text ends before that."""
        start = depth * self._page_size
        return tuple(tokens[start : start + self._page_size + 1])

    def _hold(self, node: Node) -> None:
        node.locks += 1
        node.last_use = self._uses
        if node.locks == 1 and node.parent is not None:
            self.num_locked += 1

    def _remove(self, node: Node) -> tuple[int, int]:
        assert node.parent is not None, "a root holds no page"
        del node.parent.children[node.key]
        node.is_detached = True
        self.num_pages -= 1
        return node.page, node.last_epoch

    def _offer(self, node: Node) -> None:
        """Notes that a node may be evictable; entries that have become wrong are skipped, and swept when they are many."""
        if node.parent is None or node.locks or node.children or node.is_detached:
            return
        self._pushed += 1
        heapq.heappush(self._leaves, (node.last_use, self._pushed, node))
        if len(self._leaves) > 2 * self.num_pages + 64:
            self._leaves = [entry for entry in self._leaves if self._is_current(entry)]
            heapq.heapify(self._leaves)

    @staticmethod
    def _is_current(entry: tuple[int, int, Node]) -> bool:
        last_use, _, node = entry
        return not (node.is_detached or node.locks or node.children) and node.last_use == last_use

    def _forget_root(self, node: Node) -> None:
        """Salts are as many as users want; one that caches nothing costs nothing."""
        if node.parent is None and not (node.children or node.locks or node.is_detached):
            self._roots.pop(node.salt, None)
