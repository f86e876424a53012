// The overview: three answers, alarms, differences between runs, and the most important charts.

const WARNINGS_SHOWN = 6; // alarms before "more"
const SPANS_SHOWN = 6; // periods of one alarm
const ROWS_SHOWN = 16; // maximum rows of a table that is open at first

const nameOf = (run, index, kind = "span.of") =>
  make(kind, { style: `--color: ${runColor(index)}` }, run.name);

function factText({ value, before, unit, note }) {
  const text = typeof value === "string" ? value : format(value, unit);
  const from = before == null ? null : make("i", `${format(before, unit)} → `);
  return [from, text, note ? make("i", ` ${note}`) : null];
}

function answerCard({ question, answer, because, state, facts }) {
  const rows = facts.map((fact) => make("div", make("dt", fact.label), make("dd", factText(fact))));
  return make(
    `article.card.${state}`,
    make("h2", question),
    make("p.answer", answer),
    make("p.note", because),
    make("dl", rows),
  );
}

const span = ({ from, to }) => (from === to ? `${from}` : `${from}–${to}`);

// Builds the entry of an alarm in one phase of a run: its steps, its meaning, advice, and links to
// its charts and its page. `spans` are the periods of the alarm.
function alarmNode(spans, run, several) {
  const [{ phase, name, title, advice, page, place }] = spans;
  const shown = spans.slice(0, SPANS_SHOWN).map(span);
  const rest = spans.length - shown.length;
  const steps = `${shown.join(", ")}${rest ? ` and ${rest} more times` : ""}`;
  const word = spans.length === 1 && spans[0].from === spans[0].to ? "step" : "steps";
  const when = make("b", `${several ? `${report.phases[phase].title}, ` : ""}${word} ${steps}:`);
  const of = comparing ? nameOf(report.runs[run], run) : null;
  const charts = place
    ? ["See ", make("a", { href: `#${place.view}/${anchor(place.section)}` }, place.section), ". "]
    : null;
  const source = make("code", [`warning/${name}`, page].filter(Boolean).join(", "));
  return make("li", of, when, ` ${title} ${advice} `, charts, source);
}

function alarms() {
  const items = report.runs.flatMap((run, i) => {
    const several = Object.keys(run.phases).length > 1;
    const kinds = Object.groupBy(run.warnings, ({ phase, name }) => `${phase} ${name}`);
    return Object.values(kinds).map((spans) => alarmNode(spans, i, several));
  });
  if (!items.length) return null;
  const rest = items.splice(WARNINGS_SHOWN);
  const more = () => make("details", make("summary", `${rest.length} more`), make("ul", rest));
  const list = make("ul", items);
  return make(
    "div.warnings",
    { role: "note" },
    make("h2", "Alarms"),
    list,
    rest.length ? more() : null,
  );
}

// Builds a table with a column for each run.
function tableOf(rows, head) {
  const columns = Array.from({ length: report.runs.length + 1 }, () => make("col"));
  const line = ([name, ...cells]) =>
    make("tr", make("th", { scope: "row" }, name), ...cells.map((parts) => make("td", parts)));
  const style = `--columns: ${columns.length}`;
  return make("table", { style }, make("colgroup", columns), head, make("tbody", rows.map(line)));
}

function headOf(title) {
  const cell = (run, i) => make("th", { scope: "col" }, nameOf(run, i, "span.of.key"));
  return make("thead", make("tr", make("td", make("b", title)), report.runs.map(cell)));
}

// Formats the difference of another run's fact from that of the first run.
function gapTo(first, fact) {
  if (!first || !fact || typeof first.value !== "number" || typeof fact.value !== "number")
    return null;
  const gap = fact.value - first.value;
  if (!gap) return null;
  const sign = gap > 0 ? "+" : "";
  const points = fact.unit === "percent";
  if (!points && !first.value) return null;
  const text = points ? (100 * gap).toFixed(1) : ((100 * gap) / Math.abs(first.value)).toFixed(0);
  return Number(text) ? make("i.gap", ` ${sign}${minus(text)}${points ? " points" : "%"}`) : null;
}

// Builds the table of one question: answer and facts of each run, and differences from the first.
function questionTable({ question }, i) {
  const { runs } = report;
  const answers = runs.map((run) => run.answers[i]);
  const labels = [...new Set(answers.flatMap((one) => one.facts.map((fact) => fact.label)))];
  const told = answers.map((one) => [
    make(`span.verdict.${one.state}`, { title: one.because }, one.answer),
  ]);
  const figures = labels.map((label) => {
    const facts = answers.map((one) => one.facts.find((fact) => fact.label === label));
    const cells = facts.map((fact, j) => [
      fact ? factText(fact) : "–",
      j ? gapTo(facts[0], fact) : null,
    ]);
    return [label, ...cells.map((cell) => cell.flat())];
  });
  return make("div.table", tableOf([["", ...told], ...figures], headOf(question)));
}

// Compares the runs: their settings and code, then their answers.
function comparison() {
  const { runs, differences } = report;
  const row = ({ key, values }) => [key, ...values.map((value) => [value ?? "–"])];
  const part = (name, found) =>
    found.length
      ? make(
          "details.table",
          { open: found.length <= ROWS_SHOWN },
          make("summary", `${name} (${found.length})`),
          tableOf(found.map(row), headOf("")),
        )
      : make("p.note", `${name}: none`);
  return [
    make(
      "div.differences",
      part("Different settings", differences.settings),
      part("Different code, packages and starting weights", differences.code),
    ),
    make(
      "div.questions",
      { style: `--columns: ${runs.length + 1}` },
      runs[0].answers.map(questionTable),
    ),
  ];
}

function overview() {
  const figures = report.sections.flatMap((section) => section.figures);
  // Charts of the cold start are shown until there is another phase.
  const alone = Object.keys(report.phases).every((phase) => phase === "sft");
  const chosen = figures.filter((f) => f.overview && (alone || f.phases.join() !== "sft"));
  // Stacked bars stay wide, since their legends are long.
  const compact = chosen.map((figure) => ({
    ...figure,
    wide: figure.wide && figure.kind === "stack",
  }));
  const top = comparing ? comparison() : make("div.cards", report.runs[0].answers.map(answerCard));
  return [alarms(), top, ...drawFigures(compact, "grid.compact")];
}

// --- the stages of an iteration

function timelines() {
  // A comparison has one bar per run, all to the same scale.
  const linesOf = (run) => (comparing ? run.timeline.slice(0, 1) : run.timeline);
  const all = report.runs.flatMap((run, i) => linesOf(run).map((line) => ({ run, i, line })));
  if (!all.length) return null;
  const sum = ({ stages }) => stages.reduce((total, stage) => total + stage.seconds, 0);
  const names = [...new Set(all.flatMap(({ line }) => line.stages.map((stage) => stage.name)))];
  const told = ([part, s]) => `${part} ${format(s, "seconds")}`;
  // Stages have the same colours as in the charts.
  const figures = report.sections.flatMap((section) => section.figures);
  const bars = figures.filter((f) => f.kind === "stack" && f.unit === "seconds");
  const colors = new Map(bars.flatMap((f) => f.series.map((s, i) => [s.label, ownPaint(s, i)])));
  const paint = (name) => colors.get(name);
  const longest = Math.max(...all.map(({ line }) => sum(line)));
  const rows = all.map(({ run, i, line }) => {
    const total = sum(line);
    const stages = line.stages.map(({ name, seconds, parts }) => {
      const share = seconds / total;
      const text = [[name, seconds], ...parts].map(told);
      const inner = parts.map(([, s]) =>
        make("u", { style: `width: ${percent(Math.min(1, s / seconds))}` }),
      );
      const style = `flex-grow: ${share}; --color: ${paint(name)}`;
      return make(
        "span.stage",
        { style, title: text.join("\n") },
        make("em", share > 0.07 ? text[0] : ""),
        make("s", inner),
      );
    });
    const which = line.step == null ? "typical iteration" : `${line.name}: step ${line.step}`;
    const title = make(
      "div.which",
      comparing ? nameOf(run, i) : null,
      ` ${which} `,
      make("b", format(total, "seconds")),
    );
    const width = comparing ? percent(total / longest) : "100%";
    return make("div.timeline", title, make("div.stages", { style: `width: ${width}` }, stages));
  });
  const parts = all[0].line.stages.map(({ name, seconds, parts }) => {
    const inner = parts.length ? ` (${parts.map(told).join(", ")})` : "";
    return told([name, seconds]) + inner;
  });
  const scale = comparing ? "all on the same scale" : "each on its own scale";
  const note = `The stages of an iteration from left to right, ${scale}. Below a stage are the measured parts of it. A typical iteration has the median times of the second half of the run.`;
  const keys = names.map((name) => make("span.key", { style: `--color: ${paint(name)}` }, name));
  return make(
    "div.timelines",
    make("h3", "Stages of an iteration"),
    make("p.note", note),
    make("div.legend", keys),
    rows,
    make("p.note", comparing ? "" : `Typical: ${parts.join(" · ")}`),
  );
}
