"""Path hook that lets Python run a recipe as it runs a zip application: `accelerate launch recipes/train.yaml`.

Given a path to run, Python first tries the importers in `sys.path_hooks` (see the documentation of `runpy` and of the
interpreter's command line). `parse_engine_recipes.pth`, installed beside the packages, adds a short hook whenever
Python starts. That hook imports this module for a path that ends in .yaml or .yml; this module rejects other files.
"""

MAIN = "import sys; from parse_train.__main__ import main; sys.exit(main(sys.argv))"


def recipe_importer(path: str) -> "RecipeImporter":
    """Return an importer for a YAML file with a known `recipe:` key; raise ImportError for any other path."""
    if _is_recipe(path):
        return RecipeImporter(path)
    raise ImportError(f"{path} is not a recipe", path=path)


class RecipeImporter:
    """Finder and loader of `__main__`, which passes the recipe and the command line to `parse_train`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def find_spec(self, name: str, target: object = None):  # type: ignore[no-untyped-def]
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self, origin=self.path) if name == "__main__" else None  # type: ignore[arg-type]

    def get_code(self, name: str):  # type: ignore[no-untyped-def]
        return compile(MAIN, f"<recipe {self.path}>", "exec")


def _is_recipe(path: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123  (pathlib would slow every start down)
            lines = [line for line in file if line.startswith("recipe:")]
    except (OSError, ValueError):  # unreadable, or not text
        return False
    from parse_train.recipe import recipes

    known = recipes()
    return any(line[len("recipe:") :].partition("#")[0].strip(" \t\r\n'\"") in known for line in lines)
