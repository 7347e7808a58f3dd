"""Training-free baseline that accepts draft tokens where draft model and target have similar distributions.

JuDi (Revisiting Judge Decoding from First Principles, arXiv 2601.04766) rejects a draft token that is not the target's
greedy choice in two cases: the target is sure of another token, or the divergence KL(target ‖ draft) of the two
next-token distributions reaches a threshold. So the score of a prefix is minus its largest divergence. The published
judge keeps the part of a step before the rejected token; a judge that cuts between steps loses this part.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from parse_infer.models.fingerprint import fingerprint, same_weights
from parse_infer.models.loading import LanguageModel, load_language_model
from parse_infer.models.token_map import token_map
from parse_train.judge.build_info import BuildInfo
from parse_train.judge.data import ValidityDataset
from parse_train.judge.probe.config import ValidityTrainingConfig
from parse_train.judge.probe.data import ValidityExample

KL_JUDGE = "KL judge"
LARGEST_KL = "largest KL so far"
MEAN_KL = "mean KL so far"

SURE = 0.9
"""Above this probability of one token, the target accepts no other token (the paper's confidence threshold)."""
_REJECTED = 1e4  # nats: above every divergence, and finite, since ranking metrics reject infinity
_ROWS = 128  # tokens per chunk of logits in memory


class KLJudge:
    """Scores prefixes of drafts by the divergence between target and draft model.

    Args:
        draft: the model that wrote the drafts.
        target: the judge uses only the output layer of its decoder.
        draft_to_target: int64 [V_draft], the target's id of each token of the draft model; -1 for a missing token.
    """

    def __init__(self, draft: LanguageModel, target: LanguageModel, draft_to_target: Tensor) -> None:
        self.draft, self.target = draft, target
        self.draft_to_target = draft_to_target.to(target.decoder.device)
        own = draft_to_target.tolist()
        self._draft_ids = {token: i for i, token in enumerate(own) if token >= 0}

    def reads(self, example: ValidityExample) -> bool:
        """Whether the draft model's vocabulary and window hold the draft with its prompt."""
        read = example.draft_ids[:-1]  # the prediction after the last token is not needed
        try:
            remaining = self.draft.window - len(self.draft.render(example.prompt))
        except ValueError:
            return False
        return len(read) <= remaining and all(token in self._draft_ids for token in read)

    @torch.inference_mode()
    def score(self, example: ValidityExample, before: Tensor) -> dict[str, list[float]]:
        """Score the K prefixes (higher: more likely valid), as published and by the divergence alone.

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
    """Return KL(target ‖ draft) in nats, float32 [T].

    Both distributions are renormalised over the shared tokens, because a token missing in the draft model would make
    the divergence infinite.

    Args:
        target_logits: [T, V]; draft_logits: [T, V_draft].
        draft_to_target: int64 [V_draft], -1 for a token missing in the target.
    """
    shared = draft_to_target >= 0
    target = target_logits.float()[:, draft_to_target[shared]].log_softmax(-1)
    draft = draft_logits.float()[:, shared].log_softmax(-1)
    return kl_div(draft, target, reduction="none", log_target=True).sum(-1)


def judge_tokens(target_logits: Tensor, tokens: Tensor, kl: Tensor) -> Tensor:
    """Return the published rule's cost of each token, [T].

    0 for the target's greedy choice, `_REJECTED` if the target is sure of another token, else the divergence `kl`."""
    certainty, own = target_logits.float().softmax(-1).max(-1)
    return torch.where(own == tokens, 0.0, torch.where(certainty > SURE, _REJECTED, kl))


def shared_tokens(draft: LanguageModel, target: LanguageModel) -> Tensor | None:
    """Return `draft_to_target` of two models; None if their tokens differ."""
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
    config: ValidityTrainingConfig,
    build: BuildInfo,
    target: LanguageModel,
    dataset: ValidityDataset,
    draft_name: str | None = None,
) -> tuple[KLJudge | None, str]:
    """Return the KL judge for the drafts of `dataset`, or None and the reason in one sentence.

    Args:
        draft_name: draft model that wrote the data; default: as recorded by the build.

    Raises:
        ValueError, OSError: the draft model `draft_name` cannot be loaded.
    """

    def without(reason: str) -> tuple[None, str]:
        return None, f"no {KL_JUDGE} among the baselines: {reason}"

    name = draft_name or build.draft.get("name")
    if not name:
        return without("the data does not name the model that wrote its drafts; set --draft")
    try:
        draft = load_language_model(
            name,
            role="draft",
            device=config.device,
            dtype=config.target_dtype,
            template_options=config.template_options,
        )
    except (OSError, ValueError) as error:
        if draft_name:
            raise
        return without(f"the draft model of the data cannot be loaded ({error}); set --draft")
    known = build.draft.get("fingerprint")
    if known and not same_weights(known, fingerprint(draft.model)):
        return without(f"{name} has other weights than the model that wrote the drafts")
    draft_to_target = shared_tokens(draft, target)
    if draft_to_target is None:
        return without(f"{name} and {target.name} have different tokens")
    if draft.tokenizer.chat_template is None:  # a base model with a chat target, as in a build
        draft.tokenizer.chat_template = target.tokenizer.chat_template
    judge = KLJudge(draft, target, draft_to_target)
    unread = sum(not judge.reads(example) for example in dataset.examples)
    if unread:
        return without(f"{name} cannot read {unread} of {len(dataset)} held-out drafts (its vocabulary or its window)")
    return judge, ""
