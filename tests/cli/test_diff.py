"""`halfstep diff`: sentences, tables, JSON, exit codes, narrow terminals, closed pipes, bad arguments."""

import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file


HOSTILE = "evil\x1b[31m\u202e<script>"


@pytest.fixture
def files(tmp_path):
    """A model, and its cast to bf16 with one tensor trained further."""
    g = torch.Generator().manual_seed(0)
    a = {f"model.layers.{i}.mlp.up_proj.weight": torch.randn(64, 64, generator=g) for i in range(3)}
    a |= {"model.norm.weight": torch.rand(64, generator=g), HOSTILE: torch.randn(8, 8, generator=g)}
    b = {name: tensor.bfloat16() for name, tensor in a.items()}
    b["model.layers.2.mlp.up_proj.weight"] = a["model.layers.2.mlp.up_proj.weight"] * 1.01 + 0.01
    save_file(a, tmp_path / "a.safetensors")
    save_file(b, tmp_path / "b.safetensors")
    return str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors")


def test_sentences_and_a_table_by_role(run, files):
    code, out, err = run("diff", *files)
    assert (code, err) == (1, "")
    assert "4 tensors (67% of the values): B is A rounded to bf16, to nearest" in out
    assert "1 tensor (33% of the values): changed, 0% of the values as they were" in out
    assert re.search(r"^mlp +2 +8,192 +fp32 > bf16 +cast bf16, to nearest ", out, re.MULTILINE)
    assert re.search(r"^mlp +1 +4,096 +fp32 +changed +0% ", out, re.MULTILINE)


def test_by_layer_and_by_tensor(run, files):
    _, out, _ = run("diff", *files, "--layers", "--tensors")
    assert re.search(r"^layer 2 +1 +4,096 +fp32 +changed ", out, re.MULTILINE)
    assert re.search(r"^model\.layers\.0\.mlp\.up_proj\.weight +4,096 +fp32 > bf16 ", out, re.MULTILINE)
    assert r"evil\x1b[31m\u202e" in out
    assert "\x1b[31m" not in out
    assert "\u202e" not in out


def test_same_file_exits_0(run, files):
    code, out, _ = run("diff", files[0], files[0])
    assert code == 0
    assert "Both hold the same tensors, byte for byte." in out


def test_files_without_tensors_are_reported(run, tmp_path):
    """As two copies that were cut off at the same place."""
    save_file({}, tmp_path / "none.safetensors")
    _, out, _ = run("diff", str(tmp_path / "none.safetensors"), str(tmp_path / "none.safetensors"))
    assert "Neither holds a tensor." in out
    assert "byte for byte" not in out


def test_json(run, files):
    code, out, _ = run("diff", *files, "--json")
    data = json.loads(out)
    assert code == 1
    assert (data["schema"], data["same"], len(data["tensors"])) == (1, False, 5)
    one = next(one for one in data["tensors"] if one["name"] == "model.norm.weight")
    assert one["relation"]["rounded"]["roundings"]
    assert one["stored"] == ["float32", "bfloat16"]
    assert any("bf16" in text for text in data["sentences"])


@pytest.mark.quick("20")
@pytest.mark.parametrize("columns", [20, 40, 80])
def test_narrow_terminals(run, files, columns):
    code, out, _ = run("diff", *files, columns=columns)
    assert code == 1
    assert "8,192" in out


def test_bad_arguments_exit_2(run, files, tmp_path):
    code, out, err = run("diff", files[0], str(tmp_path / "no"))
    assert (code, out) == (2, "")
    assert "no' cannot be opened: No such file or directory; expected a checkpoint's file" in err
    assert run("diff", files[0])[0] == 2
    (tmp_path / "x.txt").write_text("no checkpoint")
    code, _, err = run("diff", files[0], str(tmp_path / "x.txt"))
    assert code == 2
    assert "is not a checkpoint of a known kind; expected one of" in err


@pytest.mark.slow
def test_closed_pipe_gives_no_traceback(files):
    """As in `halfstep diff ... | head -1`: no traceback."""
    command = [sys.executable, "-m", "halfstep", "diff", *files, "--tensors"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    _, err = process.communicate(timeout=120)
    assert "Traceback" not in err
