"""`diff` of checkpoints: tensors are matched by name, prefix and contents, in any kind of file."""

import json

import numpy as np
import pytest
import torch
from kinds import KINDS, gguf_bytes
from safetensors.torch import save_file

import halfstep
from halfstep.errors import CheckpointError
from halfstep.inspection.write import write


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def model(seed=0):
    g, found = generator(seed), {}
    for i in range(2):
        found[f"model.layers.{i}.self_attn.q_proj.weight"] = torch.randn(64, 64, generator=g) * 0.02
        found[f"model.layers.{i}.mlp.up_proj.weight"] = torch.randn(96, 64, generator=g) * 0.02
        found[f"model.layers.{i}.input_layernorm.weight"] = 1 + 0.01 * torch.randn(64, generator=g)
    return found | {"model.embed_tokens.weight": torch.randn(300, 64, generator=g)}


@pytest.fixture
def compared(tmp_path):
    def compare(a, b):
        for name, tensors in (("a", a), ("b", b)):
            held = {key: tensor.contiguous() for key, tensor in tensors.items()}
            save_file(held, tmp_path / f"{name}.safetensors")
        return halfstep.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors")

    return compare


def kinds(found):
    return {one.name: one.relation.key for one in found.tensors}


@pytest.mark.parametrize("name", KINDS)
def test_checkpoint_of_every_kind_equals_itself(name, tmp_path):
    path = KINDS[name](tmp_path)
    found = halfstep.diff(path, path)
    assert found.same
    assert {one.relation.kind for one in found.tensors} == {"identical"}
    assert not found.only_a + found.only_b
    json.dumps(found.to_dict(), allow_nan=False)


def test_diff_ignores_file_kind_and_shard_order(tmp_path):
    state = model()
    save_file(state, tmp_path / "whole.safetensors")
    torch.save(dict(reversed(state.items())), tmp_path / "whole.pt")
    np.savez(tmp_path / "whole.npz", **{name: tensor.numpy() for name, tensor in state.items()})
    folder, names = tmp_path / "sharded", list(state)
    folder.mkdir()
    shards = {"two.safetensors": names[3:][::-1], "one.safetensors": names[:3]}
    for file, held in shards.items():
        save_file({name: state[name] for name in held}, folder / file, {"format": "pt"})
    where = {name: file for file, held in shards.items() for name in held}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    for other in ("whole.pt", "whole.npz", "sharded"):
        assert halfstep.diff(tmp_path / "whole.safetensors", tmp_path / other).same


def test_cast_of_a_whole_model(compared):
    found = compared(model(), {name: tensor.bfloat16() for name, tensor in model().items()})  # no ties
    assert set(kinds(found).values()) == {"cast bf16"}
    assert found.sentences == ["7 tensors (100% of the values): B is A rounded to bf16, to nearest."]
    assert not found.same


def test_prefix_renamed_and_unmatched_tensors(compared):
    other = {f"module.{name}": tensor * 1.5 for name, tensor in model().items()}
    other["module.extra"] = other.pop("module.model.layers.1.input_layernorm.weight") + 1
    found = compared(model() | {"head.weight": torch.eye(3)}, other | {"output": torch.eye(3)})
    assert found.prefixes == ("", "module.")
    assert {one.how for one in found.tensors} == {"prefix", "contents"}
    assert [(one.name, one.name_b) for one in found.tensors if one.how == "contents"] == [("head.weight", "output")]
    assert [one.name for one in found.only_a] == ["model.layers.1.input_layernorm.weight"]
    assert [one.name for one in found.only_b] == ["module.extra"]
    text = " ".join(found.sentences)
    assert "B is A times 1.5" in text
    assert "Names differ in what they begin with: B's begin with 'module.'" in text
    assert "Renamed, with the same bytes: head.weight is output." in text
    assert "Only in A: 1 tensor, model.layers.1.input_layernorm.weight." in text


def test_equal_constants_are_not_matched(compared):
    found = compared({"a": torch.ones(9), "b": torch.ones(9)}, {"c": torch.ones(9), "d": torch.ones(9)})
    assert not found.tensors
    assert found.sentences[0].startswith("No tensor of one has the name or the contents of one in the other")


@pytest.mark.parametrize("shape", [(40, 40), (40, 56)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transposed_matrix_is_recognised(compared, shape, dtype):
    x = torch.randn(shape, generator=generator())
    (one,) = compared({"w": x}, {"w": x.t().to(dtype)}).tensors
    expected = "identical" if dtype == torch.float32 else "cast bf16"
    assert (one.seen, one.relation.key) == ("transposed", expected)
    moved = x.t() + 0.001 * torch.randn(shape[::-1], generator=generator(1))
    (one,) = compared({"w": x}, {"w": moved}).tensors
    assert (one.seen, one.relation.key) == ("transposed", "changed")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_permuted_units_are_recognised(compared, dtype):
    """Permuted hidden units and channels of the same function are recognised; other tensors of these sizes are not."""
    state = {"up": (96, 64), "bias": (96,), "norm": (96,), "mid": (96, 96), "down": (64, 96)}
    state |= {"conv": (24, 8, 3, 3), "next": (8, 24, 3, 3), "other": (80, 80)}
    a = {name: torch.randn(shape, generator=generator(i)) for i, (name, shape) in enumerate(state.items())}
    a |= {"norm": 1 + 0.01 * a["norm"], "few": torch.eye(4)[0]}
    units, more, channels = (torch.randperm(n, generator=generator(9)) for n in (96, 96, 24))
    b = {"up": a["up"][units], "bias": a["bias"][units], "norm": a["norm"][units], "down": a["down"][:, units]}
    b |= {"mid": a["mid"][units][:, more.flip(0)], "conv": a["conv"][channels], "next": a["next"][:, channels]}
    b |= {"other": torch.randn(80, 80, generator=generator(99)), "few": torch.eye(4)[2]}
    found = compared(a, {name: tensor.to(dtype) for name, tensor in b.items()})
    relations = {one.name: (one.seen.removesuffix(" in another order"), one.relation.key) for one in found.tensors}
    kind = "identical" if dtype == torch.float32 else "cast bf16"
    assert relations.pop("other") == ("", "unrelated")
    assert relations.pop("few")[0] == ""
    assert relations == {
        "up": ("rows", kind), "bias": ("values", kind), "norm": ("values", kind), "down": ("columns", kind),
        "mid": ("rows and columns", kind), "conv": ("rows", kind), "next": ("columns", kind),
    }  # fmt: skip
    assert not found.same
    assert any("rows in another order; " in text for text in found.sentences)


def test_extended_and_reshaped_tensors(compared):
    x = torch.randn(30, 8, generator=generator())
    (longer,) = compared({"w": x}, {"w": torch.cat([x, torch.ones(3, 8)])}).tensors
    assert (longer.seen, longer.relation.kind) == ("first rows", "identical")
    (flat,) = compared({"w": x}, {"w": x.reshape(2, 120).half()}).tensors
    assert (flat.seen, flat.relation.key) == ("reshaped", "cast fp16")
    found = compared({"w": x}, {"w": torch.ones(5, 5)})
    assert found.tensors[0].relation.kind == "shape"
    assert "w 30x8 and 5x5" in found.sentences[-1]


def test_different_models_are_reported(compared):
    assert compared(model(), model(1)).sentences[0].startswith("Different models:")
    assert not compared(model(), {k: v + 0.01 for k, v in model().items()}).sentences[0].startswith("Different")


def test_lora_merge_of_some_layers(compared):
    merged = model()
    for name in [name for name in merged if "q_proj" in name]:
        delta = torch.randn(64, 4, generator=generator(1)) @ torch.randn(4, 64, generator=generator(2))
        merged[name] = merged[name] + 0.002 * delta
    found = compared(model(), merged)
    assert {one.relation.low_rank.rank for one in found.tensors if one.relation.kind == "merged"} == {4}
    assert sum(one.relation.kind == "identical" for one in found.tensors) == 5
    assert "B less A has rank 4, up to rounding" in " ".join(found.sentences)


def scaled(kind, w):
    """Byte codes and scales of w in a published layout."""
    if kind == "int8":
        scale = w.abs().amax(1, keepdim=True) / 127
        return {"w.weight": (w / scale).round().to(torch.int8), "w.weight_scale": scale}
    if kind == "bitsandbytes":
        largest = w.abs().amax(1)
        codes = (w / largest[:, None] * 127).round().to(torch.int8)
        return {"w.weight": codes, "w.SCB": largest}
    if kind == "fp8 tensor":
        scale = w.abs().max() / 448
        return {"w.weight": (w / scale).to(torch.float8_e4m3fn), "w.weight_scale": scale}
    scale = w.view(2, 128, 3, 128).abs().amax((1, 3)) / 448
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return {"w.weight": (w / spread).to(torch.float8_e4m3fn), "w.weight_scale_inv": scale}


@pytest.mark.parametrize("kind", ["int8", "bitsandbytes", "fp8 tensor", "fp8 blocks"])
def test_codes_with_scales_are_compared_by_their_values(compared, kind):
    w = torch.randn(256, 384, generator=generator()) * 0.02
    found = compared({"w.weight": w}, scaled(kind, w))
    (one,) = found.tensors
    assert one.relation.kind == "quantised", one.relation
    assert one.relation.grid.nearest == 1.0
    assert one.relation.change.relative < 0.03
    assert not found.only_b


def test_written_cast_is_recognised_as_quantized(tmp_path):
    w = torch.randn(256, 384, generator=generator()) * 0.02
    save_file({"w": w, "b": torch.ones(3)}, tmp_path / "a.safetensors")
    checkpoint = halfstep.inspection.open_checkpoint(tmp_path / "a.safetensors")
    for target in ("mxfp8", "nf4", "int8"):
        write(checkpoint, halfstep.inspect(checkpoint).tensors, target, tmp_path / f"{target}.safetensors")
        found = halfstep.diff(checkpoint, tmp_path / f"{target}.safetensors")
        assert {one.name: one.relation.kind for one in found.tensors} == {"w": "quantised", "b": "identical"}
        assert not found.only_b


@pytest.mark.parametrize("recipe", ["fp8-current", "mxfp8", "fp8-block"])
def test_quantized_model_is_compared_with_the_full_one(compared, recipe):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    full = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    halfstep.quantize_model(model, recipe)
    found = compared(full, model.state_dict())
    kinds = {one.name: one.relation.kind for one in found.tensors}
    assert {kinds["0.bias"], kinds["2.bias"]} == {"identical"}
    assert all(one.relation.change.relative < 0.05 for one in found.tensors if one.relation.change)
    assert {kinds["0.weight"], kinds["2.weight"]} == {"quantised"}


def test_gguf_blocks_are_compared_by_their_values(tmp_path):
    w = torch.randn(8, 64, generator=generator())
    scale = w.view(8, 2, 32).abs().amax(2, keepdim=True) / 127
    codes = (w.view(8, 2, 32) / scale.half().float()).round().to(torch.int8)
    blocks = torch.cat([scale.half().view(torch.int8), codes], 2).numpy().tobytes()
    for name, entry in (("a", (0, w.numpy().tobytes())), ("b", (8, blocks))):
        (tmp_path / f"{name}.gguf").write_bytes(gguf_bytes([("w", (8, 64), *entry)]))
    (one,) = halfstep.diff(tmp_path / "a.gguf", tmp_path / "b.gguf").tensors
    assert one.stored == ("float32", "q8_0")
    assert one.relation.change.relative < 0.01


def test_undecoded_gguf_types_are_not_compared(tmp_path):
    for name, fill in (("a", 1), ("b", 2)):
        entries = [("w", (64,), 9, bytes([fill]) * 80), (f"only in {name}", (32,), 9, bytes([fill]) * 40)]
        (tmp_path / f"{name}.gguf").write_bytes(gguf_bytes(entries))
    found = halfstep.diff(tmp_path / "a.gguf", tmp_path / "b.gguf")
    assert kinds(found) == {"w": "unread"}
    assert "not compared" in " ".join(found.sentences)
    assert [one.name for one in found.only_a] == ["only in a"]


def test_missing_and_broken_files_raise(tmp_path):
    save_file(model(), tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="no' cannot be opened: No such file"):
        halfstep.diff(tmp_path / "a.safetensors", tmp_path / "no")
    (tmp_path / "broken.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="truncated"):
        halfstep.diff(tmp_path / "a.safetensors", tmp_path / "broken.safetensors")


def test_matrices_larger_than_one_file_map(tmp_path):
    x = torch.randn(1500, 3001, generator=generator())
    save_file({"w": x}, tmp_path / "a.safetensors")
    save_file({"w": x.t().contiguous().half()}, tmp_path / "b.safetensors")
    (one,) = halfstep.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").tensors
    assert (one.seen, one.relation.key) == ("transposed", "cast fp16")
