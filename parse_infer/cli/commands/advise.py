"""`parse-infer advise`: which step makes a pair of models faster, what speed to expect, and what to run next."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from parse_infer.cli import options
from parse_infer.cli.model_options import PAIRS, ModelOptions
from parse_infer.errors import ParseError, SettingsError

if TYPE_CHECKING:
    from rich.table import Table

    from parse_infer.evaluation.ladder import Advice
    from parse_infer.evaluation.serving_costs import Costs


def advise(
    target: Annotated[str, typer.Option(help="Hugging Face id or folder.")],
    draft: Annotated[
        str | None, typer.Option(help="Draft model, named like the target; default: the embedded target's own.")
    ] = None,
    adapter: Annotated[str | None, typer.Option(help="A trained or transferred adapter, if there is one.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Your prompts: a jsonl file with prompt and, for a check, reference.")
    ] = None,
    references: Annotated[
        bool, typer.Option("--references/--no-references", help="Whether the prompts have references.")
    ] = True,
    temperature: Annotated[float, typer.Option(min=0, help="Of your requests; 0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Of your requests.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Of your requests; 0: all tokens.")] = 0,
    rate: Annotated[
        float | None, typer.Option(help="Arrivals per second, for a server; default: one request at a time.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="With --rate: GPUs; of two or more one is the draft model's.")] = 2,
    costs: Annotated[
        Path | None, typer.Option(help="File of `parse-infer cost --output`, for this pair; default: time it now.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=8, help="Mean length of a prompt.")] = 256,
    answer_tokens: Annotated[int, typer.Option(min=16, help="Mean length of an answer.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="Timed runs of each forward.")] = 5,
    template_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Chat template option in the printed commands, such as enable_thinking=false; repeatable.",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Token limit in the printed commands; longer answers count as wrong. Default: 512; 256 if embedded.",
        ),
    ] = None,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
) -> None:
    """Recommend a step for a pair: lossless speculation or, with --adapter, a judge with a bound.

    Times the pair's forwards with random weights, as `parse-infer cost` does: no weights are downloaded. Predicts the
    speed of each step where drafts are accepted as they were on the pairs of docs/results. Prints the next commands.

    \b
    Examples:
      parse-infer advise --target zoo:target
      parse-infer advise --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --prompts prompts.jsonl \\
          --template-option enable_thinking=false
      parse-infer advise --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --costs costs.json --rate 2 --gpus 4
    """
    from parse_infer.cli.ladder_commands import PROMPTS, Situation
    from parse_infer.evaluation.ladder import STEPS
    from parse_infer.evaluation.ladder import advise as recommend
    from parse_infer.models.names import resolve

    sampling = options.read_sampling(temperature, top_p, top_k)
    if rate is not None and not 0 < rate < float("inf"):
        raise SettingsError(f"--rate {rate:g} is no arrival rate: give a positive number per second")
    if prompts is not None and not prompts.is_file():
        raise ParseError(f"--prompts {prompts} is no file: give a jsonl file, or leave the option out")
    resolve(target)  # a misspelt name gets its own sentence, not one about its draft model
    pair = (target, str(ModelOptions(target=target, draft=draft).draft_name))
    for name in (pair[1], *([adapter] if adapter else [])):
        resolve(name)
    placement = [*(["--device", device] if device else []), *(["--dtype", dtype] if dtype != "auto" else [])]
    options.read_pairs(template_option, "--template-option")  # raises for one that no command would take
    answers = [part for value in template_option or () for part in ("--template-option", value)]
    if max_new_tokens is not None or target not in PAIRS:
        answers += ["--max-new-tokens", str(max_new_tokens or 512)]
    own = Situation(*pair, prompts, references, sampling, adapter, placement, answers)
    if costs is None:
        where, known = _measured(pair, prompt_tokens, answer_tokens, rounds, device, dtype)
    else:
        where, known = f"costs of {costs}", _read(costs, pair, prompt_tokens, answer_tokens)
    advice = recommend(known, own.has_judge, rate, gpus)

    console = Console(highlight=False)
    target_s, draft_s = known.target_token_s.at(1), known.draft_token_s.at(1)
    console.print(f"{pair[0]} and {pair[1]}, {where}")
    console.print(
        f"Measured: a target forward takes {1e3 * target_s:.3g} ms, a draft token {draft_s / target_s:.2f} of it."
    )
    console.print(speed_table(advice))
    if advice.step is None:
        console.print(f"\nRecommended: the target alone. {' '.join(advice.reasons)}")
        return
    speeds = sorted(speeds[advice.step] for speeds in advice.speedups.values() if advice.step in speeds)
    span = " to ".join(dict.fromkeys(f"{speed:.1f}x" for speed in (speeds[0], speeds[-1])))
    number = list(STEPS).index(advice.step) + 1
    predicted = f"predicted {span} under these assumptions"
    console.print(f"\nRecommended: step {number}, {STEPS[advice.step]}, {predicted}. {' '.join(advice.reasons)}")
    if not own.bounded:
        console.print("Sampled answers without references cannot be compared, so steps 2 and 3 would have no bound.")
    if rate is None:
        console.print("The speeds are those of one request at a time. For many clients see --rate.")
    for heading, commands in own.next_commands():
        console.print(f"\n{heading}", style="bold", markup=False)
        for words in commands:
            console.print(shlex.join(["parse-infer", *words]), soft_wrap=True, markup=False)
    if prompts is None and not own.embedded:
        row = '{"prompt": …, "reference": …}' if references else '{"prompt": …}'
        console.print(f"\n{PROMPTS} has your prompts, one JSON object a line: {row}", markup=False)


def speed_table(advice: Advice) -> Table:
    """Build the table of predicted speeds, each beside its assumption."""
    from parse_infer.evaluation.ladder import CASES, STEPS
    from parse_infer.evaluation.tables import terminal_table

    cells = [
        [f"{number} {name}"]
        + [
            f"{advice.speedups[case][step]:.1f}x ({accepted[step].tokens:g})" if step in accepted else "not measured"
            for case, accepted in CASES.items()
        ]
        for number, (step, name) in enumerate(STEPS.items(), 1)
    ]
    caption = (
        "In brackets: tokens per target forward, assumed as measured on that pair, greedy (docs/results). Judge and "
        "overhead are left out: the measured pairs were up to a quarter slower than predicted."
    )
    heading = ("predicted speed, if accepted as", *(case.replace(", ", ",\n") for case in CASES))
    return terminal_table(heading, cells, caption=caption)


def _measured(
    pair: tuple[str, str], prompt_tokens: int, answer_tokens: int, rounds: int, device: str | None, dtype: str
) -> tuple[str, Costs]:
    """Time the pair; return a description of the run too."""
    place, numbers = options.placement(device, dtype)
    from parse_infer.evaluation.forward_cost import forward_costs, serving_costs
    from parse_infer.evaluation.serving_costs import Costs

    seconds = forward_costs(pair, prompt_tokens, answer_tokens, rounds, place, numbers, heads=False)
    known = Costs.of(serving_costs(seconds, prompt_tokens, answer_tokens), kept_tokens=0.0)
    return f"random weights, {str(numbers).removeprefix('torch.')}, {place}", known


def _read(path: Path, pair: tuple[str, str], prompt_tokens: int, answer_tokens: int) -> Costs:
    """Read a file of costs. Raises ParseError if it names another pair."""
    from parse_infer.evaluation.serving_costs import COSTS_HINT, Costs
    from parse_infer.files import read_json

    held = read_json(path, COSTS_HINT)
    named = (held.get("target", pair[0]), held.get("draft", pair[1]))
    if named != pair:
        raise ParseError(f"{path} has the costs of {' and '.join(named)}, not of {' and '.join(pair)}")
    return Costs.of(held, str(path), kept_tokens=0.0, prompt_tokens=prompt_tokens, answer_tokens=answer_tokens)
