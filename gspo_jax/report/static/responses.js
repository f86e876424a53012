// The view of responses: those to one prompt side by side, with filters and pages.

const PER_PAGE = 10;
const ADDRESSED = [
  "run",
  "step",
  "kind",
  "reward",
  "shortest",
  "longest",
  "clip",
  "ending",
  "order",
  "tokens",
  "query",
];

// Builds the view when it is first shown. The filters are part of the page's address.
function responsesView() {
  let found = null;
  return {
    build: () => [(found = responses()).node],
    apply: (query) => found.apply(new URLSearchParams(query)),
  };
}

function responses() {
  const { total, groups, colors } = JSON.parse(document.getElementById("rollouts").textContent);
  for (const group of groups)
    for (const sample of group.samples)
      sample.response ??= (sample.turns?.map(([text]) => text) ?? sample.tokens).join("");
  const rewards = groups.flatMap((g) => g.samples.map((s) => s.reward)).filter((r) => r != null);
  const low = rewards.reduce((a, b) => Math.min(a, b), Infinity);
  const high = rewards.reduce((a, b) => Math.max(a, b), -Infinity);
  const dumped = groups.reduce((sum, g) => sum + g.samples.length, 0);
  const count = (n) => n.toLocaleString("en");
  const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;
  const state = { run: "", step: "", kind: "", reward: "", shortest: "", longest: "" };
  Object.assign(state, { clip: "", ending: "", order: "new", query: "", page: 0 });
  state.tokens = colors.colored ? "colored" : "plain";
  const usual = { ...state };

  function grade(reward) {
    if (reward == null) return "mid";
    if (high === low) return reward > 0 ? "good" : "bad";
    const share = (reward - low) / (high - low);
    if (share > 0.75) return reward > 0 ? "good" : "mid";
    return share < 0.25 ? "bad" : "mid";
  }

  function rewardChoices() {
    const distinct = [...new Set(rewards)].sort((a, b) => a - b);
    if (distinct.length <= 8) return distinct.map((r) => [`${r},${r}`, format(r)]);
    const edge = (i) => (i === 5 ? high : low + (i * (high - low)) / 5);
    const ends = [0, 1, 2, 3, 4].map((i) => [edge(i), edge(i + 1)]);
    return ends.map(([from, to]) => [`${from},${to}`, `${format(from)} to ${format(to)}`]);
  }

  function keeps() {
    const query = state.query.toLowerCase();
    const [from, to] = state.reward ? state.reward.split(",").map(Number) : [-Infinity, Infinity];
    const shortest = state.shortest === "" ? null : Number(state.shortest);
    const longest = state.longest === "" ? null : Number(state.longest);
    return (group, sample) =>
      (!state.reward || (sample.reward >= from && sample.reward <= to)) &&
      (shortest == null || sample.length >= shortest) &&
      (longest == null || sample.length <= longest) &&
      (!state.clip || sample.clipped === (state.clip === "clipped")) &&
      (!state.ending || Boolean(sample.truncated) === (state.ending === "truncated")) &&
      (!query ||
        sample.response.toLowerCase().includes(query) ||
        group.prompt.toLowerCase().includes(query) ||
        group.rendered.toLowerCase().includes(query));
  }

  // Null if no response has a verdict.
  function mean(group) {
    const known = group.samples.map((s) => s.reward).filter((r) => r != null);
    return known.length ? known.reduce((a, b) => a + b) / known.length : null;
  }

  function select() {
    const keep = keeps();
    const found = [];
    for (const group of groups) {
      if (state.run && group.run !== Number(state.run)) continue;
      if (state.step && `${group.phase} ${group.step}` !== state.step) continue;
      if (state.kind && group.eval !== (state.kind === "eval")) continue;
      const samples = group.samples.filter((sample) => keep(group, sample));
      if (samples.length) found.push({ group, samples, mean: mean(group) });
    }
    if (state.order === "new") found.sort((a, b) => b.group.step - a.group.step);
    const sign = { low: 1, high: -1 }[state.order];
    const rank = (x) => (x.mean == null ? Number.MAX_VALUE : sign * x.mean);
    if (sign) found.sort((a, b) => rank(a) - rank(b));
    return found;
  }

  // Builds a prompt: the question within the rendered prompt, whose other text is set apart. If the
  // rendered prompt does not contain the question, it follows.
  function promptNode(question, rendered) {
    const node = make("pre.prompt");
    const asked = question.trim();
    const at = rendered.lastIndexOf(asked);
    if (at < 0) marked(node, question, state.query);
    if (!rendered) return node;
    const before = marked(make("span.template"), rendered.slice(0, Math.max(at, 0)), state.query);
    if (at >= 0) node.append(before, marked(make("span"), asked, state.query));
    const after = at < 0 ? `\n${rendered}` : rendered.slice(at + asked.length);
    node.append(marked(make("span.template"), after, state.query));
    return node;
  }

  function sampleNode(sample) {
    const pre = make("pre");
    const body = make("div.body", pre);
    const tokens = state.tokens === "colored" ? tokensOf(sample, colors.unit) : null;
    const fill = (limit) => {
      pre.replaceChildren();
      if (tokens) drawTokens(pre, tokens, colors.scale, limit, state.query);
      else drawTurns(pre, turnsOf(sample), state.query);
    };
    const long = sample.response.length > 420 || sample.response.split("\n").length > 12;
    // A response that matches the search is not folded, so that the match is visible.
    let folded =
      long && !(state.query && sample.response.toLowerCase().includes(state.query.toLowerCase()));
    const more = make("button.more", {
      onclick: () => {
        folded = !folded;
        unfold();
      },
    });
    function unfold() {
      pre.className = folded ? "folded" : "";
      more.textContent = folded ? "Show all" : "Show less";
      fill(folded ? TOKENS_FIRST : Infinity);
    }
    unfold();
    if (long) body.append(more);
    const cells = columns.map(({ name, label, show }) =>
      sample[name] == null ? null : make("span.cell", { "data-label": label }, show(sample[name])),
    );
    const odd = !/^(stop|eos)$/.test(sample.stop_reason || "stop") && sample.stop_reason;
    const unknown = sample.unknown && `no verdict: ${sample.unknown}`;
    const flags = [sample.clipped && "clipped", sample.truncated ? "truncated" : odd, unknown];
    const pill = make(
      `span.pill.${grade(sample.reward)}`,
      { title: "reward" },
      format(sample.reward),
    );
    const flag = make("span.cell.flag", flags.filter(Boolean).join(", "));
    const own = sample.rendered ? promptNode("", sample.rendered) : null;
    return make("div.sample", make("div.facts", pill, cells, flag), own, body);
  }

  const stepName = ({ phase, step }) =>
    `${report.phases[phase]?.title || "Evaluation"} step ${step}`;
  const signed = (v) => `${v < 0 ? "−" : "+"}${Math.abs(v).toFixed(2)}`;

  function groupNode({ group, samples, mean }) {
    const color = { good: "good", bad: "bad", mid: "amber" };
    const marks = group.samples.map((s) => {
      const style = `--color: var(--${color[grade(s.reward)]})`;
      return make("span.mark", { style, title: `reward ${format(s.reward)}` });
    });
    const all = group.samples.length;
    const shown = samples.length < all ? ` · ${samples.length} of ${all} shown` : "";
    const answer = group.answer && group.answer.length <= 60 ? ` · answer ${group.answer}` : "";
    const kind = group.eval ? `held out ${group.benchmark}`.trim() : "training";
    const line = make(
      "div.line",
      comparing ? nameOf(report.runs[group.run], group.run) : null,
      make(`span.chip.${group.phase}`, stepName(group)),
      make("span.meta", `${kind} · prompt ${group.id}${answer}${shown}`),
      make("span.marks", marks, make("span.meta.mean", `mean ${format(mean)}`)),
    );
    const prompt = promptNode(group.prompt, group.rendered);
    const below = group.answer && !answer ? make("pre.meta", `answer: ${group.answer}`) : null;
    const top = make("div.top", line, prompt, below);
    return make("article.group", top, make("div.samples", samples.map(sampleNode)));
  }

  const columns = [
    { name: "advantage", label: "advantage", show: signed },
    { name: "length", label: "tokens", show: (v) => v.toLocaleString("en") },
    { name: "ratio", label: "ratio", show: (v) => v.toFixed(5) },
  ].filter(({ name }) => groups.some((g) => g.samples.some((s) => s[name] != null)));
  const legend = tokenLegend(colors);
  const list = make("div");
  const bars = [pager(), pager()];

  function pager() {
    const found = make("span.found", { "aria-live": "polite" });
    const place = make("span.meta");
    const turn = (by) => () => {
      state.page += by;
      update();
      bars[0].node.scrollIntoView();
    };
    const back = make("button", { name: "p", onclick: turn(-1) }, "Previous");
    const next = make("button", { name: "n", onclick: turn(1) }, "Next");
    return { node: make("div.pages", found, place, back, next), found, place, back, next };
  }

  function update() {
    const found = select();
    const pages = Math.max(1, Math.ceil(found.length / PER_PAGE));
    state.page = Math.min(Math.max(0, state.page), pages - 1);
    const start = state.page * PER_PAGE;
    legend.hidden = state.tokens === "plain";
    list.replaceChildren(...found.slice(start, start + PER_PAGE).map(groupNode));
    if (!found.length) list.append(make("p.empty", "No response matches these filters."));
    const matching = found.reduce((sum, f) => sum + f.samples.length, 0);
    for (const bar of bars) {
      bar.found.textContent = `${plural(matching, "response")} to ${plural(found.length, "prompt")}`;
      bar.place.textContent = `page ${state.page + 1} of ${pages}`;
      bar.back.disabled = state.page === 0;
      bar.next.disabled = state.page >= pages - 1;
    }
    bars[1].node.hidden = pages < 2;
  }

  // Writes all changed filters to the address of the view's link, so that the link returns to them.
  function remember() {
    const chosen = ADDRESSED.filter((name) => state[name] !== usual[name]);
    const query = new URLSearchParams(chosen.map((name) => [name, state[name]])).toString();
    const place = `#responses${query && "?"}${query}`;
    views.find((one) => one.id === "responses").link.setAttribute("href", place);
    return place;
  }

  function apply(parameters) {
    const before = JSON.stringify(ADDRESSED.map((name) => state[name]));
    for (const name of ADDRESSED) {
      const box = node.querySelector(`[name="${name}"]`);
      if (!box) continue;
      box.value = parameters.get(name) ?? usual[name];
      if (box.value !== (parameters.get(name) ?? usual[name])) box.value = usual[name];
      state[name] = box.value;
    }
    if (before !== JSON.stringify(ADDRESSED.map((name) => state[name]))) state.page = 0;
    update();
    remember();
  }

  let timer = 0;
  function change(name) {
    return (event) => {
      state[name] = event.target.value;
      state.page = 0;
      clearTimeout(timer);
      const both = () => {
        update();
        history.replaceState(null, "", remember());
      };
      timer = setTimeout(both, event.type === "input" ? 150 : 0);
    };
  }

  function choice(label, name, options) {
    const shown = options.map(([value, text]) => make("option", { value }, text));
    return make("label", label, make("select", { name, onchange: change(name) }, shown));
  }

  function bound(name, placeholder) {
    const attributes = { type: "number", min: 0, name, placeholder, "aria-label": placeholder };
    return make("input", { ...attributes, oninput: change(name) });
  }

  const steps = [...new Map(groups.map((g) => [`${g.phase} ${g.step}`, g])).entries()].map(
    ([value, g]) => [value, stepName(g)],
  );
  const has = (test) => groups.some((g) => g.samples.some(test));
  const names = report.runs.map(({ name }, i) => [String(i), name]);
  const kinds = [
    ["train", "training"],
    ["eval", "held out"],
  ];
  const clipping = [
    ["clipped", "clipped"],
    ["unclipped", "not clipped"],
  ];
  const endings = [
    ["truncated", "truncated"],
    ["whole", "not truncated"],
  ];
  const orders = [
    ["new", "latest first"],
    ["old", "earliest first"],
  ];
  orders.push(["low", "lowest reward"], ["high", "highest reward"]);
  const ways = [
    ["colored", "coloured by log-ratio"],
    ["plain", "plain"],
  ];
  const range = () => make("div.range", bound("shortest", "fewest"), "–", bound("longest", "most"));
  const bothKinds = groups.some((g) => g.eval) && groups.some((g) => !g.eval);
  const filters = [
    comparing && choice("Run", "run", [["", "all"], ...names]),
    choice("Step", "step", [["", "all"], ...steps]),
    bothKinds && choice("Problems", "kind", [["", "all"], ...kinds]),
    choice("Reward", "reward", [["", "any"], ...rewardChoices()]),
    has((s) => s.length != null) && make("div.filter", "Tokens", range()),
    has((s) => s.clipped != null) && choice("Clipping", "clip", [["", "any"], ...clipping]),
    has((s) => s.truncated) && choice("End", "ending", [["", "any"], ...endings]),
    choice("Order", "order", orders),
    colors.colored > 0 && choice("Text", "tokens", ways),
  ].filter(Boolean);
  const kept = `${count(dumped)} of the ${count(total)} logged responses, spread evenly over the run.`;
  const note = dumped < total ? make("p.note", kept) : null;
  const search = make("input", {
    type: "search",
    name: "query",
    placeholder: "/",
    oninput: change("query"),
  });
  filters.unshift(make("label.search", "Prompt or response contains", search));
  const node = make(
    "section",
    make("div.heading", make("h2", "Responses"), note),
    dumped
      ? [make("div.filters", filters), legend, bars[0].node, list, bars[1].node, tokenTip(list)]
      : make("p.empty", "No responses were logged."),
  );
  return { node, apply };
}
