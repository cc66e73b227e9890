"""What `halfstep doctor` says of kernels that do not run here is what was kept, of every kernel that there is."""

from halfstep.kernels import selftest
from halfstep.kernels.gpu.proofs import proofs
from halfstep.optim import selftest as optim


def test_every_kernel_has_its_proof():
    tested = {test.kernel for test in (*selftest.GPU, *optim.GPU)}
    others = {"chunks of noise", "replays"}  # whose launches are those of `cast` and of tiles
    assert tested - {proof.kernel for proof in proofs()} == others
    assert all("compiles for sm_90" in str(proof) and proof.instructions > 0 for proof in proofs())
