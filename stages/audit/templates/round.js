const members = rowsOf(data.members), images = rowsOf(data.images), prompts = rowsOf(data.prompts);
const scorers = Object.keys(data.scorers);
const leafRow = new Map(images.map((one) => [one.leaf, one]));
const promptRow = new Map(prompts.map((one) => [one.prompt, one]));
members.forEach((one, i) => { one.leaves = data.leavesOf[i]; one.text = promptRow.get(one.prompt).text; });
const memberNames = Object.keys(data.members);
const has = (name) => memberNames.includes(name);
const parts = memberNames.filter((name) => /^[zr]\./.test(name));
const edgeRow = new Map(members.map((one) => [one.edge, one]));
const crisp = data.side && data.side <= 64 ? "crisp" : "";

/* Thumbnails: a button that opens the image large with all that is known of it. */
function thumb(leaf) {
  const row = leafRow.get(leaf), uri = data.thumbs[row.image];
  const name = `leaf ${leaf}, member ${row.member}, stride ${row.stride}`;
  const face = uri ? el("img", { src: uri, alt: name, loading: "lazy", width: 72, height: 72 }) : el("span", { class: "none" }, "no image kept");
  return el("button", { type: "button", class: "thumb " + crisp, "data-leaf": leaf, title: name, "aria-label": `open ${name}`, onclick: () => zoom(leaf) }, face);
}
function zoom(leaf) {
  const row = leafRow.get(leaf), uri = data.thumbs[row.image], box = $("zoom");
  box.replaceChildren(
    ...(uri ? [el("img", { src: uri, class: crisp, alt: `leaf ${leaf}` })] : []),
    el("p", {}, `Leaf ${leaf}: prompt ${row.prompt} “${promptRow.get(row.prompt).text}”, s ${row.s}, member ${row.member}, stride ${row.stride}.`),
    el("table", {}, el("tbody", {}, scorers.map((one) => el("tr", {}, el("th", { class: "text", scope: "row" }, one), row[`status.${one}`] === "ok"
      ? number("td", "images", leaf, `reward.${one}`, row[`reward.${one}`]) : el("td", { class: "wide" }, `${row[`status.${one}`]}: ${row[`reason.${one}`]}`))))),
    el("p", {}, el("button", { type: "button", onclick: () => box.close() }, "Close")));
  box.showModal();
}

/* Overview */
$("what").textContent = `Method ${data.method.name}; ${prompts.length} prompts, ${members.length} trained steps, ${new Set(images.map((one) => one.image)).size} images at ${images.length} leaves; scorers ` +
  scorers.map((one) => `${one} (weight ${data.scorers[one]})`).join(", ") + `; a missing reward: ${data.failures === "drop" ? "the member is dropped" : "the round stops"}.`;
for (const one of data.facts) $("facts").append(el("li", {}, one.name, number("b", one.of, "", one.key, one.value), el("small", {}, one.note)));
if (data.missing.leaf.length) {
  const host = el("div", { class: "scroll tall" });
  $("missing").append(el("h3", {}, data.missing.leaf.length === 1 ? "Failures: 1 reward is not there" : `Failures: ${data.missing.leaf.length} rewards are not there`), host);
  new Grid(host, { table: "missing", key: "leaf", columns: Object.keys(data.missing), rows: rowsOf(data.missing), text: ["scorer", "status", "reason"],
    mark: () => "failed", open: (row) => choose(row.prompt, row.s, true) });
}
function histogram(scorer) {
  const values = images.map((one) => one[`reward.${scorer}`]).filter((one) => one !== null);
  const low = Math.min(...values), high = Math.max(...values), bins = 30, width = 320, height = 110;
  const counts = new Array(bins).fill(0);
  for (const one of values) counts[high > low ? Math.min(bins - 1, Math.floor((bins * (one - low)) / (high - low))) : 0] += 1;
  const top = Math.max(...counts), step = (width - 20) / bins;
  const figures = data.rewardFigures[scorer];
  return el("figure", {}, el("svg", { viewBox: `0 0 ${width} ${height + 18}`, role: "img", "aria-label": `rewards of ${scorer} from ${fmt(low)} to ${fmt(high)}` },
    counts.map((count, i) => el("rect", { class: "column", x: 10 + i * step, y: height - (count / top) * (height - 8), width: step - 1, height: (count / top) * (height - 8) }, el("title", {}, `${count} images`))),
    el("line", { class: "axis", x1: 10, x2: width - 10, y1: height, y2: height }),
    el("text", { x: 10, y: height + 14 }, fmt(low)), el("text", { x: width - 10, y: height + 14, "text-anchor": "end" }, fmt(high))),
    el("figcaption", {}, el("b", {}, scorer), ": mean ", number("span", "rewardFigures", scorer, "mean", figures.mean), ", std ", number("span", "rewardFigures", scorer, "std", figures.std),
      "; ", number("span", "rewardFigures", scorer, "ok", figures.ok), " scored, ", number("span", "rewardFigures", scorer, "failed", figures.failed), " failed, ",
      number("span", "rewardFigures", scorer, "missing", figures.missing), " missing"));
}
scorers.forEach((one) => $("plots").append(histogram(one)));
new Grid($("by-step"), { table: "steps", key: "s", columns: Object.keys(data.steps), rows: rowsOf(data.steps), caption: "Variance (ddof 0) of the advantages of each trained step, and what the clip stopped there.",
  label: { s: "step s", variance: "advantage variance", clipped_advantages: "clipped advantages", flips: "strides disagree", clip_fraction: "clip fraction" } });
const pairs = Object.entries(data.correlation).flatMap(([scorer, values]) => Object.entries(values).map(([pair, value]) => ({ key: `${scorer} ${pair}`, scorer, pair, correlation: value })));
if (pairs.length) {
  const host = el("div", { class: "scroll" });
  $("agreement").append(el("h3", {}, "How much granularities agree"), host);
  new Grid(host, { table: "correlation", key: "key", columns: ["scorer", "pair", "correlation"], rows: pairs, text: ["scorer", "pair"], label: { pair: "strides", correlation: "rank correlation" },
    caption: "Spearman correlation of rewards within groups, pooled over the round." });
}
const optimizerColumns = ["optimizer_step", "points", "parents", "skipped", "zero_advantages", "loss", "ratio_mean", "ratio_min", "ratio_max", "clip_fraction", "grad_norm", "param_change"];
new Grid($("optimizer"), { table: "optimizerSteps", key: "optimizer_step", columns: optimizerColumns, rows: data.optimizerSteps });
for (const kind of ["best", "worst"]) for (const one of data.extremes[kind]) {
  const row = leafRow.get(one.leaf);
  $(kind).append(el("figure", {}, thumb(one.leaf), el("figcaption", {}, number("b", "extremes", one.leaf, "total", one.total), ` prompt ${row.prompt}`, el("small", {}, promptRow.get(row.prompt).text))));
}

/* One prompt */
let now = { prompt: null, step: null };
const promptGrid = new Grid($("prompt-list"), { table: "prompts", key: "prompt", columns: ["prompt", "text", "failures", "flips", "largest", "clipped", "zero", "entered", "steps"].filter((name) => name !== "flips" || has("flips")),
  rows: prompts, text: ["text"], open: (row) => choose(row.prompt), mark: (row) => (row.failures ? "failed" : ""), label: { failures: "failed", largest: "max |A|", flips: "flips", clipped: "clipped A", zero: "zero A" } });

function choose(prompt, step = null, jump = false) {
  const mine = members.filter((one) => one.prompt === prompt);
  const steps = [...new Set(mine.map((one) => one.s))].sort((a, b) => a - b);
  now = { prompt, step: steps.includes(step) ? step : steps[0] };
  const row = promptRow.get(prompt);
  $("prompt-name").textContent = `Prompt ${prompt}: ${row.text}`;
  promptGrid.select(row);
  $("step-buttons").replaceChildren(...(steps.length > 1 ? steps.map((one) => el("button", { type: "button", "aria-pressed": String(one === now.step), onclick: () => { choose(prompt, one); $("step-buttons").querySelector('[aria-pressed="true"]').focus(); } }, `step s = ${one}`)) : []));
  drawTree(prompt, now.step);
  $("matrices").replaceChildren(...steps.map((one) => matrix(prompt, one, mine.filter((m) => m.s === one))));
  try { history.replaceState(null, "", `#prompt=${prompt}&s=${now.step}`); } catch { /* a page from disk may not */ }
  if (jump) $("prompt").scrollIntoView();
}

function partOf(member, leaf, scorer) {
  const base = `${scorer}.${leaf.stride}` + (leaf.occurrence ? `#${leaf.occurrence + 1}` : "");
  return has(`z.${base}`) ? `z.${base}` : null;
}
function imageCell(member, leaf) {
  const row = leafRow.get(leaf), list = el("dl", {});
  for (const scorer of scorers) {
    list.append(el("dt", {}, scorer));
    if (row[`status.${scorer}`] !== "ok") { list.append(el("dd", { class: "why" }, `${row[`status.${scorer}`]}: ${row[`reason.${scorer}`]}`)); continue; }
    const part = partOf(member, row, scorer);
    list.append(number("dd", "images", leaf, `reward.${scorer}`, row[`reward.${scorer}`], { title: "reward" }),
      part ? number("dd", "members", member.edge, part, member[part], { title: "z-score", class: member[part] > 0 ? "pos" : member[part] < 0 ? "neg" : null }) : el("dd", {}));
  }
  return el("div", { class: "cell" }, thumb(leaf), list);
}
function matrix(prompt, step, rows) {
  const labels = [], strides = new Map();
  for (const one of rows) for (const leaf of one.leaves) {
    const at = leafRow.get(leaf), label = `stride ${at.stride}` + (at.occurrence ? ` #${at.occurrence + 1}` : "");
    if (!labels.includes(label)) labels.push(label);
    strides.set(`${one.edge} ${label}`, [...(strides.get(`${one.edge} ${label}`) || []), leaf]);
  }
  const inAll = memberNames.filter((name) => /^(r\.|z\.sum|at\.)/.test(name) || (name.startsWith("z.") && !labels.some((label) => label === `stride ${name.split(".").pop().replace("#", " #")}`)));
  const rest = [...inAll, "total", "entered", "ratio", "clip_side", "weight", "velocity_grad_norm", "share"].filter(has);
  const head = el("tr", {}, el("th", { scope: "col" }, "member"), el("th", { scope: "col" }, "advantage"), labels.map((one) => el("th", { scope: "col", class: "text" }, `${one}: reward, z`)), rest.map((one) => el("th", { scope: "col" }, one.replace("velocity_grad_norm", "‖∂L/∂v‖"))));
  const body = rows.map((one) => el("tr", { class: one.failures ? "failed" : one.flips ? "flips" : null, "data-edge": one.edge },
    el("th", { scope: "row" }, String(one.member), tags(one).map((tag) => [el("br"), tag])),
    number("td", "members", one.edge, "advantage", one.advantage, { class: "main " + (one.advantage > 0 ? "pos" : one.advantage < 0 ? "neg" : "") }),
    labels.map((label) => el("td", { class: "text" }, (strides.get(`${one.edge} ${label}`) || []).map((leaf) => imageCell(one, leaf)))),
    rest.map((name) => number("td", "members", one.edge, name, one[name], { class: /^(at\.|total|advantage|share)/.test(name) ? (one[name] > 0 ? "pos" : one[name] < 0 ? "neg" : null) : null }))));
  return el("section", { id: `matrix-${step}` }, el("h3", {}, `Step s = ${step}: ${rows.length} members × ${labels.length} stride${labels.length === 1 ? "" : "s"}`),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, body))),
    el("p", { class: "soft" }, "How one of these came about: ", el("code", {}, `granular explain ${data.run} --round ${data.round} --prompt ${prompt} --step ${step} --member ${rows[0].member}`)));
}
function tags(one) {
  const found = [];
  const add = (text, bad, title = "") => found.push(el("span", { class: bad ? "tag bad" : "tag", title }, text));
  if (one.flips) add("strides disagree", false, "the granularities' sums differ in sign");
  if (one.clipped) add("advantage clipped", false, `from ${one.total}`);
  if (one.clip_side) add(one.clip_side > 0 ? "ratio clipped above" : "ratio clipped below", false);
  if (one.failures) add(`${one.failures} failed`, true);
  if (one.why_zero) add(`0: ${one.why_zero}`, one.why_zero === "dropped");
  if (!one.entered) add("not in the update", false);
  return found;
}

/* The tree of a prompt: noise at the left, images at the right; trained steps are coloured by their advantage. */
function drawTree(prompt, step) {
  const tree = data.trees[prompt], host = $("tree");
  $("tree-note").replaceChildren();
  host.hidden = !tree;
  if (!tree) { $("tree-note").append(el("p", { class: "note" }, "The tree of this prompt is not on this page; ", el("code", {}, `granular audit ${data.run} --round ${data.round} --prompt ${prompt}`), " draws it.")); return; }
  const ofStep = new Set(members.filter((one) => one.prompt === prompt && one.s === step).flatMap((one) => one.leaves));
  let leaves = tree.leaves.filter(([, leaf]) => leafRow.get(leaf).s === step);
  if (!leaves.length) leaves = tree.leaves.filter(([, leaf]) => ofStep.has(leaf));
  if (!leaves.length || leaves.length === 1) leaves = tree.leaves;
  const byNode = new Map();
  for (const [node, leaf] of leaves) byNode.set(node, [...(byNode.get(node) || []), leaf]);
  const wanted = new Set();
  for (const node of byNode.keys()) for (let at = node; at >= 0 && !wanted.has(at); at = tree.parent[at]) wanted.add(at);
  tree.edge.forEach((edge, node) => { if (edge >= 0 && edgeRow.has(edge) && edgeRow.get(edge).s === step && wanted.has(tree.parent[node])) wanted.add(node); });
  const children = new Map(), roots = [];
  for (const node of [...wanted].sort((a, b) => a - b)) {
    const up = tree.parent[node];
    if (up < 0) roots.push(node); else children.set(up, [...(children.get(up) || []), node]);
  }
  const size = 40, gap = Math.max(46, Math.min(96, 500 / tree.levels.length)), x = (node) => 30 + tree.level[node] * gap, y = new Map();
  let next = 0;
  const place = (node) => {
    const below = children.get(node) || [];
    below.forEach(place);
    if (byNode.has(node) || !below.length) { y.set(node, 34 + next * (size + 6) + size / 2); next += 1; }
    else y.set(node, below.reduce((sum, one) => sum + y.get(one), 0) / below.length);
  };
  roots.forEach(place);
  const right = 30 + (tree.levels.length - 1) * gap, width = right + 270, height = 44 + next * (size + 6);
  const links = [], dots = [], faces = [];
  for (const node of wanted) {
    const up = tree.parent[node], one = edgeRow.get(tree.edge[node]);
    if (up >= 0) {
      const turn = x(up) + (x(node) - x(up)) * 0.5;
      const path = `M${x(up)},${y.get(up)} C${turn},${y.get(up)} ${turn},${y.get(node)} ${x(node)},${y.get(node)}`;
      links.push(el("path", { d: path, class: "link " + (one ? (one.advantage > 0 ? "up" : one.advantage < 0 ? "down" : "zero") : "") },
        el("title", {}, one ? `trained step s = ${one.s}, member ${one.member}, advantage ${one.advantage}` : "deterministic step")));
    }
    dots.push(el("circle", { cx: x(node), cy: y.get(node), r: 4, class: "node" }, el("title", {}, `σ = ${tree.levels[tree.level[node]]}`)));
    if (byNode.has(node)) {
      const leaf = byNode.get(node)[0], row = leafRow.get(leaf), uri = data.thumbs[row.image], left = right + 14;
      if (uri) faces.push(el("image", { href: uri, x: left, y: y.get(node) - size / 2, width: size, height: size }));
      const what = byNode.get(node).map((one) => leafRow.get(one)).map((one) => `member ${one.member}, stride ${one.stride}`).join("; ");
      faces.push(el("text", { x: left + size + 8, y: y.get(node) - 2 }, what));
      faces.push(el("text", { x: left + size + 8, y: y.get(node) + 13 }, scorers.map((one) => `${one} ${row[`status.${one}`] === "ok" ? fmt(row[`reward.${one}`]) : row[`status.${one}`]}`).join(", ")));
    }
  }
  const heads = tree.levels.map((sigma, i) => el("text", { x: 30 + i * gap, y: 16, "text-anchor": "middle" }, `σ ${sigma.toFixed(3)}`));
  host.replaceChildren(el("svg", { width, height, viewBox: `0 0 ${width} ${height}`, class: crisp, role: "img", "aria-label": `tree of prompt ${prompt}, step ${step}: ${wanted.size} states, ${byNode.size} images` }, links, dots, faces, heads));
  $("tree-note").append(el("p", { class: "soft" }, "Noise at the left, images at the right. Trained steps: solid where the advantage is positive, dashed where it is negative, dotted where it is 0; thin lines are deterministic."));
}

/* All trained steps */
const flags = [["flips", "strides disagree"], ["failures", "failures"], ["clipped", "advantage clipped"], ["clip_side", "ratio clipped"], ["zero", "advantage 0"], ["out", "not in the update"]].filter(([name]) => name === "zero" || name === "out" || has(name));
const pressed = new Set();
for (const [name, label] of flags) $("flags").append(el("label", {}, el("input", { type: "checkbox", "data-flag": name, onchange: (event) => { event.target.checked ? pressed.add(name) : pressed.delete(name); filter(); } }), label));
const judged = [...new Set(parts.map((name) => name.split(".").slice(1, -1).join(".")))];
for (const one of judged) $("scorer").append(el("option", { value: one }, one));
const leading = ["prompt", "text", "s", "member", "advantage", "total", "why_zero", "clipped", "flips", "disagreement", "failures", "ratio", "clip_side"].filter((name) => name === "text" || has(name));
const allColumns = [...leading, ...memberNames.filter((name) => name !== "edge" && !leading.includes(name))];
const columnsOf = (scorer) => allColumns.filter((name) => !scorer || !/^[zr]\./.test(name) || name.split(".").slice(1, -1).join(".") === scorer);
const memberGrid = new Grid($("member-list"), { table: "members", key: "edge", columns: allColumns, rows: members, text: ["text", "why_zero"], sort: { name: "advantage", down: true },
  mark: (row) => (row.failures ? "failed" : row.flips ? "flips" : ""), open: (row) => choose(row.prompt, row.s, true), label: { velocity_grad_norm: "‖∂L/∂v‖", text: "prompt text", why_zero: "why 0" } });

const COMPARE = { ">": (a, b) => a > b, "<": (a, b) => a < b, ">=": (a, b) => a >= b, "<=": (a, b) => a <= b, "=": (a, b) => a === b || String(a) === String(b) };
function filter() {
  const tests = [], wrong = [];
  for (const word of $("filter").value.trim().toLowerCase().split(/\s+/).filter(Boolean)) {
    const found = word.match(/^([\w.#]+)(>=|<=|>|<|=)(.*)$/);
    if (!found) { tests.push((row) => row.text.toLowerCase().includes(word) || row.why_zero === word); continue; }
    const name = allColumns.find((one) => one.toLowerCase() === found[1]);
    if (!name) { wrong.push(found[1]); continue; }
    if (found[3] === "") continue;
    const value = Number.isNaN(Number(found[3])) ? found[3] : Number(found[3]);
    tests.push((row) => row[name] !== null && COMPARE[found[2]](row[name], value));
  }
  const truth = { zero: (row) => row.advantage === 0, out: (row) => !row.entered };
  for (const name of pressed) tests.push(truth[name] || ((row) => Boolean(row[name])));
  const rows = members.filter((row) => tests.every((test) => test(row)));
  memberGrid.show(rows, columnsOf($("scorer").value));
  $("count").textContent = `${rows.length} of ${members.length}` + (wrong.length ? `; no column ${wrong.join(", ")}` : "");
}
function clearFilter() {
  $("filter").value = ""; $("scorer").value = ""; pressed.clear();
  document.querySelectorAll("[data-flag]").forEach((one) => { one.checked = false; });
  filter();
}
$("filter").addEventListener("input", filter);
$("scorer").addEventListener("change", filter);
$("clear").addEventListener("click", clearFilter);
$("csv").addEventListener("click", () => download(`${data.run}-round-${data.round}-steps.csv`, memberGrid.order(), ["edge", ...memberGrid.columns]));
$("csv-images").addEventListener("click", () => download(`${data.run}-round-${data.round}-rewards.csv`, images, Object.keys(data.images)));
filter();

const fragment = new URLSearchParams(location.hash.slice(1));
const asked = Number(fragment.get("prompt"));
choose(fragment.has("prompt") && promptRow.has(asked) ? asked : data.first, fragment.has("s") ? Number(fragment.get("s")) : null, fragment.has("prompt"));
keys(() => [promptGrid, memberGrid], (event) => {
  if (event.key === "/") { $("filter").focus(); $("filter").select(); return true; }
  if (event.key === "Escape") { clearFilter(); return true; }
  if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
    const at = document.activeElement;
    if (at.closest && at.closest("#tree")) return false;
    const order = promptGrid.order(), here = order.findIndex((one) => one.prompt === now.prompt);
    choose(order[(here + (event.key === "ArrowRight" ? 1 : -1) + order.length) % order.length].prompt, now.step);
    return true;
  }
  return false;
});
