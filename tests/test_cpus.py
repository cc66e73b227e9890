"""`make test-cpus`: the cells that run on a processor, and the reasons for skipping others."""

import pytest

import cpus


AVX2 = frozenset({"sse4_1", "avx2", "fma", "bmi2"})
XEON = AVX2.union(cpus.AVX512)
MACHINES = {"no x86": None, "avx2": AVX2, "avx512": XEON, "amx": XEON | {"avx512_bf16", "avx512_fp16", "amx_bf16"}}


def run_on(flags):
    return [cell.name for cell in cpus.CELLS if cpus.why_not(cell, flags) is None]


@pytest.mark.parametrize("machine", MACHINES)
def test_machines_run_their_default_two_threads_and_supported_cells(machine):
    flags = MACHINES[machine]
    assert {"this machine", "2 threads"} <= set(run_on(flags))
    for cell in cpus.CELLS:
        reason = cpus.why_not(cell, flags)
        if flags is None and cell.settings:
            assert reason == "skipped: no x86 processor"
        elif flags is not None and not flags.issuperset(cell.needs):
            assert reason is not None
            assert reason.startswith("skipped: this processor has no ")


def test_highest_level_is_the_default_cell_and_lower_levels_run():
    assert "ATEN_CPU_CAPABILITY=default" in run_on(AVX2)
    assert "ATEN_CPU_CAPABILITY=avx2" not in run_on(AVX2)
    assert "ATEN_CPU_CAPABILITY=avx2" in run_on(XEON)
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE" not in run_on(XEON)
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in run_on(MACHINES["amx"])
    assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_AMX" not in run_on(MACHINES["amx"])


def test_cell_names_are_distinct_and_flags_are_parsed():
    assert len({cell.name for cell in cpus.CELLS}) == len(cpus.CELLS)
    assert cpus.flags_of("model name : x\nflags\t\t: fpu avx2\n\nflags : none") == {"fpu", "avx2"}
    assert cpus.flags_of("Features : asimd") is None
