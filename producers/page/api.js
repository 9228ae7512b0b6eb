// The gateway over fetch: the key in a header, problems as errors, event streams that come back by themselves.

const SLOT = "opentinker-key";
const WAITS_MS = [500, 1000, 2000, 5000, 10000]; // between tries of a stream, the longest from then on
const QUIET_MS = 25000; // heartbeats come every ten seconds; longer silence is a lost connection

export class Problem extends Error {
  constructor(status, document) {
    super(document.detail || `HTTP ${status}`);
    this.status = status;
    this.document = document;
  }
}

/** Takes a key from `#key=…` out of the address, so that it stays in no history. */
export function takeKeyFromAddress() {
  const parts = new URLSearchParams(location.hash.slice(1));
  const key = parts.get("key");
  if (key === null) return;
  sessionStorage.setItem(SLOT, key);
  parts.delete("key");
  const rest = parts.toString();
  history.replaceState(null, "", location.pathname + (rest ? `#${rest}` : ""));
}

export const hasKey = () => Boolean(sessionStorage.getItem(SLOT));
export const setKey = (key) => sessionStorage.setItem(SLOT, key);
export const forgetKey = () => sessionStorage.removeItem(SLOT);

const headers = (more = {}) => ({ Authorization: `Bearer ${sessionStorage.getItem(SLOT) || ""}`, ...more });

/** One call; the answer's JSON. Throws Problem for a refusal and TypeError for no answer. */
export async function call(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers(options.headers), cache: "no-store", redirect: "error" });
  const document = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Problem(answer.status, document);
  return document;
}

/**
 * Follows an event stream until `signal` aborts or the stream says `end`.
 * on.event(name, data), on.alive() for anything heard, on.open(again) when connected, on.lost(error) when not.
 */
export async function follow(path, signal, on) {
  let lastId = "";
  let failures = 0;
  let opened = 0;
  while (!signal.aborted) {
    const attempt = new AbortController();
    const stop = () => attempt.abort();
    signal.addEventListener("abort", stop);
    let silence = setTimeout(stop, QUIET_MS);
    try {
      const answer = await fetch(path, { headers: headers(lastId ? { "Last-Event-ID": lastId } : {}), signal: attempt.signal, cache: "no-store", redirect: "error" });
      if (!answer.ok) throw new Problem(answer.status, await answer.json().catch(() => ({})));
      failures = 0;
      on.open?.(opened++ > 0);
      for await (const event of events(answer.body, () => {
        on.alive?.();
        clearTimeout(silence);
        silence = setTimeout(stop, QUIET_MS);
      })) {
        if (event.id) lastId = event.id;
        if (event.name === "end") return;
        if (event.data !== "") on.event(event.name, JSON.parse(event.data));
      }
      throw new TypeError("the stream ended");
    } catch (error) {
      if (signal.aborted) return;
      on.lost?.(error);
      if (error instanceof Problem && [401, 403, 404].includes(error.status)) return;
      await new Promise((done) => setTimeout(done, WAITS_MS[Math.min(failures++, WAITS_MS.length - 1)]));
    } finally {
      clearTimeout(silence);
      signal.removeEventListener("abort", stop);
    }
  }
}

async function* events(body, heard) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    heard();
    rest += value;
    const blocks = rest.split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = { name: "message", id: "", data: "" };
      for (const line of block.split("\n")) {
        if (line.startsWith("event: ")) event.name = line.slice(7);
        else if (line.startsWith("id: ")) event.id = line.slice(4);
        else if (line.startsWith("data: ")) event.data += line.slice(6);
      }
      yield event;
    }
  }
}
