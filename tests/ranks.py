"""Run a function of a test's module on several ranks, in processes that form a process group."""

import importlib
import os
import signal
import subprocess
import sys

import torch
import torch.distributed as dist


def on_ranks(function, folder, *arguments, world=2, killed=()):
    """The results of `function(rank, *arguments)` on each rank, as `torch.load` reads them.

    Args:
        function: a module-level function.
        folder: an empty folder.
        arguments: passed to the function as strings.
        killed: ranks that kill themselves; their result is None.
    """
    called = [function.__module__, function.__name__, str(folder), str(world)]
    command = [sys.executable, "-W", "ignore", __file__, *called]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # to find the function's module
    started = [subprocess.Popen([*command, str(rank), *map(str, arguments)], env=environment) for rank in range(world)]
    try:
        codes = [process.wait(timeout=300) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [-signal.SIGKILL if rank in killed else 0 for rank in range(world)]
    return [None if rank in killed else torch.load(f"{folder}/{rank}.pt") for rank in range(world)]


def main():
    module, name, folder, world, rank, *arguments = sys.argv[1:]
    torch.set_num_threads(1)
    function = getattr(importlib.import_module(module), name)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(world))
    torch.save(function(int(rank), *arguments), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
