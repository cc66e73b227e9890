"""Every recipe gives the same bits under any default dtype of torch; Hugging Face loads models under others."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

import halfstep
from tiny import EVERY, assert_same, batch, copied, model_for, prepared, train


QUICK = {"fp4-wang", "fp4-zhou-dgrad-bf16", "mxfp4-rht", "nvfp4"}
"""Recipes whose results once depended on the default dtype; each takes 0.3 s."""
HERE, TORCH = Path(__file__).parent, str(Path(torch.__file__).parent)
LIBRARY = Path(halfstep.__file__).parent
MAKERS = {torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.randn}
MAKERS |= {torch.tensor, torch.zeros}
DTYPES = ["bfloat16", "float16", "float64"]


def trained(name, dtype):
    """Losses, states and outputs after two steps of a float32 model, under the given default dtype."""
    model, data = model_for(name), batch()
    torch.set_default_dtype(dtype)
    try:
        torch.manual_seed(0)
        setup = prepared(name, model)
        losses, output = train(*setup, 2, data), model(data[0])
    finally:
        torch.set_default_dtype(torch.float32)
    return losses, output.detach(), *(copied(each.state_dict()) for each in setup)


@pytest.mark.quick(*(f"{name}-torch.bfloat16" for name in sorted(QUICK)))
@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES], ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_results_do_not_depend_on_the_default_dtype(name, dtype):
    assert_same(trained(name, dtype), trained(name, torch.float32))


class Float32Factories(TorchFunctionMode):
    """Factory calls without a dtype give float32, if tests or the library's lab or unit rooms make them."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in MAKERS or (kwargs or {}).get("dtype") or self.of_library(sys._getframe(1)):
            return func(*args, **(kwargs or {}))
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch.set_default_dtype(default)

    def of_library(self, frame):
        while frame.f_code.co_filename.startswith((TORCH, "<")):
            frame = frame.f_back
        file = Path(frame.f_code.co_filename)
        return file.is_relative_to(LIBRARY) and file.relative_to(LIBRARY).parts[0] not in ("lab", "unit")


class DefaultDtype:
    """A pytest plugin that runs tests and fixtures under a default dtype."""

    def __init__(self, dtype):
        self.dtype = getattr(torch, dtype)

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self):
        torch.set_default_dtype(self.dtype)
        try:
            with Float32Factories():
                return (yield)
        finally:
            torch.set_default_dtype(torch.float32)

    pytest_fixture_setup = pytest_pyfunc_call


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_conformance_tests_pass_under_each_default_dtype(dtype):
    ran = subprocess.run(
        [sys.executable, __file__, dtype],
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
        cwd=HERE.parent.parent,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


if __name__ == "__main__":
    sys.exit(pytest.main([str(HERE), "-p", "no:cacheprovider", *sys.argv[2:]], plugins=[DefaultDtype(sys.argv[1])]))
