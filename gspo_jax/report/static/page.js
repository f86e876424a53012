// The page: headline, navigation, sections of charts, responses.

const points = (share) => (100 * share).toFixed(1);
const anchor = (title) => title.toLowerCase().replace(/[^a-z0-9]+/g, "-");

const CONFIG = "Configuration";
const WARNINGS_SHOWN = 8;
const ROWS_SHOWN = 16;

function figureText({ before, after, value }) {
  if (value != null) return [value];
  if (before == null) return [`${points(after)}%`];
  const gain = 100 * (after - before);
  const sign = gain < 0 ? "−" : "+";
  return [
    make("i", {}, `${points(before)}% → `),
    `${points(after)}%`,
    make(
      "span",
      { class: gain < 0 ? "gain loss" : "gain" },
      `${sign}${Math.abs(gain).toFixed(1)} points`,
    ),
  ];
}

function headlineItem(item) {
  const label = make("div", { class: "label" }, item.label);
  return make("div", {}, label, make("div", { class: "value" }, ...figureText(item)));
}

function settings(run, title) {
  if (!run.config.length && !run.provenance.length) return null;
  const table = (entries) =>
    make(
      "dl",
      {},
      ...entries.map(([key, value]) => make("div", {}, make("dt", {}, key), make("dd", {}, value))),
    );
  return make(
    "details",
    { class: "config" },
    make("summary", {}, title),
    table(run.config),
    ...(run.provenance.length ? [make("h3", {}, "Code"), table(run.provenance)] : []),
  );
}

const span = ({ from, to }) => (from === to ? `step ${from}` : `step ${from}–${to}`);

function alarms() {
  const found = report.runs.flatMap((run, i) => run.warnings.map((w) => ({ ...w, run, color: i })));
  if (!found.length) return null;
  const items = found.map(({ run, color, ...warning }) => {
    const name = make("span", { class: "of", style: `--color: ${runColor(color)}` }, run.name);
    const phase = Object.keys(run.phases).length > 1 ? `${report.phases[warning.phase].title} ` : "";
    return make("li", {}, comparing ? name : null, `${phase}${span(warning)}: ${warning.name}`);
  });
  const rest = items.splice(WARNINGS_SHOWN);
  return make(
    "div",
    { class: "warnings", role: "note" },
    make("h2", {}, "Warnings"),
    make("ul", {}, ...items),
    rest.length
      ? make(
          "details",
          {},
          make("summary", {}, `${rest.length} more`),
          make("ul", {}, ...rest),
        )
      : null,
  );
}

// Runs as columns.
function tableOf(rows, head) {
  const columns = Array.from({ length: report.runs.length + 1 }, () => make("col"));
  const lines = rows.map(([name, ...cells]) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, name),
      ...cells.map((parts) => make("td", {}, ...parts)),
    ),
  );
  return make(
    "table",
    { style: `--columns: ${columns.length}` },
    make("colgroup", {}, ...columns),
    head,
    make("tbody", {}, ...lines),
  );
}

// The runs' figures, then what they do not have in common.
function comparison() {
  const { runs, differences } = report;
  const labels = [...new Set(runs.flatMap((run) => run.headline.map((item) => item.label)))];
  const figures = labels.map((label) => {
    const items = runs.map((run) => run.headline.find((item) => item.label === label));
    return [label, ...items.map((item) => (item ? figureText(item) : ["–"]))];
  });
  const names = runs.map(({ name }, i) =>
    make(
      "th",
      { scope: "col" },
      make("span", { class: "of key", style: `--color: ${runColor(i)}` }, name),
    ),
  );
  const part = (name, rows) =>
    make(
      "details",
      { open: rows.length <= ROWS_SHOWN },
      make("summary", {}, rows.length ? `${name} (${rows.length})` : `${name}: none`),
      tableOf(rows.map(({ key, values }) => [key, ...values.map((value) => [value ?? "–"])])),
    );
  return make(
    "div",
    { class: "table" },
    tableOf(figures, make("thead", {}, make("tr", {}, make("td"), ...names))),
    part("Different settings", differences.settings),
    part("Different code", differences.code),
  );
}

function header() {
  const [run] = report.runs;
  if (comparing) {
    return make(
      "header",
      { class: "wrap" },
      make("h1", {}, `Comparison of ${report.runs.length} runs`),
      alarms(),
      comparison(),
      ...report.runs.map((one) => settings(one, `${CONFIG} of ${one.name}`)),
    );
  }
  return make(
    "header",
    { class: "wrap" },
    make("h1", {}, run.name),
    make("p", { class: "summary" }, ...run.summary.map((text) => make("span", {}, text))),
    make("div", { class: "headline" }, ...run.headline.map(headlineItem)),
    alarms(),
    settings(run, CONFIG),
  );
}

function navigation(titles) {
  const slider = make("input", {
    type: "range",
    min: 0,
    max: 0.95,
    step: 0.05,
    value: 0,
    oninput: (event) => {
      smoothing = Number(event.target.value);
      layoutAll();
    },
  });
  const links = titles.map((title) => make("a", { href: `#${anchor(title)}` }, title));
  return make(
    "nav",
    {},
    make("div", { class: "wrap" }, ...links, make("label", {}, "Smoothing", slider)),
  );
}

function sectionOf({ title, note, figures }) {
  const phases = [...new Set(figures.flatMap((figure) => figure.phases))];
  const chips = phases.map((phase) =>
    make("span", { class: `chip ${phase}` }, report.phases[phase].title),
  );
  return make(
    "section",
    { class: "wrap", id: anchor(title) },
    make(
      "div",
      { class: "heading" },
      make("h2", {}, title),
      ...(chips.length && title !== report.phases[phases[0]].title ? chips : []),
      note ? make("p", { class: "note" }, note) : null,
    ),
    make("div", { class: "grid" }, ...figures.map(chart)),
  );
}

const page = document.getElementById("page");
const titles = report.sections.map((section) => section.title);
page.append(header(), navigation([...titles, "Responses"]), ...report.sections.map(sectionOf));
if (!titles.length) page.append(make("p", { class: "wrap empty" }, "No metrics yet."));
layoutAll();
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  layoutAll();
});
// The charts are on the screen before the responses are read.
setTimeout(() => {
  page.append(responses(), make("footer", { class: "wrap" }, "Written by gspo_jax."));
  document.documentElement.dataset.ready = "yes";
}, 0);
