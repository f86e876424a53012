// Elements and numbers. Everything that comes from a run is set as text, never as markup.

const NS = "http://www.w3.org/2000/svg";
const report = JSON.parse(document.getElementById("report").textContent);
const comparing = report.runs.length > 1;

// `make("div.note", { title }, "text", node)`: classes, attributes (functions of `on...` listen),
// children in any number, or lists of them; null stands for nothing.
function make(name, ...parts) {
  const [tag, ...classes] = name.split(".");
  const node = document.createElement(tag);
  if (classes.length) node.className = classes.join(" ");
  for (const part of parts.flat()) {
    if (part == null) continue;
    if (typeof part !== "object" || part instanceof Node) {
      node.append(part);
      continue;
    }
    for (const [key, value] of Object.entries(part)) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== false && value != null) node.setAttribute(key, value === true ? "" : value);
    }
  }
  return node;
}

function draw(tag, attributes, parent, text = "") {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  parent.append(node);
  return node;
}

// --- numbers

const short = (v, digits) => String(Number(v.toPrecision(digits)));

function format(v, unit = "number") {
  if (v == null) return "–";
  if (unit === "percent")
    return `${minus((100 * v).toFixed(v === 0 || Math.abs(v) >= 0.01 ? 1 : 2))}%`;
  if (unit === "ratio") return v.toFixed(5);
  return unit === "seconds" ? `${number(v, 3)} s` : number(v, 4);
}

const LARGE = [
  [1e15, "P"],
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

const minus = (text) => text.replaceAll("-", "−");

function number(v, digits) {
  const size = Math.abs(v);
  if (size !== 0 && size < 1e-3) return minus(v.toExponential(2));
  const large = LARGE.find(([unit]) => size >= unit);
  if (large && large[0] >= 1e6) return minus(short(v / large[0], 4) + large[1]);
  if (large) return minus(Math.round(v).toLocaleString("en"));
  return minus(short(v, digits));
}

// As many decimals as tell one tick from the next.
function tickLabel(v, step, unit) {
  const scale = unit === "percent" ? 100 : 1;
  const value = v * scale;
  const suffix = unit === "percent" ? "%" : "";
  if (Math.abs(value) < step * scale * 1e-6) return `0${suffix}`;
  let decimals = 0;
  for (let size = step * scale; decimals < 9; size *= 10, decimals++) {
    if (size > 0.9 && Math.abs(size - Math.round(size)) < 1e-3 * size) break;
  }
  if (decimals > 4 && unit !== "ratio") return minus(Number(value.toPrecision(3)).toExponential());
  const large = LARGE.find(([unit]) => Math.abs(value) >= unit);
  if (Math.abs(value) >= 1e4) return minus(short(value / large[0], 4) + large[1]);
  return minus(value.toFixed(decimals)) + suffix;
}

function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= raw * 0.999) * power;
  const list = [];
  for (let i = Math.ceil(low / step - 1e-6); i * step <= high + step * 1e-6; i++)
    list.push(i * step);
  return { step, list };
}

function stepTicks(low, high, count) {
  const found = ticks(low, Math.max(high, low + 1), Math.max(1, count));
  if (found.step < 1)
    return { step: 1, list: [low, high].filter((v, i, all) => all.indexOf(v) === i) };
  return { step: found.step, list: found.list.filter(Number.isInteger) };
}

function smooth(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let mass = 0;
  return values.map((v) => {
    if (v == null) return null;
    sum = weight * sum + (1 - weight) * v;
    mass = weight * mass + (1 - weight);
    return sum / mass;
  });
}
