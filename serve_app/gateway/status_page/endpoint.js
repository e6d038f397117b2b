// Talks to the gateway that served this page. The key is in sessionStorage and in one header, nowhere else.

const KEY = "modelyard-key";
// The page is PREFIX/status.
const ROOT = new URL(".", document.baseURI);
const PATIENCE_MS = 10_000;

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** What the endpoint said of a request that it did not answer; the message is for people. */
export class Refused extends Error {}

/** The response to a request; throws `Refused`, and what `fetch` throws where nobody answers. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const response = await fetch(new URL(path, ROOT), { ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  const told = await response.json().catch(() => null); // a proxy's own errors are no JSON
  throw new Refused(told?.error?.message ?? `The endpoint answered ${response.status}.`);
}

/** All that the gateway tells whoever has this key; without `models`: it wants another one. */
export async function readiness() {
  const response = await ask("ready", { signal: AbortSignal.timeout(PATIENCE_MS) });
  return response.json();
}

/** An answer's server-sent events, in order: `{data}` or `{comment}`. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const line of parts.flatMap((part) => part.split("\n"))) {
      if (line.startsWith("data: ")) yield { data: line.slice(6) };
      else if (line.startsWith(": ")) yield { comment: line.slice(2) };
    }
  }
}
