"""From a request's parameters to the controls that its device row needs: penalties, bias, bans and grammar.

Owns the rule that decides whether a request needs any. Called by the scheduler at admission.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from legato.plan import Controls, ReasoningBound
from legato.schedule.request import Request
from legato.types import BAN


def controls_of(request: Request, generated: Sequence[int]) -> Controls | None:
    """Controls of a request that has already generated some tokens; `None` when its logits are sampled as they are."""
    params, prompt = request.params, request.prompt
    bias = {token: -math.inf if value == BAN else float(value) for token, value in params.logit_bias.items()}
    bias |= dict.fromkeys(params.bad_token_ids, -math.inf)
    controls = Controls(
        prompt=prompt,
        generated=tuple(generated),
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty,
        min_length=len(prompt) + params.min_tokens,
        bias=tuple(bias.items()),
        allowed=params.allowed_token_ids,
        grammar=params.constraint,
        reasoning=_reasoning(request, generated),
    )
    asked = (controls.counts_tokens, bias, controls.allowed is not None, controls.grammar, params.min_tokens)
    return controls if any(asked) or controls.reasoning is not None else None


def _reasoning(request: Request, generated: Sequence[int]) -> ReasoningBound | None:
    budget, end = request.params.reasoning_budget, request.params.reasoning_end
    if budget is None or end is None or end in generated:
        return None
    return ReasoningBound(len(request.prompt) + budget, end)
