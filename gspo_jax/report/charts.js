// The charts: one SVG each, drawn at its size on the page, read together at one step.
// Everything that comes from the run is set as text, never as markup.

const NS = "http://www.w3.org/2000/svg";
const run = JSON.parse(document.getElementById("run").textContent);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

function draw(tag, attributes, parent) {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
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

const minus = (text) => text.replaceAll("-", "−");

function number(v, digits) {
  const size = Math.abs(v);
  if (size !== 0 && size < 1e-3) return minus(v.toExponential(2));
  if (size >= 1e6) return `${short(v / 1e6, 4)}M`;
  if (size >= 1e3) return Math.round(v).toLocaleString("en");
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
  if (Math.abs(value) >= 1e6) return minus(`${short(value / 1e6, 4)}M`);
  if (Math.abs(value) >= 1e4) return minus(`${short(value / 1e3, 4)}k`);
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

// --- charts

const GAP = 14; // on both sides of the line between two phases
const CYCLE = ["blue", "pink", "teal", "orange", "violet", "green", "grey", "amber"];
const charts = [];
let smoothing = 0;

function colorOf(series, index, count) {
  if (series.color === "sequence") {
    const share = count > 1 ? (100 * index) / (count - 1) : 100;
    return `color-mix(in oklab, var(--shade-to) ${share}%, var(--shade-from))`;
  }
  return `var(--${series.color === "cycle" ? CYCLE[index % CYCLE.length] : series.color})`;
}

function nearest(x, step) {
  let low = 0;
  let high = x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] < step) low = middle;
    else high = middle;
  }
  return Math.abs(x[low] - step) <= Math.abs(x[high] - step) ? low : high;
}

// A chart knows its size only on the page: build the frame now, `layout` draws into it.
function chart(figure) {
  const stack = figure.kind === "stack";
  const labels = [...new Set(figure.series.map((s) => s.label))];
  for (const s of figure.series) s.paint = colorOf(s, labels.indexOf(s.label), labels.length);
  const at = make("span", { class: "at" });
  const keys = labels.map((label) => {
    const value = make("b");
    const name = labels.length > 1 || stack || label === "mean" ? `${label} ` : "";
    const paint = figure.series.find((s) => s.label === label).paint;
    const key = make("span", { class: "key", style: `--color: ${paint}` }, name, value);
    return { label, key, value };
  });
  const total = make("b");
  const legend = make("div", { class: "legend" }, ...keys.map((k) => k.key));
  if (stack && labels.length > 1 && figure.unit !== "percent")
    legend.append(make("span", {}, "total ", total));
  const svg = document.createElementNS(NS, "svg");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", figure.title);
  const single = figure.phases.length === 1 ? figure.phases[0] : "both";
  const node = make(
    "figure",
    { class: `${single} ${figure.wide ? "wide" : ""}` },
    make("div", { class: "top" }, make("h3", {}, figure.title), at),
    figure.note ? make("p", { class: "note" }, figure.note) : null,
    legend,
    svg,
  );

  let parts = [];
  let dots = [];
  let cross;
  let y;

  function layout() {
    const width = Math.max(240, Math.round(svg.getBoundingClientRect().width));
    const height = 200;
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    const box = { top: 8, bottom: height - 22, left: 0, right: width - 8 };
    for (const s of figure.series) s.shown = stack ? s.y : smooth(s.y, smoothing);

    const domain = yDomain();
    box.top += figure.phases.length > 1 ? 18 : 0;
    y = (v) =>
      box.bottom - ((v - domain.low) / (domain.high - domain.low)) * (box.bottom - box.top);
    const names = domain.list.map((v) => tickLabel(v, domain.step, figure.unit));
    box.left = 12 + Math.max(...names.map((name) => name.length)) * 6.3;
    domain.list.forEach((v, i) => {
      draw(
        "line",
        { class: i ? "gridline" : "base", x1: box.left, x2: box.right, y1: y(v), y2: y(v) },
        svg,
      );
      draw("text", { x: box.left - 7, y: y(v) + 4, "text-anchor": "end" }, svg).textContent =
        names[i];
    });
    parts = xParts(box);
    parts.forEach((part, i) => drawSteps(part, i, box));

    if (stack) drawStack();
    else for (const s of figure.series) drawSeries(s);
    for (const mark of figure.marks) drawMark(mark, domain, box);
    cross = draw("line", { class: "cross", y1: box.top, y2: box.bottom }, svg);
    dots = stack
      ? []
      : figure.series.map((s) =>
          draw("circle", { class: "dot", r: 4, style: `fill: ${s.paint}` }, svg),
        );
  }

  function yDomain() {
    let values = figure.series
      .flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || [])])
      .filter((v) => v != null);
    if (stack) values = totals();
    let low = values.reduce((a, b) => Math.min(a, b), Infinity);
    let high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!values.length) [low, high] = [0, 1];
    if (figure.zero || stack) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
    if (figure.unit === "percent" && low >= 0 && high > 0.5) [low, high] = [0, Math.max(1, high)];
    if (high - low <= 1e-9 * Math.abs(high)) {
      const room = Math.abs(high) * 0.1 || 1;
      [low, high] = [low === 0 ? 0 : low - room, high + room];
    }
    const { step } = ticks(low, high, 4);
    low = Math.floor(low / step + 1e-6) * step;
    high = Math.ceil(high / step - 1e-6) * step;
    return { low, high, ...ticks(low, high, Math.round((high - low) / step)) };
  }

  function totals() {
    const x = figure.series[0].x;
    return x.map((_, i) => figure.series.reduce((sum, s) => sum + (s.y[i] || 0), 0));
  }

  // The cold start and GSPO side by side, each with its own steps.
  function xParts(box) {
    const shares = figure.phases.length > 1 ? [0.3, 0.7] : [1];
    let left = box.left;
    return figure.phases.map((phase, i) => {
      const { from, to, title } = run.phases[phase];
      const right = left + shares[i] * (box.right - box.left);
      const part = {
        phase,
        title,
        from,
        to,
        left: left + (i ? GAP : 4),
        right: i < shares.length - 1 ? right - GAP : right - 4,
      };
      part.x = (step) =>
        part.left + (to > from ? (step - from) / (to - from) : 0.5) * (part.right - part.left);
      left = right;
      return part;
    });
  }

  function drawSteps(part, index, box) {
    const { list } = stepTicks(part.from, part.to, Math.floor((part.right - part.left) / 56));
    for (const step of list) {
      const x = part.x(step);
      const anchor = x > box.right - 14 ? "end" : "middle";
      draw(
        "text",
        { x: anchor === "end" ? box.right : x, y: box.bottom + 16, "text-anchor": anchor },
        svg,
      ).textContent = tickLabel(step, 1);
    }
    if (figure.phases.length < 2) return;
    if (index)
      draw(
        "line",
        { class: "division", x1: part.left - GAP, x2: part.left - GAP, y1: 4, y2: box.bottom },
        svg,
      );
    const color = part.phase === "sft" ? "amber" : "blue";
    const label = draw(
      "text",
      { class: "part", x: part.left, y: 13, style: `fill: var(--${color})` },
      svg,
    );
    label.textContent = part.title;
  }

  function partOf(s) {
    return parts.find((part) => part.phase === s.phase);
  }

  function path(s, values) {
    const { x } = partOf(s);
    let pen = "M";
    let d = "";
    values.forEach((v, i) => {
      if (v == null) pen = "M";
      else {
        d += `${pen}${x(s.x[i]).toFixed(1)} ${y(v).toFixed(1)}`;
        pen = "L";
      }
    });
    return d;
  }

  function drawSeries(s) {
    const style = `stroke: ${s.paint}`;
    if (s.low) {
      const known = s.x.map((_, i) => i).filter((i) => s.low[i] != null && s.high[i] != null);
      const corner = (values) => (i) =>
        `${partOf(s).x(s.x[i]).toFixed(1)} ${y(values[i]).toFixed(1)}`;
      const outline = [...known.map(corner(s.high)), ...known.reverse().map(corner(s.low))];
      draw("path", { class: "band", d: `M${outline.join("L")}Z`, style: `fill: ${s.paint}` }, svg);
    }
    if (smoothing) draw("path", { class: "curve raw", d: path(s, s.y), style }, svg);
    draw("path", { class: "curve", d: path(s, s.shown), style }, svg);
    // Few measurements: show where they are.
    if (s.x.length <= 40) {
      s.x.forEach((step, i) => {
        if (s.shown[i] == null) return;
        draw(
          "circle",
          { cx: partOf(s).x(step), cy: y(s.shown[i]), r: 2.4, style: `fill: ${s.paint}` },
          svg,
        );
      });
    }
  }

  // A level that means something, such as a clip bound.
  function drawMark({ at: level, label }, domain, box) {
    if (level < domain.low || level > domain.high) return;
    const line = { class: "division", x1: box.left, x2: box.right, y1: y(level), y2: y(level) };
    draw("line", line, svg);
    const place = { x: box.right, y: y(level) - 4, "text-anchor": "end", class: "halo" };
    draw("text", place, svg).textContent = label;
  }

  function drawStack() {
    const steps = figure.series[0].x;
    const part = parts[0];
    const base = steps.map(() => 0);
    const wide =
      ((part.right - part.left) / Math.max(1, steps.length)) * (steps.length > 60 ? 1.02 : 0.8);
    for (const s of figure.series) {
      let d = "";
      s.y.forEach((v, i) => {
        if (!v) return;
        const left = Math.max(part.left - 4, part.x(steps[i]) - wide / 2);
        d += `M${left.toFixed(1)} ${y(base[i]).toFixed(1)}h${wide.toFixed(2)}V${y(base[i] + v).toFixed(1)}h${(-wide).toFixed(2)}z`;
        base[i] += v;
      });
      draw("path", { class: "bar", d, style: `fill: ${s.paint}` }, svg);
    }
  }

  // Reads the chart at a step of a phase; without one, at the end.
  function show(phase, step) {
    if (!cross || (phase && !figure.phases.includes(phase))) return;
    const reading = phase || figure.phases[figure.phases.length - 1];
    let place = null;
    let sum = 0;
    for (const k of keys) k.value.textContent = "–";
    figure.series.forEach((s, index) => {
      const dot = dots[index];
      if (dot) dot.style.visibility = "hidden";
      if (s.phase !== reading) return;
      const i = step == null ? s.x.length - 1 : nearest(s.x, step);
      let text = format(s.shown[i], figure.unit);
      if (s.low && s.low[i] != null)
        text += `  (${format(s.low[i], figure.unit)} – ${format(s.high[i], figure.unit)})`;
      keys.find((k) => k.label === s.label).value.textContent = text;
      sum += s.shown[i] || 0;
      if (place == null || Math.abs(s.x[i] - step) < Math.abs(place - step)) place = s.x[i];
      if (step == null || !dot || s.shown[i] == null) return;
      dot.setAttribute("cx", partOf(s).x(s.x[i]));
      dot.setAttribute("cy", y(s.shown[i]));
      dot.style.visibility = "visible";
    });
    total.textContent = format(sum, figure.unit);
    const name = figure.phases.length > 1 ? `${run.phases[reading].title} ` : "";
    at.textContent = place == null ? "" : `${name}step ${place.toLocaleString("en")}`;
    cross.style.visibility = step == null ? "hidden" : "visible";
    if (step == null || place == null) return;
    const x = parts.find((part) => part.phase === reading).x(place);
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
  }

  function point(event) {
    const box = svg.getBoundingClientRect();
    const x = event.clientX - box.left;
    const part = parts.find((p) => x <= p.right + GAP) || parts[parts.length - 1];
    const share = Math.min(1, Math.max(0, (x - part.left) / (part.right - part.left)));
    readAll(part.phase, part.from + share * (part.to - part.from));
  }
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", () => readAll(null, null));
  charts.push({ node, layout, show });
  return node;
}

let pending = 0;
function readAll(phase, step) {
  cancelAnimationFrame(pending);
  pending = requestAnimationFrame(() => {
    // What another phase showed goes back to its end.
    for (const c of charts) c.show(null, null);
    if (phase) for (const c of charts) c.show(phase, step);
  });
}

function layoutAll() {
  for (const c of charts) c.layout();
  readAll(null, null);
}
