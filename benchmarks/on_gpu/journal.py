"""The log of a run, one JSON line per row, written at once, so that an interrupted run keeps its finished rows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


PROCESS = "its process"
"""The name of the row for a section's failed process: its exit code and last words."""


@dataclass(frozen=True)
class Journal:
    """A file of JSON lines: that a row was begun, then its figures or why it has none."""

    path: Path

    def begin(self, section: str, row: str) -> None:
        """Record that a row is being measured, so that a row that kills its process is known by name."""
        self._write({"section": section, "row": row, "begun": True})

    def end(self, section: str, row: str, found: dict[str, Any]) -> None:
        """Record a row's figures, or under `failed` why it has none."""
        self._write({"section": section, "row": row, **found})

    def rows(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Every row that was begun, by section and name. A row that never ended says so under `failed`."""
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
