"use strict";
// Model text enters the page only through textContent, never as markup.
const $ = (id) => document.getElementById(id);
let running = null;
let moved = false; // until the slider is moved, the server's own threshold or risk holds

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function stretch(text, kind, validity) {
  const span = document.createElement("span");
  span.className = kind;
  span.textContent = text;
  if (validity !== null && validity !== undefined) span.title = `validity ${validity.toFixed(3)}`;
  return span;
}

// Shows the events of one answer, like the terminal (parse_infer/cli/rich_view.py).
class Answer {
  constructor(side) {
    const part = (name) => $(`${side}-${name}`);
    this.place = part("answer");
    this.bar = part("bar");
    this.share = part("share");
    this.speed = part("speed");
    this.pending = [];
    [this.place, this.bar, this.share, this.speed].forEach((element) => element.replaceChildren());
  }

  see(event) {
    if (event.event === "drafted") this.propose([{ text: event.text }]);
    else if (event.event === "verified" && event.segments.length) this.propose(event.segments);
    else if (event.event === "accepted") this.decide(event.text.length);
    else if (event.event === "resumed") this.extend(event.text);
    this.drawBar();
  }

  // The answer's pieces in order, as long as their texts. Sizes are attributes, as the page's policy forbids styles.
  drawBar() {
    const pieces = [...this.place.children].filter(({ className }) => className !== "rejected");
    let length = 0;
    const written = { accepted: 0, target: 0 };
    const drawn = pieces.map(({ className, textContent: { length: size } }) => {
      const rectangle = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      const attributes = { class: className, x: length, width: size, height: 1 };
      Object.entries(attributes).forEach(([name, value]) => rectangle.setAttribute(name, value));
      length += size;
      if (className in written) written[className] += size;
      return rectangle;
    });
    this.bar.setAttribute("viewBox", `0 0 ${length || 1} 1`);
    this.bar.replaceChildren(...drawn);
    const decided = written.accepted + written.target;
    if (decided) {
      const draft = Math.round((100 * written.accepted) / decided);
      this.share.textContent = `${draft} % by the draft model, ${100 - draft} % by the target`;
    }
  }

  propose(segments) {
    this.pending.forEach(({ span }) => span.remove());
    this.pending = segments.map(({ text, validity }) => ({ text, validity, span: stretch(text, "pending", validity) }));
    this.place.append(...this.pending.map(({ span }) => span));
  }

  decide(kept) {
    for (const { text, validity, span } of this.pending) {
      const mine = Math.min(kept, text.length);
      kept -= mine;
      const parts = [];
      if (mine) parts.push(stretch(text.slice(0, mine), "accepted", mine === text.length ? validity : null));
      if (mine < text.length) parts.push(stretch(text.slice(mine), "rejected", validity));
      span.replaceWith(...parts);
    }
    this.pending = [];
  }

  extend(text) {
    const last = this.place.lastElementChild;
    if (last && last.className === "target") last.textContent += text;
    else if (text) this.place.append(stretch(text, "target"));
  }
}

// Yields the data of server-sent events.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function answer(parse, shown) {
  shown.speed.textContent = "…";
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(),
    signal: running.signal,
    body: JSON.stringify({
      messages: [{ role: "user", content: $("prompt").value }],
      max_tokens: Number($("tokens").value),
      stream: true,
      stream_options: { include_usage: true },
      parse: { ...parse, events: true },
    }),
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  let seconds = null;
  let kept = null;
  for await (const chunk of events(response.body)) {
    if (chunk.error) throw new Error(chunk.error.message);
    for (const { parse: statistics } of chunk.choices) {
      if (statistics && statistics.event) shown.see(statistics);
      else if (statistics) {
        seconds = statistics.timings.total_s;
        kept = statistics.draft_tokens ? `, ${Math.round(100 * statistics.kept)} % of the draft kept` : "";
      }
    }
    if (chunk.usage && seconds !== null) {
      const n = chunk.usage.completion_tokens;
      shown.speed.textContent = `${n} tokens in ${seconds.toFixed(2)} s: ${(n / seconds).toFixed(0)} tokens/s${kept}`;
    }
  }
  return seconds;
}

async function ask(event) {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  $("ask").disabled = true;
  $("end").disabled = false;
  $("error").textContent = "";
  const [parse, target] = [new Answer("parse"), new Answer("target")];
  try {
    const chosen = moved ? { threshold: Number($("threshold").value) } : {};
    const fast = await answer(chosen, parse);
    const slow = await answer({ mode: "target" }, target);
    if (fast && slow) parse.speed.textContent += `, ${(slow / fast).toFixed(1)} times as fast as the target alone`;
  } catch (error) {
    if (error.name !== "AbortError") $("error").textContent = error.message;
  } finally {
    running = null;
    $("ask").disabled = false;
    $("end").disabled = true;
  }
}

function showThreshold() {
  const value = Number($("threshold").value);
  $("shown").textContent = value > 1 ? "above 1: nothing" : value.toFixed(2);
}

async function load() {
  const response = await fetch("v1/models", { headers: headers() });
  if (!response.ok) {
    $("error").textContent = (await response.json()).error.message;
    return;
  }
  const [card] = (await response.json()).data;
  $("error").textContent = "";
  $("model").textContent = card.id;
  $("threshold").value = card.parse.threshold > 1 ? 1.01 : card.parse.threshold; // 1 accepts a validity of 1
  moved = false;
  showThreshold();
  if (card.parse.risk !== null) $("shown").textContent = `of risk ${card.parse.risk}`;
}

$("form").addEventListener("submit", ask);
$("end").addEventListener("click", () => running && running.abort());
$("threshold").addEventListener("input", () => {
  moved = true;
  showThreshold();
});
$("key").addEventListener("change", load);
load();
