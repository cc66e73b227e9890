"""Writes a checkpoint cast to another format: one safetensors file, streamed, whole or not at all."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from halfstep import formats
from halfstep.bits.scan import CHUNK, Progress
from halfstep.bits.values import TYPES, as_float32
from halfstep.bits.what_if import CANDIDATES, castable, needs_largest, pieces, with_largest
from halfstep.errors import CheckpointError, QuantizationError, one_of
from halfstep.inspection.files import Checkpoint, StoredTensor
from halfstep.inspection.gguf_blocks import DECODED
from halfstep.inspection.readers.safetensors import DTYPES
from halfstep.inspection.report import TensorReport
from halfstep.kernels import operators
from halfstep.ops.files import metadata
from halfstep.quant import TENSOR, Quantizer, layout
from halfstep.text import grouped, some


CODES = {name: code for code, name in DTYPES.items()}
"""safetensors' names of torch's types."""


@dataclass(frozen=True)
class Part:
    """One tensor of the new file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return TYPES[self.dtype].nbytes(self.shape)


class NewFile:
    """The file being written: each part is appended to by itself, in any order of parts."""

    def __init__(self, file: BinaryIO, parts: Sequence[Part], metadata: Mapping[str, str]) -> None:
        entries: dict[str, Any] = {"__metadata__": dict(metadata)}
        place = 0
        self._next: dict[str, int] = {}
        for part in parts:
            self._next[part.name], span = place, [place, place + part.nbytes]
            entries[part.name] = {"dtype": CODES[part.dtype], "shape": list(part.shape), "data_offsets": span}
            place += part.nbytes
        header = json.dumps(entries, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._file, self._start = file, 8 + len(header)
        file.write(len(header).to_bytes(8, "little") + header)
        self.nbytes = self._start + place

    def append(self, name: str, values: NDArray[Any]) -> None:
        """Write the next values of a part."""
        self._file.seek(self._start + self._next[name])
        self._file.write(values.reshape(-1).view("u1").data)
        self._next[name] += values.nbytes


@contextmanager
def new_file(path: Path, parts: Sequence[Part], metadata: Mapping[str, str]) -> Iterator[NewFile]:
    """A context that writes a file: it appears at `path` when the block ends, and nowhere if it fails or is
    interrupted.

    Raises:
        CheckpointError: there is a file of that name, before or afterwards; or it cannot be written.
    """
    refuse_existing(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("xb") as file:
            new = NewFile(file, parts, metadata)
            yield new
            file.flush()
            os.fsync(file.fileno())
            assert file.seek(0, os.SEEK_END) == new.nbytes
        os.link(partial, path)  # unlike a rename, a link replaces no existing file
    except FileExistsError as error:
        refuse_existing(path)
        raise CheckpointError(f"{str(partial)!r} is in the way; remove it") from error
    except OSError as error:
        raise CheckpointError(f"{str(path)!r} cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def refuse_existing(path: Path) -> None:
    """Raise a CheckpointError if `path` exists, or its folder cannot be written to."""
    if path.exists() or path.is_symlink():
        raise CheckpointError(f"{str(path)!r} exists; name a file that does not, or remove it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{str(path)!r} cannot be written: its folder {str(path.parent)!r} is not there, or read-only; name a file "
            "in a folder that can be written to"
        )


@dataclass(frozen=True)
class Written:
    """What was written, and the effect on values that were cast without scales."""

    path: Path
    nbytes: int
    cast: int
    """The number of tensors that were cast; the others were copied."""
    copied: int
    overflowing: int
    """The number of finite values beyond the type's largest one: infinite in fp16 and bf16, the largest value in
    float8."""
    zeroed: int
    """The number of values that became zero."""
    remarks: tuple[str, ...] = ()
    """On copied tensors whose type few readers of safetensors know, or none."""


@dataclass(frozen=True)
class Plain:
    """Casts all floating-point tensors to one type that every reader of safetensors knows, without scales."""

    dtype: str
    format: str

    def casts(self, tensor: StoredTensor) -> bool:
        """Whether a tensor is cast; others are copied."""
        return tensor.dtype in ("float64", "float32", "bfloat16", "float16") or tensor.dtype in DECODED

    def parts(self, tensor: StoredTensor) -> list[Part]:
        """The parts that the file has for a tensor that is cast."""
        return [Part(tensor.name, self.dtype, tensor.shape)]

    def values(self, tensor: StoredTensor, amax: float, lost: list[int]) -> Iterator[tuple[str, NDArray[Any]]]:
        """The parts' names and values, piece by piece; counts in `lost` the values that overflow and that become
        zero."""
        format = formats.get(self.format)
        stored: torch.dtype = getattr(torch, self.dtype)
        came = "float32" if tensor.dtype in DECODED else tensor.dtype
        for chunk in tensor.chunks(CHUNK):
            # float64 is rounded once, and not through float32
            x = torch.from_numpy(chunk.view(np.float64).copy() if came == "float64" else as_float32(chunk, came))
            y = torch.empty_like(x)
            operators.round_into(x, y, format, "nearest_even", "ieee", None)
            lost[0] += int((x.isfinite() & ~y.isfinite()).sum())
            lost[1] += int(((y == 0) & (x != 0)).sum())
            if stored.itemsize == 1:  # saturate, so that one overflow does not make a whole matmul infinite
                operators.round_into(x, y, format, "nearest_even", "saturate", None)
            yield tensor.name, y.to(stored).view(torch.uint8).numpy()


@dataclass(frozen=True)
class Scaled:
    """Casts matrices to codes and scales, which `halfstep.load_quantized` reads; other tensors are copied. As
    `Plain`."""

    quantizer: Quantizer

    def casts(self, tensor: StoredTensor) -> bool:
        return castable(tensor)

    def parts(self, tensor: StoredTensor) -> list[Part]:
        return [
            Part(f"{tensor.name}.{name}", str(dtype).removeprefix("torch."), tuple(size or 0 for size in shape))
            for name, (dtype, shape) in layout(self.quantizer, tensor.shape, getattr(torch, tensor.dtype)).items()
        ]

    def values(self, tensor: StoredTensor, amax: float, lost: list[int]) -> Iterator[tuple[str, NDArray[Any]]]:
        once: dict[str, torch.Tensor] = {}
        whole = self.quantizer.scales is not None and self.quantizer.scales.tile == TENSOR
        for rows in pieces(tensor):
            x = with_largest(rows, amax) if needs_largest(self.quantizer) else rows
            made = {name: torch.empty(size, dtype=dtype, device="cpu") for name, (dtype, size) in self._layout(x)}
            sizes = {name: size for name, (_, size) in self._layout(rows)}
            operators.quantize_into(x, made, self.quantizer, None)
            for name, part in made.items():
                if name != "codes" and (whole or not part.dim()):
                    once[name] = part  # one for the whole tensor: the same in every piece
                else:
                    # without the row that was added for the amax
                    yield f"{tensor.name}.{name}", part[: sizes[name][0]].contiguous().view(torch.uint8).numpy()
        for name, part in once.items():
            yield f"{tensor.name}.{name}", part.view(-1).view(torch.uint8).numpy()

    def _layout(self, x: torch.Tensor) -> Iterator[tuple[str, tuple[torch.dtype, Any]]]:
        yield from layout(self.quantizer, tuple(x.shape), x.dtype).items()


TARGETS: Mapping[str, Plain | Scaled] = {
    "fp32": Plain("float32", "fp32"),
    "fp16": Plain("float16", "fp16"),
    "bf16": Plain("bfloat16", "bf16"),
    "float8_e4m3fn": Plain("float8_e4m3fn", "float8_e4m3fn"),
    "float8_e5m2": Plain("float8_e5m2", "float8_e5m2"),
    **{name: Scaled(quantizer) for name, quantizer in CANDIDATES.items() if quantizer.scales is not None},
}
"""The formats to which a checkpoint can be cast, by name."""


def write(
    checkpoint: Checkpoint,
    reports: Sequence[TensorReport],
    target: str,
    path: Path,
    progress: Progress | None = None,
) -> Written:
    """Cast a checkpoint to one of TARGETS and write it to `path`, a safetensors file that does not exist yet.

    Args:
        reports: the reports of an inspection, one per tensor.

    Raises:
        QuantizationError: an unknown target.
        CheckpointError: the file exists or cannot be written; a safetensors file cannot hold a tensor's type.
    """
    check_target(target, path)
    how, tensors = TARGETS[target], checkpoint.tensors
    scales = {report.name for report in reports if report.role == "scales"}  # kept: codes need them exact
    cast = {tensor.name for tensor in tensors if how.casts(tensor) and tensor.name not in scales}
    parts = [part for tensor in tensors for part in (how.parts(tensor) if tensor.name in cast else [_copy(tensor)])]
    described = {
        tensor.name: (how.quantizer, tensor.shape, getattr(torch, tensor.dtype))
        for tensor in tensors
        if isinstance(how, Scaled) and tensor.name in cast
    }
    said = {"format": "pt", **checkpoint.metadata, **(metadata(described) if described else {})}
    lost = [0, 0]
    with new_file(path, parts, said) as file:
        for tensor, report in zip(tensors, reports, strict=True):
            if tensor.name in cast:
                for name, values in how.values(tensor, (report.statistics.amax if report.statistics else 0.0), lost):
                    file.append(name, values)
            else:
                for chunk in tensor.chunks(CHUNK):  # complex numbers are pairs of their parts
                    file.append(tensor.name, np.ascontiguousarray(chunk))
            if progress is not None:
                progress(tensor.nbytes)
    return Written(path, file.nbytes, len(cast), len(tensors) - len(cast), lost[0], lost[1], tuple(_remarks(tensors)))


def check_target(target: str, path: Path) -> None:
    """Raise the errors of `write` that are known before anything is read."""
    one_of("format to write", target, TARGETS, QuantizationError)
    refuse_existing(path)


def _copy(tensor: StoredTensor) -> Part:
    if tensor.dtype in DECODED:
        raise CheckpointError(
            f"tensor {tensor.name!r} is of type {tensor.dtype}, which a safetensors file does not have; cast to fp32, "
            "fp16 or bf16, which decodes it, and that file to another format"
        )
    if tensor.dtype == "complex128":
        return Part(tensor.name, "float64", (*tensor.shape, 2))
    if tensor.dtype not in CODES:
        raise CheckpointError(
            f"tensor {tensor.name!r} is of type {tensor.dtype}, which cannot be copied into a safetensors file; "
            "convert the checkpoint with the tool it is from first"
        )
    return Part(tensor.name, tensor.dtype, tensor.shape)


def _remarks(tensors: Sequence[StoredTensor]) -> Iterator[str]:
    """Remarks on complex tensors."""
    names = grouped((tensor.dtype, repr(tensor.name)) for tensor in tensors)
    return (f"{dtype} {words}: {some(names[dtype], 1)}" for dtype, words in _COMPLEX.items() if dtype in names)


_COMPLEX = {
    "complex64": "copied as it is, which older readers of safetensors do not know",
    "complex128": "copied as float64 pairs of real and imaginary parts (torch.view_as_complex undoes it)",
}
