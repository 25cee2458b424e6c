"""The answer of a model, token by token, as reasoning, content and tool calls: one state machine, streaming or not.

Owns the structure of an answer. Works on token ids: control tokens are structure, text that merely looks like one is text. What
it makes of a sequence of tokens does not depend on how they were cut into steps. Knows nothing of HTTP; called once per step and
choice.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from legato.server.answer.events import (
    AnswerMessage,
    ContentText,
    Event,
    Phase,
    ReasoningText,
    Step,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from legato.server.text.stream import StopMatcher
from legato.server.text.tokenizer import Tokenizer
from legato.server.tools.call import CALL, CALL_TAGS, END_CALL, OpenCall, Verdict
from legato.server.tools.definitions import Tools
from legato.types import FinishReason

THINK, END_THINK = "<think>", "</think>"


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    pieces: list[str] = field(default_factory=list[str])
    is_complete: bool = False


class Answer:
    """The answer to one request.

    Reasoning lasts to `</think>`, or, where tools may be called, to the first `<tool_call>`. Tags are structure and in no text;
    but those of a call that is none (see `OpenCall`), and all tags of calls where no tool may be called, are content, so that
    nothing is lost. Blank content before, between and behind calls is dropped. A name that no tool has is a call like any other.

    Stop strings end the content: reasoning and arguments are not searched, and no match crosses a tag. A stop string that *is* a
    tag (`</think>`, say) ends the answer at that tag.

    A model that ends its answer by itself inside reasoning, without a word of content and without a call, has answered there: the
    reasoning is given as content too, at the end. Where the answer is cut (`length` and the like), it is not.
    A call that the model leaves open when it ends its answer is completed; one that is cut keeps its unfinished arguments.

    Tags that the tokenizer has no control token for are recognised in the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, in_reasoning: bool, tools: Tools | None = None, stop: Sequence[str] = ()
    ) -> None:
        """`in_reasoning`: the prompt ends inside an open `<think>` (`ChatPrompt.in_reasoning`)."""
        tags = (THINK, END_THINK, *CALL_TAGS)
        self._tokenizer = tokenizer
        self._tag_of = {tokenizer.control[tag]: tag for tag in tags if tag in tokenizer.control}
        self._spelled = StopMatcher([tag for tag in tags if tag not in tokenizer.control])
        self._unread = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tools = tools if tools is not None and tools.may_call else None
        self._stop_tags = frozenset(stop) & frozenset(tags)
        self._matcher = StopMatcher([text for text in stop if text not in self._stop_tags])
        self.phase: Phase = "reasoning" if in_reasoning else "content"
        self.reasoning_tokens = 0
        self._call: OpenCall | None = None
        self._calls: list[_Call] = []
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._pending = ""
        self._is_blank = True
        self._is_flowing = False
        self._stop: str | None = None
        self._ended = False
        self._new: list[tuple[Event, list[str]]] = []

    @property
    def has_tool_calls(self) -> bool:
        """Whether a call has started."""
        return bool(self._calls)

    @property
    def message(self) -> AnswerMessage:
        """All events so far, put together."""
        calls = (ToolCall(call.id, call.name, "".join(call.pieces), call.is_complete) for call in self._calls)
        return AnswerMessage("".join(self._reasoning), "".join(self._content), tuple(calls))

    def push(self, ids: Iterable[int]) -> Step:
        """Takes tokens. Once the answer has ended, more of them count for nothing."""
        ids = tuple(ids)
        if self._is_flowing and self._tag_of.keys().isdisjoint(ids):
            return self._flow(ids)
        step = self._read_tokens(ids)
        self._is_flowing = not (self._ended or self._may_turn()) and (
            self.phase == "reasoning" or not (self._pending or self._is_blank)
        )
        return step

    def _flow(self, ids: tuple[int, ...]) -> Step:
        """Ordinary tokens where nothing is held back, looked for or about to turn: what `_read_tokens` would make of them."""
        text = self._decoder.decode(b"".join(map(self._tokenizer.token_bytes, ids)))
        if self.phase == "reasoning":
            self.reasoning_tokens += len(ids)
            if text:
                self._reasoning.append(text)
                return Step((ReasoningText(text),), len(ids))
        elif text:
            self._content.append(text)
            return Step((ContentText(text),), len(ids))
        return Step((), len(ids))

    def _read_tokens(self, ids: tuple[int, ...]) -> Step:
        count = 0
        run: list[bytes] = []
        may_turn, bytes_of = self._may_turn(), self._tokenizer.token_bytes
        for index in () if self._ended else ids:
            count += 1
            tag = self._tag_of.get(index)
            if tag is None:
                self.reasoning_tokens += self.phase == "reasoning"
                run.append(bytes_of(index))
                if not may_turn:
                    continue
            self._read_run(run)
            if tag is not None:
                self._flush()
                if self._stop is None:
                    self._tag(tag)
            if self._stop is not None:
                self._end()
                break
            may_turn = self._may_turn()
        self._read_run(run)
        return self._step(count)

    def finish(self, reason: FinishReason) -> Step:
        """The tokens have ended, and why: what was held back comes out. Nothing is left to do where a stop string ended it."""
        if self._ended:
            return self._step(0)
        self._flush()
        if self._call is not None and self._stop is None:
            self._leave_call(reason)
        is_silent = not self._calls and not self._content and not self._pending.strip()
        if self.phase == "reasoning" and reason == "stop" and is_silent and self._stop is None:
            self._say("".join(self._reasoning))
        self._end()
        return self._step(0)

    def _step(self, count: int) -> Step:
        events, self._new = self._new, []
        stop, self._stop = self._stop, None
        return Step(tuple(_joined(event, pieces) for event, pieces in events), count, stop)

    # -- from tokens to text and tags ------------------------------------------------------------------------------------

    def _may_turn(self) -> bool:
        """Whether the next text may end the answer, a call or a phase: then it is read token by token, or it would not be known
        which one did."""
        is_searched = self.phase == "content" and bool(self._matcher.strings)
        return is_searched or self._call is not None or bool(self._spelled.strings)

    def _read_run(self, run: list[bytes]) -> None:
        """The ordinary tokens since the last time, which it takes away."""
        if run:
            self._read(self._decoder.decode(b"".join(run)))
            run.clear()

    def _read(self, text: str) -> None:
        """Text from ordinary tokens, in which spelled-out tags are looked for if the tokenizer lacks them."""
        if not self._spelled.strings:
            self._text(text)
            return
        for character in text:
            self._unread += character
            tag = self._spelled.advance(character)
            if tag is None:
                ready = len(self._unread) - self._spelled.held
                known, self._unread = self._unread[:ready], self._unread[ready:]
            else:
                known, self._unread = self._unread[: -len(tag)], ""
                self._spelled.reset()
            self._text(known)
            if tag is not None and self._stop is None:
                self._tag(tag)
            if self._stop is not None:
                return

    def _flush(self) -> None:
        """What could have gone on as a character or as a spelled-out tag, and did not."""
        self._read(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        unread, self._unread = self._unread, ""
        self._spelled.reset()
        if self._stop is None:
            self._text(unread)

    # -- what text and tags mean -------------------------------------------------------------------------------------------

    def _text(self, text: str) -> None:
        if not text:
            return
        if self._call is not None:
            self._settle(self._call, self._call.text(text))
        elif self.phase == "reasoning":
            self._reasoning.append(text)
            self._emit(ReasoningText(text), text)
        else:
            self._say(text)

    def _tag(self, tag: str) -> None:
        if tag in self._stop_tags and tag != END_CALL:
            if self._call is not None:
                self._leave_call("stop")
            self._stop = self._stop or tag
            return
        if self._call is not None:
            self._settle(self._call, self._call.tag(tag), tag)
        elif tag == CALL and self._tools is not None:
            self._enter_call(self._tools)
        elif tag == THINK:
            self._end_segment()
            self.phase = "reasoning"
        elif tag == END_THINK:
            self.phase = "content"
        else:
            self._text(tag)
        if tag in self._stop_tags:
            self._stop = self._stop or tag

    def _enter_call(self, tools: Tools) -> None:
        self._end_segment()
        blank, self._pending = self._pending, ""
        self.phase = "tool_call"
        self._call = OpenCall(tools, blank + CALL, self._start_call, self._add_arguments)

    def _settle(self, call: OpenCall, verdict: Verdict, tag: str | None = None) -> None:
        """Acts on what text or a tag did to the open call."""
        if verdict == "open":
            return
        self._call, self.phase, self._is_blank = None, "content", True
        if verdict == "rejected":
            self._say(call.raw)
        else:
            self._calls[-1].is_complete = True
            self._end_call(call)
            if self._tools is not None and not self._tools.parallel:
                self._stop = END_CALL
        if tag is not None and verdict != "done" and self._stop is None:
            self._tag(tag)

    def _leave_call(self, reason: FinishReason) -> None:
        """The answer ends inside a call."""
        call = self._call
        if call is None:
            return
        if not call.is_settled:
            self._settle(call, "rejected")
        elif reason == "stop":
            self._settle(call, call.close())
        else:
            call.cut()
            self._call, self.phase = None, "content"
            self._end_call(call)

    def _start_call(self, id: str, name: str) -> None:
        self._calls.append(_Call(id, name))
        self._new.append((ToolCallStart(len(self._calls) - 1, id, name), []))

    def _add_arguments(self, text: str) -> None:
        self._calls[-1].pieces.append(text)
        self._emit(ToolCallArguments(len(self._calls) - 1, text), text)

    def _end_call(self, call: OpenCall) -> None:
        self._new.append((ToolCallEnd(len(self._calls) - 1), []))
        if call.strays:
            self._say(call.strays)
            self._end_segment()
            self._is_blank = True

    # -- content -------------------------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        """Content, up to a stop string. Held back: what could be the start of one, and blank text that a call may follow."""
        if self._stop is not None:
            return
        for position, character in enumerate(text if self._matcher.strings else ""):
            self._stop = self._matcher.advance(character)
            if self._stop is not None:
                self._pending = (self._pending + text[: position + 1])[: -len(self._stop)]
                return
        self._pending += text
        self._release(self._matcher.held)

    def _release(self, held: int) -> None:
        ready = self._pending[: len(self._pending) - held]
        if not ready or (self._is_blank and not ready.strip()):
            return
        self._is_blank, self._pending = False, self._pending[len(ready) :]
        self._content.append(ready)
        self._emit(ContentText(ready), ready)

    def _end_segment(self) -> None:
        """Content is interrupted by a tag: no stop string goes on behind it. Blank content stays pending."""
        self._matcher.reset()
        self._release(0)

    def _end(self) -> None:
        """The answer is over: the last of the content, unless it is blank and there are calls."""
        self._ended, self._is_flowing = True, False
        if not self._calls:
            self._is_blank = False
        self._release(0)
        self._pending = ""

    def _emit(self, event: Event, text: str) -> None:
        """Adds a piece of text, joined to the one before where both belong together."""
        if self._new:
            last, pieces = self._new[-1]
            if type(last) is type(event) and getattr(last, "index", None) == getattr(event, "index", None):
                pieces.append(text)
                return
        self._new.append((event, [text]))


def _joined(event: Event, pieces: list[str]) -> Event:
    if len(pieces) < 2:
        return event
    text = "".join(pieces)
    return ToolCallArguments(event.index, text) if isinstance(event, ToolCallArguments) else type(event)(text)  # type: ignore[call-arg]
