"""The layers of the code: imports run downward, and no module needs itself."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
ROOTS = {package: REPOSITORY for package in ("parse_infer", "data_tools", "parse_train", "tools")}
ROOTS["parse_zoo"] = REPOSITORY / "zoo"
# From the lowest. A module may import its own room and rooms of lower layers, never a room of its own layer.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("parse_infer: ground",),
    ("parse_infer/settings",),
    ("parse_infer/text",),
    ("parse_infer/models",),
    ("parse_infer/judge",),
    ("parse_infer/request",),
    ("parse_infer/decoding",),
    ("parse_infer/drafters", "parse_infer/token_drafters"),
    ("parse_infer/calibration",),
    ("data_tools/tasks", "parse_infer/backends"),
    ("parse_infer: engine",),
    ("parse_infer/evaluation", "parse_infer/serve", "data_tools: core"),
    ("parse_infer/cli", "data_tools/labels"),
    ("data_tools",),
    ("parse_train",),
    ("parse_train/judge", "parse_train/heads"),
    ("parse_train: command",),
    ("parse_zoo",),
    ("tools",),
)
# What stands directly in a package, where that is not one room.
ROOMS = {
    "parse_infer.files": "parse_infer: ground",
    "parse_infer.suggest": "parse_infer: ground",
    "parse_infer.errors": "parse_infer: ground",
    "parse_infer.tracking": "parse_infer: ground",
    "parse_infer.optional_dependencies": "parse_infer: ground",
    "parse_infer.engine": "parse_infer: engine",
    "parse_infer": "parse_infer: engine",
    "parse_infer.__main__": "parse_infer/cli",
    "data_tools.recipe_parser": "data_tools: core",
    "parse_train.training_plan": "parse_train: command",
    "parse_train.__main__": "parse_train: command",
}
# parse_train may use everything below it but the command line, the evaluation and the server.
FORBIDDEN = {
    room: ("parse_infer/cli", "parse_infer/evaluation", "parse_infer/serve")
    for room in ("parse_train", "parse_train/judge", "parse_train/heads", "parse_train: command")
}


def modules() -> dict[str, Path]:
    found = {}
    for package, root in ROOTS.items():
        for path in (root / package).rglob("*.py"):
            name = ".".join(path.relative_to(root).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = modules()


def imports(path: Path) -> set[str]:
    """Modules of ours that this one imports, at the top or inside a function; not those for type hints only."""
    found: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for block in ast.walk(tree):  # `if TYPE_CHECKING:` runs nothing
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test):
            block.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found & MODULES.keys()


def room(module: str) -> str:
    """A folder, two levels deep, or a name of `ROOMS`."""
    if module in ROOMS:
        return ROOMS[module]
    package = module.partition(".")[0]
    if package in ("parse_zoo", "tools"):
        return package
    return "/".join(MODULES[module].parent.relative_to(REPOSITORY).parts[:2])


HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}


@pytest.mark.slow
def test_no_module_needs_itself() -> None:
    graph = {name: imports(path) - {name} for name, path in MODULES.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"these modules import one another: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("name", sorted(MODULES))
def test_imports_run_downward(name: str) -> None:
    here = room(name)
    for other in imports(MODULES[name]):
        there = room(other)
        fine = there == here or (HEIGHT[there] < HEIGHT[here] and there not in FORBIDDEN.get(here, ()))
        assert fine, f"{name} ({here}) must not import {other} ({there})"
