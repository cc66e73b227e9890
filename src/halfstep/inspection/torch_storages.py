"""Where the tensors of a pickle of torch lie: views of storages, each of which is a run of bytes in the file."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halfstep.bits.dtypes import TYPES
from halfstep.errors import CheckpointError
from halfstep.inspection.files import File
from halfstep.inspection.layout import Plain, Strided, is_contiguous
from halfstep.inspection.limits import check_count
from halfstep.inspection.stored import Checkpoint, StoredTensor
from halfstep.inspection.torch_objects import View, passed_over, views


Order = Literal["<", ">"]


@dataclass(frozen=True, slots=True)
class Region:
    """`size` bytes of a file from `start`, in a byte order."""

    file: File
    start: int
    size: int
    order: Order = "<"

    def located(self, name: str, view: View) -> Strided:
        """Where the values of a view of this storage lie.

        Raises:
            CheckpointError: the storage is not as long as the pickle says, or too small for the view.
        """
        what, stored = f"{self.file.path}: tensor {name!r}", view.storage
        if self.size != TYPES[stored.dtype].piece.itemsize * stored.numel:
            raise CheckpointError(f"{what}: a storage of {self.size} bytes; expected {stored.numel} of {stored.dtype}")
        dtype = TYPES[view.dtype].piece.newbyteorder(self.order)
        last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
        if 0 not in view.shape and (last + 1) * dtype.itemsize > self.size:
            raise CheckpointError(f"{what}: its values reach behind the end of its storage of {self.size} bytes")
        strides = tuple(stride * dtype.itemsize for stride in view.strides)
        return Strided(self.file, self.start + view.offset * dtype.itemsize, view.shape, strides, dtype)

    def tensor(self, name: str, view: View) -> StoredTensor:
        """A tensor of this storage.

        Raises:
            CheckpointError: as `located`.
        """
        place = self.located(name, view)
        count, itemsize = math.prod(view.shape), place.dtype.itemsize
        identity = f"{self.file.path}:{place.start}:{place.start + count * itemsize}"
        source: Plain | Strided = place
        if count == 0 or is_contiguous(view.shape, view.strides):
            source = Plain(self.file, place.start, count, place.dtype)
        else:
            identity += f":{view.shape}:{view.strides}"
        return StoredTensor(name, view.dtype, view.shape, self.file.path, count * itemsize, identity, source)


def opened(path: Path, kind: str, root: object, tensor: Callable[[str, View], StoredTensor]) -> Checkpoint:
    """The checkpoint of what a pickle of torch describes; `tensor` makes one of its tensors, by its dotted name."""
    tensors, arrays = list[StoredTensor](), list[str]()
    for name, view in views(root, str(path), arrays):
        check_count(len(tensors), path)
        tensors.append(tensor(name, view))
    return Checkpoint(path, kind, (path,), tuple(tensors), remarks=passed_over(arrays))
