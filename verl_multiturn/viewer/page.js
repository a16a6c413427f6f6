// Where the reader is: kept in the address, so that a link opens the same place.

const PAGE = 200; // rows of the list at a time
const FILTERS = { success: "", turns: "", type: "", task: "", order: "" };
const METRIC = ["actor/entropy", "multiturn/turns/mean"].find((name) => META.metrics.values[name]) || Object.keys(META.metrics.values)[0] || "";
const state = { at: 0, n: 0, turn: null, gamma: META.gamma, tokens: false, metric: METRIC, ...FILTERS };

const here = () => META.steps[state.at];
const ofSplit = (split) => META.steps.map((one, at) => ({ ...one, at })).filter((one) => one.split === split);

function matching(data) {
  const list = data.trajectories.filter((one) =>
    (!state.success || outcome(one)[2] === state.success) &&
    (!state.turns || one.turns.length === +state.turns) &&
    (!state.type || one.task_type === state.type) &&
    (!state.task || `${one.task} ${one.group}`.toLowerCase().includes(state.task.toLowerCase())));
  if (state.order) list.sort((a, b) => (state.order === "up" ? 1 : -1) * (a.return - b.return) || a.at - b.at);
  return list;
}

function readHash() {
  const q = new URLSearchParams(location.hash.slice(1));
  const at = META.steps.findIndex((one) => one.split === q.get("split") && String(one.step) === q.get("step"));
  const trainable = ofSplit("train").concat(ofSplit(META.steps[0].split));
  const first = ofSplit("train").length ? ofSplit("train") : trainable;
  state.at = at >= 0 ? at : first[first.length - 1].at;
  for (const name of Object.keys(FILTERS)) state[name] = q.get(name) || "";
  state.metric = META.metrics.values[q.get("metric")] ? q.get("metric") : METRIC;
  state.gamma = q.has("gamma") && isFinite(q.get("gamma")) ? +q.get("gamma") : META.gamma;
  state.tokens = META.tokens && q.get("tokens") === "1";
  $("curves").open = q.get("curves") !== "0";
  const data = loadStep(state.at);
  const named = data.trajectories.find((one) => one.group === q.get("group") && String(one.trajectory) === q.get("trajectory"));
  state.n = named ? named.at : (matching(data)[0] || { at: -1 }).at;
  const t = named && q.has("turn") ? named.turns.findIndex((turn) => String(turn.index) === q.get("turn")) : -1;
  state.turn = t >= 0 ? t : null;
}

function writeHash(visited) {
  const one = loadStep(state.at).trajectories[state.n];
  const q = new URLSearchParams({ split: here().split, step: here().step });
  if (one) q.set("group", one.group), q.set("trajectory", one.trajectory);
  if (one && state.turn !== null) q.set("turn", one.turns[state.turn].index);
  for (const name of Object.keys(FILTERS)) if (state[name]) q.set(name, state[name]);
  if (state.metric !== METRIC) q.set("metric", state.metric);
  if (state.gamma !== META.gamma) q.set("gamma", state.gamma);
  if (state.tokens) q.set("tokens", "1");
  if (!$("curves").open) q.set("curves", "0");
  if (`#${q}` !== location.hash) history[visited ? "pushState" : "replaceState"](null, "", `#${q}`);
}

// Every change goes through here; `visited`: the back button returns to where we were.
function update(change, visited = false) {
  const before = state.at, metric = state.metric;
  Object.assign(state, change);
  writeHash(visited);
  draw(before !== state.at || metric !== state.metric);
}

const goTo = (one, turn) => { update({ n: one.at, turn }, true); scrollToTurn(); };
const openTurn = (turn) => update({ turn });

// Another step: the same task and sample if it was played there, else the first of the list.
function goToStep(at) {
  if (at === undefined || at === state.at) return;
  const was = loadStep(state.at).trajectories[state.n];
  const data = loadStep(at);
  const same = was && was.task !== null && data.trajectories.find((one) => one.task === was.task && one.trajectory === was.trajectory);
  update({ at, n: (same || matching(data)[0] || { at: -1 }).at, turn: null }, true);
}

function nearestStep(step) {
  const near = ofSplit(here().split).reduce((a, b) => (Math.abs(b.step - step) < Math.abs(a.step - step) ? b : a));
  goToStep(near.at);
}

function moveStep(by) {
  const list = ofSplit(here().split);
  const next = list[list.findIndex((one) => one.at === state.at) + by];
  if (next) goToStep(next.at);
}

function moveTrajectory(by) {
  const list = matching(loadStep(state.at));
  const now = list.findIndex((one) => one.at === state.n);
  const next = list[now < 0 ? 0 : now + by];
  if (next) update({ n: next.at, turn: null }, true);
}

function scrollToTurn() {
  const turn = state.turn === null ? null : $(`turn-${state.turn}`);
  if (turn) turn.scrollIntoView({ block: "nearest" });
}

function draw(withCurves) {
  const data = loadStep(state.at);
  const one = data.trajectories[state.n];
  if (withCurves) drawCurves(state, nearestStep, (metric) => update({ metric }));
  drawBar();
  drawList(data, one);
  drawReader({ ...state, split: here().split }, data, one, openTurn);
  drawSide(state, data, one, goTo);
}

function drawBar() {
  const list = ofSplit(here().split);
  const at = list.findIndex((one) => one.at === state.at);
  options("split", [...new Set(META.steps.map((one) => one.split))].map((name) => [name, name]), here().split);
  options("step", list.map((one) => [String(one.at), `${one.step}`]), String(state.at));
  $("slider").max = list.length - 1;
  $("slider").value = at;
  $("slider").disabled = list.length < 2;
  $("earlier").disabled = at === 0;
  $("later").disabled = at === list.length - 1;
  if (document.activeElement !== $("gamma")) $("gamma").value = state.gamma;
  $("tokens").checked = state.tokens;
  $("tokens").disabled = !META.tokens;
  $("tokens-label").title = META.tokens ? "show where tokens begin and end" : "the page was built without tokens";
}

function options(id, pairs, value) {
  const select = $(id);
  const key = JSON.stringify(pairs);
  if (select.dataset.key !== key) {
    select.replaceChildren(...pairs.map(([one, text]) => h("option", { value: one }, text)));
    select.dataset.key = key;
  }
  select.value = value;
}

function drawList(data, current) {
  const counts = [...new Set(data.trajectories.map((one) => one.turns.length))].sort((a, b) => a - b);
  const types = [...new Set(data.trajectories.map((one) => one.task_type))].filter((type) => type !== null).sort();
  options("success", [["", "any"], ["good", "solved"], ["bad", "not solved"], ["none", "not recorded"]], state.success);
  options("turns", [["", "any"], ...counts.map((n) => [String(n), String(n)])], state.turns);
  options("type", [["", "any"], ...types.map((type) => [type, type])], state.type);
  options("order", [["", "as recorded"], ["down", "return, high first"], ["up", "return, low first"]], state.order);
  if (document.activeElement !== $("task")) $("task").value = state.task;
  const list = matching(data);
  const start = Math.floor(Math.max(0, list.indexOf(current)) / PAGE) * PAGE;
  const stop = Math.min(list.length, start + PAGE);
  const turnPage = (n, text) => h("button", { on: { click: () => update({ n: list[n].at, turn: null }, true) } }, text);
  $("count").replaceChildren(
    `${list.length.toLocaleString("en")} of ${data.trajectories.length.toLocaleString("en")} trajectories`,
    list.length > PAGE ? `, ${start + 1} to ${stop} ` : "", start > 0 ? turnPage(start - PAGE, "◀") : "", stop < list.length ? turnPage(stop, "▶") : "");
  $("rows").replaceChildren(...list.slice(start, stop).map((one) => listRow(one, one === current)));
  const shown = $("rows").querySelector("[aria-current]");
  if (shown) { // not scrollIntoView, which would move the page as well
    const box = $("rows"), top = shown.offsetTop - box.offsetTop;
    if (top < box.scrollTop || top + shown.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = top - box.clientHeight / 3;
  }
}

function listRow(one, current) {
  const [sign, word, mood] = outcome(one);
  return h("li", {}, h("button", { "aria-current": current ? "true" : null, on: { click: () => update({ n: one.at, turn: null }, true) } },
    h("span", { class: mood, title: word }, sign),
    h("span", { class: "what" }, one.task === null ? one.group : one.task, h("small", {}, ` #${one.trajectory}${one.task_type === null ? "" : ` ${one.task_type}`}`)),
    h("small", {}, plural(one.turns.length, "turn")), h("b", {}, number(one.return))));
}

function listen() {
  $("split").addEventListener("change", (e) => { const list = ofSplit(e.target.value); goToStep(list[list.length - 1].at); });
  $("step").addEventListener("change", (e) => goToStep(+e.target.value));
  $("slider").addEventListener("input", (e) => goToStep(ofSplit(here().split)[+e.target.value].at));
  $("earlier").addEventListener("click", () => moveStep(-1));
  $("later").addEventListener("click", () => moveStep(1));
  $("gamma").addEventListener("input", (e) => { if (e.target.value !== "" && isFinite(e.target.value)) update({ gamma: +e.target.value }); });
  $("tokens").addEventListener("change", (e) => update({ tokens: e.target.checked }));
  $("filters").addEventListener("submit", (e) => e.preventDefault());
  for (const name of Object.keys(FILTERS))
    $(name).addEventListener("input", (e) => {
      state[name] = e.target.value;
      const list = matching(loadStep(state.at));
      update(list.some((one) => one.at === state.n) ? {} : { n: (list[0] || { at: -1 }).at, turn: null });
    });
  document.addEventListener("keydown", (e) => {
    if (e.target.closest("input, select") || e.ctrlKey || e.altKey || e.metaKey) return;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[e.key];
    if (by) e.preventDefault(), e.shiftKey ? moveStep(by) : moveTrajectory(by);
  });
  const follow = () => { readHash(); draw(true); scrollToTurn(); };
  window.addEventListener("hashchange", follow);
  window.addEventListener("popstate", follow);
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (width !== window.innerWidth) width = window.innerWidth, draw(true); });
  $("curves").addEventListener("toggle", () => { writeHash(false); draw(true); });
}

const total = META.steps.reduce((sum, one) => sum + one.size, 0);
$("title").textContent = [META.env, META.algorithm].filter(Boolean).join(", ") || META.name;
$("about").textContent = [META.name, META.seed === null ? "" : `seed ${META.seed}`, `${plural(META.steps.length, "step")} with ${total.toLocaleString("en")} trajectories in this page`,
  META.failures ? `${META.failures} failed` : "", META.tokens ? "" : "built without tokens"].filter(Boolean).join(" · ");
listen();
readHash();
writeHash(false);
draw(true);
scrollToTurn();
