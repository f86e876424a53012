// The page: headline, navigation, sections of charts, responses.

const points = (share) => (100 * share).toFixed(1);
const anchor = (title) => title.toLowerCase().replace(/[^a-z0-9]+/g, "-");

function headlineItem(item) {
  if (item.value != null) {
    return make(
      "div",
      {},
      make("div", { class: "label" }, item.label),
      make("div", { class: "value" }, item.value),
    );
  }
  const value = make("div", { class: "value" });
  if (item.before != null) {
    const gain = 100 * (item.after - item.before);
    const sign = gain < 0 ? "−" : "+";
    value.append(
      make("i", {}, `${points(item.before)}% → `),
      `${points(item.after)}%`,
      make(
        "span",
        { class: gain < 0 ? "gain loss" : "gain" },
        `${sign}${Math.abs(gain).toFixed(1)} points`,
      ),
    );
  } else value.append(`${points(item.after)}%`);
  return make("div", {}, make("div", { class: "label" }, item.label), value);
}

function header() {
  const entries = run.config.map(([key, value]) =>
    make("div", {}, make("dt", {}, key), make("dd", {}, value)),
  );
  return make(
    "header",
    { class: "wrap" },
    make("h1", {}, run.name),
    make("p", { class: "summary" }, ...run.summary.map((text) => make("span", {}, text))),
    make("div", { class: "headline" }, ...run.headline.map(headlineItem)),
    entries.length
      ? make(
          "details",
          { class: "config" },
          make("summary", {}, "Configuration"),
          make("dl", {}, ...entries),
        )
      : null,
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
    make("span", { class: `chip ${phase}` }, run.phases[phase].title),
  );
  return make(
    "section",
    { class: "wrap", id: anchor(title) },
    make(
      "div",
      { class: "heading" },
      make("h2", {}, title),
      ...(chips.length && title !== run.phases[phases[0]].title ? chips : []),
      note ? make("p", { class: "note" }, note) : null,
    ),
    make("div", { class: "grid" }, ...figures.map(chart)),
  );
}

const page = document.getElementById("page");
const titles = run.sections.map((section) => section.title);
page.append(header(), navigation([...titles, "Responses"]), ...run.sections.map(sectionOf));
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
