"""PEFT's LoRA on a base of frozen codes: compared with bitsandbytes' 4 bits, saved, resumed, merged."""

import copy
import json
import warnings
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.pytorch import LightningModule, Trainer
from lora import adamw, adapted, batch, llama, logits, quantized, train, trained
from matrix_lightning import QUIET
from peft import PeftModel, prepare_model_for_kbit_training
from torch import nn
from trainers import Trained, arguments, examples, llama as small_llama
from transformers import LlamaForCausalLM

import halfstep
from halfstep.errors import ModelError, OptimizerError, RecipeError
from halfstep.integrations.accelerate import prepare
from halfstep.integrations.lightning import HalfstepPrecision
from halfstep.memory import stored_bytes
from halfstep.nn.paths import plain_name
from tiny import assert_same


BASES = ("nf4", "nf4-double", "int8-weight-only", "fp8-current", "mxfp4")
every_base = pytest.mark.parametrize("name", BASES)


def qlora(name):
    model = quantized(name)
    return model, *halfstep.optimize(model, adamw(model), generator=3)


def with_bitsandbytes(model, double=False):
    """The same layers as `Linear4bit`, from the same weights in bf16."""
    model = model.bfloat16()
    for path, layer in [*model.named_modules()]:
        if isinstance(layer, nn.Linear) and path != "lm_head":
            options = {"bias": False, "compute_dtype": torch.bfloat16, "compress_statistics": double}
            four = bnb.nn.Linear4bit(layer.in_features, layer.out_features, quant_type="nf4", **options)
            four.weight = bnb.nn.Params4bit(
                layer.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=double
            )
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, four.to("cpu"))
    return model


@pytest.mark.quick("nf4")
@every_base
def test_trains_only_the_adapters(name):
    model, optimizer, scaler = qlora(name)
    codes = {n: b.clone() for n, b in model.named_buffers()}
    assert all("lora_" in n and p.dtype == torch.float32 for n, p in trained(model).items())
    losses = train(model, optimizer, scaler, 6)
    assert losses[-1] < losses[0] - 0.05
    for n, buffer in model.named_buffers():
        assert_same(buffer, codes[n])


def test_matmuls_run_in_the_recipes_dtype():
    model, seen = qlora("nf4")[0], {}
    for path in ("base_layer", "lora_A.default", "lora_B.default"):
        layer = model.get_submodule(f"base_model.model.model.layers.0.self_attn.q_proj.{path}")
        layer.register_forward_hook(lambda _, inputs, output, path=path: seen.update({path: output.dtype}))
    assert model(**batch()).logits.dtype == torch.float32
    assert {*seen.values()} == {torch.bfloat16}
    assert len(seen) == 3


@pytest.mark.parametrize("double", [False, True], ids=["nf4", "nf4-double"])
def test_nf4_weights_equal_bitsandbytes(double):
    model, other = llama(), with_bitsandbytes(llama(), double)
    halfstep.quantize_model(model, "nf4-double" if double else "nf4", adapters=True)
    layer, four = (m.get_submodule("model.layers.1.mlp.down_proj") for m in (model, other))
    theirs = bnb.functional.dequantize_4bit(four.weight.data, four.weight.quant_state).float()
    ours = layer.weight.float()
    if double:
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-3)
    else:
        same = (layer.weight_codes.flatten() == four.weight.data.flatten()).float().mean()
        assert same > 0.999  # bitsandbytes multiplies by 1 / absmax, we divide: values near a boundary may differ
        assert_same(layer.weight_scale.flatten(), four.weight.quant_state.absmax)
        assert ((ours != theirs.bfloat16().float()).float().mean()) < 1e-3


@pytest.mark.slow
def test_bytes_and_losses_are_near_bitsandbytes():
    model, optimizer, scaler = qlora("nf4")
    other = adapted(with_bitsandbytes(llama()))
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    assert stored_bytes(layer) - layer.weight_format.numel() == 64 * 64 * (0.5 + 4 / 64)
    for (n, one), (m, two) in zip(trained(model).items(), trained(other).items(), strict=True):
        assert n == m
        with torch.no_grad():
            two.copy_(one)
    ours = train(model, optimizer, scaler, 8)
    plain = adamw(other)
    theirs = train(other, plain, halfstep.LossScaler(enabled=False), 8)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=0.01, atol=0)


@pytest.mark.quick("True")
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_bit(reentrant):
    plain, again = qlora("nf4")[0], qlora("nf4")[0]
    again.enable_input_require_grads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        again.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for model in (plain, again):
        model(**batch()).loss.backward()
    for one, other in zip(trained(plain).values(), trained(again).values(), strict=True):
        assert_same(one.grad, other.grad)


def test_resumes_from_adapter_file_and_optimizer_state(tmp_path):
    model, optimizer, scaler = qlora("nf4")
    train(model, optimizer, scaler, 3)
    model.save_pretrained(tmp_path)
    states = copy.deepcopy((optimizer.state_dict(), scaler.state_dict()))
    expected = train(model, optimizer, scaler, 3)
    base = llama()
    halfstep.quantize_model(base, "nf4", adapters=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        again = PeftModel.from_pretrained(base, tmp_path, is_trainable=True).train()
    optimizer, scaler = halfstep.optimize(again, adamw(again), generator=3)
    optimizer.load_state_dict(states[0])
    scaler.load_state_dict(states[1])
    assert train(again, optimizer, scaler, 3) == expected


@pytest.mark.slow
@pytest.mark.quick("mxfp4")
@pytest.mark.parametrize("name", ["fp8-current", "mxfp4"])
def test_trains_on_an_exported_folder(name, tmp_path):
    model = llama()
    halfstep.quantize_model(model, name)
    halfstep.export(model, tmp_path / "served")
    model, optimizer, scaler = qlora(name)
    expected = train(model, optimizer, scaler, 3)
    again = adapted(halfstep.from_pretrained(tmp_path / "served", adapters=True))
    optimizer, scaler = halfstep.optimize(again, adamw(again), generator=3)
    assert train(again, optimizer, scaler, 3) == expected
    inference = adapted(halfstep.from_pretrained(tmp_path / "served"))
    with pytest.raises(RecipeError, match="adapters=True"):
        halfstep.optimize(inference, adamw(inference))


def test_merging_raises_for_codes_and_works_after_dequantizing(tmp_path):
    model, optimizer, scaler = qlora("nf4")
    train(model, optimizer, scaler)
    expected = logits(model)
    for merge in (model.merge_adapter, lambda: model.merge_adapter(safe_merge=True), model.merge_and_unload):
        with pytest.raises(ModelError, match=r"halfstep\.dequantize_model\(model\) first"):
            merge()
    assert_same(logits(model), expected)
    halfstep.dequantize_model(model)
    merged = model.merge_and_unload().float()
    merged.save_pretrained(tmp_path)
    stock = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert ((logits(stock) - expected).norm() / expected.norm()) < 2e-2


def test_prepare_model_for_kbit_training_changes_no_codes():
    model = llama()
    halfstep.quantize_model(model, "nf4", adapters=True)
    codes = {n: b.clone() for n, b in model.named_buffers()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = adapted(prepare_model_for_kbit_training(model))
    train(model, adamw(model), halfstep.LossScaler(enabled=False), 2)
    for n, buffer in model.get_base_model().named_buffers():
        assert_same(buffer, codes[plain_name(n)])


def test_documentation_shows_the_benchmark_results():
    root = Path(__file__).parents[2]
    kept = json.loads((root / "benchmarks" / "results" / "qlora.json").read_text())
    page = (root / "docs" / "integrations.md").read_text()
    assert len(kept["rows"]) == 7
    for row in kept["rows"]:
        losses = f"{row['loss before']:.4f} | {row['loss after']:.4f}"
        assert f"| {row['base']} | {row['bytes']:,} | {losses} |" in page


@pytest.mark.parametrize("name", ["nf4"])
def test_trainer_takes_a_base_quantized_for_adapters(name, tmp_path):
    """A base that is not quantized yet is quantized by the Trainer, and then trains bit for bit like one that was."""
    how = {"recipe": name, "train_dataset": examples(rows=8), "generator": 3, "audit": False}
    losses, kept = {}, {}
    for codes in (False, True):
        torch.manual_seed(0)
        base = small_llama()
        if codes:
            halfstep.quantize_model(base, name, adapters=True)
        torch.manual_seed(1)
        trained = Trained(adapted(base), arguments(tmp_path, max_steps=2), **how)
        trained.train()
        losses[codes], kept[codes] = trained.losses, stored_bytes(trained.model)
    assert losses[True] == losses[False]
    assert kept[True] == kept[False] < 33000
    with pytest.raises(RecipeError, match=r"quantised under 'nf4'.*give recipe='nf4', and quantise with adapters=True"):
        halfstep.prepare(trained.model, adamw(trained.model), "bf16-mixed")


class Adapting(LightningModule):
    """Trains adapters on one batch."""

    def __init__(self, model):
        super().__init__()
        self.model, self.losses = model, []

    def training_step(self, rows, index):
        loss = self.model(**batch()).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return adamw(self)


def by_lightning(model, recipe):
    module, options = Adapting(model), {"accelerator": "cpu", "gradient_clip_val": 1.0, "max_steps": 3, **QUIET}
    trainer = Trainer(plugins=[HalfstepPrecision(recipe, generator=3)], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Lightning's
        warnings.filterwarnings("ignore", "The 'train_dataloader' does not have many workers")
        trainer.fit(module, torch.utils.data.DataLoader(range(3)))
    return module.losses


def by_accelerate(model, recipe, optimizer=None):
    AcceleratorState._reset_state(True)
    accelerator, losses = Accelerator(cpu=True), []
    model, optimizer = prepare(accelerator, model, optimizer or adamw(model), recipe=recipe, generator=3)
    for _ in range(3):
        loss = model(**batch()).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("loop", [by_lightning, pytest.param(by_accelerate, marks=pytest.mark.slow)])
def test_other_libraries_loops_equal_the_documented_loop(loop):
    model, optimizer, scaler = qlora("nf4")
    expected = train(model, optimizer, scaler, 3)
    other = quantized("nf4")
    held = stored_bytes(other)
    assert loop(other, "nf4") == expected
    assert stored_bytes(other) == held
    assert_same(trained(other), trained(model))
    with pytest.raises(RecipeError, match=r"quantised under 'nf4'.*give recipe='nf4'"):
        loop(other, "bf16-mixed")


def test_base_of_codes_without_adapters_raises():
    model = llama()
    halfstep.quantize_model(model, "nf4", adapters=True)
    with pytest.raises(OptimizerError, match=r"nothing to train beside its codes: add adapters first"):
        by_accelerate(model, "nf4", torch.optim.AdamW(model.parameters()))
