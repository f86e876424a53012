// Tokens coloured by how much more or less probable an update made them, framed where clipped.

const TOKENS_FIRST = 600; // characters of a folded response

// [text, log-ratio or null, clipped or not] of each token; null where the response has none.
function tokensOf(sample, unit) {
  if (sample.log_ratio == null) return null;
  const ratio = (units) => (units == null ? null : units * unit);
  const clipped = (i) => sample.clipped_tokens?.[i] === 1;
  return sample.tokens.map((text, i) => [text, ratio(sample.log_ratio[i]), clipped(i)]);
}

// Of each token whether it is part of what was searched for.
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

// `limit`: characters after which a folded response shows no more.
function drawTokens(node, tokens, scale, limit, query) {
  const found = foundIn(tokens, query);
  let drawn = 0;
  for (const [i, [text, ratio, clipped]] of tokens.entries()) {
    if (drawn > limit) break;
    drawn += Math.max(1, text.length);
    if (ratio == null) {
      node.append(found[i] ? make("mark", text) : text);
      continue;
    }
    const share = Math.min(1, Math.abs(ratio) / scale);
    const kinds = ["token", ratio < 0 ? "lower" : "higher"];
    if (share > 0.5) kinds.push("far");
    if (clipped) kinds.push("clipped");
    if (found[i]) kinds.push("found");
    if (!text.trim() && text.includes("\n")) kinds.push("newline");
    const span = make(
      "span",
      { class: kinds.join(" "), style: `--share: ${percent(share)}` },
      text,
    );
    span.ratio = ratio;
    span.clipped = clipped;
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

// One tooltip for all tokens under `list`, beside the one that is pointed at.
function tokenTip(list) {
  const tip = make("div", { class: "tip", role: "tooltip", hidden: true });
  function show(event) {
    const token = event.target.closest?.(".token");
    tip.hidden = !token;
    if (!token) return;
    const kind =
      token.ratio < 0 ? "less probable" : token.ratio > 0 ? "more probable" : "unchanged";
    tip.replaceChildren(
      make("code", {}, JSON.stringify(token.textContent)),
      make("div", {}, `${ratioText(token.ratio)} · ${kind}${token.clipped ? " · clipped" : ""}`),
    );
    const box = token.getClientRects()[0];
    const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
    const above = box.top - tip.offsetHeight - 6;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above > 0 ? above : box.bottom + 6}px`;
  }
  list.addEventListener("pointerover", show);
  list.addEventListener("pointerdown", show);
  list.addEventListener("pointerleave", () => {
    tip.hidden = true;
  });
  window.addEventListener("scroll", () => {
    tip.hidden = true;
  });
  return tip;
}

function tokenLegend({ scale, colored, known, clipped }) {
  const end = number(scale, 2);
  const part =
    colored < known
      ? ` Only the newest ${colored.toLocaleString("en")} of ${known.toLocaleString("en")} such responses have theirs on the page, which would be too large otherwise.`
      : "";
  return make(
    "div",
    { class: "scale", hidden: true },
    make("span", { class: "token lower far", style: "--share: 100%" }, `−${end}`),
    make("span", { class: "ramp", "aria-hidden": "true" }),
    make("span", { class: "token higher far", style: "--share: 100%" }, `+${end}`),
    clipped ? make("span", { class: "token clipped", style: "--share: 0%" }, "clipped") : null,
    make(
      "span",
      { class: "meta" },
      "Log-ratio of each token: log-probability after the iteration's updates minus that before. Blue and dotted: less probable, orange and underlined: more. Framed: clipped by the loss. Without colours: not measured." +
        part,
    ),
  );
}
