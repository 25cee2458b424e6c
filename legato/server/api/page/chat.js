// The chat: a conversation held in this tab, answers streamed piece by piece, reasoning folded, tool calls shown.

import { element, events, request } from "/page/api.js";

const $ = (id) => document.getElementById(id);
const log = $("log");
const messages = [];
let running = null; // AbortController of the answer that streams

const EXAMPLE_TOOLS = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city.",
    parameters: { type: "object", properties: { city: { type: "string" }, days: { type: "integer" } }, required: ["city"] },
  },
}];

/** The body of a request for the next answer. Throws where a setting cannot be read. */
function body() {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const system = $("system").value.trim();
  const tools = $("tools").value.trim();
  const thinking = $("thinking").value;
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    top_p: number("top-p"),
    max_tokens: number("max-tokens"),
    seed: number("seed"),
    tools: tools ? JSON.parse(tools) : undefined,
    tool_choice: tools ? $("tool-choice").value : undefined,
    chat_template_kwargs: thinking ? { enable_thinking: thinking === "on" } : undefined,
  };
}

/** Shows text, with code between ``` fences in boxes of its own. */
function show(container, text) {
  const parts = text.split(/^```[^\n]*\n?/m);
  const nodes = parts.map((part, index) => {
    if (index % 2 === 0) return element("span", "", part);
    const box = element("pre");
    box.append(element("code", "", part.replace(/\n$/, "")));
    return box;
  });
  container.replaceChildren(...nodes.filter((node) => node.textContent));
}

const nearEnd = () => log.scrollHeight - log.scrollTop - log.clientHeight < 80;

function add(node) {
  $("empty").hidden = true;
  log.append(node);
  log.scrollTop = log.scrollHeight;
  return node;
}

function addText(role, text) {
  const message = element("div", `message ${role}`);
  message.append(element("div", role === "tool" ? "tool-result" : "text", text));
  return add(message);
}

/** An answer as it grows: its parts, and how to draw them at most once a frame. */
class AnswerView {
  constructor() {
    this.message = { role: "assistant", content: "" };
    this.reasoning = "";
    this.calls = [];
    this.root = add(element("div", "message assistant"));
    this.scheduled = false;
  }

  push(delta) {
    this.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
    this.message.content += delta.content ?? "";
    for (const { index, id, type, ...piece } of delta.tool_calls ?? []) {
      const call = (this.calls[index] ??= { id, type, [type]: {} });
      const called = call[call.type];
      for (const [name, text] of Object.entries(piece[call.type])) called[name] = (called[name] ?? "") + text;
    }
    if (!this.scheduled) {
      this.scheduled = true;
      requestAnimationFrame(() => this.draw());
    }
  }

  draw() {
    this.scheduled = false;
    const stay = nearEnd();
    if (this.reasoning) {
      if (!this.fold) {
        this.fold = element("details", "reasoning");
        this.fold.append(element("summary"), element("div"));
        this.root.prepend(this.fold);
      }
      this.fold.firstChild.textContent = this.message.content || this.calls.length ? "Reasoning" : "Thinking\u2026";
      this.fold.lastChild.textContent = this.reasoning;
    }
    if (this.message.content.trim()) {
      this.text ??= this.root.appendChild(element("div", "text"));
      show(this.text, this.message.content.trimStart());
    }
    this.calls.forEach((call, index) => this.drawCall(call, index));
    if (stay) log.scrollTop = log.scrollHeight;
  }

  drawCall(call, index) {
    this.boxes ??= [];
    if (!this.boxes[index]) {
      const box = element("div", "call");
      box.append(element("small", "", "tool call "), element("b"), element("pre"));
      this.boxes[index] = this.root.appendChild(box);
    }
    const [, name, shown] = this.boxes[index].children;
    name.textContent = call[call.type].name;
    shown.textContent = call.custom ? call.custom.input : pretty(call.function.arguments);
  }

  /** Ends the answer: remembers it, and offers fields for the results of its calls. */
  finish(note) {
    if (this.scheduled) this.draw();
    if (this.reasoning) this.message.reasoning_content = this.reasoning;
    if (this.calls.length) this.message.tool_calls = this.calls;
    if (this.fold) this.fold.firstChild.textContent = "Reasoning";
    if (this.message.content || this.reasoning || this.calls.length) messages.push(this.message);
    this.root.append(element("div", "note", note));
    if (this.calls.length) this.offerResults();
    if (nearEnd()) log.scrollTop = log.scrollHeight;
  }

  offerResults() {
    const fields = this.calls.map((call, index) => {
      const label = element("label", "", `Result of ${call[call.type].name}`);
      const field = label.appendChild(element("textarea"));
      field.rows = 1;
      this.boxes[index].append(label);
      return field;
    });
    const button = this.root.appendChild(element("button", "", this.calls.length > 1 ? "Send results" : "Send result"));
    button.type = "button";
    button.addEventListener("click", () => {
      button.remove();
      this.calls.forEach((call, index) => {
        messages.push({ role: "tool", tool_call_id: call.id, content: fields[index].value });
        fields[index].disabled = true;
      });
      answer();
    });
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Streams the next answer. */
async function answer() {
  let wanted;
  try {
    wanted = JSON.stringify(body());
  } catch (error) {
    add(element("div", "error", `Tools are not valid JSON: ${error.message}`));
    return;
  }
  running = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  const view = new AnswerView();
  const start = performance.now();
  let first = null, last = null, usage = null, reason = null;
  try {
    const response = await request("/v1/chat/completions", {
      method: "POST", headers: { "content-type": "application/json" }, body: wanted, signal: running.signal,
    });
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message ?? "the stream broke off");
      if (chunk.usage) usage = chunk.usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      const delta = choice.delta ?? {};
      if (delta.content || delta.reasoning_content || delta.reasoning || delta.tool_calls) {
        last = performance.now();
        first ??= last;
        view.push(delta);
      }
      reason = choice.finish_reason ?? reason;
    }
    view.finish(summary(reason, usage, start, first, last));
  } catch (error) {
    view.finish(error.name === "AbortError" ? "stopped" : "broken off");
    if (error.name !== "AbortError") add(element("div", "error", error.message));
  } finally {
    running = null;
    $("send").hidden = false;
    $("stop").hidden = true;
    $("message").focus();
  }
}

/** What stands below an answer: its length, and how fast it came. */
function summary(reason, usage, start, first, last) {
  const parts = [];
  if (reason && reason !== "stop" && reason !== "tool_calls") parts.push(reason === "length" ? "cut at its length" : reason);
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (first !== null) parts.push(`first after ${((first - start) / 1000).toFixed(2)} s`);
  if (usage && last > first && usage.completion_tokens > 1) {
    parts.push(`${((usage.completion_tokens - 1) / ((last - first) / 1000)).toFixed(1)} tokens/s`);
  }
  return parts.join(" \u00b7 ");
}

function send() {
  const text = $("message").value.trim();
  if (!text || running) return;
  messages.push({ role: "user", content: text });
  addText("user", text);
  $("message").value = "";
  answer();
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running) running.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  log.replaceChildren($("empty"));
  $("empty").hidden = false;
});
$("example-tools").addEventListener("click", () => {
  $("tools").value = JSON.stringify(EXAMPLE_TOOLS, null, 2);
});
