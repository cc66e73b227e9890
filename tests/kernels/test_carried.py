"""Which 16-bit matmuls torch computes natively on this CPU, and which are emulated in float32."""

import os
import subprocess
import sys

import pytest
import torch

from halfstep.kernels import carried


X86 = {"architecture": "x86_64"}
WITH_UNITS = {**X86, "amx_bf16": True, "avx512_fp16": True}


@pytest.mark.parametrize(
    ("capabilities", "used", "lacks"),
    [
        (WITH_UNITS, True, False),
        (WITH_UNITS, False, True),  # ONEDNN_MAX_CPU_ISA=AVX2: torch then multiplies by a loop, sixty times slower
        (X86, True, True),
        ({"architecture": "aarch64"}, False, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_matmuls_are_emulated_without_matrix_units(capabilities, used, lacks, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    monkeypatch.setattr(torch.ops.mkldnn, carried._ASKED[dtype], lambda: used, raising=False)
    assert carried._lacks_matrix_units(dtype) is lacks


@pytest.mark.slow  # starts a process
def test_matmuls_are_emulated_if_onednn_is_limited_to_avx2():
    found = "len(carried.CARRIED), torch.cpu.get_capabilities()['architecture']"
    code = f"import torch; from halfstep.kernels import carried; print({found})"
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    count, architecture = ran.stdout.split()
    assert architecture != "x86_64" or count == "2"
