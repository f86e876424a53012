// Tokens of a response, coloured by their log-ratio and framed if clipped. A mark precedes each
// segment with a separate importance ratio.

const TOKENS_FIRST = 600; // characters of a folded response

// Appends a text to a node, with the matches of a search marked.
function marked(node, value, query) {
  const lower = value.toLowerCase();
  const wanted = query.toLowerCase();
  let done = 0;
  for (let i = wanted ? lower.indexOf(wanted) : -1; i >= 0; i = lower.indexOf(wanted, done)) {
    node.append(value.slice(done, i), make("mark", value.slice(i, i + wanted.length)));
    done = i + wanted.length;
  }
  node.append(value.slice(done));
  return node;
}

// Returns [text, whether it is the environment's] of each turn. A response of a single turn is one.
function turnsOf(sample) {
  if (sample.turns || !sample.observations) return sample.turns ?? [[sample.response || " ", false]];
  const heard = new Set(sample.observations);
  const turns = [];
  for (const [i, token] of sample.tokens.entries()) {
    if (heard.has(i) || heard.has(i - 1) || !i) turns.push([token, heard.has(i)]);
    else turns[turns.length - 1][0] += token;
  }
  return turns;
}

const observation = (value, query) =>
  marked(make("span", { class: "observation", title: "by the environment" }), value, query);

function drawTurns(node, turns, query) {
  for (const [value, heard] of turns)
    if (heard) node.append(observation(value, query));
    else marked(node, value, query);
  return node;
}

// Returns [text, log-ratio or null, whether clipped, segment or null, whether by the environment] of
// each token. Returns null for a response without log-ratios.
function tokensOf(sample, unit) {
  if (sample.log_ratio == null) return null;
  const ratio = (units) => (units == null ? null : units * unit);
  const clipped = (i) => sample.clipped_tokens?.[i] === 1;
  const segments = segmentsOf(sample, clipped);
  const heard = new Set(sample.observations);
  return sample.tokens.map((text, i) => [
    text,
    ratio(sample.log_ratio[i]),
    clipped(i),
    segments[i] ?? null,
    heard.has(i),
  ]);
}

// Returns the segment of each token: its number, ratio and gradient, and whether any of its tokens
// is clipped. Tokens of a segment share one object.
function segmentsOf(sample, clipped) {
  const known = new Map();
  return (sample.segments ?? []).map((number, i) => {
    if (number == null) return null;
    const [ratio, gradient] = sample.segment_figures[number];
    const one = known.get(number) ?? { number: number + 1, ratio, gradient, clipped: false };
    one.clipped ||= clipped(i);
    known.set(number, one);
    return one;
  });
}

function segmentText({ number, ratio, gradient, clipped }) {
  const times = `ratio ${ratio.toFixed(5)} · ${clipped ? "clipped" : "not clipped"}`;
  return `segment ${number} · ${times} · gradient ${format(gradient)}`;
}

// Builds the mark of a segment. It is a button, so that keys can reach it: Tab the first one of a
// response, and arrow keys the others.
function segmentMark(segment, first) {
  const node = make(segment.clipped ? "button.segment.clipped" : "button.segment", {
    type: "button",
    tabindex: first ? 0 : -1,
    "aria-label": segmentText(segment),
    "data-number": segment.number,
  });
  node.segment = segment;
  return node;
}

function walkSegments(event) {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  const at = event.target.closest?.(".segment");
  if (!by || !at) return;
  event.preventDefault();
  const all = [...at.parentNode.querySelectorAll(".segment")];
  const next = all[all.indexOf(at) + by];
  if (!next) return;
  at.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

// Returns for each token whether it is part of a match of the search.
function foundIn(tokens, query) {
  const whole = tokens
    .map(([text]) => text)
    .join("")
    .toLowerCase();
  const wanted = query.toLowerCase();
  const starts = [];
  for (
    let i = wanted ? whole.indexOf(wanted) : -1;
    i >= 0;
    i = whole.indexOf(wanted, i + wanted.length)
  )
    starts.push(i);
  let [place, next] = [0, 0];
  return tokens.map(([text]) => {
    const end = place + text.length;
    while (next < starts.length && starts[next] + wanted.length <= place) next++;
    const found = next < starts.length && starts[next] < end;
    place = end;
    return found;
  });
}

// Appends the tokens of a response to a node, up to about `limit` characters.
function drawTokens(node, tokens, scale, limit, query) {
  const found = foundIn(tokens, query);
  let drawn = 0;
  let last = null;
  for (const [i, [value, ratio, clipped, segment, heard]] of tokens.entries()) {
    if (drawn > limit) break;
    if (segment && segment !== last) node.append(segmentMark(segment, !last));
    last = segment ?? last;
    drawn += Math.max(1, value.length);
    if (heard) {
      node.append(observation(value, query));
      continue;
    }
    if (ratio == null) {
      node.append(found[i] ? make("mark", value) : value);
      continue;
    }
    const share = Math.min(1, Math.abs(ratio) / scale);
    const kinds = ["token", ratio < 0 ? "lower" : "higher"];
    if (share > 0.5) kinds.push("far");
    if (clipped) kinds.push("clipped");
    if (found[i]) kinds.push("found");
    if (!value.trim() && value.includes("\n")) kinds.push("newline");
    const span = make(
      "span",
      { class: kinds.join(" "), style: `--share: ${percent(share)}` },
      value,
    );
    span.ratio = ratio;
    span.clipped = clipped;
    span.segment = segment;
    node.append(span);
  }
  return node;
}

const percent = (share) => `${(100 * share).toFixed(0)}%`;

function ratioText(ratio) {
  const sign = ratio < 0 ? "−" : "+";
  const times = Math.exp(ratio).toPrecision(5);
  return `log-ratio ${sign}${number(Math.abs(ratio), 4)} · ×${Number(times)}`;
}

// Builds the tooltip of the tokens and segments within `list`. It is shown beside the one with the
// pointer or the focus.
function tokenTip(list) {
  const tip = make("div", { class: "tip", role: "tooltip", hidden: true });
  function show(event) {
    const node = event.target.closest?.(".token, .segment");
    tip.hidden = !node;
    if (node) describe(node);
  }
  function describe(node) {
    const { ratio, clipped, segment } = node;
    const kind = ratio < 0 ? "less probable" : ratio > 0 ? "more probable" : "unchanged";
    const ofToken = ratio == null ? null : make("code", {}, JSON.stringify(node.textContent));
    const change =
      ratio == null ? null : `${ratioText(ratio)} · ${kind}${clipped ? " · clipped" : ""}`;
    const lines = [change, segment && segmentText(segment)].filter(Boolean);
    tip.replaceChildren(
      ...[ofToken].filter(Boolean),
      ...lines.map((line) => make("div", {}, line)),
    );
    const box = node.getClientRects()[0];
    const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
    const above = box.top - tip.offsetHeight - 6;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above > 0 ? above : box.bottom + 6}px`;
  }
  const hide = () => {
    tip.hidden = true;
  };
  list.addEventListener("pointerover", show);
  list.addEventListener("pointerdown", show);
  list.addEventListener("pointerleave", hide);
  list.addEventListener("focusin", show);
  list.addEventListener("focusout", hide);
  list.addEventListener("keydown", walkSegments);
  window.addEventListener("scroll", () => {
    const focused = tip.hidden ? null : list.querySelector(".segment:focus");
    if (focused) describe(focused);
    else hide();
  });
  return tip;
}

const SEGMENTS =
  " A number marks the beginning of a segment with a separate importance ratio, “clip” a clipped one. Point at it, or go to it with Tab and the arrow keys, for its ratio and its gradient (the sum of |∂ loss/∂ log π| over its tokens).";

function tokenLegend({ scale, colored, known, clipped, segments }) {
  const end = number(scale, 2);
  const part =
    colored < known
      ? ` Of ${known.toLocaleString("en")} responses with log-ratios, the page has those of the newest ${colored.toLocaleString("en")} only, to stay small.`
      : "";
  return make(
    "div",
    { class: "scale", hidden: true },
    make("span", { class: "token lower far", style: "--share: 100%" }, `−${end}`),
    make("span", { class: "ramp", "aria-hidden": "true" }),
    make("span", { class: "token higher far", style: "--share: 100%" }, `+${end}`),
    clipped ? make("span", { class: "token clipped", style: "--share: 0%" }, "clipped") : null,
    segments ? make("span", { class: "segment", "data-number": 1 }) : null,
    segments && clipped ? make("span", { class: "segment clipped", "data-number": 2 }) : null,
    make(
      "span",
      { class: "meta" },
      "Log-ratio of each token: its log-probability after the iteration's updates minus that before. Blue and dotted: less probable. Orange and underlined: more probable. Framed: clipped by the loss. A response without colours has no log-ratios." +
        (segments ? SEGMENTS : "") +
        part,
    ),
  );
}
