// One prompt to one model, its answer as it comes.

import { ask, events } from "./endpoint.js";
import { seconds, setText } from "./tables.js";

const element = (id) => document.getElementById(id);

// How each route is asked, and where the text of its events is.
const ROUTES = {
  chat: {
    path: "v1/chat/completions",
    asked: (prompt) => ({ messages: [{ role: "user", content: prompt }] }),
    text: ({ delta }) => delta?.content || delta?.reasoning || "",
  },
  completion: {
    path: "v1/completions",
    asked: (prompt) => ({ prompt }),
    text: (choice) => choice.text || "",
  },
};

const answer = element("answer");
let running = null; // what stops the request under way

/** `ids`: what may be asked for → its tasks; empty where they are not known yet. */
export function offer(ids) {
  const wanted = Object.keys(ids).filter((id) => !ids[id].length || ids[id].includes("generate"));
  const select = element("model");
  const offered = [...select.options].map((option) => option.value);
  if (wanted.join("\n") === offered.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(...wanted.map((id) => new Option(id, id)));
  if (wanted.includes(chosen)) select.value = chosen;
}

export function stop() {
  running?.abort();
}

async function send() {
  const route = ROUTES[element("route").value];
  const body = {
    model: element("model").value,
    max_tokens: Number(element("max-tokens").value),
    stream: true,
    stream_options: { include_usage: true },
    ...route.asked(element("prompt").value),
  };
  running = new AbortController();
  const { signal } = running;
  begin();
  const sent = performance.now();
  let first = null;
  let last = null;
  try {
    const response = await ask(route.path, {
      method: "POST",
      // A model that sleeps says how far it is.
      headers: { "content-type": "application/json", "x-modelyard-keep-alive": "1" },
      body: JSON.stringify(body),
      signal,
    });
    // Serve may add it once more, and browsers join what comes twice.
    setText(element("request-id"), response.headers.get("x-request-id")?.split(",")[0] ?? "–");
    for await (const { data, comment } of events(response)) {
      if (comment) setText(element("progress"), comment);
      if (!data || data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      const text = (event.choices ?? []).map(route.text).join("");
      if (text) {
        last = performance.now();
        if (first === null) {
          first = last;
          setText(element("progress"), "Answering…");
          setText(element("first-token"), seconds((first - sent) / 1000));
        }
        append(text);
      }
      if (event.usage) count(event.usage, (last - first) / 1000);
    }
    setText(element("progress"), "Done.");
  } catch (error) {
    if (signal.aborted) {
      setText(element("progress"), "Stopped.");
    } else {
      setText(element("progress"), "");
      setText(element("fault"), error instanceof TypeError ? "The connection broke off." : error.message);
    }
  } finally {
    running = null;
    end();
  }
}

function begin() {
  answer.replaceChildren(new Text());
  answer.setAttribute("aria-busy", "true"); // read out once it is whole, not token by token
  for (const figure of document.querySelectorAll("#figures dd")) setText(figure, "–");
  setText(element("fault"), "");
  setText(element("progress"), "Waiting for the first token…");
  element("send").disabled = true;
  element("stop").disabled = false;
}

function end() {
  answer.removeAttribute("aria-busy");
  const stopHadFocus = document.activeElement === element("stop");
  element("send").disabled = false;
  element("stop").disabled = true;
  if (stopHadFocus) element("send").focus();
}

function append(text) {
  const atTheEnd = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 40;
  answer.firstChild.appendData(text);
  if (atTheEnd) answer.scrollTop = answer.scrollHeight;
}

/** By the engine's count: several tokens may share one event. */
function count(usage, sinceFirst) {
  setText(element("prompt-tokens"), String(usage.prompt_tokens));
  setText(element("answer-tokens"), String(usage.completion_tokens));
  if (usage.completion_tokens > 1 && sinceFirst > 0) {
    setText(element("token-rate"), ((usage.completion_tokens - 1) / sinceFirst).toFixed(1));
  }
}

element("playground").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) send();
});
element("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    event.target.form.requestSubmit();
  }
});
element("stop").addEventListener("click", stop);
