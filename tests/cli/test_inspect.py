"""`halfstep inspect`: verdicts, escaped names, files written whole or not at all, bad arguments."""

import json
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file


HOSTILE = "evil\x1b[31m\u202e<script>alert(1)</script>"


@pytest.fixture
def folder(tmp_path):
    """bf16 weights stored as float16, in a Hugging Face folder of a model that the knowledge base has."""
    path = tmp_path / "model"
    path.mkdir()
    weights = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(96, 64).bfloat16().half() for i in range(2)}
    weights |= {"model.norm.weight": torch.ones(64).half(), HOSTILE: torch.randn(8, 8).half()}
    save_file(weights, path / "model.safetensors")
    config = {"torch_dtype": "float16", "_name_or_path": "lvwerra/codeparrot", "model_type": "gpt2"}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_verdict_contradictions_and_knowledge_base(run, folder):
    code, out, _ = run("inspect", str(folder))
    assert code == 0
    assert re.search(
        r"verdict \(certain\): mixed by role\. mlp: stored float16, .*every value exactly bf16: cast from bf16", out
    )
    assert "contradiction: config.json says float16; the bits say bf16 origin" in out
    assert re.search(
        r"contradiction: the knowledge base \(inferred, base model: .*\) says trained in fp16; the bits say bf16", out
    )
    assert re.search(r"^mlp +2 +12,288 +fp16 +bf16 +8 ", out, re.MULTILINE)


def test_folder_name_does_not_identify_the_model(run, tmp_path, monkeypatch):
    """A folder named like a model of the knowledge base, with other weights inside."""
    (tmp_path / "gpt2").mkdir()
    np.savez(tmp_path / "gpt2" / "w.npz", w=np.ones((8, 8), np.float32))
    monkeypatch.chdir(tmp_path)
    assert json.loads(run("inspect", "gpt2/w.npz", "--json")[1])["known"] is None


def test_control_characters_in_names_are_escaped(run, folder):
    for options in ((), ("--tensors",)):
        _, out, err = run("inspect", str(folder), *options)
        assert "\x1b[31m" not in out + err
        assert "\u202e" not in out + err
    assert r"evil\x1b[31m\u202e" in out


def test_json_has_every_tensor(run, folder):
    data = json.loads(run("inspect", str(folder), "--json", "--what-if", "bf16,mxfp4")[1])
    assert data["schema"] == 1
    assert data["verdict"]["confidence"] == "certain"
    assert data["config_dtype"] == "float16"
    assert len(data["tensors"]) == 4
    tensor = next(t for t in data["tensors"] if t["name"] == "model.layers.0.mlp.up_proj.weight")
    assert (tensor["origin"]["key"], tensor["role"], tensor["statistics"]["values"]) == ("bf16", "mlp", 96 * 64)
    assert [cast["format"] for cast in data["casts"]] == ["bf16", "mxfp4"]
    assert data["casts"][1]["worst"][0]["sqnr"] < 25


def test_quick_option(run, folder):
    code, out, _ = run("inspect", str(folder), "--quick")
    assert code == 0
    assert "every value exactly bf16" in out
    assert "verdict (not counted)" in out


@pytest.mark.parametrize("formats", ["bf16,nvfp4", pytest.param("all", marks=pytest.mark.slow)])
def test_what_if_option_lists_costs_of_casts(run, folder, formats):
    _, out, _ = run("inspect", str(folder), "--what-if", formats)
    assert re.search(r"^bf16 +", out, re.MULTILINE)
    assert re.search(r"^nvfp4 +\d+\.\d ", out, re.MULTILINE)


def test_written_cast_reports_overflow_and_underflow(run, tmp_path):
    save_file({"w": torch.full((4, 4), 1e6), "v": torch.full((4,), 1e-9)}, tmp_path / "in.safetensors")
    code, out, _ = run(
        "inspect", str(tmp_path / "in.safetensors"), "--to", "fp16", "--out", str(tmp_path / "out.safetensors")
    )
    assert code == 0
    assert "2 tensors cast, 0 copied" in out
    assert "16 values were too large for the type" in out
    assert "4 values became zero" in out
    assert load_file(tmp_path / "out.safetensors")["w"].isinf().all()


def test_html_and_plot_options(run, folder, tmp_path):
    pytest.importorskip("matplotlib")
    run(
        "inspect",
        str(folder),
        "--html",
        str(tmp_path / "r.html"),
        "--plot",
        str(tmp_path / "r.png"),
        "--what-if",
        "fp16",
    )
    page = (tmp_path / "r.html").read_text()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert "\x1b" not in page
    assert "cast from bf16" in page
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "bf16"], "--to FORMAT and --out FILE belong together"),
        (["--out", "x.safetensors"], "--to FORMAT and --out FILE belong together"),
        (["--to", "bf61", "--out", "x.safetensors"], "unknown format to write 'bf61'; nearest: bf16"),
        (["--quick", "--what-if", "all"], "--quick counts nothing"),
        (["--what-if", "fp17"], "unknown format to try 'fp17'; nearest: fp16"),
        (["--what-if", " ,"], "--what-if names no format; give some"),
        (["--html", "no/such/folder/r.html"], "lies in no folder that can be written to; name a file in a folder"),
        (["--html", "."], "'.' given for a report; expected a name that ends in .html"),
        (["--html", "model/model.safetensors"], "expected a name that ends in .html"),
        (["--plot", "r.jpg"], "'r.jpg' given for a report; expected a name that ends in .png"),
        (["--to", "bf16", "--out", "no/x.safetensors"], "its folder 'no' is not there, or read-only; name a file"),
    ],
)
def test_bad_arguments_exit_2_and_write_nothing(run, folder, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("inspect", str(folder), *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_missing_checkpoint_exits_2(run, tmp_path):
    code, _, err = run("inspect", str(tmp_path / "no"))
    assert code == 2
    assert err.count("no' cannot be opened: No such file or directory; expected a checkpoint's file") == 1


def test_control_characters_in_paths_are_escaped_in_errors(run, tmp_path):
    path = tmp_path / "evil\x1b[31m\u202e.safetensors"
    path.touch()
    code, _, err = run("inspect", str(path))
    assert code == 2
    assert r"evil\x1b[31m\u202e.safetensors" in err
    assert "\x1b" not in err


def test_unknown_folder_or_file_says_what_was_found(run, tmp_path):
    _, _, err = run("inspect", str(tmp_path))
    assert "is a folder, and not one of a known kind" in err
    assert "nothing in it is a checkpoint" in err
    (tmp_path / "none.pt").touch()
    assert "none.pt' is empty; expected one of: GGUF" in run("inspect", str(tmp_path / "none.pt"))[2]
    cache = tmp_path / "models--a--b" / "snapshots" / "1234"
    cache.mkdir(parents=True)
    save_file({"w": torch.ones(2)}, cache / "model.safetensors")
    assert f"name one of what it holds: {str(cache)!r}" in run("inspect", str(cache.parent.parent))[2]
    (tmp_path / "none.pt").unlink()
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    assert f"name one of what it holds: {str(tmp_path / 'w.pt')!r}" in run("inspect", str(tmp_path))[2]


def test_shapes_and_names_are_not_cut_in_60_columns(run, folder):
    _, out, _ = run("inspect", str(folder), "--tensors", columns=60)
    shape, _, last = next(line for line in out.splitlines() if line.startswith("96x64")).partition("fp16")
    assert shape.strip() == "96x64"
    assert last.split()[0] == "bf16"
    assert last.rstrip().endswith("  model.layers.0.mlp.up_proj.weight")


def test_quick_option_omits_uncounted_columns(run, folder):
    _, out, _ = run("inspect", str(folder), "--quick", "--tensors")
    assert "exact" not in out.partition("\n\n")[2]
    assert re.search(r"^96x64 +fp16 +bf16 +model\.layers\.0", out, re.MULTILINE)


def test_interrupted_write_leaves_no_file(run, folder, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("halfstep.inspection.write.new_file", interrupted)
    code, out, _ = run("inspect", str(folder), "--to", "bf16", "--out", str(tmp_path / "out.safetensors"))
    assert (code, out) == (130, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


def test_plot_without_float_tensors_exits_2(run, tmp_path):
    pytest.importorskip("matplotlib")
    save_file({"positions": torch.arange(4)}, tmp_path / "in.safetensors")
    code, _, err = run("inspect", str(tmp_path / "in.safetensors"), "--plot", str(tmp_path / "r.png"))
    assert code == 2
    assert "nothing to draw" in err


def test_kb_show_suggests_inspect(run):
    code, out, _ = run("kb", "show", "nobody/knows-this")
    assert code == 1
    assert "next: halfstep inspect nobody/knows-this" in out


def test_broken_config_beside_a_file_is_ignored_with_a_warning(run, folder):
    (folder / "config.json").write_text("{")
    code, out, err = run("inspect", str(folder / "model.safetensors"))
    assert code == 0
    assert "verdict (certain)" in out
    assert "what the folder says of its model was not read" in err
    assert run("inspect", str(folder))[0] == 2
