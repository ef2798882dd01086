const rounds = rowsOf(data.rounds), names = Object.keys(data.rounds);
const alarmed = new Map(data.alarms.map((one) => [one.round, one.sentences]));
const pages = new Set(data.pages);

if (!data.alarms.length) $("alarms").append(el("li", {}, "none"));
for (const one of data.alarms) for (const sentence of one.sentences) $("alarms").append(el("li", {}, el("b", {}, `round ${one.round}: `), sentence));

function curve(name) {
  const points = rounds.filter((one) => typeof one[name] === "number"), width = 340, height = 130, left = 8;
  if (!points.length) return null;
  const values = points.map((one) => one[name]), low = Math.min(...values), high = Math.max(...values);
  const first = Math.min(...rounds.map((one) => one.round)), last = Math.max(...rounds.map((one) => one.round));
  const x = (round) => left + 6 + (last > first ? (round - first) / (last - first) : 0.5) * (width - 2 * left - 12);
  const y = (value) => 12 + (high > low ? (high - value) / (high - low) : 0.5) * (height - 34);
  return el("figure", {}, el("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${name}, round ${first} to ${last}` },
    el("line", { class: "axis", x1: left, x2: width - left, y1: height - 16, y2: height - 16 }),
    el("path", { class: "curve", d: points.map((one, i) => `${i ? "L" : "M"}${x(one.round)},${y(one[name])}`).join("") }),
    points.map((one) => el("circle", { class: alarmed.has(one.round) ? "dot alarm" : "dot", cx: x(one.round), cy: y(one[name]), r: alarmed.has(one.round) ? 5 : 3 }, el("title", {}, `round ${one.round}: ${one[name]}`))),
    el("text", { x: left, y: height - 3 }, `round ${first}`), el("text", { x: width - left, y: height - 3, "text-anchor": "end" }, String(last))),
    el("figcaption", {}, el("b", {}, name), ": last ", number("span", "rounds", points.at(-1).round, name, points.at(-1)[name]), `, between ${fmt(low, name)} and ${fmt(high, name)}`));
}
for (const name of names) if (name !== "round") { const figure = curve(name); if (figure) $("plots").append(figure); }

const grid = new Grid($("rounds"), { table: "rounds", key: "round", columns: names, rows: rounds, mark: (row) => (alarmed.has(row.round) ? "failed" : ""), open: (row) => {
  if (pages.has(row.round)) location.href = `round-${String(row.round).padStart(4, "0")}.html`;
  else $("said").textContent = row.round ? `granular audit ${data.run} --round ${row.round} makes the page of round ${row.round}` : "round 0 is the policy before training";
} });
$("csv").addEventListener("click", () => download(`${data.run}-rounds.csv`, grid.order(), names));
keys(() => [grid], () => false);
