"""Knowledge-base fixtures: the package's own data, and a folder to write entries into."""

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from toy_entry import ENTRY

from halfstep.kb import load


settings.register_profile("halfstep", deadline=None, max_examples=100, derandomize=True, database=None)
settings.load_profile("halfstep")


@pytest.fixture(scope="session")
def base():
    """The package's knowledge base, with nothing of this machine's user in it."""
    return load(None)


@pytest.fixture
def overlay(tmp_path):
    """A function that writes a data file into a folder of one's own, and returns the folder."""

    def write(text=ENTRY, name="toy.toml", family="Toy"):
        folder = tmp_path / "own"
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text((f'family = "{family}"\n' if family else "") + text, encoding="utf-8")
        return folder

    return write


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium, driven by selenium, that reports every request and every line of its console."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not (chromium and driver):
        pytest.skip("no chromium and chromedriver on PATH: the page is not tried in a browser")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tempfile.mkdtemp()
    flags = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
    for flag in [*flags.split(), "disable-component-update", "disable-sync", f"user-data-dir={profile}"]:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    running = webdriver.Chrome(service=webdriver.ChromeService(driver), options=options)
    yield running
    running.quit()
    shutil.rmtree(Path(profile), ignore_errors=True)
