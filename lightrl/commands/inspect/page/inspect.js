// The page of `lightrl inspect`. It shows the content of a run's files only as text nodes and numbers.
"use strict";

const COLORS = ["#2f6db3", "#d9541e", "#3d8f5f", "#8b5bb0", "#b8860b", "#c2417a", "#3a9aa8", "#6b6b6b"];
const CATEGORIES = {
  phase: "#6a7fa0", generate: "#2f6db3", server: "#4f8fd0", reward: "#b8860b", score: "#8b5bb0", update: "#3d8f5f",
  sync: "#c2417a", collective: "#d9541e", data: "#3a9aa8", loader: "#3a9aa8", wait: "#9aa0a8", step: "#7d8590",
};
const AREAS = { rollout: "generate", reward: "reward", score: "score", update: "update", sync: "sync", data: "data", other: "step" };
const VIEWS = ["curves", "trajectories", "timeline", "problems", "settings"];
const COLUMNS = [
  ["iteration", 1], ["group", 1], ["sample", 1], ["reward", 1], ["advantage", 1], ["length", 1], ["staleness", 1],
  ["finish", 0], ["prompt_text", 0], ["excerpt", 0],
];
const HEADS = { prompt_text: "prompt", excerpt: "completion" };
const LIMIT = 100; // rows of the table per page
const NAMED_VALUES = 4; // with more runs, curves have a legend instead of values in a row
const REFRESH_MS = 3000;

const state = {
  runs: [], hidden: new Set(), run: 0, filter: "", smooth: true, log: false, large: null, query: "", sort: "iteration", order: "desc",
  offset: 0, page: null, id: null, color: "advantage", iteration: null, open: new Set(), setting: "", differences: true,
};
const main = document.getElementById("main");
const embedded = document.getElementById("answers");
const saved = embedded ? JSON.parse(embedded.textContent) : null;

// Creates an element; children are elements or texts, never markup.
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function number(value, digits = 3) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2) : String(Number(value.toPrecision(digits + 1)));
}

function count(value, name) {
  return `${number(value)} ${value === 1 ? name : name.endsWith("y") ? name.slice(0, -1) + "ies" : name + "s"}`;
}

async function ask(question, values = {}) {
  const address = question + (Object.keys(values).length ? "?" + new URLSearchParams(values) : "");
  if (saved) return question === "table" ? savedTable(values) : savedAnswer(address);
  const response = await fetch(address);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

function savedAnswer(address) {
  if (address in saved) return saved[address];
  throw new Error("This is not in the file: it contains only a sample of the trajectories and iterations.");
}

// In an exported file, the page sorts and searches the table itself; otherwise the server does.
function savedTable({ run, query = "", sort, order, offset = 0, limit = 100 }) {
  const notes = [];
  const columns = COLUMNS.map(([name]) => name).slice(0, -2);
  const terms = query.split(/\s+/).filter(Boolean).map((word) => {
    const match = /^([a-z_]+)(<=|>=|!=|=|<|>)(.*)$/i.exec(word);
    if (word === "dropped") return (row) => row.finish.startsWith("dropped");
    if (match && !columns.includes(match[1])) notes.push(`${word} is searched as text. There is no column ${match[1]}. Columns: ${columns.join(", ")}.`);
    if (!columns.includes(match?.[1])) return (row) => `${row.prompt}\n${row.prompt_text}\n${row.excerpt}`.toLowerCase().includes(word.toLowerCase());
    const [, name, sign, text] = match;
    if (!text) return () => true; // the user is still typing
    if (name === "finish") return (row) => row.finish.startsWith(text) === (sign === "=");
    const wanted = Number(text);
    const tests = { "<": (a) => a < wanted, ">": (a) => a > wanted, "<=": (a) => a <= wanted, ">=": (a) => a >= wanted,
      "=": (a) => a === wanted, "!=": (a) => a !== wanted };
    return (row) => row[name] !== null && tests[sign](row[name]);
  });
  const { rows: all, sampled_from } = saved[`table?run=${run}`];
  const rows = all.filter((row) => terms.every((term) => term(row)));
  const way = order === "asc" ? 1 : -1;
  rows.sort((a, b) => (a[sort] === b[sort] ? 0 : (a[sort] ?? -Infinity) < (b[sort] ?? -Infinity) ? -way : way));
  return { total: rows.length, rows: rows.slice(offset, Number(offset) + Number(limit)), notes, missing_files: 0, num_saved: all.length, sampled_from };
}

// ---------------------------------------------------------------- the current view: the part of the address after #

function go(view, values = {}) {
  location.hash = view + (Object.keys(values).length ? "?" + new URLSearchParams(values) : "");
}

function place() {
  const [view, values] = location.hash.slice(1).split("?");
  return [view || "curves", Object.fromEntries(new URLSearchParams(values || ""))];
}

let afterwards = null; // draws a view's canvases once they are in the page and have a size
let drawn = 0; // counts calls of show(), so that a late answer does not replace a newer view

async function show() {
  const [view, values] = place();
  const now = ++drawn;
  afterwards = null;
  if ("run" in values) state.run = Number(values.run);
  if ("id" in values) state.id = Number(values.id);
  if ("iteration" in values) state.iteration = Number(values.iteration);
  header(view);
  try {
    const content = await { curves, trajectories, trajectory, timeline, problems, settings }[view](now);
    if (now !== drawn || !content) return;
    main.replaceChildren(...[content].flat());
    afterwards?.();
  } catch (error) {
    if (now === drawn) main.replaceChildren(h("p", { class: "empty", role: "alert" }, error.message));
  }
}

function header(view) {
  document.getElementById("views").replaceChildren(...VIEWS.map((name) => h("a", {
    href: `#${name}?run=${state.run}`, "aria-current": (name === view || (view === "trajectory" && name === "trajectories")) && "page",
  }, name)));
  const many = ["curves", "settings"].includes(view); // these views show runs side by side; the others show one
  const runs = document.getElementById("runs");
  runs.dataset.shown = state.runs.length < 2 ? "single" : many ? "many" : "one";
  if (state.runs.length < 2) document.getElementById("views").after(runs);
  const isAnyHidden = state.hidden.size > 0;
  const all = h("button", { type: "button", class: "chip", onclick: () => { state.hidden = new Set(isAnyHidden ? [] : state.runs.map((run) => run.number)); show(); } }, isAnyHidden ? "show all" : "hide all");
  runs.replaceChildren(state.runs.length > 1 ? h("span", { class: "soft" }, many ? "runs:" : "run:") : "", many && state.runs.length > NAMED_VALUES ? all : "", ...state.runs.map((run) => {
    const { phase, iteration, max_steps: steps } = run.status;
    const where = phase ? `${phase} · ${number(iteration)}${steps > 0 ? " / " + number(steps) : ""}` : "";
    return h("button", {
      type: "button", class: "chip", title: `${run.folder}, click to ${many ? "hide or show" : "choose"}`, "aria-pressed": String(many ? !state.hidden.has(run.number) : run.number === state.run),
      onclick: () => {
        if (many) state.hidden.has(run.number) ? state.hidden.delete(run.number) : state.hidden.add(run.number);
        else { state.run = run.number; state.offset = 0; state.iteration = null; go(view === "trajectory" ? "trajectories" : view, { run: run.number }); }
        show();
      },
    }, dot(colorOf(run)), run.name, h("small", {}, where));
  }));
}

// A color for each run: from the palette, then hues that are far apart.
const colorOf = ({ number }) => COLORS[number] ?? `hsl(${(number * 137.5) % 360} 55% 52%)`;

function dot(color) {
  const element = h("i", { class: "dot" });
  element.style.background = color;
  return element;
}

const empty = (text) => h("p", { class: "empty" }, text);

// ---------------------------------------------------------------- curves

async function curves(now) {
  const shown = state.runs.filter((run) => !state.hidden.has(run.number));
  const all = await Promise.all(shown.map((run) => ask("curves", { run: run.number })));
  if (now !== drawn) return null;
  const names = [...new Set(all.flatMap(Object.keys))].sort(inOrder);
  if (!names.length) return empty("No metrics yet. They come from metrics.csv, which Lightning's CSVLogger writes.");
  const search = h("search", {}, h("input", {
    type: "search", id: "filter", placeholder: "metrics: reward, kl, time/ …", "aria-label": "Filter metrics", value: state.filter,
    oninput: (event) => { state.filter = event.target.value; fill(); },
  }));
  const box = (name, label) => h("label", {}, h("input", { type: "checkbox", id: name, checked: state[name], onchange: (event) => { state[name] = event.target.checked; fill(); } }), ` ${label}`);
  const panels = h("div", {});
  const fill = () => {
    const wanted = names.filter((name) => state.filter.toLowerCase().split(/\s+/).every((word) => name.toLowerCase().includes(word)));
    const charts = [];
    panels.replaceChildren(...[...grouped(wanted, packageOf)].flatMap(([package_, members]) => [h("h2", {}, package_), h("div", { class: "charts" }, members.map((name) => {
      const lines = shown.map((run, index) => ({ run, ...(all[index][name] || { x: [], y: [] }) })).filter((line) => line.x.length);
      const made = chart(name, lines, () => { state.large = state.large === name ? null : name; fill(); document.querySelector(".large")?.scrollIntoView({ block: "center" }); });
      charts.push(made);
      return made.element;
    }))]));
    charts.forEach((made) => made.draw());
  };
  afterwards = fill;
  return [h("div", { class: "bar" }, search, box("smooth", "running mean"), box("log", "log scale"), h("span", { class: "soft" }, count(names.length, "metric"))), panels];
}

const ORDER = ["rollout", "val", "policy", "staleness", "sync", "update", "critic", "time"];
const packageOf = (name) => (name.includes("/") ? name.split("/")[0] : "others");
const rank = (name) => { const place = ORDER.indexOf(packageOf(name)); return place < 0 ? 99 : place; };
const inOrder = (a, b) => rank(a) - rank(b) || first(a) - first(b) || (a < b ? -1 : 1);
const first = (name) => ["rollout/reward", "rollout/accuracy_fraction", "rollout/length_tokens"].indexOf(name) + 1 || 9;

// Maps each key to the values that have it, in order.
function grouped(values, keyOf) {
  const groups = new Map();
  for (const value of values) groups.set(keyOf(value), [...(groups.get(keyOf(value)) || []), value]);
  return groups;
}

function runningMean(values) {
  const half = Math.floor(values.length / 50);
  if (half < 1) return values;
  const sums = [0];
  for (const value of values) sums.push(sums.at(-1) + value);
  return values.map((_, index) => {
    const [from, to] = [Math.max(0, index - half), Math.min(values.length, index + half + 1)];
    return (sums[to] - sums[from]) / (to - from);
  });
}

// Returns a metric's description, shown when the user points at the curve's name.
function about(name) {
  const row = Object.keys(METRICS).find((key) => new RegExp(`^${key.replace(/<.*?>/g, "[^/]+")}$`).test(name));
  const [unit, meaning, healthy, otherwise] = METRICS[row] ?? [];
  const lines = [unit && `${name}, in ${unit}`, meaning, healthy && `Healthy: ${healthy}.`, otherwise && `Otherwise: ${otherwise}.`];
  return lines.filter(Boolean).join("\n").replace(/ \(\[[^\]]*\]\([^)]*\)\)/g, "") || name;
}

function chart(name, lines, resize) {
  const isLarge = state.large === name;
  const isLog = state.log && lines.some((line) => line.y.some((value) => value > 0));
  const [scale, unscale] = isLog ? [Math.log10, (value) => 10 ** value] : [(value) => value, (value) => value];
  const canvas = h("canvas", { role: "img", "aria-label": `${name} over iterations${isLog ? ", log scale" : ""}`, onclick: resize });
  const [output, legend] = [h("output", {}), h("div", { class: "legend" })];
  const button = h("button", { type: "button", "aria-label": `${isLarge ? "Shrink" : "Enlarge"} ${name}`, "aria-expanded": String(isLarge), "data-key": isLarge && "Escape", onclick: resize }, isLarge ? "×" : "⤢");
  const element = h("figure", { class: isLarge ? "chart large" : "chart" }, h("div", {}, h("b", { title: about(name) }, name.split("/").at(-1)), output, button), canvas, legend);
  const xs = lines.flatMap((line) => [line.x[0], line.x.at(-1)]);
  const [left, right] = [Math.min(...xs), Math.max(...xs)];
  const smoothed = lines.map((line) => (state.smooth ? runningMean(line.y) : line.y));
  let [low, high] = [Infinity, -Infinity];
  for (const values of [...lines.map((line) => line.y), ...smoothed]) for (const value of values.map(scale)) if (Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low === high) { const pad = Math.abs(low) * 0.1 || 1; low -= pad; high += pad; }
  const hasMany = lines.length > NAMED_VALUES;
  const hasLegend = lines.length > 1 && (isLarge || hasMany);
  const tell = (start, of) => {
    output.replaceChildren(start, ...(hasLegend ? [count(lines.length, "run")] : lines.flatMap((line, index) => {
      const value = h("span", { title: line.run.name }, number(of(line)));
      if (lines.length > 1) value.style.color = colorOf(line.run);
      return index ? ["  ·  ", value] : [value];
    })));
    const sorted = lines.map((line) => [of(line), line.run]).sort(([one], [other]) => other - one);
    legend.replaceChildren(...(hasLegend && (isLarge || start) ? sorted.map(([value, run]) => h("span", {}, dot(colorOf(run)), ` ${run.name} `, h("b", {}, number(value)))) : []));
  };
  const latest = () => tell("", (line) => line.y.at(-1));
  latest();
  const draw = (at = null) => {
    const [width, height] = fit(canvas);
    if (!width) return;
    const context = canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    const [soft, faint] = [style.getPropertyValue("--soft"), style.getPropertyValue("--line")];
    const area = { x: 52, y: 6, w: width - 58, h: height - 22 };
    const px = (x) => area.x + (right === left ? 0.5 : (x - left) / (right - left)) * area.w;
    const py = (y) => area.y + (1 - (scale(y) - low) / (high - low)) * area.h;
    context.clearRect(0, 0, width, height);
    context.font = "10.5px system-ui, sans-serif";
    context.fillStyle = soft;
    context.strokeStyle = faint;
    for (const part of isLarge ? [0, 0.25, 0.5, 0.75, 1] : [0, 0.5, 1]) {
      const y = unscale(low + part * (high - low));
      context.beginPath(); context.moveTo(area.x, py(y)); context.lineTo(area.x + area.w, py(y)); context.stroke();
      context.textAlign = "right"; context.fillText(number(y, 2), area.x - 5, py(y) + 3.5);
    }
    context.textAlign = "left"; context.fillText(number(left), area.x, height - 4);
    context.textAlign = "right"; context.fillText(number(right), area.x + area.w, height - 4);
    context.textAlign = "center";
    const step = Math.max(1, tick((right - left) / 10));
    for (let x = Math.ceil(left / step) * step; isLarge && x < right; x += step) if (px(x) > area.x + 30 && px(x) < area.x + area.w - 40) context.fillText(number(x), px(x), height - 4);
    lines.forEach((line, index) => {
      const color = colorOf(line.run);
      if (smoothed[index] !== line.y) path(context, line.x, line.y, px, py, color, 0.28, 1);
      path(context, line.x, smoothed[index], px, py, color, 1, 1.6);
    });
    if (at === null) return latest();
    const x = left + Math.min(1, Math.max(0, (at - area.x) / area.w)) * (right - left);
    context.strokeStyle = soft; context.globalAlpha = 0.6;
    context.beginPath(); context.moveTo(px(x), area.y); context.lineTo(px(x), area.y + area.h); context.stroke();
    context.globalAlpha = 1;
    tell(`${number(Math.round(x))}:  `, (line) => line.y[nearest(line.x, x)]);
  };
  canvas.addEventListener("mousemove", (event) => draw(event.offsetX));
  canvas.addEventListener("mouseleave", () => draw());
  return { element, draw };
}

function path(context, xs, ys, px, py, color, alpha, width) {
  context.globalAlpha = alpha; context.strokeStyle = context.fillStyle = color; context.lineWidth = width;
  context.beginPath();
  const points = xs.map((x, index) => [px(x), py(ys[index])]).filter(([, y]) => Number.isFinite(y)); // log(0) is not finite
  points.forEach(([x, y]) => context.lineTo(x, y));
  context.stroke();
  if (points.length < 30) points.forEach(([x, y]) => { context.beginPath(); context.arc(x, y, 2, 0, 7); context.fill(); });
  context.globalAlpha = 1; context.lineWidth = 1;
}

function nearest(xs, x) {
  let [low, high] = [0, xs.length - 1];
  while (low < high) { const middle = (low + high) >> 1; if (xs[middle] < x) low = middle + 1; else high = middle; }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}

function fit(canvas, height = canvas.clientHeight) {
  const [width, ratio] = [canvas.clientWidth, devicePixelRatio || 1];
  canvas.width = width * ratio; canvas.height = height * ratio;
  canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
  return [width, height];
}

// ---------------------------------------------------------------- the table of trajectories

// Reads rows of the table from an offset, with the current order and query.
async function readTable(offset = state.offset) {
  const { run, query, sort, order } = state;
  const page = await ask("table", { run, query, sort, order, offset, limit: LIMIT });
  state.page = { ...page, run, offset };
  return state.page;
}

async function trajectories(now) {
  const page = await readTable();
  if (now !== drawn) return null;
  const again = () => show().then(() => { const field = document.getElementById("query"); field.focus(); field.setSelectionRange(field.value.length, field.value.length); });
  let timer;
  const search = h("input", {
    type: "search", id: "query", value: state.query, placeholder: "words, reward<0.5, length>100, finish=length, dropped …", "aria-label": "Search trajectories",
    oninput: (event) => { state.query = event.target.value; state.offset = 0; clearTimeout(timer); timer = setTimeout(again, 180); },
  });
  const turn = (by) => () => { state.offset += by; show(); };
  const last = Math.min(state.offset + LIMIT, page.total);
  const missing = page.missing_files ? ` · reading ${count(page.missing_files, "more iteration")}` : "";
  const part = page.num_saved < page.sampled_from ? ` · this file contains ${number(page.num_saved)} of ${count(page.sampled_from, "trajectory")}` : "";
  const bar = h("div", { class: "bar" }, search,
    ...arrows("page", state.offset > 0 && turn(-LIMIT), last < page.total && turn(LIMIT)),
    h("span", { class: "soft", id: "count" }, `${page.total ? `${number(state.offset + 1)} to ${number(last)} of ${number(page.total)}` : "none"}${missing}${part}`),
    page.notes.map((note) => h("span", { class: "note", role: "status" }, note)));
  if (!page.total && !state.query && !page.missing_files) return [bar, empty("No trajectories. Add the TrajectoryLog callback to the run: it writes them every n iterations.")];
  const heads = COLUMNS.map(([name, isNumber]) => h("th", { class: isNumber ? "number" : HEADS[name], "aria-sort": state.sort === name ? (state.order === "desc" ? "descending" : "ascending") : null },
    h("button", { type: "button", onclick: () => { state.order = state.sort === name && state.order === "desc" ? "asc" : "desc"; state.sort = name; state.offset = 0; show(); } },
      HEADS[name] || name, state.sort === name ? (state.order === "desc" ? " ↓" : " ↑") : "")));
  const open = (row) => (row.group === null ? go("problems", { run: state.run }) : go("trajectory", { run: state.run, id: row.id }));
  const body = page.rows.map((row) => h("tr", {
    tabindex: 0, onclick: () => open(row),
    onkeydown: (event) => {
      if (event.key === "Enter") open(row);
      const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
      if (next && event.currentTarget[next]) { event.preventDefault(); event.currentTarget[next].focus(); }
    },
  }, COLUMNS.map(([name, isNumber]) => {
    const value = name === "prompt_text" ? row.prompt_text ?? row.prompt : row[name]; // earlier releases did not log the prompt's text
    if (!(name in HEADS)) return h("td", { class: isNumber && "number" }, isNumber ? number(value) : value);
    return h("td", { class: `text ${HEADS[name]}`, title: value?.slice(0, 600) }, aroundMatch(value ?? ""));
  })));
  return [bar, h("table", { class: "trajectories" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, body)), page.total ? null : empty("No trajectory matches.")].filter(Boolean);
}

// Cuts a text to start shortly before the first match of the query, if that is far from the beginning.
function aroundMatch(text) {
  const places = state.query.toLowerCase().split(/\s+/).filter(Boolean).map((word) => text.toLowerCase().indexOf(word)).filter((place) => place >= 0);
  const start = Math.min(...places) - 30;
  return Number.isFinite(start) && start > 20 ? `…${text.slice(start)}` : text;
}

// Two buttons with keyboard shortcuts; an action is false if there is no previous or next page or item.
const arrows = (name, before, after) => [["ArrowLeft", `Previous ${name}`, "←", before], ["ArrowRight", `Next ${name}`, "→", after]].map(([key, label, text, action]) =>
  h("button", { type: "button", "data-key": key, "aria-label": label, title: `${label} (key ${text})`, disabled: !action, onclick: action || null }, text));

// ---------------------------------------------------------------- one trajectory

const MODES = {
  advantage: ["advantage", (t, i) => t.advantage[i], true],
  logprob: ["logprob", (t, i) => t.logprob[i], false],
  difference: ["|Δlogp| engine vs trainer", (t, i) => Math.abs(t.logprob[i] - t.trainer_logprob[i]), false],
  version: ["weight version", (t, i) => t.version[i], false],
  mask: ["loss mask", (t, i) => t.mask[i], false],
  plain: ["plain", () => null, false],
};

const has = (tokens, mode) => (mode === "difference" ? !!tokens.trainer_logprob : mode === "advantage" ? !!tokens.advantage : true);

async function trajectory(now) {
  const one = await ask("trajectory", { run: state.run, id: state.id });
  if (now !== drawn) return null;
  const neighbors = await neighborsOf(one);
  if (now !== drawn) return null;
  const facts = { reward: one.reward, advantage: one.advantage, "generated tokens": one.tokens.mask.filter(Boolean).length, "all tokens": one.num_tokens, finish: one.finish + (one.truncated ? " (truncated)" : ""),
    iteration: one.iteration, "weight version": one.weight_version, group: one.group, sample: one.sample, "prompt id": one.prompt.id };
  const status = h("div", { class: "status", role: "status" }, "Point at a token.");
  const tokens = h("div", { class: "tokens", id: "tokens" });
  const modes = h("div", { class: "seg", role: "group", "aria-label": "Color by" });
  const paint = () => {
    if (!has(one.tokens, state.color)) state.color = "plain";
    modes.replaceChildren(...Object.entries(MODES).map(([mode, [label]]) => h("button", {
      type: "button", "aria-pressed": String(mode === state.color), disabled: !has(one.tokens, mode), "data-mode": mode,
      title: has(one.tokens, mode) ? null : "Not logged: set TrajectoryLog.score_per_iteration", onclick: () => { state.color = mode; paint(); },
    }, label)));
    tokens.replaceChildren(tokenSpans(one, status));
  };
  paint();
  afterwards = () => document.querySelector(".card[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  const group = one.group_rows.length > 1 ? [h("h2", {}, `group ${number(one.group)}: ${count(one.group_rows.length, "trajectory")} of this prompt`), h("div", { class: "group" }, one.group_rows.map((row) => h("button", {
    type: "button", class: "card", "aria-current": row.id === state.id && "true", onclick: () => go("trajectory", { run: state.run, id: row.id }),
  }, h("b", {}, number(row.reward)), h("span", { class: "soft" }, `  ${row.advantage > 0 ? "+" : ""}${number(row.advantage)}   ${count(row.length, "token")}`), h("p", {}, row.excerpt ?? ""))))] : [];
  return [
    neighbors,
    h("dl", { class: "facts" }, Object.entries(facts).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, number(value))))),
    ...[["why it was dropped", one.message], ["the agent's output", one.agent_output]].flatMap(([name, text]) => (text ? [h("h2", {}, name), h("pre", {}, text)] : [])),
    ...group, ...images(one), ...rows(one),
    h("h2", {}, "tokens"), h("div", { class: "bar" }, modes, h("span", { class: "soft" }, legend(one.tokens))), tokens, status,
    h("div", { class: "two" }, h("section", {}, h("h2", {}, "rewards by part"), pairs({ reward: one.reward, ...one.metrics })),
      h("section", {}, h("h2", {}, "prompt"), messages(one.prompt), pairs(one.prompt.fields))),
  ];
}

// A bar to step through the table, or through the trajectory's group if it is not in the table.
async function neighborsOf(one) {
  const isHere = (row) => row.id === state.id;
  if (state.page?.run !== state.run || !state.page.rows.some(isHere)) await readTable();
  const isInTable = state.page.rows.some(isHere);
  const { rows, offset, total } = isInTable ? state.page : { rows: one.group_rows, offset: 0, total: one.group_rows.length };
  const place = offset + rows.findIndex(isHere);
  const to = (by) => async () => {
    const isDropped = (row) => row.group === null; // there are no tokens to show
    let next = rows.findIndex(isHere) + by;
    while (rows[next] && isDropped(rows[next])) next += by;
    let row = rows[next];
    if (!row && isInTable) {
      state.offset = Math.max(0, offset + by * LIMIT);
      const more = (await readTable()).rows.filter((other) => !isDropped(other));
      row = more.at(by > 0 ? 0 : -1);
    }
    if (row) go("trajectory", { run: state.run, id: row.id });
  };
  return h("div", { class: "bar" },
    h("button", { type: "button", "data-key": "Escape", title: "Back to the table (key Esc)", onclick: () => go("trajectories", { run: state.run }) }, "↑ table"),
    ...arrows("trajectory", place > 0 && to(-1), place + 1 < total && to(1)),
    h("span", { class: "soft", id: "place" }, `${number(place + 1)} of ${number(total)} in the ${isInTable ? "table" : "group"}`));
}

function legend(tokens) {
  const num = new Set(tokens.version.filter((version) => version >= 0)).size;
  return `${count(num, "weight version")}; gray: not generated by the policy`;
}

// The conversations of a tree, each below the one that it branches from. Tokens shared with rows above are gray.
function rows(one) {
  if (one.rows.length < 2) return [];
  const owner = new Map(), depths = [];
  const text = (places) => places.map((place) => one.texts[one.tokens.id[place]] ?? ` ${one.tokens.id[place]}`).join("").replace(/\s+/g, " ");
  const items = one.rows.map((spans, row) => {
    const places = spans.flatMap(([start, end]) => Array.from({ length: end - start }, (_, index) => start + index));
    const shared = places.filter((place) => owner.has(place)), own = places.slice(shared.length);
    depths.push(shared.length ? depths[owner.get(shared.at(-1))] + 1 : 0);
    own.forEach((place) => owner.set(place, row));
    const trained = own.filter((place) => one.tokens.mask[place]).length;
    const item = h("li", { tabindex: "0", title: "Show its first token below" }, h("span", { class: "soft" }, `${count(shared.length, "shared token")}, ${number(own.length)} new, ${number(trained)} trained  `),
      h("span", { class: "given" }, shortened(text(shared.slice(-200)), 40, true)), shortened(text(own.slice(0, 400)), 160));
    item.style.marginLeft = `${depths[row] * 24}px`;
    const show = () => one.elements[own[0]].scrollIntoView({ block: "center" });
    item.addEventListener("click", show);
    item.addEventListener("keydown", (event) => { if (event.key === "Enter") show(); });
    return item;
  });
  return [h("h2", {}, `rows: ${count(one.rows.length, "conversation")} of this rollout`), h("ol", { class: "rows" }, items)];
}

const shortened = (text, num, keepsEnd) => (text.length <= num ? text : keepsEnd ? `…${text.slice(-num)}` : `${text.slice(0, num)}…`);

function tokenSpans(one, status) {
  const { tokens, texts, turns } = one;
  const [, value, isSigned] = MODES[state.color];
  const values = tokens.id.map((_, index) => (tokens.mask[index] || state.color === "mask" || state.color === "version" ? value(tokens, index) : null));
  const sizes = values.filter((number) => number !== null && Number.isFinite(number)).map(Math.abs);
  const largest = sizes.reduce((most, size) => Math.max(most, size), 0) || 1;
  const versions = [...new Set(tokens.version)].sort((a, b) => a - b);
  const starts = new Map(turns.map((turn, index) => [turn.start, `policy, turn ${index + 1}`]));
  turns.forEach((turn, index) => { if (turn.end < tokens.id.length && !starts.has(turn.end)) starts.set(turn.end, `environment, after turn ${index + 1} (${turn.finish_reason})`); });
  for (const [start, gap] of one.branches) starts.set(start, `${gap < start ? `after token ${number(start - 1 - gap)}` : "a new conversation"}${starts.has(start) ? `, ${starts.get(start)}` : ""}`);
  one.elements = [];
  const fragment = document.createDocumentFragment();
  if (!starts.has(0)) fragment.append(h("span", { class: "turn" }, "prompt"));
  tokens.id.forEach((id, index) => {
    if (starts.has(index)) fragment.append(h("span", { class: "turn" }, starts.get(index)));
    const text = texts[id] ?? ` ${id}`;
    const element = h("span", { class: tokens.mask[index] ? null : "given" }, text === "" ? "␀" : text.replace(/\n/g, "↵\n"));
    const number_ = values[index];
    if (number_ !== null && number_ !== undefined) {
      if (state.color === "version") { if (number_ >= 0) element.style.background = shade("cool", 0.12 + (0.5 * versions.indexOf(number_)) / versions.length); }
      else if (state.color === "mask") { if (number_) element.style.background = shade("good", 0.25); }
      else element.style.background = shade(isSigned ? (number_ > 0 ? "good" : "bad") : "bad", 0.65 * Math.min(1, Math.abs(number_) / largest));
    }
    one.elements[index] = element;
    element.addEventListener("mouseenter", () => { status.textContent = describe(tokens, index, text); });
    fragment.append(element);
  });
  return fragment;
}

const shade = (color, alpha) => `rgba(var(--${color}), ${alpha.toFixed(3)})`;

function describe(tokens, index, text) {
  const parts = [`${index}`, `id ${tokens.id[index]}`, JSON.stringify(text)];
  if (tokens.mask[index]) {
    parts.push(`logprob ${number(tokens.logprob[index])}`);
    if (tokens.trainer_logprob) parts.push(`trainer ${number(tokens.trainer_logprob[index])}`, `|Δlogp| ${number(Math.abs(tokens.logprob[index] - tokens.trainer_logprob[index]))}`);
    if (tokens.advantage) parts.push(`advantage ${number(tokens.advantage[index])}`);
    if (tokens.reward) parts.push(`reward ${number(tokens.reward[index])}`);
  }
  if (tokens.version[index] >= 0) parts.push(`version ${tokens.version[index]}`);
  return parts.join("   ");
}

function images(one) {
  if (!one.num_images) return [];
  const sources = one.images || Array.from({ length: one.num_images }, (_, index) => `image?run=${state.run}&id=${state.id}&number=${index}`);
  return [h("h2", {}, "images"), h("div", { class: "images" }, sources.map((source, index) => (source ? h("img", { src: source, alt: `image ${index + 1}` }) : null)))];
}

function messages(prompt) {
  return (prompt.messages || []).map((message) => h("div", { class: "message" }, `${message.role}\n`,
    typeof message.content === "string" ? message.content : JSON.stringify(message.content, null, 1)));
}

function pairs(values) {
  return h("table", { class: "pairs" }, h("tbody", {}, Object.entries(values).map(([name, value]) => h("tr", {}, h("td", {}, name), h("td", { class: "wrap" }, typeof value === "object" ? JSON.stringify(value) : number(value))))));
}

// ---------------------------------------------------------------- the timeline of an iteration

async function timeline(now) {
  const run = state.runs[state.run];
  if (!run.traced.length) return empty("No trace. Add the Trace callback to the run: --trainer.callbacks+=Trace");
  if (!run.traced.includes(state.iteration)) state.iteration = run.traced.at(-1);
  const line = await ask("timeline", { run: state.run, iteration: state.iteration });
  if (now !== drawn) return null;
  const place = run.traced.indexOf(state.iteration);
  const to = (index) => () => { state.iteration = run.traced[index]; go("timeline", { run: state.run, iteration: state.iteration }); };
  const status = h("div", { class: "status", role: "status" }, "Point at a block. Scroll to zoom, drag to move, double-click to show all.");
  const canvas = h("canvas", { role: "img", "aria-label": `timeline of iteration ${state.iteration}` });
  afterwards = () => drawTimeline(canvas, line, status);
  return [
    h("div", { class: "bar" },
      ...arrows("iteration", place > 0 && to(place - 1), place + 1 < run.traced.length && to(place + 1)),
      h("b", {}, `iteration ${number(state.iteration)}`),
      h("span", { class: "soft" }, `${number(run.traced.length)} traced · ${count(line.events.length, "event")}`),
      ...["phase", "generate", "server", "reward", "score", "update", "sync", "collective", "wait"].filter((name) => line.events.some((event) => event[2] === name)).map((name) => h("span", { class: "soft" }, dot(CATEGORIES[name]), ` ${name}`))),
    h("div", { class: "timeline" }, canvas), status, ...whereTheTimeWent(run.time),
    Object.keys(line.memory).length ? [h("h2", {}, "memory of this iteration, peak in MiB"), pairs(line.memory)] : [],
  ].flat();
}

function whereTheTimeWent(time) {
  if (!time) return [];
  const bar = h("div", { class: "areas" }, Object.entries(time.areas_s).map(([area, seconds]) => {
    const share = seconds / time.total_s;
    const element = h("span", { title: `${area}: ${number(seconds)} s` }, `${area} ${Math.round(100 * share)} %`);
    element.style.flex = `${share} 0 0`; element.style.background = CATEGORIES[AREAS[area]];
    if (share < 0.05) element.style.padding = "4px 0";
    return element;
  }));
  const gain = time.gain[time.look_first_at];
  return [h("h2", {}, `where the time went: ${number(time.total_s)} s per iteration, mean of ${number(time.iterations)}`), bar,
    h("p", {}, `Look first at ${time.look_first_at}: without it an iteration would be ${gain.toFixed(2)}× as fast.`),
    h("div", { class: "two" }, h("section", {}, h("h2", {}, "peak of each phase, rank 0, MiB"), pairs(time.memory_peak_mib || {})),
      h("section", {}, h("h2", {}, "memory of each role, rank 0, MiB"), pairs(time.memory_of_roles_mib || {})))];
}

function drawTimeline(canvas, line, status) {
  const LABEL = 210;
  const tracks = []; // adjacent rows of one track are thin and share a label
  line.rows.forEach((row, index) => {
    const name = row.track.replace(/ \d+$/, "");
    const before = tracks.at(-1);
    if (before && before.name === name && before.rank === row.rank) before.rows.push(index);
    else tracks.push({ name, rank: row.rank, rows: [index] });
  });
  const tops = []; const heights = [];
  const depth = depths(line.events);
  let height = 22;
  for (const track of tracks) {
    track.top = height;
    const levels = Math.max(...track.rows.map((row) => depth.most[row] + 1));
    const each = track.rows.length === 1 ? Math.max(30, 16 * levels) : Math.max(0.3, Math.min(12 * levels, 170 / track.rows.length));
    for (const row of track.rows) { tops[row] = height; heights[row] = each; height += each; }
    height += 8;
  }
  canvas.style.height = `${height + 4}px`;
  const end = line.events.reduce((most, event) => Math.max(most, event[3] + event[4]), 0) || 1;
  let [from, to] = [0, end];
  const boxes = line.events.map(([row], index) => {
    const each = heights[row] / (depth.most[row] + 1);
    return [tops[row] + depth.of[index] * each, Math.max(0.3, each - (each > 4 ? 1 : 0))];
  });
  const draw = () => {
    const [width] = fit(canvas, height + 4);
    const context = canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    const [ink, soft, faint] = ["--ink", "--soft", "--line"].map((name) => style.getPropertyValue(name));
    const px = (time) => LABEL + ((time - from) / (to - from)) * (width - LABEL);
    context.clearRect(0, 0, width, height + 4);
    context.font = "11px system-ui, sans-serif";
    const step = tick((to - from) / Math.max(3, (width - LABEL) / 110));
    context.strokeStyle = faint; context.fillStyle = soft;
    for (let time = Math.ceil(from / step) * step; time <= to; time += step) {
      context.beginPath(); context.moveTo(px(time), 16); context.lineTo(px(time), height); context.stroke();
      context.fillText(`${number(time)} ms`, px(time) + 3, 12);
    }
    line.events.forEach((event, index) => {
      const [, name, category, start, duration] = event;
      const [x, right] = [Math.max(LABEL, px(start)), Math.min(width, px(start + duration))];
      if (right < LABEL || x > width) return;
      const [top, tall] = boxes[index];
      context.fillStyle = CATEGORIES[category] || CATEGORIES.step;
      context.fillRect(x, top, Math.max(0.6, right - x), tall);
      if (right - x > 34 && tall >= 11) {
        context.save(); context.beginPath(); context.rect(x, top, right - x - 2, tall); context.clip();
        context.fillStyle = "#fff"; context.fillText(name, x + 4, top + tall / 2 + 4); context.restore();
      }
    });
    context.fillStyle = style.getPropertyValue("--panel"); context.fillRect(0, 0, LABEL - 4, height + 4);
    for (const track of tracks) {
      context.fillStyle = ink; context.fillText(track.name.slice(0, 30), 10, track.top + 12);
      context.fillStyle = soft; context.fillText(`rank ${track.rank}${track.rows.length > 1 ? ` · ${track.rows.length} at once` : ""}`, 10, track.top + 25);
    }
  };
  const at = (event) => {
    const time = from + ((event.offsetX - LABEL) / (canvas.clientWidth - LABEL)) * (to - from);
    for (let index = line.events.length - 1; index >= 0; index--) {
      const [, , , start, duration] = line.events[index]; const [top, tall] = boxes[index];
      const slack = ((to - from) / canvas.clientWidth) * 1.5;
      if (event.offsetY >= top && event.offsetY <= top + tall && time >= start - slack && time <= start + duration + slack) return [time, index];
    }
    return [time, null];
  };
  let drag = null;
  canvas.addEventListener("mousemove", (event) => {
    if (drag !== null) {
      const by = ((drag - event.offsetX) / (canvas.clientWidth - LABEL)) * (to - from);
      drag = event.offsetX; from += by; to += by; draw(); return;
    }
    const [time, index] = at(event);
    if (index === null) { status.textContent = `${number(time)} ms`; return; }
    const [row, name, category, start, duration, args] = line.events[index];
    const more = Object.entries(args).map(([key, value]) => `${key} ${value}`).join("   ");
    status.textContent = `${name}   ${number(duration)} ms from ${number(start)} ms   ${category}, rank ${line.rows[row].rank}, ${line.rows[row].track}   ${more}`;
  });
  canvas.addEventListener("mousedown", (event) => { drag = event.offsetX; });
  for (const name of ["mouseup", "mouseleave"]) canvas.addEventListener(name, () => { drag = null; });
  canvas.addEventListener("dblclick", () => { [from, to] = [0, end]; draw(); });
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const [time] = at(event); const factor = event.deltaY > 0 ? 1.25 : 0.8;
    from = time - (time - from) * factor; to = time + (to - time) * factor; draw();
  }, { passive: false });
  draw();
}

// Returns how deeply each event is nested in other events of its row, and each row's maximum.
function depths(events) {
  const [open, of, most] = [{}, [], {}];
  events.forEach(([row, , , start, duration], index) => {
    const ends = (open[row] || []).filter((end) => end > start + 1e-6);
    of[index] = Math.min(ends.length, 3);
    most[row] = Math.max(most[row] || 0, of[index]);
    open[row] = [...ends, start + duration];
  });
  return { of, most };
}

function tick(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((part) => part * power).find((step) => step >= least);
}

// ---------------------------------------------------------------- problems

async function problems(now) {
  const found = await ask("problems", { run: state.run });
  if (now !== drawn) return null;
  if (!found.length) return empty("No problems: no warnings, errors, dropped trajectories or lost servers.");
  const kinds = grouped(found, (one) => `${one.source}: ${one.kind}`);
  const alike = grouped(found, (one) => `${one.source}: ${one.kind}: ${one.message.replace(/\d+/g, "#")}`); // messages that differ only in numbers
  const cells = (one, num, iterations, ranks) => [
    h("td", {}, one.at ? new Date(one.at * 1000).toLocaleString() : ""), h("td", { class: "number" }, num), h("td", { class: "number" }, iterations), h("td", { class: "number" }, ranks),
    h("td", {}, one.source), h("td", {}, one.kind), h("td", { class: "wrap" }, one.message)];
  const distinct = (members, name) => [...new Set(members.map((one) => one[name]))].filter((value) => value !== null && value !== undefined).sort((a, b) => a - b);
  const rows = [...alike].flatMap(([key, members]) => {
    const [iterations, ranks, isOpen] = [distinct(members, "iteration"), distinct(members, "rank"), state.open.has(key)];
    const span = iterations.length > 1 ? `${number(iterations[0])} to ${number(iterations.at(-1))}` : number(iterations[0]);
    if (members.length === 1) return [h("tr", {}, cells(members[0], "", span, ranks.join(", ")))];
    const toggle = () => { isOpen ? state.open.delete(key) : state.open.add(key); show(); };
    const row = h("tr", { tabindex: 0, "aria-expanded": String(isOpen), title: isOpen ? "Click to hide them" : "Click to show each", onclick: toggle, onkeydown: (event) => { if (event.key === "Enter") toggle(); } },
      cells(members[0], `${isOpen ? "▾" : "▸"} ${number(members.length)}×`, span, ranks.join(", ")));
    return [row, ...(isOpen ? members.slice(0, 200).map((one) => h("tr", { class: "member" }, cells(one, "", number(one.iteration), number(one.rank)))) : [])];
  });
  return [
    h("div", { class: "bar" }, [...kinds].map(([name, members]) => h("span", { class: "chip" }, name, h("small", {}, number(members.length))))),
    h("table", {}, h("thead", {}, h("tr", {}, ["newest", "times", "iteration", "rank", "source", "kind", "message"].map((name) => h("th", {}, name)))), h("tbody", {}, rows)),
  ];
}

// ---------------------------------------------------------------- settings

async function settings(now) {
  const all = await ask("settings");
  if (now !== drawn) return null;
  const shown = state.runs.filter((run) => !state.hidden.has(run.number));
  const names = [...new Set(shown.flatMap((run) => Object.keys(all[run.number])))];
  if (!names.length) return empty("No settings. They come from config.yaml, which lightrl fit writes.");
  const values = (name) => shown.map((run) => all[run.number][name]);
  const different = new Set(names.filter((name) => new Set(values(name)).size > 1));
  const body = h("tbody", {});
  const fill = () => {
    const isShown = (name) => (shown.length === 1 || !state.differences || different.has(name)) && name.toLowerCase().includes(state.setting.toLowerCase());
    body.replaceChildren(...names.filter(isShown).map((name) => h("tr", { class: !state.differences && different.has(name) && "differs" }, h("td", {}, name), values(name).map((value) => h("td", { class: "wrap" }, value ?? "–")))));
  };
  fill();
  const search = h("input", { type: "search", id: "setting", placeholder: "settings: lr, sampling …", "aria-label": "Filter settings", value: state.setting, oninput: (event) => { state.setting = event.target.value; fill(); } });
  const box = h("label", {}, h("input", { type: "checkbox", id: "differences", checked: state.differences, onchange: (event) => { state.differences = event.target.checked; fill(); } }), " only differences");
  return [
    h("div", { class: "bar" }, search, shown.length > 1 ? box : null, h("span", { class: "soft" }, shown.length > 1 ? `${number(different.size)} of ${count(names.length, "setting")} differ` : count(names.length, "setting"))),
    h("table", { class: "settings" }, h("thead", {}, h("tr", {}, h("th", {}, "setting"), shown.map((run) => h("th", {}, dot(colorOf(run)), ` ${run.name}`)))), body),
  ];
}

// ---------------------------------------------------------------- start

function theme(value) {
  document.documentElement.dataset.theme = value;
  try { localStorage.setItem("lightrl-theme", value); } catch { /* a file opened from disk may lack storage */ }
}

async function begin() {
  let before = null;
  try { before = localStorage.getItem("lightrl-theme"); } catch { /* as above */ }
  document.documentElement.dataset.theme = before || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.getElementById("theme").addEventListener("click", () => { theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); show(); });
  addEventListener("hashchange", show);
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input:not([type=checkbox]), select")) return;
    const button = [...document.querySelectorAll("[data-key]")].find((one) => one.dataset.key === event.key && !one.disabled);
    if (button) { event.preventDefault(); button.click(); }
  });
  addEventListener("resize", () => { if (["curves", "timeline"].includes(place()[0])) show(); });
  state.runs = await ask("runs");
  await show();
  document.documentElement.dataset.ready = "true";
  if (!saved) setInterval(refresh, REFRESH_MS);
}

// Updates the view during a run, unless the user is interacting with it.
async function refresh() {
  if (document.hidden) return;
  const before = JSON.stringify(state.runs);
  try { state.runs = await ask("runs"); } catch { return; } // lightrl inspect has ended; keep the page
  const [view] = place();
  header(view);
  const isBusy = main.contains(document.activeElement) || view === "trajectory" || view === "timeline";
  const isGrowing = view === "trajectories" && document.getElementById("count")?.textContent.includes("reading");
  if (!isBusy && (isGrowing || JSON.stringify(state.runs) !== before)) { const top = scrollY; await show(); scrollTo(0, top); }
}

begin();
