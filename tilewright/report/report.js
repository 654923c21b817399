"use strict";
// Tables sort by the column whose button is pressed: the largest first, then the smallest.
const said = document.getElementById("sorted");
for (const button of document.querySelectorAll("th[data-sort] button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
    const column = head.cellIndex, down = head.getAttribute("aria-sort") !== "descending";
    for (const other of table.querySelectorAll("thead th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const compare = head.dataset.sort === "number"
      ? (a, b) => Number(value(a)) - Number(value(b))
      : (a, b) => value(b).localeCompare(value(a));
    const rows = [...body.rows].sort((a, b) => (down ? -1 : 1) * compare(a, b));
    body.append(...rows);
    if (said) said.textContent = `Sorted by ${button.textContent}, ${head.getAttribute("aria-sort")}.`;
  });
}
// A link to a task opens it.
const open = () => {
  const found = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (found instanceof HTMLDetailsElement) {
    found.open = true;
    found.querySelector("summary").focus({ preventScroll: true });
  }
};
addEventListener("hashchange", open);
open();
