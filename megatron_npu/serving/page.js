// Sends the form to /v1/completions and shows the text as it comes.
"use strict";

const $ = (id) => document.getElementById(id);
let running = null; // what stops the request that is under way

async function nameModel() {
  const answer = await fetch("v1/models");
  const model = (await answer.json()).data[0];
  $("model").textContent = model.id;
  $("max_tokens").max = model.max_model_len - 1;
  $("max_tokens").value = Math.min(64, Math.ceil(model.max_model_len / 2));
}

function say(text, bad = false) {
  $("status").textContent = text;
  $("status").className = bad ? "bad" : "";
}

function busy(is) {
  $("generate").disabled = is;
  $("stop").disabled = !is;
  $("output").setAttribute("aria-busy", String(is));
}

function asked() {
  const number = (id) => Number($(id).value);
  const body = { max_tokens: number("max_tokens"), temperature: number("temperature"), top_p: number("top_p") };
  body.stream = true;
  body.stream_options = { include_usage: true };
  if ($("prompt").value) body.prompt = $("prompt").value;
  if ($("seed").value) body.seed = number("seed");
  return body;
}

function begin(prompt) {
  const before = document.createElement("span");
  before.className = "prompt";
  before.textContent = prompt;
  const text = document.createElement("span");
  $("output").replaceChildren(before, text);
  return text;
}

// Yields the JSON of each server-sent event.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function generate() {
  running = new AbortController();
  const body = asked();
  const text = begin(body.prompt || "");
  const answer = await fetch("v1/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal: running.signal,
  });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  let finish = "";
  let tokens = 0;
  for await (const event of events(answer)) {
    if (event.error) throw new Error(event.error.message);
    for (const choice of event.choices) {
      text.append(choice.text);
      finish = choice.finish_reason || finish;
    }
    if (event.usage) tokens = event.usage.completion_tokens;
  }
  say(`${tokens} tokens; ${finish === "stop" ? "end of text" : "token limit reached"}.`);
}

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  busy(true);
  say("Generating …");
  try {
    await generate();
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else say(`Error: ${error.message}`, true);
  } finally {
    busy(false);
  }
});
$("stop").addEventListener("click", () => running && running.abort());
nameModel().catch(() => say("Error: the server does not respond.", true));
