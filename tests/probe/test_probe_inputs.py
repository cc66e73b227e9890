"""What can be probed, and with which inputs; errors for everything else."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import halfstep
import planted
from halfstep.errors import DataError, FormatError, ModelError
from halfstep.probe.batch import Loaded, load_model, loss_of, tensor_batches, text_batches
from planted import tokens


TEXT = torch.frombuffer(bytearray(b"def f(x):\n    return x + 1\n" * 40), dtype=torch.uint8)
SCRIPT = """
import torch
from torch import nn

def bare(): return nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 4))
def with_inputs(): return nn.Bilinear(2, 3, 4), torch.ones(5, 2), torch.ones(5, 3)
def with_names(): return nn.Linear(2, 3), {"input": torch.ones(5, 2)}
def breaks(): raise RuntimeError("no weights here")
def number(): return 3
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(SCRIPT)
    return str(path)


def test_function_gives_a_model_with_or_without_inputs(script):
    assert load_model(f"{script}:bare").vocabulary == 40
    assert load_model(f"{script}:bare").inputs == ()
    (batch,) = load_model(f"{script}:with_inputs").inputs
    assert [tuple(t.shape) for t in batch] == [(5, 2), (5, 3)]
    (named,) = load_model(f"{script}:with_names").inputs
    assert named["input"].shape == (5, 2)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("breaks", "the function raised RuntimeError: no weights here"),
        ("number", "the function returned int; expected a torch.nn.Module, or a tuple"),
        ("bear", "unknown function 'bear'; nearest: bare"),
    ],
)
def test_function_without_a_model_raises(script, name, message):
    with pytest.raises(ModelError, match=message):
        load_model(f"{script}:{name}")


def test_missing_folder_or_module_raises(tmp_path):
    with pytest.raises(ModelError, match="is not a folder; expected a local Hugging Face folder"):
        load_model(str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match="cannot be imported"):
        load_model("no_such_module_of_mine:model")
    with pytest.raises(ModelError, match=r"holds no config.json"):
        load_model(str(tmp_path))


def test_bytes_are_taken_modulo_the_vocabulary():
    model = Loaded(nn.Embedding(40, 8), vocabulary=40, longest=6)
    batches, how = text_batches(TEXT, model, 3, 2, 100)
    assert [tuple(b.shape) for b in batches] == [(2, 6)] * 3
    assert how == "as bytes modulo the vocabulary of 40: no tokenizer came with the model"
    assert torch.equal(batches[0][0], TEXT[:6].long() % 40)
    assert torch.equal(batches[-1][-1], TEXT[-6:].long() % 40)
    assert text_batches(TEXT, Loaded(nn.Embedding(256, 8)), 1, 1, 4)[1].startswith("as bytes: no tokenizer")


def test_models_tokenizer_is_used():
    model = Loaded(nn.Embedding(9, 8), tokenize=lambda words: [len(word) for word in words.split()])
    (batch,), how = text_batches(TEXT, model, 1, 2, 5)
    assert how == "by the model's tokenizer"
    assert batch.shape == (2, 5)
    assert batch[0].tolist() == [3, 5, 6, 1, 1]
    with pytest.raises(DataError, match="makes no tokens"):
        text_batches(TEXT, Loaded(nn.Embedding(9, 8), tokenize=lambda words: []), 1, 1, 5)


def test_text_shorter_than_a_window_raises():
    with pytest.raises(DataError, match="has 10 bytes, and one window takes 16; give more, or a smaller --context"):
        text_batches(TEXT[:10], Loaded(nn.Embedding(9, 8)), 1, 1, 16)


def test_tensors_are_read_from_files(tmp_path):
    x = torch.arange(6).view(2, 3)
    save_file({"tokens": x}, tmp_path / "x.safetensors")
    torch.save([x, {"tokens": x}, (x, x)], tmp_path / "x.pt")
    assert torch.equal(tensor_batches(str(tmp_path / "x.safetensors"))[0]["tokens"], x)
    assert len(tensor_batches(str(tmp_path / "x.pt"))) == 3


def test_files_without_tensors_raise(tmp_path):
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    (tmp_path / "broken.pt").write_bytes(b"nothing")
    torch.save([], tmp_path / "empty.pt")
    torch.save({"words": "text"}, tmp_path / "words.pt")
    for name in ("broken.safetensors", "broken.pt", "absent.pt"):
        with pytest.raises(DataError, match="cannot be read as tensors"):
            tensor_batches(str(tmp_path / name))
    with pytest.raises(DataError, match="holds nothing; expected tensors by the names"):
        tensor_batches(str(tmp_path / "empty.pt"))
    with pytest.raises(DataError, match="holds dict; expected tensors"):
        tensor_batches(str(tmp_path / "words.pt"))


class Returns(nn.Module):
    """A model that returns `make` of its output."""

    def __init__(self, make):
        super().__init__()
        self.inner, self.make = nn.Linear(3, 4), make

    def forward(self, x):
        return self.make(self.inner(x))


def test_default_loss_backpropagates_normal_noise():
    x = torch.randn(5, 2, 3)
    model = Returns(lambda y: {"first": y, "more": [y[0]]})
    loss, words = loss_of(model, x, None)
    noise = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((5, 2, 4), (2, 4))]
    y = model.inner(x)
    torch.testing.assert_close(loss, (y * noise[0]).sum() / 10 + (y[0] * noise[1]).sum() / 2)
    assert words.startswith("the outputs times fixed normal noise, summed, over their rows")
    assert torch.equal(loss_of(model, x, None)[0], loss)


@pytest.mark.parametrize("make", [lambda y: y.mean(), lambda y: {"loss": y.mean(), "logits": y}])
def test_models_own_loss_is_used(make):
    loss, words = loss_of(Returns(make), torch.ones(2, 3), None)
    assert loss.dim() == 0
    assert words == "the model's own"


@pytest.mark.parametrize("make", [lambda y: y.detach(), lambda y: y.argmax(-1), lambda y: "text"])
def test_model_without_a_differentiable_output_raises(make):
    with pytest.raises(ModelError, match=r"Returns returns no loss to differentiate on a batch of \(2, 3\) float32"):
        halfstep.probe_model(Returns(make), data=[torch.ones(2, 3)])


def test_batch_of_wrong_shape_or_name_raises():
    with pytest.raises(
        ModelError, match=r"Linear raised RuntimeError on a batch of \(2, 5\) float32: .*Give data that"
    ):
        halfstep.probe_model(nn.Linear(3, 4), data=[torch.ones(2, 5)])
    with pytest.raises(ModelError, match=r"raised TypeError on a batch of y \(2, 3\) float32"):
        halfstep.probe_model(nn.Linear(3, 4), data=[{"y": torch.ones(2, 3)}])


def test_missing_data_formats_parameters_or_copies_raise():
    with pytest.raises(DataError, match="no batches"):
        halfstep.probe_model(nn.Linear(3, 4), data=[])
    with pytest.raises(FormatError, match="unknown format 'fp61'; nearest: fp16"):
        halfstep.probe_model(nn.Linear(3, 4), "fp61", data=[torch.ones(1, 3)])
    with pytest.raises(FormatError, match="block format"):
        halfstep.probe_model(nn.Linear(3, 4), "mxfp4", data=[torch.ones(1, 3)])
    with pytest.raises(ModelError, match="no parameters"):
        halfstep.probe_model(nn.ReLU(), data=[torch.ones(1, 3)])
    model = nn.Linear(3, 4)
    model.kept = model.weight * 2
    with pytest.raises(ModelError, match="cannot be copied"):
        halfstep.probe_model(model, data=[torch.ones(1, 3)])


def test_model_that_is_nonfinite_in_float32_raises():
    model = planted.healthy()
    with torch.no_grad():
        model.blocks[1].ffn.wo.weight *= 1e30
        model.head.weight *= 1e30
    with pytest.raises(ModelError, match="not finite in float32 either, first: "):
        halfstep.probe_model(model, data=[tokens()])
