"""Path hook that lets Python run a recipe as it runs a zip application: `accelerate launch recipes/train.yaml`.

Given a path to run, Python first tries the importers in `sys.path_hooks` (see the documentation of `runpy` and of the
interpreter's command line). `parse_engine_recipes.pth`, installed beside the packages, adds a short hook whenever
Python starts. That hook imports this module for a path that ends in .yaml or .yml; this module rejects all but files.
"""

from importlib.machinery import ModuleSpec
from os.path import isfile  # pathlib would slow every start down

MAIN = "import sys; from parse_train.__main__ import main; sys.exit(main(sys.argv))"


def recipe_importer(path: str) -> "RecipeImporter":
    """Return an importer for a file; raise ImportError for any other path.

    Every YAML file is taken, since none is a Python program: `parse_train` says what is wrong with one that is no
    recipe.
    """
    if isfile(path):  # noqa: PTH113
        return RecipeImporter(path)
    raise ImportError(f"{path} is not a file", path=path)


class RecipeImporter:
    """Finder and loader of `__main__`, which passes the recipe and the command line to `parse_train`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def find_spec(self, name: str, target: object = None):  # type: ignore[no-untyped-def]
        return ModuleSpec(name, self, origin=self.path) if name == "__main__" else None  # type: ignore[arg-type]

    def get_code(self, name: str):  # type: ignore[no-untyped-def]
        return compile(MAIN, f"<recipe {self.path}>", "exec")
