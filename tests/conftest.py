"""What every test starts from: a fixed seed, no deadlines (no clock in a test), one thread, this machine's CPU.

torch and the library are imported in functions: the process that deals tests to workers imports neither, which would
be the first two seconds of every run.
"""

import gc
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from bytecode import compile_share


def pytest_addoption(parser):
    parser.addoption("--threads", type=int, default=1, help="torch's threads, and the kernels' (default: 1)")


def pytest_configure(config):
    threads = config.getoption("threads")
    # In processes that tests start too: with torch's own number they would compile kernels again, in parallel.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        compile_share(config)  # before the first import of the library
        prepare(threads)


def prepare(threads):
    """What a process that runs tests needs."""
    import torch
    from hypothesis import settings
    from hypothesis.internal.conjecture import providers

    from families import seed

    settings.register_profile("halfstep", deadline=None, max_examples=60, derandomize=True, database=None)
    settings.load_profile("halfstep")
    # Else hypothesis reads the constants of all our modules, tests too, for some of its numbers: seconds a process.
    providers._get_local_constants = lambda: providers._local_constants
    torch.set_num_threads(threads)  # a module's fixtures come before `_start`
    torch.manual_seed = seed


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    from families import mark_slow

    for item in items:
        if "products" in item.fixturenames:
            item.add_marker(pytest.mark.cpu)
    mark_slow(items, whole=not any("::" in argument for argument in config.args))


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Thousands of tests stay to the end: no collection of garbage, now or later, need go through them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)  # compilers make garbage by the million, and next to none of it in cycles


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    """What collects garbage in a test, as a Trainer and Dynamo do, goes through that of its module alone."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _start(request):
    import torch

    from families import start

    start()
    # Tensors in tests are small: a second thread costs more than it brings, and much more beside another process. Tests
    # of threading set their own number; `make test-cpus` has cells with two.
    torch.set_num_threads(request.config.getoption("threads"))


@pytest.fixture
def carry(monkeypatch):
    """carry(*dtypes): a CPU on which the products of those 16-bit dtypes, and of no others, are carried in float32."""
    from halfstep.kernels import carried

    def choose(*dtypes):
        monkeypatch.setattr(carried, "CARRIED", frozenset(dtypes))

    return choose


@pytest.fixture(params=["own", "carried"])
def products(request, carry):
    """Both kinds of CPU, on any: 16-bit products are torch's own, or carried. What uses it is marked `cpu`."""
    import torch

    carry(*([] if request.param == "own" else [torch.bfloat16, torch.float16]))


@pytest.fixture
def unrendered(monkeypatch):
    """Reports build their figures, and write no pictures of them: most of a report's time."""
    monkeypatch.setattr("halfstep.lab.report.png", lambda figure: b"no picture")


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `halfstep ARGUMENTS` in a terminal of 200 columns (or as told): exit code, standard output and error."""
    from halfstep.cli.app import main

    def command(*arguments, columns=200):
        monkeypatch.setattr(sys, "argv", ["halfstep", *arguments])
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return stopped.value.code or 0, captured.out, captured.err

    return command


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
