"""The lines that a run leaves, one a row, written as they come: what ends the run early loses no row before it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


PROCESS = "its process"
"""The row of a section whose process failed: how it ended, and what it said last."""


@dataclass(frozen=True)
class Journal:
    """A file of JSON lines: a row that was begun, then what it measured or why it did not."""

    path: Path

    def begin(self, section: str, row: str) -> None:
        """Say that a row is being measured, so that one which takes its process down is known by name."""
        self._write({"section": section, "row": row, "begun": True})

    def end(self, section: str, row: str, found: dict[str, Any]) -> None:
        """Write what a row measured; `failed` in it says why it did not."""
        self._write({"section": section, "row": row, **found})

    def rows(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Every row that was begun, by section and name. One that never ended says so under `failed`."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for line in self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []:
            try:
                row = json.loads(line)
            except ValueError:  # the last line of a process that was killed while it wrote
                continue
            key = row["section"], row["row"]
            if row.pop("begun", False):
                row["failed"] = "its process ended while it was measured: time was up, or it took the process down"
            found[key] = row
        return found

    def _write(self, line: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
