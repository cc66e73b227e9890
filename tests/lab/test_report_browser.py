"""The report in headless Chromium at the widths of a laptop and a phone: what fits, and the hint to scroll."""

import json
import re
import shutil
import subprocess
from html import escape, unescape

import pytest
from run_folder import write

from halfstep.lab.report import write_report


WIDTHS = (1280, 1024, 400)
MEASURE = """
const found = [...document.querySelectorAll("iframe")].map(frame => {
  const page = frame.contentDocument, all = s => [...page.querySelectorAll(s)];
  const widths = s => all(s).map(e => [e.clientWidth, e.scrollWidth]), left = e => e.getBoundingClientRect().left;
  const [region] = all(".scroll"), [name] = all(".verdicts tbody th");
  region.scrollLeft = 10000;
  return {
    page: page.documentElement.scrollWidth, figures: widths("figure img").map(w => w[0]), table: widths(".scroll")[0],
    others: widths(".facts, pre"), hint: all(".wide")[0].offsetHeight > 0, moved: left(name) - left(region),
  };
});
document.getElementById("found").textContent = JSON.stringify(found);
"""


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The measured layout of a report on seven recipes at each width."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium on PATH: the report is not tried in a browser")
    monkeypatch.setattr("halfstep.lab.report.results._DPI", 50)
    page = escape(write_report(write(tmp_path / "usual")).read_text(encoding="utf-8"))
    frames = "".join(
        f'<iframe style="width: {width}px; height: 800px; border: 0" srcdoc="{page}"></iframe>' for width in WIDTHS
    )
    outer = tmp_path / "frames.html"
    outer.write_text(f"<!doctype html>{frames}<p id=found></p><script>onload = () => {{{MEASURE}}}</script>", "utf-8")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1400,900",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    completed = subprocess.run(
        [chromium, *flags, "--dump-dom", outer.as_uri()], capture_output=True, text=True, timeout=120
    )
    (found,) = re.findall('<p id="found">(.*?)</p>', completed.stdout)
    return dict(zip(WIDTHS, json.loads(unescape(found)), strict=True))


@pytest.mark.slow  # starts a browser
def test_report_fits_a_laptop_and_hints_at_scrolling_on_a_phone(measured):
    for width, found in measured.items():
        assert found["page"] <= width
        assert len(found["figures"]) > 5
        assert min(found["figures"]) >= (0.95 if width < 1280 else 0.75) * found["page"]
        own, inside = found["table"]
        assert found["hint"] == (inside > own) == (width < 1280), width
        assert abs(found["moved"]) <= 1  # recipe names stay visible
        assert all(inside <= own for own, inside in found["others"])
