// The page: its header and its views.

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

function header() {
  const [run] = report.runs;
  const summary = comparing
    ? report.runs.map((one, i) => nameOf(one, i))
    : run.summary.map((text) => make("span", text));
  const name = comparing ? `Comparison of ${report.runs.length} runs` : run.name;
  return make("header.wrap", make("h1", name), make("p.summary", summary));
}

// Builds charts, and below them a text with the values of metrics that never change.
function drawFigures(figures, kind = "grid") {
  const isFlat = (figure) => figure.series.every((s) => "constant" in s);
  const flat = figures.filter(isFlat);
  const lines = flat.map((figure) => {
    const named = (s) =>
      s.label && s.label !== figure.title.toLowerCase() && figure.series.length > 1
        ? `${figure.title}, ${s.label}`
        : figure.title;
    return constantsOf(figure, figure.series, named);
  });
  const drawn = figures.filter((figure) => !isFlat(figure));
  return [
    drawn.length
      ? make(
          `div.${kind}`,
          drawn.map((f) => (f.kind === "heat" ? heat(f) : chart(f))),
        )
      : null,
    flat.length ? make("p.constants", "Throughout: ", lines.flat()) : null,
  ];
}

function sectionOf({ view, title, note, figures }) {
  const phases = [...new Set(figures.flatMap((figure) => figure.phases))];
  const titles = phases.map((phase) => report.phases[phase].title);
  const chips = phases.map((phase, i) => make(`span.chip.${phase}`, titles[i]));
  const id = `${view}/${anchor(title)}`;
  const heading = make(
    "div.heading",
    make("h2", make("a", { href: `#${id}` }, title)),
    titles.length > 1 || phases[0] !== "rl" ? chips : null,
    note ? make("p.note", note) : null,
  );
  return make("section", { id }, heading, drawFigures(figures));
}

const BUILD = {
  overview,
  speed: (sections) => [timelines(), ...sections.map(sectionOf)],
  // Sections of this view are folded, and drawn when opened.
  other: (sections) => [
    ...sections.map((section) => {
      const count = section.figures.length;
      const summary = make("summary", `${section.title} (${count}) without a chart in other views`);
      return make("details.fold", { ontoggle: layoutAll }, summary, sectionOf(section));
    }),
    ...report.runs.map((run) =>
      settings(run, comparing ? `Configuration of ${run.name}` : "Configuration and code"),
    ),
  ],
};

const page = document.getElementById("page");
for (const [id, title] of Object.entries(report.views)) {
  const sections = report.sections.filter((section) => section.view === id);
  const configured = id === "other" && report.runs.some((run) => run.config.length);
  if (!["overview", "responses"].includes(id) && !sections.length && !configured) continue;
  const view = { id, title, node: make("div.wrap.view", { id: `view-${id}`, hidden: true }) };
  view.build = () => (BUILD[id] || ((found) => found.map(sectionOf)))(sections);
  if (id === "responses") Object.assign(view, responsesView());
  views.push(view);
}
const help = helpBox();
page.append(header(), navigation(help), ...views.map((view) => view.node), help);
if (!report.sections.length) views[0].node.append(make("p.empty", "No metrics yet."));
const against = comparing
  ? ""
  : " To compare runs: python -m gspo_jax.report DIR OTHER_DIR --output=compare.html.";
page.append(make("footer.wrap", `Written by gspo_jax. Press ? for keys.${against}`));
listenToKeys(help);
window.addEventListener("hashchange", showPlace);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", layoutAll);
let width = window.innerWidth;
window.addEventListener("resize", () => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  layoutAll();
});
showPlace();
document.documentElement.dataset.ready = "yes";
