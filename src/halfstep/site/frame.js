// What the tabs share: elements, the data, permalinks (#tab?key=value), and commands to copy.
"use strict";
const at = (id) => document.getElementById(id);
const element = (name, text, attributes = {}) => {
  const made = document.createElementNS(name === "svg" || svgNames.has(name) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml", name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};
const svgNames = new Set(["rect", "line", "text", "circle", "g"]);
const page = {
  data: JSON.parse(at("page-data").textContent),
  panels: {}, // by name: { open(URLSearchParams), follow(element) }

  // The address of what is shown, without a new entry in the history; a moment later, since browsers count these calls.
  link: (name, values) => {
    clearTimeout(page.linking);
    page.linking = setTimeout(() => history.replaceState(null, "", `#${name}?${new URLSearchParams(values)}`), 200);
  },

  // A value of a list; what to say where the list does not have it.
  choose: (id, value) => {
    if ([...at(id).options].some((option) => option.value === value)) at(id).value = value;
    else return [element("p", `The address asks for ${value}, which this page does not have: it shows ${at(id).value}.`, { class: "wrong" })];
    return [];
  },

  // What may be wider than the screen.
  scroll: (name, inner) => {
    const box = element("div", "", { class: "scroll", role: "region", "aria-label": name + ", scrolls sideways", tabindex: "0" });
    box.append(inner);
    return box;
  },

  // A command of the shell, with a button that copies it.
  command: (words) => {
    const quoted = words.map((word) => (/^[\w@%+=:,.\/-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`)).join(" ");
    const line = element("p", "", { class: "command" }), code = element("code", quoted), button = element("button", "Copy", { type: "button" });
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(quoted);
      } catch {
        getSelection().selectAllChildren(code);
        document.execCommand("copy");
      }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    });
    line.append(code, " ", button);
    return line;
  },

  // A table's row: a heading and cells, each a text or an element.
  row: (heading, cells, attributes = {}) => {
    const made = element("tr", "", attributes);
    made.append(element("th", heading, { scope: "row" }));
    for (const cell of cells) {
      const place = element("td", typeof cell === "string" ? cell : "");
      if (typeof cell !== "string") place.append(cell);
      made.append(place);
    }
    return made;
  },
};
