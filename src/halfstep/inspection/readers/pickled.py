"""Files that are one long pickle, of pickle.dump. They are known, and refused.

Their tensors' bytes lie inside the pickle, so that they cannot be found without reading all of it.
"""

from pathlib import Path

from halfstep.errors import CheckpointError
from halfstep.inspection.files import head
from halfstep.inspection.readers import torch_legacy
from halfstep.inspection.readers.base import Reader
from halfstep.inspection.stored import Checkpoint


_PROTOCOLS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def refuse(path: Path) -> Checkpoint:
    """Nothing.

    Raises:
        CheckpointError: always; it says how to save the file in a form that is read.
    """
    raise CheckpointError(
        f"{path}: a bare pickle, as pickle.dump writes; expected a file of torch.save, or safetensors. If you trust "
        "where it comes from: torch.save(torch.load(path, weights_only=True), new_path)"
    )


reader = Reader(
    "bare pickle", lambda path: head(path, 2) in _PROTOCOLS and not torch_legacy.reader.recognises(path), refuse
)
