// The knowledge base: rows that open, search, filters, sorting, and the cast checker.
(() => {
  const data = page.data.kb;
  const table = at("page-table");
  const entries = [...table.querySelectorAll("tbody.entry")];
  const texts = new Map(entries.map((entry) => [entry, entry.textContent.toLowerCase()]));

  // Rows open and close.
  const toggle = (entry, open) => {
    entry.querySelector(".toggle").setAttribute("aria-expanded", String(open));
    entry.querySelector(".more").hidden = !open;
  };
  for (const entry of entries) {
    toggle(entry, false);
    const button = entry.querySelector(".toggle");
    button.setAttribute("aria-controls", entry.querySelector(".more").id);
    button.addEventListener("click", () => toggle(entry, button.getAttribute("aria-expanded") !== "true"));
  }

  // Search and filters.
  const filters = at("page-filters");
  const show = () => {
    const words = at("page-search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const [precision, tier, year, evidence] = ["precision", "tier", "year", "evidence"].map((name) => at("page-" + name).value);
    const shown = { definitive: 0, inferred: 0 };
    for (const entry of entries) {
      const fits =
        (!precision || entry.dataset.computes.split(" ").includes(precision)) &&
        (!tier || entry.dataset.tier === tier) &&
        (!year || Number(entry.dataset.year) >= Number(year)) &&
        (!evidence || entry.dataset.evidence === evidence) &&
        words.every((word) => texts.get(entry).includes(word));
      entry.hidden = !fits;
      if (fits) shown[entry.dataset.tier] += 1;
    }
    at("page-count").textContent = `${shown.definitive} definitive shown; apart from them, ${shown.inferred} inferred`;
    at("page-empty").hidden = shown.definitive + shown.inferred > 0;
  };
  filters.addEventListener("input", show);
  filters.addEventListener("change", show);
  filters.addEventListener("submit", (event) => event.preventDefault());
  filters.addEventListener("reset", () => setTimeout(() => { sort("year", "descending"); show(); }));

  // Sorting: by the heads of the columns, or by a list where the screen is narrow.
  const order = (key) => (one, other) =>
    key === "year" ? one.dataset.year - other.dataset.year : one.dataset[key].localeCompare(other.dataset[key]);
  const sort = (key, direction) => {
    const sign = direction === "ascending" ? 1 : -1;
    const byFamily = order("family");
    entries.sort((one, other) => sign * order(key)(one, other) || byFamily(one, other));
    table.append(...entries);
    for (const head of table.querySelectorAll("th[data-sort]")) {
      if (head.dataset.sort === key) head.setAttribute("aria-sort", direction);
      else head.removeAttribute("aria-sort");
    }
    at("page-sort").value = key;
  };
  for (const head of table.querySelectorAll("th[data-sort]")) {
    head.querySelector("button").addEventListener("click", () => {
      sort(head.dataset.sort, head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending");
    });
  }
  at("page-sort").addEventListener("change", (event) => {
    sort(event.target.value, event.target.value === "year" ? "descending" : "ascending");
  });

  // An entry is addressed by the fragment of the URL.
  const follow = (target) => {
    if (target.matches("tbody.entry")) {
      if (target.hidden) filters.reset();
      target.hidden = false;
      toggle(target, true);
      target.querySelector(".toggle").focus({ preventScroll: true });
    }
  };

  const names = [...table.querySelectorAll(".ids li")].map((item) => (item.querySelector("code") || item).textContent);
  for (const name of [...new Set(names)].sort()) {
    if (!name.includes("*")) at("page-names").append(element("option", "", { value: name }));
  }

  // The cast checker: exact id or alias, then glob, then unknown. Every verdict was made when the page was.
  const matches = (glob, name) => {
    const expression = glob.split("*").map((part) => part.replace(/[.*+?^${}()|[\]\\\/-]/g, "\\$&")).join("[^/]*");
    return new RegExp("^" + expression + "$").test(name);
  };
  // A report names models by id; a name without its organisation is compared without punctuation too.
  const plain = (text) => text.replace(/[^a-z0-9*]/g, "");
  const meant = (glob, name) =>
    name.includes("/") ? matches(glob, name) : matches(plain(glob.split("/").pop()), plain(name.replaceAll("*", "")));
  const named = new Map(data.names.flatMap(([number, how, called]) => called.map((name) => [name, [number, how]])));
  const find = (name) => {
    if (named.has(name)) return named.get(name);
    const glob = data.globs.find(([pattern, except]) => matches(pattern, name) && !except.includes(name));
    return glob ? [glob[2], "glob"] : null;
  };
  const check = (model, use) => {
    const name = model.trim().toLowerCase();
    const found = find(name);
    const answer = found && data.answers[found[0]];
    const reports = data.reports.filter(
      (report) =>
        report.uses.includes(use) &&
        (report.globs.some((glob) => meant(glob, name)) || (answer && report.entries.some((id) => answer.entries.includes(id)))),
    );
    const failed = reports.some((report) => report.kind === "failure");
    if (answer) {
      const [verdict, numbers, keep] = data.said[answer.said[data.uses.indexOf(use)]];
      const why = numbers.map((number) => data.texts[number]);
      const reported = {
        safe: ["unknown", `that says it is safe, and failures in ${use} are reported: the two do not agree`],
        unknown: ["risky", `failures in ${use} are reported`],
      };
      if (failed && Object.hasOwn(reported, verdict)) {
        const [careful, text] = reported[verdict];
        return { verdict: careful, why: [...why, text], keep, answer, how: found[1], reports };
      }
      return { verdict, why, keep, answer, how: found[1], reports };
    }
    const why = failed
      ? `no entry says how it was trained, but failures in ${use} are reported`
      : "no entry says how this model was trained; start in fp32, and compare outputs before going lower";
    return { verdict: failed ? "risky" : "unknown", why: [why], keep: [], answer: null, how: "unknown", reports };
  };
  const answer = () => {
    const model = at("page-model").value.trim();
    const use = at("page-use").value;
    const place = at("page-verdict");
    place.replaceChildren();
    place.className = "";
    if (!model) {
      place.append(element("p", "Name a model first: a hub id such as google/flan-t5-xxl."));
      return;
    }
    const found = check(model, use);
    place.className = found.verdict;
    const first = element("p", "");
    first.append(element("span", found.verdict, { class: "word" }), `: ${model} in ${use}`);
    place.append(first, ...found.why.map((text) => element("p", text)));
    if (found.keep.length) place.append(element("p", "Keep in fp32: " + found.keep.join(", ")));
    const links = element("p", "");
    for (const id of found.answer ? found.answer.entries : []) {
      links.append(element("a", `entry ${id} and its references`, { href: "#" + id }), " ");
    }
    if (found.answer) links.append(`(${found.answer.tier}, found by ${found.how})`);
    place.append(links);
    if (found.reports.length) {
      const list = element("p", "Reports: ");
      for (const report of found.reports) list.append(element("a", report.id, { href: "#failure-" + report.id }), " ");
      place.append(list);
    }
    place.append(page.command(["halfstep", "kb", "check", model, "--use", use]));
  };
  const asked = () => {
    answer();
    const model = at("page-model").value.trim();
    if (model) page.link("kb", { model, use: at("page-use").value });
  };
  at("page-check").addEventListener("submit", (event) => { event.preventDefault(); asked(); });
  at("page-use").addEventListener("change", () => { if (at("page-model").value.trim()) asked(); });
  show();

  page.panels.kb = {
    follow,
    open: (wanted) => {
      at("page-model").value = wanted.get("model") || "";
      const lacking = page.choose("page-use", wanted.get("use") || "fp16");
      if (at("page-model").value) answer();
      at("page-verdict").prepend(...lacking);
    },
  };
})();
