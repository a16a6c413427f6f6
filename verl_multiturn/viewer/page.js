// Drawing what the state says, and listening.

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
  drawSide({ ...state, split: here().split }, data, one, goTo);
}

function drawBar() {
  const list = ofSplit(here().split);
  const at = list.findIndex((one) => one.at === state.at);
  options(
    "split",
    [...new Set(META.steps.map((one) => one.split))].map((name) => [name, name]),
    here().split,
  );
  options(
    "step",
    list.map((one) => [String(one.at), `${one.step}`]),
    String(state.at),
  );
  $("slider").max = list.length - 1;
  $("slider").value = at;
  $("slider").disabled = list.length < 2;
  $("earlier").disabled = at === 0;
  $("later").disabled = at === list.length - 1;
  if (document.activeElement !== $("gamma")) $("gamma").value = state.gamma;
  $("tokens").checked = state.tokens;
  $("tokens").disabled = !META.tokens;
  $("tokens-label").title = META.tokens
    ? "show where tokens begin and end"
    : "the page was built without tokens";
}

function options(id, pairs, value) {
  const select = $(id);
  // a filter that this step cannot meet still says what it is
  if (!pairs.some(([one]) => one === value)) pairs.push([value, value]);
  const key = JSON.stringify(pairs);
  if (select.dataset.key !== key) {
    select.replaceChildren(...pairs.map(([one, text]) => h("option", { value: one }, text)));
    select.dataset.key = key;
  }
  select.value = value;
}

function drawList(data, current) {
  const counts = [...new Set(data.trajectories.map((one) => one.turns.length))].sort((a, b) => a - b);
  const types = [...new Set(data.trajectories.map((one) => one.task_type))]
    .filter((type) => type !== null)
    .sort();
  options(
    "success",
    [
      ["", "any"],
      ["good", "solved"],
      ["bad", "not solved"],
      ["none", "not recorded"],
    ],
    state.success,
  );
  options("turns", [["", "any"], ...counts.map((n) => [String(n), String(n)])], state.turns);
  options("type", [["", "any"], ...types.map((type) => [type, type])], state.type);
  options(
    "order",
    [
      ["", "as recorded"],
      ["down", "return, high first"],
      ["up", "return, low first"],
    ],
    state.order,
  );
  if (document.activeElement !== $("task")) $("task").value = state.task;
  const list = matching(data);
  const start = Math.floor(Math.max(0, list.indexOf(current)) / PAGE) * PAGE;
  const stop = Math.min(list.length, start + PAGE);
  const turnPage = (n, text) =>
    h("button", { on: { click: () => update({ n: list[n].at, turn: null }, true) } }, text);
  $("count").replaceChildren(
    `${list.length.toLocaleString("en")} of ${data.trajectories.length.toLocaleString("en")} trajectories`,
    list.length > PAGE ? `, ${start + 1} to ${stop} ` : "",
    start > 0 ? turnPage(start - PAGE, "◀") : "",
    stop < list.length ? turnPage(stop, "▶") : "",
  );
  $("rows").replaceChildren(...list.slice(start, stop).map((one) => listRow(one, one === current)));
  const shown = $("rows").querySelector("[aria-current]");
  if (shown) {
    // not scrollIntoView, which would move the page as well
    const box = $("rows"),
      top = shown.offsetTop - box.offsetTop;
    if (top < box.scrollTop || top + shown.offsetHeight > box.scrollTop + box.clientHeight)
      box.scrollTop = top - box.clientHeight / 3;
  }
}

function listRow(one, current) {
  const [sign, word, mood] = outcome(one);
  return h(
    "li",
    {},
    h(
      "button",
      {
        "aria-current": current ? "true" : null,
        data: { left: leftOut(one, here().split) ? "out" : "in" },
        on: { click: () => update({ n: one.at, turn: null }, true) },
      },
      h("span", { class: mood, title: word }, sign),
      h(
        "span",
        { class: "what" },
        one.task === null ? one.group : one.task,
        h("small", {}, ` #${one.trajectory}${one.task_type === null ? "" : ` ${one.task_type}`}`),
      ),
      h("small", {}, plural(one.turns.length, "turn")),
      h("b", {}, number(one.return)),
    ),
  );
}

function listen() {
  $("split").addEventListener("change", (e) => {
    const list = ofSplit(e.target.value);
    goToStep(list[list.length - 1].at);
  });
  $("step").addEventListener("change", (e) => goToStep(+e.target.value));
  $("slider").addEventListener("input", (e) => goToStep(ofSplit(here().split)[+e.target.value].at));
  $("earlier").addEventListener("click", () => moveStep(-1));
  $("later").addEventListener("click", () => moveStep(1));
  $("gamma").addEventListener("input", (e) => {
    if (e.target.value !== "" && isFinite(e.target.value)) update({ gamma: +e.target.value });
  });
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
    if (by) (e.preventDefault(), e.shiftKey ? moveStep(by) : moveTrajectory(by));
  });
  const follow = () => {
    readHash();
    draw(true);
    scrollToTurn();
  };
  window.addEventListener("hashchange", follow);
  window.addEventListener("popstate", follow);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (width !== window.innerWidth) ((width = window.innerWidth), draw(true));
  });
  $("curves").addEventListener("toggle", () => {
    writeHash(false);
    draw(true);
  });
}

const total = META.steps.reduce((sum, one) => sum + one.size, 0);
$("title").textContent = [META.env, META.algorithm].filter(Boolean).join(", ") || META.name;
$("about").textContent = [
  META.name,
  META.seed === null ? "" : `seed ${META.seed}`,
  `${plural(META.steps.length, "step")} with ${total.toLocaleString("en")} trajectories in this page`,
  META.failures ? `${META.failures} failed` : "",
  META.tokens ? "" : "built without tokens",
]
  .filter(Boolean)
  .join(" · ");
listen();
readHash();
writeHash(false);
draw(true);
scrollToTurn();
