"""Readers of folders: Hugging Face's, with and without an index and in its cache, and torch's distributed ones."""

import json
import os
import pickle
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from kinds import bits, distributed, huggingface, stored_bits
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import halfstep
from halfstep.errors import CheckpointError
from halfstep.inspection import open_checkpoint


def names(checkpoint):
    return sorted(tensor.name for tensor in checkpoint.tensors)


def test_folder_with_index_and_config(tmp_path):
    checkpoint = open_checkpoint(huggingface(tmp_path))
    assert names(checkpoint) == ["a", "b"]
    assert checkpoint.kind == "Hugging Face folder"
    assert [file.name for file in checkpoint.files] == ["model-1.safetensors", "model-2.safetensors"]
    assert checkpoint.config == {"model_type": "llama", "torch_dtype": "bfloat16"}
    assert checkpoint.metadata == {"format": "pt", "total_size": "28"}
    for tensor in checkpoint.tensors:
        assert stored_bits(tensor) == bits({"a": torch.ones(3), "b": torch.zeros(4)}[tensor.name])


def test_index_file_is_opened_alone(tmp_path):
    checkpoint = open_checkpoint(huggingface(tmp_path) / "model.safetensors.index.json")
    assert (checkpoint.kind, names(checkpoint), checkpoint.config) == ("sharded index", ["a", "b"], None)


def test_tensors_missing_from_the_index_are_skipped_and_counted(tmp_path):
    home = huggingface(tmp_path)
    save_file({"a": torch.ones(3), "c": torch.ones(1)}, home / "model-1.safetensors")
    checkpoint = open_checkpoint(home)
    assert names(checkpoint) == ["a", "b"]
    assert checkpoint.metadata["tensors that the index does not name"] == "1"


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (["model.safetensors", "pytorch_model.bin"], "model.safetensors"),
        (["pytorch_model.bin", "adapter.safetensors"], "pytorch_model.bin"),
        (["other.bin", "adapter.safetensors"], "adapter.safetensors"),
        (["consolidated.bin"], "consolidated.bin"),
    ],
)
def test_preferred_weight_files_are_those_of_transformers(files, wanted, tmp_path):
    for name in files:
        tensors = {f"from {name}": torch.ones(1)}
        save_file(tensors, tmp_path / name) if name.endswith("safetensors") else torch.save(tensors, tmp_path / name)
    (tmp_path / "config.json").write_text("{}")
    assert names(open_checkpoint(tmp_path)) == [f"from {wanted}"]


def test_folder_without_an_index_has_all_files(tmp_path):
    for name in "ab":
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    assert names(open_checkpoint(tmp_path)) == ["a", "b"]


def test_links_to_blobs_of_the_hugging_face_cache(tmp_path):
    blobs, home = tmp_path / "models--x--y" / "blobs", tmp_path / "models--x--y" / "snapshots" / "0123" / "part"
    blobs.mkdir(parents=True)
    home.mkdir(parents=True)
    for file in huggingface(tmp_path).iterdir():
        file.rename(blobs / f"hash of {file.name}")
        (home / file.name).symlink_to(os.path.relpath(blobs / f"hash of {file.name}", home))
    assert names(open_checkpoint(home)) == ["a", "b"]
    assert names(open_checkpoint(home / "model.safetensors.index.json")) == ["a", "b"]


def test_distributed_folder_equals_torchs_loading(tmp_path):
    path = distributed(tmp_path)
    checkpoint = open_checkpoint(path)
    reader = dcp.FileSystemReader(path)
    wanted = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about there being one process
        dcp.load(wanted, storage_reader=reader, no_dist=True)
    assert names(checkpoint) == sorted(wanted)
    for tensor in checkpoint.tensors:
        assert tensor.shape == tuple(wanted[tensor.name].shape)
        assert f"torch.{tensor.dtype}" == str(wanted[tensor.name].dtype)
        assert stored_bits(tensor) == bits(wanted[tensor.name])


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_distributed_folder_of_another_python_version(tmp_path, module):
    """Python 3.13 pickles paths under the module they moved to."""
    path = distributed(tmp_path)
    metadata = path / ".metadata"
    written = pickle.dumps(pickle.loads(metadata.read_bytes()), protocol=2)
    here = f"c{type(Path()).__module__}\n".encode()
    assert here in written
    wanted = [(tensor.name, stored_bits(tensor)) for tensor in open_checkpoint(path).tensors]
    metadata.write_bytes(written.replace(here, f"c{module}\n".encode()))
    assert [(tensor.name, stored_bits(tensor)) for tensor in open_checkpoint(path).tensors] == wanted


GRID = [((0, 0), (3, 2)), ((0, 2), (3, 5)), ((3, 0), (1, 7)), ((4, 0), (2, 3)), ((4, 3), (2, 4))]


def sharded(folder, whole, grid):
    """A distributed folder with one tensor stored in the parts of `grid`, as several ranks write it."""
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData as Data, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(whole)
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in grid]
    items = [
        WriteItem(MetadataIndex("w", chunk.offsets, i), WriteItemType.SHARD, None, Data(chunk, properties, whole.shape))
        for i, chunk in enumerate(chunks)
    ]

    class Planner:
        def resolve_data(self, item):
            chunk = item.tensor_data.chunk
            place = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
            return whole[place]

    writer = FileSystemWriter(folder, single_file_per_rank=False)
    writer.set_up_storage_writer(True)
    writer.reset(folder)
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(SavePlan(items))])
    results = writer.write_data(plan, Planner()).wait()
    writer.finish(Metadata({"w": TensorStorageMetadata(properties, whole.shape, chunks)}), [results])


@pytest.mark.parametrize("grid", [GRID, GRID[::-1], [((0, 0), (6, 7))], [((r, 0), (2, 7)) for r in (0, 2, 4)]])
def test_parts_are_assembled_by_their_offsets(grid, tmp_path):
    whole = torch.arange(42, dtype=torch.bfloat16).reshape(6, 7)
    sharded(tmp_path, whole, grid)
    checkpoint = open_checkpoint(tmp_path)
    (tensor,) = checkpoint.tensors
    assert (tensor.shape, tensor.dtype, tensor.nbytes) == ((6, 7), "bfloat16", 84)
    assert stored_bits(tensor) == bits(whole)


def test_overlapping_or_missing_parts_raise(tmp_path):
    whole = torch.arange(42.0).reshape(6, 7)
    sharded(tmp_path / "a", whole, [((0, 0), (3, 7)), ((2, 0), (3, 7))])
    checkpoint = open_checkpoint(tmp_path / "a")
    with pytest.raises(CheckpointError, match="overlap"):
        list(checkpoint.tensors[0].chunks())
    sharded(tmp_path / "b", whole, GRID[:-1])
    with pytest.raises(CheckpointError, match="do not add up"):
        open_checkpoint(tmp_path / "b")


@pytest.mark.parametrize("other", [torch.ones(3, 6), torch.ones(3, 7, dtype=torch.int32), [torch.ones(3, 7)]])
def test_part_that_differs_from_its_metadata_raises(other, tmp_path):
    sharded(tmp_path, torch.arange(42.0).reshape(6, 7), [((0, 0), (3, 7)), ((3, 0), (3, 7))])
    files = sorted(tmp_path.glob("*.distcp"))
    torch.save(other, tmp_path / "new")
    data = (tmp_path / "new").read_bytes()
    files[1].write_bytes(data + b"\0" * (files[1].stat().st_size - len(data)))
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="expected"):
        list(checkpoint.tensors[0].chunks())


def test_index_without_a_weight_map_raises(tmp_path):
    path = tmp_path / "a.index.json"
    for held in ({}, {"weight_map": []}, {"weight_map": {"a": 3}}):
        path.write_text(json.dumps(held))
        with pytest.raises(CheckpointError, match="weight_map"):
            open_checkpoint(path)


def test_other_files_of_trainers_are_skipped(tmp_path):
    """training_args.bin is a pickle of transformers; other files that cannot be read are named in a remark."""
    torch.save({"lora_A.weight": torch.ones(3)}, tmp_path / "adapter_model.bin")
    (tmp_path / "training_args.bin").write_bytes(pickle.dumps(Path("x")))
    checkpoint = open_checkpoint(tmp_path)
    assert ([tensor.name for tensor in checkpoint.tensors], checkpoint.remarks) == (["lora_A.weight"], ())
    (tmp_path / "other.bin").write_bytes(pickle.dumps(Path("x")))
    checkpoint = open_checkpoint(tmp_path)
    assert [tensor.name for tensor in checkpoint.tensors] == ["lora_A.weight"]
    (remark,) = checkpoint.remarks
    assert remark.startswith("not read: ")
    assert "other.bin: a bare pickle" in remark
    assert halfstep.inspect(tmp_path).remarks == checkpoint.remarks
    (tmp_path / "adapter_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"other.bin: a bare pickle"):
        open_checkpoint(tmp_path)
