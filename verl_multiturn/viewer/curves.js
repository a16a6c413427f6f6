// The run's curves, as inline SVG at the size they are seen in.

const CURVES = [
  ["success", "success, 95 % Wilson", [0, 1]],
  ["return", "return, mean", null],
  ["valid", "valid turns", [0, 1]],
];
const H = 132,
  PAD = { left: 40, right: 10, top: 8, bottom: 20 };

const splitClass = (split) => (split === "train" ? "train" : split === "val" ? "val" : "other");

function metricCurve(name) {
  const values = META.metrics.values[name] || [];
  const points = META.metrics.steps.map((step, k) => [step, values[k], null, null]);
  return { [name.startsWith("val") ? "val" : "train"]: points.filter((point) => point[1] !== null) };
}

function drawCurves(state, go, pick) {
  const charts = CURVES.map(([key, label, range]) => [label, META.curves[key] || {}, range]);
  const names = Object.keys(META.metrics.values);
  const figures = charts.map(([label, curve, range]) => [h("span", {}, label), curve, range]);
  if (names.length) {
    const select = h(
      "select",
      { id: "metric", "aria-label": "metric", on: { change: (e) => pick(e.target.value) } },
      names.map((name) => h("option", { value: name, selected: name === state.metric }, name)),
    );
    figures.push([select, metricCurve(state.metric), null]);
  }
  $("charts").replaceChildren(
    ...figures.map(([title]) => h("figure", {}, h("figcaption", {}, title, h("output", {})))),
  );
  [...$("charts").children].forEach((figure, k) => chart(figure, figures[k][1], figures[k][2], state, go));
}

function chart(figure, curve, range, state, go) {
  const splits = Object.keys(curve).filter((split) => curve[split].length);
  const output = figure.querySelector("output");
  if (!splits.length) return void figure.append(h("p", { class: "absent" }, "not recorded"));
  const all = splits.flatMap((split) => curve[split]);
  const W = Math.max(160, figure.clientWidth);
  let [x0, x1] = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))];
  let [y0, y1] = range || extent(all);
  if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
  const X = (x) => PAD.left + ((x - x0) / (x1 - x0)) * (W - PAD.left - PAD.right);
  const Y = (y) =>
    H - PAD.bottom - ((Math.min(y1, Math.max(y0, y)) - y0) / (y1 - y0)) * (H - PAD.top - PAD.bottom);
  const svg = s("svg", { width: W, height: H, viewBox: `0 0 ${W} ${H}`, role: "img" });
  for (const y of [y0, (y0 + y1) / 2, y1]) {
    svg.append(s("line", { class: "grid", x1: PAD.left, x2: W - PAD.right, y1: Y(y), y2: Y(y) }));
    svg.append(s("text", { x: PAD.left - 5, y: Y(y) + 4, "text-anchor": "end" }, number(y)));
  }
  const middle = Math.round((x0 + x1) / 2);
  for (const [x, anchor] of [
    [x0, "start"],
    [middle, "middle"],
    [x1, "end"],
  ])
    svg.append(
      s("text", { x: X(x), y: H - 5, "text-anchor": anchor }, anchor === "middle" ? `step ${x}` : String(x)),
    );
  const cursor = s("line", { class: "cursor", y1: PAD.top, y2: H - PAD.bottom });
  svg.append(cursor);
  for (const split of splits) svg.append(...series(curve[split], splitClass(split), X, Y));
  figure.append(svg);
  const show = (step) => {
    cursor.setAttribute("x1", X(step));
    cursor.setAttribute("x2", X(step));
    output.replaceChildren(
      ...splits.map((split) =>
        readout(
          split,
          curve[split].find((p) => p[0] === step),
        ),
      ),
    );
  };
  const now = META.steps[state.at].step;
  const stepAt = (event) => {
    const x =
      x0 +
      ((event.clientX - svg.getBoundingClientRect().left - PAD.left) / (W - PAD.left - PAD.right)) *
        (x1 - x0);
    return all.reduce((best, p) => (Math.abs(p[0] - x) < Math.abs(best - x) ? p[0] : best), all[0][0]);
  };
  svg.addEventListener("pointermove", (event) => show(stepAt(event)));
  svg.addEventListener("pointerleave", () => show(now));
  svg.addEventListener("click", (event) => go(stepAt(event)));
  show(Math.min(x1, Math.max(x0, now)));
}

function extent(points) {
  const values = points.flatMap((p) => [p[1], p[2] ?? p[1], p[3] ?? p[1]]);
  const [low, high] = [values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))];
  return low === high ? [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2] : [low, high];
}

// Many points (training): a line in its band. Few (validation): points with bars.
function series(points, kind, X, Y) {
  const whole = points.filter((p) => p[2] !== null && p[3] !== null);
  const path = (list, y) => list.map((p) => `${X(p[0]).toFixed(1)},${Y(p[y]).toFixed(1)}`).join(" ");
  const parts = [];
  if (kind === "val") {
    for (const p of whole)
      parts.push(s("line", { class: `bars ${kind}`, x1: X(p[0]), x2: X(p[0]), y1: Y(p[2]), y2: Y(p[3]) }));
  } else if (whole.length > 1) {
    parts.push(
      s("polygon", { class: `band ${kind}`, points: `${path(whole, 3)} ${path([...whole].reverse(), 2)}` }),
    );
  }
  parts.push(s("polyline", { class: `line ${kind}`, points: path(points, 1) }));
  if (kind === "val" || points.length === 1)
    for (const p of points) parts.push(s("circle", { class: `dot ${kind}`, cx: X(p[0]), cy: Y(p[1]), r: 3 }));
  return parts;
}

function readout(split, point) {
  const interval = point && point[2] !== null ? ` (${number(point[2])} to ${number(point[3])})` : "";
  return h(
    "div",
    {},
    h("span", { class: `key ${splitClass(split)}` }, `${split} ${point ? number(point[1]) : "–"}`),
    h("small", {}, interval),
  );
}
