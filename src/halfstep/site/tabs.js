// The tabs: one panel is shown, by click, by the arrow keys, or by the fragment of the URL.
(() => {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const nameOf = (tab) => tab.dataset.panel;
  const show = (name) => {
    for (const tab of tabs) {
      const shown = nameOf(tab) === name;
      tab.setAttribute("aria-selected", String(shown));
      tab.tabIndex = shown ? 0 : -1;
      at("panel-" + nameOf(tab)).hidden = !shown;
    }
  };
  for (const [index, tab] of tabs.entries()) {
    tab.addEventListener("click", () => { location.hash = nameOf(tab); });
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const next = tabs[(to + tabs.length) % tabs.length];
      location.hash = nameOf(next);
      next.focus();
    });
  }

  // #kb, #formats?format=e4m3fn&value=3.3, or the id of something in a panel.
  const follow = () => {
    clearTimeout(page.linking);
    const fragment = location.hash.slice(1), [name, query = ""] = fragment.split(/\?(.*)/s);
    if (Object.hasOwn(page.panels, name)) {
      show(name);
      page.panels[name].open(new URLSearchParams(query));
      return;
    }
    const target = at(fragment), panel = target && target.closest("[role=tabpanel]");
    if (!panel || target === panel) return;
    show(panel.id.replace("panel-", ""));
    if (target.closest("details")) target.closest("details").open = true;
    const { follow } = page.panels[panel.id.replace("panel-", "")];
    if (follow) follow(target);
    target.scrollIntoView();
  };
  addEventListener("hashchange", follow);
  show(nameOf(tabs[0]));
  follow();
  document.documentElement.dataset.ready = "yes";
})();
