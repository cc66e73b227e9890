"""Quantized tensors in safetensors files: plain tensors, and JSON metadata that describes their quantizers."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from halfstep.errors import CheckpointError
from halfstep.ops.casts import Quantized
from halfstep.quant import Quantizer
from halfstep.quant.description import KEY, MALFORMED, describe, restore


def save_quantized(tensors: Mapping[str, Quantized], path: str | Path) -> None:
    """Write quantized tensors to a safetensors file: `NAME.codes`, `NAME.scale` ... and the quantizers as metadata."""
    plain = {f"{name}.{part}": t.detach().contiguous() for name, q in tensors.items() for part, t in q.tensors.items()}
    save_file(plain, str(path), metadata=metadata({n: (q.quantizer, q.shape, q.dtype) for n, q in tensors.items()}))


def metadata(tensors: Mapping[str, tuple[Quantizer, tuple[int, ...], torch.dtype]]) -> dict[str, str]:
    """The metadata that `load_quantized` reads in a safetensors file: by name, each tensor's quantizer, and its shape
    and dtype before quantization."""
    return {KEY: json.dumps({name: describe(*described) for name, described in tensors.items()})}


def load_quantized(path: str | Path) -> dict[str, Quantized]:
    """The quantized tensors of a file that `save_quantized` wrote, by name. No code of the file is executed.

    Raises:
        CheckpointError: no such file; not a safetensors file, or one without quantized tensors; an unknown format,
            scale rule or dtype; shapes that contradict each other (checked before tensors are read).
    """
    try:
        with safe_open(str(path), "pt") as file:
            text = (file.metadata() or {}).get(KEY)
            if text is None:
                raise CheckpointError(f"{path} has no {KEY!r} metadata: it was not written by save_quantized")
            described, keys = json.loads(text), set(file.keys())
            result = {}
            for name, description in described.items():
                parts = description.pop("tensors")
                missing = [f"{name}.{p}" for p in parts if f"{name}.{p}" not in keys]
                if missing:
                    raise CheckpointError(f"{path}: {name!r} lacks {', '.join(missing)}")
                result[name] = Quantized(*restore(description), {p: file.get_tensor(f"{name}.{p}") for p in parts})
            return result
    except CheckpointError:
        raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
    except MALFORMED as error:
        raise CheckpointError(
            f"{path}: {error or type(error).__name__}. The file was edited, or is of a newer version"
        ) from error
