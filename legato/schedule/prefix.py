"""The prefix cache: which full pages of earlier text hold the start of a new one, on the device or in host memory.

A tree with one node per page, keyed by the page's tokens and *the token after them*: the draft layer's row at position i depends
on the token at i + 1, so a page's last draft row is right only if that token matches too. Knows pages and host slots by number,
never what is in them. Called by `schedule.pages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from legato.plan import Move, Offload, Restore
from legato.schedule.pool import Pool
from legato.schedule.recency import Recency


@dataclass(slots=True, eq=False)
class Node:
    """One cached page; a root (depth 0) stands for the empty text of one salt and holds no page.

    It is in one place: on the device in `page`, or on the host in `slot`; the other is 0. What is below a node on the host is on
    the host too.

    Attributes:
        locks: running requests whose text starts with this path: a locked node is never given up.
        num_resident: children that are on the device.
        last_epoch: the last iteration that a former user may still run in.
        is_detached: found by no one; goes when its last lock goes.
    """

    depth: int
    key: tuple[int, ...]
    page: int
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict["tuple[int, ...]", "Node"])
    slot: int = 0
    locks: int = 0
    num_resident: int = 0
    last_use: int = 0
    last_epoch: int = -1
    is_detached: bool = False
    salt: str = ""

    def path(self) -> list[Node]:
        """The nodes below the root, down to here."""
        nodes: list[Node] = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def pages(self) -> list[int]:
        """The pages from the root to here, as far as they are on the device."""
        return [node.page for node in self.path() if node.page]


Freed = list[tuple[int, int]]
"""Pages that the tree gives up, each with the last iteration that may touch it."""


def _can_leave_device(node: Node) -> bool:
    return bool(node.page) and not (node.is_detached or node.locks or node.num_resident)


def _can_leave_host(node: Node) -> bool:
    return bool(node.slot) and not (node.is_detached or node.locks or node.children)


class PrefixTree:
    """Pages by text, one tree per salt. Recency is the order of calls; there is no clock.

    With `num_slots` host slots, a page that leaves the device stays in the tree until its slot is wanted for a page that was used
    later. What has to be copied, in which order, is in `moves`, until someone takes it.
    """

    def __init__(self, page_size: int, num_slots: int = 0) -> None:
        self._page_size = page_size
        self._roots: dict[str, Node] = {}
        self._resident, self._hosted = Recency(_can_leave_device), Recency(_can_leave_host)
        self._uses = 0
        self.slots = Pool(num_slots)
        self.moves: list[Move] = []
        self.num_pages = 0
        self.num_locked = 0
        self.num_dropped = 0

    @property
    def num_evictable(self) -> int:
        """Pages that `evict` could give up."""
        return self.num_pages - self.num_locked

    def lock(self, salt: str, tokens: Sequence[int], max_pages: int) -> Node:
        """The longest cached path that `tokens` start with and continue past, at most `max_pages` long; locked for the caller.

        The end of it may be on the host: the caller gives those nodes pages (`restore`), or unlocks the path again.
        """
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

    def restore(self, node: Node, page: int) -> None:
        """Brings a node from the host back to the device, into `page`; its parent must be there."""
        self.moves.append(Restore(node.slot, page))
        self._place(node, page)

    def has_next(self, node: Node, tokens: Sequence[int]) -> bool:
        """Whether the page that follows `node` in `tokens` is cached on the device."""
        child = node.children.get(self._key(tokens, node.depth))
        return child is not None and child.page != 0

    def extend(self, node: Node, tokens: Sequence[int], page: int) -> tuple[Node, bool]:
        """Moves a lock one page down, to the page that follows `node` in `tokens`.

        Returns:
            The node it moved to, and whether the tree took `page` for it: not when it has that text on the device already. A
            copy on the host is forgotten.
        """
        key = self._key(tokens, node.depth)
        child = node.children.get(key)
        if child is None:
            child = node.children[key] = Node(node.depth + 1, key, 0, node)
        is_taken = not child.page
        if is_taken:
            self._place(child, page)
        self._uses += 1
        self._hold(child)
        return child, is_taken

    def unlock(self, node: Node, last_epoch: int) -> Freed:
        """Gives a lock back; iterations up to `last_epoch` may still read the path. Returns what detached nodes give up."""
        freed: Freed = []
        self._uses += 1
        step = node
        while step.parent is not None:
            step.locks -= 1
            step.last_epoch = max(step.last_epoch, last_epoch)
            step.last_use = self._uses
            if not step.locks:
                self.num_locked -= step.page != 0
                if step.is_detached:
                    freed.append(self._remove(step))
                else:
                    self._offer(step)
            step = step.parent
        step.locks -= 1
        self._forget_root(step)
        return freed

    def evict(self, count: int) -> Freed:
        """Up to `count` unlocked pages leave the device, leaves first, the least recently used first."""
        freed: Freed = []
        while len(freed) < count and (node := self._resident.pop()) is not None:
            freed.append(self._leave_device(node))
        return freed

    def flush(self) -> Freed:
        """Forgets everything: unlocked pages are given up now, locked ones when their requests end. None is found again."""
        freed: Freed = []
        pending = list(self._roots.values())
        self._roots = {}
        self._resident.clear()
        self._hosted.clear()
        while pending:
            node = pending.pop()
            pending += node.children.values()
            node.is_detached = True
            if node.parent is not None and not node.locks:
                page, epoch = self._remove(node)
                freed += [(page, epoch)] if page else []
        return freed

    def _key(self, tokens: Sequence[int], depth: int) -> tuple[int, ...]:
        """The page's tokens and the one after; shorter, and then equal to no key, where the text ends before that."""
        start = depth * self._page_size
        return tuple(tokens[start : start + self._page_size + 1])

    def _hold(self, node: Node) -> None:
        node.locks += 1
        node.last_use = self._uses
        self.num_locked += node.locks == 1 and node.page != 0

    def _place(self, node: Node, page: int) -> None:
        """Puts a node on the device."""
        assert node.parent is not None and not node.page, "neither a root nor what is there already"
        self._free_slot(node)
        node.page = page
        node.parent.num_resident += 1
        self.num_pages += 1
        self.num_locked += node.locks > 0

    def _leave_device(self, node: Node) -> tuple[int, int]:
        """A page leaves the device: for a slot on the host, or for good where none can be had."""
        parent, freed = node.parent, (node.page, node.last_epoch)
        assert parent is not None, "a root holds no page"
        taken = self._take_slot()
        if taken:
            self.moves.append(Offload(node.page, taken))
            self._take_page(node)
            node.slot = taken
            self._offer(node)
        else:
            for child in list(node.children.values()):
                self._remove_hosted(child)
            self._remove(node)
        self._pass_on(parent, node.last_use)
        return freed

    def _take_slot(self) -> int:
        """A slot on the host, perhaps one whose page is forgotten for it; 0 where there is none."""
        if not self.slots.num_free and (coldest := self._hosted.pop()) is not None:
            assert coldest.parent is not None, "a root holds no slot"
            self._remove(coldest)
            self.num_dropped += 1
            self._pass_on(coldest.parent, coldest.last_use)
        taken = self.slots.take(1)
        return taken[0] if taken else 0

    def _pass_on(self, parent: Node, last_use: int) -> None:
        """A node's last child has gone, perhaps: then it is the next to go, and was used when the child was."""
        parent.last_use = max(parent.last_use, last_use)
        self._offer(parent)
        self._forget_root(parent)

    def _remove(self, node: Node) -> tuple[int, int]:
        """Takes a node out of the tree; returns its page (0: it was on the host) and its last iteration."""
        assert node.parent is not None, "a root holds no page"
        del node.parent.children[node.key]
        node.is_detached = True
        page = node.page
        if page:
            self._take_page(node)
        self._free_slot(node)
        return page, node.last_epoch

    def _remove_hosted(self, node: Node) -> None:
        """Takes a node on the host out of the tree, with what is below it."""
        for child in list(node.children.values()):
            self._remove_hosted(child)
        self._remove(node)
        self.num_dropped += 1

    def _take_page(self, node: Node) -> None:
        assert node.parent is not None, "a root holds no page"
        node.page = 0
        node.parent.num_resident -= 1
        self.num_pages -= 1

    def _free_slot(self, node: Node) -> None:
        if node.slot:
            # Copies run in the order of the plans, so the slot may be taken again at once.
            self.slots.give_back((node.slot,), -1)
            node.slot = 0

    def _offer(self, node: Node) -> None:
        """Notes that a node may be given up."""
        self._resident.offer(node, self.num_pages)
        self._hosted.offer(node, self.slots.num_granted)

    def _forget_root(self, node: Node) -> None:
        """Salts are as many as users want; one that caches nothing costs nothing."""
        if node.parent is None and not (node.children or node.locks or node.is_detached):
            self._roots.pop(node.salt, None)
