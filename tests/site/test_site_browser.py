"""The page's tabs in headless Chromium: contents, addresses, keyboard, and that nothing is loaded."""

import json
import random
from urllib.parse import urlencode, urlsplit

import pytest

from halfstep import formats
from halfstep.cli.formats.table import read_number
from halfstep.formats.exact import round_exactly
from halfstep.kb import load
from halfstep.recipe import list_recipes
from halfstep.site import memory
from halfstep.site.page import to_html


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    file = tmp_path_factory.mktemp("site") / "index.html"
    file.write_text(to_html(load(None)), encoding="utf-8")
    return file.as_uri()


@pytest.fixture
def page(browser, address):
    """go(fragment) loads the page afresh; fails if the test causes requests or console output."""
    browser.get_log("performance"), browser.get_log("browser")

    def go(tab, **asked):
        browser.get("about:blank")
        browser.get(f"{address}#{tab}{'?' * bool(asked)}{urlencode(asked)}")
        assert browser.execute_script("return document.documentElement.dataset.ready") == "yes"
        return browser

    yield go
    events = [json.loads(line["message"])["message"] for line in browser.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert {urlsplit(url).scheme for url in asked} <= {"file", "data", "about"}
    assert browser.get_log("browser") == []


def at(browser, name):
    return browser.find_element("id", name)


def shown(browser):
    return [each.get_attribute("id") for each in browser.find_elements("css selector", "[role=tabpanel]:not([hidden])")]


def command(browser, tab):
    return at(browser, f"{tab}-command").find_element("tag name", "code").text


def test_address_selects_tab_and_inputs(page):
    browser = page("formats", format="e5m2", value="1/3", rounding="up", overflow="ieee")
    assert shown(browser) == ["panel-formats"]
    assert "1/3 becomes 0.375 in float8_e5m2: 0x36 0 01101 10" in at(browser, "formats-result").text.replace("\n", " ")
    assert command(browser, "formats") == (
        "halfstep formats show float8_e5m2 --value=1/3 --rounding up --overflow ieee"
    )
    link = browser.execute_script("return location.hash")
    before = at(browser, "formats-result").text
    browser = page(link[1:])
    assert at(browser, "formats-result").text == before
    browser = page("memory", model="gpt2", recipe="bf16-master", dp="8", zero="2")
    assert shown(browser) == ["panel-memory"]
    assert command(browser, "memory") == "halfstep memory gpt2 --recipe bf16-master --dp 8 --zero 2"
    browser = page("kb", model="google/flan-t5-xxl", use="fp16")
    assert at(browser, "page-verdict").find_element("class name", "word").text == "risky"
    assert "halfstep kb check google/flan-t5-xxl --use fp16" in at(browser, "page-verdict").text


@pytest.mark.parametrize(
    ("tab", "asked"),
    [
        ("formats", {"format": "nothing", "value": "<img src=x>", "rounding": "sideways"}),
        ("memory", {"model": "gpt5", "recipe": "<b>", "dp": "-1", "zero": "9"}),
        ("kb", {"model": "<img src=x onerror=alert(1)>", "use": "fp128"}),
        ("nothing", {"model": "x"}),
    ],
)
def test_invalid_addresses_show_a_message(page, tab, asked):
    browser = page(tab, **asked)
    assert shown(browser) == [f"panel-{tab if tab != 'nothing' else 'kb'}"]
    assert not browser.find_elements("css selector", "main img")
    if tab != "nothing":
        assert "which this page does not have" in at(browser, "page-verdict" if tab == "kb" else f"{tab}-result").text


def test_invalid_numbers_and_devices_show_a_message(page):
    browser = page("formats", value="three")
    assert "three is not a number: write 3.25" in at(browser, "formats-result").text
    browser = page("memory", dp="0")
    assert "0 devices given; expected a whole number, at least 1" in at(browser, "memory-result").text
    browser = page("memory", zero="2", dp="1")
    assert "Stage 2 shards over devices, and there is one" in at(browser, "memory-result").text


def test_tabs_follow_arrow_keys_and_controls_have_names(page):
    from selenium.webdriver.common.keys import Keys

    browser = page("kb")
    at(browser, "tab-kb").send_keys(Keys.ARROW_RIGHT)
    assert shown(browser) == ["panel-formats"]
    assert browser.switch_to.active_element.get_attribute("id") == "tab-formats"
    reached = []
    for _ in range(5):
        browser.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(browser.switch_to.active_element)
    names = [each.get_attribute("id") for each in reached if each.get_attribute("id")]
    assert names == ["formats-format", "formats-value", "formats-rounding", "formats-overflow"]
    at(browser, "tab-formats").send_keys(Keys.END)
    assert shown(browser) == ["panel-memory"]
    at(browser, "tab-memory").send_keys(Keys.ARROW_RIGHT)
    assert shown(browser) == ["panel-kb"]
    for tab in ("formats", "memory"):
        for field in page(tab).find_elements(
            "css selector", f"#panel-{tab} :is(input, select, button, [role=region], svg)"
        ):
            assert field.accessible_name or not field.is_displayed(), field.get_attribute("outerHTML")[:200]


def test_typing_updates_result_address_and_copied_command(page):
    browser = page("formats")
    at(browser, "formats-value").clear()
    at(browser, "formats-value").send_keys("1000")
    assert "1000 becomes 448 in float8_e4m3fn" in at(browser, "formats-result").text
    browser.execute_async_script("setTimeout(arguments[0], 300)")
    assert "value=1000" in browser.execute_script("return location.hash")
    at(browser, "formats-command").find_element("tag name", "button").click()
    browser.execute_async_script("setTimeout(arguments[0], 100)")
    assert at(browser, "formats-command").find_element("tag name", "button").text == "Copied"


@pytest.mark.slow
def test_memory_tab_equals_the_command(page, run):
    for model, recipe, dp, zero in (
        ("gpt2", "fp8lm-o2", 8, 1),
        ("bert-base", "adamw-8bit", 64, 3),
        ("gpt2", "fp32", 1, 0),
    ):
        text = at(page("memory", model=model, recipe=recipe, dp=dp, zero=zero), "memory-result").text
        _, out, _ = run(
            "memory", model, "--recipe", recipe, "--dp", str(dp), "--zero", str(zero), "--seq", "8", "--json"
        )
        (found,) = json.loads(out)["recipes"]
        for role in ("weights", "gradients", "states", "scales", "persistent"):
            assert not found["bytes"][role] or f"{found['bytes'][role]:,}" in text, (model, recipe, role)


def test_memory_tab_shows_every_row_without_errors(page):
    browser = page("memory", dp="8", zero="1")
    script = """
      const found = [];
      for (const model of document.getElementById("memory-model").options)
        for (const recipe of document.getElementById("memory-recipe").options) {
          const asked = { model: model.value, recipe: recipe.value, dp: "8", zero: "1" };
          page.panels.memory.open(new URLSearchParams(asked));
          const total = document.querySelector("#memory-result .total td:nth-child(3)");
          found.push(total ? total.textContent : document.getElementById("memory-result").textContent);
        }
      return found;"""
    found = browser.execute_script(script)
    rows = [memory.kept()[model][recipe] for model in memory.kept() for recipe in list_recipes()]
    assert len(found) == len(rows)
    assert all(
        (text == row) if isinstance(row, str) else text[0].isdigit() for text, row in zip(found, rows, strict=True)
    )


def test_formats_tab_rounds_like_python_and_shows_every_code(page):
    chance = random.Random(0)
    browser = page("formats")
    for name in formats.names():
        format = formats.get(name)
        asked = [f"{chance.choice('+-')}{2 ** chance.uniform(-20, 20):.5g}" for _ in range(20)]
        script = """
          page.panels.formats.open(new URLSearchParams({ format: arguments[0], value: "1" }));
          const format = page.data.formats.find((each) => each.name === arguments[0]);
          const texts = arguments[1].map((x) => String(exact.round(format, exact.read(x)).value));
          return [texts, document.querySelectorAll("#formats-codes tbody tr").length];"""
        texts, rows = browser.execute_script(script, name, asked)
        assert rows == 1 << format.bits or format.bits > 8
        wanted = [round_exactly(read_number(x), format).value for x in asked]
        assert all(float(a) == b or (a == "NaN" and b != b) for a, b in zip(texts, wanted, strict=True)), name


@pytest.mark.parametrize("width", [320, 768, 1200])
def test_tabs_fit_the_screen_width(page, browser, width):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    for tab, asked in (("formats", {"format": "fp32", "value": "0.1"}), ("memory", {"dp": "64", "zero": "1"})):
        assert page(tab, **asked).execute_script("return document.documentElement.scrollWidth") <= width, tab
