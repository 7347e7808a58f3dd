"""`python RECIPE` runs a recipe, and says in one sentence why another YAML file is none."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from parse_train.recipe import recipes
from parse_train.recipe_hook import recipe_importer

REPOSITORY = Path(__file__).parents[2]


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("recipes/**/*.yaml")), ids=lambda path: path.name)
def test_every_yaml_file_is_taken(path: Path) -> None:
    assert recipe_importer(str(path)).find_spec("__main__").origin == str(path)


@pytest.mark.parametrize("kind", recipes())
@pytest.mark.parametrize(
    "line", ["recipe: {}", "recipe: '{}'  # a comment", 'recipe:   "{}"', "a: 1\nrecipe: {}\nb: 2"]
)
def test_a_known_kind_is_found_however_it_is_written(tmp_path: Path, kind: str, line: str) -> None:
    path = tmp_path / "any.yml"
    path.write_text(line.format(kind) + "\n")
    importer = recipe_importer(str(path))
    assert importer.find_spec("__main__").loader is importer
    assert importer.find_spec("os") is None  # the path stays in sys.path: it must hold nothing else


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"a: 1\n", "needs the key recipe, one of logprob, stream"),
        (b"recipe: logprb\n", "unknown recipe logprb; did you mean 'logprob'?"),
        (b"recipe: [logprob]\n", "unknown recipe ['logprob']"),
        (b"recipe:\n", "needs the key recipe"),
        (b"a: [1, 2\n", "is not valid YAML in line"),
        (b"", "must be a YAML mapping"),
        (b"# recipe: stream\n", "must be a YAML mapping"),
        (b"- recipe: stream\n", "must be a YAML mapping"),
        (b"\xff\xfe\x00", "is not valid YAML"),
        (b"task: gsm_symbolic\ntarget: x\nlimit: 3\n", "is a recipe for data: parse-data build "),
        (b"task: gsm_symbolic\ntarget: x\nlimt: 3\n", "is a recipe for data: parse-data build "),
        (b"compute_environment: LOCAL_MACHINE\nuse_cpu: true\n", "needs the key recipe"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = tmp_path / "other.yaml"
    path.write_bytes(content)
    result = python(path)
    assert result.returncode == 2, result.stderr
    assert sentence in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_other_paths_are_left_to_other_hooks(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.yaml", tmp_path, tmp_path / "folder.yaml"):
        if path.name == "folder.yaml":
            path.mkdir()
        with pytest.raises(ImportError):
            recipe_importer(str(path))


@pytest.mark.slow
def test_python_runs_a_recipe_and_its_arguments_arrive(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("recipe: stream\ntarget: x\n")
    result = python(recipe, "--nonsense", "3")
    assert result.returncode == 2
    assert "unknown key nonsense" in result.stderr and len(result.stderr.strip().splitlines()) == 1


def test_the_hook_is_there_at_start_up_and_imports_nothing() -> None:
    code = "import sys; print(any(h.__name__ == 'recipe_hook' for h in sys.path_hooks), 'parse_train' in sys.modules)"
    assert python("-c", code).stdout.split() == ["True", "False"]


def test_runpy_runs_a_recipe_as_python_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("recipe: stream\n")
    monkeypatch.setattr(sys, "argv", [str(recipe), "--help-me"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(recipe), run_name="__main__")
    assert end.value.code == 2
