"""Drafters: what a draft is, with the target's tokens and with others."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast

from parse_infer.drafters.cross_tokenizer import CrossTokenizerDraft
from parse_infer.drafters.model_drafter import ModelDrafter, with_template
from parse_infer.drafters.text import TextDrafter
from parse_infer.models.decoder import Decoder
from parse_infer.models.loading import LanguageModel
from parse_infer.settings.sampling import Sampling
from parse_infer.text.prompts import Verbatim
from parse_infer.token_drafters.prompt_lookup import PromptLookupDrafter
from parse_infer.token_drafters.rejected_draft import RejectedDraft
from tests.parse_infer.language_models import (
    TokenCount,
    crossing_tokenizer,
    language_model,
    printable,
    word_tokenizer,
)

PROMPT = "Tom has 5 apples."
GREEDY = Sampling()


@pytest.fixture
def target(make_model, tokenizer) -> LanguageModel:
    return language_model(printable(make_model("llama"), tokenizer), tokenizer, "target")


@pytest.fixture
def draft(make_model, tokenizer) -> LanguageModel:
    return language_model(printable(make_model("llama_gqa", seed=3), tokenizer), tokenizer, "draft")


@pytest.fixture
def other(make_model) -> LanguageModel:
    """A draft model with another tokenizer and chat template."""
    words = word_tokenizer()
    return language_model(
        printable(make_model("llama", seed=15, vocab_size=300, eos_token_id=0), words), words, "other"
    )


def greedy(model: LanguageModel, ids: list[int], n: int) -> list[int]:
    decoder = Decoder(model.model, model.eos_ids)
    decoder.seek(ids)
    return list(decoder.decode(n))


class Transfers(TorchDispatchMode):
    """Counts the numbers that Python reads from tensors one by one: each waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.8, seed=1)], ids=["greedy", "sampled"])
def test_a_drafted_token_waits_for_the_device_once(draft, target, sampling):
    """For its number and its probability together, as a list."""
    drafter = ModelDrafter(draft, target)
    drafter.reset(PROMPT, sampling)
    with Transfers() as transfers:
        assert drafter.propose_block([], 20, 12, lambda confidence: False).n_drafted == 12
    assert transfers.n == 0


def test_the_same_tokens_pass_straight_through(draft, target):
    drafter = ModelDrafter(draft, target)
    assert drafter.shares_tokens
    drafter.reset(PROMPT, GREEDY)
    prompt = draft.render(PROMPT)
    first = drafter.propose([], 12)
    assert first.ids == greedy(draft, prompt, 12) and not first.finished
    answer = [*first.ids[:5], 70, 71]  # the target has taken another way
    assert drafter.propose(answer, 12).ids == greedy(draft, prompt + answer, 12)


def test_a_finished_draft_ends_with_the_targets_end_token(draft, target):
    ids = greedy(draft, draft.render(PROMPT), 12)
    draft.model.generation_config.eos_token_id = ids[8]
    ending = language_model(draft.model, draft.tokenizer)
    drafter = ModelDrafter(ending, target)
    drafter.reset(PROMPT, GREEDY)
    result = drafter.propose([], 12)
    assert result.finished and result.ids == [*ids[: ids.index(ids[8])], 258]


def test_its_cache_is_kept_from_round_to_round_and_prompt_to_prompt(draft, target):
    drafter = ModelDrafter(draft, target)
    drafter.reset(PROMPT, GREEDY)
    ids = drafter.propose([], 12).ids
    with TokenCount(draft.model) as count:
        drafter.propose([*ids[:6], 70], 3)
        assert count.widths == [1, 1, 1]  # only the target's token is new
        drafter.reset(PROMPT[:-1] + "!", GREEDY)
        drafter.propose([], 3)
        assert count.widths[3] == 2  # "!" and the assistant's mark
    assert drafter.forwards == draft.decoder.forwards == 12 + 3 + 3


def test_other_tokens_travel_as_text(other, target):
    drafter = ModelDrafter(other, target)
    assert not drafter.shares_tokens
    drafter.reset(PROMPT, GREEDY)
    ids = drafter.propose([], 12).ids
    own = other.tokenizer.decode(greedy(other, other.render(PROMPT), 12))
    assert target.tokenizer.decode(ids) == own and len(ids) == len(own) > 12


def test_other_tokens_continue_the_targets_text(other, target):
    drafter = ModelDrafter(other, target)
    drafter.reset(PROMPT, GREEDY)
    so_far = "There are 19 x 2 = "
    ids = drafter.propose(target.tokenizer.encode(so_far), 12).ids
    context = other.tokenizer.encode("[Q]" + PROMPT + "[A]" + so_far)  # its own chat template
    assert target.tokenizer.decode(ids) == other.tokenizer.decode(greedy(other, context, 12))


def test_other_tokens_a_finished_draft_ends_with_the_targets_end_token(other, target):
    ids = greedy(other, other.render(PROMPT), 12)
    other.model.generation_config.eos_token_id = ids[8]
    drafter = ModelDrafter(language_model(other.model, other.tokenizer), target)
    drafter.reset(PROMPT, GREEDY)
    result = drafter.propose([], 12)
    text = other.tokenizer.decode(ids[: ids.index(ids[8])])
    assert result.finished and target.tokenizer.decode(result.ids) == text + "<|end|>"


def test_a_draft_stops_writing_at_a_stop_string(draft, target):
    drafter = ModelDrafter(draft, target)
    drafter.reset(PROMPT, GREEDY)
    text = target.tokenizer.decode(drafter.propose([], 20).ids)
    stop = next(a + b for a, b in pairwise(text[4:]) if text.index(a + b) >= 4)
    before = drafter.forwards
    drafter.reset(PROMPT, GREEDY, [stop])
    result = drafter.propose([], 20)
    assert target.tokenizer.decode(result.ids) == text[: text.index(stop) + 2] and not result.finished
    assert drafter.forwards - before == len(result.ids)
    # The stop string may begin in what the target wrote.
    half = target.tokenizer.encode(text[: text.index(stop) + 1])
    assert target.tokenizer.decode(drafter.propose(half, 20).ids) == stop[1]


def test_the_window_bounds_the_draft(draft, target):
    draft.window = len(draft.render(PROMPT)) + 9
    drafter = ModelDrafter(draft, target)
    drafter.reset(PROMPT, GREEDY)
    ids = drafter.propose([], 50).ids
    assert len(ids) == 9
    assert drafter.propose(ids[:7], 50).ids == ids[7:]
    assert drafter.propose(ids, 50).ids == []
    drafter.reset(PROMPT * 2, GREEDY)
    assert drafter.propose([], 50).ids == []


def test_a_base_model_uses_the_targets_chat_template(make_model, tokenizer, target):
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|end|>")
    base = language_model(make_model("llama", seed=3), bare)
    assert with_template(base, target).render(PROMPT) == target.render(PROMPT) != base.render(PROMPT)


def test_tokens_that_only_one_model_embeds(make_model, tokenizer, target):
    """Models of a family pad their vocabularies differently; ids beyond the smaller one never cross over."""
    wide = make_model("llama", seed=3, vocab_size=300)
    with torch.no_grad():  # after its first tokens, the draft model writes nothing but padding ids
        wide.get_output_embeddings().weight[:280] *= 0.7
    drafter = ModelDrafter(language_model(wide, tokenizer), target)
    drafter.reset(PROMPT, GREEDY)
    ids = drafter.propose([], 30).ids
    assert len(ids) < 30 and max(ids, default=0) < 260
    narrow = ModelDrafter(target, language_model(wide, tokenizer))
    narrow.reset(PROMPT, GREEDY)
    assert narrow.propose([299], 5).ids == []


def test_padding_ids_in_front_of_an_end_that_both_have(make_model, tokenizer, target):
    """They are no tokens of the target, however the draft ends."""
    wide = make_model("llama", seed=3, vocab_size=300)
    writing = CrossTokenizerDraft(language_model(wide, tokenizer), target, True, PROMPT).begin([70], 20)
    writing.add([71, 72, 290, 73, 258])
    draft = writing.draft()
    assert (draft.ids, draft.finished) == ([71, 72], False)
    block = CrossTokenizerDraft(language_model(wide, tokenizer), target, True, PROMPT).begin_block([70], 20, None)
    block.add([71, 72, 290, 73, 258])
    assert (block.block().ids, block.block().finished) == ([71, 72], False)


def test_a_stop_string_that_did_not_end_the_answer_ends_no_draft(other, target):
    """Within `min_tokens` an answer may contain it."""
    translation = CrossTokenizerDraft(other, target, False, PROMPT, stop=("apple",))
    writing = translation.begin(target.tokenizer.encode("an apple or two", add_special_tokens=False), 20)
    assert not writing.is_finished
    writing.add(other.tokenizer.encode(" or", add_special_tokens=False))
    assert not writing.is_finished and writing.n
    for token in other.tokenizer.encode(" an apple", add_special_tokens=False):
        writing.add([token])
    assert writing.is_finished and writing.text.endswith("apple")


def test_a_block_stops_at_a_stop_string_of_characters_that_span_several_tokens(draft, target):
    """And at one that its tokens begin or end inside characters of."""
    words = crossing_tokenizer()
    for tokens, stop in ((draft.tokenizer, "🙂🙈"), (words, "ធធ"), (words, "ធb")):
        draft.tokenizer = tokens
        block = CrossTokenizerDraft(draft, target, True, Verbatim("a", (70,)), stop=(stop,)).begin_block(
            [70], 40, None
        )
        ids = tokens.encode("aធធb 🙂🙈 c", add_special_tokens=False)
        while ids and not block.is_finished:
            block.add([ids.pop(0)])
        assert block.is_finished and ids and stop in tokens.decode(block.own_ids)


def test_nothing_follows_what_is_an_end_to_the_draft_model_alone(draft, target, other):
    draft.eos_ids = draft.eos_ids | {70}
    drafter = ModelDrafter(draft, target)
    drafter.reset(PROMPT, GREEDY)
    assert drafter.propose([66, 70], 8).ids == [] and drafter.propose([70, 66], 8).ids
    # The end token's name in the target's text ends nothing.
    drafter = ModelDrafter(other, target)
    drafter.reset(PROMPT, GREEDY)
    result = drafter.propose(target.tokenizer.encode("It ends with </s>"), 8)
    assert len(result.ids) > 1 and not result.finished


def test_special_tokens_in_a_text_are_text(target):
    ids = TextDrafter("Say <|end|> to stop.", target, PROMPT).propose([], 99).ids
    assert target.tokenizer.decode(ids, skip_special_tokens=True) == "Say <|end|> to stop."
    assert [i for i, token in enumerate(ids) if token in target.eos_ids] == [len(ids) - 1]


def test_sampling_continues_its_random_numbers_and_restarts_them_at_reset(draft, target):
    drafter = ModelDrafter(draft, target)
    hot = Sampling(temperature=50.0, seed=1)
    drafter.reset(PROMPT, hot)
    first, second = drafter.propose([], 8).ids, drafter.propose([], 8).ids
    assert first != second
    drafter.reset(PROMPT, hot)
    assert drafter.propose([], 8).ids == first


def test_a_text_draft_is_proposed_once(target):
    drafter = TextDrafter("It is 38.", target, PROMPT)
    drafter.reset(PROMPT, GREEDY)
    result = drafter.propose([], 2)
    assert result.finished and target.tokenizer.decode(result.ids) == "It is 38.<|end|>"
    assert drafter.propose(result.ids[:3], 50).ids == []
    assert TextDrafter("It is", target, PROMPT, finished=False).propose([], 50).ids == target.tokenizer.encode("It is")
    with pytest.raises(ValueError, match="draft text"):
        TextDrafter("", target, PROMPT)


def test_a_draft_continues_an_open_turn(make_model, draft):
    """A SentencePiece tokenizer puts a space in front of every text; inside the assistant's turn none may appear."""
    core = Tokenizer(models.BPE(unk_token="?"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(special_tokens=["?", "</s>"], show_progress=False)
    core.train_from_iterator(["It is 38 so they share 19."] * 3, trainer)
    template = draft.tokenizer.chat_template
    pieces = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", chat_template=template)
    size = len(pieces)
    target = language_model(
        printable(make_model("llama", vocab_size=size, eos_token_id=1, pad_token_id=1), pieces), pieces, "target"
    )
    turn = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": "It is 3"}]
    for prompt, spaced in ((turn, False), (turn[:1], True)):
        ids = TextDrafter("8 so", target, prompt, finished=False).propose([], 9).ids
        assert pieces.convert_ids_to_tokens(ids)[0].startswith("▁") == spaced
        drafter = ModelDrafter(draft, target)
        drafter.reset(prompt, GREEDY)
        first = drafter.propose([], 8).ids
        assert pieces.convert_ids_to_tokens(first)[0].startswith("▁") == spaced
    # Behind the turn's own space, which a decoder would drop at the beginning of a text.
    words = pieces.encode("38 so they", add_special_tokens=False)[1:]
    assert pieces.convert_ids_to_tokens(words)[0].startswith("▁")
    translation = CrossTokenizerDraft(draft, target, False, turn)
    written = translation.begin(words, 9).context[len(translation.prompt_ids) :]
    assert draft.tokenizer.decode(written).startswith(" ")


def test_a_rejected_draft_is_aligned_with_what_is_written_instead():
    context, rest = [1, 2], [50, 51, 52, 53, 54, 55, 52, 53, 56]
    drafter = RejectedDraft(context, rest, tokens=3)

    def propose(written: list[int], limit: int = 9) -> list[int]:
        return list(drafter.propose([*context, *written], limit, GREEDY, None).tokens)

    assert propose([90]) == propose([90, 51]) == []
    assert propose([90, 51, 52]) == [53, 54, 55]  # 50 was replaced
    assert propose([90, 91, 51, 52]) == [53, 54, 55]  # one more token than the draft had: found again
    assert propose([90, 91, 92, 93, 94, 52, 53]) == [56]  # of two places the nearest
    assert propose([50]) == [51, 52, 53] and propose([50], limit=1) == [51]
    assert propose([7] * 9) == [] == propose([7] * 20)


def test_another_drafter_proposes_where_the_rejected_draft_has_no_proposal():
    drafter = RejectedDraft([1, 2], [50, 51, 52], fallback=PromptLookupDrafter(tokens=2))
    assert list(drafter.propose([1, 2, 50], 9, GREEDY, None).tokens) == [51, 52]
    assert list(drafter.propose([1, 2, 1, 2], 9, GREEDY, None).tokens) == [1, 2]
