"""Compiling the sources' bytecode in parallel runs: each worker compiles a share of the files that all of them need.

Workers collect the same files in the same order: without this, each compiles every file of a fresh clone.
"""

import compileall
import contextlib
import importlib.util
import sys
from pathlib import Path


def share(files, worker, workers):
    """The files that this worker compiles: every file is one worker's."""
    return sorted(files)[worker::workers]


def compile_share(config):
    """Compile this worker's share of the Python files in the folders that are collected; without workers, nothing."""
    if not hasattr(config, "workerinput") or sys.dont_write_bytecode:
        return
    folders = [Path(argument) for argument in config.args if Path(argument).is_dir()]
    files = {file.resolve() for folder in folders for file in folder.rglob("*.py")}
    number = int(config.workerinput["workerid"].removeprefix("gw"))
    rewriting = config.pluginmanager.rewrite_hook
    for file in share(files, number, config.workerinput["workercount"]):
        if file.match("test_*.py"):
            keep_rewritten(rewriting, file)
        else:
            compileall.compile_file(file, quiet=2)


def keep_rewritten(rewriting, file):
    """Have pytest rewrite the file's assertions and keep the bytecode. None of it runs: its first import fails."""
    spec = importlib.util.spec_from_file_location(f"unused.{file.stem}", file, loader=rewriting)
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__builtins__"] = {}
    with contextlib.suppress(ImportError):
        rewriting.exec_module(module)
