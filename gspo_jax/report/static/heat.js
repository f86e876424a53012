// Heat maps: a row for each layer, a column for each step. They are read like other charts.

const HEAT_ROW = [5, 60]; // minimum and maximum height of a row, in pixels
const HEAT_HEIGHT = 170; // height of a map, in pixels

// Returns a colour of the style sheet as red, green and blue.
function rgbOf(name) {
  const probe = make("span", { style: `color: var(${name})` });
  document.body.append(probe);
  const found = getComputedStyle(probe)
    .color.match(/[\d.]+/g)
    .slice(0, 3)
    .map(Number);
  probe.remove();
  return found;
}

function heat(figure) {
  const rows = figure.series;
  const steps = rows[0].x;
  const phase = figure.phases[0];
  const { from, to } = report.phases[phase];
  const top = figure.top || 1;
  const at = make("span.at");
  const value = make("span");
  const canvas = make("canvas", { tabindex: 0, role: "img", "aria-label": figure.title });
  const over = figure.largest > top ? ` (up to ${format(figure.largest, figure.unit)})` : "";
  const name = comparing
    ? make("span.of", { style: `--color: ${runColor(rows[0].run)}` }, report.runs[rows[0].run].name)
    : null;
  const key = make("span.heatkey", "0", make("i"), format(top, figure.unit) + over);
  const cursor = make("div.cursor");
  const axis = make("div.steps");
  const layers = make("div.layers");
  const node = make(
    `figure.${phase}${figure.wide ? ".wide" : ""}.heat`,
    make("div.top", make("h3", figure.title), at),
    make("p.note", figure.note),
    make("div.legend", name, key, value),
    make("div.map", layers, make("div.cells", canvas, cursor), axis),
  );
  let width;
  const height = () => Math.max(HEAT_ROW[0], Math.min(HEAT_ROW[1], HEAT_HEIGHT / rows.length));
  const span = to - from + 1;
  const stepOf = (share) => from - 0.5 + share * span;
  const shareOf = (step) => (step - from + 0.5) / span;
  const read = (step) => step >= steps[0] - 0.5 && step <= steps[steps.length - 1] + 0.5;
  const measure = () => (width = canvas.getBoundingClientRect().width);

  // Draws a pixel for each value; the browser scales them to cells.
  function layout() {
    const ends = [rgbOf("--cold"), rgbOf("--warm"), rgbOf("--hot")];
    const context = canvas.getContext("2d");
    const columns = Math.min(span, 1000);
    [canvas.width, canvas.height] = [columns, rows.length];
    const image = context.createImageData(columns, rows.length);
    rows.forEach((row, j) =>
      Array.from({ length: columns }, (_, i) => {
        const step = stepOf((i + 0.5) / columns);
        const v = read(step) ? row.y[nearest(steps, step)] : null;
        if (v == null) return;
        const share = 2 * Math.min(1, Math.max(0, v / top));
        const [a, b] = share < 1 ? [ends[0], ends[1]] : [ends[1], ends[2]];
        const part = share < 1 ? share : share - 1;
        image.data.set(a.map((c, k) => c + part * (b[k] - c)).concat(255), 4 * (j * columns + i));
      }),
    );
    context.putImageData(image, 0, 0);
    canvas.style.height = `${Math.round(height() * rows.length)}px`;
    const stride = Math.ceil(16 / height());
    const names = rows.map((row, j) =>
      make(
        "span",
        { style: `height: ${height()}px` },
        j % stride ? "" : row.label.replace("layer ", ""),
      ),
    );
    layers.replaceChildren(...names);
    const { list } = stepTicks(from, to, Math.floor(width / 70));
    axis.replaceChildren(
      ...list.map((step) => make("span", { style: `left: ${100 * shareOf(step)}%` }, tickLabel(step, 1))),
    );
  }

  let row = null;
  function show(wanted, step) {
    if (wanted && wanted !== phase) return;
    cursor.hidden = step == null;
    const i = step == null ? steps.length - 1 : nearest(steps, step);
    if (step != null && !read(step)) return at.replaceChildren(), value.replaceChildren("–");
    const column = rows.map((one) => one.y[i]);
    const known = column.filter((v) => v != null);
    const most = column.indexOf(known.reduce((a, b) => Math.max(a, b), -Infinity));
    const shown = row ?? most;
    at.textContent = `step ${steps[i].toLocaleString("en")}`;
    const what = row == null ? `largest: ${rows[shown]?.label}` : rows[shown].label;
    value.replaceChildren(`${what} `, make("b", format(column[shown], figure.unit)));
    if (step != null) cursor.style.left = `${100 * shareOf(steps[i])}%`;
  }

  function point(event) {
    const box = canvas.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const down = Math.floor((rows.length * (event.clientY - box.top)) / box.height);
    row = Math.min(rows.length - 1, Math.max(0, down));
    readAll(phase, stepOf(share));
  }
  function leave() {
    row = null;
    readAll(null, null);
  }
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point);
  canvas.addEventListener("pointerleave", leave);
  canvas.addEventListener("blur", leave);
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (by) {
      event.preventDefault();
      const next = row == null ? (by > 0 ? 0 : rows.length - 1) : row + by;
      row = Math.min(rows.length - 1, Math.max(0, next));
      readAll(phase, reading.step ?? to);
    } else if (event.key === "Escape") leave();
    else readByKey(event, [{ phase, from, to }]);
  });
  charts.push({ node, measure, layout, show });
  return node;
}
