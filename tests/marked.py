"""The part of a documentation page, between two markers, that a test program writes."""

from pathlib import Path
from typing import NamedTuple


class Marked(NamedTuple):
    """A page, and the marker lines before and after the written part."""

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
