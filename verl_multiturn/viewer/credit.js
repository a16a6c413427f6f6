// A trajectory's credit, turn by turn: rewards, values, and every algorithm's advantages side by side.

function creditTable(state, data, one, openTurn) {
  const known = META.algorithms.map((name, k) => [name, k]).filter(([name]) => !(name in data.impossible));
  const columns = [["recorded", (turn) => turn.advantage, data.scale]].concat(
    known.map(([name, k]) => [name, (turn) => (turn.scores ? turn.scores[k] : null), data.scales[k]]),
  );
  const G = returnsToGo(one, state.gamma);
  const values = one.turns.some((turn) => turn.value !== null);
  const names = ["t", "action", "r", "G", ...(values ? ["V"] : []), ...columns.map(([name]) => name)];
  const rows = one.turns.map((turn, t) =>
    row(t === state.turn, () => (openTurn(t), scrollToTurn()), { turn: turn.index }, [
      String(turn.index),
      h("code", {}, (turn.actions || []).join(" | ") || "–"),
      number(turn.reward),
      number(G[t]),
      ...(values ? [number(turn.value)] : []),
      ...columns.map(([name, of, scale]) => shaded(name, of(turn), scale)),
    ]),
  );
  const head = h(
    "tr",
    {},
    names.map((name) => h("th", {}, name)),
  );
  return h(
    "details",
    { class: "credits", open: true },
    h("summary", {}, "credit by turn, every algorithm"),
    h("div", { class: "wide" }, h("table", { id: "credit" }, head, rows)),
    leftOut(one, state.split) &&
      h("p", { class: "absent" }, "Left out by the filter: no algorithm has scored it."),
    Object.entries(data.impossible).map(([name, why]) => h("p", { class: "foot" }, `${name}: ${why}`)),
  );
}

// Its colour is as strong as the number is large, among those of its algorithm in the step.
const shaded = (name, value, scale) =>
  h(
    "span",
    {
      class: value < 0 ? "shade less" : "shade",
      title: `${name}; full colour at ±${number(scale)}`,
      style: { "--share": scale && value !== null ? Math.abs(value) / scale : 0 },
    },
    number(value, true),
  );

// The continuations whose mean is the value of the state before turn t.
function rollouts(one, t) {
  const returns = one.vine && one.vine.returns ? one.vine.returns[one.turns[t].index] : undefined;
  if (returns === undefined) return null;
  const mean = returns.length ? ` mean ${number(returns.reduce((a, b) => a + b, 0) / returns.length)}` : "";
  return h(
    "p",
    { class: "rollouts" },
    `${plural(returns.length, "continuation")} from here,${mean}: `,
    returns.map((G) => h("b", { class: G > 0 ? "dot-good" : "dot-none" }, number(G))),
  );
}

// Which tokens of the turn are trained: a strip in proportion.
function mask(tokens, trained) {
  if (!tokens || !tokens.action) return null;
  const [seen, written] = [tokens.prompt ? tokens.prompt.length : 0, tokens.action.length];
  const words = `${plural(seen, "token")} read, ${written} written${trained ? " and trained" : ", not trained"}`;
  return h(
    "div",
    { class: "mask", title: words, role: "img", "aria-label": words },
    h("span", { style: { "flex-grow": seen } }),
    h("span", { class: trained ? "on" : "off", style: { "flex-grow": written } }),
  );
}
