"""The plugin against the local engine: same validities, same text, whatever else the server does meanwhile."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from parse_infer.judge.adapter import ValidityAdapter
from parse_infer.judge.cuts import Segmenter
from parse_infer.judge.verifier import Verifier
from parse_infer.models.loading import LanguageModel, load_language_model
from parse_infer.models.names import resolve
from parse_infer.vllm_plugin.medusa_head import convert
from parse_infer.vllm_plugin.options import arguments, engine_options
from parse_infer.vllm_plugin.validity_requests import TrainedQuestions
from tests.conftest import randomise
from tests.parse_infer.speculation.trained_heads import save_head

pytestmark = pytest.mark.vllm
SHAPE = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM has on a CPU
    "max_position_embeddings": 512,
    "eos_token_id": 258,
    "pad_token_id": 258,
}


@dataclass
class Draft:
    """A draft with what the local engine says about it."""

    context: list[int]
    ids: list[int]
    cuts: list[int]
    validity: list[float]
    resume: list[int]
    """What the local decoder writes from half of it on."""

    @property
    def half(self) -> int:
        return self.cuts[len(self.cuts) // 2]


def judged(lm: LanguageModel, judge: Any, prompts: Sequence[str], seed: int = 0) -> list[Draft]:
    """The target's own answers, most of them with a wrong token somewhere."""
    choose, verifier, drafts = random.Random(seed), None, []
    verifier = Verifier(lm.decoder, judge, Segmenter(lm.tokenizer))
    for prompt in prompts:
        context = lm.render(prompt)
        ids = greedy(lm, context, 90)
        if choose.random() < 0.8:
            ids[choose.randrange(len(ids) - 1)] = choose.randrange(3, 256)
        cuts = [*sorted(choose.sample(range(1, len(ids)), 5)), len(ids)]
        lm.decoder.seek(context)
        found = verifier.verify(ids, cuts)
        draft = Draft(context, ids, cuts, found.validity, [])
        draft.resume = greedy(lm, context + ids[: draft.half], 20)
        drafts.append(draft)
    return drafts


def greedy(lm: LanguageModel, context: list[int], n: int) -> list[int]:
    lm.decoder.seek(context)
    return list(lm.decoder.decode(n))


def ask(llm: Any, questions: TrainedQuestions, drafts: Sequence[Draft], beside: Sequence[list[int]] = ()) -> Any:
    """Validities of all drafts, and what the server writes to the prompts `beside`, all at the same time."""
    from vllm import SamplingParams

    asked = [questions.about(draft.context, draft.ids, draft.cuts) for draft in drafts]
    prompts = [(prompt, one.top) for one in asked for prompt in one.prompts] + [(prompt, 0) for prompt in beside]
    order = list(range(len(prompts)))
    random.Random(1).shuffle(order)
    write = SamplingParams(max_tokens=20, temperature=0, detokenize=False)

    def judge(top: int) -> SamplingParams:
        return SamplingParams(max_tokens=1, temperature=0, logprobs=top, detokenize=False)

    answers = llm.generate(
        [{"prompt_token_ids": prompts[i][0]} for i in order],
        [judge(prompts[i][1]) if prompts[i][1] else write for i in order],
        use_tqdm=False,
    )
    found = [answer.outputs[0] for _, answer in sorted(zip(order, answers, strict=True), key=lambda pair: pair[0])]
    listed = [{i: token.logprob for i, token in one.logprobs[0].items()} for one in found if one.logprobs]
    answers = iter(listed)
    logits = [one.logits([next(answers) for _ in one.prompts]) for one in asked]
    return logits, [list(one.token_ids) for one in found[len(listed) :]]


def ask_nonsense(llm: Any, questions: TrainedQuestions) -> None:
    """A prompt that claims more draft tokens than it has, one that is a probe alone, one that goes on behind it."""
    from vllm import SamplingParams

    first, last = questions.suffix(400, None)
    prompts = [[5, first, last], [last], [5, first, last, 7, first]]
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=2, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert all(token < questions.ids.vocab_size for answer in answers for token in answer.outputs[0].token_ids)


def ask_more_nonsense(llm: Any, questions: TrainedQuestions) -> None:
    """Without a probe: ids alone, more than are allowed, one that claims more than the last, a text between."""
    from vllm import SamplingParams

    one, many = questions.suffix(1, None)[0], questions.suffix(400, None)[0]
    prompts = [[many, one], [5, *[many] * 140], [5, 6, many, one], [5, one, 6, many]]
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=4, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert all(token < questions.ids.vocab_size for answer in answers for token in answer.outputs[0].token_ids)


def farthest(found: list[list[float]], drafts: Sequence[Draft]) -> float:
    """In the logit, up to 5: what lies beyond, a validity in float32 does not tell to 1e-4."""
    logits = [logit for group in found for logit in group]
    validities = [p for draft in drafts for p in draft.validity]
    return max(abs(bounded(ours) - bounded(math.log(p / (1 - p)))) for ours, p in zip(logits, validities, strict=True))


def bounded(logit: float) -> float:
    return min(max(logit, -5.0), 5.0)


PROMPTS = [
    f"A {who} has {3 + n} pencils. His brother has {n % 7 + 2} {more} pencils. How many do they have together?"
    for n in range(25)
    for who, more in (("boy", "more"), ("baker", "fewer"))
]


@pytest.fixture(scope="module")
def zoo() -> tuple[LanguageModel, ValidityAdapter, list[Draft]]:
    lm = load_language_model("zoo:target", role="target", device="cpu")
    adapter = ValidityAdapter.from_pretrained(resolve("zoo:adapter"), lm.model)
    return lm, adapter, judged(lm, adapter, PROMPTS)


@pytest.fixture(scope="module")
def options() -> dict[str, Any]:
    return engine_options("zoo:target", "zoo:adapter")


def test_under_load_validities_and_text_are_those_of_the_local_engine(run, zoo, options):
    """50 drafts in a cache of 30 blocks, read 48 tokens at a time, among plain requests."""
    lm, adapter, drafts = zoo
    questions = TrainedQuestions.of(adapter.config, sorted(lm.eos_ids))
    with run(**options, max_num_batched_tokens=48, num_gpu_blocks_override=30) as llm:
        beside = [draft.context for draft in drafts[:12]]
        found, written = ask(llm, questions, drafts, beside)
        assert farthest(found, drafts) < 1e-4
        assert written == [greedy(lm, context, 20) for context in beside]
        ask_nonsense(llm, questions)
        # Again, now that parts of it are in the cache; and on from a cut of each.
        found, resumed = ask(llm, questions, drafts, [draft.context + draft.ids[: draft.half] for draft in drafts])
        assert farthest(found, drafts) < 1e-4
        assert resumed == [draft.resume for draft in drafts]


def test_a_resume_computes_only_what_is_behind_the_last_full_block(run, zoo, options):
    lm, adapter, drafts = zoo
    questions = TrainedQuestions.of(adapter.config, sorted(lm.eos_ids))
    with run(**options) as llm:
        from vllm import SamplingParams

        ask(llm, questions, drafts[:1])
        prompt = drafts[0].context + drafts[0].ids[: drafts[0].half]
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=1), use_tqdm=False)
        assert answer.num_cached_tokens == (len(prompt) - 1) // 32 * 32 > 0


def test_what_was_rejected_guesses_what_is_written_instead(run, zoo, options):
    """In drafts of which one token is wrong, most of what follows a cut is what the target writes."""
    lm, adapter, drafts = zoo
    questions = TrainedQuestions.of(adapter.config, sorted(lm.eos_ids))

    def guesses(speculate: Any) -> tuple[int, int]:
        with run(**options | {"speculative_config": speculate}, disable_log_stats=False) as llm:
            for draft in drafts[:10]:
                ask(llm, questions, [draft])
                _, (written,) = ask(llm, questions, [], [draft.context + draft.ids[: draft.half]])
                assert written == draft.resume
            found = {one.name: one for one in llm.get_metrics()}
        accepted = found.get("vllm:spec_decode_num_accepted_tokens")
        return (0, 0) if accepted is None else (accepted.value, found["vllm:spec_decode_num_draft_tokens"].value)

    accepted, guessed = guesses(options["speculative_config"])
    assert guesses(None) == (0, 0)
    assert accepted > 40 and accepted > guessed / 2, (accepted, guessed)


def test_compiled_in_bfloat16_the_logit_is_within_its_rounding(run, zoo, options):
    lm, adapter, drafts = zoo
    with run(**options | {"dtype": "bfloat16", "enforce_eager": False}) as llm:
        found, _ = ask(llm, TrainedQuestions.of(adapter.config, sorted(lm.eos_ids)), drafts[:10])
    # Half of what the server's own check allows in 16 bits; the adapter that ships differs by 0.12 at most.
    assert farthest(found, drafts[:10]) < 0.15


def tiny(tmp_path, tokenizer, random_adapter, config: Any, **adapter: Any) -> tuple[Any, Any, LanguageModel, Any]:
    """Folders of a random target and a random adapter, and both as the local engine loads them."""
    fields = {name: adapter.pop(name) for name in ("closes_turn", "probability") if name in adapter}
    model = randomise(AutoModelForCausalLM.from_config(config), 3)
    judge = random_adapter(model, **adapter)
    for name, value in fields.items():
        setattr(judge.config, name, value)
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    judge.save_pretrained(tmp_path / "adapter")
    lm = load_language_model(tmp_path / "target", role="target", device="cpu", dtype=torch.float32)
    loaded = ValidityAdapter.from_pretrained(tmp_path / "adapter", lm.model)
    return tmp_path / "target", tmp_path / "adapter", lm, loaded


@pytest.mark.parametrize(
    ("config", "adapter"),
    [
        (
            LlamaConfig(**SHAPE, tie_word_embeddings=True),
            {"vocabulary": tuple(range(0, 260, 3)), "probability": {"scale": 0.8, "shift": 0.3}},
        ),
        (Qwen2Config(**SHAPE), {"closes_turn": True}),
        (Qwen3Config(**SHAPE), {"probe_ids": ()}),
        (MistralConfig(**SHAPE, sliding_window=40), {"token_rank": 0}),
    ],
    ids=["llama, part of the vocabulary", "qwen2, closes the turn", "qwen3, no probe", "mistral, no token doubt"],
)
def test_every_architecture_and_kind_of_head(run, tmp_path, tokenizer, random_adapter, config, adapter):
    target, folder, lm, judge = tiny(tmp_path, tokenizer, random_adapter, config, **adapter)
    drafts = judged(lm, judge, ["Hello", "Good morning", "How many are there?"])
    for draft in drafts:  # with an end token, which this target rarely writes
        draft.ids[-1] = 258
        lm.decoder.seek(draft.context)
        draft.validity = Verifier(lm.decoder, judge, Segmenter(lm.tokenizer)).verify(draft.ids, draft.cuts).validity
    # Prompts of one step may ask about different numbers of cuts.
    drafts[1].cuts, drafts[1].validity = drafts[1].cuts[-1:], drafts[1].validity[-1:]
    lm.decoder.seek(drafts[2].context)
    drafts[2].cuts = list(range(60, 61 + len(drafts[2].ids) - 60))
    drafts[2].validity = (
        Verifier(lm.decoder, judge, Segmenter(lm.tokenizer)).verify(drafts[2].ids, drafts[2].cuts).validity
    )
    questions = TrainedQuestions.of(judge.config, sorted(lm.eos_ids))
    (*_, longest) = questions.about(drafts[0].context, drafts[0].ids, drafts[0].cuts).prompts
    eager = bool(questions.ids.probe)  # without a probe nothing is changed, and the compiled graph answers
    with run(**engine_options(target, folder), max_num_batched_tokens=len(longest) - 2, enforce_eager=eager) as llm:
        found, _ = ask(llm, questions, drafts[:1])  # the last two tokens of its prompt are read in another step
        assert farthest(found, drafts[:1]) < 1e-3
        if not questions.ids.probe:
            ask_more_nonsense(llm, questions)
        found, written = ask(llm, questions, drafts, [draft.context for draft in drafts])
        assert farthest(found, drafts) < 1e-3
        assert written == [greedy(lm, draft.context, 20) for draft in drafts]
        # Asked about again, alone, at every place in a block: at one of them the last id alone is left to read.
        draft = max(drafts, key=lambda draft: len(draft.ids))
        cuts = list(range(len(draft.ids) - 32, len(draft.ids)))
        lm.decoder.seek(draft.context)
        known = Verifier(lm.decoder, judge, Segmenter(lm.tokenizer)).verify(draft.ids, cuts).validity
        for n, validity in [*zip(cuts, known, strict=True)] * 2:
            one = Draft(draft.context, draft.ids[:n], [n], [validity], [])
            assert farthest(ask(llm, questions, [one])[0], [one]) < 1e-3


@pytest.mark.parametrize(
    ("config", "adapter"),
    [
        (LlamaConfig(**SHAPE, tie_word_embeddings=True), {"vocabulary": tuple(range(0, 260, 3))}),
        (
            Qwen2Config(**SHAPE | {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}),
            {"closes_turn": True},
        ),
    ],
    ids=["llama, part of the vocabulary", "qwen2"],
)
def test_two_ranks_judge_and_write_as_one(run, tmp_path, tokenizer, random_adapter, config, adapter):
    """The first has one head of keys and values, which both ranks hold; the second one for each."""
    target, folder, lm, judge = tiny(tmp_path, tokenizer, random_adapter, config, **adapter)
    drafts = judged(lm, judge, ["Hello", "Good morning", "How many are there?"])
    questions = TrainedQuestions.of(judge.config, sorted(lm.eos_ids))
    with run(**engine_options(target, folder), tensor_parallel_size=2) as llm:
        found, written = ask(llm, questions, drafts, [draft.context for draft in drafts])
    assert farthest(found, drafts) < 1e-4
    assert written == [greedy(lm, draft.context, 20) for draft in drafts]


def start(**options: Any) -> Any:
    from vllm import EngineArgs

    return EngineArgs(**options).create_engine_config()


def test_what_cannot_be_served_is_refused_in_one_sentence(run, tmp_path, tokenizer, random_adapter):
    target, folder, lm, _judge = tiny(tmp_path, tokenizer, random_adapter, LlamaConfig(**SHAPE))
    options = engine_options(target, folder)
    assert options["max_logprobs"] == 20, "as many as without the plugin"
    own = options["hf_overrides"]["parse"]
    another = {**options["hf_overrides"], "parse": {**own, "fingerprint": "another"}}
    for changes, message in (
        ({"max_logprobs": 1}, "max_logprobs is 1: set it to 2"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism of 2 is not supported"),
        ({"enable_lora": True}, "vLLM's own LoRA .* cannot be used together"),
        ({"hf_overrides": {"architectures": ["ParseLlamaForCausalLM"]}}, "start the server with the options"),
        ({"hf_overrides": another}, "has changed since this server's command was printed: .* and not another;"),
    ):
        with pytest.raises(ValueError, match=message):
            start(**options | changes)
    wrong = {**own["reference"], "validity": [0.5 for _ in own["reference"]["validity"]]}
    overrides = {**options["hf_overrides"], "parse": {**own, "reference": wrong}}
    different = pytest.raises(
        ValueError, match="judges drafts differently from the local backend, so it does not start"
    )
    with different, run(**options | {"hf_overrides": overrides}):
        pass
    randomise(lm.model, 4).save_pretrained(target)
    with pytest.raises(ValueError, match="same shape but other weights"), run(**options):
        pass
    (folder / "validity_head.safetensors").unlink()
    for begin in (lambda: engine_options(target, folder), lambda: start(**options)):
        with pytest.raises((OSError, ValueError), match=r"no complete validity adapter: validity_head.* is missing"):
            begin()


def head_of(kind: str, lm: LanguageModel, drafts: Sequence[Draft], folder: Path) -> Path:
    """A head that learnt what the target writes from half of each draft on."""
    return save_head(lm, kind, [(draft.context + draft.ids[: draft.half], draft.resume) for draft in drafts], folder)


def test_over_http_beside_an_eagle3_head(tmp_path, zoo, options):
    """A whole server, in processes of its own; the head guesses what the target writes, and changes none of it."""
    lm, adapter, drafts = zoo
    questions = TrainedQuestions.of(adapter.config, sorted(lm.eos_ids))
    head = head_of("eagle3", lm, drafts[:3], tmp_path / "head")
    guesses = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3}
    server = options | {"enforce_eager": True, "served_model_name": "target", "speculative_config": guesses}
    with serving(arguments(server), tmp_path / "log") as call:
        for draft in drafts[:3]:
            asked = questions.about(draft.context, draft.ids, draft.cuts)
            found = asked.validities(call("/v1/completions", asked.request("target")))
            assert found == pytest.approx(draft.validity, abs=1e-5)
            body = {"model": "target", "prompt": draft.context + draft.ids[: draft.half], "max_tokens": 20}
            body |= {"temperature": 0, "return_token_ids": True}
            assert call("/v1/completions", body)["choices"][0]["token_ids"] == draft.resume
        accepted = re.search(r"vllm:spec_decode_num_accepted_tokens_total\{.*\} (\S+)", call("/metrics"))
        assert accepted and float(accepted[1]) > 10


@pytest.mark.parametrize("head", ["parallel", "medusa"])
def test_the_other_heads_guess_beside_the_plugin(run, tmp_path, zoo, options, head):
    lm, adapter, drafts = zoo
    questions = TrainedQuestions.of(adapter.config, sorted(lm.eos_ids))
    own = head_of(head, lm, drafts[:6], tmp_path / "head")
    guesses = {"method": "eagle3", "model": str(own), "num_speculative_tokens": 3, "parallel_drafting": True}
    if head == "medusa":
        folder = convert(own, tmp_path / "whole", options["hf_overrides"]["vocab_size"])
        guesses = {"method": "medusa", "model": str(folder), "num_speculative_tokens": 3}
    with run(**options | {"speculative_config": guesses}, disable_log_stats=False) as llm:
        resumes = [draft.context + draft.ids[: draft.half] for draft in drafts[:6]]
        found, resumed = ask(llm, questions, drafts[:6], resumes)
        assert farthest(found, drafts[:6]) < 1e-4
        assert resumed == [draft.resume for draft in drafts[:6]]
        accepted = [one.value for one in llm.get_metrics() if one.name == "vllm:spec_decode_num_accepted_tokens"]
        assert accepted[0] > 20


@contextmanager
def serving(words: list[str], log: Path) -> Iterator[Any]:
    """An OpenAI-compatible server of vLLM: a function that posts JSON, or gets text where there is none to post, and
    has the server's `address`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words, "--port", str(address)]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)

    def call(path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{address}{path}", data, headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            content = answer.read().decode()
        return content if body is None else json.loads(content)

    call.address = f"http://127.0.0.1:{address}"
    try:
        for _ in range(300):
            assert server.poll() is None, log.read_text()[-3000:]
            with suppress(OSError):
                call("/health")
                break
            time.sleep(1)
        yield call
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
