"""The rooms of the house: imports run one way, and no module needs itself."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("parse_infer", "data_tools", "parse_train")
GROUND = ("parse_infer.files", "parse_infer.suggest", "parse_infer.optional_dependencies")
# What each room may import, besides itself and the standard library. The loop is what stands directly in parse_infer.
MAY_IMPORT = {
    "parse_infer/models": {"parse_infer/models"},
    "parse_infer/judge": {"parse_infer/models"},
    "parse_infer/speculation": {"parse_infer/models"},
    "parse_infer/drafters": {"parse_infer/models", "parse_infer/judge", "parse_infer/speculation", "parse_infer"},
    "parse_infer": {"parse_infer/models", "parse_infer/judge", "parse_infer/speculation", "parse_infer/drafters"},
    "parse_infer/evaluation": {
        f"parse_infer{room}" for room in ("", "/models", "/verify", "/guesses", "/drafters", "/coordinator")
    },
    "parse_infer/calibration": {f"parse_infer{room}" for room in ("", "/models", "/verify", "/guesses", "/drafters")},
    "parse_infer/serve": {"parse_infer", "parse_infer/models", "parse_infer/backends"},
    "parse_infer/vllm_plugin": {"parse_infer/models", "parse_infer/judge", "parse_infer/speculation"},
    "parse_infer/backends": {f"parse_infer{room}" for room in ("", "/models", "/verify", "/drafters", "/vllm")},
    "parse_infer/cli": {f"parse_infer{room}" for room in ("", "/models", "/verify", "/guesses", "/bench", "/serve")}
    | {"parse_infer/calibration", "parse_infer/evaluation", "parse_infer/backends", "data_tools/tasks"},
    "data_tools/tasks": {"parse_infer"},
    "data_tools/labels": {"data_tools/tasks", "data_tools", "parse_infer", "parse_infer/models", "parse_infer/judge"},
    "data_tools": {"data_tools/labels", "parse_infer"},
}


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (REPOSITORY / package).rglob("*.py"):
            name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
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
    """The folder, two levels deep: the commands of a command line are no room of their own."""
    return "/".join(MODULES[module].parent.relative_to(REPOSITORY).parts[:2])


def test_no_module_needs_itself() -> None:
    graph = {name: imports(path) - {name} for name, path in MODULES.items()}
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"these modules import one another: {' -> '.join(error.args[1])}")


def test_no_room_needs_itself() -> None:
    """Seen as folders. What stands directly in parse_infer counts as three: files, what drafters need, the loop."""
    graph: dict[str, set[str]] = {}

    def place(module: str) -> str:
        if module == "parse_infer.__main__":
            return "parse_infer/cli"
        last = module.rpartition(".")[2]
        if room(module) == "parse_infer" and module in GROUND:
            return "parse_infer, ground floor"
        if room(module) == "parse_infer" and last in ("answer", "generation", "policy"):
            return "parse_infer, parts"
        return room(module)

    for name, path in MODULES.items():
        graph.setdefault(place(name), set()).update({place(other) for other in imports(path)} - {place(name)})
    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"these rooms import one another: {' -> '.join(error.args[1])}")


@pytest.mark.parametrize("name", sorted(MODULES))
def test_arrows_run_one_way(name: str) -> None:
    here = room(name)
    allowed = MAY_IMPORT.get(here)
    if allowed is None:  # parse_train may use everything but the command line and the benchmark
        allowed = {
            room(other) for other in MODULES if not other.startswith(("parse_infer.cli", "parse_infer.evaluation"))
        }
    for other in imports(MODULES[name]):
        there = room(other)
        fine = there == here or there in allowed or other in GROUND
        assert fine or name == "parse_infer.__main__", f"{name} must not import {other}"
