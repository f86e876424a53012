// Builds elements and formats numbers. Data of a run is always inserted as text, never as markup.

const NS = "http://www.w3.org/2000/svg";
const report = JSON.parse(document.getElementById("report").textContent);
const comparing = report.runs.length > 1;

// Builds an HTML element, e.g. `make("div.note", { title }, "text", node)`: tag and classes, then any
// number of attributes (`onclick` and the like are listeners) and children. Lists are flattened, and
// null is ignored.
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
      else if (value !== false && value != null)
        node.setAttribute(key, value === true ? "" : value);
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
