"""Compare the rungs of a ladder of judges, each trained with several seeds, on the same held-out drafts.

`python -m tools.judge_ladder data/held-out --rung log-probabilities=runs/a0/adapter,runs/a1/adapter
--rung stream=runs/b0/adapter,runs/b1/adapter --out runs/ladder.json`

Each figure is the mean over a rung's seeds. The differences to the first rung have 95 % intervals, by one paired
bootstrap over problems (`tools.ladder_figures`). The rules without training stand below the rungs. Scores are kept
beside the result, so an interrupted comparison goes on where it stopped. `python -m tools.render_docs` renders the
JSON file as the table `ladder`.
"""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from data_tools.labels.logprobs import ReadDraft, read_drafts, read_info
from data_tools.labels.rows import LabelledDraft
from parse_infer import tracking
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.cli.entry_point import run_app
from parse_infer.errors import ParseError
from parse_infer.files import write_json
from parse_infer.judge.adapter import ValidityAdapter
from parse_infer.judge.adapter_files import adapts, read_adapter
from parse_infer.judge.carried import Carried
from parse_infer.judge.logprob_head import LogprobScorer
from parse_infer.judge.registry import RULES
from parse_infer.judge.rules.rule import TokenRule
from parse_infer.judge.token_logprobs import TokenLogprobs
from parse_infer.judge.verifier import Verifier
from parse_infer.models.environment import describe_machine, describe_run
from parse_infer.models.loading import LanguageModel, load_language_model
from parse_infer.models.names import resolve
from parse_infer.models.timing import Step, measure
from parse_infer.text.cuts import Segmenter
from parse_infer.tracking import RunOptions
from parse_train.judge.build_info import read_build_info
from parse_train.judge.metrics import Floats
from tools.ladder_figures import FIGURES, HeldOut, Judged, compare_rungs, few_errors

COMMAND = "python -m tools.judge_ladder"
FEWEST = 20  # problems with a wrong draft, of which 5 % are one, and with a right one
_TIMED = 30  # drafts
_WORST = 1e9  # doubt about a token that a rule keeps at no threshold
_ANY = Carried(usual=True)  # drafts at higher temperatures are outside the range of those at the lowest
_COSTS = ("seconds_per_100_tokens", "over_read")

app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def compare(
    data: Annotated[Path, typer.Argument(help="Held-out build with log-probabilities, which no adapter has learnt.")],
    rung: Annotated[list[str], typer.Option(help="NAME=ADAPTER,ADAPTER,…: one adapter for each seed.")],
    out: Annotated[Path, typer.Option(help="JSON file of the result.")] = Path("runs/ladder.json"),
    dtype: Annotated[str | None, typer.Option(help="Dtype of the target; default: that of DATA's reads.")] = None,
    device: Annotated[str | None, typer.Option(help="Device of the target; default: the GPU, if any.")] = None,
    resamples: Annotated[int, typer.Option(min=1, help="Resamples of the bootstrap.")] = 1000,
    unseen_only: Annotated[
        bool,
        typer.Option(
            "--unseen-only",
            help="Leave out problems that an adapter has learnt, instead of refusing them: what trainings held out of "
            "DATA by eval_share.",
        ),
    ] = False,
    report_to: Annotated[str, typer.Option(metavar="none|wandb", help="Tracker of the result.")] = "none",
    project: Annotated[str, typer.Option(help="Project in the tracker.")] = "parse",
) -> None:
    """Compare the rungs of a ladder of judges on the same held-out drafts."""
    if report_to not in tracking.TRACKERS:
        raise ParseError(f"--report-to is {report_to!r}; choose one of {', '.join(tracking.TRACKERS)}")
    rungs, build = read_rungs(rung), read_build_info(str(data))
    drafts, reads = list(read_drafts(data)), read_info(data)
    rules, dtype = rules_for(reads["k"]), dtype or reads["dtype"] or "auto"  # servers do not say theirs
    if taken := rungs.keys() & rules.keys():
        raise ParseError(f"--rung {min(taken)} has the name of a rule in the table: choose another")
    for adapter in (adapter for folders in rungs.values() for adapter in folders):
        known = learnt(adapter, [draft.row for draft in drafts])
        if known and not unseen_only:
            raise ParseError(
                f"{adapter} has learnt from {len(known)} of the held-out problems (first: {min(known)}): build them "
                "with another seed, exclude the training prompts, or leave them out with --unseen-only"
            )
        drafts = [draft for draft in drafts if draft.row.problem not in known]
    rows = [draft.row for draft in drafts]
    wrong = check_drafts(rows, str(data))
    lm = load_language_model(build.target["name"], role="target", dtype=dtype, device=device)
    held, costs, judged = HeldOut.of(rows), {}, {}
    for name, folders in rungs.items():
        scored = [score(folder, drafts, held, lm, out.with_suffix("")) for folder in folders]
        judged[name] = [each for each, _ in scored]
        costs[name] = {key: round(statistics.mean(cost[key] for _, cost in scored), 6) for key in _COSTS}
    judged |= {name: [score_by_rule(rule, drafts, held)] for name, rule in rules.items()}
    compared = compare_rungs(judged, held, resamples)
    result = {
        "environment": {
            **describe_machine(lm.decoder.device),
            **describe_run(),
            "command": f"{COMMAND} {shlex.join(sys.argv[1:])}",
            "dtype": str(lm.model.dtype).removeprefix("torch."),
        },
        "data": data.name,
        "reads": reads,
        "drafts": len(drafts),
        "problems": len(set(held.owner.tolist())),
        "wrong_drafts": wrong,
        "warning": few_errors(wrong),
        "auroc_of_length": held.length_auroc,
        "best_rule": max(rules, key=lambda name: compared[name]["kept_at_lost_0.02"]),
        "rungs": {name: of_rung | costs.get(name, {}) for name, of_rung in compared.items()},
    }
    write_json(out, result)
    models = tuple(filter(None, (build.target["name"], build.draft.get("name"))))
    run = RunOptions(out.with_suffix(""), "bench", "ladder", models, project)
    with tracking.job(run if report_to == "wandb" else None):
        tracking.log_table("ladder", *tracked(result))
        tracking.log_artifact("reference", "dataset", f"{run.pair}-drafts", data, used=True)
        for folder in chain.from_iterable(rungs.values()):
            kind = "stream" if adapts(read_adapter(resolve(folder)).validity_config) else "logprob"
            tracking.log_artifact("reference", "model", f"{run.pair}-{kind}-adapter", resolve(folder), used=True)
    Console().print(table(result))


def read_rungs(options: Sequence[str]) -> dict[str, list[str]]:
    """Read `NAME=FOLDER,FOLDER`; a ValueError names the wrong one."""
    rungs = {}
    for option in options:
        name, _, folders = option.partition("=")
        if not (name and all(folders.split(","))):
            raise ParseError(f"--rung {option!r} is not NAME=ADAPTER,ADAPTER")
        if name in rungs:
            raise ParseError(f"--rung names {name} twice: give its adapters in one, {name}=ADAPTER,ADAPTER")
        rungs[name] = folders.split(",")
    return rungs


def check_drafts(rows: Sequence[LabelledDraft], data: str) -> int:
    """Return the number of wrong drafts; raise ValueError if fewer than `FEWEST` problems have one, or a right one."""
    right = [all(row.labels) for row in rows]
    n_right, n_wrong = (
        len({row.problem for row, each in zip(rows, right, strict=True) if each is kind}) for kind in (True, False)
    )
    if min(n_right, n_wrong) < FEWEST:
        raise ParseError(
            f"{data} has wrong drafts of {n_wrong} problems and right ones of {n_right}, but a comparison needs at "
            f"least {FEWEST} of each: build more problems"
        )
    return len(rows) - sum(right)


def learnt(adapter: str, rows: Sequence[LabelledDraft]) -> set[str]:
    """Return the problems whose prompts an adapter, which is not loaded, has learnt."""
    prompts = read_adapter(resolve(adapter)).train_problems
    return {row.problem for row in rows if row.problem in prompts or prompt_hash(row.prompt) in prompts}


def rules_for(k: int) -> dict[str, Callable[[TokenLogprobs], Tensor]]:
    """Return the doubt about single tokens by every rule that reads at most `k` first choices; note the others."""
    rules: dict[str, Callable[[TokenLogprobs], Tensor]] = {"lowest log-probability": lambda found: -found.own}
    for name, kind in RULES.items():
        if not issubclass(kind, TokenRule):
            continue
        rule = kind()
        if rule.k <= k:
            rules[name.replace("_", "-")] = partial(_doubts, rule)
        else:
            print(f"note: {name} reads {rule.k} first choices and is left out: build with --logprobs {rule.k}")
    return rules


def _doubts(rule: TokenRule, found: TokenLogprobs) -> Tensor:
    return rule.doubts(found.first(rule.k))


def score(
    folder: str, drafts: Sequence[ReadDraft], held: HeldOut, lm: LanguageModel, kept: Path
) -> tuple[Judged, dict[str, float]]:
    """Score all drafts as the engine does, or read the scores of an earlier run from the folder `kept`.

    A head on log-probabilities has them already, so the target reads the drafts for other judges only.

    Returns:
        The judged drafts, and the cost of the pass: medians of the seconds per 100 draft tokens, and of their ratio to
        the seconds in which a verifier without a judge reads the draft, with the prompt in the cache.
    """
    adapter = ValidityAdapter.from_pretrained(folder, lm.model)
    scorer, rows = adapter.scorer(lm.tokenizer, lm.eos_ids, lm.model), [draft.row for draft in drafts]
    stored = [(draft.row.prompt, draft.row.draft_ids, draft.logprobs.own.tolist()) for draft in drafts]
    made = {**describe_machine(lm.decoder.device), "dtype": str(lm.model.dtype)}
    file = kept / f"{adapter.fingerprint}-{zlib.crc32(json.dumps([stored, made]).encode()):08x}.json"
    if not file.is_file():
        judge, reader = (Verifier(lm.decoder, each, Segmenter(lm.tokenizer)) for each in (adapter, None))
        odds = []
        for draft in track(drafts, folder, console=Console(stderr=True)):
            if type(scorer) is LogprobScorer and scorer.k <= draft.logprobs.top_ids.shape[1]:
                logits = scorer.token_scores(draft.logprobs.first(scorer.k), _ANY).logits
            else:
                lm.decoder.seek(lm.render(draft.row.prompt))
                scores = judge.verify_block(draft.row.draft_ids, _ANY).scores
                assert scores is not None
                logits = scores.logits
            odds.append([float(f"{value:.7g}") for value in (-logits.double()).exp().tolist()])
        cost = pass_cost(lambda ids: judge.verify_block(ids, _ANY), reader, rows, lm)
        kept.mkdir(parents=True, exist_ok=True)
        write_json(file, {"odds": odds, "cost": cost})
    found = json.loads(file.read_text())
    sharpness = adapter.head.config.sharpness
    # Powers of the odds of an error add up over tokens (`pool_doubt`), so each token's part is a difference.
    added = [np.diff(np.array(each) ** sharpness, prepend=0.0).clip(0) for each in found["odds"]]
    return Judged.of(added, held, adds_up=True), found["cost"]


def pass_cost(
    judge: Callable[[Sequence[int]], object], reader: Verifier, rows: Sequence[LabelledDraft], lm: LanguageModel
) -> dict[str, float]:
    """Time the pass with and without the judge over some of the drafts; see `score`."""
    some = rows[:: -(-len(rows) // _TIMED)]

    def after(prompt: list[int]) -> Callable[[], None]:
        def prepare() -> None:
            lm.decoder.seek(prompt[:-1])
            if lm.decoder.cached < len(prompt) - 1:
                lm.decoder.forward()
            lm.decoder.seek(prompt)

        return prepare

    steps = []
    for i, row in enumerate(some):
        prepare = after(lm.render(row.prompt))
        steps += [Step(f"judge {i}", prepare, partial(judge, row.draft_ids))]
        steps += [Step(f"read {i}", prepare, partial(reader.verify, row.draft_ids, []))]
    seconds = {name: each[0] for name, each in measure(steps, 1, lm.decoder.device).items()}
    judged = [seconds[f"judge {i}"] for i in range(len(some))]
    per_100 = [100 * one / len(row.draft_ids) for one, row in zip(judged, some, strict=True)]
    ratios = [one / seconds[f"read {i}"] for i, one in enumerate(judged)]
    return {"seconds_per_100_tokens": statistics.median(per_100), "over_read": statistics.median(ratios)}


def score_by_rule(rule: Callable[[TokenLogprobs], Tensor], drafts: Sequence[ReadDraft], held: HeldOut) -> Judged:
    """Score each prefix by its most doubtful token, from the stored log-probabilities."""
    added: list[Floats] = [rule(draft.logprobs).double().clamp_max(_WORST).numpy() for draft in drafts]
    return Judged.of(added, held, adds_up=False)


def tracked(result: Mapping[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows for a tracker, one row a rung."""
    keys = ("seeds", *FIGURES, *_COSTS)
    rows = [[name, *(of_rung.get(key) for key in keys)] for name, of_rung in result["rungs"].items()]
    return ["judge", *keys], rows


def table(result: Mapping[str, Any]) -> Table:
    """Show each figure of all judges, which are too many for columns, with a later one's difference to the first."""
    shown = Table(title=f"{result['wrong_drafts']:,} of {result['drafts']:,} drafts have an error")
    shown.add_column("figure")
    shown.add_column("judge (seeds)", no_wrap=True)
    shown.add_column("value", justify="right", no_wrap=True)
    shown.add_column("to the first [95 %]", justify="right", no_wrap=True)
    for figure in (*FIGURES, *_COSTS):
        known = [(name, of) for name, of in result["rungs"].items() if figure in of]
        for i, (name, of) in enumerate(known):
            apart = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*of["to_first"][figure]) if i and figure in FIGURES else ""
            judge = f"{name} ({of['seeds']})" if of["seeds"] > 1 else name
            shown.add_row("" if i else figure, judge, f"{of[figure]:.3f}", apart, end_section=i + 1 == len(known))
    lines = [f"AUROC of the length alone: {result['auroc_of_length']:.3f}; best rule: {result['best_rule']}"]
    shown.caption = "\n".join([*lines, *filter(None, [result["warning"]])])
    return shown


if __name__ == "__main__":
    raise SystemExit(run_app(app, COMMAND, None))
