"use strict";
// Building the page's elements, and writing numbers. Recorded texts only ever become text nodes.

const $ = (id) => document.getElementById(id);
const META = JSON.parse($("meta").textContent);

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
