"""The stored proofs that `halfstep doctor` prints for kernels that cannot run here cover every kernel."""

from halfstep.kernels import selftest
from halfstep.kernels.gpu.proofs import proofs
from halfstep.optim import selftest as optim


def test_every_kernel_has_a_proof():
    tested = {test.kernel for test in (*selftest.GPU, *optim.GPU)}
    others = {"chunks of noise", "replays"}  # they launch the kernels of `cast` and of tiles
    assert tested - {proof.kernel for proof in proofs()} == others
    assert all("compiles for sm_90" in str(proof) and proof.instructions > 0 for proof in proofs())
