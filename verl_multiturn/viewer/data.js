"use strict";
// Reading the embedded data, and building the page's elements. Recorded texts only ever become text nodes.

const $ = (id) => document.getElementById(id);
const META = JSON.parse($("meta").textContent);
const KEPT = 6; // parsed steps held in memory
const cache = new Map();

function h(tag, props, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "style") for (const [k, v] of Object.entries(value)) element.style.setProperty(k, v);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(
    ...children.flat().filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

function s(tag, props, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// 3 digits, no needless zeros; signed where the sign is the message
function number(x, signed) {
  if (x === null || x === undefined) return "–";
  const size = Math.abs(x);
  let text =
    size !== 0 && (size < 0.001 || size >= 1e6)
      ? x.toExponential(2)
      : String(+x.toFixed(size < 10 ? 3 : size < 1000 ? 2 : 0));
  if (text === "-0") text = "0";
  return (signed && x > 0 ? "+" : "") + text.replace("-", "−");
}

const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

function unpack(fields, row, strings) {
  const record = {};
  fields.forEach(([name, kind], k) => {
    const value = row[k];
    if (value === null) record[name] = null;
    else if (kind === "text") record[name] = strings[value];
    else if (kind === "texts") record[name] = value.map((code) => strings[code]);
    else record[name] = value;
  });
  return record;
}

// The n-th embedded step: its trajectories, and who belongs together.
function loadStep(n) {
  const held = cache.get(n);
  if (held) return held;
  const raw = JSON.parse($(`step-${n}`).textContent);
  const data = { trajectories: [], groups: new Map(), anchors: new Map(), scale: 0, tokens: null };
  raw.trajectories.forEach((row, at) => {
    const one = unpack(META.trajectory_fields, row, raw.strings);
    one.at = at;
    one.turns = row[row.length - 1].map((turn) => unpack(META.turn_fields, turn, raw.strings));
    if (!data.groups.has(one.group)) data.groups.set(one.group, []);
    data.groups.get(one.group).push(one);
    one.turns.forEach((turn, t) => {
      for (const part of [turn, ...(turn.steps || [])])
        data.scale = Math.max(data.scale, Math.abs(part.advantage || 0));
      if (turn.anchor === null) return;
      if (!data.anchors.has(turn.anchor)) data.anchors.set(turn.anchor, []);
      data.anchors.get(turn.anchor).push([one, t]);
    });
    data.trajectories.push(one);
  });
  const tokens = $(`tokens-${n}`);
  if (tokens) data.readTokens = () => (data.tokens ||= JSON.parse(tokens.textContent));
  cache.set(n, data);
  if (cache.size > KEPT) cache.delete(cache.keys().next().value);
  return data;
}

// The tokens of a turn: {prompt, action}, lists of {id, text, logProb}, or null where they are not known.
function tokensOf(data, at, t) {
  if (!data.readTokens) return null;
  const { strings, turns } = data.readTokens();
  const [prompt, action, logProbs] = turns[at][t];
  const list = (code, probs) =>
    code === null
      ? null
      : strings[code]
          .split(" ")
          .filter(Boolean)
          .map((id, k) => ({ id, text: META.pieces[id], logProb: probs ? (probs[k] ?? null) : null }));
  return { prompt: list(prompt, null), action: list(action, logProbs) };
}

// G_t = r_t + γ G_{t+1}, of the recorded rewards
function returnsToGo(trajectory, gamma) {
  const G = new Array(trajectory.turns.length);
  for (let t = G.length - 1, after = 0; t >= 0; t--)
    after = G[t] = trajectory.turns[t].reward + gamma * after;
  return G;
}

function outcome(one) {
  if (one.success === true) return ["✓", "solved", "good"];
  if (one.success === false) return ["✗", "not solved", "bad"];
  return ["·", "success not recorded", "none"];
}
