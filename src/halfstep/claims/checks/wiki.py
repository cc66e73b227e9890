"""Checks of a forum's wiki on models' precision: ranges of bf16 and fp16, TPUs, fp32 models in fp16."""

import copy
import pydoc_data.topics
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from halfstep import formats, inspect, kb, prepare
from halfstep.bits.scan import Statistics
from halfstep.claims.checks.base import Numbers, check, update
from halfstep.formats import Float


def _trained(folder: Path) -> Path:
    """A checkpoint: the bf16 weights, and the moments, of a small transformer after 20 steps on random tokens."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 256, dropout=0.0, batch_first=True, norm_first=True)
    model: nn.Module = nn.Sequential(
        nn.Embedding(64, 64), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 64)
    )
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, scaler = prepare(model, optimizer, "bf16-nomaster", generator=0)
    for _ in range(20):
        tokens = torch.randint(64, (8, 32), dtype=torch.int64, device="cpu")
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        update(optimizer, scaler)
    states = optimizer.state_dict()["state"].items()
    moments = {f"{n}.{name}": t for n, state in states for name, t in state.items() if name.startswith("exp_avg")}
    save_file(
        {**{name: t.contiguous() for name, t in model.state_dict().items()}, **moments}, folder / "model.safetensors"
    )
    return folder / "model.safetensors"


def _binades(format: Float) -> int:
    """The number of powers of two between a format's smallest value and its largest."""
    return format.max_exponent - (format.min_exponent - format.mantissa_bits) + 1


def _shares(prefix: str, parts: list[Statistics]) -> Numbers:
    total = sum(part.nonzero for part in parts)
    return {
        f"{prefix}_subnormal": sum(part.fp16_subnormal for part in parts) / total,
        f"{prefix}_below": sum(part.fp16_below for part in parts) / total,
        f"{prefix}_above": sum(part.fp16_above for part in parts) / total,
        f"{prefix}_inexact": 1 - sum(part.exact["fp16"] * part.nonzero for part in parts) / total,
    }


@check("wiki-ranges")
def ranges() -> Numbers:
    """fp16's share of bf16's range, and the share of a bf16 checkpoint outside of it: of the weights and of Adam's
    moments."""
    bf16, fp16 = formats.get("bf16", Float), formats.get("fp16", Float)
    with tempfile.TemporaryDirectory() as folder:
        report = inspect(_trained(Path(folder)))
    found: Numbers = {"bf16_binades": _binades(bf16), "fp16_binades": _binades(fp16)}
    for prefix, ending in (("first", ".exp_avg"), ("second", ".exp_avg_sq"), ("weights", "")):
        parts = [
            tensor.statistics
            for tensor in report.tensors
            if tensor.statistics is not None and (tensor.name.endswith(ending) if ending else tensor.role != "moments")
        ]
        found |= _shares(prefix, parts)
    return found


@check("wiki-tpu")
def tpus() -> Numbers:
    """Among models whose entry names TPUs, and does not infer its precision from them, the number trained in bf16."""
    found = [e for e in kb.load(None).entries if "TPU" in (e.hardware or "") and e.evidence_kind != "inferred_hardware"]
    certain = [e for e in found if e.tier == "definitive"]
    return {
        "models": len(found),
        "bf16": sum(e.compute == "bf16" for e in found),
        "certain": len(certain),
        "certain_bf16": sum(e.compute == "bf16" for e in certain),
    }


@check("wiki-fp32-in-fp16")
def cast() -> Numbers:
    """Among entries trained in fp32 and in bf16, the numbers with a failure reported in fp16; and the change of a byte
    model's held-out loss by a cast, after training in fp32."""
    base, found = kb.load(None), dict[str, float]()
    for precision in ("fp32", "bf16"):
        ids = {entry.id for entry in base.entries if entry.compute == precision}
        failures = [report for report in base.failures if report.kind == "failure" and "fp16" in report.uses]
        found |= {precision: len(ids), f"{precision}_failed": len(ids & {id for f in failures for id in f.entries})}
    model, text = _reader(), _windows(slice(-64 * 65, None), torch.arange(64, dtype=torch.int64, device="cpu") * 65)
    with torch.no_grad():
        losses = {dtype: float(_loss(copy.deepcopy(model).to(dtype), text)) for dtype in (torch.float32, *_CASTS)}
    changes = {name: losses[dtype] / losses[torch.float32] - 1 for dtype, name in _CASTS.items()}
    return found | {"loss": losses[torch.float32], **changes}


_CASTS = {torch.float16: "in_fp16", torch.bfloat16: "in_bf16"}


def _windows(part: slice, starts: Tensor) -> Tensor:
    """Windows of 65 bytes of a part of the documentation that comes with Python."""
    raw = bytearray(Path(pydoc_data.topics.__file__).read_bytes()[part])
    return torch.frombuffer(raw, dtype=torch.uint8)[
        starts[:, None] + torch.arange(65, dtype=torch.int64, device="cpu")
    ].long()


def _reader() -> nn.Module:
    """A transformer of two layers, trained in fp32 to predict the next byte."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 256, dropout=0.0, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 2, nn.LayerNorm(64), enable_nested_tensor=False)
    model = nn.ModuleDict({"bytes": nn.Embedding(256, 64), "body": body, "head": nn.Linear(64, 256)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        starts = torch.randint(200_000, (16,), dtype=torch.int64, device="cpu")
        _loss(model, _windows(slice(0, 200_065), starts)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def _loss(model: Any, rows: Tensor) -> Tensor:
    mask = torch.full((64, 64), float("-inf"), dtype=model["head"].weight.dtype, device="cpu").triu(1)
    hidden = model["body"](model["bytes"](rows[:, :-1]), mask=mask)
    return nn.functional.cross_entropy(model["head"](hidden).float().flatten(0, 1), rows[:, 1:].flatten())
