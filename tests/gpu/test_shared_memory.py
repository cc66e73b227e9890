"""A loop that leaves out one barrier is found, and a reduction that has all is not."""

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


def test_what_barriers_keep_apart_is_no_race():
    assert not unordered(KERNEL)


@pytest.mark.parametrize("number", range(5))
def test_a_barrier_that_lacks_is_seen(number):
    line = f"    bar.sync {number};\n" if number else "    bar.sync 0;\n"
    assert line in KERNEL
    assert unordered(KERNEL.replace(line, "", 1))


def test_a_loop_meets_its_own_beginning():
    ((first, second),) = unordered(KERNEL.replace("    bar.sync 4;\n", ""))
    assert "[%r10]" in first
    assert "[%r6]" in second
