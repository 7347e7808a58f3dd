"""Functions of installed packages become problems, and an answer is right if it does what the package's code does."""

from __future__ import annotations

from itertools import chain

import pytest

from data_tools.tasks.code.sandbox import require_sandbox
from data_tools.tasks.docstrings import Docstrings
from data_tools.tasks.registry import load_task
from data_tools.tasks.task import SPLITS
from parse_infer.errors import ParseError

try:
    require_sandbox()
except ParseError as refusal:
    pytest.skip(str(refusal), allow_module_level=True)

FUNCTION = '''
def {name}({arguments}):
    """Return the numbers, each multiplied by {number}, and then rounded down, as in this example:

    >>> {name}([1, 2.5])
    """
    {body}
'''
HEAD = "raise RuntimeError('imported')\nimport math\nfrom itertools import chain\nimport numpy\nLIMIT = 3\n"
HEAD += "import time\nfrom numpy import sum\nfrom copy import copy\ndef copy(x): return x\n"
BODY = "return [math.floor({number} * each) for each in chain(numbers)]"


def function(name, number=2, body=BODY, arguments="numbers"):
    return FUNCTION.format(name=name, number=number, arguments=arguments, body=body.format(number=number))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write modules of a package with a new name, and return the name."""

    def write(name, **modules):
        (tmp_path / name / "tests").mkdir(parents=True)
        for module, code in modules.items():
            (tmp_path / name / f"{module.replace('__in__', 'tests/')}.py").write_text(HEAD + code)
        monkeypatch.syspath_prepend(str(tmp_path))
        return name

    return write


def names(task, split="train", **options):
    return [problem.metadata["function"].rpartition(": ")[2] for problem in task.problems(split, **options)]


@pytest.mark.slow
def test_functions_that_need_the_standard_library_alone_are_problems(package):
    kept = {
        "uses_modules": function("uses_modules"),
        "calls_itself": function("calls_itself", body="return calls_itself(numbers[:-1]) if numbers else {number}"),
        "nested": function("nested", body="return (lambda k: [k * each for each in numbers])({number})"),
    }
    left_out = {
        "_private": function("_private"),
        "other_package": function("other_package", body="return numpy.floor(numbers) * {number}"),
        "global_name": function("global_name", body="return numbers[:LIMIT] * {number}"),
        "of_module": function("of_module", arguments="numbers, limit=LIMIT"),
        "decorated": f"@print\n{function('decorated')[1:]}",
        "default_in_a_lambda": function("default_in_a_lambda", body="return (lambda x=LIMIT: x * {number})()"),
        "other_sum": function("other_sum", body="return sum(numbers) * {number}"),
        "redefined": function("redefined", body="return copy(numbers) * {number}"),
        "of_now": function("of_now", body="return [{number} * each + time.perf_counter() for each in numbers]"),
        "always_raises": function("always_raises", body="raise ValueError({number})"),
        "no_example": function("no_example").replace(">>> no_example", ">>> no example of"),
        "only_doc": function("only_doc", body=""),
        "in_a_class": "class Holder:\n" + function("in_a_class").replace("\n", "\n    "),
    }
    name = package("parse_docs_a", __init__="", one="".join([*kept.values(), *left_out.values()]))
    task = load_task("docstrings", packages=[name], run_code=True)
    assert sorted(name for split in SPLITS for name in names(task, split)) == sorted(kept)


def test_a_single_file_is_a_package_and_its_folder_may_have_any_name(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "parse_docs_file.py").write_bytes(b"\xef\xbb\xbf" + (HEAD + function("alone")).encode())
    (tmp_path / "tests" / "parse_docs_nothing").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path / "tests"))
    task = Docstrings(["parse_docs_file"], run_code=True)
    assert [name for split in SPLITS for name in names(task, split)] == ["alone"]
    with pytest.raises(ValueError, match="'parse_docs_nothing', which has no Python files"):
        next(Docstrings(["parse_docs_nothing"], run_code=True).problems("train"))


def test_an_answer_is_right_if_it_does_the_same(package):
    name = package("parse_docs_b", one="".join(function(f"f{n}", n) for n in range(2, 12)))
    task = Docstrings([name], run_code=True)
    problem = next(task.problems("train"))
    number = int(problem.metadata["function"].rpartition("f")[2])
    assert problem.prompt.startswith(
        "Complete this Python function.\n\n```python\nfrom itertools import chain\nimport math\n"
    )
    assert BODY.partition("(")[0] not in problem.prompt and "LIMIT" not in problem.prompt + problem.reference
    own = f"Sure.\n```python\ndef f{number}(numbers):\n    return [int({number} * n // 1) for n in numbers]\n```"
    other = own.replace(f"{number} *", f"{number + 1} *")
    assert task.check(problem, problem.reference) and task.check(problem, own)
    assert not task.check(problem, other) and not task.check(problem, "I cannot.")
    same = task.comparison(problem)
    assert same(own, problem.reference) and not same(own, other)


@pytest.mark.slow
def test_splits_are_disjoint_and_seeds_shuffle(package):
    code = "".join(function(f"f{n}", n) for n in range(2, 32))
    name = package("parse_docs_c", one=code, two=code, __in__three=function("in_tests"))
    task = Docstrings([name], run_code=True)
    parts = [names(task, split) for split in SPLITS]
    assert sorted(chain(*parts)) == sorted({f"f{n}" for n in range(2, 32)}), "each once"
    assert all(parts) and len(parts[0]) > 15
    assert names(task, seed=1) != parts[0] == names(task) and sorted(names(task, seed=1)) == sorted(parts[0])
    assert names(task, limit=3) == parts[0][:3]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "needs the option packages"),
        ({"packages": ["no_such_module"], "run_code": True}, "'no_such_module', which is no installed"),
        ({"packages": ["../x"], "run_code": True}, "'../x', which is no installed"),
        ({"packages": ["textwrap"]}, "set the option run_code"),
        ({"packages": "textwrap"}, "must be a list, each entry a text"),
    ],
)
def test_wrong_options_are_rejected(options, told):
    with pytest.raises(ValueError, match=told):
        load_task("docstrings", **options)
