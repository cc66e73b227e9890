"""The GPU benchmark without a GPU: sections run at tiny sizes, bars find their rows, and failures are handled."""

import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from families import slow_unless


ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
QUICK = ("probes", "casts", "optimizers", "products")


@pytest.fixture
def load(monkeypatch):
    """A function that imports a module of the benchmark by name."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return lambda name: importlib.import_module(f"on_gpu.{name}" if name != "gpu" else "gpu")


@pytest.fixture
def bench(load):
    """A function that makes a bench on the CPU, with a timer that only calls, and an hour of time."""

    def make(timer=None, **options):
        call = load("__main__").untimed
        return load("bench").Bench(CPU, timer or call, time.monotonic() + 3600, load("bench").TINY, **options)

    return make


def run_sections(load, bench, path, sections):
    """The rows that the sections wrote, by section and row."""
    journal = load("journal").Journal(path / "rows.jsonl")
    for section in sections:
        assert load("bench").run(section, load("__main__").rows_of(section), bench, journal)
    return journal.rows()


def missing_bars(load, rows, sections, absent=()):
    """The bars of those sections without a figure, unless a peer is missing that a dry run does not call."""
    names = {name for section, name in rows if section in sections}
    verdicts = load("bars").judge({name: row for (_, name), row in load("table").compared(rows).items()}, "NVIDIA H100")
    missing = [v for v in verdicts if v.bar.row in names and v.word == "not measured" and v.bar.row not in absent]
    excused = "made, not called", "No module named 'triton'"
    return [(v.bar.row, v.bar.measure, v.why) for v in missing if not any(words in v.why for words in excused)]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # warnings of imported peers
def test_sections_give_the_figures_of_their_bars(load, bench, tmp_path):
    rows = run_sections(load, bench(), tmp_path, QUICK)
    failed = {name: row["failed"] for (_, name), row in rows.items() if "failed" in row}
    kernels = {name for name, why in failed.items() if "No module named 'triton'" in why}
    assert all(name.startswith(("two layouts: ", "codes: bf16 to E4M3, by integers")) for name in kernels)
    hopper = {"product: 1x128 by 128x128"}  # torch has that matmul on Hopper only
    assert set(failed) - kernels == hopper, failed
    assert "Invalid scaling configuration" in failed["product: 1x128 by 128x128"]
    assert not missing_bars(load, rows, QUICK, kernels | hopper)


def test_every_bar_belongs_to_a_row(load, bench):
    main, bars, here = load("__main__"), load("bars"), bench(exhaustive=True)
    names = {row.name: section for section in main.SECTIONS for row in main.rows_of(section)(here)}
    assert all(names[bar.row] == bars.SECTIONS[bar.row.partition(":")[0]] for bar in bars.BARS)
    assert "all patterns: float8_e4m3fn, nearest_even" in names


@pytest.mark.slow
def test_training_runs_under_every_recipe(load, bench, tmp_path):
    rows = run_sections(load, bench(), tmp_path, ["training"])
    assert not [row for row in rows.values() if "failed" in row]
    assert not missing_bars(load, rows, ["training"])
    assert all(row["measures"]["largest gap"] < 0.02 for (_, name), row in rows.items() if name.startswith("twin: "))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_command_fails_and_writes_nothing(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--out", tmp_path / "rows"]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 2
    assert "nothing can be measured" in told.stderr
    assert not (tmp_path / "rows").exists()


def interpreted(*words):
    """The output of a command under Triton's interpreter."""
    triton = ROOT / ".triton" / "3.7.1"
    if not triton.exists():
        pytest.skip(f"no triton in {triton}: `make gpu-proofs` fetches it")
    places = os.pathsep.join(str(place) for place in (ROOT / "benchmarks", ROOT / "src", triton))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": places}
    told = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    return told.stdout


@pytest.mark.slow
def test_the_command_runs_under_the_interpreter(tmp_path):
    command = [ROOT / "benchmarks" / "gpu.py", "--dry", "--minutes", "20", "--out", tmp_path]
    assert "DRY RUN" in interpreted(*command, "--sections", "machine,casts")
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert not [row for row in found["rows"] if "failed" in row]
    assert {bar["verdict"] for bar in found["bars"]} == {"dry run"}


@pytest.mark.slow
def test_a_share_of_the_cases_runs_in_its_own_process(load):
    lines = interpreted("-m", "on_gpu.cases", "cpu", "0", "40").splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    asked = load("cases").TESTS[0::40]
    assert [(each["kernel"], each["format"]) for each in found] == [(test.kernel, test.format) for test in asked]
    assert all(each["compared"] and each["difference"] is None for each in found)


def test_race_computes_ratios_to_peers_and_to_a_copy(load, bench):
    ours, theirs = lambda: "ours", lambda: "theirs"
    ms = {"ours": 2.0, "theirs": 4.0}
    here = bench(lambda call: ms.get(value, 0.5) if isinstance(value := call(), str) else 0.5)
    copied = here.sizes.copied
    found = load("bench").race(here, ours, {"them": lambda: theirs, "none": lambda: 1 / 0}, traffic=4 * copied)
    assert found["measures"] == {"to them": 0.5, "of copy": 0.5}  # traffic of 4 in 2 ms; the copy moves 2 in 0.5 ms
    assert found["left_out"] == {"none": "ZeroDivisionError: division by zero"}
    assert found["ms"] == {"ours": 2.0, "them": 4.0, "copy": 0.5}


def test_bars_are_judged_only_for_their_shape_and_device(load):
    judge, name = load("bars").judge, "cast: bf16, stochastic"

    def word(device, value, shape="2^30"):
        rows = {name: {"measures": {"of copy": value}, "shape": shape}}
        return next(v.word for v in judge(rows, device) if v.bar.row == name)

    assert (word("NVIDIA H100 80GB HBM3", 0.70), word("NVIDIA H100 80GB HBM3", 0.69)) == ("met", "missed")
    assert (word("NVIDIA H200", 0.69), word("NVIDIA H200", 0.54)) == ("met", "missed")
    assert (word("NVIDIA A100", 0.9), word("NVIDIA H100", 0.9, "2^28")) == ("not judged", "not judged")
    left = {
        "cast: float32, stochastic": {
            "measures": {},
            "left_out": {"torchao's bf16 stochastic rounding, compiled": "none"},
        }
    }
    found = {(v.bar.row, v.bar.measure): (v.word, v.why) for v in judge(left, "NVIDIA H100")}
    peer = "to torchao's bf16 stochastic rounding, compiled"
    assert found["cast: float32, stochastic", peer] == ("not measured", "none")
    assert found[name, "of copy"] == ("not measured", "time was up before it")
    most = {"host: optimizer.step() over 300 tensors": {"measures": {"ms": 0.6}, "shape": "300 tensors"}}
    assert next(v.word for v in judge(most, "NVIDIA H100") if v.bar.measure == "ms") == "missed"


def test_missed_bars_come_first_in_the_table(load):
    rows = {
        ("machine", "versions"): {"gpu": "NVIDIA H100 80GB HBM3"},
        ("casts", "cast: bf16 to bf16, nearest"): {"measures": {"of copy": 0.95}, "shape": "2^30"},
        ("casts", "cast: bf16, stochastic"): {"measures": {"of copy": 0.5}, "shape": "2^30"},
        ("correctness", "kernels"): {"result": "8 of 8"},
    }
    found = load("table").summary(rows, False, ["casts"])
    lines = [line for line in found["text"].splitlines() if line.startswith(("missed", "not measured", "met"))]
    assert " ".join(lines[0].split()) == "missed cast: bf16, stochastic of copy 0.5 >= 0.7 [36 instructions an element]"
    assert lines[-1].startswith("met ")
    assert "cast: bf16 to bf16, nearest" in lines[-1]
    assert len(lines) == len(load("bars").BARS) == len(found["bars"])


def test_recipes_of_one_shape_are_compared_with_bf16_mixed(load):
    def row(tokens, shape="318M", **more):
        return {"measures": {"tokens/s": tokens, **more}, "shape": shape}

    measured = {
        "bf16-mixed": row(100, **{"largest batch": 32}),
        "coat": row(150, **{"largest batch": 64}),
        "fp32": row(10, "85M"),
    }
    rows = {("training", f"train: {name}"): found for name, found in measured.items()}
    found = {name: row["measures"] for (_, name), row in load("table").compared(rows).items()}
    assert found["train: coat"]["times bf16-mixed"] == 1.5
    assert found["train: coat"]["largest batch, times bf16-mixed"] == 2
    assert "times bf16-mixed" not in found["train: fp32"]
    assert "times bf16-mixed" not in rows["training", "train: coat"]["measures"]


def test_rows_that_raise_or_end_their_process_are_recorded_as_failed(load, bench, tmp_path):
    row, journal = load("bench").Row, load("journal").Journal(tmp_path / "rows.jsonl")
    journal.begin("any", "killed")
    with journal.path.open("a") as file:
        file.write('{"section": "any", "row": "cut o')

    def rows(bench):
        yield row("killed", lambda: pytest.fail("a row that ended its process is not measured again"))
        yield row("raises", lambda: torch.zeros(2) @ torch.zeros(3))
        yield row("works", lambda: {"measures": {"x": 1}})

    with journal.path.open("a") as file:
        file.write("\n")
    assert load("bench").run("any", rows, bench(), journal)
    found = journal.rows()
    assert "it took the process down" in found["any", "killed"]["failed"]
    assert found["any", "raises"]["failed"].startswith("RuntimeError: ")
    assert found["any", "works"]["measures"] == {"x": 1}


def test_rows_of_correctness_leave_time_for_later_ones(load, bench, monkeypatch):
    """Of 100 s, with rows that use all the time they get."""
    module, given = load("correctness"), {}
    now = [0.0]
    here = load("bench").Bench(CPU, load("__main__").untimed, 100.0, load("bench").TINY, now=lambda: now[0])

    def taken(name):
        def takes(bench, *_):
            given[name] = bench.left
            now[0] = bench.ends
            return {}

        return takes

    for name in ("kernels", "exhaustive", "_tests", "_sanitized"):
        monkeypatch.setattr(module, name, taken(name))
    for row in module.rows(here):
        row.measure()
    assert given["kernels"] == pytest.approx(55)
    assert given["_tests"] > 15
    assert given["_sanitized"] > 5


@pytest.mark.parametrize(("fits", "expected"), [(4, {"largest batch": 16}), (99, {"largest batch, at least": 64})])
def test_the_largest_batch_is_doubled_until_memory_or_time_is_up(load, fits, expected, monkeypatch):
    module, made = load("training"), []

    def stepping(device, model, recipe, corpus):
        made.append(model.batch)
        if len(made) > fits:
            raise torch.OutOfMemoryError
        return lambda: None

    monkeypatch.setattr(module, "stepping", stepping)
    assert module.largest(ticking(load, 6), module.SMALL, "fp32", None) == expected


def ticking(load, seconds):
    """A bench whose clock advances by a second at each reading."""
    now = itertools.count().__next__
    return load("bench").Bench(CPU, load("__main__").untimed, float(seconds), load("bench").TINY, now=now)


def test_a_section_stops_between_rows_and_within_a_row_when_time_is_up(load, tmp_path):
    row, journal = load("bench").Row, load("journal").Journal(tmp_path / "rows.jsonl")
    endless = (row(str(number), dict) for number in itertools.count())
    assert load("bench").run("any", lambda bench: endless, ticking(load, 10), journal)
    assert 2 <= len(journal.rows()) <= 5
    told = load("correctness").exhaustive(ticking(load, 2), "float8_e4m3fn", "nearest_even")["result"]
    assert told == "2,048 of 3,072 patterns compared, 0 differ; stopped: time was up"


def test_exhaustive_compares_the_gpus_conversion_instruction(load, bench, monkeypatch):
    """With the reference; and a wrong code is found."""
    module, wrong = load("correctness"), []

    def run_codes(x, out, format, rounding, overflow, seed, by_integers):
        assert by_integers
        out.copy_(module.quant.encode(x, format, rounding, overflow, seed))
        if wrong:
            out[x.view(torch.int32) == 1025] += 1

    monkeypatch.setattr(module.cast, "instruction", lambda format, rounding, *_: "e5m2")
    monkeypatch.setattr(module.cast, "run_codes", run_codes)
    found = module.exhaustive(bench(), "float8_e5m2", "nearest_even")["result"]
    assert found == "3,072 of 3,072 patterns compared, 0 differ; 3,072 by cvt (e5m2) and by integers"
    wrong.append(True)
    found = module.exhaustive(bench(), "float8_e5m2", "nearest_even")["result"]
    assert "the first at 0x00000401" in found


def test_the_row_of_codes_times_the_conversion_instruction(load, monkeypatch):
    module, asked = load("casts"), []
    monkeypatch.setattr(module.cast, "instruction", lambda format, *_: "e4m3")
    monkeypatch.setattr(module.cast, "run_codes", lambda *_, by_integers: asked.append("integers"))
    monkeypatch.setattr(module.halfstep, "encode", lambda *_, out: asked.append("encode"))
    x = SimpleNamespace(is_cuda=True, device=CPU, shape=(2,))
    for made in (module._by_conversion, module._by_integers):
        made(x)()
    assert asked == ["encode", "integers"]
    monkeypatch.setattr(module.cast, "instruction", lambda format, *_: None)
    with pytest.raises(LookupError, match=r"from compute capability 8\.9 on"):
        module._by_conversion(x)


def test_exhaustive_finds_one_wrong_pattern(load, bench, monkeypatch):
    module = load("correctness")
    right = module.halfstep.encode

    def wrong(x, *options, **named):
        found = right(x, *options, **named)
        return found.where(x.view(torch.int32) != 1025, found + 1)

    monkeypatch.setattr(module.halfstep, "encode", wrong)
    found = module.exhaustive(bench(), "float8_e5m2", "nearest_even")["result"]
    assert found == "2,048 of 3,072 patterns compared, 1 differ; 1 differ in one chunk, the first at 0x00000401"
    last = module.patterns(2**32 - 2, 2, CPU).view(torch.int32).tolist()
    assert last == [-2, -1]


def test_probe_reports_how_a_matmul_accumulates(load, bench):
    """One that ignores every term after the first, and an exact one."""
    found = load("probes").probe(CPU, lambda lhs, rhs: lhs[:, :1] @ rhs[:1], 512)
    assert found["measures"] == {"fraction bits": 0, "products that a large one swamps": 511}
    exact = load("probes").probe(CPU, load("probes").half, 512)
    assert exact["measures"] == {"fraction bits": 23, "products that a large one swamps": 0}


BYTES = {
    "fp32": 28, "bf16-master": 28, "bf16-split": 26, "bf16-kahan": 26, "bf16-stochastic": 22, "bf16-collage-light": 18,
    "bf16-collage-plus": 22, "bf16-pure": 14, "AdamWFp8": 10.0625, "AdamW8bit": 10.0625,
}  # fmt: skip


@pytest.mark.quick("fp32-28", "bf16-split-26", "bf16-collage-plus-22")
@pytest.mark.parametrize(
    ("name", "expected"),
    slow_unless(lambda case: case[0] in ("fp32", "bf16-split", "bf16-collage-plus", "AdamW8bit"), BYTES.items()),
)
def test_a_step_moves_the_bytes_that_its_bar_assumes(load, bench, name, expected):
    steps = load("steps")
    kind = getattr(steps, name) if name.startswith("Adam") else steps.get_recipe(name)
    optimizer = steps.ours(bench(), [(64, 128)], kind)
    optimizer.step()
    assert steps.moved(optimizer) / (64 * 128) == expected


def test_models_have_the_sizes_of_their_names_and_sides_for_native_matmuls(load):
    training, llamas = load("training"), load("llamas")
    sizes = {}
    for model in (*training.MODELS, training.LARGE, load("twin").TWIN):
        with torch.device("meta"):
            network = llamas.Llama(256, model.context, model.layers, model.width, model.heads)
        sizes[model.name.split(",")[0]] = sum(p.numel() for p in network.parameters()) / 1e6
        sides = {side for p in network.parameters() if p.dim() == 2 for side in p.shape}
        assert all(side % 16 == 0 for side in sides), (model, sides)
        assert all(side % 128 == 0 for side in sides), (model, sides)
        assert model.width % (16 * model.heads) == 0
    assert {name: round(size) for name, size in sizes.items()} == {"318M": 319, "85M": 85, "1B": 974, "10.8M": 11}


def test_unused_time_goes_to_later_sections_and_lost_processes_are_restarted(load, monkeypatch, tmp_path):
    gpu, ran, journal = load("gpu"), [], load("journal").Journal(tmp_path / "rows.jsonl")
    codes, now = iter([0, 1, 1, 1, 0]), [0.0]

    def section(name, options, seconds, told):
        ran.append((name, seconds))
        now[0] += 1.0
        if len(ran) < 4:
            journal.begin(name, f"row {len(ran)}")  # the fourth process dies before its first row, so there is no fifth
        return next(codes), "what it said"

    monkeypatch.setattr(gpu, "_run", section)
    gpu.measure(["machine", "casts", "training"], [], journal, 1000 + gpu.GRACE, lambda: now[0])
    assert [name for name, _ in ran] == ["machine", "casts", "casts", "casts", "training"]
    assert ran[0][1] == pytest.approx(1000 * 10 / 190)
    assert ran[1][1] == pytest.approx(999 * 60 / 180)
    assert ran[4][1] == pytest.approx(996)
    found = journal.rows()
    assert found["casts", "its process"]["failed"] == "its process ended with exit code 1: what it said"
    text = load("table").summary(found, False, ["casts"])["text"]
    assert "casts: its process ended with exit code 1: what it said" in text
    bars = [line for line in text.splitlines() if line.startswith("not measured")]
    assert sum("what it said" in line for line in bars) == sum(
        load("bars").SECTIONS[bar.row.partition(":")[0]] == "casts" for bar in load("bars").BARS
    )
    monkeypatch.setattr(gpu, "_run", lambda *_: (0, ""))
    gpu.measure(["casts"], [], journal, now[0] + 100, lambda: now[0])
    assert "what it said" not in load("table").summary(journal.rows(), False, ["casts"])["text"]


@pytest.mark.slow
def test_a_section_that_cannot_start_does_not_stop_others(tmp_path):
    """Without numba the sections that do not need it run; the others and their bars report what is missing."""
    stub = tmp_path / "numba.py"
    stub.write_text("raise ModuleNotFoundError(\"No module named 'numba'\")")
    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", "--dry", "--minutes", "20", "--out", tmp_path / "rows"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    asked = ["--sections", "machine,probes,casts,optimizers"]
    told = subprocess.run([*command, *asked], env=environment, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    found = json.loads((tmp_path / "rows" / "gpu.json").read_text())
    assert not [row for row in found["rows"] if row["section"] in ("machine", "probes") and "failed" in row]
    assert {row["section"] for row in found["rows"]} == {"machine", "probes", "casts", "optimizers"}
    why = "its process ended with exit code 1: ModuleNotFoundError: No module named 'numba'"
    assert {f"{section}: {why}" for section in ("casts", "optimizers")} <= set(told.stdout.splitlines())
    assert "sums: bf16: " in told.stdout
    reasons = {bar["row"].partition(":")[0]: bar["why"] for bar in found["bars"]}
    assert reasons["cast"] == reasons["adamw"] == why
    assert reasons["linear"] == "time was up before it"
    assert "Traceback" in (tmp_path / "rows" / "casts.err").read_text()


def test_ending_a_process_ends_its_children(load):
    start = "child = subprocess.Popen(['sleep', '60'])"
    nested = f"import subprocess, time; {start}; print(child.pid, flush=True); time.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", nested], start_new_session=True, stdout=subprocess.PIPE, text=True)
    started = child.stdout.readline().strip()
    load("gpu").ended(child)
    child.stdout.close()
    assert child.returncode is not None
    status = Path(f"/proc/{started}/status")
    for _ in range(1000):  # the signal was sent; the process ends once it is scheduled again
        if not status.exists() or "Z (zombie)" in status.read_text():
            return
        time.sleep(0.01)
    pytest.fail("the child process is still running")


def test_gpu_figures_md_lists_the_current_bars_sections_and_results(load):
    page = (ROOT / "docs" / "gpu_figures.md").read_text()
    assert load("bars").expectations() in page
    for card in ("h100", "h200"):
        kept = json.loads((ROOT / "benchmarks" / "results" / f"gpu_{card}.json").read_text())
        assert load("table").page(kept) in page
    weights = load("gpu").WEIGHTS
    assert list(weights) == list(dict.fromkeys(name for name in weights if f"| {name} | {weights[name]} |" in page))
    assert set(weights) == set(load("__main__").SECTIONS)
    assert f"{len(load('bars').BARS)} bars" in (ROOT / "CHANGELOG.md").read_text()
