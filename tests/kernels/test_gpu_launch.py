"""How Triton kernels are launched, with a kernel in their place that notes what it is asked."""

import torch

from halfstep.kernels.gpu import Launch


class Kernel:
    """What Triton makes of a function: a first call compiles, what it gives back runs."""

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


def test_a_launch_compiles_once_for_what_is_there_and_where_it_begins():
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


def test_arguments_that_are_alike_in_all_calls_are_not_asked():
    kernel = Kernel()
    launch = Launch(kernel, torch.device("cpu"), varying=(0,), B=4)
    for x, scale in [(offset(0), offset(0)), (offset(0), offset(1)), (offset(1), offset(1))]:
        launch(1, x, scale)
    assert len(kernel.compiled) == 2
    assert len(kernel.ran) == 1


def test_no_program_is_no_launch():
    kernel = Kernel()
    Launch(kernel, torch.device("cpu"), B=4)(0, offset(0), None)
    assert not kernel.compiled
