"use strict";
// A hint above a table is shown only while the table is wider than its frame.
for (const hint of document.querySelectorAll(".hint")) {
  const frame = hint.nextElementSibling;
  new ResizeObserver(() => { hint.hidden = frame.scrollWidth <= frame.clientWidth; }).observe(frame);
}
// Filters, searches, sorts and pages the samples, which are all in the document.
(() => {
  const part = (name) => document.getElementById(`samples-${name}`);
  const [list, search, filter, order, marks, status, pager] =
    ["list", "search", "filter", "order", "marks", "status", "pager"].map(part);
  const [back, forward] = pager.querySelectorAll("button");
  const atOnce = Number(list.dataset.atOnce);
  const folded = (text) => text.normalize("NFC").toLowerCase();
  const samples = [...list.children].map((box, place) => ({
    box,
    place,
    tags: box.dataset.tags.split(" "),
    ranks: JSON.parse(box.dataset.ranks),
    text: folded([...box.querySelectorAll(".text")].map((each) => each.textContent).join("\n")),
  }));
  let found = [];
  let page = 0;

  const show = () => {
    const first = page * atOnce;
    const shown = found.slice(first, first + atOnce);
    for (const sample of samples) sample.box.hidden = !shown.includes(sample);
    list.append(...shown.map((sample) => sample.box));
    const pages = Math.max(1, Math.ceil(found.length / atOnce));
    pager.querySelector("span").textContent = `Page ${page + 1} of ${pages}`;
    back.disabled = page === 0;
    forward.disabled = page + 1 >= pages;
    pager.hidden = pages === 1;
    status.textContent = found.length
      ? `${found.length} of ${samples.length} prompts; ${first + 1} to ${first + shown.length} are shown.`
      : `No prompt of ${samples.length} matches. Search for fewer words, or choose another filter.`;
  };

  const larger = (one, other) => {
    const [a, b] = [one, other].map((sample) => sample.ranks[Number(order.value)]);
    if (a === null || b === null) return (a === null) - (b === null) || one.place - other.place;
    return b - a || one.place - other.place;
  };

  const refresh = () => {
    const words = folded(search.value).split(/\s+/).filter(Boolean);
    found = samples.filter((sample) => (!filter.value || sample.tags.includes(filter.value))
      && words.every((word) => sample.text.includes(word)));
    if (order.value) found.sort(larger);
    page = 0;
    show();
  };

  const turn = (by) => {
    page += by;
    show();
    list.querySelector("article:not([hidden]) h3").focus({preventScroll: true});
    list.scrollIntoView({block: "start"});
  };

  for (const control of [search, filter, order]) control.addEventListener("input", refresh);
  marks.addEventListener("change", () => list.classList.toggle("plain", !marks.checked));
  back.addEventListener("click", () => turn(-1));
  forward.addEventListener("click", () => turn(1));
  part("form").addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("keydown", (event) => {
    const writes = event.target.closest("input:not([type=checkbox]), select, textarea, [contenteditable]");
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || writes) return;
    event.preventDefault();
    search.focus();
  });
  part("form").hidden = false;
  refresh();
})();
