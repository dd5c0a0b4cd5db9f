// Follows a run: each event of /events is its whole state (snapshot.py), drawn again.
"use strict";

const FACTS = [ // name in state.latest, what it is called, how it is written
  ["loss", "training loss", (x) => x.toFixed(4)],
  ["validation", "validation loss", (x) => x.toFixed(4)],
  ["perplexity", "perplexity", number],
  ["learning_rate", "learning rate", small],
  ["tokens_per_second", "tokens per second", number],
  ["tflops_per_device", "TFLOP/s per device", number],
  ["memory_bytes", "memory", bytes],
  ["peak_memory_bytes", "peak memory", bytes],
  ["utilization", "device busy", percent],
  ["grad_norm", "gradient norm", number],
  ["consumed_samples", "samples", number],
  ["epoch", "epoch", (x) => x.toFixed(2)],
];
const CHARTS = [ // title, how a value is written, curves: name in state.curves, key, colour, dots; from 0 on?
  ["Loss", (x) => x.toFixed(3), [
    ["loss", "training", "one", false], ["validation", "validation", "two", true],
    ["evaluated", "training (evaluated)", "three", true]], false],
  ["Learning rate", small, [["learning_rate", "", "one", false]], true],
  ["Tokens per second", number, [["tokens_per_second", "", "one", false]], true],
  ["Gradient norm", number, [["grad_norm", "", "one", false]], true],
  ["Peak memory", bytes, [["peak_memory_bytes", "", "one", false]], true],
  ["Device busy", percent, [["utilization", "", "one", false]], true],
];
const ENDS = {
  iterations: "finished", "exit-interval": "ended at an exit interval", signal: "ended by a signal",
  KeyboardInterrupt: "interrupted",
};
const LEFT = 56, RIGHT = 12, TOP = 10, BOTTOM = 22; // around a plot, in pixels

let state = null;
let connected = false;
let received = 0; // when, by this browser's clock
const figures = CHARTS.map(makeFigure);

function number(x) {
  return x.toLocaleString("en", { maximumSignificantDigits: Math.abs(x) < 1000 ? 4 : 6 });
}

function small(x) {
  return x === 0 ? "0" : x.toExponential(2);
}

function bytes(x) {
  return x < 2 ** 30 ? `${(x / 2 ** 20).toFixed(0)} MiB` : `${(x / 2 ** 30).toFixed(2)} GiB`;
}

function percent(x) {
  return `${(100 * x).toFixed(0)}%`;
}

function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

function byId(id) {
  return document.getElementById(id);
}

function element(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function shape(name, values, className) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(values)) made.setAttribute(key, value);
  if (className) made.setAttribute("class", className);
  return made;
}

// --- the head of the page

function showHead() {
  const total = state.train_iters;
  byId("name").textContent = document.title = state.name;
  byId("progress").value = total ? state.iteration / total : 0;
  const of = total ? ` of ${number(total)}` : "";
  const facts = [`iteration ${number(state.iteration)}${of}`];
  if (state.seconds_left !== null && !stale()) facts.push(`about ${duration(state.seconds_left)} left`);
  if (state.device) facts.push(`${state.device} × ${state.world_size}`);
  byId("place").textContent = facts.join(" · ");
}

function stale() { // seconds since the run wrote something, if that is long for it
  if (state.updated === null) return 0;
  const age = Date.now() / 1000 - state.updated;
  return age > 120 ? age : 0;
}

function showState() {
  const box = byId("state");
  let text = "waiting for the run", kind = "";
  if (state && state.ended_by) {
    text = ENDS[state.ended_by] || `failed: ${state.ended_by}`;
    kind = ENDS[state.ended_by] ? "" : "failed";
  } else if (state && stale()) {
    text = `no update for ${duration(stale())}`;
  } else if (state && state.train_iters !== null) {
    text = "running";
    kind = "running";
  }
  if (!connected && state && !state.ended_by) {
    text = `no connection for ${duration((Date.now() - received) / 1000)}; retrying`;
    kind = "failed";
  }
  if (box.textContent !== text) box.textContent = text;
  box.className = kind;
}

function showFacts() {
  const latest = { ...state.latest };
  if (latest.validation !== null) latest.perplexity = Math.exp(Math.min(20, latest.validation));
  const rows = FACTS.filter(([name]) => latest[name] !== null && latest[name] !== undefined);
  byId("facts").replaceChildren(...rows.map(([name, title, write]) => {
    const box = element("div");
    box.append(element("dt", "", title), element("dd", "", write(latest[name])));
    return box;
  }));
}

function showSamples() {
  byId("texts").hidden = state.samples.length === 0;
  byId("samples").replaceChildren(...state.samples.map((sample) => {
    const box = element("li"), text = element("pre");
    text.append(element("b", "", sample.prompt), sample.text);
    box.append(element("p", "", `iteration ${number(sample.iteration)}`), text);
    return box;
  }));
}

function showMachines() {
  const machines = state.machines || [];
  byId("cluster").hidden = machines.length === 0;
  const slow = machines.flatMap((each) => each.slow.map((rank) => {
    const time = each.milliseconds[each.ranks.indexOf(rank)];
    return `rank ${rank} on ${each.host} (${time.toFixed(0)} ms)`;
  }));
  byId("slow").hidden = slow.length === 0;
  byId("slow").textContent = `slow: ${slow.slice(0, 8).join(", ")}${slow.length > 8 ? `, and ${slow.length - 8} more` : ""}`;
  byId("machines").replaceChildren(...machines.map(({ host, ranks, milliseconds, slow }) => {
    const box = element("li");
    box.append(element("p", "", `${host}: ${ranks.length === 1 ? "rank" : "ranks"} ${ranks.join(", ")}`));
    if (milliseconds.length) {
      const [low, high] = extremes([milliseconds]).map((time) => time.toFixed(1));
      box.append(element("b", "", low === high ? `${low} ms` : `${low} to ${high} ms`));
      box.append(element("p", "", milliseconds.map((time, place) => `${ranks[place]}: ${time.toFixed(0)}`).join(" · ")));
    }
    if (slow.length) box.append(element("p", "slow", `slow: rank ${slow.join(", ")}`));
    return box;
  }));
}

// --- charts

function makeFigure([title, write, curves, fromZero], place) {
  const box = element("figure", place === 0 ? "wide" : "");
  box.hidden = true; // until there is something to draw
  const caption = element("figcaption", "", title);
  const readout = element("output");
  const plot = shape("svg", { role: "img", "aria-label": title });
  for (const [, key, colour] of curves) if (key) caption.append(element("span", `key ${colour}`, key));
  caption.append(readout);
  box.append(caption, plot);
  byId("charts").append(box);
  const figure = { title, write, curves, fromZero, box, readout, plot, cursor: null };
  plot.addEventListener("pointermove", (event) => {
    figure.cursor = event.clientX - plot.getBoundingClientRect().left;
    drawFigure(figure);
  });
  plot.addEventListener("pointerleave", () => {
    figure.cursor = null;
    drawFigure(figure);
  });
  new ResizeObserver(() => drawFigure(figure)).observe(box);
  return figure;
}

function extremes(lists) { // of numbers that may be many: Math.min(...list) has a limit
  let low = Infinity, high = -Infinity;
  for (const list of lists) for (const x of list) {
    if (x < low) low = x;
    if (x > high) high = x;
  }
  return [low, high];
}

function ticks(low, high, about, unit = 1) { // round numbers of units between two
  const rough = (high - low) / about, power = unit * 10 ** Math.floor(Math.log10(rough / unit));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const found = [];
  for (let n = Math.ceil(low / step); n * step <= high + step * 1e-9; n++) found.push(n * step);
  return found;
}

function drawFigure(figure) {
  if (!state) return;
  const from = state.iteration * (1 - Number(byId("range").value));
  const shown = figure.curves.map((curve) => [curve, since(from, state.curves[curve[0]])])
    .filter(([, points]) => points.x.length);
  figure.box.hidden = shown.length === 0;
  if (!shown.length) return;
  const width = figure.plot.clientWidth, height = figure.plot.clientHeight;
  if (!width) return;
  const [firstX, lastX] = extremes(shown.map(([, c]) => c.x));
  let [low, high] = extremes(shown.flatMap(([, c]) => [c.y, c.low || [], c.high || []]));
  if (figure.fromZero) low = Math.min(0, low);
  if (high === low) [low, high] = [low - (Math.abs(low) || 1) * 0.05, high + (Math.abs(high) || 1) * 0.05];
  else high += (high - low) * 0.03;
  const span = Math.max(1, lastX - firstX);
  const x = (value) => LEFT + ((value - firstX) / span) * (width - LEFT - RIGHT);
  const y = (value) => height - BOTTOM - ((value - low) / (high - low)) * (height - TOP - BOTTOM);
  const parts = axes(figure, { x, y, low, high, firstX, lastX: firstX + span, width, height });
  for (const [[, , colour, dots], curve] of shown) parts.push(...drawCurve(curve, colour, dots, x, y));
  if (figure.cursor !== null) parts.push(readAt(figure, shown, x, height));
  else figure.readout.textContent = readout(figure, shown, lastX);
  figure.plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
  figure.plot.setAttribute("aria-label", `${figure.title}: ${figure.readout.textContent}`);
  figure.plot.replaceChildren(...parts);
}

function since(iteration, points) { // a curve from there on; nothing of one that the server does not know
  if (!points) return { x: [], y: [] };
  const place = points.x.findIndex((x) => x >= iteration);
  const cut = (list) => list && (place < 0 ? [] : list.slice(place));
  return { x: cut(points.x), y: cut(points.y), low: cut(points.low), high: cut(points.high) };
}

function axes(figure, { x, y, low, high, firstX, lastX, width, height }) {
  const parts = [];
  const unit = figure.write !== bytes ? 1 : high < 2 ** 30 ? 2 ** 20 : 2 ** 30;
  for (const value of ticks(low, high, height / 60, unit)) {
    parts.push(shape("line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }, "grid"));
    const label = shape("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" });
    label.textContent = figure.write(value);
    parts.push(label);
  }
  for (const value of ticks(firstX, lastX, width / 110)) {
    if (value !== Math.round(value)) continue;
    const label = shape("text", { x: x(value), y: height - 5, "text-anchor": "middle" });
    label.textContent = value.toLocaleString("en");
    parts.push(label);
  }
  return parts;
}

function drawCurve(curve, colour, dots, x, y) {
  const points = (values) => curve.x.map((at, i) => `${x(at).toFixed(1)},${y(values[i]).toFixed(1)}`);
  const parts = [];
  if (curve.low) {
    const outline = [...points(curve.high), ...points(curve.low).reverse()];
    parts.push(shape("polygon", { points: outline.join(" ") }, `band ${colour}`));
  }
  parts.push(shape("polyline", { points: points(curve.y).join(" ") }, `curve ${colour}`));
  if ((dots && curve.x.length < 60) || curve.x.length === 1) {
    for (const [i, at] of curve.x.entries()) {
      parts.push(shape("circle", { cx: x(at), cy: y(curve.y[i]), r: 3 }, colour));
    }
  }
  return parts;
}

function nearest(list, value) { // its place in a list that ascends
  let low = 0, high = list.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (list[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low > 0 && value - list[low - 1] < list[low] - value ? low - 1 : low;
}

function readAt(figure, shown, x, height) {
  const main = shown[0][1];
  let place = 0; // the point whose place on the screen is nearest
  for (const [i, at] of main.x.entries()) {
    if (Math.abs(x(at) - figure.cursor) < Math.abs(x(main.x[place]) - figure.cursor)) place = i;
  }
  const at = main.x[place];
  figure.readout.textContent = readout(figure, shown, at);
  return shape("line", { x1: x(at), x2: x(at), y1: TOP, y2: height - BOTTOM }, "cursor");
}

function readout(figure, shown, at) {
  const values = shown.map(([[, key], curve]) => {
    const value = figure.write(curve.y[nearest(curve.x, at)]);
    return key ? `${key} ${value}` : value;
  });
  return `${number(at)}: ${values.join(", ")}`;
}

// --- the connection

function show(text) {
  state = JSON.parse(text);
  received = Date.now();
  showHead();
  showState();
  showFacts();
  showMachines();
  showSamples();
  figures.forEach(drawFigure);
}

function connect() {
  const source = new EventSource("events");
  source.onopen = () => { connected = true; };
  source.onmessage = (event) => { connected = true; show(event.data); };
  source.onerror = () => {
    if (connected) received = Date.now();
    connected = false;
    showState();
    if (source.readyState === EventSource.CLOSED) setTimeout(connect, 3000);
  };
}

byId("range").addEventListener("change", () => figures.forEach(drawFigure));
connect();
setInterval(() => { if (state) { showHead(); showState(); } }, 1000);
