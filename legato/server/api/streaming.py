"""A job as a stream: its steps, said in the form of one API, and how a fault is told once something has been said.

Owns that order of events for all APIs. Knows no form itself. The routes give it one, and what comes out to `server.http.sse`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from legato.server.generation import ChoiceStep, Generation, Generations, Job
from legato.server.http.errors import ApiError, api_error


class Form(Protocol):
    """How an API says one answer. Everything it returns is whole events, or nothing."""

    def said(self, step: ChoiceStep, generation: Generation, /) -> bytes:
        """What a step adds; nothing where it cannot be shown yet. Raises `ApiError` for an end that the API has no word for."""
        ...

    def end(self, generation: Generation, /) -> bytes:
        """What comes after the last step."""
        ...

    def fault(self, error: ApiError, /) -> bytes:
        """The end of an answer that has begun and cannot go on."""
        ...


async def streamed(
    generations: Generations, jobs: Sequence[Job], form: Form, naming: AbstractContextManager[None]
) -> AsyncGenerator[bytes]:
    """The events of jobs, as `EventStream` takes them. A fault before the first one is raised, a later one is told.

    `naming`: tells faults in fields by their names in the API (`RequestModel.own_names`, `respelled`).
    """
    has_begun = False
    try:
        with naming:
            async with generations.open(*jobs) as generation:
                async for step in generation:
                    data = form.said(step, generation)
                    if data or step.is_empty:
                        has_begun = has_begun or bool(data)
                        yield data
                yield form.end(generation)
    except Exception as error:
        if not has_begun:
            raise
        yield form.fault(api_error(error))
