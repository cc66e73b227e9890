"""Files that are one long pickle: torch.save before version 1.6, and pickle.dump. They are known, and refused.

Their tensors' bytes lie inside the pickle, so that they cannot be found without reading all of it.
"""

from pathlib import Path

from halfstep.errors import CheckpointError
from halfstep.inspection.files import head
from halfstep.inspection.readers.base import Reader
from halfstep.inspection.stored import Checkpoint


_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # 0x1950a86a20f9469cfc6c, which torch.save once began with
_PROTOCOLS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def refuse(path: Path) -> Checkpoint:
    """Nothing.

    Raises:
        CheckpointError: always; it says how to save the file in a form that is read.
    """
    torch = "torch.save before 1.6, or with _use_new_zipfile_serialization=False"
    wrote = torch if head(path, len(_TORCH)) == _TORCH else "pickle.dump"
    raise CheckpointError(
        f"{path}: a bare pickle, as {wrote} writes; expected a zip archive of torch.save, or safetensors. If you trust "
        "where it comes from: torch.save(torch.load(path, weights_only=True), new_path)"
    )


def _recognises(path: Path) -> bool:
    return head(path, 2) in _PROTOCOLS


reader = Reader("bare pickle", _recognises, refuse)
