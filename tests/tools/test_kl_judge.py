"""The KL judge against values worked out by hand, and with the draft model of a build."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributions import Categorical, kl_divergence
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from parse_infer.models.fingerprint import fingerprint
from parse_infer.models.loading import LanguageModel
from parse_infer.models.names import resolve
from parse_train.judge.build_info import BuildInfo
from parse_train.judge.data import ValidityDataset
from parse_train.judge.probe.config import ValidityTrainingConfig
from parse_train.judge.probe.data import ValidityExample
from tests.parse_infer.language_models import language_model, pruned_tokenizer, resembling, word_tokenizer
from tools.kl_judge import (
    KL_JUDGE,
    LARGEST_KL,
    MEAN_KL,
    KLJudge,
    divergence,
    find_kl_judge,
    judge_tokens,
    shared_tokens,
)

PROMPT = "Sum 3?"


@pytest.fixture
def pair(
    make_model: Callable[..., PreTrainedModel], tokenizer: PreTrainedTokenizerFast
) -> tuple[LanguageModel, LanguageModel]:
    """A target, and a draft model that mostly agrees with it."""
    target = make_model("llama")
    draft = resembling(make_model, target, noise=0.3)
    return language_model(target, tokenizer, "big"), language_model(draft, tokenizer, "small")


@pytest.fixture
def example(pair: tuple[LanguageModel, LanguageModel], random_ids: Callable[..., list[int]]) -> ValidityExample:
    context = pair[0].render(PROMPT)
    return ValidityExample(context, [*random_ids(19, seed=4), 258], [6, 20], [True, False], [1.0, 1.0], prompt=PROMPT)


def logits_of(model: PreTrainedModel, context: list[int], draft: list[int]) -> torch.Tensor:
    """In one ordinary forward: [T, V] before the T draft tokens."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([context + draft])).logits[0, len(context) - 1 : -1]


def states_of(target: LanguageModel, example: ValidityExample) -> torch.Tensor:
    target.decoder.seek(example.context_ids)
    return target.decoder.forward(example.draft_ids[:-1]).hidden


def test_divergence_is_that_of_the_target_from_the_draft_model() -> None:
    target, draft = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))
    expected = kl_divergence(Categorical(logits=target), Categorical(logits=draft))
    torch.testing.assert_close(divergence(target, draft, torch.arange(7)), expected)
    assert divergence(target, target, torch.arange(7)).abs().max() < 1e-6


def test_distributions_are_compared_on_the_tokens_that_both_have() -> None:
    """A smaller vocabulary in another order, with one token that the target does not have."""
    target = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    draft_to_target = torch.tensor([4, 2, -1, 6])
    draft = target[:, [4, 2, 0, 6]]
    draft[:, 2] = 3.0
    assert divergence(target, draft, draft_to_target).abs().max() < 1e-6
    draft[:, 0] += 1
    assert divergence(target, draft, draft_to_target).min() > 0.001


def test_the_published_rule_spares_own_choices_and_trusts_a_sure_target() -> None:
    logits = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 9.0]])  # sure in the last row only
    held = judge_tokens(logits, torch.tensor([1, 0, 0]), torch.tensor([5.0, 5.0, 5.0]))
    assert held[:2].tolist() == [0.0, 5.0] and held[2] > 1000


def test_scores_are_those_of_ordinary_forwards(
    pair: tuple[LanguageModel, LanguageModel], example: ValidityExample
) -> None:
    target, draft = pair
    ours, theirs = (logits_of(lm.model, example.context_ids, example.draft_ids) for lm in pair)
    each = kl_divergence(Categorical(logits=ours), Categorical(logits=theirs))
    judged = judge_tokens(ours, torch.tensor(example.draft_ids), each)
    ids = shared_tokens(draft, target)
    assert ids is not None
    found = KLJudge(draft, target, ids).score(example, states_of(target, example))
    for name, scores in {
        KL_JUDGE: [-judged[:6].max(), -judged.max()],
        LARGEST_KL: [-each[:6].max(), -each.max()],
        MEAN_KL: [-each[:6].mean(), -each.mean()],
    }.items():
        assert found[name] == pytest.approx([float(s) for s in scores], abs=1e-4)


def test_a_draft_model_with_fewer_tokens_of_its_own_reads_through_the_map(
    pair: tuple[LanguageModel, LanguageModel], example: ValidityExample, make_model: Callable[..., PreTrainedModel]
) -> None:
    """The same draft model with its tokens in another order gives the same scores."""
    target, draft = pair
    order = torch.randperm(260, generator=torch.Generator().manual_seed(1))  # new token i is the old order[i]
    shuffled = resembling(make_model, target.model, noise=0.3)
    with torch.no_grad():
        for layer in (shuffled.get_input_embeddings(), shuffled.get_output_embeddings()):
            layer.weight.copy_(layer.weight[order])
    other = language_model(shuffled, draft.tokenizer, "shuffled")
    place = order.argsort()
    other.render = lambda prompt: place[draft.render(prompt)].tolist()  # type: ignore[method-assign]
    before = states_of(target, example)
    expected = KLJudge(draft, target, torch.arange(260)).score(example, before)
    found = KLJudge(other, target, order).score(example, before)
    for name in expected:
        assert found[name] == pytest.approx(expected[name], abs=1e-4)
    lacking = KLJudge(draft, target, torch.where(torch.arange(260) == example.draft_ids[3], -1, torch.arange(260)))
    assert not lacking.reads(example)


def test_a_missing_kl_judge_is_explained(
    pair: tuple[LanguageModel, LanguageModel],
    example: ValidityExample,
    make_model: Callable[..., PreTrainedModel],
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    target, draft = pair
    for name, lm in (
        ("draft", draft),
        ("other", language_model(make_model("llama", vocab_size=300), word_tokenizer())),
    ):
        lm.model.save_pretrained(tmp_path / name)
        lm.tokenizer.save_pretrained(tmp_path / name)
    data = ValidityDataset([example])

    def find(build: BuildInfo, draft: str | None = None) -> tuple[KLJudge | None, str]:
        config = ValidityTrainingConfig(target="t", data="d", output_dir="o", use_cpu=True)
        return find_kl_judge(config, build, target, data, draft)

    recorded = {"name": str(tmp_path / "draft"), "fingerprint": fingerprint(draft.model)}
    judge, reason = find(BuildInfo(draft=recorded))
    assert judge is not None and reason == ""
    assert len(judge.score(example, states_of(target, example))[KL_JUDGE]) == 2
    assert find(BuildInfo(), draft=str(tmp_path / "draft"))[0] is not None
    for build, sentence in (
        (BuildInfo(), "set --draft"),
        (BuildInfo(draft={"name": str(tmp_path / "gone")}), "cannot be loaded"),
        (BuildInfo(draft=recorded | {"fingerprint": fingerprint(target.model)}), "has other weights"),
        (BuildInfo(draft={"name": str(tmp_path / "other")}), "and big have different tokens"),
    ):
        judge, reason = find(build)
        assert judge is None and sentence in reason and reason.startswith("no KL judge among the baselines: ")
    with pytest.raises(OSError, match="gone"):
        find(BuildInfo(), draft=str(tmp_path / "gone"))
    draft.model.config.max_position_embeddings = 20
    draft.model.save_pretrained(tmp_path / "draft")
    assert "cannot read 1 of 1 held-out drafts" in find(BuildInfo(), draft=str(tmp_path / "draft"))[1]


def test_a_reduced_vocabulary_shares_its_tokens() -> None:
    """The draft model of a pruned tokenizer is compared over the tokens that it has."""
    base = AutoTokenizer.from_pretrained(resolve("zoo:target"))
    small = pruned_tokenizer(base, "There are 19 x 2 = 38 students in the other room. So they share the rest.", 400)
    models = [SimpleNamespace(tokenizer=t, n_embeddings=len(t)) for t in (small, base)]
    ids = shared_tokens(*models)  # type: ignore[arg-type]
    assert ids is not None and len(ids) == len(small)
    known = [(i, int(other)) for i, other in enumerate(ids) if other >= 0]
    assert len(known) > 256
    assert all(small.convert_ids_to_tokens(i) == base.convert_ids_to_tokens(other) for i, other in known)
