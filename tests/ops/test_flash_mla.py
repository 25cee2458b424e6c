"""What goes to FlashMLA as a baseline, seen by a stand-in for its package. Its results are checked where its times are taken."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from legato.ops.attend import flash_mla, sparse_mla


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[tuple, dict]]]:
    """The calls that reach the package, which answers with zeros."""
    calls: list[tuple[tuple, dict]] = []

    def answer(*given: object, **named: object) -> tuple[Tensor, None]:
        calls.append((given, named))
        q = given[0]
        assert isinstance(q, Tensor)
        return torch.zeros(*q.shape[:-1], 512), None

    package = SimpleNamespace(
        get_mla_metadata=lambda: (object(), None), flash_mla_with_kvcache=answer, flash_mla_sparse_fwd=answer
    )
    monkeypatch.setattr(flash_mla, "PACKAGE", package)
    flash_mla._schedule.cache_clear()
    yield calls
    flash_mla._schedule.cache_clear()


def arguments(heads: int, cache: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, float, int]:
    q, slots = torch.zeros(3, heads, 576, dtype=torch.bfloat16), torch.zeros(3, 128, dtype=torch.int32)
    return q, cache, slots, torch.full((3,), 100, dtype=torch.int32), 0.0625, 512


def test_decoding_on_the_fp8_cache(seen: list[tuple[tuple, dict]]) -> None:
    q, cache, slots, counts, *rest = arguments(64, torch.zeros(2, 64, 656, dtype=torch.uint8))
    given = q, cache, slots, torch.full_like(counts, 128), *rest
    assert flash_mla.attend_flash_mla(*given).shape == flash_mla.attend_flash_mla(*given).shape == (3, 64, 512)
    (queries, tokens, *_, latent, schedule), named = seen[0]
    assert (queries.shape, tokens.shape, named["indices"].shape) == ((3, 1, 64, 576), (2, 64, 1, 656), (3, 1, 128))
    assert (latent, named["softmax_scale"], named.get("topk_length")) == (512, 0.0625, None)
    assert seen[1][0][5] is schedule, "made once for a shape"
    with pytest.raises(ValueError, match="every row has to select 128 tokens"):
        flash_mla.attend_flash_mla(q, cache, slots, counts, *rest)


def test_bfloat16_tokens_without_pages(seen: list[tuple[tuple, dict]]) -> None:
    assert flash_mla.attend_flash_mla(*arguments(128, torch.zeros(2, 64, 576).bfloat16())).shape == (3, 128, 512)
    (_, tokens, slots, *_), _ = seen[0]
    assert (tokens.shape, slots.shape) == ((128, 1, 576), (3, 1, 128))


@pytest.mark.parametrize(("heads", "dtype"), [(8, torch.uint8), (64, torch.float32)])
def test_what_it_does_not_take(heads: int, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match="flash_mla takes"):
        flash_mla.attend_flash_mla(*arguments(heads, torch.zeros(2, 64, 576, dtype=dtype)))


def test_it_never_serves_and_is_there_only_with_its_package() -> None:
    assert flash_mla.PACKAGE is not None or "flash_mla" not in sparse_mla.implementations
