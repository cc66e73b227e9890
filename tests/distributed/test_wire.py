"""Bytes on a link between two network namespaces, by the interface's counters."""

import importlib
import os
import shutil
from pathlib import Path

import pytest


def may_make_namespaces():
    return hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")


@pytest.mark.slow
@pytest.mark.skipif(not may_make_namespaces(), reason="network namespaces take root, ip and tc; bytes are counted in "
                    "the process group by test_mean.py and test_ddp.py")  # fmt: skip
def test_bytes_per_element_on_a_link(monkeypatch):
    """With headers: 4 for a ring of float32, 2 for bf16, and at most 1.05 and 0.56 for FP8 and FP4 with scales."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    found = importlib.import_module("wire").over_a_link(None, rounds=1)
    assert found["fp32"]["bytes"] == pytest.approx(4.0, rel=0.01)
    assert found["bf16"]["bytes"] == pytest.approx(2.0, rel=0.01)
    assert 1.0 < found["FP8"]["bytes"] <= 1.05
    assert 0.5 < found["FP4"]["bytes"] <= 0.56
