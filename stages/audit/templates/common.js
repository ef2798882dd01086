"use strict";
const data = JSON.parse(document.getElementById("data").textContent);

/* An element with attributes, handlers (on…) and children; texts are texts, never markup. */
function el(tag, attributes = {}, ...children) {
  const svg = el.SVG.has(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((one) => one !== null && one !== undefined));
  return made;
}
el.SVG = new Set(["svg", "path", "circle", "line", "rect", "text", "image", "g", "title"]);
const $ = (id) => document.getElementById(id);

/* Columns → rows. */
function rowsOf(columns) {
  const names = Object.keys(columns);
  return (columns[names[0]] || []).map((_, i) => Object.fromEntries(names.map((name) => [name, columns[name][i]])));
}

/* A number for people; the stored one stays beside it in data-value. */
function fmt(value, name = "") {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return String(value).replace("-", "−");
  let text;
  if (/^ratio/.test(name)) text = value.toFixed(6);
  else if (/share|fraction/.test(name)) text = (100 * value).toFixed(1) + " %";
  else if (Math.abs(value) >= 1e4 || Math.abs(value) < 1e-3) text = value.toExponential(2);
  else text = value.toPrecision(4);
  return text.replace("-", "−").replace("e−", "e−");
}

/* Attributes that say which stored number an element shows. */
const stored = (table, key, name, value) => ({ "data-table": table, "data-key": key, "data-name": name, "data-value": value === null || value === undefined ? "" : String(value) });
const number = (tag, table, key, name, value, extra = {}) => el(tag, { ...stored(table, key, name, value), ...extra }, fmt(value, name));

function download(name, rows, columns) {
  const quote = (value) => {
    const text = value === null || value === undefined ? "" : String(value);
    return /[",\n\r]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  };
  const lines = [columns, ...rows.map((row) => columns.map((one) => row[one]))].map((line) => line.map(quote).join(","));
  const url = URL.createObjectURL(new Blob([lines.join("\r\n") + "\r\n"], { type: "text/csv" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

/* A table that sorts by its headings, walks by keys and shows some hundred rows at a time. */
class Grid {
  static SOME = 400;
  constructor(host, { table, key, columns, rows, open = null, mark = null, text = [], sort = null, caption = "", label = {} }) {
    Object.assign(this, { host, table, key, columns, rows, open, mark, text, sort, caption, label, all: false, selected: null });
    this.shown = rows;
    this.draw();
  }
  show(rows, columns = this.columns) { this.shown = rows; this.columns = columns; this.all = false; this.draw(); }
  order() {
    if (!this.sort) return this.shown;
    const { name, down } = this.sort;
    const rank = (value) => (typeof value === "boolean" ? Number(value) : value);
    return [...this.shown].sort((a, b) => {
      const one = rank(a[name]), two = rank(b[name]);
      if (one === null || one === undefined) return two === null || two === undefined ? 0 : 1;   /* what is not there is last */
      if (two === null || two === undefined) return -1;
      return (one < two ? -1 : one > two ? 1 : 0) * (down ? -1 : 1);
    });
  }
  sortBy(name) {
    const now = this.sort;
    this.sort = now && now.name === name ? (now.down ? { name, down: false } : null) : { name, down: true };
    this.draw();
    this.host.querySelector(`th[data-column="${CSS.escape(name)}"] button`).focus();
  }
  draw() {
    const rows = this.order();
    const some = this.all ? rows : rows.slice(0, Grid.SOME);
    const head = this.columns.map((name) => el("th", { scope: "col", "data-column": name, class: this.text.includes(name) ? "text" : null,
      "aria-sort": this.sort && this.sort.name === name ? (this.sort.down ? "descending" : "ascending") : "none" },
      el("button", { type: "button", onclick: () => this.sortBy(name) }, this.label[name] || name)));
    const body = some.map((row) => this.row(row));
    const more = some.length < rows.length ? el("p", {}, el("button", { type: "button", onclick: () => { this.all = true; this.draw(); } }, `show all ${rows.length} rows (${some.length} are shown)`)) : null;
    this.host.replaceChildren(el("table", {}, this.caption ? el("caption", {}, this.caption) : null, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)), ...(more ? [more] : []));
    this.drawn = some;
    if (body.length && this.open) body[0].tabIndex = 0;
  }
  row(row) {
    const key = row[this.key];
    const cells = this.columns.map((name) => {
      const value = row[name], words = this.text.includes(name);
      const sign = typeof value === "number" && /^(z\.|at\.|total|advantage|share)/.test(name) ? (value > 0 ? "pos" : value < 0 ? "neg" : null) : null;
      return number("td", this.table, key, name, value, { class: words ? "text" : sign, title: words ? value : null });
    });
    const marks = this.mark ? this.mark(row) : "";
    const open = this.open ? { tabindex: -1, onclick: () => { this.select(row); this.open(row); }, "aria-selected": String(this.selected === key) } : {};
    return el("tr", { "data-key": key, class: marks || null, ...open }, cells);
  }
  select(row) {
    this.selected = row[this.key];
    for (const tr of this.host.querySelectorAll("tbody tr")) tr.setAttribute("aria-selected", String(tr.dataset.key === String(this.selected)));
  }
  /* Moves the focus by some rows; from elsewhere, to the first. */
  walk(by) {
    const rows = [...this.host.querySelectorAll("tbody tr")];
    if (!rows.length) return;
    const here = rows.indexOf(document.activeElement);
    const next = here < 0 ? Math.max(rows.findIndex((tr) => tr.getAttribute("aria-selected") === "true"), 0) : Math.min(Math.max(here + by, 0), rows.length - 1);
    rows.forEach((tr, i) => { tr.tabIndex = i === next ? 0 : -1; });
    rows[next].focus();
  }
}

/* The grid that j, k and the arrows walk: that of the focus, else the first. */
function keys(grids, more) {
  document.addEventListener("keydown", (event) => {
    const at = document.activeElement, typing = at && (/^(INPUT|SELECT|TEXTAREA)$/.test(at.tagName));
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (typing) {
      if (event.key === "Escape") at.blur();
      return;
    }
    if (document.querySelector("dialog[open]")) return;
    const on = grids().find((one) => one.host.contains(at));
    const row = at && at.tagName === "TR";
    const by = { j: 1, k: -1, ArrowDown: row ? 1 : 0, ArrowUp: row ? -1 : 0 }[event.key];
    if (by) { (on || grids()[0]).walk(by); event.preventDefault(); return; }
    if (row && on && (event.key === "Home" || event.key === "End")) { on.walk(event.key === "Home" ? -1e9 : 1e9); event.preventDefault(); return; }
    if (row && on && on.open && (event.key === "Enter" || event.key === " ")) { at.click(); event.preventDefault(); return; }
    if (more(event)) event.preventDefault();
  });
}
