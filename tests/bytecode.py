"""Compile the bytecode of the sources in parallel test runs: each worker compiles its share of the files.

Without this, every worker compiles every file of a fresh clone, since all collect the same files in the same order."""

import compileall
import contextlib
import importlib.util
import sys
from pathlib import Path


def share(files, worker, workers):
    """The files that this worker compiles; each file belongs to one worker."""
    return sorted(files)[worker::workers]


def compile_share(config):
    """Compile this worker's share of the Python files in the collected folders; does nothing without workers."""
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
    """Have pytest rewrite the file's assertions and cache the bytecode. The module's code does not run: its first
    import fails."""
    spec = importlib.util.spec_from_file_location(f"unused.{file.stem}", file, loader=rewriting)
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__builtins__"] = {}
    with contextlib.suppress(ImportError):
        rewriting.exec_module(module)
