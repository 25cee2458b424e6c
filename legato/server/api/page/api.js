// Requests to this server: the API key that the tab remembers, errors as messages, and streams as parsed events.

const KEY = "legato-api-key";

let asking = null;

/** Asks for the key once, however many requests wait for it. */
function askForKey(note) {
  if (asking) return asking;
  const dialog = document.getElementById("key-dialog");
  const field = document.getElementById("key");
  document.getElementById("key-note").textContent = note;
  dialog.showModal();
  field.select();
  asking = new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      asking = null;
      if (field.value) sessionStorage.setItem(KEY, field.value);
      resolve(Boolean(field.value));
    }, { once: true });
  });
  return asking;
}

/** The text of an error reply, in whichever form it came. */
async function problem(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? body.detail ?? JSON.stringify(body);
  } catch {
    return `the server answered ${response.status}`;
  }
}

/** fetch with the key; asks for one where the server wants it. Throws an Error with the server's own message. */
export async function request(path, options = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...(options.headers ?? {}), ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetch(path, { ...options, headers });
    if (response.status === 401) {
      const note = key ? "That key was not accepted. It is kept in this tab only." : "It is kept in this tab only.";
      if (sessionStorage.getItem(KEY) === key) sessionStorage.removeItem(KEY);
      else continue;
      if (await askForKey(note)) continue;
      throw new Error("an API key is needed");
    }
    if (!response.ok) throw new Error(await problem(response));
    return response;
  }
}

/** The JSON values of a stream of server-sent events, until [DONE]. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n");
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

/** A new element with a class and text. */
export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}
