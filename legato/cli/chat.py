"""`legato chat`: a conversation in the terminal, streamed, with reasoning shown dim and the speed after every reply.

Owns the conversation, the commands typed in it, and the screen. Called by `legato.__main__`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from legato.cli.loading import load, speed
from legato.config import Config
from legato.llm import LLM
from legato.server.stream import Part, ReasoningSplit
from legato.types import SamplingParams

HELP = "/exit leaves, /reset forgets the conversation, Ctrl-C stops a reply"


class Conversation:
    """The messages so far and how to ask for the next one."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, arguments: Mapping[str, Any]) -> None:
        self.llm = llm
        self.params = params
        self.arguments = dict(arguments)
        self.opening = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self.opening)

    def reset(self) -> None:
        """Forgets everything but the system message."""
        self.messages = list(self.opening)

    def reply(self, text: str) -> Iterator[tuple[Part, str]]:
        """Streams the answer to `text`, piece by piece, and remembers both (of an interrupted answer what there was).

        Raises:
            ChatError: the template refuses the conversation.
            RequestError: the conversation has outgrown the context.
        """
        self.messages.append({"role": "user", "content": text})
        said: dict[Part, str] = {"reasoning": "", "content": ""}
        try:
            prompt = self.llm.render(self.messages, **self.arguments)
            split = ReasoningSplit("reasoning" if prompt.in_reasoning else "content")
            for delta in self.llm.stream(prompt, self.params):
                pieces = split.push(delta.text) + (split.finish() if delta.finish_reason else [])
                for part, piece in pieces:
                    said[part] += piece
                    yield part, piece
        finally:
            if said["reasoning"] or said["content"]:
                answer = {"role": "assistant", "content": said["content"], "reasoning_content": said["reasoning"]}
                self.messages.append(answer)
            else:
                self.messages.pop()


def run(config: Config, params: SamplingParams, system: str | None, arguments: Mapping[str, Any]) -> None:
    """Loads the model and talks until /exit or the end of the input."""
    console = Console(highlight=False, markup=False)
    conversation = Conversation(load(config, Console(stderr=True)), params, system, arguments)
    console.print(HELP, style="dim")
    while (text := _ask(console)) is not None:
        if text == "/reset":
            conversation.reset()
        elif text.startswith("/"):
            console.print(HELP, style="dim")
        elif text:
            _answer(console, conversation, text)


def _ask(console: Console) -> str | None:
    """The next line typed; `None` when the conversation is over."""
    try:
        text = console.input("> ").strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if text in ("/exit", "/quit") else text


def _answer(console: Console, conversation: Conversation, text: str) -> None:
    conversation.llm.reset_stats()
    shown: Part | None = None
    pieces = conversation.reply(text)
    try:
        for part, piece in pieces:
            if shown == "reasoning" and part == "content":
                console.print("\n")
            shown = part
            console.print(piece, end="", style="dim" if part == "reasoning" else None, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(" [stopped]", end="", style="dim")
    finally:
        pieces.close()  # type: ignore[attr-defined]
    console.print(f"\n{speed(conversation.llm.stats)}", style="dim")
