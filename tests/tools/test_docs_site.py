"""The site's built pages, and its links to files outside docs/."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_tools.labels.build_config import BuildConfig
from parse_infer.backends.local.options import LocalOptions
from parse_infer.backends.servers.options import ServerOptions
from parse_infer.errors import SettingsError
from parse_infer.serve.protocol.chat import ChatBody
from parse_infer.serve.protocol.fields import ParseOptions
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling
from tools.docs_errors import CLASSES, errors_page, sentences
from tools.docs_reference import COMMAND_LINE, RECIPE, REQUEST, command_line, recipe_keys, spellings

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_class_of_errors_has_sentences() -> None:
    found = sentences()
    assert set(found) == set(CLASSES) and all(found.values()) and sum(map(len, found.values())) > 500


@pytest.mark.slow
def test_a_raised_sentence_is_on_the_page() -> None:
    with pytest.raises(SettingsError) as error:
        Sampling(temperature=-1.0)
    written = [sentence for sentence, _ in sentences()["SettingsError"]]
    parts = [[part for part in sentence.split("…") if part] for sentence in written]
    assert any(all(part in str(error.value) for part in each) for each in parts if sum(map(len, each)) > 10)


@pytest.mark.slow
def test_a_sentence_is_split_at_its_way_out() -> None:
    assert "| This engine has no draft model | pass draft=… to from\\_pretrained, or give" in errors_page()


@pytest.mark.slow
def test_every_command_and_recipe_is_on_its_page() -> None:
    page = command_line()
    for name in ("parse-infer generate", "parse-infer eval", "parse-data build", "parse-train"):
        assert f"\n## {name}\n" in f"\n{page}"
    assert (
        "`--block-tokens` `auto\\|whole\\|N` | `auto` |" in page
        and "--help" not in page.partition("## parse-train")[0]
    )
    assert "## recipe: logprob" in recipe_keys() and "| `lora_rank` |" in recipe_keys()


@pytest.mark.slow
def test_spellings_are_those_of_the_code() -> None:
    """Words that are not derived exist, and a derived row is found."""
    requests = {*ChatBody.model_fields, *(f"parse.{name}" for name in ParseOptions.model_fields)}
    keys = {field.name for field in dataclasses.fields(BuildConfig)}
    python = {
        field.name
        for settings in (LocalOptions, ServerOptions, GenerationSettings, Sampling)
        for field in dataclasses.fields(settings)
    }
    assert all(set(words.split(", ")) <= requests for words in REQUEST.values())
    assert all(set(words.split(", ")) <= keys for words in RECIPE.values())
    assert {*COMMAND_LINE, *REQUEST, *RECIPE} - {"draft_text"} <= python
    assert "| `min_tokens` | `--min-tokens` | `min_tokens` |  |" in spellings()
    assert all(f"`{option}`" in command_line() for option in COMMAND_LINE.values())


@pytest.mark.parametrize(
    ("page", "link", "with_address", "without"),
    [
        ("guide/a.md", "[b](b.md#c)", "[b](b.md#c)", "[b](b.md#c)"),
        ("guide/a.md", "[code](../../parse_infer/engine.py)", "[code](https://host/parse_infer/engine.py)", "code"),
        ("guide/a.md", "[x](../../CONTRIBUTING.md)", "[x](../CONTRIBUTING.md)", "[x](../CONTRIBUTING.md)"),
        ("CHANGELOG.md", "[x](docs/results/gpu.md#a)", "[x](results/gpu.md#a)", "[x](results/gpu.md#a)"),
        ("guide/a.md", "[x](https://a/b)", "[x](https://a/b)", "[x](https://a/b)"),
        ("guide/a.md", "```\n[x](../../y)\n```", "```\n[x](../../y)\n```", "```\n[x](../../y)\n```"),
    ],
)
def test_links_out_of_docs(page: str, link: str, with_address: str, without: str) -> None:
    pytest.importorskip("mkdocs")
    from tools.docs_site import on_page_markdown

    place = SimpleNamespace(file=SimpleNamespace(src_uri=page))
    for files_at, expected in (("https://host/", with_address), (None, without)):
        assert on_page_markdown(link, place, SimpleNamespace(extra={"files": files_at}), None) == expected  # type: ignore[arg-type]


def test_every_page_has_a_place_in_the_navigation() -> None:
    navigation = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {path.relative_to(REPOSITORY / "docs").as_posix() for path in (REPOSITORY / "docs").rglob("*.md")}
    assert not {page for page in pages if f" {page}\n" not in navigation}
