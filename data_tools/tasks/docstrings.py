"""Programming problems from installed packages: complete a function from its signature and docstring."""

from __future__ import annotations

import ast
import builtins
import symtable
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from random import Random

from data_tools.tasks.code.calls import calls_of
from data_tools.tasks.code.checks import same_function
from data_tools.tasks.code.python_text import parse
from data_tools.tasks.code.sandbox import require_sandbox
from data_tools.tasks.reading import reading
from data_tools.tasks.task import SPLITS, Problem, Split, check_split, prompt_id, split_of
from parse_infer.errors import ParseError

_INSTRUCTION = "Complete this Python function.\n\n```python\n{}\n```\n"
_LENGTHS = range(150, 2500)  # characters of a function, its docstring included
_BUILTIN = frozenset(dir(builtins))


@dataclass
class Docstrings:
    """Functions of installed packages, checked against the package's own code in the sandbox.

    A function becomes a problem if it is public, its docstring has an example of a call, it uses nothing but
    arguments, builtins and the standard library, and two runs return the same. Its code is the reference: the function
    of an answer must return the same in the calls of the docstring and in 20 generated from the type hints. A problem
    is in train, validation or test by the hash of its prompt (80, 10, 10 %).

    Args:
        packages: names of top-level modules; their files are read, not imported.
        run_code: allow to run code that models write, in a sandbox.
        instruction: text after the prompt.
    """

    packages: list[str] = field(default_factory=list)
    run_code: bool = False
    instruction: str = ""
    name: str = "docstrings"

    def __post_init__(self) -> None:
        if not self.packages:
            raise ParseError("task docstrings needs the option packages: a list of installed modules")
        for package in self.packages:
            if not package.isidentifier() or find_spec(package) is None:
                raise ParseError(
                    f"packages of task docstrings has {package!r}, which is no installed top-level module"
                )
        if not self.run_code:
            raise ParseError(
                "task docstrings runs code that the models write: to allow that, in a sandbox, set the option "
                "run_code of task docstrings to true"
            )
        require_sandbox()

    def problems(self, split: Split, seed: int = 0, limit: int | None = None) -> Iterator[Problem]:
        check_split(split)
        found = {problem.prompt: problem for package in self.packages for problem in _problems(package)}
        mine = [problem for prompt, problem in sorted(found.items()) if split_of(prompt, SPLITS) == split]
        Random(seed).shuffle(mine)
        count = 0
        for problem in mine:
            if count == limit:
                return
            again = problem.reference.replace("\n", "\n# Another text, so that it runs again.\n", 1)
            # Exactly: two readings of a clock differ by less than a check tolerates.
            if same_function(str(problem.prompt), problem.reference, again, tolerance=0.0):
                count += 1
                # The split and the id are those of the bare prompt.
                yield replace(problem, prompt=f"{problem.prompt}{self.instruction}")

    def check(self, problem: Problem, completion: str) -> bool:
        return same_function(str(problem.prompt), problem.reference, completion)

    def comparison(self, problem: Problem) -> Callable[[str, str], bool]:
        return partial(same_function, str(problem.prompt))


def _problems(package: str) -> Iterator[Problem]:
    """Yield the problems in a package's files, in order of their paths."""
    spec = find_spec(package)
    assert spec is not None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    files = [
        path
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        if not {"test", "tests", "_vendor"} & set(path.relative_to(folder).parts)
    ]
    if spec.origin and spec.origin.endswith(".py") and not folders:
        files = [Path(spec.origin)]
    if not files:
        raise ParseError(f"packages of task docstrings has {package!r}, which has no Python files")
    for path in reading(files, f"reading {package}", len(files)):
        try:
            source = path.read_text(encoding="utf-8-sig", errors="replace")
        except OSError:  # for example inside an archive
            continue
        tree = parse(source)
        if tree is None or "import *" in source:  # may bind any name
            continue
        imports, others = _module_names(tree, source)
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and (found := _problem(node, imports, others)):
                prompt, reference = found
                metadata = {"function": f"{package}: {node.name}"}
                yield Problem(prompt_id(prompt), prompt, reference, metadata=metadata)


def _problem(node: ast.FunctionDef, imports: dict[str, str], others: set[str]) -> tuple[str, str] | None:
    """Return the prompt and the reference of a function, or None if it is no problem."""
    doc = ast.get_docstring(node)
    if not doc or f"{node.name}(" not in doc or node.name.startswith("_") or node.decorator_list or len(node.body) < 2:
        return None
    code = ast.unparse(node)
    if len(code) not in _LENGTHS:
        return None
    names = _global_names(code) - {node.name}
    if names & others or not names <= imports.keys() | _BUILTIN:
        return None
    head = "".join(f"{imports[name]}\n" for name in sorted(names & imports.keys()))
    begun = ast.FunctionDef(**{**vars(node), "body": node.body[:1]})
    prompt = _INSTRUCTION.format(f"{head}{ast.unparse(begun)}")
    reference = f"```python\n{head}{code}\n```"
    return (prompt, reference) if calls_of(prompt, f"{head}{code}") else None


def _module_names(tree: ast.Module, source: str) -> tuple[dict[str, str], set[str]]:
    """Return the imports of the standard library at the top of a file, by the name each binds, and all other names
    that the file binds at its top level."""
    found: dict[str, str] = {}
    others: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            continue
        for alias in node.names:
            if isinstance(node, ast.Import):
                module, one = alias.name, ast.unparse(ast.Import([alias]))
            else:
                module = "" if node.level else node.module or ""
                one = ast.unparse(ast.ImportFrom(node.module, [alias], 0))
            name = alias.asname or alias.name.partition(".")[0]
            standard = module.partition(".")[0] in sys.stdlib_module_names - {"__future__"}
            if node in tree.body and standard and found.get(name, one) == one:
                found[name] = one
            else:
                others.add(name)
    symbols = symtable.symtable(source, "module", "exec").get_symbols()
    others |= {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_namespace()}
    return {name: one for name, one in found.items() if name not in others}, others


def _global_names(code: str) -> set[str]:
    """Return the names that the code of a function takes from outside it."""
    top = symtable.symtable(code, "function", "exec")
    names = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_referenced()}
    tables = list(top.get_children())
    while tables:
        table = tables.pop()
        names |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
        tables += table.get_children()
    return names
