"""What `halfstep doctor` says of kernels that do not run here is what was kept, of every kernel that there is."""

from halfstep.kernels import selftest_gpu
from halfstep.kernels.gpu.proofs import proofs
from halfstep.optim import selftest_gpu as optim_selftest_gpu


def test_every_kernel_has_its_proof():
    tested = {kernel for kernel, _, _ in (*selftest_gpu.tests(), *optim_selftest_gpu.tests())}
    others = {"chunks of noise", "replays"}  # whose launches are those of `cast` and of tiles
    assert tested - {proof.kernel for proof in proofs()} == others
    assert all("compiles for sm_90" in str(proof) and proof.instructions > 0 for proof in proofs())
