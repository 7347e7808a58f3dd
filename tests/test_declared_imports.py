"""What is imported is declared, and where: the base installation loads and generates, extras bring the rest."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from parse_infer.optional_dependencies import EXTRAS, install, missing_package

ROOT = Path(__file__).parents[1]
PACKAGES = {"parse_infer", "parse_train", "data_tools"}
FIRST_PARTY = PACKAGES | {"parse_zoo", "tools", "tests"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPTIONAL = PROJECT["optional-dependencies"]
DISTRIBUTIONS = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}  # others: the module's name, with -


FAMILY = re.compile("(?<=^opentelemetry)-.*")  # distributions that share a module
# The smaller before the larger.
EXTRA_NAMES = ("bench", "data", "train", "gguf", "vllm-client", "serve", "eval", "vllm", "otel")


def declared(*extras: str) -> set[str]:
    """Distributions of the base installation and of some extras, with the extras that they name."""
    found: set[str] = set()
    for requirement in [*PROJECT["dependencies"], *(r for extra in extras for r in OPTIONAL[extra])]:
        name, inner = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", requirement).groups()
        found |= declared(*inner.split(",")) if name == PROJECT["name"] else {FAMILY.sub("", name.lower())}
    return found


def imported(*files: Path) -> Iterator[tuple[str, Path]]:
    """Every foreign module that the files import, anywhere in them."""
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module else []
            for module in {name.split(".")[0] for name in names} - FIRST_PARTY - set(sys.stdlib_module_names):
                yield module, path


def distribution(module: str) -> str:
    return DISTRIBUTIONS.get(module, module.replace("_", "-"))


def files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


SERVE, BACKENDS = (files(f"parse_infer/{room}") for room in ("serve", "backends"))
LM_EVAL = [*files("parse_infer/evaluation/lm_eval"), *files("data_tools/tasks/lm_eval")]
OUTER = [path for room in ("evaluation", "calibration", "cli") for path in files(f"parse_infer/{room}")]
OUTER = [path for path in OUTER if path not in LM_EVAL]
TRACKING = ROOT / "parse_infer/tracking.py"  # of builds and benchmarks too, where wandb is installed


@pytest.mark.parametrize(
    ("sources", "extras"),
    [
        (
            [path for path in files("parse_infer") if path not in [*OUTER, *SERVE, *LM_EVAL, *BACKENDS, TRACKING]],
            ["gguf"],
        ),
        (OUTER, ["bench"]),
        (SERVE, ["serve", "otel"]),
        (LM_EVAL, ["eval"]),
        (BACKENDS, ["vllm-client"]),
        ([path for path in files("data_tools") if path not in LM_EVAL], ["data"]),
        ([*files("parse_train"), TRACKING], ["train"]),
        (files("zoo/parse_zoo"), ["train"]),
    ],
    ids=[
        "parse_infer",
        "evaluation, calibration and cli",
        "serve",
        "lm_eval",
        "backends",
        "data_tools",
        "parse_train",
        "zoo",
    ],
)
def test_every_import_is_declared(sources, extras):
    assert len(sources) > 2
    known = declared(*extras)
    undeclared = {module: path.name for module, path in imported(*sources) if distribution(module) not in known}
    assert not undeclared


STARTED = {"vllm"}  # as a program
FOR_OTHERS = {"antlr4-python3-runtime"}  # for math-verify, whose own extra clashes with that of lm-eval


@pytest.mark.slow
def test_nothing_is_declared_that_nobody_imports():
    everything = [path for package in (*PACKAGES, "zoo/parse_zoo") for path in files(package)]
    used = {distribution(module) for module, _ in imported(*everything)}
    assert declared(*EXTRA_NAMES) - STARTED - FOR_OTHERS <= used


@pytest.mark.slow
def test_sentences_about_missing_packages_name_the_extra_that_has_them():
    base, own = declared(), {extra: declared(extra) for extra in EXTRA_NAMES}
    everything = [path for package in (*PACKAGES, "zoo/parse_zoo") for path in files(package)]
    modules = {module for module, _ in imported(*everything) if distribution(module) not in base}
    assert {m: next(e for e in own if distribution(m) in own[e]) for m in modules | STARTED} == EXTRAS
    assert missing_package(ModuleNotFoundError(name="scipy.stats")) == (
        'the package scipy is missing: in a checkout of this repository, pip install -c constraints.txt ".[bench]"'
    )
    assert missing_package(ModuleNotFoundError(name="tiktoken")).endswith(": pip install tiktoken")


def pins(constraints: str) -> dict[str, str]:
    """The versions of a constraints file, by distribution."""
    lines = (ROOT / constraints).read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(name): pin for name, pin in (line.split("==") for line in lines if "==" in line)}


def advised() -> set[tuple[str, str]]:
    """Each constraints file and each list of extras that a page, a message or a build script installs together."""
    code = ["examples/*.py", "parse_*/**/*.py", "data_tools/**/*.py"]
    pages = ["README.md", "docs/**/*.md", "recipes/**/*.yaml", *code]
    paths = [path for pattern in [*pages, "deploy/*", "Makefile", ".ci/run"] for path in ROOT.glob(pattern)]
    texts = [*map(install, OPTIONAL), *(path.read_text(encoding="utf-8").replace("\\\n", "") for path in paths)]
    command = re.compile(r'pip install [^\n]*?-c (?:"\$constraints"|(\S+\.txt))[^\n]*?\[([\w,-]+)\]"')
    return {(file or "constraints.txt", extras) for text in texts for file, extras in command.findall(text)}


def test_an_advised_command_can_be_resolved():
    """Its constraints pin what its extras declare, at versions that the extras allow."""
    found = advised()
    assert {("constraints-vllm.txt", "vllm"), ("constraints.txt", "serve")} <= found and len(found) > 10
    for file, extras in found:
        known = pins(file)
        for text in (text for extra in extras.split(",") for text in requirements(extra)):
            requirement = Requirement(text)
            pin = known.get(canonicalize_name(requirement.name))
            assert pin is not None, f"{file} has no {requirement.name} for [{extras}]"
            assert requirement.specifier.contains(pin), (
                f"{file} pins {requirement.name}=={pin}, but [{extras}] has {text}"
            )


def requirements(extra: str) -> list[str]:
    """The requirements of an extra and of the extras that it names."""
    own = [text for text in OPTIONAL[extra] if not text.startswith(PROJECT["name"])]
    named = (Requirement(text).extras for text in OPTIONAL[extra] if text.startswith(PROJECT["name"]))
    return own + [text for extras in named for inner in extras for text in requirements(inner)]


def test_the_page_on_servers_installs_vllm_as_the_message_says():
    venv, export = install("vllm").partition(", ")[2].rsplit(" && ", 1)
    page = (ROOT / "docs" / "guide" / "servers.md").read_text(encoding="utf-8")
    assert re.search(rf"^{re.escape(venv)}(  |$)", page, re.MULTILINE)
    assert re.search(rf"^{re.escape(export)}(  |$)", page, re.MULTILINE)
    assert missing_package(ModuleNotFoundError(name="vllm")).endswith(install("vllm"))


NO_DEEPSPEED = """
import importlib, sys
sys.modules["deepspeed"] = None
from parse_train.recipe import recipes
for module in recipes().values():
    importlib.import_module(module)
"""


@pytest.mark.slow
def test_trainings_need_no_deepspeed():
    """DeepSpeed is in an extra of its own."""
    subprocess.run([sys.executable, "-c", NO_DEEPSPEED], cwd=ROOT, check=True)


# yaml and pydantic come with the base installation's own dependencies, as do fsspec and tokenizers.
COME_ALONG = {"fsspec", "pydantic", "pydantic_core", "tokenizers", "yaml"}
BASE_ONLY = f"""
import json, sys
sys.modules.update(dict.fromkeys({sorted(set(EXTRAS) - COME_ALONG)}))
from parse_infer.cli.app import main
for arguments in json.load(sys.stdin):
    print(main(arguments), file=sys.stderr)
"""


@pytest.mark.slow
def test_the_base_installation_generates_and_names_the_extra_for_what_it_cannot_do(tmp_path: Path):
    (tmp_path / "problems.jsonl").write_text('{"prompt": "1 + 1?", "reference": "2"}')
    jsonl = ["--task", "jsonl", "--task-option", f"path={tmp_path}/problems.jsonl"]
    commands = [
        ["generate", "What is 3 + 4?", "--max-new-tokens", "4"],
        ["score", "What is 3 + 4?", "It is 7."],
        ["cost", "--target", "zoo:draft", "--draft", "zoo:draft", "--rounds", "1", "--context", "8"],
        ["demo", "--limit", "1"],
        ["bench", *jsonl, "--out", str(tmp_path / "bench")],
        ["bench", "--task", "gsm8k", "--out", str(tmp_path / "bench")],
        ["serve", "--port", "0"],
        ["eval", "--tasks", "gsm8k"],
    ]
    run = subprocess.run(
        [sys.executable, "-c", BASE_ONLY], input=json.dumps(commands), capture_output=True, text=True, cwd=ROOT
    )
    lines = [line for line in run.stderr.splitlines() if re.fullmatch(r"\d+", line) or line.startswith("error")]
    assert [line for line in lines if line.isdecimal()] == ["0", "0", "0", "2", "2", "2", "2", "2"], run.stderr
    demo, bench, gsm8k, serve, evaluation = (line for line in lines if line.startswith("error"))
    assert demo.endswith(f"the package reasoning_gym is missing: {install('bench')}")
    assert re.search(rf"the package (matplotlib|scipy|PIL) is missing: {re.escape(install('bench'))}$", bench)
    assert serve.endswith(f"the package fastapi is missing: {install('serve')}")
    assert re.search(r'(datasets|lm_eval) is missing: .* "\.\[(data|eval)\]"$', evaluation)
    assert gsm8k.endswith((install("bench"), install("data")))


@pytest.mark.parametrize(
    ("module", "arguments", "missing"),
    [
        ("data_tools.cli", ["build", "recipes/data.yaml"], "yaml|trl|filelock|datasets"),
        ("parse_train.__main__", ["recipes/train.yaml"], "yaml|trl|peft|accelerate"),
    ],
)
@pytest.mark.slow
def test_without_their_extras_data_and_training_say_so(module: str, arguments: list[str], missing: str):
    code = f"import sys; sys.modules.update(dict.fromkeys({sorted(set(EXTRAS) - COME_ALONG | {'yaml'})})); "
    code += f"from {module} import main; sys.exit(main({arguments}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 2 and len(run.stderr.strip().splitlines()) == 1, run.stderr
    assert re.search(rf'error: the package ({missing}) is missing: .* "\.\[\w+\]"$', run.stderr.strip())


def test_no_page_or_message_installs_this_package_from_an_index():
    """Nobody owns its name there: only a checkout or a wheel of one can be installed."""
    patterns = (
        "parse_*/**/*.py",
        "data_tools/**/*.py",
        "tests/**/*.py",
        "docs/**/*.md",
        "README.md",
        "recipes/**/*.yaml",
    )
    pages = [path for pattern in (*patterns, "deploy/*", "Makefile", ".ci/run") for path in ROOT.glob(pattern)]
    named = re.compile(r"\binstall\b[^\n]*[ \"']" + re.escape(PROJECT["name"]))
    wrong = [f"{path.relative_to(ROOT)}: {line}" for path in pages for line in named.findall(path.read_text("utf-8"))]
    assert len(pages) > 200 and not wrong, wrong
