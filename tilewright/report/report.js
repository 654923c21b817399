"use strict";
// Tables sort by the column that is clicked: the largest first, then the smallest.
for (const head of document.querySelectorAll("th[data-sort]")) {
  head.addEventListener("click", () => {
    const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
    const down = head.getAttribute("aria-sort") !== "descending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const compare = head.dataset.sort === "number"
      ? (a, b) => Number(value(a)) - Number(value(b))
      : (a, b) => value(b).localeCompare(value(a));
    const rows = [...body.rows].sort((a, b) => (down ? -1 : 1) * compare(a, b));
    body.append(...rows);
  });
}
// A link to a task opens it.
const open = () => {
  const found = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (found instanceof HTMLDetailsElement) found.open = true;
};
addEventListener("hashchange", open);
open();
