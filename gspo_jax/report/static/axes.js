// Axes: positions of values, labels of ticks. Also the smoothing of curves.

const LOG_TICKS = 5; // maximum number of ticks of a log scale

function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((m) => m * power >= raw * 0.999) * power;
  const list = [];
  for (let i = Math.ceil(low / step - 1e-6); i * step <= high + step * 1e-6; i++)
    list.push(i * step);
  return { step, list };
}

function stepTicks(low, high, count) {
  const found = ticks(low, Math.max(high, low + 1), Math.max(1, count));
  if (found.step < 1)
    return { step: 1, list: [low, high].filter((v, i, all) => all.indexOf(v) === i) };
  return { step: found.step, list: found.list.filter(Number.isInteger) };
}

// Formats a tick with as many digits as distinguish it from the next one.
function tickLabel(v, step, unit) {
  const scale = unit === "percent" ? 100 : 1;
  const value = v * scale;
  const suffix = unit === "percent" ? "%" : "";
  if (Math.abs(value) < step * scale * 1e-6) return `0${suffix}`;
  let decimals = 0;
  for (let size = step * scale; decimals < 9; size *= 10, decimals++) {
    if (size > 0.9 && Math.abs(size - Math.round(size)) < 1e-3 * size) break;
  }
  if (decimals > 4 && unit !== "ratio") {
    const digits = Math.ceil(Math.log10(Math.abs(value) / (step * scale))) + 1;
    const text = Number(value.toPrecision(Math.min(15, Math.max(2, digits)))).toExponential();
    return minus(text) + suffix;
  }
  const large = LARGE.find(([unit]) => Math.abs(value) >= unit);
  if (Math.abs(value) >= 1e4) return minus(short(value / large[0], 4) + large[1]);
  return minus(value.toFixed(decimals)) + suffix;
}

// Returns a number to subtract from the labels of ticks, if the values differ by little of their
// size, e.g. 1 for values from 1.000001 to 1.000004; else 0.
function baseOf(low, high, step) {
  const size = Math.max(Math.abs(low), Math.abs(high));
  if (step >= 1e-5 * size) return 0;
  for (let digits = 1; digits < 16; digits++) {
    const base = Number(((low + high) / 2).toPrecision(digits));
    if (Math.abs(base - (low + high) / 2) <= high - low) return base;
  }
  return 0;
}

// Returns an axis for the values. Its `place` maps a value to a share of the height, `list` and
// `names` are the ticks and their labels, and `note` has the number subtracted from the labels.
function linearAxis(values, { unit, zero }) {
  let low = values.reduce((a, b) => Math.min(a, b), Infinity);
  let high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!values.length) [low, high] = [0, 1];
  if (zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  if (unit === "percent" && low >= 0 && high > 0.5) [low, high] = [0, Math.max(1, high)];
  if (high - low <= 1e-9 * Math.abs(high)) {
    const more = Math.abs(high) * 0.1 || 1;
    [low, high] = [low === 0 ? 0 : low - more, high + more];
  }
  const { step } = ticks(low, high, 4);
  low = Math.floor(low / step + 1e-6) * step;
  high = Math.ceil(high / step - 1e-6) * step;
  const { list } = ticks(low, high, Math.round((high - low) / step));
  const base = baseOf(low, high, step);
  const label = (v) => (base && v > base ? "+" : "") + tickLabel(v - base, step, unit);
  const place = (v) => (v - low) / (high - low);
  const note = base
    ? `labels: from ${minus(String(unit === "percent" ? `${100 * base}%` : base))}`
    : "";
  return { low, high, list, names: list.map(label), place, note };
}

// Returns an axis with powers of ten as ticks. Values of 0 are drawn on its bottom line.
function logAxis(values, { unit }) {
  const positive = values.filter((v) => v > 0).sort((a, b) => a - b);
  // A few values of almost 0 do not extend the axis: they are drawn on the bottom line, too.
  const least = Math.max(positive[0], positive[Math.floor(positive.length / 50)] / 100);
  const first = Math.floor(Math.log10(least) + 1e-9);
  const last = Math.ceil(Math.log10(positive[positive.length - 1]) - 1e-9);
  const stride = Math.ceil((last - first) / (LOG_TICKS - 1));
  const list = [];
  for (let power = first; power <= last; power += stride) list.push(10 ** power);
  const place = (v) => Math.max(0, (Math.log10(Math.max(v, 1e-300)) - first) / (last - first));
  const label = (v) =>
    unit === "percent" || (v >= 1e-3 && v < 1e4) ? tickLabel(v, v, unit) : tickPower(v);
  return {
    low: 10 ** first,
    high: 10 ** last,
    list,
    names: list.map(label),
    place,
    note: "log scale",
  };
}

const tickPower = (v) => minus(v.toExponential(0).replace("+", ""));

// Smooths values by local linear regression: a straight line is fitted to each value's neighbours,
// with Gaussian weights. Their standard deviation is a share of the number of values. Unlike a moving
// average, it does not flatten the ends of a trend.
function smooth(values, share) {
  const width = share * values.length;
  if (width < 0.5 || values.length < 20) return values;
  const reach = Math.ceil(2.5 * width);
  const weights = Array.from({ length: reach + 1 }, (_, i) => Math.exp(-0.5 * (i / width) ** 2));
  return values.map((v, i) => {
    if (v == null) return null;
    let [mass, lean, spread, sum, slant] = [0, 0, 0, 0, 0];
    let [low, high] = [v, v];
    const end = Math.min(values.length - 1, i + reach);
    for (let j = Math.max(0, i - reach); j <= end; j++) {
      if (values[j] == null) continue;
      const [weight, x] = [weights[Math.abs(i - j)], j - i];
      low = Math.min(low, values[j]);
      high = Math.max(high, values[j]);
      mass += weight;
      lean += weight * x;
      spread += weight * x * x;
      sum += weight * values[j];
      slant += weight * x * values[j];
    }
    const scale = mass * spread - lean * lean;
    const fit =
      scale > 1e-9 * mass * spread ? (spread * sum - lean * slant) / scale : sum / mass;
    return Math.min(high, Math.max(low, fit)); // within the range of the neighbours
  });
}
