"""The part of a page of the documentation that a program of the tests writes, between two marks."""

from pathlib import Path
from typing import NamedTuple


class Marked(NamedTuple):
    """A page, and the lines before and after what is written."""

    page: Path
    begin: str
    end: str

    def read(self):
        return self._parts()[1]

    def write(self, text):
        before, _, after = self._parts()
        self.page.write_text(f"{before}{self.begin}{text}{self.end}{after}")

    def _parts(self):
        before, rest = self.page.read_text().split(self.begin)
        return before, *rest.split(self.end)
