"""lm-eval's tasks on tiny models: the engine's own answers, scored by lm-eval, and every mistake as one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from parse_infer.cli.app import main
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling
from parse_infer.text.prompts import Verbatim
from parse_infer.token_drafters.prompt_lookup import PromptLookupDrafter
from tests.parse_infer.lm_eval_tasks import QUESTIONS, own_tasks, write_apples

from data_tools.tasks.lm_eval import tasks as lm_eval_tasks  # isort: skip  (after the skip where lm-eval is missing)
from parse_infer.evaluation.lm_eval.model import ParseLM  # isort: skip
from parse_infer.evaluation.lm_eval.run import EvalSettings, eval_rows, run_eval  # isort: skip
from data_tools.tasks.lm_eval.tasks import configs, load_tasks, read_data  # isort: skip

PUBLISHED = ("gsm8k", "minerva_math", "mmlu", "mmlu_pro", "gpqa", "humaneval_plus", "mbpp_plus", "mt_bench")
PLAIN = EvalSettings(apply_chat_template=False)
GSM8K = {"question": QUESTIONS[0], "answer": "It is 4.\n#### 4"}


@pytest.fixture(scope="module")
def registered():
    return own_tasks()


@pytest.fixture(autouse=True)
def few_tasks(monkeypatch, registered):
    monkeypatch.setattr(lm_eval_tasks, "_manager", lambda: registered)


@pytest.fixture
def apples(monkeypatch, tmp_path):
    """`apples(answers, stops)`: the task of that name, loaded."""

    def load(answers, stops=(), **config) -> lm_eval_tasks.Tasks:
        manager = own_tasks(write_apples(tmp_path, answers, stops, **config))
        monkeypatch.setattr(lm_eval_tasks, "_manager", lambda: manager)
        return load_tasks(["apples"])

    return load


def answered(engine, stop: str = "\x00") -> dict[str, list[str]]:
    """What the two modes answer to the questions, without a chat template."""
    prompts = [Verbatim(question) for question in QUESTIONS]
    both = {"target": engine.generate_target, "parse": engine.generate}
    return {
        mode: [answer.text.split(stop)[0] for answer in generate(prompts, max_new_tokens=24, stop=stop)]
        for mode, generate in both.items()
    }


@pytest.mark.slow
def test_lm_eval_scores_the_engines_answers_in_both_modes(make_engine, apples, tmp_path):
    engine = make_engine(threshold=0.3)
    stop = answered(engine)["target"][0][8:10]
    own = answered(engine, stop)
    assert own["target"] != own["parse"] and len(own["target"][0]) == 8
    right = [*own["target"][:2], *own["parse"][2:]]
    results = run_eval(engine, apples(right, [stop]), tmp_path / "out", PLAIN)
    figures = results["tasks"]["apples"]
    metric = figures["metrics"]["exact_match,none"]
    for mode, texts in own.items():
        share = sum(a == b for a, b in zip(texts, right, strict=True)) / len(right)
        assert metric[mode] == pytest.approx(share) and metric["stderr"][mode] is not None
    assert metric["difference"] == pytest.approx(metric["parse"] - metric["target"])
    low, high = metric["difference_ci"]
    assert low <= metric["difference"] <= high
    assert figures["n"] == 5 and figures["speedup_ci"][0] <= figures["speedup"] <= figures["speedup_ci"][1]
    same = sum(a == b for a, b in zip(own["target"], own["parse"], strict=True)) / len(right)
    assert figures["same_text"] == pytest.approx(same)
    written = json.loads((tmp_path / "out" / "results.json").read_text())
    assert written["tasks"] == json.loads(json.dumps(results["tasks"]))
    assert eval_rows(results)[0][:2] == ["apples, 5", "exact_match,none"]
    records = [json.loads(line) for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines()]
    order = [(record["problem"], record["mode"]) for record in records]
    assert order[:4] == [(0, "target"), (0, "parse"), (1, "parse"), (1, "target")] and len(order) == 10
    for record in records:
        assert record["text"] == own[record["mode"]][record["problem"]]


@pytest.mark.slow
def test_an_evaluation_resumes_where_it_stopped(make_engine, apples, tmp_path):
    engine, loaded = make_engine(), apples([""] * 5)
    some = run_eval(engine, loaded, tmp_path / "out", EvalSettings(limit=3, apply_chat_template=False))
    assert some["tasks"]["apples"]["n"] == 3
    path = tmp_path / "out" / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:4]) + lines[4][:20])  # killed in the middle of a line
    results = run_eval(engine, loaded, tmp_path / "out", PLAIN)
    assert results["tasks"]["apples"]["n"] == 5 and path.read_text().startswith("".join(lines[:4]))
    before = engine.target.decoder.forwards, path.read_text()
    again = run_eval(engine, loaded, tmp_path / "out", PLAIN)
    assert again["tasks"] == results["tasks"] and before == (engine.target.decoder.forwards, path.read_text())
    with pytest.raises(ValueError, match=r"holds a measurement with threshold 0.5 and this one has 0.9"):
        run_eval(make_engine(threshold=0.9), loaded, tmp_path / "out", PLAIN)
    promised = GenerationSettings(threshold=0.8, block_tokens=8)
    with pytest.raises(ValueError, match=r"with threshold 0.5 and this one has 0.8"):
        run_eval(engine, loaded, tmp_path / "out", replace(PLAIN, parse=promised))
    results = run_eval(engine, loaded, tmp_path / "other", replace(PLAIN, limit=1, parse=promised))
    assert (results["environment"]["threshold"], results["environment"]["block_tokens"]) == (0.8, 8)
    guided = make_engine()
    guided.backend.target_drafter = PromptLookupDrafter()
    with pytest.raises(ValueError, match="holds a measurement with target_drafter null and this one has"):
        run_eval(guided, loaded, tmp_path / "out", PLAIN)


@pytest.mark.slow
def test_sampled_answers_have_the_same_random_numbers_in_both_modes(make_engine, apples, tmp_path):
    """So where nothing of a draft is accepted, PARSE writes what the target alone writes."""
    engine, own = make_engine(), {"until": [], "max_gen_toks": 24, "do_sample": True, "temperature": 0.2}
    with pytest.raises(ValueError, match=r"task 'apples' samples its answers: give --temperature 0\.2, or"):
        apples([""] * 5, generation_kwargs=own)
    loaded = load_tasks(["apples"], replaces_sampling=True)
    settings = replace(PLAIN, parse=GenerationSettings(threshold=1.1, resume_sampling=Sampling(1.0, top_p=0.9)))
    results = run_eval(engine, loaded, tmp_path / "out", settings)
    assert results["tasks"]["apples"]["same_text"] == 1
    assert "temperature 1, top_p 0.9;" in (tmp_path / "out" / "results.md").read_text()
    texts = texts_of(tmp_path / "out")
    assert len(set(texts)) == 5 and texts != answered(engine)["target"]
    judged = replace(PLAIN, parse=settings.parse.override(threshold=0.0))
    assert run_eval(engine, loaded, tmp_path / "judged", judged)["tasks"]["apples"]["same_text"] < 1
    assert texts_of(tmp_path / "judged") == texts, "each run has the same random numbers"
    with pytest.raises(ValueError, match="holds a measurement with settings"):
        run_eval(engine, loaded, tmp_path / "out", replace(PLAIN, parse=GenerationSettings(threshold=1.1)))
    with pytest.raises(ValueError, match="the seed of the sampling is 3: an evaluation seeds each answer itself"):
        replace(PLAIN, parse=GenerationSettings(resume_sampling=Sampling(1.0, seed=3)))


def texts_of(folder: Path, mode: str = "target") -> list[str]:
    """The texts of a mode, by problem."""
    records = [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]
    return [r["text"] for r in sorted(records, key=lambda r: r["problem"]) if r["mode"] == mode]


@pytest.mark.slow
def test_a_task_that_repeats_its_problems_gets_other_samples(make_engine, apples, tmp_path):
    loaded = apples([""] * 5, repeats=3)
    sampled = EvalSettings(2, 8, False, GenerationSettings(resume_sampling=Sampling(1.0)))
    results = run_eval(make_engine(), loaded, tmp_path / "out", sampled)
    texts = texts_of(tmp_path / "out")
    assert len(texts) == len(set(texts)) == 6 and results["tasks"]["apples"]["n"] == 2
    run_eval(make_engine(), loaded, tmp_path / "greedy", EvalSettings(2, 8, False))
    assert len(texts_of(tmp_path / "greedy")) == 2, "greedy answers are the same"


@pytest.mark.slow
def test_metrics_of_samples_are_means_over_them(make_engine, apples, tmp_path):
    """Each sample is an evaluation of its own; a larger number of samples continues the run."""
    engine, sampled = make_engine(), EvalSettings(3, 8, False, GenerationSettings(resume_sampling=Sampling(1.0)))
    run_eval(engine, apples([""] * 5), tmp_path / "out", sampled)
    texts = texts_of(tmp_path / "out")
    right = apples([*texts, "", ""])
    assert (
        run_eval(engine, right, tmp_path / "out", sampled)["tasks"]["apples"]["metrics"]["exact_match,none"]["target"]
        == 1
    )
    results = run_eval(engine, right, tmp_path / "out", replace(sampled, samples=4))
    figures = results["tasks"]["apples"]
    metric = figures["metrics"]["exact_match,none"]
    assert len(texts_of(tmp_path / "out")) == 12 and len(set(texts_of(tmp_path / "out"))) > 3, "other random numbers"
    assert figures["n"] == 3 and metric["target"] == pytest.approx(0.25) and metric["stderr"]["target"] is None
    assert metric["difference_ci"][0] <= metric["difference"] <= metric["difference_ci"][1]
    assert "temperature 1, 4 samples a problem;" in (tmp_path / "out" / "results.md").read_text()
    with pytest.raises(ValueError, match="samples is 2; it must be at least 1, and more need a temperature"):
        replace(PLAIN, samples=2)


def test_groups_have_one_row_and_lm_evals_average(make_engine, monkeypatch, tmp_path):
    engine = make_engine(threshold=0.3)
    own = answered(engine)
    group = {"group": "fruit", "task": ["apples", "pears"]}
    group["aggregate_metric_list"] = [{"metric": "exact_match", "weight_by_size": True}]
    (tmp_path / "fruit.yaml").write_text(json.dumps(group))
    write_apples(tmp_path, own["target"])
    manager = own_tasks(write_apples(tmp_path, own["parse"][:2], name="pears"))
    monkeypatch.setattr(lm_eval_tasks, "_manager", lambda: manager)
    results = run_eval(engine, load_tasks(["fruit"]), tmp_path / "out", PLAIN)
    (row,) = eval_rows(results)
    metric = results["tasks"]["fruit"]["metrics"]["exact_match,none"]
    same = [a == b for a, b in zip(own["target"], own["parse"], strict=True)]
    assert row[0] == "fruit, 7" and not all(same)
    assert metric["target"] == pytest.approx((5 + sum(same[:2])) / 7)
    assert metric["parse"] == pytest.approx((sum(same) + 2) / 7) and metric["difference_ci"] is not None
    with pytest.raises(ValueError, match="task 'apples', part of 'apples', is given twice"):
        load_tasks(["fruit", "apples"])


def test_chat_messages_reach_both_models_as_messages(make_engine, apples, tmp_path):
    engine = make_engine()
    loaded = apples(["4"] * 5, fewshot_split="test", num_fewshot=1, fewshot_config={"sampler": "first_n"})
    shown = {"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": "4"}
    run_eval(engine, loaded, tmp_path / "out", EvalSettings(limit=2, max_new_tokens=16))
    for line in (tmp_path / "out" / "records.jsonl").read_text().splitlines():
        record = json.loads(line)
        generate = engine.generate if record["mode"] == "parse" else engine.generate_target
        if record["problem"] == 1:  # the first problem is never its own example
            messages = [*shown, {"role": "user", "content": QUESTIONS[1]}]
            assert record["text"] == generate(messages, max_new_tokens=16).text


def test_a_published_name_takes_local_files(tmp_path):
    answers = ("Correct Answer", *(f"Incorrect Answer {n}" for n in (1, 2, 3)))
    (tmp_path / "gpqa.jsonl").write_text(json.dumps({"Question": "1 + 1?"} | dict(zip(answers, "2345", strict=True))))
    loaded = load_tasks(["gpqa"], read_data([f"gpqa={tmp_path / 'gpqa.jsonl'}"], ["gpqa"]))
    assert [(row.name, row.result) for row in loaded.rows] == [("gpqa", "gpqa_diamond_cot_zeroshot")]


def test_log_likelihoods_are_refused(make_engine, tmp_path, apples):
    lm = ParseLM(make_engine(), None)
    loaded = apples([""] * 5).tasks["apples"]
    loaded.build_all_requests(limit=1)
    for ask in (lm.loglikelihood, lm.loglikelihood_rolling):
        with pytest.raises(ValueError, match="'apples' needs log-likelihoods"):
            ask(loaded.instances)


def test_a_prompt_beyond_the_window_is_refused_before_any_answer(make_engine, apples, tmp_path):
    engine = make_engine()
    loaded = apples([""] * 5, description="Count. " * 400)
    with pytest.raises(ValueError, match=r"problem 0 of apples \(fewer examples: .*\): The prompt has \d+ tokens"):
        run_eval(engine, loaded, tmp_path / "out", PLAIN)
    assert engine.target.decoder.forwards == 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_benchmarks_are_tasks_that_generate(name):
    members = configs(name)
    assert members and all(config["output_type"] == "generate_until" for config in members)
    assert len(members) == {"minerva_math": 7, "mmlu": 57, "mmlu_pro": 14}.get(name, 1)


def test_mt_bench_reports_speed_and_agreement(make_engine, tmp_path):
    path = tmp_path / "mt.jsonl"
    path.write_text("\n".join(json.dumps({"turns": [question, "And now?"]}) for question in QUESTIONS))
    loaded = load_tasks(["mt_bench"], read_data([f"mt_bench={path}"], ["mt_bench"]))
    results = run_eval(make_engine(), loaded, tmp_path / "out", EvalSettings(limit=2, max_new_tokens=8))
    (row,) = eval_rows(results)
    assert results["tasks"]["mt_bench"]["metrics"] == {} and row[:2] == ["mt_bench, 2", "same text"]


@pytest.fixture
def error(capsys, tmp_path, monkeypatch):
    """`error(…)`: the sentence that `parse-infer eval …` ends with, before models are loaded."""
    monkeypatch.setattr(
        "parse_infer.cli.model_options.ModelOptions.load", lambda *_: pytest.fail("models were loaded")
    )
    (tmp_path / "problems.jsonl").write_text(json.dumps(GSM8K))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        assert main(["eval", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
        return captured.err

    return run


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tasks", "gsm8"], "unknown task 'gsm8'; did you mean 'gsm8k'?"),
        (["--tasks", ","], "--tasks is empty"),
        (["--tasks", "arc_easy"], "task 'arc_easy' is scored by log-likelihoods (multiple_choice)"),
        (["--tasks", "humaneval_64"], "samples its answers: give --temperature 0.2, or --temperature 0 for"),
        (["--tasks", "gsm8k", "--temperature", "0.7", "--top-p", "2"], "top_p must be a number above 0 and at most 1"),
        (["--tasks", "gsm8k", "--temperature", "0.7", "--risk", "0.02"], "there is no promise for temperature 0.7; "),
        (["--tasks", "humaneval_64", "--temperature", "0.7"], "give --confirm-run-unsafe-code"),
        (["--tasks", "humaneval_plus"], "give --confirm-run-unsafe-code"),
        (["--tasks", "mbpp_plus", "--confirm-run-unsafe-code"], "HF_ALLOW_CODE_EVAL=1"),
        (["--tasks", "gsm8k", "--block-tokens", "never"], "block_tokens is 'never'"),
        (["--tasks", "gsm8k", "--risk", "0.03"], "risk is 0.03, but it was not tested; the nearest promise is 0.02"),
        (["--tasks", "gsm8k", "--data", "gsm8k"], "--data 'gsm8k' is not TASK=FILE"),
        (["--tasks", "gsm8k", "--data", "gsm=problems.jsonl"], "not among --tasks; did you mean 'gsm8k'?"),
        (["--tasks", "gsm8k", "--data", "gsm8k=none.jsonl"], "no file none.jsonl"),
        (["--tasks", "gsm8k", "--data", "gsm8k:dev=problems.jsonl"], "no such split; known: train, test"),
        (["--tasks", "gsm8k", "--data", "gsm8k:train=problems.jsonl"], "add gsm8k=FILE, its split 'test'"),
        (
            ["--tasks", "gsm8k", "--data", "gsm8k=problems.jsonl"],
            "needs 5 few-shot examples from its split 'train': add --data",
        ),
        (["--tasks", "mmlu", "--data", "mmlu=problems.jsonl"], "'mmlu' has several tasks: give one, such as"),
        (
            ["--tasks", "mt_bench", "--data", "mt_bench=problems.jsonl"],
            "or give --data mt_bench=FILE with the columns of HuggingFaceH4/mt_bench_prompts",
        ),
    ],
)
def test_every_mistake_is_one_sentence_before_models_are_loaded(error, arguments, sentence):
    assert sentence in error(*arguments)


def test_a_download_that_fails_is_one_sentence(error, monkeypatch):
    def unreachable(**_):
        raise ConnectionError("Couldn't reach the Hub.\nMore.")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    assert error("--tasks", "gpqa") == (
        "error: task 'gpqa' cannot be loaded (Couldn't reach the Hub.): check the connection, or give --data "
        "gpqa=FILE with the columns of Idavidrein/gpqa\n"
    )


@pytest.mark.slow
def test_the_command_evaluates_local_files(tmp_path: Path, capsys):
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(json.dumps({**GSM8K, "question": question}) for question in QUESTIONS[:2]))
    out = ["--out", str(tmp_path / "out"), "--max-new-tokens", "24"]
    data = ["--data", f"gsm8k={path}", "--num-fewshot", "0"]
    assert main(["eval", "--tasks", "gsm8k", *data, *out]) == 0
    shown = capsys.readouterr().out
    assert "strict-match" in shown and "flexible-extract" in shown and "results.md" in shown
    assert "| gsm8k, 2 | exact_match,strict-match |" in (tmp_path / "out" / "results.md").read_text()
