"""Train EAGLE-3 and P-EAGLE heads: `accelerate launch -m parse_train recipes/eagle3.yaml` or `recipes/parallel.yaml`.

The model writes its own answers to the task's prompts once (an interrupted run continues), features come from its
frozen forward on line, and the head learns the model's distribution. EAGLE-3: "training-time test" (arXiv 2503.01840):
the head is run on its own output, `steps` times, as it will be when it drafts. P-EAGLE (arXiv 2602.01469): all depths
of a block in one forward, deeper ones at a shrinking share of the places.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import EvalPrediction, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

from data_tools.drafts import DraftSampler, render
from data_tools.tasks import Problem, load_task
from parse_infer.drafters.eagle import EagleConfig, EagleHead
from parse_infer.loading import LanguageModel, load_language_model
from parse_infer.sampling import Sampling
from parse_train import tracking

IGNORED = -100
_GROUP = 64  # problems answered together; an interruption costs no more


@dataclass
class EagleTrainingConfig(TrainingArguments):
    """Fields on top of transformers' `TrainingArguments`."""

    model: str = field(default="", metadata={"help": "The model to guide: Hugging Face id, folder, or zoo:target."})
    model_dtype: str = field(default="auto", metadata={"help": "auto, float32, bfloat16 or float16."})
    template_options: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "Switches of the chat template, for example enable_thinking: false."}
    )
    task: str = field(default="gsm_symbolic", metadata={"help": "Task whose prompts the model answers."})
    task_options: dict[str, Any] = field(default_factory=dict, metadata={"help": "Options of the task."})
    n_problems: int = field(default=4000, metadata={"help": "Training problems; one answer each."})
    n_eval_problems: int = field(default=200, metadata={"help": "Validation problems."})
    answer_temperature: float = field(default=0.0, metadata={"help": "Temperature of the answers; 0 is greedy."})
    max_answer_tokens: int = field(default=256, metadata={"help": "Longer answers are cut."})
    batch_size: int = field(default=64, metadata={"help": "Answers decoded at a time."})

    parallel: bool = field(default=False, metadata={"help": "P-EAGLE: a block in one forward."})
    steps: int = field(default=5, metadata={"help": "Tokens the head learns to guess ahead."})
    step_decay: float = field(default=0.9, metadata={"help": "Weight of a step, relative to the one before it."})
    depth_share: float = field(default=0.8, metadata={"help": "P-EAGLE: places kept at each further depth."})
    feature_layers: list[int] | None = field(
        default=None, metadata={"help": "Where features are taken; by default layers 2, n/2 and n-3 as in EAGLE-3."}
    )
    draft_vocab_size: int | None = field(
        default=None, metadata={"help": "The head guesses this many tokens, the commonest; by default all."}
    )
    intermediate_size: int | None = field(
        default=None, metadata={"help": "Of the head's MLP; the model's by default."}
    )
    ptd_token: str | None = field(
        default=None, metadata={"help": "P-EAGLE: token that fills the places ahead; by default the padding token."}
    )

    def __post_init__(self) -> None:
        self.use_cpu = self.use_cpu or not torch.accelerator.is_available()
        self.remove_unused_columns = False
        self.label_names = ["labels"]
        super().__post_init__()
        for key in ("model", "output_dir"):
            if not getattr(self, key):
                raise ValueError(f"the recipe needs the key {key}")
        for key in ("n_problems", "n_eval_problems", "max_answer_tokens", "steps", "batch_size"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}; it must be at least 1")
        for key in ("step_decay", "depth_share"):
            if not 0 < getattr(self, key) <= 1:
                raise ValueError(f"{key} is {getattr(self, key)}; it must lie above 0 and at most at 1")


class Answers(Dataset):
    """The model's own answers: {"ids": prompt and answer, "start": where the answer begins}."""

    def __init__(self, rows: Sequence[dict[str, Any]]) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


def write_answers(lm: LanguageModel, config: EagleTrainingConfig, split: str, limit: int, path: Path) -> Answers:
    """Answers to `limit` problems of `split`, from the file at `path` as far as it has them, which then has them all.

    Every line is one answer; a line cut off by an interruption is dropped.

    Raises:
        ValueError: the file holds answers of another model or task.
    """
    settings = [lm.name, config.task, config.task_options, config.seed, config.answer_temperature]
    settings += [config.max_answer_tokens, config.template_options]
    identity = json.loads(json.dumps({"answers": settings}))
    rows: list[dict[str, Any]] = []
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        text = path.read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
        if not lines or lines[0] != identity:
            raise ValueError(f"{path} holds answers of another model, task or seed: choose another output_dir")
        rows = lines[1:]
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in [identity, *rows])
        problems: list[Problem] = list(
            load_task(config.task, **config.task_options).problems(split, seed=config.seed, limit=limit)  # type: ignore[arg-type]
        )
        sampler = DraftSampler(
            lm, lm, [Sampling(config.answer_temperature)], config.max_answer_tokens, config.seed, config.batch_size
        )
        groups = range(len(rows), len(problems), _GROUP)
        for first in track(groups, f"{lm.name} answers {split} problems", disable=not groups):
            group = problems[first : first + _GROUP]
            for problem, drafts in zip(group, sampler.sample(group), strict=True):
                prompt = render(lm, problem)
                row = {"ids": prompt + (drafts[0].ids if drafts else []), "start": len(prompt)}
                rows.append(row)
                file.write(json.dumps(row) + "\n")
            file.flush()
    return Answers(rows[:limit])


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """input_ids [B, T] padded on the right with 0, labels [B, T]: the token at answer places, else -100; int64."""
    length = max(len(row["ids"]) for row in rows)
    input_ids = torch.zeros(len(rows), length, dtype=torch.long)
    labels = torch.full((len(rows), length), IGNORED)
    for i, row in enumerate(rows):
        ids = torch.tensor(row["ids"])
        input_ids[i, : len(ids)] = ids
        labels[i, row["start"] : len(ids)] = ids[row["start"] :]
    return {"input_ids": input_ids, "labels": labels}


class EagleModel(nn.Module):
    """A frozen model and the head that learns to guess its tokens. The state dict holds the head only."""

    def __init__(self, lm: LanguageModel, head: EagleHead, steps: int, step_decay: float, depth_share: float) -> None:
        super().__init__()
        self.head = head
        self.steps, self.step_decay, self.depth_share = steps, step_decay, depth_share
        self._frozen = [lm]  # in a list: not a submodule

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Loss, and for each place and step whether the guess is the model's own choice.

        Returns:
            {"loss": scalar, "right": int64 [B, T, steps]: 1 or 0 for the guess of the token `step + 2` places on, -100
            where there is none to compare with}.
        """
        model = self._frozen[0].model
        with torch.no_grad():
            output = model(input_ids=input_ids, output_hidden_states=True, use_cache=False)
            layers = self.head.config.eagle_aux_hidden_state_layer_ids
            features = torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)
            wanted = output.logits[..., self.head.t2d].float()
            own = output.logits.argmax(-1)
            embeddings = nn.functional.embedding(input_ids, cast(Tensor, model.get_input_embeddings().weight))
        guesses = (
            self._block(features, embeddings)
            if self.head.config.parallel_drafting
            else self._unroll(features, embeddings)
        )
        loss = features.new_zeros((), dtype=torch.float32)
        total = 0.0
        right = torch.full((*input_ids.shape, self.steps), IGNORED, device=input_ids.device)
        answered = labels != IGNORED
        for step, (logits, places) in enumerate(guesses):
            # Place i guesses token i + 2 + offset from what the model says at i + 1 + offset.
            offset = step if self.head.config.parallel_drafting else 0
            target_place = places + 1 + offset
            inside = target_place + 1 < input_ids.shape[1]
            target_place = target_place.clamp_max(input_ids.shape[1] - 2)
            counted = answered[:, target_place + 1] & inside
            # In the unrolled form the guess at place i and step k continues a context that ends k places before.
            p = wanted[:, target_place].softmax(-1)
            each = -(p * logits.float().log_softmax(-1)).sum(-1)
            weight = self.step_decay**step
            if counted.any():
                loss = loss + weight * each[counted].mean()
                total += weight
            ids = logits.argmax(-1)
            hit = (ids + self.head.d2t[ids]) == own[:, target_place]
            start = places - (0 if self.head.config.parallel_drafting else step)
            right[:, start, step] = torch.where(counted, hit.long(), IGNORED)
        return {"loss": loss / max(total, 1e-9), "right": right}

    def _unroll(self, features: Tensor, embeddings: Tensor) -> list[tuple[Tensor, Tensor]]:
        """EAGLE-3's training-time test: logits [B, n, V'] and places [n] of each step.

        At step k, place i stands for draft token k behind a context that ends at i - k: it sees the true features up
        to there, and the head's own k later ones.
        """
        t = features.shape[1] - 1
        device = features.device
        hidden, following = self.head.fc(features[:, :-1]), embeddings[:, 1:]
        positions = torch.arange(t, device=device)
        rows, columns = positions[:, None], positions[None, :]
        past: tuple[Tensor, Tensor] | None = None
        results = []
        for step in range(self.steps):
            # Keys of step m stand at every place; place i at this step sees those of its own draft: i - (step - m).
            blocks = [columns <= rows - step] + [columns == rows - (step - m) for m in range(1, step + 1)]
            mask = torch.cat(blocks, dim=1)
            mask[:step, 0] = True  # places without a draft that long: anything, they do not count
            output, past = self.head(
                hidden,
                following,
                positions.expand(len(hidden), -1),
                mask[None, None].expand(len(hidden), 1, -1, -1),
                past,
            )
            results.append((self.head.logits(output[:, step:]), positions[step:]))
            hidden = torch.cat([output[:, :1], output[:, :-1]], dim=1)
        return results

    def _block(self, features: Tensor, embeddings: Tensor) -> list[tuple[Tensor, Tensor]]:
        """P-EAGLE: all depths in one forward; logits [B, n_d, V'] and places [n_d] of each depth d."""
        b, t = features.shape[0], features.shape[1] - 1
        device = features.device
        kept = [torch.arange(t, device=device)]
        for _ in range(1, self.steps):
            share = max(1, round(len(kept[-1]) * (self.depth_share if self.training else 1.0)))
            chosen = torch.randperm(len(kept[-1]), device=device)[:share].sort().values
            kept.append(kept[-1][chosen])
        places = torch.cat(kept)
        depth = torch.cat([torch.full_like(k, d) for d, k in enumerate(kept)])
        ahead = len(places) - t
        weight = cast(Tensor, self._frozen[0].model.get_input_embeddings().weight).detach()
        mask_token = weight[self.head.config.ptd_token_id or 0].expand(b, ahead, -1)
        mask_hidden = self.head.mask_hidden.expand(b, ahead, -1)
        hidden = self.head.fc(torch.cat([features[:, :-1], mask_hidden.to(features.dtype)], dim=1))
        following = torch.cat([embeddings[:, 1:], mask_token], dim=1)
        same = places[:, None] == places[None, :]
        real = depth[None, :] == 0
        mask = (real & (places[None, :] <= places[:, None])) | (same & (depth[None, :] <= depth[:, None]))
        output, _ = self.head(hidden, following, (places + depth).expand(b, -1), mask[None, None].expand(b, 1, -1, -1))
        split = self.head.logits(output).split([len(k) for k in kept], dim=1)
        return list(zip(split, kept, strict=True))


class EagleTrainer(Trainer):
    """transformers' Trainer for a head; evaluation reports accuracy by step and the simulated acceptance length."""

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any) -> Any:  # type: ignore[override]
        output = model(inputs["input_ids"], inputs["labels"])
        return (output["loss"], {"right": output["right"]}) if return_outputs else output["loss"]


def head_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """accuracy_1, accuracy_2, …: share of guesses that are the model's own choice at each step.

    acceptance_length: tokens that a forward of the model would yield with these chains, its own token included.
    """
    right = np.asarray(prediction.predictions).reshape(-1, np.asarray(prediction.predictions).shape[-1])
    metrics = {}
    for step in range(right.shape[1]):
        seen = right[:, step] != IGNORED
        metrics[f"accuracy_{step + 1}"] = float((right[seen, step] == 1).mean()) if seen.any() else 0.0
    whole = (right != IGNORED).all(axis=1)
    lengths = np.cumprod(right[whole] == 1, axis=1).sum(axis=1)
    metrics["acceptance_length"] = 1 + float(lengths.mean()) if len(lengths) else 1.0
    return metrics


def make_head(lm: LanguageModel, config: EagleTrainingConfig, answers: Answers) -> EagleHead:
    """A fresh head for the model: its shape, its output layer's rows, its commonest answer tokens."""
    own = lm.model.config.get_text_config(decoder=True)
    n = own.num_hidden_layers
    layers = config.feature_layers or sorted({min(2, n - 1), n // 2, max(n - 3, 0)})
    size = min(config.draft_vocab_size or own.vocab_size, own.vocab_size)
    ptd = lm.tokenizer.convert_tokens_to_ids(config.ptd_token) if config.ptd_token else lm.tokenizer.pad_token_id
    heads = own.num_attention_heads
    rope = getattr(own, "rope_parameters", None) or {}
    head = EagleHead(
        EagleConfig(
            hidden_size=own.hidden_size,
            intermediate_size=config.intermediate_size or own.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=getattr(own, "num_key_value_heads", heads),
            head_dim=getattr(own, "head_dim", None) or own.hidden_size // heads,
            vocab_size=own.vocab_size,
            draft_vocab_size=size,
            eagle_aux_hidden_state_layer_ids=tuple(layers),
            rope_theta=float(rope.get("rope_theta", 10000.0)),
            max_position_embeddings=lm.window,
            parallel_drafting=config.parallel,
            ptd_token_id=int(cast(int, ptd) or 0) if config.parallel else None,
        )
    )
    counts = Counter(token for row in answers.rows for token in row["ids"][row["start"] :])
    common = sorted(range(own.vocab_size), key=lambda token: (-counts[token], token))[:size]
    head.set_vocabulary(sorted(common))
    with torch.no_grad():
        chosen = torch.arange(size) + head.d2t
        head.lm_head.weight.copy_(lm.model.get_output_embeddings().weight[chosen].float().cpu())
    return head.to(lm.model.device)


def main(config: EagleTrainingConfig) -> None:
    """Let the model answer, train the head, and write it to `output_dir`/head."""
    set_seed(config.seed)
    lm = load_language_model(
        config.model,
        role="target",
        device=config.device,
        dtype=config.model_dtype,
        template_options=config.template_options,
    )
    lm.model.requires_grad_(False)
    folder = Path(str(config.output_dir))
    with config.main_process_first(local=False):
        train = write_answers(lm, config, "train", config.n_problems, folder / "answers-train.jsonl")
        evaluation = write_answers(
            lm, config, "validation", config.n_eval_problems, folder / "answers-validation.jsonl"
        )
    model = EagleModel(lm, make_head(lm, config, train), config.steps, config.step_decay, config.depth_share)
    tracking.start(config)  # type: ignore[arg-type]
    trainer = EagleTrainer(
        model,
        config,
        train_dataset=train,
        eval_dataset=evaluation,
        data_collator=collate,
        compute_metrics=head_metrics,
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(config.output_dir))
    metrics = trainer.evaluate()
    if config.process_index == 0:
        model.head.save_pretrained(folder / "head")
        print(", ".join(f"{k.removeprefix('eval_')} {v:.3f}" for k, v in metrics.items() if "acc" in k))
        print(f"head written to {folder / 'head'}")
