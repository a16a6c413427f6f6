// One trajectory, turn by turn.

const LONG = 700; // characters of a prompt that are shown without asking

function drawReader(state, data, one, openTurn) {
  if (!one)
    return $("reader").replaceChildren(h("p", { class: "absent" }, "No trajectory matches the filters."));
  const [, word, mood] = outcome(one);
  const ended = one.truncated
    ? `cut off${one.truncation ? ` (${one.truncation})` : ""}`
    : one.terminated
      ? "terminated"
      : null;
  const facts = [
    ["return", number(one.return)],
    ["turns", one.turns.length],
    ["task", one.task],
    ["type", one.task_type],
    ["panel", one.panel],
    ["seed", one.seed === one.task ? null : one.seed],
    ["dynamics seed", one.dynamics_seed],
    ["seconds", one.seconds === null ? null : number(one.seconds)],
    ["environment", one.env === META.env ? null : one.env],
    ["continuations", one.vine ? `${one.vine.rollouts}, ${one.vine.failed} failed` : null],
  ].filter(([, value]) => value !== null);
  $("reader").replaceChildren(
    h(
      "div",
      { class: "top" },
      h(
        "h2",
        { id: "shown", data: { group: one.group, trajectory: one.trajectory } },
        `Trajectory ${one.trajectory}`,
      ),
      h("span", { class: `badge ${mood}` }, word),
      ended && h("span", { class: one.truncated ? "badge warn" : "badge" }, ended),
      leftOut(one, state.split) && h("span", { class: "badge warn" }, "left out by the filter"),
      h("code", { class: "uid" }, `group ${one.group}`),
    ),
    h(
      "dl",
      { class: "facts" },
      facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))),
    ),
    (one.instruction &&
      h("details", { class: "text" }, h("summary", {}, "instruction"), h("pre", {}, one.instruction))) ||
      "",
    creditTable(state, data, one, openTurn),
    ...turnsOf(state, data, one, openTurn),
  );
}

function turnsOf(state, data, one, openTurn) {
  const G = returnsToGo(one, state.gamma);
  const trained = state.split !== "val" && !leftOut(one, state.split);
  return one.turns.map((turn, t) => {
    const tokens = state.tokens ? tokensOf(data, one.at, t) : null;
    const members = turn.anchor === null ? [] : data.anchors.get(turn.anchor);
    return h(
      "section",
      { class: t === state.turn ? "turn current" : "turn", id: `turn-${t}` },
      h(
        "div",
        { class: "turn-head" },
        h("h3", {}, `turn ${turn.index}`),
        turn.valid === null
          ? null
          : h("span", { class: turn.valid ? "badge" : "badge bad" }, turn.valid ? "valid" : "not valid"),
        h(
          "span",
          { class: "actions" },
          (turn.actions || []).map((action) => h("code", { class: "action" }, action)),
        ),
        members.length > 0 &&
          h(
            "button",
            { class: "anchor", data: { anchor: turn.anchor }, on: { click: () => openTurn(t) } },
            `same state: ${plural(members.length, "turn")}`,
          ),
      ),
      h(
        "div",
        { class: "credit" },
        quantity("r", number(turn.reward), "reward r_t"),
        quantity("G", number(G[t]), `return-to-go, γ = ${state.gamma}`),
        turn.value === null ? null : quantity("V", number(turn.value), "value of the state before the turn"),
        quantity("A", turn.advantage === null ? "absent" : number(turn.advantage, true), "advantage"),
        turn.advantage === null ? null : bar(turn.advantage, data.scale),
      ),
      rollouts(one, t),
      mask(tokens, trained),
      seen(turn, tokens),
      utterance(turn, tokens, trained),
      (turn.steps || []).map((step) => stepCredit(step, data.scale)),
      footer(turn),
    );
  });
}

const quantity = (name, value, title) =>
  h("span", { class: "quantity", title }, h("i", {}, name), " ", h("b", {}, value));

// Where an utterance was cut into steps, each has a value and an advantage of its own.
const stepCredit = (step, scale) =>
  h(
    "div",
    { class: "credit" },
    quantity("tokens", step.span.join("–"), "first token of the step, and the first behind it"),
    step.value === null ? null : quantity("V", number(step.value), "value of the state before the step"),
    quantity("A", step.advantage === null ? "absent" : number(step.advantage, true), "advantage"),
    step.advantage === null ? null : bar(step.advantage, scale),
  );

// A diverging bar: its middle is 0, its ends the largest |A| of the step.
function bar(value, scale) {
  const share = scale ? (Math.abs(value) / scale) * 50 : 0;
  return h(
    "span",
    {
      class: "bar",
      role: "img",
      "aria-label": `advantage ${number(value, true)}`,
      title: `the ends are ±${number(scale)}, the largest advantage of the step`,
    },
    h("span", {
      class: value < 0 ? "fill minus" : "fill plus",
      style: { width: `${share}%`, left: `${value < 0 ? 50 - share : 50}%` },
    }),
  );
}

function seen(turn, tokens) {
  const blocks = [];
  const same = turn.prompt !== null && turn.prompt.trim() === (turn.observation || "").trim();
  if (turn.observation !== null)
    blocks.push(
      h(
        "div",
        { class: "text" },
        h("h4", {}, same ? "observation = prompt" : "observation"),
        h("pre", {}, turn.observation),
      ),
    );
  if (turn.prompt !== null && !same)
    blocks.push(
      h(
        "details",
        { class: "text", open: turn.prompt.length <= LONG },
        h("summary", {}, `prompt, ${plural(turn.prompt.length, "character")}`),
        h("pre", {}, turn.prompt),
      ),
    );
  if (tokens && tokens.prompt)
    blocks.push(
      h(
        "details",
        { class: "text" },
        h("summary", {}, `${plural(tokens.prompt.length, "prompt token")}`),
        h("pre", {}, tokens.prompt.map(chip)),
      ),
    );
  return blocks.length ? blocks : [h("p", { class: "absent" }, "observation and prompt not recorded")];
}

// What the policy wrote, and in training was trained on, is marked; nothing else of a row is trained.
function utterance(turn, tokens, trained) {
  const written = tokens && tokens.action;
  if (!written && turn.text === null) return h("p", { class: "absent" }, "utterance not recorded");
  const title = [
    "utterance",
    trained ? ", trained" : "",
    written ? `, ${plural(written.length, "token")}` : "",
  ].join("");
  return h(
    "div",
    { class: trained ? "text said" : "text said idle" },
    h("h4", {}, title),
    h("pre", {}, written ? written.map(chip) : h("mark", {}, turn.text)),
  );
}

// The less probable, the stronger its colour; without a tokenizer the id stands for the text.
function chip(token) {
  const surprise = token.logProb === null ? 0 : Math.min(1, -token.logProb / 3);
  const text = token.text === undefined ? token.id : token.text.replaceAll("\n", "⏎\n") || "∅";
  const p = token.logProb === null ? "" : `, log-prob ${token.logProb}, p ${number(Math.exp(token.logProb))}`;
  return h(
    "span",
    {
      class: token.text === undefined ? "token bare" : "token",
      title: `id ${token.id}${p}`,
      style: { "--surprise": surprise },
    },
    text,
  );
}

function footer(turn) {
  const seconds = (name, x) => x !== null && `${name} ${number(x)} s`;
  const extra = Object.entries(turn.extra || {}).map(
    ([name, value]) => `${name.replaceAll("_", " ")} ${value}`,
  );
  const parts = [
    turn.row !== null && `row ${turn.row}`,
    turn.span && `span ${turn.span[0]} to ${turn.span[1]}`,
    seconds("generated in", turn.generate_seconds),
    seconds("environment", turn.env_seconds),
    ...extra,
  ].filter(Boolean);
  return parts.length ? h("p", { class: "foot" }, parts.join(" · ")) : null;
}
