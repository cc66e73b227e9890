"""The HTML page shows what --json holds: outlier channels, copies, and the worst tensors of each cast."""

import re

import torch

import halfstep
from halfstep.inspection.page import to_html


def rows(page: str, title: str) -> list[list[str]]:
    """The body cells of the first table after a title."""
    table = page.split(title)[1].split("<tbody>")[1].split("</tbody>")[0]
    return [
        [re.sub(r"\s+", " ", cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row, re.DOTALL)]
        for row in table.split("</tr>")[:-1]
    ]


def test_page_shows_outliers_copies_and_worst_tensors(tmp_path):
    weights = {f"layers.{i}.mlp.up_proj.weight": torch.randn(64, 64) * (1 + i) for i in range(12)}
    weights["layers.3.mlp.up_proj.weight"][:, 5] = 300.0
    weights["layers.4.mlp.up_proj.weight"][:, :2] = 1e5  # overflows fp16
    weights["tied"], weights["copy<b>"] = (weights["layers.0.mlp.up_proj.weight"],) * 2
    weights["copy<b>"] = weights["copy<b>"].clone()
    torch.save(weights, tmp_path / "model.pt")
    report = halfstep.inspect(tmp_path / "model.pt", casts=["fp16", "mxfp4"])
    page = to_html(report)
    found = rows(page, "<h2>Outlier channels</h2>")
    assert [row[:3] for row in found] == [
        ["layers.4.mlp.up_proj.weight", "2", "64"], ["layers.3.mlp.up_proj.weight", "1", "64"],
    ]  # fmt: skip
    assert rows(page, "<h2>Tensors that are the same</h2>") == [
        ["tied", "is tied to (stored once)", "layers.0.mlp.up_proj.weight", "16,384"],
        ["copy&lt;b&gt;", "equals (stored twice)", "layers.0.mlp.up_proj.weight", "16,384"],
    ]
    for one in report.casts:
        shown = rows(page, f"<summary>{one.total.format}: the worst 10</summary>")
        assert [row[0].replace("&lt;b&gt;", "<b>") for row in shown] == [name for name, _ in one.worst]
        assert [row[1] for row in shown] == [cast.decibels for _, cast in one.worst]
    worst, *_ = rows(page, "<summary>fp16")
    assert (worst[0], worst[2]) == ("layers.4.mlp.up_proj.weight", "128")


def test_page_omits_empty_sections(tmp_path):
    torch.save({"w": torch.randn(64, 64)}, tmp_path / "model.pt")
    page = to_html(halfstep.inspect(tmp_path / "model.pt"))
    assert "<h2>Tensors</h2>" in page
    assert "Outlier channels" not in page
    assert "the same" not in page
    assert "<details>" not in page
