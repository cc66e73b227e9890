"""README and docs are true: examples run, links resolve, and figures equal the saved results."""

import importlib.util
import json
import re
import runpy
import shlex
import statistics
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import typer

import halfstep
from halfstep.cli.app import app


ROOT = Path(__file__).parent.parent
README, DOCS, BENCHMARKS = ROOT / "README.md", ROOT / "docs", ROOT / "benchmarks"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)  # and its output
TRL = (pytest.mark.slow, pytest.mark.filterwarnings("ignore"))  # slow to import, with warnings
LONG = ("integrations.md", "export.md")  # they train with five libraries, and load in a sixth
SERVERS = ("vllm", "llama_cpp")  # blocks for these run only if they are installed
COMMAND = typer.main.get_command(app)
REFUSED = typer.BadParameter.__base__  # click's UsageError; typer bundles its own copy
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "text", re.findall(r"^```toml\n(.*?)^```", (DOCS / "adding_a_recipe.md").read_text(), re.MULTILINE | re.DOTALL)
)
def test_toml_examples_of_adding_a_recipe_are_recipes(text, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert f'name = "{halfstep.get_recipe(str(path)).name}"' in text


def test_table_of_adding_a_recipe_names_recipe_fields():
    page = (DOCS / "adding_a_recipe.md").read_text().split("A contradictory combination")[0]
    named = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert named <= {field.name for field in fields(halfstep.Recipe)}
    assert named >= {"weights", "master", "moments", "codes", "float32_functions", "rules"}


def runs_here(block):
    return all(
        importlib.util.find_spec(name) or not re.search(rf"^(import|from) {name}\b", block, re.MULTILINE)
        for name in SERVERS
    )


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")  # of TRL and PEFT
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=pytest.mark.slow) if p.name in LONG else p for p in PAGES],
    ids=lambda page: page.name,
)
def test_python_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch, capsys):
    """They print the text shown below them, apart from output of the libraries they call."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block, printed in BLOCK.findall(page.read_text()):
        code = compile(block, str(page), "exec")
        if runs_here(block):
            capsys.readouterr()
            exec(code, names)
            lines = iter(capsys.readouterr().out.splitlines())
            assert all(line in lines for line in printed.splitlines()), printed


def test_start_page_shows_the_output_of_its_command(tmp_path, monkeypatch, run):
    page = (DOCS / "start.md").read_text()
    program, expected = (
        BLOCK.findall(page)[0][0],
        re.search(r"^```\n(Your updates .*?)^```", page, re.MULTILINE | re.DOTALL),
    )
    assert len(program.splitlines()) <= 20
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("train.py").write_text(program)
    code, output, _ = run("audit", "train.py")
    assert code == 1
    output, expected = (re.sub(r"\d[\d,.]*", "0", re.sub(r"\s+", " ", text)) for text in (output, expected[1]))
    assert output.startswith(expected)  # the figures depend on the processor


def links(page):
    """The targets of its links and images, including reference definitions and HTML."""
    text = re.sub(r"`[^`\n]*`", "``", FENCED.sub("", page.read_text()))
    defined = re.findall(r"^\[[^]]+\]: *(\S+)", text, re.MULTILINE)
    return [*re.findall(r"\]\(([^)]*)\)", text), *defined, *re.findall(r'(?:href|src)="([^"]*)"', text)]


def anchors(page):
    """GitHub's anchors of a page's headings; the second of two equal headings ends in -1."""
    titles = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    found = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    return {anchor + f"-{n}" * (n > 0) for i, anchor in enumerate(found) if (n := found[:i].count(anchor)) >= 0}


def resolves(page, link):
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return link.startswith("https://") or (target.exists() and (not anchor or anchor in anchors(target)))


def test_links_between_pages_resolve():
    every = [(page, link) for page in [*PAGES, *ROOT.glob("C*.md")] for link in links(page)]
    assert len(every) > 50
    broken = [f"{page.relative_to(ROOT)}: {link}" for page, link in every if not resolves(page, link)]
    assert not broken


def test_broken_link_is_found():
    assert resolves(README, "docs/recipes.md#routers")
    for broken in ("docs/recipe.md", "docs/recipes.md#routes", "#recipes"):
        assert not resolves(README, broken)


def commands(page):
    """The halfstep commands in a page's code blocks, as lists of words; a backslash continues a line."""
    blocks = re.findall(r"^```(?:sh|bash|console)?\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if re.match(r"halfstep( |$)", line)]


def parsed(words):
    """Parse a command's words with the command line's parser, without running it; returns its path and options."""
    name, command, context = "halfstep", COMMAND, None
    while True:
        context = command.make_context(name, list(words), parent=context)
        words = [*context._protected_args, *context.args]
        if not words or not hasattr(command, "resolve_command"):
            return context.command_path, context.params
        name, command, words = command.resolve_command(context, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_of_a_page_parse(page):
    for words in commands(page):
        path, options = parsed(words)
        assert path != "halfstep", words
        given = options.get("recipe", options.get("recipes"))
        named = given.split(",") if isinstance(given, str) else given or []
        for recipe in (each for each in named if not re.search(r"[.:/]|^[A-Z]+$", each)):
            halfstep.get_recipe(recipe)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["start.md", "export.md"])
def test_commands_of_a_page_run(page, tmp_path, monkeypatch, run):
    """In order, on a model in each folder that they name; exit code 1 is the answer no, for a risky cast."""
    hf = importlib.import_module("transformers")
    config = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.chdir(tmp_path)
    for folder in ("my_model", "path/to/checkpoint", "path/to/model", "path/to/base", "path/to/tuned"):
        hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=64, **config)).save_pretrained(folder)
    Path("train.py").write_text(BLOCK.findall((DOCS / "start.md").read_text())[0][0])
    for words in commands(DOCS / page):
        code, output, errors = run(*words)
        assert code in (0, 1), (words, errors)
        assert output


def test_extras_that_pages_install_exist():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        name
        for page in PAGES
        for names in re.findall(r"pip install '[^'[]*\[([\w,]+)\]", page.read_text())
        for name in names.split(",")
    }
    assert "trainer" in named <= extras.keys()


def test_commands_are_found_in_pages_and_wrong_ones_fail_to_parse():
    assert sum(len(commands(page)) for page in PAGES) > 60
    assert parsed(["kb", "check", "google/flan-t5-xxl", "--use", "fp16"])[1]["use"] == "fp16"
    for wrong in (
        "kb chek a",
        "inspect PATH --quik",
        "memory gpt2 --dp many",
        "kb export --format pdf",
        "formats compare bf16",
    ):
        with pytest.raises(REFUSED):
            parsed(wrong.split())


def test_files_and_functions_of_the_design_page_exist():
    page, package = (DOCS / "design.md").read_text(), Path(halfstep.__file__).parent
    files = set(re.findall(r"`(\w+/[\w/]+\.py)`", page))
    assert len(files) > 20
    assert not [file for file in files if not (package / file).exists() and not (ROOT / file).exists()]
    named = re.findall(r"`([\w/]+\.py)`, `(\w+)`", page)
    assert len(named) > 10
    assert not [(file, name) for file, name in named if f"def {name}(" not in (package / file).read_text()]


def test_index_lists_every_page_once():
    outside = ["../CHANGELOG.md", "../CONTRIBUTING.md", "../README.md"]
    pages = [page.name for page in DOCS.glob("*.md") if page.name != "README.md"]
    assert sorted(links(DOCS / "README.md")) == sorted([*outside, *pages])


def test_readme_is_short():
    assert len(README.read_text().split()) < 700


def rows(page):
    """The rows of a page's tables that start with a name in code, by that name; the first of duplicates."""
    found = {}
    for line in page.read_text().splitlines():
        if line.startswith("| `"):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            found.setdefault(name.strip("`"), cells)
    return found


def test_readme_recipes_agree_with_the_demo():
    front, demo = rows(README), rows(DOCS / "demo.md")
    assert len(front) == 5
    for name, (_, bytes_per_parameter, result) in front.items():
        verdict, _, gap, bytes_in_demo, _ = demo[name]
        *gap_in_front, word = result.split(", ")
        assert (bytes_per_parameter, gap_in_front) == (bytes_in_demo, [gap] if gap else [])
        assert verdict.strip("*").startswith(word)


def test_readme_figures_equal_the_linked_pages():
    words = " ".join(README.read_text().split())
    assert "`bf16-mixed` step takes 0.36 of torch.autocast's time on a CPU without native bf16 and 0.98" in words
    benchmarks = (DOCS / "benchmarks.md").read_text()
    emulated, native = benchmarks.split("## On a CPU with native bf16")
    assert "| `bf16-mixed`, a step | torch.autocast, fused AdamW | 0.36 |" in emulated
    assert "| `bf16-mixed` | torch.autocast bf16 | 0.98 (" in native
    assert "`fp8-delayed`, `fp8-current`, `fp8-block` and `mxfp8` end within 0.1% of fp32's loss" in words
    fp8 = rows(DOCS / "fp8.md")
    assert all(
        abs(float(fp8[name][2].strip("%"))) <= 0.1 for name in ("fp8-delayed", "fp8-current", "fp8-block", "mxfp8")
    )


@pytest.mark.parametrize(
    ("page", "module", "function", "figures"),
    [
        ("fp8.md", "fp8", "page", "fp8.json"),
        ("fp4.md", "fp4_page", "page", "fp4.json"),
        ("domains.md", "domains", "page", "domains.json"),
        (
            "which_bf16.md",
            "which_bf16_page",
            "which_bf16",
            "which_bf16.json ledger_betas.json which_bf16_finetune.json",
        ),
        ("zeroed.md", "which_bf16_page", "zeroed", "which_bf16.json"),
        ("inference.md", "inference", "table", "inference.json"),
        ("inference.md", "batch_mates", "table", "batch_mates.json"),
        ("benchmarks.md", "quantize_tables", "markdown", "quantize.json"),
        ("inspect.md", "inspect_page", "speed", ""),
        ("scales.md", "scales", "table", "scales.json"),
        ("distributed.md", "wire", "tables", "wire.json"),
        ("distributed.md", "reductions", "table", "reductions.json"),
        ("memory.md", "memory_page", "section", "memory.json finetune.json"),
        ("using.md", "muon", "table", "muon.json"),
        ("inference.md", "kv_cache", "table", "kv_cache.json"),
        ("recipes.md", "experts", "table", "experts.json"),
        ("recipes.md", "experts", "trained", "moe.json"),
        pytest.param("mismatch.md", "grpo", "table", "grpo.json", marks=TRL),
    ],
)
def test_page_shows_the_saved_figures(page, module, function, figures, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    write = getattr(importlib.import_module(module), function)
    kept = [json.loads((BENCHMARKS / "results" / file).read_text()) for file in figures.split()]
    assert write(*kept) in (DOCS / page).read_text()


def test_inference_page_recommends_recipes_as_measured():
    """One sentence names the recipes whose logits were independent of the rest of the batch, one those that depend."""
    distances = json.loads((BENCHMARKS / "results" / "batch_mates.json").read_text())["distances"]
    moved = {name for name, found in distances.items() if max(found["16 rows"], found["128 rows"]) > 1e-3}
    still = {name for name in distances if name not in moved}
    page = (DOCS / "inference.md").read_text()
    title, text = re.split(r"^## (.*)$", page, flags=re.MULTILINE)[1:3]
    assert title == "Which recipe to serve"
    first, depends, shared, *_ = re.split(r"(?<=\.)\s", text.strip())
    assert "scales each row" in first
    assert "do not depend on the rest of its batch" in " ".join(depends.split())
    advised, warned = (set(re.findall(r"`([\w-]+)`", sentence)) for sentence in (first, shared))
    assert advised < still
    assert (
        advised | {"fp32", "bf16", "mxfp4"} == still
    )  # unrounded weights, and the recipe that loses most of the servable ones
    assert warned == moved
    assert distances["mxfp4"]["KV cache"] == max(distances[name]["KV cache"] for name in still)


def test_only_images_are_tracked_as_binary_files():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("no checkout of git")
    tracked = [ROOT / name for name in listed.stdout.splitlines() if not re.match(r"docs/images/.*\.png$", name)]
    assert not [str(path) for path in tracked if path.exists() and b"\0" in path.read_bytes()[:8192]]


def scripts():
    """The files that are run as programs."""
    every = [path for folder in ("benchmarks", "examples", "docs") for path in sorted((ROOT / folder).glob("*.py"))]
    return [path for path in every if 'if __name__ == "__main__":' in path.read_text()]


def test_scripts_parse_their_options():
    assert len(scripts()) > 30
    unread = [
        path.name for path in scripts() if not re.search(r"parse_args\(|ArgumentParser|keeps\(", path.read_text())
    ]
    assert not unread


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("script", scripts(), ids=lambda path: path.name)
def test_scripts_show_help_and_reject_unknown_options(script, monkeypatch, capsys):
    monkeypatch.syspath_prepend(script.parent)
    for beside in script.parent.glob("*.py"):  # a test's module may have the name of one that the script imports
        monkeypatch.delitem(sys.modules, beside.stem, raising=False)
    for argument, code in (("--help", 0), ("--halp", 2)):
        monkeypatch.setattr("sys.argv", [str(script), argument])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
        assert ended.value.code == code
    assert f"usage: {script.name}" in capsys.readouterr().out


@pytest.mark.slow  # test_prepare.py has the fast test, with one weight
def test_example_of_lost_updates_gives_the_exact_results():
    ends = runpy.run_path(str(ROOT / "examples" / "lost_updates.py"))["main"]()
    assert ends["fp32"] == ends["bf16-master"] == 0.0
    assert ends["bf16-nomaster"] == ends["fp16-pure"] == 1.0
    assert abs(ends["bf16-stochastic"]) < 0.01


@pytest.mark.slow  # takes seconds
@pytest.mark.filterwarnings("ignore:.*Enum subclass:UserWarning")  # torchao's, raised when transformers imports it
@pytest.mark.parametrize("study", ["ibp", "switch", "balance", "decoding", "compressed", "foa", "mosaicbert"])
def test_study_of_a_paper_resumes(study, tmp_path, capsys, monkeypatch):
    if study == "foa":
        pytest.importorskip("cma")
    papers = ROOT / "examples" / "papers"
    monkeypatch.syspath_prepend(papers)
    printed = []
    for _ in range(2):
        out = str(tmp_path / f"{study}.json")
        monkeypatch.setattr(sys, "argv", [f"{study}.py", "--quick", "--seeds", "2", "--out", out])
        runpy.run_path(str(papers / f"{study}.py"), run_name="__main__")
        printed.append(capsys.readouterr().out)
    assert printed[0].endswith(printed[1]), "finished runs are kept"
    assert (tmp_path / f"{study}.png").exists()


def test_page_of_papers_shows_the_saved_figures():
    page = (DOCS / "papers.md").read_text()
    ibp, switch, balance = (
        json.loads((BENCHMARKS / "results" / f"{study}.json").read_text()) for study in ("ibp", "switch", "balance")
    )
    found = [run["verified_error"] for name, run in ibp["runs"].items() if name.startswith("fp32, three fixes")]
    assert f"| {statistics.fmean(found):.3f} (0.581 to 0.747) |" in page
    outward = [
        run["bf16 outward"]["broken"] for name, run in ibp["runs"].items() if name.startswith("fp32, three fixes")
    ]
    assert outward == [0.0] * 8
    for way in balance["means"]:
        bits = [run["bits"] for name, run in balance["runs"].items() if name.startswith(f"{way}, seed")]
        assert f"{statistics.fmean(bits):.3f} (" in page
    for losses in switch["ends"].values():
        assert f"{statistics.fmean(losses):.3f} (" in page


@pytest.mark.parametrize("architecture", ["llama", "falcon"])
def test_divergence_of_quantized_models_falls_with_temperature(architecture):
    runs = json.loads((BENCHMARKS / "results" / "decoding.json").read_text())["runs"]
    runs = [run for name, run in runs.items() if name.startswith(f"{architecture}, seed")]
    for run in runs:
        for name, falling in run["kl"].items():
            assert falling == sorted(falling, reverse=True), name
            assert name.endswith("int8") or falling[0] > run["kl"]["int8"][0]
    mean = statistics.fmean(1e3 * run["kl"]["nf4"][4] for run in runs)
    assert f"| {mean:.3g} (" in (DOCS / "papers.md").read_text()


def test_errors_of_compressed_weights_equal_a_float64_reference():
    kept = json.loads((BENCHMARKS / "results" / "compressed.json").read_text())
    expected = {
        "bf16": 1.659e-3, "e5m2": 5.299e-2, "e4m3fn": 2.643e-2, "posit8_0": 9.835e-3, "posit8_1": 1.3290e-2,
        "posit8_2": 2.6433e-2, "posit16_1": 5.25e-5, "posit16_2": 1.048e-4,
    }  # fmt: skip
    for name, error in expected.items():
        found = kept["runs"]["errors, seed 0"][name]
        assert found["error"] == pytest.approx(error, rel=1e-3), name
        assert found["bytes"] == (0.5 if name in ("bf16", "posit16_1", "posit16_2") else 0.25)
        assert found["same bits"]
    page = (DOCS / "papers.md").read_text()
    for crossing in kept["apart"].values():
        assert f"{crossing['measured'] / 1e6:.2f}" in page
        assert f"{crossing['predicted'] / 1e6:.2f}" in page
        assert max(abs(crossing["low"]), abs(crossing["high"])) < 0.25


def test_example_of_a_custom_loop_learns():
    example = runpy.run_path(str(ROOT / "examples" / "own_loop.py"))["main"]
    assert example("bf16-stochastic", steps=60) < 0.5


@pytest.mark.parametrize("recipe", ["fp16-mixed", pytest.param("bf16-master", marks=pytest.mark.slow)])
def test_example_of_the_nanogpt_loop_learns(recipe):
    assert runpy.run_path(str(ROOT / "examples" / "nanogpt_loop.py"))["main"](recipe, max_iters=40) < 1.2


def test_example_of_a_quantized_model_equals_the_trained_one():
    trained, loaded = runpy.run_path(str(ROOT / "examples" / "quantized.py"))["main"](steps=40)
    assert trained == loaded < 0.4
