// The memory that stays from step to step: a table of our own counts, divided over devices.
(() => {
  const { columns, models, recipes, rows } = page.data.memory;
  const ids = ["model", "recipe", "dp", "zero"];
  const usual = { model: "llama-7b", recipe: "bf16-mixed", dp: "1", zero: "0" };
  const roles = {
    weights: "weights", gradients: "gradients", master: "master copies", states: "optimizer states", scales: "scales of codes",
    buffers: "buffers", communication: "communication buffers",
  };
  const rowOf = (model, recipe) => {
    const found = rows[models[model].rows[recipes.findIndex((each) => each.name === recipe)]];
    return typeof found === "string" ? found.replace("{recipe}", `'${recipe}'`) : Object.fromEntries(columns.map((name, i) => [name, found[i]]));
  };
  const grouped = (n) => n.toString().replace(/\B(?=(\d{3})+$)/g, ",");
  const GIB = 2n ** 30n, MIB = 2n ** 20n;
  // Two digits behind the point, as Python rounds them for numbers of this size.
  const sized = (bytes, unit) => (Number(bytes) / Number(unit)).toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

  const asking = () => Object.fromEntries(ids.map((id) => [id, at("memory-" + id).value.trim()]));
  const wrong = (text) => at("memory-result").replaceChildren(element("p", text, { class: "wrong" }));
  const answer = (asked) => {
    const words = ["halfstep", "memory", asked.model, "--recipe", asked.recipe];
    const ranks = Number(asked.dp), zero = Number(asked.zero);
    at("memory-command").replaceChildren();
    at("memory-source").textContent = models[asked.model].source;
    if (!/^\d{1,7}$/.test(asked.dp) || ranks < 1) return wrong(`${asked.dp || "No number of"} devices given; expected a whole number, at least 1.`);
    if (zero && ranks === 1) return wrong(`Stage ${zero} shards over devices, and there is one: say over how many.`);
    const row = rowOf(asked.model, asked.recipe);
    if (typeof row === "string") return wrong(row);
    if (ranks > 1) words.push("--dp", asked.dp);
    if (zero) words.push("--zero", asked.zero);
    at("memory-command").replaceChildren(page.command(words));

    const found = share(row, ranks, zero), [name, unit] = found.persistent >= GIB ? ["GiB", GIB] : ["MiB", MIB];
    const table = element("table", "", { class: "plain numbers" }), head = element("thead", ""), body = element("tbody", ""), top = element("tr", "");
    const heads = ["role", name, "bytes", "a parameter", "share"];
    for (const each of heads) top.append(element("th", each, { scope: "col" }));
    head.append(top);
    const line = (title, bytes, attributes) => {
      const part = found.persistent ? Number((bytes * 1000n) / found.persistent) / 10 : 0;
      const bar = element("svg", "", { viewBox: "0 0 100 8", class: "bar", role: "img", "aria-label": `${part}%`, preserveAspectRatio: "none" });
      bar.append(element("rect", "", { x: 0, y: 0, width: part, height: 8 }));
      body.append(page.row(title, [sized(bytes, unit), grouped(bytes), String(Number((Number(bytes) / row.parameters).toPrecision(4))), bar], attributes));
    };
    for (const [role, title] of Object.entries(roles)) if (found[role]) line(title, found[role]);
    line("persistent", found.persistent, { class: "total" });
    table.append(head, body);
    const first = element("p", "", { class: "became" });
    first.append(element("strong", `${sized(found.persistent, unit)} ${name}`), ` ${ranks > 1 ? `on each of ${grouped(BigInt(ranks))} devices` : "on one device"}`);
    if (ranks > 1) first.append(`, ${sized(found.persistent * BigInt(ranks), unit)} ${name} on all`);
    const recipe = recipes.find((each) => each.name === asked.recipe);
    at("memory-result").replaceChildren(
      first,
      element("p", `${asked.model}: ${grouped(BigInt(row.parameters))} parameters; AdamW. ${recipe.name}: ${recipe.summary}`),
      page.scroll("Bytes by role", table),
    );
  };
  at("memory-form").addEventListener("input", () => { answer(asking()); page.link("memory", asking()); });
  at("memory-form").addEventListener("submit", (event) => event.preventDefault());
  page.panels.memory = {
    open: (wanted) => {
      const lacking = [];
      for (const id of ids) {
        const value = wanted.get(id) ?? usual[id];
        at("memory-" + id).value = usual[id];
        if (id === "dp") at("memory-dp").value = value;
        else lacking.push(...page.choose("memory-" + id, value));
      }
      answer(asking());
      at("memory-result").prepend(...lacking);
    },
  };
})();
