"""Compare the rungs of a ladder of judges, each trained with several seeds, on the same held-out drafts.

`python -m tools.judge_ladder data/held-out --rung log-probabilities=runs/a0/adapter,runs/a1/adapter
--rung stream=runs/b0/adapter,runs/b1/adapter --out runs/ladder.json`

Each figure is the mean over a rung's seeds. The differences to the first rung have 95 % intervals, by one paired
bootstrap over problems. Two rules without training stand below the rungs. Scores are kept beside the result, so an
interrupted comparison goes on where it stopped. `python -m tools.render_docs` renders the JSON file as the table
`ladder`.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from data_tools.labels.logprobs import ReadDraft, read_drafts
from parse_infer.cli.entry_point import run_app
from parse_infer.errors import ParseError
from parse_infer.files import write_json
from parse_infer.judge.adapter import ValidityAdapter
from parse_infer.judge.carried import Carried
from parse_infer.judge.token_logprobs import TokenLogprobs
from parse_infer.judge.verifier import Verifier
from parse_infer.models.environment import describe_machine, describe_run
from parse_infer.models.loading import LanguageModel, load_language_model
from parse_infer.text.cuts import Segmenter
from parse_train.judge.build_info import read_build_info
from parse_train.judge.metrics import Floats, ScoredDrafts, first_error

COMMAND = "python -m tools.judge_ladder"
MISSED = (0.01, 0.02, 0.05)
"""Shares of the errors that a judge accepts, at which the right tokens that it rejects are compared."""
FIGURES = ("auroc", "ap_error", "auroc_draft", "ap_error_draft", *(f"rejected_at_{share:g}" for share in MISSED))
RULES: dict[str, Callable[[TokenLogprobs], Tensor]] = {
    "min-p": lambda found: found.own - found.top[:, 0],
    "lowest log-probability": lambda found: found.own,
}
"""Scores of single tokens; a prefix has the lowest of its tokens."""
_ANY = Carried(usual=True)  # drafts at higher temperatures are outside the range of those at the lowest

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def compare(
    data: Annotated[Path, typer.Argument(help="Held-out build with log-probabilities, which no adapter has learnt.")],
    rung: Annotated[list[str], typer.Option(help="NAME=ADAPTER,ADAPTER,…: one adapter for each seed.")],
    out: Annotated[Path, typer.Option(help="JSON file of the result.")] = Path("runs/ladder.json"),
    dtype: Annotated[str, typer.Option(help="Dtype of the target.")] = "auto",
    device: Annotated[str | None, typer.Option(help="Device of the target; default: the GPU, if any.")] = None,
    resamples: Annotated[int, typer.Option(help="Resamples of the bootstrap.")] = 1000,
) -> None:
    """Compare the rungs of a ladder of judges on the same held-out drafts."""
    rungs = read_rungs(rung)
    drafts = list(read_drafts(data))
    lm = load_language_model(read_build_info(str(data)).target["name"], role="target", dtype=dtype, device=device)
    scores = {
        name: [score(folder, drafts, lm, out.with_suffix("")) for folder in folders] for name, folders in rungs.items()
    } | {name: [score_by_rule(rule, drafts)] for name, rule in RULES.items()}
    owners = [draft.row.problem for draft in drafts]
    result = {
        "environment": {
            **describe_machine(lm.decoder.device),
            **describe_run(),
            "command": f"{COMMAND} {shlex.join(sys.argv[1:])}",
            "dtype": str(lm.model.dtype).removeprefix("torch."),
        },
        "data": data.name,
        "drafts": len(drafts),
        "problems": len(set(owners)),
        "wrong_drafts": sum(not all(draft.row.labels) for draft in drafts),
        "auroc_of_length": length_auroc(next(iter(scores.values()))[0]),
        "rungs": compare_rungs(scores, owners, resamples),
    }
    write_json(out, result)
    Console().print(table(result))


def read_rungs(options: Sequence[str]) -> dict[str, list[str]]:
    """Read `NAME=FOLDER,FOLDER`; a ValueError names the wrong one."""
    rungs = {}
    for option in options:
        name, _, folders = option.partition("=")
        if not (name and folders):
            raise ParseError(f"--rung {option!r} is not NAME=ADAPTER,ADAPTER")
        rungs[name] = folders.split(",")
    return rungs


def score(folder: str, drafts: Sequence[ReadDraft], lm: LanguageModel, kept: Path) -> ScoredDrafts:
    """Score all drafts as the engine does, or read the scores of an earlier run from the folder `kept`."""
    adapter = ValidityAdapter.from_pretrained(folder, lm.model)
    file, rows = kept / f"{adapter.fingerprint}-{len(drafts)}.json", [draft.row for draft in drafts]
    if not file.is_file():
        verifier, found = Verifier(lm.decoder, adapter, Segmenter(lm.tokenizer)), []
        for row in track(rows, folder, console=Console(stderr=True)):
            lm.decoder.seek(lm.render(row.prompt))
            found.append(verifier.verify(row.draft_ids, row.cuts, _ANY).validity)
        kept.mkdir(parents=True, exist_ok=True)
        write_json(file, found)
    validity = json.loads(file.read_text())
    return ScoredDrafts.from_rows(validity, [row.labels for row in rows], [row.cuts for row in rows])


def score_by_rule(rule: Callable[[TokenLogprobs], Tensor], drafts: Sequence[ReadDraft]) -> ScoredDrafts:
    """Score each prefix by its lowest token, from the stored log-probabilities."""
    scores = []
    for draft in drafts:
        lowest = torch.cat([torch.zeros(1), rule(draft.logprobs).cummin(0).values])
        scores.append(lowest[draft.row.cuts].tolist())
    rows = [draft.row for draft in drafts]
    return ScoredDrafts.from_rows(scores, [row.labels for row in rows], [row.cuts for row in rows])


def compare_rungs(
    scores: Mapping[str, Sequence[ScoredDrafts]], problems: Sequence[str], resamples: int, seed: int = 0
) -> dict[str, dict[str, Any]]:
    """Return, for each rung, its `FIGURES`, and `to_first`: their differences to the first rung with an interval."""
    owner = np.unique(np.asarray(problems), return_inverse=True)[1]
    rows_of = [np.flatnonzero(owner == problem) for problem in range(owner.max() + 1)]
    generator, names = np.random.default_rng(seed), list(scores)

    def means(rows: NDArray[np.int64]) -> Floats:
        return np.array([np.mean([figures(each, rows) for each in scores[name]], axis=0) for name in names])

    whole = means(np.arange(len(owner)))
    drawn = np.array(
        [
            means(np.concatenate([rows_of[i] for i in generator.integers(len(rows_of), size=len(rows_of))]))
            for _ in track(range(resamples), "bootstrap", console=Console(stderr=True))
        ]
    )
    apart = np.quantile(drawn - drawn[:, :1], [0.025, 0.975], axis=0)
    result: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(names):
        result[name] = {"seeds": len(scores[name]), **dict(zip(FIGURES, whole[i].round(5).tolist(), strict=True))}
        result[name]["to_first"] = {
            figure: [round(float(x), 5) for x in (whole[i, j] - whole[0, j], apart[0, i, j], apart[1, i, j])]
            for j, figure in enumerate(FIGURES)
        }
    return result


def figures(drafts: ScoredDrafts, rows: NDArray[np.int64]) -> list[float]:
    """Return `FIGURES` of these drafts.

    A draft's score is the lowest of its prefixes. `rejected_at_X` is the share of the tokens before the first error
    that the judge rejects, at the threshold where it accepts the error of the share X of the wrong drafts.
    """
    part = ScoredDrafts(drafts.scores[rows], drafts.labels[rows], drafts.cuts[rows])
    validity, labels = part.flat
    lowest = np.minimum.accumulate(np.where(part.real, part.scores, np.inf), axis=1)
    error = first_error(part.labels == 1, part.real)
    wrong = error >= 0
    found = [
        roc_auc_score(labels, validity),
        average_precision_score(1 - labels, -validity),
        roc_auc_score(~wrong, lowest[:, -1]),
        average_precision_score(wrong, -lowest[:, -1]),
    ]
    at_error = np.sort(lowest[np.flatnonzero(wrong), error[wrong]])
    sizes = np.diff(np.where(part.real, part.cuts, 0), prepend=0, axis=1)
    right = part.real & (np.arange(part.labels.shape[1]) < np.where(wrong, error, part.labels.shape[1])[:, None])
    for share in MISSED:
        threshold = np.nextafter(at_error[max(0, int(np.ceil((1 - share) * len(at_error))) - 1)], 2)
        found.append(float(sizes[right & (lowest < threshold)].sum() / max(1, sizes[right].sum())))
    return [float(value) for value in found]


def length_auroc(drafts: ScoredDrafts) -> float:
    """Return the AUROC of the draft's length alone, short drafts taken as right."""
    right = first_error(drafts.labels == 1, drafts.real) < 0
    return round(float(roc_auc_score(right, -drafts.cuts.max(axis=1))), 4)


def table(result: Mapping[str, Any]) -> Table:
    """Show the figures; below each that of a later rung its difference to the first."""
    shown = Table(title=f"{result['wrong_drafts']:,} of {result['drafts']:,} drafts have an error")
    shown.add_column("figure")
    for name, of_rung in result["rungs"].items():
        shown.add_column(f"{name} ({of_rung['seeds']})", justify="right")
    for figure in FIGURES:
        cells = []
        for i, of_rung in enumerate(result["rungs"].values()):
            apart, low, high = of_rung["to_first"][figure]
            cells.append(f"{of_rung[figure]:.3f}" + (f"\n{apart:+.3f} [{low:+.3f}, {high:+.3f}]" if i else ""))
        shown.add_row(figure, *cells)
    shown.caption = f"AUROC of the length alone: {result['auroc_of_length']:.3f}"
    return shown


if __name__ == "__main__":
    raise SystemExit(run_app(app, COMMAND, None))
