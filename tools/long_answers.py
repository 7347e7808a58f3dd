"""Compare the validity of long answers with their labels: held-out drafts, one after another.

    python -m tools.long_answers data/qwen-coder data/more --adapter runs/qwen-coder/adapter

A text of several drafts is right if all are, by their labels. Each draft keeps the log-probabilities of its own read,
so no model is loaded, and the adapter must be one on log-probabilities.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence

import torch

from data_tools.labels.logprobs import ReadDraft, read_drafts
from parse_infer.calibration.held_out import prompt_hash
from parse_infer.errors import ParseError
from parse_infer.judge.adapter import ValidityConfig, check_target, read_head
from parse_infer.judge.adapter_files import read_adapter
from parse_infer.judge.carried import Carried
from parse_infer.judge.logprob_head import LogprobHead, LogprobScorer
from parse_infer.judge.token_logprobs import TokenLogprobs, TokenTexts
from parse_infer.models.loading import load_served_model
from parse_infer.models.names import resolve
from parse_train.judge.build_info import read_build_info

JOINED = (1, 2, 4, 8)  # drafts in a text
LIKELY = 0.5  # validity above which texts are counted


def held_out(data: Sequence[str], learnt: frozenset[str]) -> list[ReadDraft]:
    """Return the drafts that are labelled to their end, one per problem, of problems that are not in `learnt`."""
    drafts: dict[str, ReadDraft] = {}
    for draft in (draft for folder in data for draft in read_drafts(folder)):
        row = draft.row
        known = row.problem in learnt or prompt_hash(row.prompt) in learnt  # the first adapters list ids
        if row.labels and row.cuts[-1] == len(draft.logprobs.ids) and not known:
            drafts.setdefault(row.problem, draft)
    return list(drafts.values())


def join(drafts: Sequence[ReadDraft], k: int) -> TokenLogprobs:
    """Return the drafts as one text with k first choices, without their last tokens, which end an answer."""
    parts = [(d.ids, d.own, d.top_ids[:, :k], d.top[:, :k]) for d in (draft.logprobs for draft in drafts)]
    return TokenLogprobs(*(torch.cat([each[:-1] for each in column]) for column in zip(*parts, strict=True)))


def validities(judge: LogprobScorer, config: ValidityConfig, drafts: Sequence[ReadDraft]) -> list[float]:
    """Return the validity of the first, the first two, … of the joined drafts."""
    logits = judge.token_scores(join(drafts, judge.k), Carried(usual=True)).logits
    ends = torch.tensor([len(draft.logprobs.ids) - 1 for draft in drafts]).cumsum(0)
    return config.validity(logits[ends - 1]).tolist()


def measure(judge: LogprobScorer, config: ValidityConfig, drafts: Sequence[ReadDraft], texts: int) -> list[list[str]]:
    """Return a row for each entry of `JOINED`: number of drafts, mean tokens, share of right texts, mean validity, the
    same of right texts, and of the texts above `LIKELY` their number, mean validity and share of right ones."""
    rng = random.Random(0)
    chosen = [rng.sample(list(drafts), JOINED[-1]) for _ in range(texts)]
    scores = [validities(judge, config, some) for some in chosen]
    rows = []
    for n in JOINED:
        right = [all(all(draft.row.labels) for draft in some[:n]) for some in chosen]
        valid = [each[n - 1] for each in scores]
        tokens = sum(len(draft.logprobs.ids) - 1 for some in chosen for draft in some[:n]) / texts
        of_right = [v for v, ok in zip(valid, right, strict=True) if ok]
        likely = [(v, ok) for v, ok in zip(valid, right, strict=True) if v > LIKELY]
        shares = [_percent(values) for values in (right, valid, of_right)]
        of_likely = [_percent([each[i] for each in likely]) for i in (0, 1)]
        rows.append([str(n), f"{tokens:,.0f}", *shares, str(len(likely)), *of_likely])
    return rows


def _percent(values: Sequence[float]) -> str:
    return f"{100 * sum(values) / len(values):.1f}" if values else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help="folders of `parse-data build` with log-probabilities")
    parser.add_argument("--adapter", required=True, help="adapter on log-probabilities")
    parser.add_argument("--texts", type=int, default=2000, help="random texts (default: 2000)")
    arguments = parser.parse_args(argv)
    try:
        if arguments.texts < 1:
            raise ParseError(f"--texts is {arguments.texts}; it must be at least 1")
        files = read_adapter(resolve(arguments.adapter))
        config = ValidityConfig.from_dict(files.validity_config)
        if config.stream is not None:
            start = config.stream["start_from"]
            raise ParseError(f"{arguments.adapter} reads hidden states: name the one it was trained from, {start}")
        for folder in arguments.data:
            if target := read_build_info(folder).target:
                check_target(arguments.adapter, config.target, target)
        drafts = held_out(arguments.data, frozenset(files.train_problems))
        if len(drafts) < JOINED[-1]:
            raise ParseError(f"{len(drafts)} held-out drafts are too few: {JOINED[-1]} are needed for one text")
        language = load_served_model(config.target["name"])
        head = read_head(arguments.adapter, config, files.head)
        assert isinstance(head, LogprobHead)
        judge = LogprobScorer(head, TokenTexts(language.tokenizer, language.eos_ids, head.config.buckets))
        rows = measure(judge, config, drafts, arguments.texts)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{arguments.texts} random texts of {len(drafts)} held-out drafts; likely: validity above {LIKELY}")
    print("| drafts | tokens | right, % | mean validity, % | of right texts, % | likely | validity, % | right, % |")
    print("|---:" * 8 + "|")
    print("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
