"""Each prompt is rendered once for each model that reads it another way, and never again."""

from __future__ import annotations

import copy

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from parse_infer.drafters.model_drafter import ModelDrafter
from parse_infer.engine import ParseEngine
from parse_infer.serve.thread_runner import ThreadRunner
from parse_infer.settings.generation import GenerationSettings
from parse_infer.settings.sampling import Sampling
from parse_infer.text import tokenizer_spec
from parse_infer.text.prompts import RenderedPrompt, Verbatim
from tests.parse_infer.language_models import language_model, printable
from tests.parse_infer.serve.conftest import running

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tom has 5 apples."}]
OPEN = [*CHAT, {"role": "assistant", "content": "He has"}]
PROMPTS = {"text": "Tom has 5 apples.", "chat": CHAT, "open turn": OPEN, "verbatim": Verbatim("Tom has 5 apples. He")}
SETTINGS = GenerationSettings(8, threshold=0.5, block_tokens=6)


@pytest.fixture
def rendered(monkeypatch) -> list[str]:
    """The end token of the tokenizer, for each rendering."""
    calls: list[str] = []
    plain = tokenizer_spec.render_prompt

    def counting(tokenizer, *arguments, **options):
        calls.append(tokenizer.eos_token)
        return plain(tokenizer, *arguments, **options)

    monkeypatch.setattr(tokenizer_spec, "render_prompt", counting)
    return calls


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_a_request_renders_its_prompt_once_for_each_model_that_reads_it_another_way(
    make_engine, mixed_engine, rendered, prompt
):
    engine = make_engine()
    for found in (
        lambda: engine.generate(prompt, SETTINGS),
        lambda: engine.generate(prompt, SETTINGS, draft_text="No."),
        lambda: engine.generate(prompt, SETTINGS, adaptive=True),
        lambda: list(engine.stream(prompt, SETTINGS)),
        lambda: engine.generate_target(prompt, SETTINGS),
        lambda: engine.score(prompt, "It is 5."),
    ):
        rendered.clear()
        found()
        assert rendered == ["<|end|>"]
    rendered.clear()
    engine.generate([prompt, "Another one.", prompt], SETTINGS)
    assert len(rendered) == 3
    rendered.clear()
    mixed_engine.generate(prompt, SETTINGS)
    assert sorted(rendered) == ["</s>", "<|end|>"]


def changed(tokenizer: PreTrainedTokenizerFast, change: str) -> PreTrainedTokenizerFast:
    """The same tokens, put around a prompt in another way."""
    other = copy.deepcopy(tokenizer)
    if change == "template":
        other.chat_template = tokenizer.chat_template.replace("'<|user|>'", "'Q: '")
    elif change == "special token in the template":
        other.chat_template = tokenizer.chat_template.replace("'<|user|>'", "pad_token")
        other.pad_token = "<|assistant|>"
    elif change == "first token":
        begin = TemplateProcessing("<|user|> $A", special_tokens=[("<|user|>", 256)])
        other.backend_tokenizer.post_processor = begin
    return other


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("change", ["nothing", "template", "special token in the template", "first token"])
def test_a_draft_model_reads_what_it_would_render_itself(make_engine, make_model, tokenizer, rendered, change, prompt):
    target = make_engine().target
    draft = language_model(make_model("llama_gqa", seed=3), changed(tokenizer, change), "draft")
    if change == "special token in the template":
        target.tokenizer = copy.deepcopy(tokenizer)
        target.tokenizer.chat_template = draft.tokenizer.chat_template
    expected = draft.encode(prompt)
    drafter = ModelDrafter(draft, target)
    assert drafter.shares_tokens
    request = RenderedPrompt.of(prompt)
    target.render(request)
    rendered.clear()
    drafter.reset(request, Sampling())
    drafter.propose([], 4)
    assert draft.decoder.ids[: len(expected)] == expected
    alike = expected == target.render(request)
    assert len(rendered) <= (0 if alike and change == "nothing" else 1)


def test_the_targets_template_serves_the_draft_model_of_one_engine_only(make_engine, make_model, tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    draft = language_model(make_model("llama", seed=3), bare, "draft")
    target = make_engine().target
    assert target.tokenizer.chat_template is not None
    engine = ParseEngine.from_models(target, draft)
    assert engine.draft.encode("Hi") == target.encode("Hi") != draft.encode("Hi")
    assert draft.tokenizer.chat_template is None, "the caller's own model is as it was"


def test_tokens_that_the_draft_model_does_not_have_are_still_refused(make_engine, make_model, tokenizer):
    engine = make_engine()
    wide = language_model(printable(make_model("llama", seed=3, vocab_size=300), tokenizer), tokenizer, "wide")
    wider = ParseEngine.from_models(wide, engine.draft, drafter=None)
    with pytest.raises(ValueError, match="299 is no token of 'draft', which has tokens 0 to 259"):
        wider.generate(Verbatim("?", (70, 299)), mode="exact")


def test_a_server_renders_each_prompt_once(make_engine, rendered):
    with running(ThreadRunner(make_engine()), make_engine()) as server:
        rendered.clear()
        answer = server.chat("Tom has 5 apples.", max_tokens=8, n=2)
        assert answer.status_code == 200 and len(answer.json()["choices"]) == 2
        assert rendered == ["<|end|>"]
