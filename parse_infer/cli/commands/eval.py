"""`parse-infer eval`: accuracy and speed on lm-eval's tasks."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from parse_infer.cli import options
from parse_infer.cli.model_options import LOCAL_ONLY, ModelOptions, with_models
from parse_infer.cli.options import read_sampling
from parse_infer.cli.setting_options import number_or_choice, option_of
from parse_infer.settings.generation import GenerationSettings


@with_models(**LOCAL_ONLY)
def evaluate(
    models: ModelOptions,
    tasks: Annotated[
        str, typer.Option(metavar="A,B,…", help="Names of tasks, groups or tags of lm-eval, or mt_bench.")
    ],
    limit: Annotated[int | None, typer.Option(min=1, help="Problems of each task; default: all.")] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Few-shot examples in each prompt; default: the task's own number.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Token limit of an answer; default: the task's own.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK=FILE",
            help="jsonl file that replaces a task's Hugging Face dataset; same columns. TASK:SPLIT=FILE replaces "
            "another split, such as that of the few-shot examples. Repeatable.",
        ),
    ] = None,
    apply_chat_template: Annotated[
        bool | None,
        typer.Option(
            "--apply-chat-template/--no-apply-chat-template",
            help="Send prompts as chat messages; default: if the target has a chat template.",
        ),
    ] = None,
    block_tokens: Annotated[str, option_of("block_tokens")] = "auto",
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Of both modes and all tasks, in the place of a task's own sampling; 0: greedy. Default: greedy, and "
            "tasks that sample are refused.",
        ),
    ] = None,
    top_p: Annotated[float, typer.Option(help="With --temperature, see generate.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="With --temperature, see generate.")] = 0,
    samples: Annotated[
        int, typer.Option(min=1, help="With --temperature: answers to each problem in both modes.")
    ] = 1,
    risk: options.MeasuredRisk = None,
    confirm_run_unsafe_code: Annotated[
        bool, typer.Option("--confirm-run-unsafe-code", help="Let lm-eval execute code that the models write.")
    ] = False,
    out: Annotated[str, typer.Option(metavar="DIR", help=options.RESULTS_HELP)] = "runs/eval",
) -> None:
    """Compare PARSE with the target alone on tasks of EleutherAI's lm-eval: accuracy and speed-up side by side.

    Writes results.json and results.md. An interrupted run continues with the same command, also with more tasks or
    problems.

    \b
    The published benchmarks, as generative tasks of lm-eval:
      gsm8k, minerva_math, mmlu_pro, humaneval_plus, mbpp_plus
      mmlu              mmlu_cot_llama
      gpqa              gpqa_diamond_cot_zeroshot
      mt_bench          first turns only: speed and agreement with the target, without an LLM judge

    \b
    Examples:
      parse-infer eval --tasks gsm8k --num-fewshot 0 --limit 100
      parse-infer eval --tasks gsm8k --data gsm8k=test.jsonl --num-fewshot 0
      parse-infer eval --tasks gsm8k --num-fewshot 0 --temperature 0.7 --top-p 0.8 --samples 4 --out runs/sampled
      parse-infer eval --tasks mt_bench --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --adapter runs/judge/adapter \\
          --template-option enable_thinking=false
      HF_ALLOW_CODE_EVAL=1 parse-infer eval --tasks humaneval_plus,mbpp_plus --confirm-run-unsafe-code
    """
    names = [name.strip() for name in tasks.split(",") if name.strip()]
    from data_tools.tasks.lm_eval.tasks import load_tasks, read_data
    from parse_infer.evaluation.lm_eval.run import EvalSettings, eval_table, run_eval

    # The tasks set the budgets, whatever the calibration's was.
    parse = GenerationSettings(
        sys.maxsize,
        models.threshold,
        block_tokens=number_or_choice(block_tokens),
        resume_sampling=read_sampling(temperature or 0.0, top_p, top_k),
    )
    parse = models.with_promise(parse, risk)
    settings = EvalSettings(
        limit=limit,
        max_new_tokens=max_new_tokens,
        apply_chat_template=apply_chat_template,
        confirm_run_unsafe_code=confirm_run_unsafe_code,
        parse=parse,
        samples=samples,
    )
    loaded = load_tasks(
        names,
        read_data(data or (), names),
        num_fewshot=num_fewshot,
        replaces_sampling=temperature is not None,
        confirm_run_unsafe_code=confirm_run_unsafe_code,
    )
    engine = models.load(promised=risk is not None)
    results = run_eval(engine, loaded, out, settings)
    console = Console(highlight=False)
    console.print(eval_table(results))
    console.print(f"Written: {out}/results.json, results.md", soft_wrap=True)
