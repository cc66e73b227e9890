"""The table of docs/papers.md has every paper of the ledger, with its current verdicts."""

from collections import Counter
from pathlib import Path

from halfstep.claims import VERDICTS, load


def table():
    """(link to the verdicts, address of the paper, command) of each row, by title."""
    page = (Path(__file__).parents[2] / "docs" / "papers.md").read_text()
    found = {}
    for line in page[: page.index("\n## ")].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 6 and cells[3].startswith("`"):
            title, _, address = cells[0].strip("[)").partition("](")
            assert title not in found, f"{title} has two rows"
            found[title] = cells[4], address, cells[3].strip("`")
    return found


def test_every_paper_has_a_row_with_its_verdicts():
    rows, papers = table(), {}
    for claim in load():
        papers.setdefault(claim.reference.title, []).append(claim)
    assert rows.keys() == papers.keys()
    for title, claims in papers.items():
        counts = Counter(claim.verdict for claim in claims)
        verdicts = ", ".join(f"{verdict} {counts[verdict]}" for verdict in VERDICTS if counts[verdict])
        ids = {f"[{verdicts}](claims.md#{claim.id})" for claim in claims}
        assert rows[title][0] in ids, f"docs/papers.md, {title}: found {rows[title][0]}, expected one of {ids}"
        numbers = {claim.reference.arxiv for claim in claims if claim.reference.arxiv}
        assert rows[title][1] == "".join(f"https://arxiv.org/abs/{number}" for number in numbers), title
