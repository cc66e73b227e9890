// The number formats: what becomes of a number, and how densely values lie.
(() => {
  const formats = page.data.formats;
  const byName = new Map(formats.flatMap((f) => [f.name, ...f.aliases].map((name) => [name, f])));
  const ids = ["format", "value", "rounding", "overflow"];
  const usual = { format: "float8_e4m3fn", value: "3.3", rounding: "nearest_even", overflow: "saturate" };

  // ---- texts
  const hex = (f, code) => "0x" + code.toString(16).padStart(Math.ceil(f.bits / 4), "0");
  const powerOfTwo = ({ n, d }) => {
    if (n <= 0n || n & (n - 1n) || d & (d - 1n)) return null;
    return n.toString(2).length - d.toString(2).length;
  };
  // A fraction in full where that is short, as a power of two, or shortened behind a tilde.
  const text = (x) => {
    if (!exact.isFraction(x)) return Object.is(x, -0) ? "-0" : Number.isFinite(x) ? text(exact.ofFloat(x)) : String(x).replace("Infinity", "inf");
    const size = exact.size(x), whole = size.n * 10n ** 12n, sign = x.n < 0n ? "-" : "";
    if (whole % size.d === 0n) {
      const digits = (whole / size.d).toString().padStart(13, "0");
      const written = sign + (digits.slice(0, -12) + "." + digits.slice(-12)).replace(/\.?0+$/, "");
      if (written.length <= 12) return written;
    }
    const power = powerOfTwo(size);
    return power !== null ? `${sign}2^${power}` : `~${Number(exact.toFloat(x).toPrecision(10))}`;
  };
  const short = (x) => String(Number(exact.toFloat(x).toPrecision(4)));
  const fields = (f, code) => {
    const bits = code.toString(2).padStart(f.bits, "0");
    if (f.kind === "float") return [["sign", bits[0]], ["exponent", bits.slice(1, 1 + f.exponent)], ["mantissa", bits.slice(1 + f.exponent)]];
    return [[{ posit: "posit", integer: "number", exponent: "exponent" }[f.kind] || "index", bits]];
  };
  const bitsOf = (f, code) => {
    const made = element("span", "", { class: "bits" });
    for (const [name, bits] of fields(f, code)) if (bits) made.append(element("span", bits, { class: name, title: name }), " ");
    return made;
  };
  const point = (f, point) => [text(point.value), ...(point.code === null ? ["no code", ""] : [hex(f, point.code), bitsOf(f, point.code)])];

  // ---- what rounding does
  const rounded = (f, asked) => {
    const place = at("formats-result"), x = exact.read(asked.value);
    place.replaceChildren();
    if (x === null) {
      place.append(element("p", `${asked.value || "Nothing"} is not a number: write 3.25, -1e-3, 0x1.8p3, 1/3, 2^-24, inf or nan.`, { class: "wrong" }));
      return;
    }
    const found = exact.round(f, x, asked.rounding, asked.overflow);
    const became = found.value === null ? "one of its two neighbours, by chance" : text(found.value);
    const first = element("p", "", { class: "became" });
    first.append(element("strong", asked.value.trim()), ` becomes `, element("strong", became), ` in ${f.name}`);
    if (found.code !== null) first.append(": ", element("code", hex(f, found.code)), " ", bitsOf(f, found.code));
    place.append(first);
    const said = [];
    if (found.value !== null && Number.isFinite(found.value) && exact.isFraction(x)) {
      const error = exact.minus(exact.ofFloat(found.value), x);
      if (!error.n) said.push("The number is a value of the format: nothing is lost.");
      else {
        const gap = found.below && found.above ? exact.minus(found.above.value, found.below.value) : null;
        const parts = [`The error is ${short(error)}`];
        if (gap) parts.push(`${short({ n: error.n * gap.d, d: error.d * gap.n })} of the gap between the neighbours`);
        if (x.n) parts.push(`${short({ n: 100n * error.n * x.d, d: error.d * x.n })}% of the number`);
        said.push(parts.join(", ") + ".");
      }
      if (!found.value && x.n) said.push("Underflow: a number other than zero became zero.");
    }
    if (found.overflow) said.push(`Overflow: it lies beyond the ${asked.value.trim().startsWith("-") ? "lowest" : "largest"} value.`);
    if (found.below && found.above) {
      const gap = exact.minus(found.above.value, found.below.value), up = exact.minus(exact.isFraction(x) ? x : exact.ofFloat(0), found.below.value);
      if (asked.rounding === "stochastic") said.push(`It goes up with a probability of ${short({ n: up.n * gap.d, d: up.d * gap.n })}.`);
      else if (exact.isFraction(x) && !exact.compare(found.boundary, x)) said.push("A tie: it lies on the boundary.");
    }
    for (const each of said) place.append(element("p", each));
    if (found.below || found.above) {
      const table = element("table", "", { class: "plain" });
      if (found.above) table.append(page.row("above", point(f, found.above)));
      if (found.boundary) table.append(page.row("boundary", [text(found.boundary), "nearest rounding turns here", ""]));
      if (found.below) table.append(page.row("below", point(f, found.below)));
      place.append(page.scroll("The neighbours", table));
      if (found.below?.code != null && found.above?.code != null && exact.isFraction(x)) place.append(strip(f, x));
    }
  };

  const written = (label, x, y) => element("text", label, { x, y, "text-anchor": x < 70 ? "start" : x > 530 ? "end" : "middle" });
  // The values around a number, in proportion.
  const strip = (f, x) => {
    const values = exact.line(f), number = exact.atMost(f, x), near = [];
    for (let n = number - 3; n <= number + 4; n++) if (n >= values.first && n <= values.last) near.push(exact.toFloat(exact.ofFloat(values.value(n))));
    const here = exact.toFloat(x), precision = range(3, 10).find((p) => new Set(near.map((v) => v.toPrecision(p))).size === near.length) || 9;
    const low = near[0], high = near[near.length - 1], place = (v) => 20 + (560 * (v - low)) / (high - low);
    const svg = element("svg", "", { viewBox: "0 0 600 62", role: "img", "aria-label": `The values of ${f.name} around ${text(x)}`, class: "strip" });
    svg.append(element("line", "", { x1: 10, x2: 590, y1: 34, y2: 34, class: "axis-line" }));
    let last = -99;
    for (const v of near) {
      svg.append(element("line", "", { x1: place(v), x2: place(v), y1: 24, y2: 44, class: "value" }));
      const label = String(Number(v.toPrecision(precision))), wide = 9 * label.length;
      if (place(v) - last > wide) { svg.append(written(label, place(v), 58)); last = Math.max(place(v), 20 + wide / 2); }
    }
    svg.append(element("circle", "", { cx: place(here), cy: 34, r: 5, class: "here" }), written(text(x), place(here), 14));
    return page.scroll("The values around the number", svg);
  };

  // ---- the format itself
  const facts = (f) => {
    const place = at("formats-facts");
    place.replaceChildren(element("h2", f.name), element("p", `${f.aliases.length ? `Also ${f.aliases.join(", ")}; ` : ""}${f.layout}. Source: ${f.source}.`));
    const list = element("dl", "");
    const said = {
      bits: String(f.bits), "bytes as stored": f.bytes, largest: text(f.max), "most negative": text(f.min),
      "least normal": f.least_normal === null ? "" : text(f.least_normal), "least positive": text(f.smallest),
      "gap above 1": f.eps === null ? "1 has no neighbour above" : text(f.eps),
      infinity: f.infinity ? "has codes" : "none", NaN: f.nan ? "has codes" : "none", "ties go to": f.ties === "even" ? "the even code" : `the ${f.ties} value`,
      "finite values": String(exact.line(f).last - exact.line(f).first + 1),
    };
    for (const [name, value] of Object.entries(said)) {
      if (!value) continue;
      const item = element("div", "");
      item.append(element("dt", name), element("dd", value));
      list.append(item);
    }
    place.append(list);
    spacing(f);
    codes(f);
  };
  // For each binade of the positive side: how many values, and the gaps between them.
  const spacing = (f) => {
    const body = at("formats-spacing").querySelector("tbody"), values = exact.line(f), rows = [];
    const top = Math.floor(Math.log2(f.max)), bottom = Math.floor(Math.log2(f.smallest));
    for (let k = top; k >= bottom; k--) {
      const first = exact.atMost(f, exact.ofFloat(2 ** k)), end = exact.atMost(f, exact.ofFloat(2 ** (k + 1)));
      const from = values.value(first) === 2 ** k ? first : first + 1, until = values.value(end) === 2 ** (k + 1) ? end : end + 1;
      const count = until - from;
      if (count < 1) continue;
      const gap = (n) => (n < values.last ? values.value(n + 1) - values.value(n) : null);
      const gaps = [gap(from), gap(until - 1)].filter((each) => each !== null);
      const even = !gaps.length ? "" : f.kind === "codebook" ? `${short(exact.ofFloat(Math.min(...range(from, until).map(gap).filter((g) => g !== null))))} or more` : text(gaps[0]);
      rows.push(page.row(`2^${k} to 2^${k + 1}`, [String(count), even, gaps.length && f.kind !== "codebook" ? short(exact.ofFloat((100 * gaps[0]) / 2 ** k)) + "%" : ""]));
    }
    body.replaceChildren(...rows);
  };
  const range = (from, until) => Array.from({ length: until - from }, (_, i) => from + i);
  const codes = (f) => {
    const place = at("formats-codes");
    place.hidden = f.bits > 8;
    if (f.bits > 8) return;
    const rows = range(0, 2 ** f.bits).map((code) => page.row(hex(f, code), [bitsOf(f, code), text(exact.decode(f, code))]));
    place.querySelector("tbody").replaceChildren(...rows);
  };

  let described = "";
  const answer = () => {
    const asked = Object.fromEntries(ids.map((id) => [id, at("formats-" + id).value]));
    const f = byName.get(asked.format);
    if (described !== f.name) facts(f);
    described = f.name;
    rounded(f, asked);
    const words = ["halfstep", "formats", "show", f.name, `--value=${asked.value.trim()}`, "--rounding", asked.rounding, "--overflow", asked.overflow];
    at("formats-command").replaceChildren(page.command(words));
    return asked;
  };
  at("formats-form").addEventListener("input", () => page.link("formats", answer()));
  at("formats-form").addEventListener("submit", (event) => event.preventDefault());
  page.panels.formats = {
    open: (wanted) => {
      const lacking = [];
      for (const id of ids) {
        const value = wanted.get(id) ?? usual[id];
        at("formats-" + id).value = usual[id];
        if (id === "value") at("formats-value").value = value;
        else lacking.push(...page.choose("formats-" + id, id === "format" && byName.has(value.toLowerCase()) ? byName.get(value.toLowerCase()).name : value));
      }
      answer();
      at("formats-result").prepend(...lacking);
    },
  };
})();
