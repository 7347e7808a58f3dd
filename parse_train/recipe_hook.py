"""`accelerate launch recipes/train.yaml`: lets Python run a recipe as it runs a zip application.

Given a path to run, Python first asks `sys.path_hooks` whether somebody can import from there (see the documentation
of `runpy` and of the interpreter's command line). `parse_engine_recipes.pth`, which is installed beside the packages,
adds a short hook whenever Python starts; only for a path that ends in .yaml or .yml does that import this
module, which steps aside for whatever is no recipe.
"""

MAIN = "import sys; from parse_train.__main__ import main; sys.exit(main(sys.argv))"


def recipe_importer(path: str) -> "RecipeImporter":
    """The path hook: an importer for a YAML file with a known `recipe:` key, ImportError (as hooks do) otherwise."""
    if _is_recipe(path):
        return RecipeImporter(path)
    raise ImportError(f"{path} is no recipe", path=path)


class RecipeImporter:
    """Finder and loader of `__main__`: the recipe, and the command line as it was given, go to `parse_train`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def find_spec(self, name: str, target: object = None):  # type: ignore[no-untyped-def]
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self, origin=self.path) if name == "__main__" else None  # type: ignore[arg-type]

    def get_code(self, name: str):  # type: ignore[no-untyped-def]
        return compile(MAIN, f"<recipe {self.path}>", "exec")


def _is_recipe(path: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line for line in file if line.startswith("recipe:")]
    except (OSError, ValueError):  # unreadable, or no text: somebody else's business
        return False
    from parse_train.recipe import recipes

    known = recipes()
    return any(line[len("recipe:") :].partition("#")[0].strip(" \t\r\n'\"") in known for line in lines)
