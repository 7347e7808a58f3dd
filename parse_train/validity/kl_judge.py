"""The rival that needs no training: a draft token holds while draft model and target expect much the same there.

JuDi (Revisiting Judge Decoding from First Principles, arXiv 2601.04766) keeps a draft up to the first token that is
not the target's own greedy choice although the target is sure of another one, or although the divergence
KL(target ‖ draft) between the two next-token distributions reaches a threshold. So the score of a prefix is minus the
largest divergence in it. A judge that cuts between steps loses what the published one keeps of the step it breaks in.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from parse_infer.models.fingerprint import fingerprint, same_weights
from parse_infer.models.loading import LanguageModel, load_language_model
from parse_infer.models.token_map import token_map
from parse_train.validity.build_info import BuildInfo
from parse_train.validity.config import ValidityTrainingConfig
from parse_train.validity.data import ValidityDataset, ValidityExample

KL_JUDGE = "KL judge"
LARGEST_KL = "largest KL so far"
MEAN_KL = "mean KL so far"

SURE = 0.9
"""A target that gives one token more than this accepts no other in its place (the paper's confidence threshold)."""
_REJECTED = 1e4  # nats: beyond every divergence, and finite, since ranking metrics take no infinity
_ROWS = 128  # tokens whose logits are in memory at a time


class KLJudge:
    """Scores prefixes of drafts by the divergence between target and draft model.

    Args:
        draft: the model that wrote the drafts.
        target: only its decoder's output layer is used.
        draft_to_target: int64 [V_draft], the target's id of each of the draft model's tokens; -1 where it has none.
    """

    def __init__(self, draft: LanguageModel, target: LanguageModel, draft_to_target: Tensor) -> None:
        self.draft, self.target = draft, target
        self.draft_to_target = draft_to_target.to(target.decoder.device)
        own = draft_to_target.tolist()
        self._draft_ids = {token: i for i, token in enumerate(own) if token >= 0}

    def reads(self, example: ValidityExample) -> bool:
        """Whether the draft model has the draft's tokens and room for them and the prompt."""
        read = example.draft_ids[:-1]  # what it would write behind the last token is not asked
        try:
            room = self.draft.window - len(self.draft.render(example.prompt))
        except ValueError:
            return False
        return len(read) <= room and all(token in self._draft_ids for token in read)

    @torch.inference_mode()
    def score(self, example: ValidityExample, before: Tensor) -> dict[str, list[float]]:
        """Scores of the K prefixes, higher means more likely valid: as published, and by the bare divergence.

        Args:
            before: [T, H], the target's final-norm states before the draft's T tokens.
        """
        decoder = self.draft.decoder
        decoder.seek(self.draft.render(example.prompt))
        expected = decoder.forward([self._draft_ids[token] for token in example.draft_ids[:-1]]).hidden
        ids = torch.tensor(example.draft_ids, device=before.device)
        found, judged = [], []
        for ours, theirs, tokens in zip(before.split(_ROWS), expected.split(_ROWS), ids.split(_ROWS), strict=True):
            logits = self.target.decoder.logits(ours)
            found.append(divergence(logits, decoder.logits(theirs), self.draft_to_target))
            judged.append(judge_tokens(logits, tokens, found[-1]))
        each, ends = torch.cat(found), torch.tensor(example.cuts, device=before.device) - 1
        mean = each.cumsum(0) / torch.arange(1, len(each) + 1, device=each.device)
        return {
            KL_JUDGE: (-torch.cat(judged).cummax(0).values[ends]).tolist(),
            LARGEST_KL: (-each.cummax(0).values[ends]).tolist(),
            MEAN_KL: (-mean[ends]).tolist(),
        }


def divergence(target_logits: Tensor, draft_logits: Tensor, draft_to_target: Tensor) -> Tensor:
    """KL(target ‖ draft) in nats, float32 [T].

    It would be infinite wherever the draft model lacks a token, so both distributions are those over the tokens that
    both have (the target's renormalised).

    Args:
        target_logits: [T, V]; draft_logits: [T, V_draft].
        draft_to_target: int64 [V_draft], -1 for a token that the target does not have.
    """
    shared = draft_to_target >= 0
    target = target_logits.float()[:, draft_to_target[shared]].log_softmax(-1)
    draft = draft_logits.float()[:, shared].log_softmax(-1)
    return kl_div(draft, target, reduction="none", log_target=True).sum(-1)


def judge_tokens(target_logits: Tensor, tokens: Tensor, kl: Tensor) -> Tensor:
    """What the published rule holds against each token, [T]: nothing if it is the target's own greedy choice,
    everything if the target is sure of another one, else the divergence `kl` [T]."""
    certainty, own = target_logits.float().softmax(-1).max(-1)
    return torch.where(own == tokens, 0.0, torch.where(certainty > SURE, _REJECTED, kl))


def shared_tokens(draft: LanguageModel, target: LanguageModel) -> Tensor | None:
    """`draft_to_target` of two models; None if the one's tokens are not the other's."""
    tokens = token_map(draft.tokenizer, target.tokenizer)
    if tokens is None:
        return None
    if tokens.is_identity:
        ids = torch.arange(draft.n_embeddings)
        return ids.where(ids < target.n_embeddings, -1)  # padding
    ids = torch.full((draft.n_embeddings,), -1)
    ids[list(tokens.draft_ids)] = torch.tensor(list(tokens.target_ids))
    return ids


def find_kl_judge(
    config: ValidityTrainingConfig, build: BuildInfo, target: LanguageModel, dataset: ValidityDataset
) -> tuple[KLJudge | None, str]:
    """The KL judge for the drafts of `dataset`, or None and the reason in a sentence.

    Raises:
        ValueError, OSError: the draft model that the recipe names cannot be loaded.
    """

    def without(reason: str) -> tuple[None, str]:
        return None, f"no {KL_JUDGE} among the baselines: {reason}"

    name = config.draft or build.draft.get("name")
    if not name:
        return without("the data does not say which model wrote its drafts; name it with the key draft")
    try:
        draft = load_language_model(
            name,
            role="draft",
            device=config.device,
            dtype=config.target_dtype,
            template_options=config.template_options,
        )
    except (OSError, ValueError) as error:
        if config.draft:
            raise
        return without(f"the draft model of the data cannot be loaded ({error}); name it with the key draft")
    known = build.draft.get("fingerprint")
    if known and not same_weights(known, fingerprint(draft.model)):
        return without(f"{name} has other weights than the model that wrote the drafts")
    draft_to_target = shared_tokens(draft, target)
    if draft_to_target is None:
        return without(f"the tokens of {name} are not those of {target.name}")
    if draft.tokenizer.chat_template is None:  # a base model beside a chat model, as in a build
        draft.tokenizer.chat_template = target.tokenizer.chat_template
    judge = KLJudge(draft, target, draft_to_target)
    unread = sum(not judge.reads(example) for example in dataset.examples)
    if unread:
        return without(f"{name} cannot read {unread} of {len(dataset)} held-out drafts (its vocabulary or its window)")
    return judge, ""
