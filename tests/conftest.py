"""What every test starts from: a fixed seed, no hypothesis deadlines, one thread, and this machine's CPU.

torch and the library are imported inside functions: xdist's controller process imports neither, which would take the
first two seconds of every run."""

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
    # Also for processes that tests start: with torch's default they would compile kernels again, in parallel.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    if hasattr(config, "workerinput") or config.getoption("dist", "no") == "no":
        compile_share(config)  # before the first import of the library
        prepare(threads)


def prepare(threads):
    """Set up a process that runs tests: hypothesis, threads."""
    import torch
    from hypothesis import settings
    from hypothesis.internal.conjecture import providers

    from families import seed

    settings.register_profile("halfstep", deadline=None, max_examples=60, derandomize=True, database=None)
    settings.load_profile("halfstep")
    # Otherwise hypothesis reads the constants of all our modules, including tests, which takes seconds per process.
    providers._get_local_constants = lambda: providers._local_constants
    torch.set_num_threads(threads)  # module-scoped fixtures run before `_start`
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
    """Collect without garbage collection, then freeze: thousands of test objects live to the end of the session."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)  # compilers allocate millions of objects, few of them in cycles


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    """Freeze live objects, so that collections within tests (a Trainer's, Dynamo's) scan only the module's own."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _start(request):
    import torch

    from families import start

    start()
    # Tensors in tests are small: a second thread costs more than it saves, especially beside other processes. Tests of
    # threading set their own number; `make test-cpus` has cells with two.
    torch.set_num_threads(request.config.getoption("threads"))


@pytest.fixture
def carry(monkeypatch):
    """carry(*dtypes) simulates a CPU on which matmuls of exactly these 16-bit dtypes are emulated in float32."""
    from halfstep.kernels import carried

    def choose(*dtypes):
        monkeypatch.setattr(carried, "CARRIED", frozenset(dtypes))

    return choose


@pytest.fixture(params=["own", "carried"])
def products(request, carry):
    """Both kinds of CPU on any machine: 16-bit matmuls are native or emulated. Tests that use it are marked `cpu`."""
    import torch

    carry(*([] if request.param == "own" else [torch.bfloat16, torch.float16]))


@pytest.fixture
def unrendered(monkeypatch):
    """Reports build their figures but render no images, which takes most of a report's time."""
    monkeypatch.setattr("halfstep.lab.report.png", lambda figure: b"no picture")


@pytest.fixture
def run(monkeypatch, capsys):
    """A function that runs `halfstep ARGUMENTS` in 200 columns by default and returns (exit code, stdout, stderr)."""
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
    """A headless Chromium, driven by selenium, that reports every request and console line."""
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
