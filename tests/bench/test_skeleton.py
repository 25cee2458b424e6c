"""The skeleton's arithmetic, and what it says where there is no GPU."""

import itertools

import pytest
import torch
from typer.testing import CliRunner

from legato.__main__ import app
from legato.bench.launches import GLM_5_2, Launch, Rank, iteration
from legato.bench.skeleton import SkeletonError, _places, measure, streamed_shape
from legato.model.spec import ModelSpec

LAUNCHES = iteration(Rank(ModelSpec.from_config(GLM_5_2), 8), 5)


def test_launches_stream_their_bytes() -> None:
    """Within one strip of 16 outputs; launches without weights stream 128 KB."""
    for launch in LAUNCHES:
        outputs, inputs = streamed_shape(launch)
        assert outputs % 16 == 0 and inputs % 32 == 0
        expected = launch.weight_bytes or 131072
        assert abs(2 * outputs * inputs - expected) <= 16 * inputs
    assert streamed_shape(Launch("q_b", 6, 2048, 2048)) == (2048, 2048)


def test_weights_lie_apart_but_steps_of_the_mtp_layer_share_theirs() -> None:
    places = list(_places(LAUNCHES))
    ends: dict[int, int] = {}
    for place, outputs, inputs in places:
        assert ends.setdefault(place, place + outputs * inputs) == place + outputs * inputs
    ordered = sorted(ends.items())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))
    steps = [index for index, launch in enumerate(LAUNCHES) if launch.name == "eh_proj"]
    assert len({places[index][0] for index in steps}) == 1, "all five steps read one eh_proj"
    assert len(ends) < len(places)


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a GPU")
def test_without_a_gpu_the_launches_are_listed_and_nothing_is_timed() -> None:
    result = CliRunner().invoke(app, ["bench", "skeleton"])
    assert result.exit_code == 0 and "902 launches" in result.stdout and "nothing was timed" in result.stdout
    with pytest.raises(SkeletonError, match="H100 or H200"):
        measure(LAUNCHES, torch.device("cpu"))


@pytest.mark.parametrize(("arguments", "words"), [(("--gpus", "7"), "num_heads"), (("-k", "9"), "between 0 and 7")])
def test_faults_are_said(arguments: tuple[str, ...], words: str) -> None:
    result = CliRunner().invoke(app, ["bench", "skeleton", *arguments])
    assert words in str(result.exception)
