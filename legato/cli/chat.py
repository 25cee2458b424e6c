"""`legato chat`: a conversation in the terminal, streamed, with reasoning shown dim and the speed after every reply.

Owns the conversation, the commands typed in it, and the screen. Called by `legato.__main__`.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from rich.console import Console

from legato.cli.loading import load, speed
from legato.config import Config
from legato.llm import LLM
from legato.server.answer.events import ContentText, ReasoningText, Step
from legato.server.answer.structure import Answer
from legato.types import FinishReason, SamplingParams

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

    def reply(self, text: str) -> Generator[ReasoningText | ContentText]:
        """Streams the answer to `text`, piece by piece, and remembers both (of an interrupted answer what there was).

        Raises:
            ChatError: the template refuses the conversation.
            RequestError: the conversation has outgrown the context.
        """
        self.messages.append({"role": "user", "content": text})
        answer = Answer(self.llm.tokenizer, in_reasoning=False)
        try:
            prompt = self.llm.render(self.messages, **self.arguments)
            answer = Answer(self.llm.tokenizer, in_reasoning=prompt.in_reasoning, stop=self.params.stop)
            reason: FinishReason = "stop"
            with closing(self.llm.stream(prompt, replace(self.params, stop=()))) as deltas:
                for delta in deltas:
                    step = answer.push(delta.token_ids)
                    yield from _texts(step)
                    reason = delta.finish_reason or reason
                    if step.stop is not None:
                        break
            yield from _texts(answer.finish(reason))
        finally:
            said = answer.message
            if said.reasoning or said.content:
                turn = {"role": "assistant", "content": said.content, "reasoning_content": said.reasoning}
                self.messages.append(turn)
            else:
                self.messages.pop()


def _texts(step: Step) -> list[ReasoningText | ContentText]:
    return [event for event in step.events if isinstance(event, ReasoningText | ContentText)]


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
    was_reasoning = False
    pieces = conversation.reply(text)
    try:
        for piece in pieces:
            is_reasoning = isinstance(piece, ReasoningText)
            if was_reasoning and not is_reasoning:
                console.print("\n")
            was_reasoning = is_reasoning
            console.print(piece.text, end="", style="dim" if is_reasoning else None, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(" [stopped]", end="", style="dim")
    finally:
        pieces.close()
    console.print(f"\n{speed(conversation.llm.stats)}", style="dim")
