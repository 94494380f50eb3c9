// Small charts: curves over time, histograms, bars.
import { element, shape } from "./dom.js";

const GAP_S = 20; // without a value; a curve goes on over it
const WIDTH = 320, HEIGHT = 96, LEFT = 44, BOTTOM = 16, TOP = 6, RIGHT = 6;

// A rounded number at or above `value`, for the top of an axis.
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

// A chart of curves. `series` is [{name, values, style}] with null where there is no value; `seconds` are
// ages of the points, the newest last.
export function curves(title, seconds, series, format) {
  const known = series.flatMap((one) => one.values).filter((value) => value !== null);
  const low = Math.min(0, ...known), high = ceiling(Math.max(...known, 0));
  const span = Math.max(60, seconds.length ? seconds[0] : 60);
  const x = (age) => LEFT + (1 - age / span) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - low) / (high - low || 1)) * (HEIGHT - TOP - BOTTOM);
  const latest = series.map((one) => {
    const value = one.values.findLast((each) => each !== null);
    return `${one.name} ${value === undefined ? "not known" : format(value)}`;
  });
  return element("figure", { class: "chart" },
    element("figcaption", {}, element("span", { class: "name" }, title), series.map((one, at) =>
      element("span", { class: `key ${one.style}` }, latest[at]))),
    shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${latest.join(", ")}` },
      [low, (low + high) / 2, high].map((value) => [
        shape("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }),
        shape("text", { class: "axis", x: LEFT - 5, y: y(value) + 3, "text-anchor": "end" }, format(value)),
      ]),
      shape("text", { class: "axis", x: LEFT, y: HEIGHT - 3 }, `${Math.round(span / 60)} min ago`),
      shape("text", { class: "axis", x: WIDTH - RIGHT, y: HEIGHT - 3, "text-anchor": "end" }, "now"),
      series.map((one) => shape("path", { class: `curve ${one.style}`, d: path(one.values, seconds, x, y) }))));
}

// A line through the points; one that lasts over short gaps, such as moments in which no group waits.
function path(values, seconds, x, y) {
  const known = values.map((value, at) => at).filter((at) => values[at] !== null);
  const joined = (one, other) => Math.abs(seconds[known[one]] - seconds[known[other]]) <= GAP_S;
  return known.map((at, place) => {
    const begins = place === 0 || !joined(place - 1, place);
    const ends = place === known.length - 1 || !joined(place, place + 1);
    const point = `${begins ? "M" : "L"}${x(seconds[at]).toFixed(1)} ${y(values[at]).toFixed(1)}`;
    return begins && ends ? `${point}h0.1` : point; // a point between gaps is a dot
  }).join("");
}

// The newest value, and beside it a line without axes of those before.
export function figure(values, text) {
  return element("span", { class: "figure" }, sparkline(values), element("span", {}, text));
}

function sparkline(values) {
  const known = values.filter((value) => value !== null).slice(-60);
  if (known.length < 2) return element("span", { class: "spark" });
  const high = Math.max(...known, 1e-9);
  const points = known.map((value, at) =>
    `${(at / (known.length - 1) * 78 + 1).toFixed(1)},${(17 - value / high * 15).toFixed(1)}`);
  return shape("svg", { class: "spark", viewBox: "0 0 80 18", "aria-hidden": "true" },
    shape("polyline", { points: points.join(" ") }));
}

// Bars of staleness, one row a bucket and one column a place (waiting, leased, taken).
export function histogram(names, places) {
  const widest = names.length;
  return element("table", { class: "histogram" },
    element("caption", { class: "hidden" }, "Groups by staleness"),
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "versions behind"),
      places.map((place) => element("th", { scope: "col" }, place.name)))),
    element("tbody", {}, names.slice(0, widest).map((name, bucket) => {
      if (places.every((place) => !place.counts[bucket])) return null;
      return element("tr", {}, element("th", { scope: "row" }, name), places.map((place) =>
        element("td", {}, bar(place.counts[bucket], place.total))));
    })),
    element("tfoot", {}, element("tr", {}, element("th", { scope: "row" }, "mean"), places.map((place) =>
      element("td", {}, place.mean === null ? "–" : place.mean.toFixed(2))))));
}

function bar(part, total) {
  const share = total ? part / total : 0;
  const node = element("span", { class: "bar" });
  node.style.setProperty("--share", `${(share * 100).toFixed(1)}%`);
  return [node, element("span", {}, part.toLocaleString("en"))];
}
