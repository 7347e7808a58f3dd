"""Render the tables and figures of the documentation from committed results: `python -m tools.render_docs`.

In README.md and docs/**/*.md, two lines enclose a table, and one line names a figure:

    <!-- results: docs/results/NAME.json table=headline -->
    <!-- end -->
    <!-- figure: docs/results/NAME.json docs/NAME.png -->

The JSON file holds results of a benchmark or of calibrations. `tools.doc_tables` lists the
tables. Text between fences (```) is unchanged.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from parse_infer.evaluation.figure import ORIGIN, draw_figure
from parse_infer.evaluation.results_file import digest
from parse_infer.files import write_text
from tools.comparison_results import draw as draw_rules
from tools.doc_tables import read_results, table
from tools.promise_figure import draw_promises

COMMAND = "python -m tools.render_docs"
_TABLE = re.compile(r"<!-- results: (\S+(?: \S+)*) table=(\S+) -->")
_FIGURE = re.compile(r"<!-- figure: (\S+) (\S+\.png) -->")
_MARK = re.compile(r"<!--\s*(results|figure)\b")
_END = "<!-- end -->"


def update(root: Path, write: bool = True) -> list[str]:
    """Update every table and figure below `root`.

    Args:
        write: False only checks.

    Returns:
        Paths below `root` of outdated files.

    Raises:
        FileNotFoundError, ValueError: a block without end, an unknown table, or missing results (by file and line).
    """
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}: name the folder with README.md and docs/")
    stale = []
    for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        updated, figures = _rewritten(text, root, path.relative_to(root).as_posix())
        if updated != text:
            stale.append(path.relative_to(root).as_posix())
            if write:
                write_text(path, updated)
        for source, picture in figures:
            results = read_results(root / source, needed=("environment",))
            if drawn_from(root / picture) != digest(results):
                stale.append(picture)
                if write:
                    _drawer(results)(results, root / picture)
    return list(dict.fromkeys(stale))


def _drawer(results: dict[str, Any]) -> Callable[[dict[str, Any], Path], None]:
    return draw_rules if "rules" in results else draw_promises if "rows" in results else draw_figure


def drawn_from(path: Path) -> str | None:
    """Digest of the results that a figure shows; None without the file or its digest."""
    if not path.is_file():
        return None
    with Image.open(path) as image:
        return image.info.get(ORIGIN)


def _rewritten(text: str, root: Path, name: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the text with new tables, and (results, picture) of its figures."""
    lines, figures, out = text.split("\n"), [], []
    number, fenced = 0, False
    while number < len(lines):
        line, place = lines[number], f"{name}, line {number + 1}"
        out.append(line)
        number += 1
        fenced ^= line.lstrip().startswith("```")
        if fenced or not _MARK.match(line):
            continue
        if figure := _FIGURE.fullmatch(line):
            figures.append((figure[1], figure[2]))
        elif found := _TABLE.fullmatch(line):
            if _END not in lines[number:]:
                raise ValueError(f"{place}: the block has no end: add a line {_END}")
            number = lines.index(_END, number)
            try:
                out += ["", *table([root / name for name in found[1].split()], found[2]), ""]
            except (FileNotFoundError, ValueError) as error:
                raise type(error)(f"{place}: {error}") from error
        else:
            raise ValueError(f"{place}: write <!-- results: FILE table=KIND --> or <!-- figure: FILE PICTURE.png -->")
    return "\n".join(out), figures


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code: 1 if `--check` finds outdated files, 2 for a user error."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Render the documentation's tables and figures.")
    parser.add_argument("root", nargs="?", type=Path, default=Path(), help="folder with README.md and docs/")
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if something would change")
    arguments = parser.parse_args(argv)
    try:
        stale = update(arguments.root, write=not arguments.check)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name in stale:
        print(f"{name} differs from its results: run {COMMAND}" if arguments.check else f"written: {name}")
    return 1 if stale and arguments.check else 0


if __name__ == "__main__":
    sys.exit(main())
