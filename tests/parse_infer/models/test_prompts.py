"""Prompts that bring switches of the chat template, or their tokens."""

from __future__ import annotations

import copy
import json

import pytest
from transformers import GenerationConfig

from parse_infer.models.loading import load_served_model
from parse_infer.models.prompts import Chat, RenderedPrompt, Verbatim, changed_option, open_turn
from parse_infer.sampling import Sampling
from tests.parse_infer.language_models import language_model

USER = [{"role": "user", "content": "2 + 2"}]


@pytest.fixture
def thinking(make_model, tokenizer):
    """A model whose chat template has two switches."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{% if think %}T{% endif %}{% if short %}S{% endif %}" + own.chat_template
    lm = language_model(make_model("llama"), own)
    lm.template_options = {"think": True}
    return lm


def test_a_prompts_own_switches_add_to_the_models(thinking):
    plain = language_model(thinking.model, thinking.tokenizer).render(USER)
    t, s = thinking.tokenizer.encode("TS", add_special_tokens=False)
    assert thinking.render(USER) == [t, *plain]
    assert thinking.render(Chat(USER, {"think": False})) == plain
    assert thinking.render(Chat(USER, {"short": True, "unknown": 1})) == [t, s, *plain]


def test_a_switch_is_another_where_a_template_tells_them_apart():
    own = {"think": False}
    for given, changed in (({}, None), (own, None), ({"think": 0}, "think"), ({**own, "short": None}, "short")):
        assert changed_option(RenderedPrompt(Chat(USER, given)), own) == changed
    assert changed_option(USER, own) is changed_option("2 + 2", own) is None


@pytest.mark.parametrize("name", ["tokenize", "messages", "chat_template", "add_generation_prompt", "conversation"])
def test_a_prompt_switches_nothing_but_the_template(thinking, name):
    with pytest.raises(ValueError, match=f"'{name}' is no option"):
        thinking.render(Chat(USER, {name: "x"}))


def test_a_switch_that_the_template_cannot_take_is_refused(thinking):
    thinking.tokenizer.chat_template = "{{ think + 1 }}"
    with pytest.raises(ValueError, match="refuses the prompt"):
        thinking.render(Chat(USER, {"think": "x"}))


def test_known_tokens_are_not_rendered_again(thinking):
    prompt = RenderedPrompt(USER)
    prompt.remember(thinking, (5, 6, 7))
    assert thinking.render(prompt) == thinking.encode(prompt) == [5, 6, 7]
    assert copy.copy(thinking).render(prompt) == thinking.render(USER)
    begun = [*USER, {"role": "assistant", "content": "It is"}]
    for inner in (begun, Chat(begun, {}), Verbatim("It is")):
        assert open_turn(RenderedPrompt(inner)) == open_turn(inner) == "It is"


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, Sampling()),
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20}, Sampling(0.7, 0.8, 20)),
        ({"do_sample": True}, Sampling(1.0)),
        ({"do_sample": True, "temperature": 0.6, "repetition_penalty": 1.1}, Sampling(0.6)),
        ({"top_p": 0.9}, Sampling(0.0, 0.9)),
    ],
)
def test_sampling_defaults_are_the_generation_configs(make_model, tokenizer, config, wanted, tmp_path):
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model.generation_config = GenerationConfig(eos_token_id=258, **config)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 258, **config}))
    assert language_model(model, tokenizer).default_sampling == wanted == load_served_model(tmp_path).default_sampling
