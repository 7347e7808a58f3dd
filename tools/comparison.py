"""Compare judges and acceptance rules on one pair of models: every rule is a file, and gets a calibration of its own.

`python -m tools.comparison comparison/embedded [--render-only] [--option KEY=VALUE … --out FOLDER]`

`pair.yaml` in the folder names the pair, the task and the settings, by the fields of `ModelOptions` and
`CalibrationSettings`, and `task`, `task_option`, `split`, `seed` and `limit` of `parse-infer calibrate`. Every other
YAML file is a rule: its keys, such as `judge` or `blocks`, come before those of `pair.yaml`. The command runs the
calibrations that are missing, in `runs/comparison/PAIR`, and writes `results.json`, `results.md` and `figure.png`
beside the YAML files. An interrupted run continues with the same command. A rule that `results.json` has with the same
options is not measured again; without its entry it is. `--option` replaces options of all rules, on a GPU say, where
`--out` keeps the results apart.

Judges with a `batch_size` above 1 and otherwise equal settings are measured in one (`tools.joint_comparison`).
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer
import yaml

from data_tools.tasks.checkers import same_answer
from data_tools.tasks.task import Problem, Task
from data_tools.tasks.task import comparison as own_comparison
from parse_infer.calibration.calibration_file import FILE, load_calibrations, save_calibrations
from parse_infer.calibration.measure import calibrate, check_problems
from parse_infer.calibration.outcome import Outcome
from parse_infer.calibration.schema import Calibration
from parse_infer.calibration.settings import CalibrationSettings
from parse_infer.cli.entry_point import run_app
from parse_infer.cli.model_options import ModelOptions
from parse_infer.cli.options import read_pairs
from parse_infer.cli.problems import describe_problems, open_task, take_problems
from parse_infer.errors import ParseError
from parse_infer.files import read_json, read_jsonl, write_json, write_text
from parse_infer.models.environment import describe_run
from parse_infer.settings.sampling import Sampling
from parse_infer.suggest import suggestion
from tools.comparison_results import draw, markdown, summarise
from tools.joint_comparison import JointComparison

COMMAND = "python -m tools.comparison"
PAIR = "pair.yaml"
RUNS = Path("runs/comparison")
OPTIONS = "options.json"
_PROBLEMS: dict[str, Any] = {
    "task": "gsm_symbolic",
    "task_option": (),
    "split": "validation",
    "seed": 0,
    "limit": 500,
}
_OWN = ("label",)  # keys for the results alone
_LISTS = ("risks", "thresholds", "blocks")  # one value may stand alone
_NUMBERS = ("limit", "seed", "timed", "samples", "batch_size", "max_new_tokens")
_SHOWN = (*_OWN, "batch_size")  # keys that change no result

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@dataclass(frozen=True)
class Run:
    """The calibration of one rule.

    Attributes:
        options: what the YAML files say.
        problems: the keys of `_PROBLEMS`.
        folder: of the calibration.
    """

    name: str
    options: dict[str, Any]
    models: ModelOptions
    settings: CalibrationSettings
    problems: dict[str, Any]
    folder: Path

    @classmethod
    def of(cls, name: str, options: Mapping[str, Any], folder: Path) -> Run:
        """Read merged options. Raise ValueError for an unknown key, or a value out of range."""
        parts = [{f.name for f in fields(kind)} for kind in (ModelOptions, CalibrationSettings)]
        _check_keys(options, [*parts[0], *parts[1], *_PROBLEMS, *_OWN], f"the comparison {name}")
        models, settings = ({key: options[key] for key in options if key in part} for part in parts)
        values: dict[str, Any] = {
            key: tuple(v) if isinstance(v, list) else (v,) if key in _LISTS else v for key, v in settings.items()
        }
        problems = {key: options.get(key, default) for key, default in _PROBLEMS.items()}
        for key, number in {**values, **problems}.items():
            if key in _NUMBERS and type(number) is not int:
                raise ParseError(f"{key} of the comparison {name} is {number!r}; it must be a whole number")
        try:
            if (sampling := values.get("sampling")) is not None:
                if not isinstance(sampling, dict):
                    raise ParseError(
                        f"sampling of the comparison {name} is {sampling!r}; give it as {{temperature: 1}}"
                    )
                _check_keys(sampling, [f.name for f in fields(Sampling)], "sampling")
                values["sampling"] = Sampling(**sampling)
            own = ModelOptions(**models), CalibrationSettings(**values)
        except TypeError as error:
            raise ParseError(f"the comparison {name} has an option of another type: {error}") from None
        return cls(name, dict(options), *own, problems, folder)

    @property
    def joint(self) -> bool:
        """Whether one measurement serves this judge and others."""
        return self.settings.batch_size > 1

    def shares(self, other: Run) -> bool:
        """Whether one measurement serves both: their settings differ in judge and thresholds only."""
        one, two = (
            (replace(run.models, judge=None, adapter=None), replace(run.settings, thresholds=()), run.problems)
            for run in (self, other)
        )
        return one == two

    @property
    def done(self) -> bool:
        """Whether the calibration with these options has ended."""
        path = self.folder / OPTIONS
        return path.is_file() and self.matches(read_json(path, "delete it to calibrate again"))

    def matches(self, options: Mapping[str, Any]) -> bool:
        """Whether a calibration with these options has the same results."""
        one, other = ({k: v for k, v in each.items() if k not in _SHOWN} for each in (self.options, options))
        return one == other

    def measure(self) -> None:
        """Calibrate the rule, or the rest of an interrupted calibration."""
        task, problems, where = self.open_problems()
        own = partial(own_comparison, task)
        with self.models.load() as engine:
            found = calibrate(
                engine, problems, task.check, same_answer, self.folder, self.settings, task=where, comparison=own
            )
        self.save(found)

    def open_problems(self) -> tuple[Task, list[Problem], str]:
        """The task, its problems and their description. Raises ValueError for too few problems."""
        task = open_task(self.problems["task"], self.problems["task_option"])
        split, seed = self.problems["split"], self.problems["seed"]
        problems = take_problems(task, split, seed, self.problems["limit"])
        check_problems(problems, self.settings)
        return task, problems, describe_problems(self.problems["task"], self.problems["task_option"], split, seed)

    def save(self, calibration: Calibration) -> None:
        save_calibrations(self.folder / FILE, [calibration])
        write_json(self.folder / OPTIONS, self.options)

    def outcomes(self) -> list[Outcome]:
        names = tuple(f.name for f in fields(Outcome))
        rows = read_jsonl(self.folder / "records.jsonl")
        return [Outcome(**{name: row[name] for name in names if name in row}) for _, row in rows]

    def results(self) -> dict[str, Any]:
        """What the table and the figure show of a rule that has been measured."""
        config = read_json(self.folder / "config.json", "calibrate again")
        calibration = load_calibrations(self.folder / FILE)[0]
        found = summarise(self.outcomes(), calibration)
        for point, sizes in zip(found["points"], config.get("sizes", ()), strict=False):  # of a joint measurement
            point |= sizes
        made = {"machine": config.get("machine"), "date": calibration.made.get("date")}
        return {"options": self.options, **made, **found}


def read_runs(folder: Path, replaced: Mapping[str, Any] = MappingProxyType({}), out: Path | None = None) -> list[Run]:
    """The rules of a folder, by name, measured in `RUNS` or in `out`.

    Args:
        replaced: options of all rules.

    Raises OSError or ValueError for missing or wrong files.
    """
    pair = _read(folder / PAIR)
    rules = sorted(path for path in folder.glob("*.yaml") if path.name != PAIR)
    if not rules:
        raise ParseError(f"{folder} has no rule: add a file such as min_p.yaml with the line `judge: min_p`")
    runs = out or RUNS / folder.name
    return [Run.of(path.stem, pair | _read(path) | replaced, runs / path.stem) for path in rules]


def measure_jointly(runs: Sequence[Run], folder: Path) -> None:
    """Measure all judges in one, or the rest of an interrupted measurement."""
    first = runs[0]
    judges = {run.name: (run.models.judge, run.models.adapter, run.settings) for run in runs}
    comparison = JointComparison(judges, folder)
    task, problems, where = first.open_problems()
    with first.models.load() as engine:
        for name, (outcomes, calibration, sizes) in comparison.measure(engine, task, problems, where).items():
            run = next(run for run in runs if run.name == name)
            run.folder.mkdir(parents=True, exist_ok=True)
            write_json(run.folder / "config.json", {"machine": engine.describe_machine(), "sizes": sizes})
            records = "".join(json.dumps(asdict(outcome)) + "\n" for outcome in outcomes)
            write_text(run.folder / "records.jsonl", records)
            run.save(calibration)


@app.command()
def compare(
    pair: Annotated[Path, typer.Argument(help="Folder with pair.yaml and a YAML file for each rule.")],
    render_only: Annotated[bool, typer.Option("--render-only", help="Measure nothing; show what is there.")] = False,
    option: Annotated[
        list[str] | None,
        typer.Option(help="KEY=VALUE (repeatable), in place of what the files say; needs --out."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of records and results; default: beside the files.")] = None,
) -> None:
    """Compare judges and acceptance rules on one pair of models."""
    if option and out is None:
        raise ParseError("--option needs --out FOLDER, which keeps the results apart from those of the files")
    runs = read_runs(pair, read_pairs(option, "--option"), out)
    results_of = out or pair
    known, earlier = _known(results_of / "results.json")
    kept = [run for run in runs if run.name in known and run.matches(known[run.name]["options"])]
    rest = [run for run in runs if run not in kept]
    joint = [run for run in rest if run.joint]
    missing = [run for run in rest if not run.done]
    for run in kept:
        print(f"note: {run.name} is kept from results.json, with which it has the same options", file=sys.stderr)
    if not render_only:
        while joint:
            one = [run for run in joint if run.shares(joint[0])]
            joint = [run for run in joint if run not in one]
            if any(run in missing for run in one):
                measure_jointly(one, one[0].folder.with_name("+".join(run.name for run in one)))
        for run in missing:
            if not run.joint:
                print(f"{run.name}: {run.folder}", file=sys.stderr)
                run.measure()
        missing = []
    for run in missing:
        if run.name in known:
            raise ParseError(
                f"{results_of / 'results.json'} has {run.name} with other options, and would lose it: give it these "
                "options again, or measure it without --render-only"
            )
        print(f"note: {run.name} has not been measured with these options; it is left out", file=sys.stderr)
    rules = {
        run.name: known[run.name] | {"options": run.options} if run in kept else run.results()
        for run in runs
        if run not in missing
    }
    if not rules:
        raise ParseError(f"no rule of {pair} has been measured: run `{COMMAND} {pair}` without --render-only")
    dates = [date for rule in rules.values() if (date := rule.get("date"))]
    command = f"{COMMAND} {shlex.join(sys.argv[1:])}" if out else f"{COMMAND} {pair}"
    made = {"date": max(dates, default=earlier or describe_run()["date"]), "command": command, "pair": pair.name}
    results = {"environment": made, "rules": rules}
    write_json(results_of / "results.json", results)
    write_text(results_of / "results.md", markdown(results))
    draw(results, results_of / "figure.png")
    print(markdown(results))


def _known(path: Path) -> tuple[dict[str, Any], str | None]:
    """The results of an earlier run, maybe on another machine, by rule, and its date: rules had none of their own."""
    if not path.is_file():
        return {}, None
    hint = "delete it to measure again"
    content = read_json(path, hint)
    if not isinstance(content, dict) or "rules" not in content:
        raise ParseError(f"{path} holds no results: {hint}")
    return dict(content["rules"]), content.get("environment", {}).get("date")


def _check_keys(options: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in options:
        if key not in known:
            raise ParseError(f"{key!r} is no option of {where}; {suggestion(key, known)}")


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}: a comparison is a folder with {PAIR} and a file for each rule")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ParseError(f"{path} is no YAML file ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise ParseError(f"{path} holds no options: write lines such as `judge: min_p`")
    return content


if __name__ == "__main__":
    raise SystemExit(run_app(app, COMMAND, None))
