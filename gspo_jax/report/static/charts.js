// The charts, one SVG each. The pointer in one of them shows the values of all charts at its step,
// which is called reading.

const GAP = 14; // pixels on both sides of the line between two phases
const CYCLE = ["blue", "pink", "teal", "orange", "violet", "green", "grey", "amber"];
const RUNS = ["blue", "orange", "teal", "pink", "violet", "green", "amber", "grey"];
const DASHES = ["", "6 3", "1.5 3", "9 3 1.5 3", "3 2"];
const SHOWN_OF_SEQUENCE = 3; // with more lines, the legend of a comparison has the first and the last
const charts = [];
let smoothing = 0.02; // width of the smoothing, as a share of the curve

const runColor = (index) => `var(--${RUNS[index % RUNS.length]})`;

// Returns the colour of a curve. In a comparison the colour is that of the run, and curves of a run
// differ by their dashes, or in a sequence by the shade.
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

// Builds the legend: names of the curves and, when reading, their values. A comparison has a row for
// each run.
function legendOf(drawn, labels, stack) {
  const runs = [...new Set(drawn.map((s) => s.run))];
  const sequence = drawn[0].color === "sequence" && labels.length > SHOWN_OF_SEQUENCE;
  const ends = [labels[0], labels[labels.length - 1]];
  const keys = [];
  const rows = runs.map((run) => {
    const row = make("div.legend");
    const name = report.runs[run].name;
    const lines = labels.filter((label) => !comparing || !sequence || ends.includes(label));
    if (comparing && labels.length > 1)
      row.append(make("span.of", { style: `--color: ${runColor(run)}` }, name));
    for (const label of lines) {
      const series = drawn.find((s) => s.label === label && s.run === run);
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

// Formats curves with a single value as text: "no verdict 0%".
function constantsOf(figure, series, named) {
  const groups = Object.values(Object.groupBy(series, (s) => `${s.phase} ${s.key}`));
  return groups.map((own) => {
    const texts = own.map((s) => format(s.constant, figure.unit));
    const same = texts.every((text) => text === texts[0]);
    const phases = new Set(series.map((s) => s.phase)).size > 1;
    const phase = phases ? ` (${report.phases[own[0].phase].title})` : "";
    const value = same
      ? texts[0]
      : own.map((s, i) => `${report.runs[s.run].name} ${texts[i]}`).join(", ");
    const steps = own.length === 1 && own[0].count === 1 ? ` at step ${own[0].x[0]}` : "";
    return make("span.constant", named(own[0]) + phase, " ", make("b", value), steps);
  });
}

// Builds a chart's frame. `layout` draws into it later, since its size is known on the page only.
function chart(figure) {
  const stack = figure.kind === "stack";
  const drawn = figure.series.filter((s) => !("constant" in s));
  const phases = figure.phases.filter((phase) => drawn.some((s) => s.phase === phase));
  const labels = figure.labels || [...new Set(figure.series.map((s) => s.label))];
  for (const s of drawn) {
    const index = labels.indexOf(s.label);
    s.paint = stack ? ownPaint(s, index) : paintOf(s, index, labels.length);
    s.dash = stack ? "" : dashOf(s, index);
  }
  const at = make("span.at");
  const shownLabels = labels.filter((label) => drawn.some((s) => s.label === label));
  const { rows, keys } = legendOf(drawn, shownLabels, stack);
  const total = make("b");
  if (stack && labels.length > 1 && figure.unit !== "percent")
    rows[0].append(make("span", "total ", total));
  const flat = figure.series.filter((s) => "constant" in s);
  const single = phases.length === 1 ? phases[0] : "both";
  const more = make("span");
  const node = make(
    figure.wide ? `figure.${single}.wide` : `figure.${single}`,
    make("div.top", make("h3", figure.title), at),
    make("p.note", figure.note, more),
    rows,
    flat.length
      ? make(
          "p.constants",
          "throughout: ",
          constantsOf(figure, flat, (s) => s.label),
        )
      : null,
  );
  const svg = draw("svg", { role: "img", tabindex: 0, "aria-label": figure.title }, node);
  const add = (tag, attributes, text) => draw(tag, attributes, svg, text);

  let parts = [];
  let dots = [];
  let cross;
  let y;
  let width;
  let height;

  function measure() {
    width = Math.max(240, Math.round(svg.getBoundingClientRect().width));
    height = node.closest(".compact") ? 128 : 200;
  }

  function layout() {
    svg.replaceChildren();
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    const box = { top: 8, bottom: height - 22, left: 0, right: width - 8 };
    for (const s of drawn) s.shown = stack ? s.y : smooth(s.y, smoothing);

    const domain = yDomain();
    const { names } = domain;
    more.textContent = [figure.note && domain.note ? " · " : "", domain.note].join("");
    box.top += phases.length > 1 ? 18 : 0;
    y = (v) => box.bottom - domain.place(v) * (box.bottom - box.top);
    box.left = 12 + Math.max(...names.map((name) => name.length)) * 6.3;
    domain.list.forEach((v, i) => {
      across(i ? "gridline" : "base", v, box);
      add("text", { x: box.left - 7, y: y(v) + 4, "text-anchor": "end" }, names[i]);
    });
    parts = xParts(box);
    parts.forEach((part, i) => drawSteps(part, i, box));

    if (stack) drawStack();
    else for (const s of drawn) drawSeries(s);
    for (const mark of figure.marks) drawMark(mark, domain, box);
    cross = add("line", { class: "cross", y1: box.top, y2: box.bottom });
    const dot = (s) => add("circle", { class: "dot", r: 4, style: `fill: ${s.paint}` });
    dots = stack ? [] : drawn.map(dot);
  }

  const across = (kind, v, box) =>
    add("line", { class: kind, x1: box.left, x2: box.right, y1: y(v), y2: y(v) });

  function yDomain() {
    if (stack) return stackAxis();
    const known = (s) => [...s.y, ...(s.low || []), ...(s.high || [])];
    const values = drawn.flatMap(known).filter((v) => v != null);
    return figure.log ? logAxis(values, figure) : linearAxis(values, figure);
  }

  // A bar far above the others, such as a step that compiles, is cut off; a note has its size.
  function stackAxis() {
    const axis = linearAxis([figure.top], { unit: figure.unit, zero: true });
    const note = `cut off at the top: up to ${format(figure.largest, figure.unit)}`;
    const place = (v) => Math.min(1, axis.place(v));
    return { ...axis, place, note: figure.largest > 1.001 * axis.high ? note : "" };
  }

  // Divides the width between phases, each with its own steps.
  function xParts(box) {
    const shares = phases.length < 2 ? [1] : phases[1] === "eval" ? [0.8, 0.2] : [0.3, 0.7];
    let left = box.left;
    return phases.map((phase, i) => {
      const { from, to, title } = report.phases[phase];
      const right = left + shares[i] * (box.right - box.left);
      const [first, last] = [left + (i ? GAP : 4), right - (i < shares.length - 1 ? GAP : 4)];
      const inset = stack ? ((last - first) * stride(phase)) / (to - from + stride(phase)) / 2 : 0;
      const [start, end] = [first + inset, last - inset];
      const x = (step) => start + (to > from ? (step - from) / (to - from) : 0.5) * (end - start);
      const share = (place) => Math.min(1, Math.max(0, (place - start) / (end - start || 1)));
      const step = (place) => from + share(place) * (to - from);
      left = right;
      return { phase, title, from, to, left: first, right: last, x, step };
    });
  }

  // Returns the mean number of steps between bars: half of it is left free at both ends.
  function stride(phase) {
    const steps = stepsOf(drawn.filter((s) => s.phase === phase));
    return steps.length > 1 ? (steps[steps.length - 1] - steps[0]) / (steps.length - 1) : 1;
  }

  const stepsOf = (series) => [...new Set(series.flatMap((s) => s.x))].sort((a, b) => a - b);

  function drawSteps(part, index, box) {
    const { list } = stepTicks(part.from, part.to, Math.floor((part.right - part.left) / 56));
    for (const step of list) {
      const atEnd = part.x(step) > box.right - 14;
      const place = { x: atEnd ? box.right : part.x(step), y: box.bottom + 16 };
      add("text", { ...place, "text-anchor": atEnd ? "end" : "middle" }, tickLabel(step, 1));
    }
    if (phases.length < 2) return;
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
    if (s.shown !== s.y) add("path", { class: "curve raw", d: path(s, s.y), style });
    add("path", { class: "curve", d: path(s, s.shown), style });
    if (s.x.length > (comparing ? 15 : 30)) return;
    s.y.forEach((v, i) => {
      // The points of curves with few measurements are marked.
      if (v != null) add("circle", { cx: xOf(s, i), cy: y(v), r: 2.4, ...fill });
    });
  }

  // Draws a line at a value with a label, such as a clip bound.
  function drawMark({ at: level, label }, domain, box) {
    if (level < domain.low || level > domain.high) return;
    across("division", level, box);
    const beside = level < 1 ? 12 : -4; // labels below and above, since bounds may be close
    const place = { x: box.right, y: y(level) + beside, "text-anchor": "end", class: "halo" };
    add("text", place, label);
  }

  // Draws stacked bars for each phase.
  function drawStack() {
    for (const part of parts) {
      const stacked = drawn.filter((s) => s.phase === part.phase);
      if (stacked.length) stackPhase(part, stacked);
    }
  }

  function stackPhase(part, stacked) {
    const steps = stepsOf(stacked);
    const places = steps.map(part.x);
    const apart = (places[places.length - 1] - places[0]) / (places.length - 1);
    const wide = (apart || 24) * (places.length > 60 ? 1.02 : 0.8);
    // A bar ends at most halfway to its neighbour.
    const half = (i, other) => (other in places ? Math.abs(places[i] - places[other]) : wide) / 2;
    const edges = new Map(
      steps.map((step, i) => [step, [i - 1, i + 1].map((other) => Math.min(wide / 2, half(i, other)))]),
    );
    const tops = new Map();
    for (const s of stacked) {
      let d = "";
      s.y.forEach((v, i) => {
        if (!v) return;
        const x = part.x(s.x[i]);
        const [left, right] = [x - edges.get(s.x[i])[0], x + edges.get(s.x[i])[1]];
        const base = tops.get(s.x[i]) || 0;
        tops.set(s.x[i], base + v);
        d += `M${left.toFixed(1)} ${y(base).toFixed(1)}H${right.toFixed(1)}V${y(base + v).toFixed(1)}H${left.toFixed(1)}z`;
      });
      add("path", { class: "bar", d, style: `fill: ${s.paint}` });
    }
  }

  // Shows the values at a step of a phase; null for the values at the end.
  function show(phase, step) {
    if (!cross || (phase && !phases.includes(phase))) return;
    const part = phase || phases[phases.length - 1];
    let place = null;
    let sum = 0;
    for (const k of keys) k.value.textContent = "–";
    drawn.forEach((s, index) => {
      const dot = dots[index];
      if (dot) dot.style.visibility = "hidden";
      const ends = drawn.filter((o) => o.run === s.run && o.label === s.label);
      if (phase || stack ? s.phase !== part : s !== ends[ends.length - 1]) return;
      const steps = report.runs[s.run].phases[s.phase];
      // A shorter run has no values beyond its end.
      if (step != null && (step > steps.to + 0.5 || step < steps.from - 0.5)) return;
      const i = step == null ? s.x.length - 1 : nearest(s.x, step);
      let text = format(s.y[i], figure.unit); // the measured value, not the smoothed one
      if (s.low && s.low[i] != null)
        text += `  (${format(s.low[i], figure.unit)} – ${format(s.high[i], figure.unit)})`;
      const key = keys.find((k) => k.label === s.label && k.run === s.run);
      if (key) key.value.textContent = text;
      sum += s.y[i] || 0;
      if (place == null || Math.abs(s.x[i] - step) < Math.abs(place - step)) place = s.x[i];
      if (step == null || !dot || s.y[i] == null) return;
      dot.setAttribute("cx", xOf(s, i));
      dot.setAttribute("cy", y(s.y[i]));
      dot.style.visibility = "visible";
    });
    total.textContent = format(sum, figure.unit);
    const name = phases.length > 1 ? `${report.phases[part].title} ` : "";
    at.textContent = place == null ? "" : `${name}step ${place.toLocaleString("en")}`;
    if (step == null && comparing) at.textContent = `${name}at the end`;
    cross.style.visibility = step == null ? "hidden" : "visible";
    if (step == null || place == null) return;
    const x = parts.find((p) => p.phase === part).x(place);
    cross.setAttribute("x1", x);
    cross.setAttribute("x2", x);
  }

  function point(event) {
    const box = svg.getBoundingClientRect();
    const x = event.clientX - box.left;
    const part = parts.find((p) => x <= p.right + GAP) || parts[parts.length - 1];
    readAll(part.phase, part.step(x));
  }
  svg.addEventListener("pointermove", point);
  svg.addEventListener("pointerdown", point);
  svg.addEventListener("pointerleave", () => readAll(null, null));
  svg.addEventListener("keydown", (event) => readByKey(event, parts));
  svg.addEventListener("blur", () => readAll(null, null));
  charts.push({ node, measure, layout, show });
  return node;
}

// Phase and step that all charts show; null for the end. Arrow keys move it by a fiftieth of the
// steps, at least by one.
const reading = { phase: null, step: null };

function readByKey(event, parts) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (event.key === "Escape") readAll(null, null);
  if (!by) return;
  event.preventDefault();
  const found = parts.findIndex((p) => p.phase === reading.phase);
  const index = found < 0 ? parts.length - 1 : found;
  let part = parts[index];
  const stride = Math.max(1, Math.round((part.to - part.from) / 50));
  let step = reading.step == null || found < 0 ? part.to : reading.step + by * stride;
  if (step < part.from && reading.step <= part.from && index) {
    part = parts[index - 1];
    step = part.to;
  } else if (step > part.to && reading.step >= part.to && index < parts.length - 1) {
    part = parts[index + 1];
    step = part.from;
  }
  readAll(part.phase, Math.min(part.to, Math.max(part.from, step)));
}

let pending = 0;
function readAll(phase, step) {
  Object.assign(reading, { phase, step });
  cancelAnimationFrame(pending);
  pending = requestAnimationFrame(() => {
    const seen = charts.filter((c) => c.node.checkVisibility());
    // Charts of other phases return to the values at the end.
    for (const c of seen) c.show(null, null);
    if (phase) for (const c of seen) c.show(phase, step);
  });
}

// Draws all visible charts. Hidden ones have no size; they are drawn when their view is shown.
function layoutAll() {
  const seen = charts.filter((c) => c.node.checkVisibility());
  // All sizes are measured first: measuring after drawing would lay out the page again.
  for (const c of seen) c.measure();
  for (const c of seen) c.layout();
  readAll(null, null);
}
