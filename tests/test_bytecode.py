"""Workers compile disjoint shares of the files, and imports read the cached bytecode."""

import importlib.util
import itertools
import sys

import pytest

from bytecode import compile_share, keep_rewritten, share


def test_every_file_belongs_to_one_worker():
    files = [f"{name}.py" for name in "cadbe"]
    shares = [share(files, worker, 3) for worker in range(3)]
    assert sorted(itertools.chain(*shares)) == sorted(files)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_rewritten_bytecode_is_cached_without_running_the_file(tmp_path, monkeypatch, request):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "test_it.py"
    file.write_text('"""It."""\nimport sys\nsys.was_run = True\n\n\ndef test():\n    assert 1 + 1 == 3\n')
    rewriting = request.config.pluginmanager.rewrite_hook
    keep_rewritten(rewriting, file)
    assert not hasattr(sys, "was_run")
    (kept,) = (tmp_path / "__pycache__").iterdir()
    first = kept.stat().st_mtime_ns, kept.stat().st_ino
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location("it", file, loader=rewriting))
    rewriting.exec_module(module)
    assert (kept.stat().st_mtime_ns, kept.stat().st_ino) == first  # read, not written again
    with pytest.raises(AssertionError, match=r"assert \(1 \+ 1\) == 3"):
        module.test()
    del sys.was_run


def test_worker_compiles_its_share_of_the_collected_files(tmp_path, monkeypatch, request):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for name in ("a.py", "b.py", "test_c.py", "test_d.py"):
        (tmp_path / name).write_text("import sys\n")

    class Worker:
        pluginmanager = request.config.pluginmanager
        args = (str(tmp_path),)

    compile_share(Worker())
    assert not (tmp_path / "__pycache__").exists()
    Worker.workerinput = {"workerid": "gw1", "workercount": 2}
    compile_share(Worker())
    assert {file.name.split(".")[0] for file in (tmp_path / "__pycache__").iterdir()} == {"b", "test_d"}
