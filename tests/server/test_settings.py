"""Server settings: what is refused, with names; the checkpoint's recommendation; what a model without a name is called."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from legato.server.settings import (
    Access,
    Listen,
    Replies,
    RequestLimits,
    SamplingDefaults,
    ServerSettings,
    SettingsError,
    name_of,
)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Listen(port=70000), "port"),
        (lambda: Listen(keyfile="k"), "keyfile"),
        (lambda: Access(api_keys=("good", " ")), "api_keys"),
        (lambda: Access(api_keys=("schlüssel",)), "api_keys"),
        (lambda: RequestLimits(max_body_bytes=0), "max_body_bytes"),
        (lambda: RequestLimits(timeout_s=0), "timeout_s"),
        (lambda: Replies(reasoning_fields="none"), "reasoning_fields"),  # type: ignore[arg-type]
        (lambda: Replies(tool_parser="llama3"), "tool_parser"),
        (lambda: Replies(reasoning_parser="deepseek"), "reasoning_parser"),
        (lambda: Replies(keepalive_s=0), "keepalive_s"),
        (lambda: ServerSettings(model_names=("",)), "model_names"),
        (lambda: ServerSettings(drain_s=-1), "drain_s"),
        (lambda: ServerSettings(metrics_compat=frozenset({"tgi"})), "metrics_compat"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_work_is_named(make: Callable[[], Any], name: str) -> None:
    with pytest.raises(SettingsError, match=name):
        make()


def test_keys_are_in_no_representation() -> None:
    assert "secret-key" not in repr(ServerSettings(access=Access(api_keys=("secret-key",))))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, SamplingDefaults()),
        ('{"eos_token_id": 5}', SamplingDefaults()),
        ('{"temperature": 0.6, "top_p": 0.95, "top_k": 40}', SamplingDefaults(0.6, 0.95, 40)),
        ('{"temperature": null, "do_sample": true}', SamplingDefaults()),
        ('{"temperature": 0.6, "do_sample": false}', SamplingDefaults(0.0)),
    ],
)
def test_defaults_are_what_the_checkpoint_recommends(text: str | None, expected: SamplingDefaults) -> None:
    assert SamplingDefaults.of_checkpoint({"generation_config.json": text}.get) == expected


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"temperature": "warm"}', '{"top_p": true}', '{"temperature": -1}', '{"top_p": 5}', '{"top_k": 1.5}'],
)
def test_recommendations_that_cannot_be_followed_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"generation_config\.json"):
        SamplingDefaults.of_checkpoint(lambda name: text)


def test_a_model_is_called_by_its_hub_id_or_its_folder(tmp_path: Path) -> None:
    assert name_of("zai-org/GLM-5.2-FP8") == "zai-org/GLM-5.2-FP8"
    assert (
        name_of("/models/glm/5.2/") == "5.2" and name_of("./glm") == "glm" and name_of(str(tmp_path)) == tmp_path.name
    )
