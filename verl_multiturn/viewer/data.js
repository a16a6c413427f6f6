// Reading the embedded data, a step at a time.

const KEPT = 6; // parsed steps held in memory
const cache = new Map();

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
  data.impossible = raw.impossible;
  data.scales = META.algorithms.map(() => 0);
  raw.trajectories.forEach((row, at) => {
    const one = unpack(META.trajectory_fields, row, raw.strings);
    one.at = at;
    one.turns = row[row.length - 1].map((turn) => unpack(META.turn_fields, turn, raw.strings));
    if (!data.groups.has(one.group)) data.groups.set(one.group, []);
    data.groups.get(one.group).push(one);
    one.turns.forEach((turn, t) => {
      for (const part of [turn, ...(turn.steps || [])])
        data.scale = Math.max(data.scale, Math.abs(part.advantage || 0));
      (turn.scores || []).forEach((A, k) => (data.scales[k] = Math.max(data.scales[k], Math.abs(A || 0))));
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

// A filter left its group out: nothing of it was trained.
const leftOut = (one, split) => split === "train" && one.trained === false;
