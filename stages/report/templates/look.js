"use strict";
// Tables sort by their headers, one field filters the rows of all of them; keys: / filter, j k next and previous
// section, p published columns, Escape clears.
(() => {
  const all = (selector, root) => [...(root || document).querySelectorAll(selector)];
  const filter = document.querySelector("#filter");
  const sections = all("section[id]");

  function sort(head) {
    const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
    // Numbers from large to small first, words from a to z first; the third time is the order it came in.
    const numbers = !head.classList.contains("key");
    const order = numbers ? ["descending", "ascending", "none"] : ["ascending", "descending", "none"];
    const next = order[(order.indexOf(head.getAttribute("aria-sort")) + 1) % 3];
    all("th", table).forEach((one) => one.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", next);
    const known = (row) => row.cells[column].dataset.value;
    const text = (row) => row.cells[column].textContent.trim();
    const direction = next === "descending" ? -1 : 1;
    const compare = {
      none: (a, b) => a.dataset.place - b.dataset.place,
      numbers: (a, b) => {
        const [x, y] = [known(a), known(b)];
        if (x === undefined || y === undefined) return (x === undefined) - (y === undefined);
        return direction * (x - y);
      },
      words: (a, b) => direction * text(a).localeCompare(text(b), "en", { numeric: true }),
    }[next === "none" ? "none" : numbers ? "numbers" : "words"];
    [...body.rows].sort((a, b) => compare(a, b) || a.dataset.place - b.dataset.place).forEach((row) => body.append(row));
  }

  function narrow() {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const body of all("table.sorts tbody")) {
      let shown = 0;
      for (const row of body.rows) {
        const name = all("td.key", row).map((cell) => cell.textContent.toLowerCase()).join(" ");
        row.hidden = !words.every((word) => name.includes(word));
        shown += !row.hidden;
      }
      body.closest(".scroll").querySelector("p.none").hidden = shown > 0;
    }
    for (const one of all(".pair")) one.hidden = !words.every((word) => one.textContent.toLowerCase().includes(word));
  }

  function here() {
    let found = sections[0];
    for (const one of sections) if (one.getBoundingClientRect().top < 90) found = one;
    return found;
  }

  function mark() {
    const id = here() && here().id;
    for (const one of all(".bar a")) one.classList.toggle("here", one.getAttribute("href") === "#" + id);
  }

  function walk(step) {
    const at = sections.indexOf(here());
    const next = sections[Math.min(Math.max(at + step, 0), sections.length - 1)];
    if (!next) return;
    next.scrollIntoView();
    next.focus({ preventScroll: true });
    mark();
  }

  const published = document.querySelector("#published");
  function toggle() {
    const hidden = document.body.classList.toggle("hide-published");
    published.setAttribute("aria-pressed", String(!hidden));
  }

  for (const body of all("table.sorts tbody")) [...body.rows].forEach((row, place) => { row.dataset.place = place; });
  for (const head of all("table.sorts th")) head.querySelector("button").addEventListener("click", () => sort(head));
  if (published) published.addEventListener("click", toggle);
  filter.addEventListener("input", narrow);

  // Pairs of images, in the order of one scorer's differences, the worst for the second policy first.
  for (const button of all(".choices button")) {
    button.addEventListener("click", () => {
      for (const one of all(".choices button")) one.setAttribute("aria-pressed", String(one === button));
      const grid = document.querySelector(".pairs"), name = button.dataset.scorer;
      const value = (pair) => (pair.dataset[name] === undefined ? Infinity : Number(pair.dataset[name]));
      [...grid.children].sort((a, b) => value(a) - value(b) || a.dataset.place - b.dataset.place).forEach((one) => grid.append(one));
    });
  }

  document.addEventListener("scroll", mark, { passive: true });
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") { filter.value = ""; narrow(); filter.blur(); return; }
    if (event.target === filter) return;
    const action = { "/": () => filter.focus(), j: () => walk(1), k: () => walk(-1), p: published ? toggle : null }[event.key];
    if (action) { event.preventDefault(); action(); }
  });
  mark();
})();
