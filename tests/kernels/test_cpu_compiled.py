"""Compiled kernels are cached on disk under a hash of their sources, and start no threads in a forked child."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numba
import pytest
import torch

import halfstep
from halfstep.kernels.cpu import cast
from halfstep.kernels.cpu.compiled import (
    CHUNK,
    SOURCES,
    _Files,
    cached_code,
    inner,
    inner_overload,
    remove_old,
    source_hash,
)


PACKAGE = Path(halfstep.__file__).parent
ROUND = """
import sys, torch
from halfstep import formats
from halfstep.kernels.cpu import cast
x = torch.tensor([1.0, 3.3, 1000.0])
cast.run(x, x, formats.get("e4m3fn"), "nearest_even", "saturate", None)
assert x.tolist() == [1.0, 3.25, 448.0]
stats = cast._values.serial.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()), stats.cache_path)
"""


@pytest.fixture
def copied(tmp_path):
    """The kernels' folder in a copy of the package without compiled files, and the environment that imports it."""
    shutil.copytree(PACKAGE, tmp_path / "src" / "halfstep", ignore=shutil.ignore_patterns("__pycache__"))
    home = tmp_path / "home"
    home.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), "HOME": str(home), "XDG_CACHE_HOME": str(home)}
    return tmp_path / "src" / "halfstep" / "kernels" / "cpu", environment


def hits_misses_folder(environment):
    result = subprocess.run([sys.executable, "-c", ROUND], env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    hits, misses, folder = result.stdout.split()
    return int(hits), int(misses), folder


def test_compiled_code_is_cached_under_the_hash_of_all_sources():
    x = torch.tensor([1.0, 3.3, 1000.0])
    cast.run(x, x, halfstep.formats.get("e4m3fn"), "nearest_even", "saturate", None)
    folder = Path(cast._values.serial.stats.cache_path)
    assert folder.name == f"kernels-{source_hash(PACKAGE / room for room in SOURCES)}"
    assert {file.suffix for file in folder.iterdir()} >= {".nbi", ".nbc"}


@pytest.mark.slow
def test_a_second_process_uses_the_cache_until_a_source_changes(copied):
    kernels, environment = copied
    hits, misses, first = hits_misses_folder(environment)
    assert (hits, misses) == (0, 1)
    assert Path(first).parent == Path(environment["XDG_CACHE_HOME"]) / "halfstep"
    assert hits_misses_folder(environment) == (1, 0, first)
    seen = {first}
    for helper in (kernels / "lanes.py", kernels.parents[1] / "quant" / "logarithm.py"):  # a function, and numbers
        helper.write_text(helper.read_text() + "\n# another helper\n")
        hits, misses, folder = hits_misses_folder(environment)
        assert (hits, misses) == (0, 1)
        assert folder not in seen
        seen.add(folder)


@pytest.mark.slow
def test_the_cache_falls_back_to_the_package_folder_or_to_none(copied):
    """A file instead of the folder makes it unwritable, also for root."""
    kernels, environment = copied
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    shutil.rmtree(environment["XDG_CACHE_HOME"])
    Path(environment["XDG_CACHE_HOME"]).write_text("")
    hits, misses, folder = hits_misses_folder(environment)
    assert (hits, misses) == (0, 1)
    assert Path(folder).parent == kernels / "__pycache__"
    shutil.rmtree(kernels / "__pycache__")
    (kernels / "__pycache__").write_text("")
    assert hits_misses_folder(environment) == (0, 1, "None")


@pytest.mark.slow
def test_each_processor_type_has_its_own_cached_code(copied):
    """As in a home directory that machines share, where another CPU's code may have illegal instructions."""
    _, environment = copied
    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    for target in ({**environment, **plain}, environment):
        assert hits_misses_folder(target)[:2] == (0, 1)
    for target in ({**environment, **plain}, environment):
        assert hits_misses_folder(target)[:2] == (1, 0)


def test_concurrent_compilations_do_not_mix_up_cached_code(tmp_path):
    """The second process saves while the first, which has also seen an empty index, is saving."""
    first, second, later = (_Files(str(tmp_path), "kernel", "stamp") for _ in range(3))
    write, second._load_index = first._save_data, dict

    def slowly(*arguments):
        second.save(("float64", "znver5"), "the second's")
        write(*arguments)

    first._save_data = slowly
    first.save(("float32", "haswell"), "the first's")
    assert later.load(("float32", "haswell")) in (None, "the first's")
    assert later.load(("float64", "znver5")) in (None, "the second's")
    assert later.load(("float32", "znver5")) is None


def test_the_hash_depends_on_every_file_and_its_name(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "a.py").write_text("x")
    found = [source_hash([tmp_path])]
    (tmp_path / "room" / "b.py").write_text("")
    found.append(source_hash([tmp_path]))
    (tmp_path / "room" / "b.py").rename(tmp_path / "room" / "c.py")
    found.append(source_hash([tmp_path]))
    (tmp_path / "room" / "c.py").write_text("y")
    found.append(source_hash([tmp_path]))
    assert len({*found}) == 4


def test_kernels_import_only_sources_that_the_hash_covers():
    named = set()
    for file in (PACKAGE / "kernels" / "cpu").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                named |= {node.module} if node.module != "halfstep" else {f"halfstep.{a.name}" for a in node.names}
            elif isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
    named = {name.removeprefix("halfstep.").replace(".", "/") for name in named if name.startswith("halfstep.")}
    around = {"errors", "kernels/operator"}  # they call kernels
    assert {name for name in named if not name.startswith(SOURCES)} <= around


def test_old_cache_folders_are_removed(tmp_path):
    for day in range(5):
        (tmp_path / f"kernels-{day}").mkdir()
        os.utime(tmp_path / f"kernels-{day}", (day, day))
    (tmp_path / "other").mkdir()
    remove_old(tmp_path, kept=2)
    assert {folder.name for folder in tmp_path.iterdir()} == {"kernels-3", "kernels-4", "other"}


def test_cached_code_counts_only_compiled_files(tmp_path):
    for folder, name in (("kernels-1", "a.nbc"), ("kernels-2", "a.nbi"), ("kernels-2", "a.txt"), ("other", "a.nbc")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_bytes(bytes(3 << 20))
    assert cached_code(tmp_path) == f"6 MiB in 2 folders (at most 8) of {tmp_path}"


def test_a_function_called_by_an_inlined_one_is_not_inlined():
    """numba passes the inline attribute on, which would change the vector width of a loop."""

    @inner
    def part(x):
        return x + 1

    def called(x):
        raise NotImplementedError

    @inner_overload(called, inlined=True)
    def _called(x):
        return lambda x: part(x)

    @numba.njit
    def kernel(x):
        return called(x)

    assert kernel(1) == 2
    assert ["alwaysinline" in one.library.get_llvm_str() for one in part.overloads.values()] == [False]


FORKED = """
import numpy, torch, warnings
from torch.utils.data import DataLoader, Dataset
from halfstep import formats
from halfstep.kernels.cpu import cast
from halfstep.kernels.cpu.compiled import CHUNK
warnings.simplefilter("ignore")
def rounded():
    x = torch.from_numpy(numpy.full(4 * CHUNK, 3.3, numpy.float32))
    cast.run(x, x, formats.get("e4m3fn"), "nearest_even", "saturate", None)
    return x
class Rounded(Dataset):
    def __len__(self): return 2
    def __getitem__(self, index): return rounded()
torch.set_num_threads(2)
parent = rounded()
for batch in DataLoader(Rounded(), batch_size=1, num_workers=1, multiprocessing_context="fork"):
    assert torch.equal(batch[0], parent)
print("fine")
"""


@pytest.mark.slow  # compiles in another process
def test_a_forked_data_loader_worker_can_round():
    result = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "fine", result.stderr


@pytest.mark.cpu
def test_the_threads_option_sets_the_threads_of_torch_and_numba(request):
    threads = request.config.getoption("threads")
    assert torch.get_num_threads() == threads
    x = torch.full((4 * CHUNK,), 3.3)
    cast.run(x, x, halfstep.formats.get("e4m3fn"), "nearest_even", "saturate", None)
    if threads > 1:
        assert numba.get_num_threads() == threads


@pytest.mark.parametrize("threads", [1, 2])
def test_torchs_number_of_threads_is_used_and_unchanged(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x = torch.full((4 * CHUNK + 3,), 3.3)
        out = torch.empty_like(x)
        cast.run(x, out, halfstep.formats.get("e4m3fn"), "nearest_even", "saturate", None)
        assert torch.get_num_threads() == threads
        assert (out == 3.25).all()
    finally:
        torch.set_num_threads(before)
