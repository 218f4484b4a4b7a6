"use strict";
// A hint above a table is shown only while the table is wider than its frame.
for (const hint of document.querySelectorAll(".hint")) {
  const frame = hint.nextElementSibling;
  new ResizeObserver(() => { hint.hidden = frame.scrollWidth <= frame.clientWidth; }).observe(frame);
}
// Filters, searches, sorts and pages the samples that are embedded as JSON. Texts are inserted as text, never as markup.
(() => {
  const PAGE = 5;
  const data = JSON.parse(document.getElementById("samples-data").textContent);
  const list = document.getElementById("samples-list");
  const search = document.getElementById("samples-search");
  const filter = document.getElementById("samples-filter");
  const order = document.getElementById("samples-order");
  const marks = document.getElementById("samples-marks");
  const status = document.getElementById("samples-status");
  const pager = document.getElementById("samples-pager");
  const [back, forward] = pager.querySelectorAll("button");
  const where = pager.querySelector("span");
  let found = [];
  let page = 0;

  const folded = (text) => text.normalize("NFC").toLowerCase();
  const haystacks = data.samples.map((sample) => folded([
    ...sample.prompt.map((message) => message.content),
    ...[...sample.answers, ...sample.others].map((answer) => answer.parts.join("")),
  ].join("\n")));

  const make = (tag, name, ...children) => {
    const element = document.createElement(tag);
    if (name) element.className = name;
    element.append(...children);
    return element;
  };

  const paragraph = (parts, differs) => {
    const text = make("p", "text");
    text.dir = "auto";
    text.append(...parts.map((part, place) => (place % 2 ? make(differs, "", part) : part)));
    return text;
  };

  const facts = (pairs) => make("dl", "", ...pairs.map(
    ([name, value]) => make("div", "", make("dt", "", name), make("dd", "", value))));

  const answerBox = (answer) => {
    const model = data.models[answer.model];
    const dot = make("i", "dot");
    dot.style.background = model.colour;
    const heading = make("h4", "", dot, answer.model === "policy" ? "Policy" : model.label);
    if (answer.preferred) heading.append(" ", make("span", "mark", data.mark));
    const box = make("div", `response${["sft", "policy"].includes(answer.model) ? " " + answer.model : ""}`, heading);
    const empty = !answer.parts.join("").trim();
    box.append(empty ? make("p", "empty", "(empty answer)")
      : paragraph(answer.parts, answer.model === "sft" ? "del" : "ins"));
    if (!answer.ended) box.append(make("p", "cut", "cut off at the limit, without end of sequence"));
    box.append(facts(answer.facts));
    return box;
  };

  const promptBox = (message, single) => {
    const box = make("div", "prompt");
    if (!single) box.append(make("p", "role", message.role));
    box.append(paragraph([message.content], "ins"));
    return box;
  };

  const otherAnswers = (sample) => {
    const box = make("details", "others", make("summary", "", `Other models’ answers (${sample.others.length})`));
    box.addEventListener("toggle", () => {
      if (box.open && box.childElementCount === 1) box.append(make("div", "pair", ...sample.others.map(answerBox)));
    });
    return box;
  };

  const article = (sample) => {
    const title = make("h3", "", `Row ${sample.row}`);
    title.id = `row-${sample.row}`;
    title.tabIndex = -1;
    const box = make("article", "sample", title, ...sample.prompt.map(
      (message) => promptBox(message, sample.prompt.length === 1)));
    box.setAttribute("aria-labelledby", title.id);
    box.append(make("div", "pair", ...sample.answers.map(answerBox)));
    if (sample.others.length) box.append(otherAnswers(sample));
    return box;
  };

  const show = () => {
    const first = page * PAGE;
    const shown = found.slice(first, first + PAGE);
    list.replaceChildren(...shown.map((index) => article(data.samples[index])));
    const pages = Math.max(1, Math.ceil(found.length / PAGE));
    where.textContent = `Page ${page + 1} of ${pages}`;
    back.disabled = page === 0;
    forward.disabled = page + 1 >= pages;
    pager.hidden = pages === 1;
    status.textContent = found.length
      ? `${found.length} of ${data.samples.length} prompts; ${first + 1} to ${first + shown.length} are shown.`
      : `No prompt of ${data.samples.length} matches. Search for fewer words, or choose another filter.`;
  };

  const rank = (index) => data.samples[index].ranks[Number(order.value)];

  const larger = (one, other) => {
    const [a, b] = [rank(one), rank(other)];
    if (a === null || b === null) return (a === null) - (b === null) || one - other;
    return b - a || one - other;
  };

  const refresh = () => {
    const words = folded(search.value).split(/\s+/).filter(Boolean);
    found = data.samples.map((_, index) => index).filter((index) =>
      (!filter.value || data.samples[index].tags.includes(filter.value))
      && words.every((word) => haystacks[index].includes(word)));
    if (order.value) found.sort(larger);
    page = 0;
    show();
  };

  const turn = (by) => {
    page += by;
    show();
    const title = list.querySelector("h3");
    title.focus({preventScroll: true});
    list.scrollIntoView({block: "start"});
  };

  search.addEventListener("input", refresh);
  filter.addEventListener("change", refresh);
  order.addEventListener("change", refresh);
  marks.addEventListener("change", () => list.classList.toggle("plain", !marks.checked));
  back.addEventListener("click", () => turn(-1));
  forward.addEventListener("click", () => turn(1));
  document.getElementById("samples-form").addEventListener("submit", (event) => event.preventDefault());
  document.addEventListener("keydown", (event) => {
    const writes = event.target.closest("input:not([type=checkbox]), select, textarea, [contenteditable]");
    if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || writes) return;
    event.preventDefault();
    search.focus();
  });
  document.getElementById("samples-form").hidden = false;
  document.getElementById("samples-still").hidden = true;
  refresh();
})();
