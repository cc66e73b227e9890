"""Custom recipes from TOML files and Python modules, and the errors of mistakes in them."""

import json
from dataclasses import replace

import pytest
import torch

import halfstep
from halfstep import formats, get_recipe
from halfstep.errors import RecipeError
from halfstep.ops import CodeTensor
from halfstep.quant import Clamp, Estimator, Quantizer, Scales
from halfstep.quant.scaling import get_scaling
from halfstep.quant.scaling.delayed import Current, Delayed
from halfstep.quant.tile import ROW, TENSOR, Tile
from halfstep.recipe import LinearSpec, LossScale, Matmul, Recipe, Rule, from_data, to_data
from halfstep.recipe.data import to_toml
from halfstep.recipe.operands import KEEP
from tiny import RECIPES, assert_same, mlp, prepared, train


WHOLE = """
name = "mine"
summary = "What I try."
source = "my notebook"
weights = "bf16"  # stored so
master = "fp32"
compute = "bf16"
notes = ["one", "two"]
loss_scale = {init = 1024, dynamic = false}

[[rules]]
path = "*.mlp.*"
why = "small"
optional = true
input = {format = "e4m3fn", tile = "tensor", scale = "delayed", history = 16, margin = 1}
weight = {format = "mxfp8_e4m3", scale = "even"}
grad_output = "e5m2"

[[rules]]
path = "*"
[rules.output]
lhs = {format = "e4m3fn", tile = "row", scale = "rceil"}
rhs.format = "e4m3fn"
rhs.tile = "128x128"
rhs.scale = "rceil"
rhs.margin = 2
"""


@pytest.fixture
def write_recipe(tmp_path):
    """Writes a file and returns its path as text."""

    def write(text, name="my.toml"):
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_a_file_with_every_key(write_recipe):
    recipe = get_recipe(write_recipe(WHOLE))
    assert (recipe.name, recipe.summary, recipe.source) == ("mine", "What I try.", "my notebook")
    assert (recipe.weights, recipe.master, recipe.compute) == ("bf16", "fp32", "bf16")
    assert recipe.notes == ("one", "two")
    assert recipe.loss_scale == LossScale(init=1024.0, dynamic=False)
    assert recipe.rules[: len(KEEP)] == KEEP
    small, all_others = recipe.rules[len(KEEP) :]
    scaling = Delayed("delayed", history=16, margin=1)
    assert (small.path, small.why, small.optional) == ("*.mlp.*", "small", True)
    assert small.linear.output.lhs == Quantizer(formats.get("e4m3fn"), scales=Scales(TENSOR, scaling))
    assert small.linear.output.lhs == small.linear.grad_weight.rhs
    assert small.linear.output.rhs == small.linear.grad_input.rhs == halfstep.get_quantizer("mxfp8_e4m3", scale="even")
    assert small.linear.grad_input.lhs == Quantizer(formats.get("e5m2"))
    lhs, rhs = all_others.linear.output.lhs, all_others.linear.output.rhs
    assert lhs.scales == Scales(ROW, get_scaling("rceil"))
    assert rhs.scales == Scales(Tile(128, 128), get_scaling("rceil", margin=2))
    assert all_others.linear.grad_input == all_others.linear.grad_weight == Matmul()


def test_a_base_supplies_the_keys_that_a_file_omits(write_recipe):
    recipe = get_recipe(write_recipe('name = "mine"\nbase = "fp8-delayed"\nmoments = "bf16"\n'))
    base = get_recipe("fp8-delayed")
    assert recipe == replace(
        base,
        name="mine",
        moments="bf16",
        summary="fp8-delayed, except for moments.",
        source="one's own, from fp8-delayed",
        notes=(),
    )
    without = get_recipe(write_recipe('name = "mine"\nbase = "fp16-master"\nmaster = "none"\nloss_scale = "none"\n'))
    assert without.master is None
    assert without.loss_scale is None
    assert get_recipe(write_recipe('name = "mine"\nbase = "O2"')).weights == "fp16"


def test_a_file_stores_weights_as_codes(write_recipe):
    kinds = {"weights": "e4m3fn", "grads": "e4m3fn", "master": "fp16"}
    tables = [f"{role} = {{format = '{name}', tile = 'tensor', scale = 'rceil'}}" for role, name in kinds.items()]
    recipe = get_recipe(write_recipe("\n".join(['name = "mine"\nbase = "fp8-delayed"\n[codes]', *tables])))
    assert recipe.codes == get_recipe("fp8lm-o3").codes
    codes = {p.codes.dtype for p in prepared(recipe)[0].parameters() if isinstance(p, CodeTensor)}
    assert codes == {torch.float8_e4m3fn}
    assert get_recipe(write_recipe('name = "mine"\nbase = "fp8lm-o3"\ncodes = "none"')).codes is None


def test_heads_are_kept_unless_keep_heads_is_false(write_recipe):
    rules = "[[rules]]\npath = '*'\ninput = 'e4m3fn'\n"
    assert len(get_recipe(write_recipe(f"name = 'mine'\nkeep_heads = false\n{rules}")).rules) == 1
    assert len(get_recipe(write_recipe(f"name = 'mine'\n{rules}")).rules) == len(KEEP) + 1
    assert len(get_recipe(write_recipe(f"name = 'mine'\nbase = 'mxfp8'\n{rules}")).rules) == len(KEEP) + 1


def test_a_file_trains_like_the_recipe_it_spells_out(write_recipe):
    text = """
    name = "mine"
    compute = "bf16"
    [[rules]]
    path = "*"
    input = {format = "e4m3fn", tile = "tensor", scale = "current"}
    weight = {format = "e4m3fn", tile = "tensor", scale = "current"}
    grad_output = {format = "e5m2", tile = "tensor", scale = "current"}
    """
    found = []
    for name in (write_recipe(text), "fp8-current", "bf16-mixed"):
        parts = prepared(name)
        found.append((train(*parts), dict(parts[0].state_dict())))
    assert_same(found[0], found[1])
    assert found[0][0] != found[2][0]


PYTHON = """
from dataclasses import replace
from halfstep import get_recipe
mine = replace(get_recipe("fp8-current"), name="mine")
other = replace(mine, name="not/a name")
number = 3
"""


def test_recipes_from_python_modules_and_files(write_recipe, tmp_path, monkeypatch):
    file = write_recipe(PYTHON, "my_recipes_module.py")
    assert get_recipe(f"{file}:mine") == replace(get_recipe("fp8-current"), name="mine")
    monkeypatch.chdir(tmp_path)
    assert get_recipe("my_recipes_module:mine").name == "mine"
    model = mlp()
    assert halfstep.apply(model, "my_recipes_module:mine").recipe.name == "mine"
    for name, words in (
        ("my_recipes_module:min", r"my_recipes_module: unknown recipe 'min'; nearest: mine. Known: mine, other"),
        ("my_recipes_module:number", r"unknown recipe 'number'.*\(number is int\)"),
        ("my_recipes_module:other", r"other is called 'not/a name'; expected letters, digits"),
        ("no_such_module:mine", r"no_such_module: cannot be imported \(ModuleNotFoundError"),
        ("no_such_file.py:mine", r"no_such_file.py: cannot be imported \(FileNotFoundError"),
        (write_recipe("1 / 0", "broken.py") + ":x", r"broken.py: cannot be imported \(ZeroDivisionError"),
    ):
        with pytest.raises(RecipeError, match=words):
            get_recipe(name)


def test_clamps_and_estimators_are_tables_in_an_operand(write_recipe):
    text = """
        name = "mine"
        [[rules]]
        path = "*"
        input = {format = "fp4", tile = "row", scale = "current", rounding = "nearest_up", clamp = {quantile = 0.97}}
        weight = {format = "mxfp4", estimator = {k = 3, cap = "none"}}
        grad_output = {format = "fp4", tile = "row", scale = "current", clamp = {tile = "row", compensation = false}}
    """
    spec = get_recipe(write_recipe(text)).rules[-1].linear
    assert spec.output.lhs.clamp == spec.grad_weight.rhs.clamp == Clamp(0.97)
    assert spec.output.rhs.estimator == Estimator(3.0, None)
    assert spec.grad_input.lhs.clamp == Clamp(tile="row", compensation=False)
    assert spec.output.lhs.rounding == "nearest_up"
    usual = get_recipe(write_recipe(text.replace("{quantile = 0.97}", "{}").replace('{k = 3, cap = "none"}', "{}")))
    assert usual.rules[-1].linear.output.lhs.clamp == Clamp()
    assert usual.rules[-1].linear.output.rhs.estimator == Estimator()


RULE = 'name = "mine"\n[[rules]]\npath = "a"\n[[rules]]\npath = "*"\n'


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('name = "mine"\n\nwieghts = "bf16"', 3, "unknown key 'wieghts'; nearest: weights"),
        ('name = "mine"\nweights = 3', 2, "weights = 3 found; expected a string"),
        ('name = "mine"\ngrads = 3', 2, "grads = 3 found; expected a string or 'none'"),
        ('name = "mine"\nweights = "bf61"', 2, "weights = 'bf61'; tensors are stored as fp32, bf16, fp16"),
        ('# mine\nname = "mine"\nnotes = "one"', 3, "notes = 'one' found; expected a list of strings"),
        ('name = "mine"\nbase = "fp8-delayd"', 2, "unknown recipe 'fp8-delayd'; nearest: fp8-delayed"),
        ('name = "mine"\nloss_scale = 3', 2, "loss_scale = 3 found; expected a table or 'none'"),
        ('name = "mine"\n[loss_scale]\nint = 3', 3, "unknown key of loss_scale 'int'; nearest: init"),
        ('name = "mine"\n[loss_scale]\ninit = 3\ndynamic = 1', 4, "dynamic = 1 found; expected true or false"),
        ('name = "mine"\n[loss_scale]\ndynamic = true\ninit = nan', 4, "loss_scale init = nan; expected a number from"),
        ('name = "mine"\n[loss_scale]\ninit = inf', 3, "loss_scale init = inf; expected a number from"),
        ('name = "mine"\n[loss_scale]\ninit = 1e300', 3, "loss_scale init = 1e+300; expected a number from"),
        ('name = "mine"\n[loss_scale]\ngrowth_interval = 0', 3, "growth_interval = 0; expected an integer"),
        ('name = "mine"\ncodes = 3', 2, "codes = 3 found; expected a table or 'none'"),
        ('name = "mine"\n[codes]\nweight = "mxfp4"', 3, "unknown key of codes 'weight'; nearest: weights"),
        ('name = "mine"\n[codes]\nweights = "x"', 3, "unknown format 'x'"),
        ('name = "mine"\n[codes]\nweights = "mxfp4"\ngrads = "bf16"', 4, "codes grads = bf16: expected codes"),
        ('name = "mine"\n[codes]\nmoments = ["fp16"]', 3, "unknown key of codes 'moments'"),
        ('name = "mine"\n[codes]\ngrads = "mxfp4"', 2, "codes without weights; expected how they are kept"),
        ('name = "mine"\n[codes]\nweights = "mxfp4"', 2, "stores the weights that rules round"),
        ('name = "mine"\nrules = 3', 2, "rules = 3 found; expected an array of tables"),
        ('name = "mine"\nkeep_heads = false', 2, "keep_heads found without [[rules]]"),
        ('summary = ""\nname = "a/b"', 2, "name = 'a/b' found; expected a name of letters"),
        ('summary = "nameless"', 1, 'no name found; expected at least a line such as name = "mine"'),
        ("", 1, "no name found"),
        ('name = "mine"\nmoments = 16', 2, "moments = 16 found; expected a name or a table"),
        ('name = "mine"\nweights = "bf16"\nmaster = "x"', 3, "unknown master 'x'"),
        ('name = "mine"\n[[rules]]\nwhy = "x"', 2, "a rule without a path; expected a glob"),
        (f'{RULE}inptu = "e4m3fn"', 6, "unknown key of a rule 'inptu'; nearest: input"),
        (f'{RULE}input = "e4m3f"', 6, "unknown format 'e4m3f'; nearest: "),
        (f'{RULE}optional = "yes"', 6, "optional = 'yes' found; expected true or false"),
        (f'{RULE}input = {{tile = "row"}}', 6, "an operand without a format"),
        (f"{RULE}output.left = 3", 6, "unknown operand of output 'left'"),
        (f'{RULE}[rules.input]\nformat = "e4m3fn"\ntile = "wide"', 8, "tile = 'wide' found; expected 'tensor', 'row'"),
        (f'{RULE}[rules.input]\nformat = "e4m3fn"\nscale = "rceill"', 8, "unknown scale rule 'rceill'; nearest: rceil"),
        (f'{RULE}[rules.input]\nformat = "e4m3fn"\nrounding = "evn"', 8, "unknown rounding 'evn'"),
        (
            f'{RULE}input = {{format = "e4m3fn", tile = "row"}}',
            6,
            "tile = 'row' found alone; a tile and a scale",
        ),
        (f'{RULE}input = {{format = "e4m3fn", history = 3}}', 6, "unknown key of an operand 'history'"),
        (f'{RULE}weight = {{format = "fp4", estimator = 5}}', 6, "estimator = 5 found; expected a table"),
        (f'{RULE}weight = {{format = "fp4", estimator = {{kk = 5}}}}', 6, "unknown key of estimator 'kk'; nearest: k"),
        (f'{RULE}weight = {{format = "fp4", estimator = {{k = 0.5}}}}', 6, "an estimator with k = 0.5; expected"),
        (f'{RULE}weight = {{format = "mxfp4", clamp = {{quantile = 2}}}}', 6, "a clamp at quantile 2.0; expected"),
        (f'{RULE}weight = {{format = "fp4", clamp = {{}}}}', 6, "clamp 0.99, compensated with scales = None"),
        (f'{RULE}input = {{format = "fp4", estimator = {{}}}}', 4, "estimator k=5 cap=3 for input: expected one for"),
        (
            f'{RULE}[rules.input]\nformat = "e4m3fn"\nscale = "rceil margin=2"',
            8,
            "Options stand beside the name 'rceil': margin=2",
        ),
        (f'{RULE}input = {{format = "mxfp8_e4m3", history = 3}}', 6, "key of an operand with scale 'floor' 'history'"),
        (
            f'{RULE}[rules.input]\nformat = "e4m3fn"\ntile = "tensor"\nscale = "delayed"\nhistory = 1.5',
            10,
            "expected an integer",
        ),
        (
            f'{RULE}[rules.input]\nformat = "e4m3fn"\ntile = "tensor"\nscale = "delayed"\nhistory = 0',
            9,
            "delayed scaling with history 0",
        ),
        (f'{RULE}input = {{format = "e4m3fn", tile = "row", scale = "delayed"}}', 6, "it needs one scale per tensor"),
        ('name = "mine"\n[saved]\noperand = true\n', 3, "unknown key of saved 'operand'; nearest: operands"),
        ('name = "mine"\n[saved]\noperands = false\n', 2, "it keeps nothing; leave it out"),
        ('name = "mine"\n[saved]\noperands = true\n', 2, "no rule rounds inputs so: give such a rule"),
        ('name = "mine"\nbase = "mxfp8"\n[saved]\noperands = true\n', 3, "no rule rounds inputs so"),
        ('name = "mine"\ncommunication = "fp8"\n', 2, "communication = 'fp8' found; expected a table or 'none'"),
        ('name = "mine"\n[communication]\ngradient = "bf16"\n', 3, "unknown key of communication 'gradient'"),
        ('name = "mine"\n[communication]\nreduce = "fp8lm"\n', 2, "neither gradients nor weights"),
        ('name = "mine"\n[communication]\ngradients = "mxfp8_e4m3"\n', 3, "expected fp32, bf16, fp16, or tiles laid"),
        ('name = "mine"\n[communication]\ngradients = "bf16"\nreduce = "ring"\n', 4, "unknown reduce 'ring'"),
        (
            'name = "mine"\n[saved]\nnonlinear = {format = "bf16", residual = true}\n',
            3,
            "are for what an optimizer keeps",
        ),
    ],
)
def test_mistakes_raise_with_the_line_number(write_recipe, text, line, words):
    path = write_recipe(text)
    with pytest.raises(RecipeError) as caught:
        get_recipe(path)
    assert f"{path}, line {line}: " in str(caught.value)
    assert words in str(caught.value)


def test_unreadable_files_and_reserved_names_raise(write_recipe, tmp_path):
    with pytest.raises(RecipeError, match=r"my.toml is not TOML: .*line 2"):
        get_recipe(write_recipe('name = "mine"\nweights = \nmaster = "fp32"'))
    with pytest.raises(RecipeError, match=r"missing.toml cannot be read \(.*expected a recipe's TOML file"):
        get_recipe(str(tmp_path / "missing.toml"))
    with pytest.raises(RecipeError, match=r"'mxfp8' is a recipe that comes with halfstep; give yours another name"):
        get_recipe(write_recipe('name = "mxfp8"'))
    with pytest.raises(RecipeError, match=r"'O2' is a recipe that comes with halfstep"):
        get_recipe(write_recipe('name = "O2"'))
    for base in ('base = "other.toml"', '[[stages]]\nstart = 0.5\nrecipe = "module:other"'):
        with pytest.raises(RecipeError, match=r"base and stages are recipes that come with halfstep"):
            get_recipe(write_recipe(f'name = "mine"\n{base}'))


def test_utf_8_with_a_byte_order_mark_is_read_and_utf_16_raises(tmp_path):
    path = tmp_path / "my.toml"
    path.write_bytes('name = "mine"'.encode("utf-8-sig"))
    assert get_recipe(str(path)).name == "mine"
    path.write_bytes('name = "mine"'.encode("utf-16"))
    with pytest.raises(RecipeError, match=r"my.toml is not UTF-8 text .*save it as UTF-8"):
        get_recipe(str(path))


def test_arguments_that_name_no_recipe_raise(tmp_path):
    for found in (3, None, ["bf16-mixed"], {"name": "mine"}, tmp_path / "my.toml"):
        with pytest.raises(RecipeError, match=r"found; expected a Recipe or text: a name, 'my.toml'"):
            get_recipe(found)
    for name in ("my.json", "my.yaml", str(tmp_path)):
        with pytest.raises(RecipeError, match=r"found; a recipe's file is TOML, and its name ends in .toml"):
            get_recipe(name)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_round_trips_as_data(name):
    assert from_data(json.loads(json.dumps(to_data(get_recipe(name)))), get_recipe) == get_recipe(name)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_round_trips_as_toml(write_recipe, name):
    mine = replace(get_recipe(name), name="mine", aliases=(), float32_modules=("*.wo", 'a "quoted" one'))
    assert get_recipe(write_recipe(to_toml(mine))) == mine


def test_custom_formats_become_data_and_custom_scalings_raise():
    def made(quantizer):
        return Recipe("made", "", "", rules=(Rule("*", LinearSpec(output=Matmul(quantizer))),))

    format = formats.ieee("e8m3", 8, 3, "made up")
    data = json.loads(json.dumps(to_data(made(Quantizer(format)))))
    assert to_data(from_data(data, get_recipe)) == data
    assert from_data(data, get_recipe).rules[0].linear.output.lhs.format.key == format.key

    class Mine(Current):
        pass

    with pytest.raises(RecipeError, match="the scale rule 'current' is one of your own"):
        to_data(made(Quantizer(format, scales=Scales(TENSOR, Mine("current")))))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch does, as it traces
def test_a_scale_rule_keeps_its_options_under_torch_compile(write_recipe):
    """The operator of a traced graph identifies a scale rule by name, beside which its margin is passed."""
    text = "name = 'm'\ncompute = 'bf16'\n[[rules]]\npath = '*'\ninput = {format = 'mxfp8_e4m3', scale = 'rceil'%s}\n"
    found = []
    for margin in (", margin = 12", ""):
        torch._dynamo.reset()
        model = mlp()
        halfstep.apply(model, get_recipe(write_recipe(text % margin)))
        x = torch.randn(12, 8) * torch.logspace(-3, 3, 8)
        found.append(model(x))
        assert_same(torch.compile(model, backend="aot_eager", fullgraph=True)(x), found[-1])
    assert not torch.equal(*found)
