"""`account`'s byte counts against `measure_step` on real tensors, for every recipe on three architectures."""

import gc
import itertools
from dataclasses import astuple, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import halfstep
from families import in_turn, slow_unless
from halfstep.accounting import OPTIMIZERS, Batch, Subject, account, inference, load_subject
from halfstep.accounting.account import checkpointed
from halfstep.accounting.subject import Blank, loss_of
from halfstep.errors import AccountError, ModelError, RecipeError
from halfstep.kernels.cpu import coded, dequantize, element_codes, expansion
from halfstep.lab.models.gpt import GPT
from halfstep.lab.models.llama import Llama
from halfstep.lab.tasks.vision import CNN
from halfstep.memory import measure, measure_step
from halfstep.ops import codes
from halfstep.quant import family
from halfstep.quant.cast import shared_range
from halfstep.recipe import Recipe, get_recipe
from halfstep.recipe.storage import COAT
from tiny import EVERY, SMOOTH


EXAMPLES, LENGTH = 3, 33


def tokens(model, examples, length):
    return Batch((torch.arange(examples * length).view(examples, length) % 64,))


def images(model, examples, length):
    return Batch((torch.zeros(examples, 1, 8, 8),))


STORED = ["bf16-collage-plus", "bf16-master", "bf16-mixed", "fp16-mixed", "fp8-current", "fp8-delayed", "fp8lm-o3"]
SUBJECTS = {
    "gpt": Subject("gpt", lambda: GPT(64, 40, layers=2, width=64, heads=4), tokens, LENGTH),
    "llama": Subject("llama", lambda: Llama(64, 40, layers=2, width=64, heads=4), tokens, LENGTH),
    "cnn": Subject("cnn", lambda: CNN(10, width=8), images),
}


def real(subject, recipe, optimizer="adamw"):
    """The model, its optimizer, and the bytes of its second step on real tensors (the first step compiles kernels)."""
    torch.manual_seed(0)
    model = subject.build()
    model, low_bit, scaler = halfstep.prepare(model, OPTIMIZERS[optimizer](model.parameters()), recipe, generator=0)
    batch = subject.batch(model, EXAMPLES, LENGTH)
    for _ in range(2):
        gc.collect()
        found = measure_step(model, low_bit, lambda: loss_of(batch.call(model), batch), batch.tensors, scaler.scale)
    return model, low_bit, found


def of(subject, recipe, **options):
    return account(subject, recipe, **{"batch": EXAMPLES, "sequence": LENGTH, **options}).bytes


def persistent(bytes):
    return astuple(bytes)[:7]


def saved(bytes):
    """Bytes saved for backward. On real tensors, weight copies that kernels write are measured as activations."""
    return bytes.compute_copies + bytes.activations


@pytest.mark.quick("bf16-mixed-cnn", "fp8-current-llama")
@pytest.mark.parametrize(
    ("recipe", "kind"),
    slow_unless(in_turn(STORED, [*SUBJECTS]).__contains__, itertools.product(EVERY, SUBJECTS)),
)
def test_account_equals_measured_step(recipe, kind):
    unfit = recipe in SMOOTH or (kind == "cnn" and get_recipe(recipe).projection)  # no gated MLP; nothing to project
    subject = SUBJECTS["llama" if unfit else kind]
    counted, (model, low_bit, measured) = of(subject, recipe), real(subject, recipe)
    assert persistent(counted) == persistent(measured) == persistent(of(replace(subject, batch=None), recipe))
    # torch's meta kernel keeps the mean and deviation of a 16-bit batch norm in 16 bits, its CPU kernel in 32.
    off, quantizers = 0.02 if kind == "cnn" else 0, [q for r in get_recipe(recipe).rules for q in r.linear.quantizers]
    # Values equal to a quantile are not clamped; their count depends on the values, so `counted` is an upper bound.
    ties = 2e-4 if any(q.clamp is not None and q.clamp.compensation for q in quantizers) else 0
    assert (1 - off) * saved(measured) <= saved(counted) <= (1 + off + ties) * saved(measured)
    rounds = any(rule.linear.rounds for rule in get_recipe(recipe).rules)
    if not rounds:  # emulated rounding allocates temporaries that kernels do not
        assert counted.peak == pytest.approx(measured.peak, rel=0.002 if kind == "cnn" else 0)
        assert counted.peak_gradients == measured.peak_gradients
    assert_equals_measure(model, low_bit, counted)


def assert_equals_measure(model, low_bit, counted):
    """Compare with `measure`, which counts independently; it leaves out per-tensor scales and step counts."""
    size = measure(model, low_bit)
    count = sum(p.numel() for p in model.parameters())
    tensors = len(list(model.parameters()))
    own = sum(persistent(counted)) - counted.buffers - 4 * tensors  # 4 bytes of a step count
    assert size.total * count == pytest.approx(own, abs=len(low_bit.state) * 5 * 2100)


KEPT = ("bf16-mixed", "fp16-mixed", "fp8-current", "fp8lm-o2", "fp32", "bf16-master")
GPTS = ("gpt", "llama")


@pytest.mark.parametrize("recipe", ["coat", "adamw-8bit", "fp8-fishman"])
def test_account_with_empty_kernel_caches_is_repeatable(recipe):
    """Fake tensors have no values, so they must not end up in the tables cached for the process."""
    for kept in (
        coded.coding_of,
        expansion.meaning,
        dequantize.meaning,
        element_codes.table,
        codes._zero,
        codes._zeros_of,
    ):
        kept.cache_clear()
    subject = replace(SUBJECTS["llama"], build=lambda: Llama(64, 40, layers=1, width=64, heads=4))
    assert of(subject, recipe) == of(subject, recipe)


@pytest.mark.quick("bf16-mixed-gpt")
@pytest.mark.parametrize(
    ("recipe", "kind"), slow_unless(in_turn(KEPT[:4], GPTS).__contains__, itertools.product(KEPT, GPTS))
)
def test_saved_bytes_equal_saved_tensors_hooks(recipe, kind):
    subject = SUBJECTS[kind]
    model, _, measured = real(subject, recipe)
    batch = subject.batch(model, EXAMPLES, LENGTH)
    owned = {p.untyped_storage()._cdata for p in model.parameters() if not hasattr(p, "parts")}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            kept[storage._cdata] = tensor, storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(batch.call(model), batch)
    sizes = {key: size for key, (_, size) in kept.items()}
    for tensor in (loss, *batch.tensors):
        sizes[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    assert saved(measured) == sum(sizes.values())


@pytest.mark.parametrize("optimizer", slow_unless("momentum".__eq__, OPTIMIZERS))
def test_optimizer_state_bytes(optimizer):
    counted = of(SUBJECTS["gpt"], "fp32", optimizer=optimizer)
    _, low_bit, measured = real(SUBJECTS["gpt"], "fp32", optimizer)
    assert counted.states == measured.states
    count = account(SUBJECTS["gpt"], "fp32").parameters
    moments = {"sgd": 0, "momentum": 1, "lion": 1}.get(optimizer, 2)
    assert counted.states == 4 * moments * count + 4 * len(low_bit.state)  # and a step count a tensor


def test_user_defined_recipe():
    own = Recipe("mine", "moments in bf16", "a test", moments="bf16")
    counted = of(SUBJECTS["gpt"], own)
    tensors = sum(1 for _ in SUBJECTS["gpt"].build().parameters())
    assert counted.states == 4 * account(SUBJECTS["gpt"], own).parameters + 4 * tensors


@pytest.mark.slow
@pytest.mark.parametrize("kind", GPTS)
def test_low_bit_saved_activations_are_counted_in_their_format(kind):
    kept = replace(get_recipe("coat"), name="kept", saved=COAT)
    plain = replace(kept, name="plain", saved=None)
    counted, (_, _, measured) = of(SUBJECTS[kind], kept), real(SUBJECTS[kind], kept)
    assert saved(counted) == saved(measured)
    assert saved(measured) < saved(of(SUBJECTS[kind], plain))


def test_frozen_parameters_have_no_gradients_and_no_optimizer_states():
    def build():
        model = GPT(64, 40, layers=1, width=64, heads=4)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith("head"))
        return model

    made = account(Subject("frozen", build, tokens, LENGTH), "bf16-master")
    assert made.trained == 64 * 64
    assert made.bytes.gradients == 2 * made.trained
    assert made.bytes.master == 4 * made.trained
    assert made.bytes.weights == 2 * made.parameters


def test_tied_weights_count_once():
    def build():
        model = GPT(64, 40, layers=1, width=64, heads=4)
        model.head.weight = model.token.weight
        return model

    tied = account(Subject("tied", build, tokens, LENGTH), "fp32")
    assert tied.parameters == account(SUBJECTS["gpt"], "fp32").parameters - 64 * 64 - block_parameters()


def block_parameters():
    return sum(p.numel() for p in GPT(64, 40, 2, 64, 4).blocks[0].parameters())


def test_per_layer_updates_count_no_persistent_gradients():
    counted, plain = (of(SUBJECTS["gpt"], "bf16-master", per_layer=each) for each in (True, False))
    assert counted.gradients == 0
    assert counted.persistent == plain.persistent - plain.gradients
    assert counted.peak < plain.peak
    assert counted.peak_gradients <= 2 * 64 * 256  # that of the largest matrix


@pytest.mark.quick("selective")
@pytest.mark.parametrize("how", ["selective", "full"])
def test_checkpointing_equals_measured_step(how):
    subject = SUBJECTS["gpt"]
    twin = replace(subject, build=lambda: checkpointed(subject.build(), how))
    counted = of(subject, "bf16-mixed", checkpointing=how)
    assert saved(counted) == saved(real(twin, "bf16-mixed")[2])
    plain = of(subject, "bf16-mixed")
    assert saved(counted) < saved(plain) if how == "full" else saved(counted) <= saved(plain) * 1.1
    assert persistent(counted) == persistent(plain)


def test_full_checkpointing_saves_only_block_inputs():
    def layers(count):
        subject = Subject("gpt", lambda: GPT(64, 40, count, 64, 4), tokens, LENGTH)
        return saved(of(subject, "fp32", checkpointing="full"))

    assert layers(5) - layers(4) == 4 * EXAMPLES * LENGTH * 64  # p s b h


def test_selective_checkpointing_saves_no_attention_probabilities():
    class AttentionWithDropout(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            q = self.embed(x).view(*x.shape, 4, 16).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
            return self.head(y.transpose(1, 2).flatten(2))

    subject = Subject("dropped", AttentionWithDropout, tokens, LENGTH)
    none, selective = (saved(of(subject, "fp32", checkpointing=how)) for how in ("none", "selective"))
    square = 4 * EXAMPLES * 4 * LENGTH * LENGTH  # p a s^2 b
    assert 2 * square <= none - selective <= 4 * square


def live_fake_tensors():
    return [thing for thing in gc.get_objects() if type(thing).__name__ == "FakeTensor"]


@pytest.mark.slow
def test_account_leaves_no_fake_tensors_and_no_wrong_caches():
    """Tables cached from tensors without values would silently be wrong for the rest of the process."""
    for cached in (shared_range, family._lists, family._codes, family._decoded):
        cached.cache_clear()
    others = live_fake_tensors()  # of graphs traced earlier
    subject = replace(SUBJECTS["llama"], build=lambda: Llama(64, 40, layers=1, width=64, heads=4))
    for recipe in EVERY:
        of(subject, recipe)
    gc.collect()
    known = set(map(id, others))
    assert not [thing for thing in live_fake_tensors() if id(thing) not in known]
    x = torch.randn(64, 64)
    for recipe in EVERY:
        for rule in get_recipe(recipe).rules:
            for quantizer in (rule.linear.output.lhs, rule.linear.output.rhs):
                if quantizer is not None and quantizer.stateful is None:
                    assert quantizer(x).isfinite().all()
    assert shared_range(halfstep.formats.get("fp16"), torch.float32) == (-65504.0, 65504.0)


def test_large_models_are_counted_without_computation():
    wide = Subject("wide", lambda: GPT(50257, 2048, 2, 12288, 96), tokens, 2048)
    assert account(wide, "bf16-mixed").bytes.weights > 4 * 2 * 12 * 12288**2


# ---- refused inputs -------------------------------------------------------------------------------------------------


def test_bad_input_raises():
    subject = replace(SUBJECTS["gpt"], longest=40)
    with pytest.raises(AccountError, match="--seq 41 given, and gpt has positions for 40"):
        account(subject, "fp32", sequence=41)
    with pytest.raises(AccountError, match="unknown optimizer 'adanw'; nearest: adamw"):
        account(subject, "fp32", optimizer="adanw")
    with pytest.raises(AccountError, match="unknown checkpointing 'ful'; nearest: full"):
        account(subject, "fp32", checkpointing="ful")
    with pytest.raises(RecipeError, match="nearest: bf16-mixed"):
        account(subject, "bf16-mixd")
    with pytest.raises(AccountError, match=r"no torch\.nn\.ModuleList or Sequential of blocks of one type"):
        account(Subject("one", lambda: nn.Linear(8, 8), lambda m, b, s: Batch((torch.zeros(b, 8),))), "fp32",
                checkpointing="full")  # fmt: skip
    with pytest.raises(AccountError, match=r"calls no torch\.nn\.functional\.scaled_dot_product_attention"):
        account(SUBJECTS["cnn"], "fp32", checkpointing="selective")


def test_model_that_reads_tensor_values_raises():
    class Routed(nn.Linear):
        def forward(self, x):
            return super().forward(x[x.sum(-1).nonzero().flatten()])

    subject = Subject("routed", lambda: Routed(8, 8), lambda m, b, s: Batch((torch.zeros(b, 8),)))
    with pytest.raises(ModelError, match=r"routed reads values of tensors .*measure_step"):
        account(subject, "fp32")


def test_failing_model_is_named_in_the_error():
    subject = Subject("narrow", lambda: nn.Linear(8, 8), lambda m, b, s: Batch((torch.zeros(b, 7),)))
    with pytest.raises(ModelError, match=r"narrow cannot be run on FakeTensors \(RuntimeError"):
        account(subject, "fp32")


def test_blank_mode_gives_plain_values():
    with Blank():
        x = torch.zeros(4)
        assert float(x.max()) == 1.0
        assert not bool((x == 0).all())
        assert int(x.argmax()) == 1
        assert int(torch.arange(7).sum()) == 21  # empty storage has no part in it
        assert bool(torch.ones(2, 3, dtype=torch.bool).all())
        assert not isinstance(torch.full((4, 4), True).tril(), FakeTensor)
        assert isinstance(torch.zeros(2**21, dtype=torch.int64), FakeTensor)


def test_unknown_architecture_suggests_the_nearest():
    with pytest.raises(ModelError, match="unknown architecture 'lama-7b'; nearest: llama-7b"):
        load_subject("lama-7b")


# ---- recipes with stages --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_staged_recipe_takes_the_bytes_of_its_largest_stage():
    text = "fp8-current until 50%, then fp32 until 90% then bf16-mixed"
    recipe = get_recipe(text)
    each = [of(SUBJECTS["gpt"], stage) for stage in recipe.by_stage]
    assert len({one.peak for one in each}) == 3
    assert of(SUBJECTS["gpt"], text) == max(each, key=lambda size: size.peak)
    assert account(SUBJECTS["gpt"], text).recipe == recipe.name


def test_inference_of_staged_recipe_raises():
    with pytest.raises(AccountError, match="has stages, and inference has none: ask for one of them, such as 'fp32'"):
        inference(SUBJECTS["gpt"], "fp8-current until 50%, then fp32")
