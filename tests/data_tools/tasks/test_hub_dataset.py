"""Problems of data sets in local files, which stream as those of the Hub do."""

from __future__ import annotations

import json

import pytest

from data_tools.tasks.registry import load_task
from data_tools.tasks.task import prompt_id

pytest.importorskip("datasets", reason="datasets is not installed (extra data)")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN", 0, raising=False)


@pytest.fixture
def sums(tmp_path):
    """`sums(**options)`: a task over 60 training and 5 test rows, two of each with the same question."""

    def write(name, count):
        rows = [{"question": f"{i} + 1?", "answer": i + 1, "key": f"k{i}"} for i in [*range(count), 0]]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return str(tmp_path / f"{name}.jsonl")

    files = {"train": write("train", 60), "test": write("test", 5)}
    columns = {"path": "json", "data_files": files, "prompt": "question", "reference": "answer"}
    return lambda **options: load_task("dataset", **{**columns, **options})


def test_rows_become_problems_once_in_the_order_of_the_seed(sums):
    task = sums(instruction="\nEnd with ####.")
    found = list(task.problems("test"))
    assert sorted((p.prompt, p.reference) for p in found) == [
        (f"{i} + 1?\nEnd with ####.", str(i + 1)) for i in range(5)
    ]
    assert all(p.id == prompt_id(p.prompt) for p in found)
    assert task.check(found[0], f"#### {found[0].reference}") and not task.check(found[0], "#### 77")
    some = list(task.problems("train", seed=1, limit=9))
    assert len(some) == 9 and some == list(task.problems("train", seed=1))[:9]
    assert some != list(task.problems("train", seed=2, limit=9))
    assert {p.id for p in sums(id="key").problems("test")} == {f"k{i}" for i in range(5)}
    assert sums(check_with="none").check(found[0], "anything") is None


def test_a_data_set_without_validation_problems_takes_them_from_train(sums):
    parts = {split: {p.prompt for p in sums().problems(split)} for split in ("train", "validation", "test")}
    assert 1 <= len(parts["validation"]) <= 15 and len(parts["train"] | parts["validation"]) == 60
    assert not parts["train"] & parts["validation"]
    named = {"validation": "test"}
    assert {p.prompt for p in sums(split_names=named).problems("train")} == parts["train"] | parts["validation"]
    alone = sums(split_names={"test": "train"})
    thirds = {split: {p.prompt for p in alone.problems(split)} for split in parts}
    assert sum(map(len, thirds.values())) == 60 == len(set().union(*thirds.values())) and all(thirds.values())
    assert thirds["validation"] == parts["validation"]


def test_a_data_set_with_training_problems_alone_tests_on_none_that_it_trains_on(tmp_path):
    rows = [{"prompt": f"{i} + 1?", "reference": i + 1} for i in range(100)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = load_task("dataset", path="json", data_files={"train": str(tmp_path / "rows.jsonl")})
    parts = [{p.prompt for p in task.problems(split)} for split in ("train", "validation", "test")]
    assert sum(map(len, parts)) == 100 == len(set().union(*parts)) and all(parts)


def test_options_stand_below_messages_of_parts(tmp_path):
    said = [{"type": "text", "text": "Which?"}]
    row = {"prompt": [{"role": "user", "content": said}], "reference": "A", "options": ["red", "blue"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    files = {"test": str(tmp_path / "rows.jsonl")}
    (only,) = load_task("dataset", path="json", data_files=files, choices="options", check_with="choice").problems(
        "test"
    )
    assert only.prompt == [{"role": "user", "content": [*said, {"type": "text", "text": "\nA) red\nB) blue"}]}]


@pytest.mark.parametrize("kind", ["parquet", "csv", "folder"])
def test_other_files_and_folders_are_read_too(sums, tmp_path, kind):
    from datasets import Dataset

    rows = Dataset.from_list([{"question": "1 + 1?", "answer": 2}])
    (tmp_path / "folder").mkdir()
    file = str(tmp_path / "folder" / f"test.{'csv' if kind == 'csv' else 'parquet'}")
    rows.to_csv(file) if kind == "csv" else rows.to_parquet(file)
    place = {"path": str(tmp_path / "folder"), "data_files": None} if kind == "folder" else {"path": kind}
    (only,) = sums(**{"data_files": {"test": file}, **place}).problems("test")
    assert (only.prompt, only.reference) == ("1 + 1?", "2")


def test_options_get_letters(tmp_path):
    def problem(row, **options):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        files = {"path": "json", "data_files": {"test": str(tmp_path / "rows.jsonl")}}
        task = load_task("dataset", **files, prompt="question", check_with="choice", **options)
        (only,) = task.problems("test")
        assert task.check(only, f"The answer is ({only.reference}).")
        return only.prompt, only.reference

    shown = "Which?\nA) red\nB) blue"
    mmlu = {"question": "Which?", "choices": ["red", "blue"], "answer": 1}
    assert problem(mmlu, reference="answer", choices="choices") == (shown, "B")
    assert problem({**mmlu, "answer": "1"}, reference="answer", choices="choices") == (shown, "B")
    arc = {"question": "Which?", "choices": {"text": ["red", "blue"], "label": ["1", "2"]}, "answerKey": "1"}
    assert problem(arc, reference="answerKey", choices="choices") == (shown, "A")
    chat = {**mmlu, "question": [{"role": "user", "content": "Which?"}]}
    assert problem(chat, reference="answer", choices="choices")[0] == [{"role": "user", "content": shown}]
    with pytest.raises(ValueError, match="the reference -1 is no letter from A to J"):
        problem({**mmlu, "answer": -1}, reference="answer")
    with pytest.raises(ValueError, match="the reference is 2 of 2 options, which count from 0"):
        problem({**mmlu, "answer": 2}, reference="answer", choices="choices")
    with pytest.raises(ValueError, match="column question: not a list of options but 'Which"):
        problem(mmlu, reference="answer", choices="question")


def test_templates_are_filled_from_the_row(tmp_path):
    row = {"question": "Which?", "options": ["red", "blue"], "right": {"text": "blue"}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    task = load_task(
        "dataset",
        path="json",
        data_files={"test": str(tmp_path / "rows.jsonl")},
        prompt="{question}\n- {options[0]}\n- {options[1]}",
        reference="{right[text]}",
        check_with="exact",
    )
    (only,) = task.problems("test")
    assert (only.prompt, only.reference) == ("Which?\n- red\n- blue", "blue")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": ""}, "task dataset needs the option path: a Hugging Face id"),
        ({"data_files": None}, "path json of task dataset needs the option data_files"),
        ({"path": "./nowhere", "data_files": None}, "the data set './nowhere' cannot be loaded: .*nowhere"),
        ({"split_names": {"dev": "test"}}, "unknown split 'dev'"),
        (
            {"split_names": {"test": "dev"}},
            "no split 'dev', only train, test: choose another split, or name",
        ),
        ({"prompt": "text"}, "option prompt of task dataset is 'text', .* columns of 'json': question, answer, key"),
        ({"prompt": "{question[a]}"}, "option prompt of task dataset is '{question.a.}', which does not fit"),
        ({"reference": "{answer"}, "option reference of task dataset is '{answer', which does not fit"),
        ({"id": "number"}, "option id of task dataset is 'number'"),
        ({"reference": "question", "check_with": "choice"}, "is no letter from A to J"),
        ({"check_with": "fuzzy"}, "check_with is 'fuzzy'; choose one of exact, .*, math, tests, same_function, none"),
        ({"data_files": 5}, "option data_files of task dataset is 5; it must be a text or a mapping or null"),
    ],
)
def test_each_mistake_is_one_sentence_that_names_what_there_is(sums, options, message):
    with pytest.raises(ValueError, match=message) as error:
        list(sums(**options).problems("test"))
    assert "\n" not in str(error.value)


def test_a_row_without_its_reference_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "reference": ""}')
    task = {"path": "json", "data_files": {"test": str(tmp_path / "rows.jsonl")}}
    with pytest.raises(ValueError, match=r"the row with prompt '1 \+ 1\?': the reference is empty; .* none"):
        list(load_task("dataset", **task).problems("test"))
    (only,) = load_task("dataset", check_with="none", **task).problems("test")
    assert (only.prompt, only.reference) == ("1 + 1?", "")


def write(path, *lines):
    path.write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8"))
    return str(path)


def of(kind, *files, **options):
    task = load_task("dataset", path=kind, data_files={"test": list(files)}, check_with="exact", **options)
    return sorted((problem.id, problem.prompt, problem.reference) for problem in task.problems("test"))


@pytest.mark.parametrize("kind", ["json", "parquet"])
def test_other_columns_may_have_any_type(tmp_path, kind):
    """A null column of one file has values in the next."""
    from datasets import Dataset

    rows = [{"prompt": "a", "reference": "1", "other": None}, {"prompt": "b", "reference": "2", "other": 3}]
    files = [str(tmp_path / f"{index}.{kind}") for index in range(2)]
    for row, file in zip(rows, files, strict=True):
        data = Dataset.from_list([row])
        data.to_json(file) if kind == "json" else data.to_parquet(file)
    assert [row[1:] for row in of(kind, *files)] == [("a", "1"), ("b", "2")]


def test_references_stay_as_they_stand_in_the_file(tmp_path):
    references = ["2024-01-02", "12345678901234567890123", "007", "1.50", "1e5", "NA", "true", "12:30", "0x10"]
    bare = {"12345678901234567890123", "1.50", "1e5", "true"}
    lines = [
        f'{{"prompt": "q{i}", "reference": {each if each in bare else json.dumps(each)}}}'
        for i, each in enumerate(references)
    ]
    table = ["prompt,reference", *(f"q{i},{each}" for i, each in enumerate(references))]
    found = {
        "json": of("json", write(tmp_path / "rows.jsonl", *lines)),
        "list": of("json", write(tmp_path / "list.json", f"[{','.join(lines)}]")),
        "csv": of("csv", write(tmp_path / "rows.csv", *table)),
    }
    task = load_task("jsonl", path=str(tmp_path / "rows.jsonl"), check_with="exact")
    found["jsonl"] = [(each.id, each.prompt, each.reference) for each in task.problems("test")]
    for form, rows in found.items():
        assert [row[2] for row in sorted(rows, key=lambda row: row[1])] == references, form


def test_rows_without_an_id_have_the_id_of_their_prompt(tmp_path):
    lines = [
        json.dumps({"prompt": f"q{i}", "reference": "1", "key": key}) for i, key in enumerate([None, "", None, 7])
    ]
    found = of("json", write(tmp_path / "rows.jsonl", *lines), id="key")
    assert {row[0] for row in found} == {"7", *(prompt_id(f"q{i}") for i in range(3))}


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_a_byte_order_mark_is_no_text(tmp_path, kind):
    lines = ['{"prompt": "é", "reference": "1"}'] if kind == "json" else ["prompt,reference", "é,1"]
    file = write(tmp_path / "rows", "\ufeff" + lines[0], *lines[1:])
    assert [row[1:] for row in of(kind, file)] == [("é", "1")]
    if kind == "json":
        (only,) = load_task("jsonl", path=file).problems("test")
        assert (only.prompt, only.reference) == ("é", "1")


def test_a_null_leaves_its_place_in_a_template_empty(tmp_path):
    file = write(tmp_path / "rows.jsonl", '{"question": "Why?", "context": null, "reference": "x"}')
    assert of("json", file, prompt="{context}{question}")[0][1] == "Why?"


def test_csv_texts_may_have_several_lines_and_delimiters(tmp_path):
    file = write(tmp_path / "rows.csv", "prompt,reference", '"one,\ntwo ""x""",1', "", "short")
    found = of("csv", file, reference="prompt")
    assert {row[2] for row in found} == {row[1] for row in found} == {'one,\ntwo "x"', "short"}


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("json", b'{"prompt": "a", "reference": "1"}\n{"prompt"', "line 2: not complete JSON"),
        ("json", b'[{"prompt": "a"}, 3]', "a row must be a JSON object, not '3'"),
        ("json", b'{"prompt": "\xff"}', "is not a text file in UTF-8"),
        ("csv", b"prompt,reference\n\xff,1", "is not a text file in UTF-8"),
        ("parquet", b"PAR1", "cannot be loaded"),
    ],
)
def test_damaged_files_are_one_sentence(tmp_path, kind, content, message):
    (tmp_path / "rows").write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        of(kind, str(tmp_path / "rows"))
    assert "\n" not in str(error.value)
