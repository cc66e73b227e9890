"""The search for races in shared memory finds a missing barrier, and accepts a kernel with all barriers."""

import pytest
from shared_memory import unordered


KERNEL = """
.visible .entry k(.param .u64 x) {
    st.shared.b32 [%r1], %r9;
    bar.sync 0;
    ld.shared.b32 %r2, [%r3];
    shfl.sync.bfly.b32 %r4, %r2, 1, 31, -1;
    @%p1 st.shared.b32 [%r3], %r4;
    bar.sync 0;
$L__BB0_1:
    ld.shared.b32 %r5, [%r6];
    bar.sync 1;
    st.shared.v4.b32 [%r7], {%r1, %r2, %r3, %r4};
    bar.sync 2;
    ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r8];
    bar.sync 3;
    st.shared.b32 [%r10], %r5;
    bar.sync 4;
    @%p2 bra $L__BB0_1;
    ret;
}
"""


def test_accesses_separated_by_barriers_are_accepted():
    assert not unordered(KERNEL)


@pytest.mark.parametrize("number", range(5))
def test_a_missing_barrier_is_found(number):
    line = f"    bar.sync {number};\n" if number else "    bar.sync 0;\n"
    assert line in KERNEL
    assert unordered(KERNEL.replace(line, "", 1))


def test_a_race_between_loop_iterations_is_found():
    ((first, second),) = unordered(KERNEL.replace("    bar.sync 4;\n", ""))
    assert "[%r10]" in first
    assert "[%r6]" in second
