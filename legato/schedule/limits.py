"""What the machine offers to all requests together, and how long one may become.

Numbers only; settled at start-up. Read by the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

from legato.schedule.request import NeverFits, Request, RequestError
from legato.types import too_long


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine offers.

    Attributes:
        max_running: device rows.
        chunk_tokens: most rows of prompts in one plan; those of decoding requests are among them where they share a batch.
        context: longest prompt plus output.
        num_drafts: K.
        num_pages: pages of `page_size` tokens, the dummy page 0 included.
        prefix_cache: whether pages are found again by later requests.
        max_waiting: most requests that wait, not counting those that can run at once; `None`: any number.
        host_pages: pages of host memory for what the prefix cache evicts.
        depths: numbers of drafts between which iterations choose, ascending, the last of them K; none named: K alone.
        layers: the kind of each of the target's layers; those of one kind take about the same time.
        end_rows: most rows of a prompt's end that runs as graphs, where it is the only prompt of its plan; 0: none does.
        end_layers: layers of each of these graphs, between which alone such an end can be cut.
        slowdown: how many times its own time an iteration may take that carries a part of a prompt; 0: prompts run whole chunks,
            in the same rows as everyone else.
    """

    max_running: int
    chunk_tokens: int
    context: int
    num_drafts: int
    num_pages: int
    page_size: int
    prefix_cache: bool = True
    max_waiting: int | None = None
    host_pages: int = 0
    depths: tuple[int, ...] = ()
    layers: tuple[str, ...] = ("",)
    end_rows: int = 0
    end_layers: int = 1
    slowdown: float = 0.0

    def max_length(self, request: Request) -> int:
        """Most tokens of prompt and output together. The last of them is never run, so it needs no place in the cache.

        Raises:
            RequestError: the prompt is empty.
            NeverFits: it is too long, or the request could need more pages than there are.
        """
        prompt_len, asked = len(request.prompt), request.params.max_tokens
        room = (self.num_pages - 1) * self.page_size
        if not request.prompt:
            raise RequestError("the prompt has no tokens", "prompt")
        if prompt_len >= self.context:
            raise NeverFits(too_long(str(prompt_len), self.context), "prompt")
        if asked is not None and prompt_len + asked > self.context:
            raise NeverFits(
                f"this model's maximum context length is {self.context} tokens; the prompt has {prompt_len} and"
                f" max_tokens is {asked}",
                "max_tokens",
            )
        if prompt_len + (asked or 1) - 1 > room:
            name = "prompt" if prompt_len > room else "max_tokens"
            raise NeverFits(f"the request can grow to {prompt_len + (asked or 1)} tokens; the cache holds {room}", name)
        return min(self.context, room + 1) if asked is None else prompt_len + asked
