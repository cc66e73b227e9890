"""Gradient reductions over a link: bytes sent, times by link rate, and the rates below which few bits are faster.

    python benchmarks/wire.py [--keep]

Two ranks run in network namespaces of this machine, connected by a veth pair whose rate `tc` limits; this needs root.
Bytes are from the interface's counters. Time over the link is wall-clock time, of kinds interleaved in one process;
the compute of a reduction is the CPU time of one rank, on one thread, with the others simulated.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from halfstep.distributed import compress
from halfstep.distributed.collectives import Exchange
from halfstep.distributed.mean import Simulated, mean_steps
from halfstep.lab.environment import environment
from halfstep.recipe import FP4, FP8, Communication, get_storage
from harness import keep


SIZE, WIDTH, LAYERS, ROUNDS = 2**22, 1024, 4, 5
RATES = (None, 1000, 200, 50)  # Mbit/s; None is as fast as the machine is
NAMES = ("halfstep-0", "halfstep-1")
SENT: dict[str, Communication | None] = {
    "fp32": None,
    "bf16": Communication(gradients=get_storage("bf16")),
    "FP8": FP8,
    "FP4": FP4,
}


def main() -> None:
    """Measure, print, and with --keep write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="write the figures to benchmarks/results")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=ROUNDS, help="rounds at each rate")
    given = parser.parse_args()
    if given.rank is not None:
        worker(given.rank, given.steps)
        return
    compute = {str(ranks): break_even(ranks) for ranks in (2, 8)}
    print(json.dumps(compute, indent=1), flush=True)
    links = {}
    for rate in RATES:
        links["unlimited" if rate is None else str(rate)] = found = over_a_link(rate, given.steps)
        print(rate, json.dumps(found), flush=True)
    if given.keep:
        keep("wire", {"machine": environment(), "elements": SIZE, "compute": compute, "links": links})


def tables(kept: dict[str, Any]) -> str:
    """The two tables of docs/distributed.md: link rates below which few bits are faster, and times over a link."""
    lines = ["| gradients | ranks | bytes sent | compute, ns | faster than fp32 below | faster than bf16 below |"]
    lines += ["| --- | --- | --- | --- | --- | --- |"]
    for ranks, found in kept["compute"].items():
        for name, row in found.items():
            pays = [row.get(f"gbits_against_{other}") for other in ("fp32", "bf16")]
            cells = ["-" if rate is None else f"{rate:.1f} Gbit/s" for rate in pays]
            lines += [f"| {name} | {ranks} | {row['bytes']:.2f} | {row['ns']:.1f} | {cells[0]} | {cells[1]} |"]
    lines += ["", "| | " + " | ".join(SENT) + " |", "| --- |" + " --- |" * len(SENT)]
    free, links = kept["links"]["unlimited"], kept["links"]
    lines += ["| bytes an element, by the interface | " + " | ".join(f"{r['bytes']:.2f}" for r in free.values()) + " |"]
    for rate in ("200", "50"):
        cells = [f"{row['seconds']:.2f} s, {row['seconds_faster']:.2f}" for row in links[rate].values()]
        lines += [f"| a reduction at {rate} Mbit/s | " + " | ".join(cells) + " |"]
    cells = [f"{row['step']:.2f} s, {row['step_faster']:.2f}" for row in links["50"].values()]
    lines += ["| a step at 50 Mbit/s | " + " | ".join(cells) + " |"]
    for what, key in (("a step without a limit", "step"), ("a step without a limit, CPU time", "step_cpu")):
        cells = [f"{1000 * row[key]:.0f} ms, {row[f'{key}_faster']:.2f}" for row in free.values()]
        lines += [f"| {what} | " + " | ".join(cells) + " |"]
    return "\n".join(lines) + "\n"


# ---- compute ---------------------------------------------------------------------------------------------------------


def break_even(ranks: int) -> dict[str, Any]:
    """By kind: one rank's CPU time in a reduction in ns per element, bytes sent per element, and the link rates in
    Gbit/s below which the kind is faster than fp32 and bf16."""
    found: dict[str, Any] = {}
    for name, communication in SENT.items():
        if communication is None or communication.gradients is None:
            continue
        values, storage = torch.randn(SIZE), communication.gradients
        residual = torch.zeros(SIZE) if communication.feeds_back else None
        spent = []
        for _ in range(8):
            exchange: Any = Simulated(0, ranks)
            started = time.process_time()
            for out, given, _ in mean_steps(values, storage, exchange, residual):
                elapsed = time.process_time()
                out.view(ranks, -1).copy_(given if given.dim() > 1 else given.expand(ranks, -1))
                started += time.process_time() - elapsed  # does not count the simulated messages
            spent.append(time.process_time() - started)
            values.normal_()
        seconds = min(spent) / SIZE
        bytes_sent = exchange.sent / SIZE
        found[name] = {"ns": 1e9 * seconds, "bytes": bytes_sent}
        for other, own in (("fp32", 4), ("bf16", 2)):
            saved = 2 * (ranks - 1) / ranks * own - bytes_sent
            if saved > 0:
                found[name][f"gbits_against_{other}"] = 8e-9 * saved / seconds
    return found


# ---- two ranks and a link between them -------------------------------------------------------------------------------


@contextmanager
def link(rate: int | None) -> Iterator[None]:
    """A context with two network namespaces connected by interfaces, `hs0` at 10.77.0.1 and `hs1` at 10.77.0.2."""
    commands = [f"ip netns add {name}" for name in NAMES]
    commands += [f"ip link add hs0 netns {NAMES[0]} type veth peer name hs1 netns {NAMES[1]}"]
    for rank, name in enumerate(NAMES):
        commands += [f"ip -n {name} addr add 10.77.0.{rank + 1}/24 dev hs{rank}", f"ip -n {name} link set hs{rank} up"]
        commands += [f"ip -n {name} link set lo up"]
        if rate is not None:
            commands += [f"tc -n {name} qdisc add dev hs{rank} root tbf rate {rate}mbit burst 64kb latency 100ms"]
    try:
        for command in commands:
            subprocess.run(command.split(), check=True)
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def over_a_link(rate: int | None, rounds: int = ROUNDS) -> dict[str, Any]:
    """By kind: bytes per element that a rank's interface sent in a reduction; wall-clock and CPU seconds of a reduction
    and of a DDP step, medians over rounds; and the median ratios of fp32's times to them in the same rounds."""
    with link(rate), tempfile.TemporaryDirectory() as folder:
        started = []
        for rank, name in enumerate(NAMES):
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": f"hs{rank}", "FOLDER": folder, "OMP_NUM_THREADS": "1"}
            command = [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                __file__,
                "--rank",
                str(rank),
                "--steps",
                str(rounds),
            ]
            started.append(subprocess.Popen(command, env=environment))
        try:
            codes = [process.wait(timeout=540) for process in started]
        finally:
            for process in started:
                process.kill()
        assert codes == [0, 0]
        return json.loads(Path(folder, "found.json").read_text())  # type: ignore[no-any-return]


def worker(rank: int, rounds: int) -> None:
    """Run one rank's measurements; rank 0 writes the results."""
    torch.set_num_threads(1)
    folder = os.environ["FOLDER"]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    kinds = {name: _reduction(communication) for name, communication in SENT.items()}
    steps = {name: _step(communication) for name, communication in SENT.items()}
    timed = ("seconds", "step", "seconds_cpu", "step_cpu")
    found: dict[str, dict[str, Any]] = {name: {what: [] for what in timed} for name in SENT}
    for number in range(rounds + 1):  # the first compiles kernels and allocates buffers
        for what, runs in (("seconds", kinds), ("step", steps)):
            for name, run in runs.items():
                dist.barrier()
                sent, started, spent = _sent(rank), time.perf_counter(), time.process_time()
                run()
                dist.barrier()
                if number:
                    found[name][what].append(time.perf_counter() - started)
                    found[name][f"{what}_cpu"].append(time.process_time() - spent)
                    if what == "seconds":
                        found[name]["bytes"] = (_sent(rank) - sent) / SIZE
    if rank == 0:
        medians = {
            name: {"bytes": each["bytes"], **{what: statistics.median(each[what]) for what in timed}}
            for name, each in found.items()
        }
        for what in timed:
            for each, row in medians.items():
                ratios = [a / b for a, b in zip(found["fp32"][what], found[each][what], strict=True)]
                row[f"{what}_faster"] = statistics.median(ratios)
        Path(folder, "found.json").write_text(json.dumps(medians))
    dist.barrier()
    dist.destroy_process_group()


def _sent(rank: int) -> int:
    return int(Path(f"/sys/class/net/hs{rank}/statistics/tx_bytes").read_text())


def _reduction(communication: Communication | None) -> Callable[[], None]:
    """A function that runs a mean over the ranks of `SIZE` elements."""
    values = torch.randn(SIZE)
    if communication is None or communication.gradients is None:
        return lambda: dist.all_reduce(values)  # type: ignore[return-value]
    storage, exchange = communication.gradients, Exchange()

    def run() -> None:
        for pending in mean_steps(values, storage, exchange):
            pending.wait()

    return run


def _step(communication: Communication | None) -> Callable[[], None]:
    """A function that runs a training step under DDP of a model of 4.2 million parameters, with a batch of 8."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = DistributedDataParallel(nn.Sequential(*layers))
    if communication is not None:
        compress(model, communication)
    optimizer, x = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(8, WIDTH)

    def run() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


if __name__ == "__main__":
    main()
