// Search trees: a list of them, one opened level by level, and the node that was chosen.

const PAGE = 300; // trees of the list that are drawn
const now = { tree: 0, node: 0, open: new Set(), success: "", order: "", task: "" };
let nodes = [];

function load(n) {
  const raw = JSON.parse($(`tree-${n}`).textContent);
  nodes = raw.nodes.map(([parent, ...values], id) => {
    const node = { id, parent, children: [] };
    META.node.forEach((name, k) => (node[name] = values[k]));
    for (const name of ["action", "observation", "text"])
      if (node[name] !== null) node[name] = raw.strings[node[name]];
    return node;
  });
  for (const node of nodes) if (node.parent >= 0) nodes[node.parent].children.push(node);
  const Qs = nodes.map((node) => node.Q).filter((Q) => Q !== null);
  now.low = Math.min(0, ...Qs);
  now.high = Math.max(0, ...Qs) || 1;
}

// The path of most visits is open from the start.
function openTree(n) {
  load(n);
  Object.assign(now, { tree: n, node: 0, open: new Set() });
  for (let node = nodes[0]; node && node.children.length; ) {
    now.open.add(node.id);
    node = node.children.reduce((a, b) => (b.N > a.N ? b : a));
    if (!node.N) break;
  }
}

const matching = () => {
  const list = META.trees
    .map((one, at) => ({ ...one, at }))
    .filter((one) => !now.success || (one.success === true) === (now.success === "yes"))
    .filter((one) => `${one.task} ${one.task_type}`.toLowerCase().includes(now.task.toLowerCase()));
  return now.order ? list.sort((a, b) => b.nodes - a.nodes) : list;
};

function drawList() {
  const list = matching();
  const more = list.length > PAGE ? `, the first ${PAGE} shown: search for others` : "";
  $("count").textContent = `${list.length} of ${plural(META.trees.length, "tree")}${more}`;
  $("rows").replaceChildren(
    ...list.slice(0, PAGE).map((one) =>
      h(
        "li",
        {},
        h(
          "button",
          {
            "aria-current": one.at === now.tree ? "true" : null,
            on: { click: () => (openTree(one.at), draw()) },
          },
          h("span", { class: one.success ? "good" : "bad" }, one.success ? "✓" : "✗"),
          h("span", { class: "what" }, String(one.task ?? `tree ${one.at}`), h("small", {}, ` ${one.task_type ?? ""}`)),
          h("small", {}, plural(one.nodes, "node")),
          h("b", {}, String(one.N)),
        ),
      ),
    ),
  );
}

function drawTree() {
  const one = META.trees[now.tree];
  const facts = Object.entries(one).filter(([name]) => name !== "task");
  const lines = [];
  const stack = [[nodes[0], 0]];
  while (stack.length) {
    const [node, depth] = stack.pop();
    lines.push(line(node, depth));
    if (now.open.has(node.id))
      stack.push(...[...node.children].reverse().map((child) => [child, depth + 1]));
  }
  $("reader").replaceChildren(
    h("div", { class: "top" }, h("h2", { id: "shown" }, String(one.task ?? `tree ${now.tree}`))),
    h(
      "dl",
      { class: "facts" },
      facts.map(([name, value]) => h("div", {}, h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, String(value)))),
    ),
    h("div", { class: "wide tree", id: "tree" }, lines),
  );
}

function line(node, depth) {
  const most = node.parent >= 0 && nodes[node.parent].children.every((other) => other.N <= node.N) && node.N > 0;
  const toggle = () => {
    if (!now.open.delete(node.id)) now.open.add(node.id);
    draw();
  };
  const share = node.Q === null ? 0 : (node.Q - now.low) / (now.high - now.low || 1);
  return h(
    "div",
    {
      class: `node${node.id === now.node ? " current" : ""}${node.executed === false && depth ? " idle" : ""}`,
      data: { node: node.id },
      style: { "--depth": depth },
    },
    h(
      "button",
      { class: "toggle", disabled: !node.children.length, on: { click: toggle }, "aria-label": "open or close" },
      node.children.length ? (now.open.has(node.id) ? "▾" : "▸") : "·",
    ),
    h(
      "button",
      { class: most ? "pick most" : "pick", on: { click: () => ((now.node = node.id), draw()) } },
      node.action ?? "start",
    ),
    h("span", { class: "quantity" }, h("i", {}, "N"), " ", h("b", {}, String(node.N))),
    h("span", { class: "quantity" }, h("i", {}, "Q"), " ", h("b", {}, number(node.Q))),
    h("span", { class: "bar", title: `Q from ${number(now.low)} to ${number(now.high)}` }, h("span", { class: "fill plus", style: { left: "0", width: `${100 * share}%` } })),
    node.reward ? h("span", { class: "badge" }, `r ${number(node.reward)}`) : null,
    node.success ? h("span", { class: "badge good" }, "solved") : null,
    node.terminal && !node.success ? h("span", { class: "badge" }, "ended") : null,
    node.valid === false ? h("span", { class: "badge bad" }, "not valid") : null,
    node.children.length ? h("small", {}, plural(node.children.length, "candidate")) : null,
  );
}

function drawSide() {
  const node = nodes[now.node];
  const facts = ["N", "Q", "deviation", "reward", "votes", "prior", "terminal", "truncated", "valid", "executed", "closed"];
  const rows = facts
    .filter((name) => node[name] !== null && node[name] !== undefined)
    .map((name) =>
      h("tr", {}, h("th", {}, name), h("td", {}, typeof node[name] === "number" ? number(node[name]) : String(node[name]))),
    );
  const text = (title, value) =>
    value ? h("div", { class: "text" }, h("h4", {}, title), h("pre", {}, value)) : "";
  $("side").replaceChildren(
    h("h2", {}, node.action ?? "start"),
    h("table", { id: "node" }, rows),
    text("answer", node.text),
    text("observation", node.observation),
  );
}

function draw() {
  drawList();
  drawTree();
  drawSide();
  history.replaceState(null, "", `#tree=${now.tree}&node=${now.node}`);
}

function readHash() {
  const q = new URLSearchParams(location.hash.slice(1));
  const [tree, node] = [+q.get("tree"), +q.get("node")];
  openTree(META.trees[tree] ? tree : 0);
  if (!nodes[node]) return;
  now.node = node;
  for (let up = nodes[node].parent; up >= 0; up = nodes[up].parent) now.open.add(up);
}

for (const name of ["success", "order", "task"])
  $(name).addEventListener("input", (e) => ((now[name] = e.target.value), drawList()));
$("filters").addEventListener("submit", (e) => e.preventDefault());
window.addEventListener("hashchange", () => (readHash(), draw()));
const all = META.trees.reduce((sum, one) => sum + one.nodes, 0);
const solved = META.trees.filter((one) => one.success).length;
$("title").textContent = [META.trees[0].env, "search trees"].filter(Boolean).join(", ");
$("about").textContent = [
  META.name,
  plural(META.trees.length, "tree"),
  plural(all, "node"),
  `${solved} solved`,
].join(" · ");
readHash();
draw();
