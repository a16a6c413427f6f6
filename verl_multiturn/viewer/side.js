// Beside the trajectory: its group, and the turns that started from the same state.

function drawSide(state, data, one, goTo) {
  if (!one) return $("side").replaceChildren();
  const group = data.groups.get(one.group);
  const returns = group.map((member) => member.return);
  const mean = returns.reduce((a, b) => a + b, 0) / group.length;
  const flat = group.length > 1 && returns.every((x) => x === returns[0]);
  const head = h(
    "tr",
    {},
    ["", "no.", "return", "turns", ""].map((name) => h("th", {}, name)),
  );
  const rows = group.map((member) => {
    const [sign, word, mood] = outcome(member);
    const data = { trajectory: member.trajectory, left: leftOut(member, state.split) ? "out" : "in" };
    return row(member === one, () => goTo(member, null), data, [
      h("span", { class: mood, title: word }, sign),
      String(member.trajectory),
      number(member.return),
      String(member.turns.length),
      member.truncated
        ? h("span", { class: "warn", title: `cut off: ${member.truncation || "yes"}` }, "cut")
        : "",
    ]);
  });
  $("side").replaceChildren(
    h("h2", {}, `Group, ${plural(group.length, "trajectory").replace("trajectorys", "trajectories")}`),
    h("p", {}, `mean return ${number(mean)}`, flat ? "; all equal: no signal between trajectories" : ""),
    h("table", { id: "group" }, head, rows),
    ...anchorPanel(state, data, one, goTo),
    ...states(data, one, goTo),
  );
}

// The states that the group met more than once, to click through; the first turn of each is opened.
function states(data, one, goTo) {
  const met = [...data.anchors.values()]
    .filter((members) => members.length > 1 && members[0][0].group === one.group)
    .sort((a, b) => b.length - a.length);
  if (!met.length) return [];
  const rows = met.slice(0, 30).map((members) => {
    const [first, t] = members[0];
    const actions = new Set(members.map(([member, at]) => (member.turns[at].actions || []).join(" | ")));
    const cells = [String(first.turns[t].anchor), plural(members.length, "turn"), String(actions.size)];
    return row(false, () => goTo(first, t), { anchor: first.turns[t].anchor }, cells);
  });
  const head = h(
    "tr",
    {},
    ["state", "met by", "actions"].map((name) => h("th", {}, name)),
  );
  return [h("h2", {}, "States met more than once"), h("table", { id: "states" }, head, rows)];
}

function anchorPanel(state, data, one, goTo) {
  const turn = one.turns[state.turn ?? 0];
  if (!turn || turn.anchor === null)
    return [h("h2", {}, "Anchor group"), h("p", { class: "absent" }, "this turn has no anchor")];
  const members = data.anchors.get(turn.anchor);
  const head = h(
    "tr",
    {},
    ["no.", "t", "action", "G", "A"].map((name) => h("th", {}, name)),
  );
  const rows = members.map(([member, t]) => {
    const other = member.turns[t];
    const advantage = h(
      "span",
      { class: other.advantage < 0 ? "minus" : "plus" },
      number(other.advantage, true),
    );
    return row(
      member === one && t === (state.turn ?? 0),
      () => goTo(member, t),
      { trajectory: member.trajectory, turn: other.index },
      [
        String(member.trajectory),
        String(other.index),
        h("code", {}, (other.actions || []).join(" | ") || "–"),
        number(returnsToGo(member, state.gamma)[t]),
        advantage,
      ],
    );
  });
  const note =
    members.length === 1
      ? "Only this turn started from this state."
      : `${plural(members.length, "turn")} of the group started from the state of turn ${turn.index}.`;
  return [
    h("h2", {}, `Anchor group ${turn.anchor}`),
    h("p", {}, note),
    h("table", { id: "anchors", data: { anchor: turn.anchor } }, head, rows),
  ];
}

function row(current, act, data, cells) {
  const press = (event) => {
    if (event.key === "Enter") act();
  };
  return h(
    "tr",
    {
      class: current ? "current" : null,
      "aria-current": current ? "true" : null,
      tabindex: 0,
      data,
      on: { click: act, keydown: press },
    },
    cells.map((cell) => h("td", {}, cell)),
  );
}
