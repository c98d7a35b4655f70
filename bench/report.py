"""A benchmark's figures: a table for people, JSON for programs."""

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class Report:
    """Gathers rows, each a figure for every column.

    Attributes:
        title: what was measured, and how.
        columns: names with units.
    """

    title: str
    columns: Sequence[str]
    rows: list[Sequence[float | int | str]] = field(default_factory=list)
    baselines: dict[str, float] = field(default_factory=dict)

    def print(self) -> None:
        table = Table(title=self.title, title_justify="left")
        for column in self.columns:
            table.add_column(column, justify="right")
        for row in self.rows:
            table.add_row(*(_shown(figure) for figure in row))
        console = Console()
        for name, figure in self.baselines.items():
            console.print(f"{name}: {_shown(figure)}")
        console.print(table)

    def write(self, path: Path) -> None:
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        data = {
            "title": self.title,
            "machine": platform.platform(),
            "baselines": self.baselines,
            "rows": rows,
        }
        path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _shown(figure: float | int | str) -> str:
    return (
        f"{figure:.3g}"
        if isinstance(figure, float) and abs(figure) < 100
        else (f"{figure:.0f}" if isinstance(figure, float) else str(figure))
    )
