"""`account`'s byte counts against `measure_step`, for torch.nn layers and Hugging Face's Llama."""

import itertools
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.profiler import ProfilerActivity, profile

import halfstep
from families import in_turn, slow_unless
from halfstep.accounting import OPTIMIZERS, Batch, Subject, account, load_subject
from halfstep.accounting.subject import loss_of
from halfstep.memory import measure_step


EXAMPLES = 3


class Recurrent(nn.Module):
    """A recurrent layer over plain or packed sequences."""

    def __init__(self, kind, packed=False, **options):
        super().__init__()
        self.layer, self.packed = getattr(nn, kind)(12, 16, batch_first=True, **options), packed

    def forward(self, x):
        if not self.packed:
            return self.layer(x)[0]
        lengths = torch.tensor([x.shape[1], 5, 2])
        found, _ = self.layer(pack_padded_sequence(x, lengths, batch_first=True))
        return pad_packed_sequence(found, batch_first=True)[0]


class Steps(nn.Module):
    """A recurrent cell, called once per time step."""

    def __init__(self, kind):
        super().__init__()
        self.cell = getattr(nn, kind)(12, 16)

    def forward(self, x):
        state, found = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            found.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(found, 1)


class Attended(nn.Module):
    """Self-attention with a padding mask."""

    def __init__(self, need_weights=False, **options):
        super().__init__()
        self.layer, self.need_weights = nn.MultiheadAttention(12, 2, batch_first=True, **options), need_weights

    def forward(self, x):
        mask = torch.arange(x.shape[1]) >= torch.tensor([[9], [5], [2]])
        return self.layer(x, x, x, key_padding_mask=mask, need_weights=self.need_weights)[0]


def convolutions():
    layers = nn.Conv1d(9, 8, 3, padding=1), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3, stride=2), nn.GELU()
    return nn.Sequential(*layers, nn.GroupNorm(2, 8), nn.ConvTranspose1d(8, 4, 2, stride=2), nn.MaxPool1d(2))


LAYERS = {
    "lstm": lambda: Recurrent("LSTM", num_layers=2),
    "lstm, both ways": lambda: Recurrent("LSTM", bidirectional=True, dropout=0.1, num_layers=2),
    "lstm, projected": lambda: Recurrent("LSTM", proj_size=8),
    "lstm, packed": lambda: Recurrent("LSTM", packed=True),
    "gru": lambda: Recurrent("GRU", num_layers=2),
    "gru, packed": lambda: Recurrent("GRU", packed=True, bidirectional=True),
    "rnn": lambda: Recurrent("RNN"),
    "lstm cell": lambda: Steps("LSTMCell"),
    "gru cell": lambda: Steps("GRUCell"),
    "rnn cell": lambda: Steps("RNNCell"),
    "attention": Attended,
    "attention, weights": lambda: Attended(need_weights=True, dropout=0.1),
    "encoder layer": lambda: nn.TransformerEncoderLayer(12, 2, 24, batch_first=True),
    "convolutions": convolutions,
}


def persistent_and_saved(bytes):
    return bytes.persistent, bytes.compute_copies + bytes.activations


def measured(model, batch, recipe):
    model, optimizer, scaler = halfstep.prepare(model, torch.optim.AdamW(model.parameters()), recipe, generator=0)
    return measure_step(model, optimizer, lambda: loss_of(batch.call(model), batch), batch.tensors, scaler.scale)


def assert_counted(build, length, recipe, rel=0.0):
    subject = Subject("it", build, lambda model, examples, sequence: Batch((torch.zeros(examples, length, 12),)))
    counted = account(subject, recipe, batch=EXAMPLES).bytes
    held = measured(build(), subject.batch(None, EXAMPLES, 1), recipe)
    assert persistent_and_saved(counted) == pytest.approx(persistent_and_saved(held), rel=rel)


@pytest.mark.quick("lstm-fp32")
@pytest.mark.cpu
@pytest.mark.parametrize(
    ("layer", "recipe"),
    slow_unless(
        lambda case: case in {("lstm", "fp32"), ("lstm", "fp8-delayed"), ("convolutions", "bf16-mixed")},
        [(layer, recipe) for layer in LAYERS for recipe in ("fp32", "bf16-mixed", "fp8-delayed")],
    ),
)
def test_saved_bytes_of_layers_equal_measured(layer, recipe):
    torch.manual_seed(0)
    # For 16-bit inputs torch saves a batch norm's statistics in float32; its meta kernel reports bf16.
    assert_counted(LAYERS[layer], 9, recipe, rel=0.01 if layer == "convolutions" else 0.0)


@pytest.mark.cpu
def test_long_lstm_sequences_are_extrapolated():
    assert_counted(lambda: nn.Sequential(Recurrent("LSTM")), 300, "fp32", rel=0.02)


STEPS = {
    "bf16-mixed": 0, "bf16-master": 0, "bf16-stochastic": 0, "adamw-8bit": 0, "coat": 0, "fp8lm-o1": 14, "fp8lm-o2": 14,
    "fp4-wang": 14, "fp8lm-o3": 25, "galore": 16,
}  # fmt: skip
"""Bytes of optimizer temporaries per element of the largest matrix, as docs/memory.md states them. GaLore: 14 bytes
plus the singular vectors (the matrix is four times as wide as high)."""


def mlp(width):
    layers = lambda: nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))  # noqa: E731
    return Subject("mlp", layers, lambda model, examples, length: Batch((torch.zeros(examples, width),)))


def most_allocated(step):
    """The peak bytes allocated by torch's CPU allocator and numpy while `step` runs."""
    tracemalloc.start()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    of_numpy = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(held, default=0) + of_numpy


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("recipe", "optimizer"),
    slow_unless(
        [("fp8lm-o2", "adamw")].__contains__,
        [*((recipe, "adamw") for recipe in STEPS), ("bf16-mixed", "lion"), ("fp8lm-o2", "lion"), ("fp8lm-o3", "lion")],
    ),
)
def test_optimizer_temporaries_equal_measured_peak(recipe, optimizer):
    """Tolerance: a kernel decodes 100 KB at a time, and the profilers take 15 KB."""
    torch.manual_seed(0)
    for width in (64, 256):  # the first compiles kernels
        subject = mlp(width)
        model = subject.build()
        model, low_bit, scaler = halfstep.prepare(model, OPTIMIZERS[optimizer](model.parameters()), recipe, generator=0)
        scaler.scale(model(torch.randn(32, width)).square().mean()).backward()
        taken = most_allocated(low_bit.step)
    counted = account(subject, recipe, batch=32, optimizer=optimizer).bytes.update
    matrix = 4 * 256 * 256
    assert taken == pytest.approx(counted, abs=200_000)
    if optimizer == "adamw":
        assert counted / matrix == pytest.approx(STEPS[recipe], abs=0.1)
        page = " ".join((Path(__file__).parents[2] / "docs" / "memory.md").read_text().split())
        assert "14 bytes for each number of the largest matrix under `fp8lm-o1`, `fp8lm-o2` and `fp4-wang`" in page


def small_llama(folder, heads):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=heads, architectures=["LlamaForCausalLM"], use_cache=False,
    )  # fmt: skip
    config.save_pretrained(folder)
    return transformers.LlamaForCausalLM(config).train()


@pytest.mark.quick("fp32-4")
@pytest.mark.parametrize(
    ("recipe", "heads"),
    slow_unless(
        in_turn(["fp32", "bf16-mixed"], [4, 2]).__contains__, itertools.product(["fp32", "bf16-mixed"], [4, 2])
    ),
)
def test_hugging_face_llama_equals_measured_step(recipe, heads, tmp_path):
    """transformers takes another path when tensors have no values."""
    model = small_llama(tmp_path, heads)
    ids = torch.zeros(EXAMPLES, 24, dtype=torch.int64)
    counted = account(load_subject(str(tmp_path)), recipe, batch=EXAMPLES, sequence=24).bytes
    held = measured(model, Batch(named=(("input_ids", ids), ("labels", ids))), recipe)
    assert (*persistent_and_saved(counted), counted.peak) == (*persistent_and_saved(held), held.peak)


@pytest.mark.quick("False")
@pytest.mark.parametrize("masked", [False, True])
def test_attention_mask_values_select_the_measured_path(masked, tmp_path):
    model = small_llama(tmp_path, 2)

    def batch(_, examples, length):
        ids = torch.zeros(examples, length, dtype=torch.int64)
        mask = torch.ones_like(ids)
        mask[:1, length - 4 :] = int(not masked)
        return Batch(named=(("input_ids", ids), ("labels", ids), ("attention_mask", mask)))

    subject = Subject("llama", lambda: small_llama(tmp_path, 2), batch, 24)
    counted = account(subject, "bf16-mixed", batch=EXAMPLES, sequence=24).bytes
    held = measured(model, batch(None, EXAMPLES, 24), "bf16-mixed")
    assert (*persistent_and_saved(counted), counted.peak) == (*persistent_and_saved(held), held.peak)
