"""Tasks give reproducible, disjoint problems and check answers the way a reader would."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from data_tools.labels.rows import check_row
from data_tools.tasks.registry import TASKS, load_task
from data_tools.tasks.task import Problem, Split


def problem(reference: str) -> Problem:
    return Problem("p", "question", reference)


@pytest.mark.slow
def test_gsm_symbolic_is_reproducible_and_its_splits_share_no_problem():
    task = load_task("gsm_symbolic")
    first = list(task.problems("test", seed=7, limit=60))
    assert [p.id for p in first] == [p.id for p in task.problems("test", seed=7, limit=60)]
    keys = {
        split: {p.metadata["key"] for seed in (0, 1) for p in task.problems(split, seed, 150)}
        for split in ("train", "validation", "test")
    }
    for a, b in itertools.combinations(keys, 2):
        assert not keys[a] & keys[b], f"{a} and {b} share problems"
    assert [p.id for p in first] != [p.id for p in task.problems("test", seed=8, limit=60)]


@pytest.mark.slow
def test_gsm_symbolic_can_leave_out_the_prompts_of_other_seeds():
    task = load_task("gsm_symbolic", max_number=20)
    others = {seed: [p.prompt for p in task.problems("train", seed, 200)] for seed in (0, 1)}
    learnt = {prompt for prompts in others.values() for prompt in prompts}
    plain = list(task.problems("train", 3, 200))
    assert any(p.prompt in learnt for p in plain), "seeds share prompts"
    # A number as it comes from the command line, a string as it comes from the JSON of a build.
    fresh = load_task("gsm_symbolic", max_number=20, exclude_seeds={0: 200, "1": 200})
    new = list(fresh.problems("train", 3, 200))
    assert len(new) == 200 and not learnt & {p.prompt for p in new}
    kept = [p.id for p in plain if p.prompt not in learnt]
    assert [p.id for p in new][: len(kept)] == kept
    assert list(fresh.problems("validation", 0, 5)) == list(task.problems("validation", 0, 5))
    for exclude in ({3: 10}, {"one": 10}, {0: None}):
        with pytest.raises(ValueError, match="it must map seeds other than 3 to numbers of problems"):
            load_task("gsm_symbolic", exclude_seeds=exclude).problems("train", 3)  # before a build begins its folder


def test_gsm_symbolic_needs_the_answer_line():
    task = load_task("gsm_symbolic")
    assert task.check(problem("12"), "#### 12")
    assert not task.check(problem("12"), "it could be 12")
    assert not task.check(problem("12"), "it could be 12\n####")


@dataclass
class Sums:
    """A task of a stranger's."""

    largest: int = 9
    name: str = "sums"

    def problems(self, split: Split, seed: int = 0, limit: int | None = None) -> Iterator[Problem]:
        for n in range(self.largest if limit is None else limit):
            yield Problem(f"{split}-{n}", f"{n} + {n}?", str(2 * n))

    def check(self, problem: Problem, completion: str) -> bool:
        return completion.endswith(problem.reference)


def test_a_registered_task_has_options_and_excludes_prompts(monkeypatch, tmp_path):
    monkeypatch.setitem(TASKS, "sums", Sums)
    (tmp_path / "seen.jsonl").write_text(json.dumps({"prompt": "1 + 1?"}))
    task = load_task("sums", largest=3, exclude=str(tmp_path / "seen.jsonl"))
    problems = list(task.problems("train"))
    assert [p.prompt for p in problems] == ["0 + 0?", "2 + 2?"]
    assert task.check(problems[1], "It is 4") and not task.check(problems[1], "It is 5")
    with pytest.raises(ValueError, match="task sums has no option 'larges'; did you mean 'largest'"):
        load_task("sums", larges=3)


def test_gsm8k_reads_the_original_format(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text(json.dumps({"question": "How many?", "answer": "5 - 2 = <<5-2=3>>3 left.\n#### 3"}) + "\n")
    task = load_task("gsm8k", path=str(path))
    (only,) = task.problems("test")
    assert [list(task.problems(split)) for split in ("train", "validation")] == [[only], []]
    assert only.reference == "3" and "<<" not in only.solution
    assert task.check(only, "There are 3 left.\n#### 3.00")


def test_a_null_in_a_jsonl_row_is_as_if_absent(tmp_path):
    path = tmp_path / "own.jsonl"
    rows = [{"prompt": "1?", "reference": "1", "split": None, "category": None}, {"prompt": "2?", "reference": "2"}]
    path.write_text("\n".join(map(json.dumps, [*rows, {"prompt": "3?", "reference": "3", "split": "test"}])))
    found = {split: list(load_task("jsonl", path=str(path)).problems(split)) for split in ("train", "test")}
    assert {split: len(problems) for split, problems in found.items()} == {"train": 2, "test": 3}
    assert all(problem.metadata == {} for problem in found["test"])
    path.write_text(json.dumps(rows[1] | {"split": "val"}))
    with pytest.raises(ValueError, match="the split is 'val'; it must be one of train, validation, test, or null"):
        list(load_task("jsonl", path=str(path)).problems("validation"))


def test_jsonl_checks(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text(
        '{"prompt": "Say yes.", "reference": "^yes$", "id": null}\n\n'
        '{"prompt": "Say no.", "reference": "no", "id": "n"}\n'
    )
    task = load_task("jsonl", path=str(path), check_with="regex")
    found = {p.prompt: p for p in task.problems("test")}
    assert found["Say no."].id == "n"
    assert task.check(found["Say yes."], "yes") and not task.check(found["Say yes."], "oh yes")
    assert load_task("jsonl", path=str(path), check_with="exact").check(found["Say no."], " no\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a", "reference": "1"}\n{"prompt": ', "line 2: not complete JSON"),
        ('{"prompt": "a"}\n', "line 1: no key 'reference'"),
        ('{"prompt": "", "reference": "1"}\n', "line 1: the prompt is empty"),
        ('{"prompt": 5, "reference": "1"}\n', "line 1: the prompt must be a text or a list of chat messages"),
        ('{"prompt": [{"role": "user"}], "reference": "1"}\n', "line 1: the prompt must be a text or a list of"),
        ('{"prompt": "Hi \\ud83d", "reference": "1"}\n', r"line 1: the text 'Hi \\ud83d' ends in half of a character"),
        ('{"prompt": "a", "reference": "1\\ud83d"}\n', "line 1: the text .* ends in half of a character"),
        ("[1]\n", "line 1: a row must be a JSON object, not '.1.'"),
        (
            '{"prompt": "a", "reference": "Paris"}\n',
            "line 1: the reference 'Paris' has no number",
        ),
    ],
)
def test_a_malformed_row_is_named_by_its_line(tmp_path, text, message):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        list(load_task("jsonl", path=str(path)).problems("test"))


def test_mistakes_name_the_way_out(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'gsm_symbolic'"):
        load_task("gsm_symbolc")
    with pytest.raises(ValueError, match="did you mean 'max_number'"):
        load_task("gsm_symbolic", max_numbers=3)
    with pytest.raises(ValueError, match="numeric"):
        load_task("jsonl", path="x", check_with="fuzzy")
    with pytest.raises(FileNotFoundError, match=r"no file .*gone\.jsonl"):
        list(load_task("jsonl", path=str(tmp_path / "gone.jsonl")).problems("test"))
    with pytest.raises(ValueError, match="unknown split"):
        next(iter(load_task("gsm_symbolic").problems("dev")))


def test_reasoning_gym_generators_take_turns_and_score_themselves():
    task = load_task("reasoning_gym", names=["chain_sum", "spell_backward"])
    found = list(task.problems("train", seed=3, limit=6))
    assert [p.metadata["generator"] for p in found] == ["chain_sum", "spell_backward"] * 3
    assert [p.prompt for p in found] == [p.prompt for p in task.problems("train", seed=3, limit=6)]
    assert not {p.prompt for p in found} & {p.prompt for p in task.problems("test", seed=3, limit=6)}
    for p in found:
        assert task.check(p, p.reference) and task.check(p, f"Let me see: {p.reference}.")
        assert not task.check(p, "I do not know")
    (strict,) = load_task("reasoning_gym", names=["prime_factorization"]).problems("train", limit=1)
    assert task.check(strict, strict.reference) and not task.check(strict, "I do not know")
    with pytest.raises(ValueError, match=r"no generator 'chain_sun'; .*chain_sum"):
        next(load_task("reasoning_gym", names=["chain_sun"]).problems("train"))
    for evaluating in ("countdown", "spiral_matrix", "simple_integration"):
        with pytest.raises(ValueError, match=f"checker of {evaluating} evaluates answers as Python code, outside"):
            next(load_task("reasoning_gym", names=["chain_sum", evaluating]).problems("train"))
    with pytest.raises(ValueError, match="seed is 65536; for task reasoning_gym"):
        next(load_task("reasoning_gym", names=["chain_sum"]).problems("train", seed=65536))


def test_an_answer_of_reasoning_gym_may_hold_a_colon():
    task = load_task("reasoning_gym", names=["time_intervals"], instruction="\nBox it.")
    assert all(
        one.prompt.endswith(".\nBox it.") or one.prompt.endswith("?\nBox it.")
        for one in task.problems("test", limit=4)
    )
    for one in task.problems("train", limit=12):
        for said in ("{}", "So it is:\n#### {}", "answer: {}", "That is so.\nThe answer is: {}.", r"So \boxed{{{}}}."):
            assert task.check(one, said.format(one.reference)), (said, one.reference)


@pytest.mark.parametrize(
    "generator", ["chain_sum", "leg_counting", "basic_arithmetic", "simple_equations", "gcd", "lcm"]
)
def test_numbers_of_reasoning_gym_may_stand_in_a_sentence(generator: str) -> None:
    task = load_task("reasoning_gym", names=[generator])
    for one in task.problems("train", limit=3):
        for said in ("The answer is **{}**.", "#### **{}**", "There are {} legs.", "#### {}\n\nI hope this helps."):
            assert task.check(one, said.format(one.reference)), (said, one.reference)
            assert not task.check(one, said.format(f"{one.reference}5"))


@pytest.mark.parametrize("generator", ["family_relationships", "spell_backward", "syllogism", "word_sorting"])
def test_texts_of_reasoning_gym_may_be_emphasised(generator: str) -> None:
    task = load_task("reasoning_gym", names=[generator])
    for one in task.problems("train", limit=3):
        for said in ("The answer is **{}**.", "#### **{}**", "So it is {}.", "It is `{}`.", "**Answer:** {}"):
            assert task.check(one, said.format(one.reference)), (said, one.reference)


@pytest.mark.parametrize("generator", ["rotate_matrix", "tower_of_hanoi", "mini_sudoku"])
def test_an_answer_of_reasoning_gym_may_have_several_lines(generator: str) -> None:
    task = load_task("reasoning_gym", names=[generator])
    for one in task.problems("train", limit=2):
        for said in ("The answer is:\n\n```\n{}\n```", "So:\n\n{}\n\nI hope this helps.", "Answer:\n{}"):
            assert task.check(one, said.format(one.reference)), said
            assert not task.check(one, said.format("\n".join(one.reference.split("\n")[:-1])))


def test_the_last_paragraph_of_one_line_decides() -> None:
    task = load_task("reasoning_gym", names=["leg_counting"])
    (one,) = task.problems("train", limit=1)
    assert not task.check(one, f"{one.reference}\n\nNo, there are {one.reference}1 legs.")


def test_a_mixture_takes_turns_until_every_part_has_ended(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "reference": str(i)}) + "\n" for i in range(2)))
    parts = [{"task": "jsonl", "path": str(path)}, {"task": "gsm_symbolic", "max_number": 50}]
    task = load_task("mixture", parts=parts)
    found = list(task.problems("train", limit=6))
    assert [p.metadata["part"] for p in found] == [(0,), (1,), (0,), (1,), (1,), (1,)]
    assert all(task.check(p, f"#### {p.reference}") for p in found)
    nested = load_task("mixture", parts=[{"task": "mixture", "parts": parts}, parts[1]])
    found = list(nested.problems("train", limit=6))
    assert len({p.id for p in found}) == 6, "two parts of one kind must not share ids"
    assert all(nested.check(p, f"#### {p.reference}") and not nested.check(p, "#### 0.5") for p in found)
    with pytest.raises(ValueError, match="option parts"):
        load_task("mixture", parts=[{"path": "x"}])
    with pytest.raises(ValueError, match="no option 'pth'"):
        load_task("mixture", parts=[{"task": "jsonl", "pth": "x"}])


def test_the_parts_of_a_mixture_have_weights_and_domains(tmp_path):
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "reference": str(i)}) + "\n" for i in range(4)))
    own, other = {"task": "jsonl", "path": str(path)}, {"task": "gsm_symbolic", "max_number": 50, "domain": "sums"}
    task = load_task("mixture", parts=[{**own, "weight": 2}, {**other, "weight": 0.5}, {**own, "domain": "mine"}])
    found = list(task.problems("train", limit=10))
    assert "".join(str(p.metadata["part"][0]) for p in found) == "0020012212", "the shorter a part, the sooner it ends"
    assert {p.metadata["part"][0]: p.metadata["domain"] for p in found} == {0: "jsonl", 1: "sums", 2: "mine"}
    nested = load_task("mixture", parts=[{"task": "mixture", "parts": [own, other]}])
    assert [p.metadata["domain"] for p in nested.problems("train", limit=2)] == ["jsonl", "sums"]
    for key, value in (("weight", 0), ("weight", "2"), ("weight", True), ("domain", 5)):
        with pytest.raises(ValueError, match=f"the {key} of a part of task mixture is {value!r}; it must be a"):
            load_task("mixture", parts=[{**own, key: value}])


def test_a_problem_without_an_id_is_known_by_its_prompt(tmp_path):
    """In whichever file and line it stands, and also where it was labelled."""
    rows = [{"prompt": f"What is {i} + 1?", "reference": str(i + 1)} for i in range(4)]
    found = []
    for name, some in (("one", rows), ("other", rows[2:])):
        (tmp_path / name).with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
        task = load_task("jsonl", path=str(tmp_path / f"{name}.jsonl"))
        found.append({p.id: p.prompt for p in task.problems("test")})
    assert len(found[0]) == 4 and found[1].items() < found[0].items()
    row = {"prompt": rows[3]["prompt"], "completions": ["4"], "labels": [True], "draft_ids": [4], "cuts": [1]}
    labelled = check_row(row, "here")
    assert found[1][labelled.problem] == rows[3]["prompt"]


@pytest.mark.parametrize("check", ["exact", "regex", "math", "numeric"])
def test_an_empty_reference_is_no_reference(tmp_path, check):
    """A pattern without a letter would be found in every answer."""
    for reference in ("", None):
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "p", "reference": reference}))
        with pytest.raises(
            ValueError, match="line 1: the reference is empty; to use prompts alone, set check_with: none"
        ):
            list(load_task("jsonl", path=str(tmp_path / "rows.jsonl"), check_with=check).problems("test"))


def test_prompts_without_references_serve_where_nothing_is_checked(tmp_path):
    """Also in the form of MT-Bench and Spec-Bench."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"question_id": 81, "category": "qa", "turns": ["first", "second"]}\n{"prompt": "p"}\n')
    found = {p.prompt: p for p in load_task("jsonl", path=str(path), check_with="none").problems("test")}
    assert found.keys() == {"first", "p"}
    assert found["first"].id == "81" and found["first"].metadata == {"category": "qa"}
    task = load_task("jsonl", path=str(path), check_with="none")
    assert task.check(found["p"], "anything") is None
    path.write_text('{"category": "qa"}\n')
    with pytest.raises(ValueError, match="line 1: the row has neither prompt nor turns"):
        list(task.problems("test"))
