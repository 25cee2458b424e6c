// The dashboard: reads /metrics.json once a second while the page is visible, and draws what it says.

import { element, request } from "/page/api.js";

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const PHASES = { reasoning: "reasoning", content: "content", tool_call: "tool calls" };

const number = (value, digits = 1) => (value === null || value === undefined ? "\u2013" : value.toFixed(digits));
const count = (value) => Math.round(value).toLocaleString("en");

/** A line with its area, from 0 (or `low`) to the largest value; gaps where there is none. */
function drawLine(svg, values, low = 0) {
  const width = 240, height = 48, known = values.filter((value) => value !== null);
  const top = Math.max(low + 1, ...known) * 1.08;
  const x = (index) => (values.length > 1 ? (index / (values.length - 1)) * width : width);
  const y = (value) => height - 1 - ((value - low) / (top - low)) * (height - 3);
  const line = [], area = [];
  let start = null;
  values.forEach((value, index) => {
    if (value !== null) {
      line.push(`${start === null ? "M" : "L"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`);
      area.push(`${start === null ? `M${x(index).toFixed(1)} ${height}` : ""}L${x(index).toFixed(1)} ${y(value).toFixed(1)}`);
      start ??= index;
    }
    if (start !== null && (value === null || index === values.length - 1)) {
      const end = value === null ? index - 1 : index;
      area.push(`L${x(end).toFixed(1)} ${height}Z`);
      start = null;
    }
  });
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const paths = [["area", area], ["line", line]].map(([name, steps]) => {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", name);
    path.setAttribute("d", steps.join(""));
    return path;
  });
  svg.replaceChildren(...paths);
}

/** The mean of each value and the four before it, without those that are missing: a slow engine is quiet for seconds. */
function smooth(values) {
  return values.map((_, index) => {
    const known = values.slice(Math.max(0, index - 4), index + 1).filter((value) => value !== null);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  });
}

/** Rows of a label, a bar and a value; `share` is the bar's length, 0 to 1. */
function drawBars(container, rows) {
  container.replaceChildren(...rows.flatMap(({ label, share, text }) => {
    const track = element("span", "track");
    const bar = track.appendChild(element("i"));
    bar.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
    return [element("span", "muted", label), track, element("b", "", text)];
  }));
}

function drawRequests(seen) {
  const rows = seen.recent_requests.slice(0, 12).map((one) => {
    const row = element("tr");
    const ago = seen.uptime_s - one.ended_at_s;
    const cells = [
      duration(Math.max(0, ago)),
      count(one.prompt_tokens), count(one.cached_tokens), count(one.tokens),
      one.ttft_s === null ? "\u2013" : `${(one.ttft_s * 1000).toFixed(0)} ms`,
      number(one.tokens_per_second), number(one.accept_length, 2), one.reason.replace("tool_calls", "tools"),
    ];
    row.append(...cells.map((text) => element("td", text === "error" ? "alarm" : "", text)));
    return row;
  });
  $("requests").replaceChildren(...rows);
}

function drawEngine(engine) {
  if (!engine) return;
  $("running").textContent = engine.running;
  $("waiting").textContent = engine.waiting;
  $("iteration").textContent = engine.iteration_s === null ? "\u2013" : number(engine.iteration_s * 1000, 1);
  const total = Math.max(1, engine.total_pages);
  const [used, prefix] = $("cache").children;
  used.style.width = `${(engine.used_pages / total) * 100}%`;
  prefix.style.width = `${(engine.cached_pages / total) * 100}%`;
  const text = `pages of 64 tokens: ${count(engine.used_pages)} in use, ${count(engine.cached_pages)} kept for later, ${count(total)} in all`;
  $("cache-text").textContent = text + (engine.preemptions ? `; ${count(engine.preemptions)} preemptions` : "");
  $("cache").setAttribute("aria-label", text);
}

function drawTotals(seen) {
  const { totals, engine } = seen;
  const parts = [
    `${count(totals.generation_tokens)} tokens generated`, `${count(totals.prompt_tokens)} of prompts`,
    `${count(totals.cached_tokens)} cached`, `up for ${duration(seen.uptime_s)}`,
  ];
  if (engine?.checked) parts.push(`self-check: ${count(engine.checked)} replayed, ${count(engine.diverged)} differed`);
  $("totals").textContent = parts.join(" \u00b7 ");
  $("totals").classList.toggle("alarm", Boolean(engine?.diverged));
  const ends = Object.entries(totals.endings).filter(([, value]) => value).map(([name, value]) => `${count(value)} ${name}`);
  const refused = Object.values(totals.refusals).reduce((sum, value) => sum + value, 0);
  if (refused) ends.push(`${count(refused)} refused`);
  $("requests-total").textContent = ends.length ? `ended: ${ends.join(", ")}` : "none ended yet";
}

function duration(seconds) {
  const hours = Math.floor(seconds / 3600), minutes = Math.floor((seconds % 3600) / 60);
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min` : `${Math.round(seconds)} s`;
}

function draw(seen) {
  const accept = seen.accept_length, positions = accept.by_position;
  $("model").textContent = seen.model;
  $("model").title = seen.model;
  document.title = `Legato \u2013 ${seen.model}`;
  $("about").textContent = seen.about ?? "";
  $("throughput").textContent = number(seen.tokens_per_second);
  $("accept").textContent = number(accept.recent ?? accept.overall, 2);
  $("prefill").textContent = `prefill ${number(seen.prompt_tokens_per_second)} tokens/s`;
  const pad = Array(Math.max(0, 120 - seen.history.length)).fill(null);
  drawLine($("throughput-line"), smooth([...pad.map(() => 0), ...seen.history.map((second) => second.tokens)]));
  drawLine($("accept-line"), smooth([...pad, ...seen.history.map((second) => second.accept_length)]), 1);
  drawBars($("positions"), positions.map((share, index) => (
    { label: `draft ${index + 1}`, share: share ?? 0, text: share === null ? "\u2013" : `${(share * 100).toFixed(0)} %` })));
  drawBars($("phases"), [["overall", accept.overall], ...Object.entries(accept.by_phase)].map(([name, value]) => (
    { label: PHASES[name] ?? name, share: value === null ? 0 : value / (seen.num_drafts + 1), text: number(value, 2) })));
  drawEngine(seen.engine);
  drawTotals(seen);
  drawRequests(seen);
}

function say(state, text) {
  $("status").className = state;
  $("status-text").textContent = text;
}

async function follow() {
  for (;;) {
    if (!document.hidden) {
      try {
        draw(await (await request("/metrics.json")).json());
        say("ok", "connected");
      } catch (error) {
        say("bad", error instanceof TypeError ? "no connection" : error.message);
      }
    }
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

for (const view of ["chat", "dashboard"]) {
  $(`view-${view}`).addEventListener("click", () => {
    document.body.dataset.view = view;
    for (const other of ["chat", "dashboard"]) $(`view-${other}`).setAttribute("aria-pressed", String(other === view));
  });
}
$("accept-line").classList.add("second");
follow();
