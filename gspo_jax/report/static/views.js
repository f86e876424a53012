// Views: the page shows one at a time, by its address: `#router`, `#router/volatility` for a section
// of it, or `#responses?query=7` for filters.

const anchor = (title) => title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
const views = []; // { id, title, node, build }: built when first shown

function placeOf(hash) {
  const [path, ...queries] = hash.replace(/^#/, "").split("?");
  const query = queries.join("?");
  const [id, ...rest] = path.split("/");
  const known = views.find((view) => view.id === id) || views[0];
  return { view: known, section: known.id === id ? rest.join("/") : "", query };
}

function showPlace() {
  const { view, section, query } = placeOf(location.hash);
  for (const one of views) {
    one.node.hidden = one !== view;
    if (one === view) one.link.setAttribute("aria-current", "page");
    else one.link.removeAttribute("aria-current");
  }
  if (!view.built) {
    view.built = true;
    view.node.append(
      ...view
        .build()
        .flat()
        .filter((part) => part != null),
    );
  }
  view.link.scrollIntoView({ block: "nearest", inline: "nearest" });
  view.apply?.(query);
  const target = section && document.getElementById(`${view.id}/${section}`);
  if (target) target.closest("details")?.setAttribute("open", "");
  layoutAll();
  if (target) target.scrollIntoView();
  else window.scrollTo(0, 0);
  document.title = `${view === views[0] ? "" : `${view.title} · `}${report.name}`;
  document.documentElement.dataset.view = view.id;
}

const HELP = [
  ["1 … 9", "show a view, in their order"],
  ["/", "search the responses"],
  ["n, p", "show the next or previous page of responses"],
  ["← →", "in a chart: show the values of all charts at another step"],
  ["↑ ↓", "in a heat map: show the values of another layer"],
  ["Tab, ← →", "in a response with segments: show the first or next segment's ratio"],
  ["Esc", "in a chart: show the values at the end again"],
  ["?", "show this list"],
];

function helpBox() {
  const rows = HELP.map(([key, text]) =>
    make("div", make("dt", make("kbd", key)), make("dd", text)),
  );
  const box = make(
    "dialog",
    { "aria-label": "Keys" },
    make("h2", "Keys"),
    make("dl", rows),
    make("p.note", "Any key closes."),
  );
  box.addEventListener("click", () => box.close());
  return box;
}

// Builds the navigation: links to the views, and a slider for the smoothing of all charts.
function navigation(help) {
  for (const view of views) view.link = make("a", { href: `#${view.id}` }, view.title);
  const oninput = (event) => {
    smoothing = Number(event.target.value);
    layoutAll();
  };
  const range = { type: "range", min: 0, max: 0.1, step: 0.005, value: smoothing };
  const label = { "aria-label": "Smoothing: share of the run averaged over", ...range, oninput };
  const ask = make("button.help", { onclick: () => help.showModal(), title: "Keys" }, "?");
  const links = make(
    "div.links",
    views.map((view) => view.link),
  );
  const tools = make(
    "div.tools",
    make("label", make("span", "Smoothing"), make("input", label)),
    ask,
  );
  return make("nav", { "aria-label": "Views" }, make("div.wrap", links, tools));
}

function listenToKeys(help) {
  window.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (help.open) {
      help.close();
      event.preventDefault();
      return;
    }
    if (/^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const view = /^[1-9]$/.test(event.key) && views[Number(event.key) - 1];
    if (view) location.hash = view.link.hash;
    else if (event.key === "?") help.showModal();
    else if (event.key === "/") {
      event.preventDefault();
      if (document.documentElement.dataset.view !== "responses")
        location.hash = views.find((one) => one.id === "responses").link.hash;
      setTimeout(() => document.querySelector("[name=query]")?.focus(), 50);
    } else if ("np".includes(event.key)) {
      document.querySelector(`#view-responses:not([hidden]) button[name=${event.key}]`)?.click();
    }
  });
}
