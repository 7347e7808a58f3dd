"""Text of tokens that arrive one after another, for tokens that begin and end inside characters."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from parse_infer.models.loading import load_tokenizer
from parse_infer.request.answer import Answer
from parse_infer.text import detokenizer as detokenizer_module
from parse_infer.text.detokenizer import Detokenizer, complete_text, decode, encode_continuation
from parse_infer.text.prompts import Verbatim, prompt_text
from tests.parse_infer.language_models import (
    crossing_tokenizer,
    llama_tokenizer,
    sentencepiece_tokenizer,
    word_tokenizer,
)

TEXT = "ធធធ უუ 툠툠! étéé 数学 🙈🙂 {x²}\n\n<tool call> <数> students </s>"
BYTE_LEVEL = ("bytes", "words", "crossing")
KINDS = (*BYTE_LEVEL, "llama", "sentencepiece", "metaspace", "wordpiece", "no decoder", "own decoder")


class OwnDecoder(PreTrainedTokenizerFast):
    """A tokenizer of which only `decode` is known, as one with code of its own."""

    def _decode(self, token_ids: Any, *args: Any, **options: Any) -> str:
        return "".join(super()._decode(token_ids, *args, **options))


def _trained(model: Any, trainer: Any, pre_tokenizer: Any, decoder: Any) -> PreTrainedTokenizerFast:
    core = Tokenizer(model)
    core.pre_tokenizer = pre_tokenizer
    if decoder is not None:
        core.decoder = decoder
    core.train_from_iterator(["There are 19 x 2 = 38 students in it's the other room, so they share."] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="?")


@pytest.fixture(scope="module")
def tokenizers(tokenizer) -> dict[str, PreTrainedTokenizerFast]:
    specials = {"special_tokens": ["?", "</s>"], "vocab_size": 90, "show_progress": False}
    made = {
        "bytes": tokenizer,
        "words": word_tokenizer(),
        "crossing": crossing_tokenizer(),
        "llama": llama_tokenizer(),
        "sentencepiece": sentencepiece_tokenizer(),
        "metaspace": _trained(
            models.BPE(unk_token="?"),
            trainers.BpeTrainer(**specials),
            pre_tokenizers.Metaspace(),
            decoders.Metaspace(),
        ),
        "wordpiece": _trained(
            models.WordPiece(unk_token="?"),
            trainers.WordPieceTrainer(**specials),
            pre_tokenizers.BertPreTokenizer(),
            decoders.WordPiece(),
        ),
        "no decoder": _trained(
            models.WordLevel(unk_token="?"),
            trainers.WordLevelTrainer(**specials),
            pre_tokenizers.Whitespace(),
            None,
        ),
        "own decoder": OwnDecoder(tokenizer_object=crossing_tokenizer().backend_tokenizer, eos_token="</s>"),
    }
    return {kind: made[kind] for kind in KINDS}


def released(detokenizer: Detokenizer, ids: Sequence[int], rng: random.Random | None = None) -> list[str]:
    """What comes out for chunks of random sizes, or for each token, and at the end."""
    texts, i = [], 0
    while i < len(ids):
        n = 1 if rng is None else rng.choice([1, 1, 2, 7])
        texts.append(detokenizer.add(ids[i : i + n]))
        i += n
    return [*texts, detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
def test_the_texts_of_any_chunks_concatenate_to_the_decoded_tokens(tokenizers, kind):
    words, rng = tokenizers[kind], random.Random(0)
    for _ in range(150):
        ids = [rng.randrange(len(words) + 2) for _ in range(rng.randint(1, 30))]  # mostly broken characters; padding
        some = words.encode(TEXT, add_special_tokens=False)
        at = rng.randrange(len(some))
        ids = rng.choice([ids, some[at : at + 20] + ids, ids + some[at : at + 20]])
        expected = words.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        detokenizer = Detokenizer(words)
        assert "".join(released(detokenizer, ids, rng)) == detokenizer.text == expected
        ends = sorted(rng.choices(range(len(ids) + 1), k=3))
        parts = [ids[a:b] for a, b in zip([0, *ends], [*ends, len(ids)], strict=True)]
        assert "".join(Detokenizer(words).segments(parts)) == expected


@pytest.mark.parametrize("kind", BYTE_LEVEL)
def test_only_an_incomplete_character_is_held_back(tokenizers, kind):
    words, rng = tokenizers[kind], random.Random(1)
    for _ in range(60):
        ids = words.encode(TEXT, add_special_tokens=False) + [rng.randrange(len(words)) for _ in range(10)]
        detokenizer, text = Detokenizer(words), ""
        for i, token in enumerate(ids):
            text += detokenizer.add([token])
            whole = decode(words, ids[: i + 1])
            assert whole.startswith(text) and whole[len(text) :] in ("", "\ufffd")
            assert detokenizer.text == text and (detokenizer.complete or whole != text)


def test_tokens_between_characters_print_each_character_once(tokenizers):
    words = tokenizers["crossing"]
    for character in "ធუ툠":
        ids = words.encode(character * 8, add_special_tokens=False)
        inside = sum("\ufffd" in words.decode([token]) for token in ids)
        assert inside > 4, "tokens begin or end inside a character"
        texts = released(Detokenizer(words), ids)
        assert "".join(texts) == character * 8 and max(map(len, texts)) <= 2


def byte_ids(words: PreTrainedTokenizerFast, data: bytes) -> list[int]:
    return words.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in data])


def test_a_run_of_bytes_is_final_where_it_ends_or_breaks(tokenizers):
    words = tokenizers["sentencepiece"]
    word = words.encode("there", add_special_tokens=False)
    khmer = byte_ids(words, "ធ".encode())
    assert released(Detokenizer(words), [*word[-1:], *khmer, word[-1]])[1:] == ["", "", "", "ធe", ""]
    broken = [*khmer, *byte_ids(words, b"\xff!"), word[-1]]
    assert released(Detokenizer(words), broken) == ["", "", "", "\ufffd" * 4, "\ufffd", "e", ""]
    detokenizer = Detokenizer(words)
    for token in khmer:
        detokenizer.add([token])
    assert detokenizer.complete and detokenizer.text == "ធ" and detokenizer.released == ""


def test_a_stop_string_of_bytes_ends_the_answer_at_its_own_token(tokenizers):
    words = tokenizers["sentencepiece"]
    ids = [*words.encode("there", add_special_tokens=False), *byte_ids(words, b"\n"), *words.encode("was")]
    for stop in ("\n", "e\n"):
        answer, text = Answer(words, {1}, [stop], 99), ""
        draft = answer.truncate(ids, 99)
        for token in draft:
            text += answer.add([token], "target")
        assert (answer.finish_reason, text, answer.ids) == ("stop", "there\n", draft)
        assert "".join(span.text for span in answer.spans) == answer.text == text and ids[len(draft) - 1] == draft[-1]
        assert words.convert_ids_to_tokens(draft[-1]) == "<0x0A>"


@pytest.mark.parametrize("kind", ["bytes", "crossing", "sentencepiece"])
def test_a_stop_string_is_found_wherever_tokens_end(tokenizers, kind):
    words = tokenizers[kind]
    ids = words.encode("aធធbუუ", add_special_tokens=False)
    for stop in ("ធb", "ធ", "უ", "bუუ"):
        drafted, written = Answer(words, {-1}, [stop], 99), Answer(words, {-1}, [stop], 99)
        drafted.add(drafted.truncate(ids, 99), "draft", 0.9)
        text = "".join(written.add([token], "target") for token in ids)
        assert drafted.text == written.text == text == "aធធbუუ"[: "aធធbუუ".index(stop) + len(stop)]
        assert drafted.finish_reason == written.finish_reason == "stop" and drafted.ids == written.ids


def test_tokens_without_text_cost_nothing(tokenizers, monkeypatch):
    """The left context of each step is a few tokens, whatever the answer holds."""
    for kind in ("crossing", "llama", "sentencepiece", "own decoder"):
        words, read = tokenizers[kind], []
        monkeypatch.setattr(
            detokenizer_module, "decode", lambda words, ids, read=read: read.append(len(ids)) or decode(words, ids)
        )
        detokenizer = Detokenizer(words)
        for token in [5, *[words.eos_token_id] * 500, 6, *[len(words) + 9] * 500, 7]:
            detokenizer.add([token])
        assert max(read, default=0) < 30 and sum(read) < 30_000
        assert detokenizer.released + detokenizer.flush() == decode(words, [5, 6, 7])


@pytest.mark.parametrize("kind", ["bytes", "crossing", "sentencepiece"])
def test_text_continues_a_prompt_that_ends_inside_a_character(tokenizers, kind):
    words = tokenizers[kind]
    ids = words.encode("aធbធ", add_special_tokens=False)
    for end in range(1, len(ids)):
        prompt = Verbatim.of_tokens(ids[:end], words)
        answer = Answer(words, {-1}, (), 99, ids[:end])
        answer.add(ids[end:], "target")
        assert "\ufffd" not in prompt.text and prompt.text == complete_text(words, ids[:end])
        assert prompt.text + answer._detokenizer.text == "aធbធ"
        assert prompt_text(words, ids[:end]).strip() == prompt.text


def test_text_with_special_tokens_is_split_by_a_copy(tokenizers):
    """`split_special_tokens` is a state of the Rust tokenizer, which other threads read."""
    words = word_tokenizer()
    flag = words.backend_tokenizer.encode_special_tokens
    assert words.eos_token_id not in encode_continuation(words, "a", "It ends with </s>")
    assert words.backend_tokenizer.encode_special_tokens is flag is False
    assert words.encode("</s>", add_special_tokens=False) == [words.eos_token_id]


def test_tokenizing_in_one_thread_changes_no_tokens_of_another():
    words = word_tokenizer()
    text, expected = "[Q]How?[A]</s>", word_tokenizer().encode("[Q]How?[A]</s>")
    plain = encode_continuation(word_tokenizer(), "a", text)
    wrong, done = [], threading.Event()

    def continue_texts() -> None:
        while not done.is_set():
            if encode_continuation(words, "a", text) != plain:
                wrong.append("a special token in a text")

    thread, interval = threading.Thread(target=continue_texts), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        wrong += [ids for _ in range(400) if (ids := words.encode(text)) != expected]
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not wrong


def test_a_loaded_tokenizer_does_not_change_at_its_first_text(tmp_path):
    words = word_tokenizer()
    words.backend_tokenizer.enable_truncation(4)
    words.backend_tokenizer.enable_padding(length=9)
    words.save_pretrained(tmp_path)
    core = load_tokenizer(tmp_path).backend_tokenizer
    assert core.truncation is core.padding is None
