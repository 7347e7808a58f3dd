"""The commands and the code of README and docs run, in this process and on less data where it would take minutes.

Of `make` only the target is looked up, `pip` is left to CI, and recipes for models of the Hub are read, not run. What
starts processes (accelerate, torchrun, python) is tested in tests/parse_train/test_launch.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from data_tools.cli import main as parse_data
from parse_infer.calibration.risk import p_value
from parse_infer.calibration.settings import CalibrationSettings
from parse_infer.cli.app import main as parse_infer
from parse_train.__main__ import main as parse_train
from parse_train.judge.config import JudgeTrainingConfig
from parse_train.recipe import load_recipe
from tools.calibration_simulation import main as simulate
from tools.calibration_splits import main as splits
from tools.render_docs import main as documents

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
NAMES = [page.relative_to(REPOSITORY).as_posix() for page in PAGES]
LAUNCHERS = ("accelerate", "torchrun", "python")
# What is put behind a command, so that it takes seconds.
LESS = {
    "parse-infer bench": "--limit 1 --thresholds none --max-new-tokens 24",
    "parse-infer generate": "--max-new-tokens 256",  # the embedded calibrations cover no smaller budget
    "parse-infer calibrate": "--limit 46 --risk 0.05 --block-tokens whole --loss disagreement --temperature 0 "
    "--top-p 1 --top-k 0 --samples 1 --max-new-tokens 8",
    "parse-infer cost": "--rounds 1",
    "parse-data build": "--limit 24 --problems_per_group 8 --max_draft_tokens 128",
    "stream": "--max_steps 1 --min_wrong_drafts 1 --calibration_problems 0 --report_to none --use_cpu true",
    "logprob": "--max_steps 1 --report_to none --use_cpu true",
    "eagle": "--max_steps 1 --n_problems 4 --n_eval_problems 2 --report_to none --use_cpu true",
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands(page: Path) -> Iterator[list[str]]:
    """The commands of a page in order, as words with the variables that it sets; a quoted text may span lines."""
    variables: dict[str, str] = {}
    for block in blocks(page, "bash"):
        waiting = ""
        for line in block.splitlines():
            waiting += line + "\n"
            try:
                words = shlex.split(waiting, comments=True)
            except ValueError:  # a quotation that is not closed yet
                continue
            waiting = ""
            if len(words) == 1 and (given := re.fullmatch(r"(\w+)=(.+)", words[0])):
                variables[given[1]] = given[2]
            elif words:
                yield [variables.get(word[1:], word) if word.startswith("$") else word for word in words]


def run(words: list[str], room: Path, number: int) -> int:
    """One command in this process. `room` stands for data/ and runs/: what one command writes the next one reads."""
    words = [re.sub(r"(?<![\w/.-])(?=(?:data|runs)/)", f"{room}/", word) for word in words]
    start = " ".join(words[:2])
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE), (
            f"no target {words[1]}"
        )
        return 0
    if words[:2] == ["parse-infer", "serve"]:
        with mock.patch("parse_infer.serve.server.ApiServer.run"):  # all but the serving
            return parse_infer([*words[1:], "--port", "0"])
    if words[0] == "parse-infer":
        out = {"parse-infer calibrate": "calibration", "parse-infer bench": "bench"}.get(start)
        place = ["--out", str(room / "runs" / out)] if out and "--out" not in words else []
        return parse_infer([*words[1:], *place, *LESS.get(start, "").split()])
    if words[0] == "parse-data":
        if any(word.startswith("recipes/real/") for word in words):
            return 0  # its models are on the Hub; tests/data_tools reads the recipe
        elsewhere = ["--output_dir", str(room / "data" / "validity")] if words[1] == "build" else []
        # Without the options of its recipe a task of the recipe's takes seconds less.
        options = (
            [] if {"--task_options", "--task-options"} & {*words} or words[1] != "build" else ["--task_options", "{}"]
        )
        return parse_data([*words[1:], *elsewhere, *options, *LESS.get(start, "").split()])
    if words[:2] == ["python", "-c"]:
        exec(compile(words[2], "a command", "exec"), {})
        return 0
    if words[:3] == ["python", "-m", "tools.render_docs"]:
        return documents(words[3:])
    if words[:3] == ["python", "-m", "tools.calibration_simulation"]:
        return simulate([*words[3:], "--rounds", "2", "--out", str(room / "simulation.json")])
    if words[:3] == ["python", "-m", "tools.calibration_splits"]:
        return splits([*words[3:], "--splits", "2"])
    assert words[0] in LAUNCHERS, f"nobody knows how to run {words}"
    return train(words, room, number)


def train(words: list[str], room: Path, number: int) -> int:
    """A recipe, whoever starts it (tests/parse_train/test_launch.py starts processes)."""
    for word in words:
        assert not word.startswith("recipes/") or (REPOSITORY / word).is_file(), f"there is no {word}"
    at = next(i for i, word in enumerate(words) if word.endswith(".yaml") and "/accelerate/" not in word)
    recipe, overrides = words[at], words[at + 1 :]
    if recipe.startswith("recipes/real/"):
        load_recipe(recipe, [*overrides, "--report_to", "none"])
        return 0
    kind = re.search(r"^recipe: (\w+)", (REPOSITORY / recipe).read_text(), re.MULTILINE)
    assert kind is not None
    name = {"stream": "judge", "eagle": Path(recipe).stem}.get(kind[1], kind[1])
    places = ["--output_dir", str(room / "runs" / (name if number == 0 else f"{name}-{number}"))]
    places = [] if {"--output_dir", "--output-dir"} & {*overrides} else places
    places += ["--data", str(room / "data" / "validity")] if kind[1] in ("logprob", "stream") else []
    places += ["--answers", str(room / "runs" / "answers")] if kind[1] == "eagle" else []
    return parse_train([recipe, *overrides, *places, *LESS[kind[1]].split()])


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_the_commands_of_a_page_run(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    trained = 0
    for words in commands(page):
        if words[0] in ("pip", "git"):
            continue
        first = words[0] not in LAUNCHERS or not any(word.endswith("recipes/train.yaml") for word in words)
        code = run(words, tmp_path, 0 if first else trained)
        trained += not first
        assert code == 0, f"{shlex.join(words)}: {capsys.readouterr().err}"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
@pytest.mark.slow
def test_the_code_of_a_page_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for code in blocks(page, "python"):
        exec(compile(code, page.name, "exec"), {})


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "folder",
    [
        "SECURITY.md",
        "parse_*/**/*.py",
        "data_tools/**/*.py",
        "tools/*.py",
        "recipes/**/*.yaml",
        "deploy/*",
        "zoo/**/*.md",
    ],
)
def test_the_pages_that_code_names_exist(folder: str) -> None:
    for path in REPOSITORY.glob(folder):
        for page, _, anchor in re.findall(r"\b(docs/[\w/-]+\.md)(#([\w-]+))?", path.read_text(encoding="utf-8")):
            there = REPOSITORY / page
            assert there.is_file() and (not anchor or anchor in anchors(there)), f"{path} names {page}#{anchor}"


@pytest.mark.parametrize("folder", ["*.md", "docs/**/*.md", "zoo/**/*.md"])
def test_links_lead_somewhere(folder: str) -> None:
    for page in REPOSITORY.glob(folder):
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            there = page.parent / path if path else page
            broken = f"{page.relative_to(REPOSITORY)} links to {target}"
            assert target.startswith("http") or there.exists(), broken
            assert not anchor or there.suffix != ".md" or anchor in anchors(there), broken


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 110


def test_the_page_on_the_structure_lists_every_module_once() -> None:
    rows = re.findall(
        r"^\| `([\w/]+\.py)` \|", (REPOSITORY / "docs" / "structure.md").read_text("utf-8"), re.MULTILINE
    )
    modules = [
        path for name in ("parse_infer", "data_tools", "parse_train") for path in REPOSITORY.glob(f"{name}/**/*.py")
    ]
    expected = [path.relative_to(REPOSITORY).as_posix() for path in modules if path.name != "__init__.py"]
    assert sorted(rows) == sorted(expected)


def test_the_tests_to_copy_exist() -> None:
    named = re.findall(r"`(test_\w+)`", (REPOSITORY / "docs" / "reference" / "extending.md").read_text("utf-8"))
    tests = "".join(path.read_text("utf-8") for path in (REPOSITORY / "tests").rglob("test_*.py"))
    assert len(named) > 5 and not [name for name in named if f"def {name}(" not in tests]


def test_the_index_links_to_every_page() -> None:
    index = REPOSITORY / "docs" / "README.md"
    linked = {
        (index.parent / path).resolve() for path in re.findall(r"(?<!!)\[[^]]+\]\(([^)#]+)", index.read_text("utf-8"))
    }
    others = {REPOSITORY / "CONTRIBUTING.md", *(REPOSITORY / "examples").glob("*.ipynb")}
    assert linked == {*(REPOSITORY / "docs").rglob("*.md"), *others} - {index}


def test_what_has_moved_is_not_named_any_more() -> None:
    """Modules and folders in documents, recipes and cards exist."""
    pages = [*PAGES, *REPOSITORY.glob("recipes/**/*.yaml"), *REPOSITORY.glob("zoo/parse_zoo/models/*/README.md")]
    named = r"\b((?:parse_infer|parse_train|data_tools|recipes|tests)/[\w./-]*\w)"
    for page in pages:
        for name in re.findall(named, page.read_text(encoding="utf-8")):
            assert (REPOSITORY / name).exists(), f"{page.relative_to(REPOSITORY)} names {name}"


def test_the_risks_of_examples_can_be_shown() -> None:
    """By the calibration that ends a training, also when a few requests are lost. Pages of results name runs."""
    n = JudgeTrainingConfig.calibration_problems
    level = CalibrationSettings().level
    pages = [path for path in PAGES if "results" not in path.parts]
    sources = [*pages, *REPOSITORY.glob("parse_infer/**/*.py"), *REPOSITORY.glob("recipes/**/*.yaml")]
    examples = [
        (path, float(risk)) for path in sources for risk in re.findall(r"(?:--risk |risk=)(0\.\d+)", path.read_text())
    ]
    assert len(examples) > 5
    hopeless = {
        str(path): risk for path, risk in examples if p_value([1.0] * 3 + [0.0] * (n - 3), risk, level) > level
    }
    assert not hopeless, hopeless
