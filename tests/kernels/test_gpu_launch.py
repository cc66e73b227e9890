"""How Triton kernels are launched, with a stand-in kernel that records its calls."""

import torch

from halfstep.kernels.gpu import Launch


class Kernel:
    """A stand-in for a Triton function: the first call compiles, and the returned kernel runs."""

    arg_names = ("x", "scale", "B")

    def __init__(self):
        self.compiled, self.ran = [], []

    def __getitem__(self, grid):
        def first(*arguments, **options):
            self.compiled.append(arguments)
            return Compiled(self)

        return first


class Compiled:
    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return lambda *arguments: self.kernel.ran.append((grid, arguments))


def offset(by):
    return torch.zeros(16 + by)[by:]


def test_a_launch_compiles_once_per_none_arguments_and_alignment():
    kernel = Kernel()
    launch = Launch(kernel, torch.device("cpu"), B=4)
    for x, scale in [
        (offset(0), None),
        (offset(0), None),
        (offset(1), None),
        (offset(0), offset(0)),
        (offset(1), None),
    ]:
        launch(2, x, scale)
    assert len(kernel.compiled) == 3
    assert [grid for grid, _ in kernel.ran] == [(2, 1, 1)] * 2
    assert [arguments[2] for _, arguments in kernel.ran] == [4, 4]


def test_only_varying_arguments_are_checked_for_alignment():
    kernel = Kernel()
    launch = Launch(kernel, torch.device("cpu"), varying=(0,), B=4)
    for x, scale in [(offset(0), offset(0)), (offset(0), offset(1)), (offset(1), offset(1))]:
        launch(1, x, scale)
    assert len(kernel.compiled) == 2
    assert len(kernel.ran) == 1


def test_an_empty_grid_launches_nothing():
    kernel = Kernel()
    Launch(kernel, torch.device("cpu"), B=4)(0, offset(0), None)
    assert not kernel.compiled
