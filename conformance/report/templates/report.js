(() => {
  "use strict";
  const all = (what, where = document) => [...where.querySelectorAll(what)];
  const tools = document.getElementById("tools");
  const query = tools.querySelector("input");
  const choices = all("select", tools);
  const items = all("[data-chapter]");
  const groups = all("[data-group]");
  const texts = new Map();

  // what a search looks at: the item itself, and the title of the cause or reason that it stands under
  function textOf(item) {
    if (!texts.has(item)) {
      const title = item.closest("[data-group]")?.querySelector(".title")?.textContent ?? "";
      texts.set(item, `${title} ${item.textContent}`.toLowerCase());
    }
    return texts.get(item);
  }

  function apply() {
    const words = query.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = choices.filter((one) => one.value).map((one) => [one.name, one.value]);
    for (const item of items) {
      const fits = ([name, value]) => !(name in item.dataset) || item.dataset[name].split(" ").includes(value);
      item.hidden = !(wanted.every(fits) && words.every((word) => textOf(item).includes(word)));
    }
    for (const group of groups) {
      group.hidden = !all("[data-chapter]", group).some((item) => !item.hidden);
      for (const row of all(`[data-of="${group.id}"]`)) row.hidden = group.hidden;
    }
    for (const one of choices) one.classList.toggle("set", Boolean(one.value));
    const filtered = words.length + wanted.length > 0;
    const counts = [["new findings", "article"], ["known", "details.known"], ["laws", "#laws tbody tr"]].map(([name, what]) => {
      const found = all(what);
      return `${found.filter((one) => !one.hidden).length} of ${found.length} ${name}`;
    });
    document.getElementById("shown").textContent = filtered ? counts.join(", ") : "";
    document.getElementById("clear").hidden = !filtered;
  }

  function set(wanted) {
    query.value = wanted.q ?? "";
    for (const one of choices) one.value = wanted[one.name] ?? "";
    apply();
  }

  // a link to a finding opens it, and what it stands in
  function follow() {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    if (target.closest("[hidden]")) set({});
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    if (target.tagName === "ARTICLE") {
      target.querySelector("details").open = true;
      target.focus({ preventScroll: true });
    }
    target.scrollIntoView();
  }

  async function copy(text, button) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = document.createElement("textarea");
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), 1200);
  }

  for (const one of all(".copy")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "cp";
    button.textContent = "copy";
    button.setAttribute("aria-label", `copy the ${one.dataset.what || "case"}`);
    button.addEventListener("click", (event) => {
      event.preventDefault();
      copy(one.textContent, button);
    });
    if (one.tagName === "PRE") one.before(button);
    else one.after(button);
  }

  function go(step) {
    const stops = all("article, details.known").filter((one) => one.getClientRects().length);
    if (!stops.length) return;
    const at = stops.indexOf(document.activeElement?.closest("article, details.known"));
    const next = stops[at < 0 ? (step > 0 ? 0 : stops.length - 1) : Math.min(Math.max(at + step, 0), stops.length - 1)];
    next.focus({ preventScroll: true });
    next.scrollIntoView();
  }

  const keys = {
    "/": () => query.select(),
    j: () => go(1),
    k: () => go(-1),
    o: () => {
      const here = document.activeElement?.closest("article, details.known");
      const fold = here && (here.matches("details") ? here : here.querySelector("details"));
      if (fold) fold.open = !fold.open;
    },
    c: () => document.activeElement?.closest("article")?.querySelector("button.cp")?.click(),
    "?": () => document.getElementById("legend").scrollIntoView(),
  };
  document.addEventListener("keydown", (event) => {
    const typing = event.target.matches("input, select, textarea");
    if (event.key === "Escape" && typing) {
      if (event.target === query) set({});
      event.target.blur();
    }
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    event.preventDefault();
    keys[event.key]();
  });
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-set]");
    if (link) set(Object.fromEntries(new URLSearchParams(link.dataset.set)));
  });
  let timer;
  query.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(apply, 120);
  });
  for (const one of choices) one.addEventListener("change", apply);
  document.getElementById("clear").addEventListener("click", () => set({}));
  tools.addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", follow);
  tools.hidden = false;
  follow();
})();
