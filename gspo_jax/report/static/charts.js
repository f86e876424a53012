// The charts: one SVG each, drawn at its size on the page, read together at one step.

const GAP = 14; // on both sides of the line between two phases
const CYCLE = ["blue", "pink", "teal", "orange", "violet", "green", "grey", "amber"];
const RUNS = ["blue", "orange", "teal", "pink", "violet", "green", "amber", "grey"];
const DASHES = ["", "6 3", "1.5 3", "9 3 1.5 3", "3 2"];
const SHOWN_OF_SEQUENCE = 3; // of more lines a comparison names the first and the last
const charts = [];
let smoothing = 0;

const runColor = (index) => `var(--${RUNS[index % RUNS.length]})`;

// Of one run each line has its colour. Of several, the colour tells the run and the dashes, or in a
// sequence the shade, the line.
function paintOf(series, index, count) {
  const share = count > 1 ? (100 * index) / (count - 1) : 100;
  if (comparing) {
    const color = runColor(series.run);
    return series.color === "sequence"
      ? `color-mix(in oklab, ${color} ${30 + 0.7 * share}%, var(--surface))`
      : color;
  }
  if (series.color === "sequence")
    return `color-mix(in oklab, var(--shade-to) ${share}%, var(--shade-from))`;
  return ownPaint(series, index);
}

const ownPaint = (series, index) =>
  `var(--${series.color === "cycle" ? CYCLE[index % CYCLE.length] : series.color})`;

function dashOf(series, index) {
  return comparing && series.color !== "sequence" ? DASHES[index % DASHES.length] : "";
}

// The names of the curves with what they read; in a comparison, a line of them per run.
function legendOf(figure, labels, stack) {
  const runs = [...new Set(figure.series.map((s) => s.run))];
  const sequence = figure.series[0].color === "sequence" && labels.length > SHOWN_OF_SEQUENCE;
  const ends = [labels[0], labels[labels.length - 1]];
  const keys = [];
  const rows = runs.map((run) => {
    const row = make("div.legend");
    const name = report.runs[run].name;
    const lines = labels.filter((label) => !comparing || !sequence || ends.includes(label));
    if (comparing && labels.length > 1)
      row.append(make("span.of", { style: `--color: ${runColor(run)}` }, name));
    for (const label of lines) {
      const series = figure.series.find((s) => s.label === label && s.run === run);
      if (!series) continue;
      const value = make("b");
      const named = labels.length > 1 || stack || label === "mean";
      const shown = comparing && labels.length === 1 ? name : named ? label : "";
      const style = `--color: ${series.paint}`;
      const sign = comparing && !stack && labels.length > 1 ? sample(series) : null;
      const kind = sign ? "span.key.drawn" : "span.key";
      keys.push({ run, label, value });
      row.append(make(kind, { style }, sign, shown ? `${shown} ` : "", value));
    }
    return row;
  });
  return { rows, keys };
}

function sample(series) {
  const svg = draw("svg", { viewBox: "0 0 24 8" }, document.createDocumentFragment());
  const line = { class: "curve", x1: 0, x2: 24, y1: 4, y2: 4, "stroke-dasharray": series.dash };
  draw("line", { ...line, style: `stroke: ${series.paint}` }, svg);
  return svg;
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
  const labels = figure.labels || [...new Set(figure.series.map((s) => s.label))];
  for (const s of figure.series) {
    const index = labels.indexOf(s.label);
    s.paint = stack ? ownPaint(s, index) : paintOf(s, index, labels.length);
    s.dash = stack ? "" : dashOf(s, index);
  }
  const at = make("span.at");
  const { rows, keys } = legendOf(figure, labels, stack);
  const total = make("b");
  if (stack && labels.length > 1 && figure.unit !== "percent")
    rows[0].append(make("span", "total ", total));
  const single = figure.phases.length === 1 ? figure.phases[0] : "both";
  const node = make(
    figure.wide ? `figure.${single}.wide` : `figure.${single}`,
    make("div.top", make("h3", figure.title), at),
    figure.note ? make("p.note", figure.note) : null,
    rows,
  );
  const svg = draw("svg", { role: "img", "aria-label": figure.title }, node);
  const add = (tag, attributes, text) => draw(tag, attributes, svg, text);

  let parts = [];
  let dots = [];
  let cross;
  let y;
  let width;

  function measure() {
    width = Math.max(240, Math.round(svg.getBoundingClientRect().width));
  }

  function layout() {
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
      across(i ? "gridline" : "base", v, box);
      add("text", { x: box.left - 7, y: y(v) + 4, "text-anchor": "end" }, names[i]);
    });
    parts = xParts(box);
    parts.forEach((part, i) => drawSteps(part, i, box));

    if (stack) drawStack();
    else for (const s of figure.series) drawSeries(s);
    for (const mark of figure.marks) drawMark(mark, domain, box);
    cross = add("line", { class: "cross", y1: box.top, y2: box.bottom });
    const dot = (s) => add("circle", { class: "dot", r: 4, style: `fill: ${s.paint}` });
    dots = stack ? [] : figure.series.map(dot);
  }

  const across = (kind, v, box) =>
    add("line", { class: kind, x1: box.left, x2: box.right, y1: y(v), y2: y(v) });

  function yDomain() {
    let values = figure.series
      .flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || [])])
      .filter((v) => v != null);
    if (stack) values = figure.top == null ? totals() : [figure.top];
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
      const { from, to, title } = report.phases[phase];
      const right = left + shares[i] * (box.right - box.left);
      const [first, last] = [left + (i ? GAP : 4), right - (i < shares.length - 1 ? GAP : 4)];
      const x = (step) => first + (to > from ? (step - from) / (to - from) : 0.5) * (last - first);
      left = right;
      return { phase, title, from, to, left: first, right: last, x };
    });
  }

  function drawSteps(part, index, box) {
    const { list } = stepTicks(part.from, part.to, Math.floor((part.right - part.left) / 56));
    for (const step of list) {
      const atEnd = part.x(step) > box.right - 14;
      const place = { x: atEnd ? box.right : part.x(step), y: box.bottom + 16 };
      add("text", { ...place, "text-anchor": atEnd ? "end" : "middle" }, tickLabel(step, 1));
    }
    if (figure.phases.length < 2) return;
    const x = part.left - GAP;
    if (index) add("line", { class: "division", x1: x, x2: x, y1: 4, y2: box.bottom });
    const style = `fill: var(--${part.phase === "sft" ? "amber" : "blue"})`;
    add("text", { class: "part", x: part.left, y: 13, style }, part.title);
  }

  const xOf = (s, i) => parts.find((part) => part.phase === s.phase).x(s.x[i]);
  const placeOf = (s, i, values) => `${xOf(s, i).toFixed(1)} ${y(values[i]).toFixed(1)}`;

  function path(s, values) {
    const known = (i) => values[i] != null;
    const pen = (i) => (i && known(i - 1) ? "L" : "M");
    return values.map((_, i) => (known(i) ? pen(i) + placeOf(s, i, values) : "")).join("");
  }

  function drawSeries(s) {
    const style = `stroke: ${s.paint}; stroke-dasharray: ${s.dash || "none"}`;
    const fill = { style: `fill: ${s.paint}` };
    if (s.low) {
      const known = [...s.x.keys()].filter((i) => s.low[i] != null && s.high[i] != null);
      const outline = known.map((i) => placeOf(s, i, s.high));
      outline.push(...known.reverse().map((i) => placeOf(s, i, s.low)));
      add("path", { class: "band", d: `M${outline.join("L")}Z`, ...fill });
    }
    if (smoothing) add("path", { class: "curve raw", d: path(s, s.y), style });
    add("path", { class: "curve", d: path(s, s.shown), style });
    if (s.x.length > (comparing ? 15 : 40)) return;
    s.shown.forEach((v, i) => {
      // Few measurements: show where they are.
      if (v != null) add("circle", { cx: xOf(s, i), cy: y(v), r: 2.4, ...fill });
    });
  }

  // A level that means something, such as a clip bound.
  function drawMark({ at: level, label }, domain, box) {
    if (level < domain.low || level > domain.high) return;
    across("division", level, box);
    const place = { x: box.right, y: y(level) - 4, "text-anchor": "end", class: "halo" };
    add("text", place, label);
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
      add("path", { class: "bar", d, style: `fill: ${s.paint}` });
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
      const steps = report.runs[s.run].phases[s.phase];
      // A run that was shorter than another has nothing to read beyond its end.
      if (step != null && (step > steps.to + 0.5 || step < steps.from - 0.5)) return;
      const i = step == null ? s.x.length - 1 : nearest(s.x, step);
      let text = format(s.shown[i], figure.unit);
      if (s.low && s.low[i] != null)
        text += `  (${format(s.low[i], figure.unit)} – ${format(s.high[i], figure.unit)})`;
      const key = keys.find((k) => k.label === s.label && k.run === s.run);
      if (key) key.value.textContent = text;
      sum += s.shown[i] || 0;
      if (place == null || Math.abs(s.x[i] - step) < Math.abs(place - step)) place = s.x[i];
      if (step == null || !dot || s.shown[i] == null) return;
      dot.setAttribute("cx", xOf(s, i));
      dot.setAttribute("cy", y(s.shown[i]));
      dot.style.visibility = "visible";
    });
    total.textContent = format(sum, figure.unit);
    const name = figure.phases.length > 1 ? `${report.phases[reading].title} ` : "";
    at.textContent = place == null ? "" : `${name}step ${place.toLocaleString("en")}`;
    if (step == null && comparing) at.textContent = `${name}at the end`;
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
  charts.push({ node, measure, layout, show });
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
  // All sizes first: one asked for after a drawing makes the browser lay out the page again.
  for (const c of charts) c.measure();
  for (const c of charts) c.layout();
  readAll(null, null);
}
