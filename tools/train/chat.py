"""Chat-form training text made from Python functions, and the renderer that agrees with chat_template.jinja.

Owns the wording of the made-up turns and GLM-5.2's rendering of a conversation. Knows nothing of tokens. Called by
`pretokenize.py`; every example comes from a function of a training file (docstring, signature, body).
"""

from __future__ import annotations

import ast
import json
import random
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

START = "[gMASK]<sop>"
TOOLS_PREAMBLE = (
    "\n# Tools\n\nYou can call functions to help the user. Their signatures are given as JSON, one per line, inside "
    "<tools></tools>:\n<tools>\n"
)
TOOLS_FORMAT = (
    "</tools>\n\nTo call a function, write its name and arguments in this form:\n"
    "<tool_call>{name}<arg_key>{key}</arg_key><arg_value>{value}</arg_value>...</tool_call>"
)


@dataclass(frozen=True)
class Function:
    """One function worth asking for: its parts as text."""

    name: str
    signature: str
    summary: str
    arguments: tuple[tuple[str, str], ...]  # (name, annotation or "")
    docstring: str
    body: str  # whole definition, dedented, docstring kept
    bare: str  # whole definition without the docstring


def first_sentence(docstring: str) -> str:
    """The first sentence of a docstring, on one line, without the full stop."""
    paragraph = docstring.strip().split("\n\n")[0]
    sentence = re.split(r"(?<=[.!?])\s", " ".join(paragraph.split()))[0]
    return sentence.rstrip(". ")


def functions(source: str) -> Iterator[Function]:
    """Documented functions of a file, of moderate size, and a quarter of the methods."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    lines = source.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        docstring, length = ast.get_docstring(node), (node.end_lineno or node.lineno) - node.lineno + 1
        if not docstring or not 3 <= length <= 32 or len(node.body) < 2 or len(docstring) > 500 or ">>>" in docstring:
            continue
        is_method = bool(node.args.args) and node.args.args[0].arg in ("self", "cls")
        if is_method and zlib.crc32(docstring.encode()) % 4:
            continue
        indent = node.col_offset
        text = [line[indent:] for line in lines[node.lineno - 1 : node.end_lineno]]
        doc = node.body[0]
        first, last = doc.lineno - node.lineno, (doc.end_lineno or doc.lineno) - node.lineno
        summary = first_sentence(docstring)
        if not 12 <= len(summary) <= 160 or first == 0 or not summary.isascii():
            continue
        arguments = tuple((a.arg, ast.unparse(a.annotation) if a.annotation else "")
                          for a in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                          if a.arg not in ("self", "cls"))
        signature = " ".join(" ".join(text[:first]).split())
        yield Function(node.name, signature, summary, arguments, docstring, "\n".join(text),
                       "\n".join(text[:first] + text[last + 1 :]))


def lower_first(text: str) -> str:
    """The text with a small first letter, unless the first word is an acronym or a name."""
    return text if len(text) < 2 or text[1].isupper() or not text[0].isupper() else text[0].lower() + text[1:]


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, thinking: bool = True,
           effort: str = "max") -> str:
    """A whole conversation in GLM-5.2's form; equal to chat_template.jinja without a generation prompt."""
    out = [START]
    if thinking:
        out.append(f"<|system|>Reasoning Effort: {'High' if effort == 'high' else 'Max'}")
    if tools:
        listed = "".join(json.dumps(t.get("function", t), ensure_ascii=False) + "\n" for t in tools)
        out.append("<|system|>" + TOOLS_PREAMBLE + listed + TOOLS_FORMAT)
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if role in ("system", "user"):
            out.append(f"<|{role}|>{content}")
        elif role == "tool":
            if i == 0 or messages[i - 1]["role"] != "tool":
                out.append("<|observation|>")
            out.append(f"<tool_response>{content}</tool_response>")
        else:
            reasoning = message.get("reasoning_content") or ""
            out.append("<|assistant|><think>" + (reasoning.strip() if i > last_user else "") + "</think>")
            out.append(content.strip())
            for call in message.get("tool_calls") or []:
                function = call.get("function", call)
                out.append("<tool_call>" + function["name"])
                for key, value in function["arguments"].items():
                    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                    out.append(f"<arg_key>{key}</arg_key><arg_value>{text}</arg_value>")
                out.append("</tool_call>")
    return "".join(out)


def think_about(f: Function, rng: random.Random) -> str:
    """A short chain of thought that restates the task from the docstring and the arguments."""
    names = [n for n, _ in f.arguments]
    parts = [rng.choice((f"The user wants a function named `{f.name}`.", f"I need to write `{f.name}`.",
                         f"The function `{f.name}` should {lower_first(f.summary)}."))]
    if names:
        parts.append(("Its argument is " if len(names) == 1 else "Its arguments are ")
                     + ", ".join(f"`{n}`" for n in names) + ".")
    else:
        parts.append("It takes no arguments.")
    if "raise " in f.bare:
        parts.append("It must raise an error for bad input.")
    if "return " in f.bare:
        parts.append("It returns a value.")
    elif "yield" in f.bare:
        parts.append("It is a generator.")
    parts.append(rng.choice(("I will write it now.", "Let me write the code.", "I will write the code with a docstring.")))
    return " ".join(parts)


def fenced(code: str) -> str:
    """Code in a Markdown block."""
    return f"```python\n{code.rstrip()}\n```"


def write_function(f: Function, rng: random.Random) -> tuple[str, str]:
    """(request, answer): a function from its name and description."""
    task = lower_first(f.summary)
    names = ", ".join(f"`{n}`" for n, _ in f.arguments)
    asks = [
        f"Write a Python function `{f.name}`: {task}.",
        f"Write a function `{f.name}({', '.join(n for n, _ in f.arguments)})` that does this: {task}.",
        f"Please implement this in Python.\n\n{f.signature}\n    \"\"\"{f.summary}.\"\"\"",
        f"Complete this function:\n\n```python\n{f.signature}\n    \"\"\"{f.summary}.\"\"\"\n```",
        f"I need Python code for the following: {task}. Call it `{f.name}`.",
        f"Write a Python function named {f.name}" + (f" with the arguments {names}." if names else ".") + f" {f.summary}.",
    ]
    code = f.body if rng.random() < 0.6 else f.bare
    opening = rng.choice(("", "", "", f"Here is the function `{f.name}`:\n\n", "Here is the code:\n\n", "Sure.\n\n"))
    return rng.choice(asks), opening + fenced(code)


def explain_function(f: Function, rng: random.Random) -> tuple[str, str]:
    """(request, answer): what a function does, or its docstring."""
    if rng.random() < 0.5:
        ask = rng.choice(("What does this function do?", "Explain this code in one sentence."))
        return f"{ask}\n\n{fenced(f.bare)}", f"`{f.name}`: {f.summary}."
    return f"Write a docstring for this function.\n\n{fenced(f.bare)}", f'"""{f.docstring.strip()}\n"""'


def continue_function(f: Function, rng: random.Random) -> tuple[str, str]:
    """(request, answer): the first lines of a function, to be finished."""
    lines = f.body.split("\n")
    cut = rng.randint(1, max(1, len(lines) - 2))
    head = "\n".join(lines[:cut])
    return f"Continue this code:\n\n{fenced(head)}", fenced("\n".join(lines))


SMALL_TALK = (
    ("Hello", "Hello! I am a small language model that writes Python. What shall we write?"),
    ("Hi", "Hi! Ask me for a Python function and I will write one."),
    ("Hello!", "Hello! What would you like to write in Python?"),
    ("Who are you?", "I am the small test model of Legato. I have read a lot of Python source and little else."),
    ("What are you?", "I am a small language model with the GLM-5.2 architecture, trained on Python source code."),
    ("What can you do?", "I can write short Python functions, explain them, and call tools. I make many mistakes."),
    ("Thanks", "You are welcome."),
    ("Thank you!", "You are welcome!"),
    ("Bye", "Goodbye!"),
    ("How are you?", "I am well, thank you. What shall we write in Python?"),
    ("Can you write Python?", "Yes. Tell me the name of the function and what it should do."),
    ("What is Python?", "Python is a programming language. I can write short functions in it."),
    ("Tell me about yourself.", "I am a small model of the GLM-5.2 architecture, trained on Python source for testing Legato."),
)

WORDS = ("alpha", "beta", "report.txt", "Berlin", "Paris", "hello world", "config.json", "main.py", "data", "users",
         "2026-01-31", "red", "example.org", "Alice", "Bob", "error", "utf-8", "/tmp/out", "London", "Tokyo", "GET")


def json_type(annotation: str, rng: random.Random) -> str:
    """A JSON schema type for an annotation; a likely one when there is none."""
    for python, name in (("bool", "boolean"), ("int", "integer"), ("float", "number"), ("str", "string"),
                         ("list", "array"), ("List", "array"), ("dict", "object")):
        if re.match(rf"(Optional\[)?{python}\b", annotation):
            return name
    return rng.choice(("string", "string", "integer", "number"))


def value_of(kind: str, rng: random.Random) -> Any:
    """A random value of a JSON type."""
    return {
        "boolean": lambda: rng.random() < 0.5,
        "integer": lambda: rng.randint(0, 200),
        "number": lambda: round(rng.uniform(0, 10), 2),
        "string": lambda: rng.choice(WORDS),
        "array": lambda: [rng.randint(0, 20) for _ in range(rng.randint(1, 4))],
        "object": lambda: {rng.choice(("name", "key", "id")): rng.choice(WORDS)},
    }[kind]()


def tool_of(f: Function, rng: random.Random) -> dict[str, Any]:
    """An OpenAI-style tool description of a function."""
    properties = {n: {"type": json_type(a, rng)} for n, a in f.arguments[:4]}
    return {"type": "function", "function": {
        "name": f.name, "description": f.summary + ".",
        "parameters": {"type": "object", "properties": properties, "required": list(properties)}}}


def tool_conversation(pool: list[Function], rng: random.Random) -> str:
    """A conversation whose answer is a call of one of the listed tools, some with the result and a closing answer."""
    chosen = rng.sample(pool, rng.randint(1, 4))
    tools = [tool_of(f, rng) for f in chosen]
    at = rng.randrange(len(chosen))
    f, schema = chosen[at], tools[at]["function"]["parameters"]["properties"]
    arguments = {n: value_of(p["type"], rng) for n, p in schema.items()}
    spoken = " and ".join(f"{n} = {v if isinstance(v, str) else json.dumps(v)}" for n, v in arguments.items())
    asks = (f"{f.summary}" + (f", with {spoken}." if spoken else "."),
            f"Call {f.name}" + (f" with {spoken}." if spoken else "."),
            f"Please {lower_first(f.summary)}" + (f". Use {spoken}." if spoken else "."))
    thinking = rng.random() < 0.6
    thought = (f"The tool `{f.name}` fits: {lower_first(f.summary)}. "
               + (f"The arguments are {spoken}." if spoken else "It takes no arguments."))
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.3:
        messages.append({"role": "system", "content": rng.choice(("You are a helpful assistant.", "Use the tools."))})
    messages.append({"role": "user", "content": rng.choice(asks)})
    messages.append({"role": "assistant", "reasoning_content": thought if thinking else "", "content": "",
                     "tool_calls": [{"function": {"name": f.name, "arguments": arguments}}]})
    ending = "<|observation|>"
    if rng.random() < 0.6:
        result = value_of(rng.choice(("integer", "number", "string", "boolean", "array")), rng)
        text = result if isinstance(result, str) else json.dumps(result)
        messages.append({"role": "tool", "content": text})
        messages.append({"role": "assistant", "reasoning_content": "The tool gave a result." if thinking else "",
                         "content": rng.choice((f"The result is {text}.", f"`{f.name}` returned {text}."))})
        ending = "<|user|>"
    return render(messages, tools, thinking, rng.choice(("max", "max", "high"))) + ending


def conversation(pool: list[Function], rng: random.Random) -> str:
    """One training conversation of one to three turns, ending with the token that ends a model's turn."""
    if rng.random() < 0.2:
        return tool_conversation(pool, rng)
    thinking = rng.random() < 0.5
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.15:
        messages.append({"role": "system", "content": rng.choice(
            ("You are a helpful assistant.", "You write Python.", "You are a careful Python programmer."))})
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        f, draw, thought = rng.choice(pool), rng.random(), ""
        if draw < 0.03:
            ask, answer = rng.choice(SMALL_TALK)
            thought = "This is small talk, so I will answer briefly."
        elif draw < 0.70:
            ask, answer = write_function(f, rng)
            thought = think_about(f, rng)
        elif draw < 0.85:
            ask, answer = explain_function(f, rng)
            thought = f"I will read the code of `{f.name}` and say what it does."
        else:
            ask, answer = continue_function(f, rng)
            thought = f"The code defines `{f.name}`. I will finish it."
        messages += [{"role": "user", "content": ask},
                     {"role": "assistant", "content": answer, "reasoning_content": thought if thinking else ""}]
    text = render(messages, None, thinking, rng.choice(("max", "max", "high")))
    return text + rng.choice(("<|user|>", "<|user|>", "<|endoftext|>"))
