"""The knowledge-base page in headless Chromium: user actions cause no request and no console output."""

import json
from urllib.parse import urlsplit

import pytest
from toy_entry import ENTRY

from halfstep.kb import load
from halfstep.kb.reader import uses
from halfstep.kb.verdict import judge
from halfstep.site.page import to_html


CONTRAST = """
  const shade = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const found = shade(getComputedStyle(each).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const element of document.querySelectorAll(
      "h1, h2, h3, p, a, label, dt, dd, button, td, code, small, .chip, .which, svg text")) {
    if (!element.getClientRects().length) continue;
    const cell = element.closest("g") && element.closest("g").querySelector("rect");
    const ink = light(shade(getComputedStyle(element)[element.closest("svg") ? "fill" : "color"]));
    const paper = light(cell ? shade(getComputedStyle(cell).fill) : ground(element));
    const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
    if (contrast < 4.5) low.push([element.outerHTML.slice(0, 80), contrast]);
  }
  return low;
"""


@pytest.fixture(scope="module")
def address(base, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "kb.html"
    file.write_text(to_html(base), encoding="utf-8")
    return file.as_uri()


@pytest.fixture
def page(browser, address):
    """The page, freshly loaded; fails if the test causes requests or console output."""
    resize(browser, 1200)
    browser.get("about:blank")
    browser.get_log("performance"), browser.get_log("browser")
    browser.get(address)
    assert browser.execute_script("return document.documentElement.dataset.ready") == "yes"
    yield browser
    assert browser.get_log("browser") == []
    assert {urlsplit(url).scheme for url in requests(browser)} <= {"file", "data"}


def requests(browser):
    events = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]


def resize(browser, width, scheme="light"):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def at(page, name):
    return page.find_element("id", f"page-{name}")


def choose(page, name, value):
    """Choose an option of a select element."""
    at(page, name).find_element("css selector", f"option[value='{value}']").click()


def shown(page):
    script = "return [...document.querySelectorAll('tbody.entry')].filter(e => !e.hidden).map(e => e.id)"
    return page.execute_script(script)


def count(page):
    """The (definitive, inferred) counts that the page shows."""
    words = at(page, "count").text.split()
    return int(words[0]), int(words[-2])


def ask(page, model, use):
    at(page, "model").clear()
    at(page, "model").send_keys(model)
    at(page, "use").find_element("xpath", f"option[text()='{use}']").click()
    page.find_element("css selector", "#page-check button").click()
    return at(page, "verdict")


def test_page_opens_from_a_file_without_requests(page, address):
    assert len(shown(page)) == 167
    assert count(page) == (102, 65)
    opened = requests(page)
    assert address in opened
    assert {urlsplit(url).scheme for url in opened} <= {"file", "data"}


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "fp8", "nvfp4", "unknown"])
def test_precision_filter_equals_python(page, base, precision):
    choose(page, "precision", precision)
    wanted = [entry for entry in base.entries if precision in entry.computes]
    assert set(shown(page)) == {entry.id for entry in wanted}
    definitive = sum(entry.tier == "definitive" for entry in wanted)
    assert count(page) == (definitive, len(wanted) - definitive)


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("tier", "inferred", lambda entry: entry.tier == "inferred"),
        ("evidence", "author_statement", lambda entry: entry.evidence_kind == "author_statement"),
    ],
)
def test_other_filters_equal_python(page, base, name, value, fits):
    choose(page, name, value)
    assert set(shown(page)) == {entry.id for entry in base.entries if fits(entry)}


def test_filters_combine_and_reset(page, base):
    choose(page, "precision", "bf16")
    choose(page, "tier", "definitive")
    at(page, "year").find_element("xpath", "option[text()='2024']").click()
    wanted = {e.id for e in base.entries if "bf16" in e.computes and e.tier == "definitive" and e.year >= 2024}
    assert set(shown(page)) == wanted
    page.find_element("css selector", "#page-filters button[type=reset]").click()
    page.execute_async_script("setTimeout(arguments[0], 0)")
    assert len(shown(page)) == 167


def test_search_as_you_type(page):
    field = at(page, "search")
    field.send_keys("pegas")
    assert set(shown(page)) >= {"pegasus-large", "pegasus-wiki"}
    assert len(shown(page)) < 10
    field.send_keys("us no such thing")
    assert shown(page) == []
    assert at(page, "empty").is_displayed()
    assert count(page) == (0, 0)


def test_columns_sort_both_ways_with_aria_sort(page, base):
    assert page.find_element("css selector", "th[data-sort=year]").get_attribute("aria-sort") == "descending"
    button = page.find_element("css selector", "th[data-sort=family] button")
    button.click()
    families = {entry.id: entry.family.lower() for entry in base.entries}
    forward = [families[each] for each in shown(page)]
    button.click()
    backward = [families[each] for each in shown(page)]
    assert forward[0].startswith("albe")
    assert backward[0].startswith("yalm")
    assert sorted(forward) == sorted(families.values())
    assert page.find_element("css selector", "th[data-sort=family]").get_attribute("aria-sort") == "descending"
    page.find_element("css selector", "th[data-sort=year] button").click()
    years = {entry.id: entry.year for entry in base.entries}
    assert [years[each] for each in shown(page)] == sorted(years.values())


def test_row_opens_with_the_keyboard_and_shows_links(page):
    from selenium.webdriver.common.keys import Keys

    toggle = page.find_element("css selector", "#t5-v1 .toggle")
    assert toggle.get_attribute("aria-expanded") == "false"
    toggle.send_keys(Keys.ENTER)
    assert toggle.get_attribute("aria-expanded") == "true"
    links = page.find_elements("css selector", "#more-t5-v1 a[href^=https]")
    assert len(links) >= 4
    assert all(link.get_attribute("href").startswith("https://") and link.is_displayed() for link in links)
    toggle.send_keys(Keys.SPACE)
    assert not links[0].is_displayed()


def test_form_fields_are_reached_with_tab_and_have_names(page):
    from selenium.webdriver.common.keys import Keys

    at(page, "model").click()
    reached = []
    for _ in range(9):
        page.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(page.switch_to.active_element.get_attribute("id"))
    names = ("use", "search", "precision", "tier", "year", "evidence")
    assert [name for name in reached if name] == [f"page-{name}" for name in names]
    for field in page.find_elements("css selector", "input, select, button, section, [role=region]"):
        assert field.accessible_name or not field.is_displayed(), field.get_attribute("outerHTML")[:200]


def test_fragment_opens_an_entry(page, address):
    page.get("about:blank")
    page.get(address + "#pegasus-wiki")
    assert page.find_element("id", "more-pegasus-wiki").is_displayed()
    page.find_element("css selector", "#more-pegasus-wiki a[href='#pegasus-large']").click()
    assert page.find_element("id", "more-pegasus-large").is_displayed()
    choose(page, "precision", "nvfp4")
    page.execute_script("location.hash = '#t5-v1'")
    page.execute_async_script("setTimeout(arguments[0], 50)")
    assert page.find_element("id", "more-t5-v1").is_displayed()


@pytest.mark.parametrize("fragment", ["#", "#nothing", "#%", "#<img>", "#page-check"])
def test_other_fragments_are_ignored(page, address, fragment):
    page.get("about:blank")
    page.get(address + fragment)
    assert len(shown(page)) == 167


@pytest.mark.parametrize(
    ("model", "use", "verdict", "says"),
    [
        ("google/flan-t5-xxl", "fp16", "risky", "trained in bf16_mixed"),
        ("google/flan-t5-xxl", "bf16", "safe", "the type it was trained in"),
        ("meta-llama/Llama-2-7b-hf", "fp16", "risky", "trained in bf16_mixed"),
        ("Salesforce/blip2-flan-t5-xl", "fp16", "risky", "language_model: risky, trained in bf16_mixed"),
        ("GOOGLE/pegasus-XSUM", "fp16", "risky", "trained in fp32"),
        ("facebook/convnext-tiny-224", "fp32", "safe", "found by glob"),
        ("BAAI/bge-reranker-v2-m3", "fp16", "safe", "entry bge-reranker-v2-m3"),
        ("microsoft/phi-2", "fp16", "risky", "failures in fp16 are reported"),
        ("foo/bar", "fp16", "unknown", "no entry says how this model was trained"),
        ("<img src=x onerror=alert(1)>", "fp16", "unknown", "<img src=x onerror=alert(1)>"),
    ],
)
def test_cast_checker_verdicts(page, model, use, verdict, says):
    found = ask(page, model, use)
    assert found.find_element("class name", "word").text == verdict
    assert says in found.text
    assert found.get_attribute("role") == "status"


def test_cast_checker_links_to_entry_and_reports(page):
    ask(page, "google/flan-t5-xxl", "fp16")
    at(page, "verdict").find_element("css selector", "a[href='#flan-t5']").click()
    assert page.find_element("id", "more-flan-t5").is_displayed()
    at(page, "verdict").find_element("css selector", "a[href^='#failure-']").click()
    assert page.find_element("id", "failure-transformers-23918").is_displayed()
    assert "Name a model first" in ask(page, "", "fp16").text


def test_cast_checker_equals_python_for_all_models_and_uses(page, base):
    names = [name for entry in base.entries for name in (*entry.model_ids, *entry.aliases, entry.id)]
    script = """
      const [models, uses] = arguments, found = [];
      for (const model of models) for (const use of uses) {
        document.getElementById("page-model").value = model;
        document.getElementById("page-use").value = use;
        document.getElementById("page-check").requestSubmit();
        found.push(document.querySelector("#page-verdict .word").textContent);
      }
      return found;"""
    found = page.execute_script(script, names, uses())
    assert found == [judge(base, name, use).verdict for name in names for use in uses()]


def test_matrix_has_a_labelled_cell_for_every_cast(page):
    cells = page.find_elements("css selector", "#page-matrix g")
    assert len(cells) == 80
    assert {cell.text for cell in cells} == {"none", "low", "medium", "high", "unknown"}
    assert at(page, "matrix").accessible_name == "Safe-cast matrix"


@pytest.mark.parametrize("width", [320, 375, 768, 1200])
def test_page_fits_the_screen_width(page, address, width):
    resize(page, width)
    page.execute_script("location.hash = '#gpt-neox-20b'")
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    assert at(page, "sort").is_displayed() == (width < 600)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(page, scheme):
    """Contrast as WCAG 2.1 AA requires for text: 4.5 to 1."""
    resize(page, 1200, scheme)
    for model, use in (("google/flan-t5-xxl", "bf16"), ("google/pegasus-xsum", "fp16")):
        ask(page, model, use)
        assert page.execute_script(CONTRAST) == []
    page.find_element("css selector", "#pegasus-wiki .toggle").click()
    assert page.execute_script(CONTRAST) == []


def test_page_is_readable_without_javascript(browser, address):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get("about:blank")
        browser.get(address)
        assert browser.find_element("css selector", "#more-t5-v1 a[href^=https]").is_displayed()
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_cast_checker_respects_glob_exceptions(browser, overlay, tmp_path):
    glob = ENTRY.replace('["toys/toy-1b"]', '["toys/toy-*"]\nexcept_ids = ["toys/toy-Old"]')
    file = tmp_path / "kb.html"
    file.write_text(to_html(load(overlay(glob))), encoding="utf-8")
    browser.get(file.as_uri())
    words = [
        ask(browser, name, "bf16").find_element("class name", "word").text for name in ("toys/toy-2", "toys/toy-old")
    ]
    assert words == ["safe", "unknown"]
