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
  const text = `${gain < 0 ? "−" : "+"}${Math.abs(gain).toFixed(1)} points`;
  return [
    make("i", `${points(before)}% → `),
    `${points(after)}%`,
    make(gain < 0 ? "span.gain.loss" : "span.gain", text),
  ];
}

const headlineItem = (item) =>
  make("div", make("div.label", item.label), make("div.value", figureText(item)));

function settings(run, title) {
  if (!run.config.length && !run.provenance.length) return null;
  const entry = ([key, value]) => make("div", make("dt", key), make("dd", value));
  return make(
    "details.config",
    make("summary", title),
    make("dl", run.config.map(entry)),
    run.provenance.length ? [make("h3", "Code"), make("dl", run.provenance.map(entry))] : null,
  );
}

const nameOf = (run, index, kind = "span.of") =>
  make(kind, { style: `--color: ${runColor(index)}` }, run.name);

const span = ({ from, to }) => (from === to ? `step ${from}` : `step ${from}–${to}`);

function alarms() {
  const items = report.runs.flatMap((run, i) =>
    run.warnings.map((warning) => {
      const several = Object.keys(run.phases).length > 1;
      const phase = several ? `${report.phases[warning.phase].title} ` : "";
      const text = `${phase}${span(warning)}: ${warning.name}`;
      return make("li", comparing ? nameOf(run, i) : null, text);
    }),
  );
  if (!items.length) return null;
  const rest = items.splice(WARNINGS_SHOWN);
  const more = () => make("details", make("summary", `${rest.length} more`), make("ul", rest));
  return make(
    "div.warnings",
    { role: "note" },
    make("h2", "Warnings"),
    make("ul", items),
    rest.length ? more() : null,
  );
}

// Runs as columns.
function tableOf(rows, head) {
  const columns = Array.from({ length: report.runs.length + 1 }, () => make("col"));
  const line = ([name, ...cells]) =>
    make("tr", make("th", { scope: "row" }, name), ...cells.map((parts) => make("td", parts)));
  const style = `--columns: ${columns.length}`;
  return make("table", { style }, make("colgroup", columns), head, make("tbody", rows.map(line)));
}

// The runs' figures, then what they do not have in common.
function comparison() {
  const { runs, differences } = report;
  const labels = [...new Set(runs.flatMap((run) => run.headline.map((item) => item.label)))];
  const figures = labels.map((label) => {
    const items = runs.map((run) => run.headline.find((item) => item.label === label));
    return [label, ...items.map((item) => (item ? figureText(item) : ["–"]))];
  });
  const names = runs.map((run, i) => make("th", { scope: "col" }, nameOf(run, i, "span.of.key")));
  const part = (name, rows) =>
    make(
      "details",
      { open: rows.length <= ROWS_SHOWN },
      make("summary", rows.length ? `${name} (${rows.length})` : `${name}: none`),
      tableOf(rows.map(({ key, values }) => [key, ...values.map((value) => [value ?? "–"])])),
    );
  return make(
    "div.table",
    tableOf(figures, make("thead", make("tr", make("td"), names))),
    part("Different settings", differences.settings),
    part("Different code", differences.code),
  );
}

function header() {
  const [run] = report.runs;
  if (comparing) {
    return make(
      "header.wrap",
      make("h1", `Comparison of ${report.runs.length} runs`),
      alarms(),
      comparison(),
      report.runs.map((one) => settings(one, `${CONFIG} of ${one.name}`)),
    );
  }
  const summary = run.summary.map((text) => make("span", text));
  return make(
    "header.wrap",
    make("h1", run.name),
    make("p.summary", summary),
    make("div.headline", run.headline.map(headlineItem)),
    alarms(),
    settings(run, CONFIG),
  );
}

function navigation(titles) {
  const oninput = (event) => {
    smoothing = Number(event.target.value);
    layoutAll();
  };
  const slider = make("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: 0, oninput });
  const links = titles.map((title) => make("a", { href: `#${anchor(title)}` }, title));
  return make("nav", make("div.wrap", links, make("label", "Smoothing", slider)));
}

function sectionOf({ title, note, figures }) {
  const phases = [...new Set(figures.flatMap((figure) => figure.phases))];
  const titles = phases.map((phase) => report.phases[phase].title);
  const chips = phases.map((phase, i) => make(`span.chip.${phase}`, titles[i]));
  const heading = make(
    "div.heading",
    make("h2", title),
    title === titles[0] ? null : chips,
    note ? make("p.note", note) : null,
  );
  const grid = make("div.grid", figures.map(chart));
  return make("section.wrap", { id: anchor(title) }, heading, grid);
}

const page = document.getElementById("page");
const titles = report.sections.map((section) => section.title);
page.append(header(), navigation([...titles, "Responses"]), ...report.sections.map(sectionOf));
if (!titles.length) page.append(make("p.wrap.empty", "No metrics yet."));
layoutAll();
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  layoutAll();
});
// The charts are on the screen before the responses are read.
setTimeout(() => {
  page.append(responses(), make("footer.wrap", "Written by gspo_jax."));
  document.documentElement.dataset.ready = "yes";
}, 0);
