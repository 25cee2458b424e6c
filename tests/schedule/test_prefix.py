"""The prefix tree by itself: what is found, what is given up and in which order, and that nothing is kept for ever."""

from __future__ import annotations

from legato.schedule.prefix import Node, PrefixTree

PAGE = 4


def cached(tree: PrefixTree, text: str, first_page: int, salt: str = "") -> Node:
    """Caches the full pages of a text (one letter a token), numbered from `first_page`; its lock is given back."""
    tokens = [ord(letter) for letter in text]
    node = tree.lock(salt, tokens, 99)
    while (node.depth + 1) * PAGE < len(tokens):
        node, _ = tree.extend(node, tokens, first_page + node.depth)
    tree.unlock(node, -1)
    return node


def found(tree: PrefixTree, text: str, salt: str = "") -> list[int]:
    node = tree.lock(salt, [ord(letter) for letter in text], 99)
    tree.unlock(node, -1)
    return node.pages()


def test_a_page_needs_the_token_after_it() -> None:
    tree = PrefixTree(PAGE)
    cached(tree, "aaaabbbbc", 1)
    assert found(tree, "aaaabbbbc") == [1, 2]
    assert found(tree, "aaaabbbbx") == [1]
    assert found(tree, "aaaabbbb") == [1]
    assert found(tree, "aaaax") == []
    assert found(tree, "aaaabbbbc", "salt") == []
    cached(tree, "aaaabbbbx", 11)
    assert found(tree, "aaaabbbbx") == [1, 12]


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = PrefixTree(PAGE)
    cached(tree, "aaaabbbbcccc-", 1)
    cached(tree, "xxxxyyyy-", 11)
    cached(tree, "aaaazzzz-", 20)
    assert found(tree, "xxxxyyyy-") == [11, 12]
    assert found(tree, "aaaabbbb-") == [1]
    assert [page for page, _ in tree.evict(2)] == [3, 2]
    assert [page for page, _ in tree.evict(2)] == [21, 20]
    assert [page for page, _ in tree.evict(9)] == [12, 11, 1]
    assert not tree.num_pages and not tree._roots


def test_what_is_locked_stays() -> None:
    tree = PrefixTree(PAGE)
    cached(tree, "aaaabbbbcccc-", 1)
    node = tree.lock("", [ord(letter) for letter in "aaaabbbb?"], 99)
    assert (tree.num_locked, tree.num_evictable) == (1, 2)
    assert len(tree.evict(9)) == 2
    assert tree.evict(9) == []
    tree.unlock(node, 7)
    assert tree.evict(9) == [(1, 7)], "with the last iteration that may still read it"


def test_a_flush_forgets_at_once_and_frees_when_it_may() -> None:
    tree = PrefixTree(PAGE)
    cached(tree, "aaaabbbb-", 1)
    node = tree.lock("", [ord(letter) for letter in "aaaab"], 99)
    assert [page for page, _ in tree.flush()] == [2]
    assert found(tree, "aaaabbbb-") == []
    assert tree.num_pages == 1
    assert tree.unlock(node, 5) == [(1, 5)]
    assert tree.num_pages == tree.num_locked == 0


def test_nothing_grows_with_the_number_of_uses() -> None:
    tree = PrefixTree(PAGE)
    cached(tree, "aaaabbbb-", 1)
    for number in range(1000):
        found(tree, "aaaabbbb-")
        found(tree, "aaaabbbb-", f"salt {number}")
    assert len(tree._roots) == 1 and len(tree._resident) < 100


def test_slots_on_the_host_are_given_back_however_a_page_leaves_them() -> None:
    tree = PrefixTree(PAGE, num_slots=2)
    cached(tree, "aaaabbbbcccc-", 1)
    assert [page for page, _ in tree.evict(3)] == [3, 2, 1]
    assert (tree.slots.num_free, tree.num_dropped, tree.num_pages) == (0, 1, 0), "the deepest made room for the last"
    node = tree.lock("", [ord(letter) for letter in "aaaabbbbcccc-"], 99)
    assert (node.depth, node.pages()) == (2, []), "two pages are found, none of them on the device"
    assert node.parent is not None
    tree.restore(node.parent, 11)
    tree.restore(node, 12)
    assert tree.slots.num_free == 2 and found(tree, "aaaabbbbc") == [11, 12]
    tree.unlock(node, -1)
    tree.evict(1)
    assert tree.slots.num_free == 1
    tree.flush()
    assert (tree.slots.num_free, tree.num_pages) == (2, 0)
