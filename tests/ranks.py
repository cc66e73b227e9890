"""Ranks of a test: processes that form a group, in each of which one function of the test's module is called."""

import importlib
import os
import signal
import subprocess
import sys

import torch
import torch.distributed as dist


def on_ranks(function, folder, *arguments, world=2, killed=()):
    """What `function(rank, *arguments)` returns on each rank: what `torch.load` reads.

    Args:
        function: of a module's top level.
        folder: an empty one.
        arguments: of the function, as texts.
        killed: ranks that kill themselves, of which None is returned.
    """
    called = [function.__module__, function.__name__, str(folder), str(world)]
    command = [sys.executable, "-W", "ignore", __file__, *called]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # where the module is
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
