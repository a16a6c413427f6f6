// Where the reader is: kept in the address, so that a link opens the same place.

const PAGE = 200; // rows of the list at a time
const FILTERS = { success: "", turns: "", type: "", task: "", order: "" };
const METRIC =
  ["actor/entropy", "multiturn/turns/mean"].find((name) => META.metrics.values[name]) ||
  Object.keys(META.metrics.values)[0] ||
  "";
const state = { at: 0, n: 0, turn: null, gamma: META.gamma, tokens: false, metric: METRIC, ...FILTERS };

const here = () => META.steps[state.at];
const ofSplit = (split) => META.steps.map((one, at) => ({ ...one, at })).filter((one) => one.split === split);

function matching(data) {
  const list = data.trajectories.filter(
    (one) =>
      (!state.success || outcome(one)[2] === state.success) &&
      (!state.turns || one.turns.length === +state.turns) &&
      (!state.type || one.task_type === state.type) &&
      (!state.task || `${one.task} ${one.group}`.toLowerCase().includes(state.task.toLowerCase())),
  );
  if (state.order)
    list.sort((a, b) => (state.order === "up" ? 1 : -1) * (a.return - b.return) || a.at - b.at);
  return list;
}

function readHash() {
  const q = new URLSearchParams(location.hash.slice(1));
  const at = META.steps.findIndex(
    (one) => one.split === q.get("split") && String(one.step) === q.get("step"),
  );
  const trainable = ofSplit("train").concat(ofSplit(META.steps[0].split));
  const first = ofSplit("train").length ? ofSplit("train") : trainable;
  state.at = at >= 0 ? at : first[first.length - 1].at;
  for (const name of Object.keys(FILTERS)) state[name] = q.get(name) || "";
  state.metric = META.metrics.values[q.get("metric")] ? q.get("metric") : METRIC;
  state.gamma = q.has("gamma") && isFinite(q.get("gamma")) ? +q.get("gamma") : META.gamma;
  state.tokens = META.tokens && q.get("tokens") === "1";
  $("curves").open = q.get("curves") !== "0";
  const data = loadStep(state.at);
  const named = data.trajectories.find(
    (one) => one.group === q.get("group") && String(one.trajectory) === q.get("trajectory"),
  );
  state.n = named ? named.at : (matching(data)[0] || { at: -1 }).at;
  const t =
    named && q.has("turn") ? named.turns.findIndex((turn) => String(turn.index) === q.get("turn")) : -1;
  state.turn = t >= 0 ? t : null;
}

function writeHash(visited) {
  const one = loadStep(state.at).trajectories[state.n];
  const q = new URLSearchParams({ split: here().split, step: here().step });
  if (one) (q.set("group", one.group), q.set("trajectory", one.trajectory));
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
  const before = state.at,
    metric = state.metric;
  Object.assign(state, change);
  writeHash(visited);
  draw(before !== state.at || metric !== state.metric);
}

const goTo = (one, turn) => {
  update({ n: one.at, turn }, true);
  scrollToTurn();
};
const openTurn = (turn) => update({ turn });

// Another step: the same task and sample if it was played there, else the first of the list.
function goToStep(at) {
  if (at === undefined || at === state.at) return;
  const was = loadStep(state.at).trajectories[state.n];
  const list = matching(loadStep(at));
  const again = (one) =>
    was && was.task !== null && one.task === was.task && one.trajectory === was.trajectory;
  update({ at, n: (list.find(again) || list[0] || { at: -1 }).at, turn: null }, true);
}

function nearestStep(step) {
  const near = ofSplit(here().split).reduce((a, b) =>
    Math.abs(b.step - step) < Math.abs(a.step - step) ? b : a,
  );
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
