"""Prompts that bring switches of the chat template, or their tokens."""

from __future__ import annotations

import copy
import json

import pytest
from tokenizers import processors
from transformers import GenerationConfig

from parse_infer.drafters.text import TextDrafter
from parse_infer.errors import ModelError, PromptError, SettingsError
from parse_infer.models.loading import load_language_model, load_served_model
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling
from parse_infer.text.chat_template import takes_parts
from parse_infer.text.prompts import (
    Chat,
    RenderedPrompt,
    Verbatim,
    changed_option,
    end_of_turn,
    left_context,
    open_turn,
    prompt_text,
    render_prompt,
)
from parse_infer.text.tokenizer_spec import reads_alike
from tests.conftest import SPECIALS
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


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_misspelt_switch_of_a_target_is_refused(thinking, tmp_path, role):
    """A draft model with another template ignores the target's switches."""
    thinking.model.save_pretrained(tmp_path)
    thinking.tokenizer.save_pretrained(tmp_path)
    for load in (load_language_model, load_served_model):
        load(tmp_path, role=role, template_options={"think": True, "short": 1})
        if role == "draft":
            load(tmp_path, role=role, template_options={"thinkng": True})
            continue
        with pytest.raises(ModelError, match=r"reads no option 'thinkng'; it reads: 'short', 'think'\.$"):
            load(tmp_path, role=role, template_options={"thinkng": True})


@pytest.mark.parametrize("text", ["caf\udce9", "\ud800", "a" * 99 + "\udfff"])
def test_half_of_a_surrogate_pair_is_a_prompt_error(thinking, tokenizer, text):
    chat = [{"role": "user", "content": text}]
    prompts = [text, chat, Verbatim(text), [*USER, {"role": "assistant", "content": text}]]
    prompts += [[{"role": text, "content": "Hi"}], Chat(USER, {"think": True})]
    spoken = copy.deepcopy(tokenizer)
    spoken.chat_template = "{{ messages[0]['role'] }}" + spoken.chat_template
    for prompt in prompts[:-1]:
        with pytest.raises(PromptError, match="has half of a surrogate pair"):
            render_prompt(spoken, prompt)
    with pytest.raises(PromptError, match="has half of a surrogate pair"):
        TextDrafter(text, thinking, "Hi")
    with pytest.raises(SettingsError, match="has half of a surrogate pair"):
        GenerationSettings(stop=text)


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
        assert open_turn(RenderedPrompt(inner), thinking.tokenizer) == open_turn(inner, thinking.tokenizer) == "It is"


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


LOOP = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
WORDS = {"user": "How many?", "system": "Be brief.", "assistant": "It is", "tool": "38"}
PARTS_ONLY = {
    "loop": "{% for m in messages %}[{{ m.role }}]" + LOOP + "{% endfor %}",
    "renamed": "{% set rest = messages[0:] %}{% for m in rest %}{% set c = m['content'] %}[{{ m.role }}]"
    "{% for p in c | list %}{{ p['text'] }}{% endfor %}{% endfor %}",
    "macro": "{% macro text(c) %}{% for p in c %}{{ p['text'] }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}[{{ m.role }}]{{ text(m.content) }}{% endfor %}",
    "first": "{% for m in messages %}[{{ m.role }}]{{ m.content[0].text }}{% endfor %}",
    "fails on text": "{% for m in messages %}[{{ m.role }}]{{ m.content[0]['text'] + '' }}{% endfor %}",
    "users' alone": "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' %}"
    + LOOP
    # Of a list, this would print Python's form.
    + "{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "with a BOS token": "{{ bos_token + '' }}{% for m in messages %}[{{ m.role }}]" + LOOP + "{% endfor %}",
}
TEXTS_TOO = {
    "text": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}",
    "both": "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    + LOOP
    + "{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("name", [*PARTS_ONLY, *TEXTS_TOO])
def test_a_template_reads_contents_in_its_own_form(tokenizer, name):
    own = copy.deepcopy(tokenizer)
    own.chat_template = (PARTS_ONLY | TEXTS_TOO)[name]
    own.bos_token = "<|user|>"
    begin = own.bos_token if "BOS" in name else ""
    for roles in (["user"], ["system", "user"], ["user", "assistant"], ["user", "assistant", "user"]):
        messages = [{"role": role, "content": WORDS[role]} for role in roles]
        text = own.decode(render_prompt(own, messages))
        assert text == begin + "".join(f"[{role}]{WORDS[role]}" for role in roles)
    assert own.decode(render_prompt(own, "How many?")) == begin + "[user]How many?"
    assert takes_parts(own.chat_template, "user", (("bos_token", "x"),)) == (name in PARTS_ONLY)


def test_an_end_of_turn_of_a_template_of_parts_is_found(tokenizer):
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{% for m in messages %}[{{ m.role }}]" + LOOP + "<|end|>{% endfor %}"
    assert end_of_turn(own) == [own.eos_token_id]


FAILING = {
    "refuses": "{{ raise_exception('no system messages here\\nat all') }}",
    "divides": "{{ 1 // (messages | length - messages | length) }}",
    "key": "{{ messages[7].content.strip() }}",
    "type": "{{ messages[0].content + 1 }}",
    "value": "{{ messages[0].content | int | string | format(1, 2, 3) }}",
    "syntax": "{% for %}",
    "endless": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
}


@pytest.mark.parametrize("name", FAILING)
def test_whatever_a_template_raises_is_one_sentence(tokenizer, name):
    own = copy.deepcopy(tokenizer)
    own.chat_template = FAILING[name]
    with pytest.raises(PromptError, match="refuses the prompt") as refused:
        render_prompt(own, "Hello")
    text = str(refused.value)
    assert "\n" not in text and len(text) < 400 and text.endswith(".")
    assert end_of_turn(own) == []


def test_a_message_that_the_template_changes_cannot_be_continued(tokenizer):
    """As Qwen3's drops the reasoning; transformers' error prints the whole chat."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    begun = {"role": "assistant", "content": "<think>a secret</think>It is"}
    with pytest.raises(PromptError, match="would continue") as refused:
        render_prompt(own, [*USER, begun])
    assert "secret" not in str(refused.value) and "\n" not in str(refused.value)


def adding(tokenizer, template: str, **names: str):
    """A tokenizer that puts special tokens around each text."""
    own = copy.deepcopy(tokenizer)
    specials = [(token, own.convert_tokens_to_ids(token)) for token in SPECIALS]
    own.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
    for name, token in names.items():
        setattr(own, name, token)
    return own


@pytest.mark.parametrize(
    "template", ["<|user|> $A <|end|>", "<|user|> $A", "$A <|end|>", "$A", "<|user|> <|assistant|> $A"]
)
def test_a_text_is_continued_as_it_stands(tokenizer, template):
    own = adding(tokenizer, template)
    before = template.partition("$A")[0].split()
    for text in ("Once upon", "a", "", "".join(before) + "Once"):
        plain = own.encode(text, add_special_tokens=False)
        begun = bool(before) and text.startswith(before[0])
        expected = plain if begun else own.convert_tokens_to_ids(before) + plain
        if not expected:
            with pytest.raises(PromptError, match="empty"):
                render_prompt(own, Verbatim(text))
            continue
        assert render_prompt(own, Verbatim(text)) == expected
        if plain:
            assert render_prompt(own, Verbatim(text, add_special_tokens=False)) == plain
    bare = copy.deepcopy(own)
    bare.chat_template = None
    assert render_prompt(bare, "Once") == render_prompt(own, Verbatim("Once"))
    chat = render_prompt(own, USER)
    assert own.decode(chat) == "<|user|>2 + 2<|assistant|>" and render_prompt(own, Chat(USER, {})) == chat
    with_bos = render_prompt(own, Chat(USER, {}, add_special_tokens=True))
    assert with_bos == chat, "the template puts one already"


def test_models_that_add_other_tokens_read_texts_unlike(make_model, tokenizer):
    one = language_model(make_model("llama"), adding(tokenizer, "<|user|> $A"))
    other = language_model(make_model("llama"), adding(tokenizer, "$A <|end|>"))
    for prompt, alike in ((Verbatim("a"), False), (Verbatim("a", add_special_tokens=False), True), (USER, True)):
        assert reads_alike(one, other, prompt) == alike
    assert not reads_alike(one, other, Chat(USER, {}, add_special_tokens=True))
    assert reads_alike(one, one, Verbatim("a")) and prompt_text(one.tokenizer, one.render(Verbatim("a"))) == "a"


def test_without_a_template_the_answer_continues_the_text(tokenizer):
    """Of some tokenizers a first token loses its space where an answer begins a turn."""
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    assert open_turn("Once", bare) == "Once" and list(left_context("Once", [5, 6], bare)) == [5, 6]
    bare.chat_template = "{{ messages }}"
    assert open_turn("Once", bare) == "" and not left_context("Once", [5, 6], bare)
    assert open_turn([{"role": "assistant", "content": "So"}], bare) == open_turn(Verbatim("So"), bare) == "So"
