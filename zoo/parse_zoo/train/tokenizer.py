"""Recipe `tokenizer`: train a tokenizer on a task's text, or prune the tokenizer of a larger model.

Trained, for the embedded models: byte-level BPE, single digits, a chat template (`recipes/zoo/tokenizer.yaml`).
Pruned: the most frequent tokens of `base_tokenizer` (`recipes/smollm2/tokenizer.yaml`, see `vocabulary_pruning`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data_tools.tasks.registry import load_task
from data_tools.tasks.task import Problem
from parse_infer.errors import ParseError
from parse_infer.models.loading import load_tokenizer
from parse_zoo.train.vocabulary_pruning import pruned, special_tokens

USER, ASSISTANT, END = "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|assistant|>' + message['content'] + '<|end|>' }}"
    "{% else %}{{ '<|user|>' + message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@dataclass
class TokenizerConfig:
    """Configuration of the recipe `tokenizer`."""

    output_dir: str = field(metadata={"help": "Folder of the tokenizer."})
    task: str = field(
        default="gsm_symbolic", metadata={"help": "Task whose prompts and solutions are the training text."}
    )
    task_options: dict[str, Any] = field(default_factory=dict, metadata={"help": "Options of the task."})
    base_tokenizer: str | None = field(
        default=None,
        metadata={
            "help": "Tokenizer (name or folder) to prune to its most frequent tokens; default: train a new one."
        },
    )
    vocab_size: int = field(
        default=2048,
        metadata={"help": "Size of the vocabulary with special tokens; an upper bound with base_tokenizer."},
    )
    n_problems: int = field(default=20_000, metadata={"help": "Number of training problems to read."})
    seed: int = field(default=0, metadata={"help": "Seed of the problems."})
    chat_template: str | None = field(
        default=None,
        metadata={"help": "Jinja chat template; default: of base_tokenizer, or of the embedded models."},
    )
    model_max_length: int = field(
        default=512, metadata={"help": "Maximum sequence length of models with this tokenizer, in tokens."}
    )


def make_tokenizer(config: TokenizerConfig) -> PreTrainedTokenizerFast:
    """Build, save and return the tokenizer.

    Raises:
        ValueError, OSError: the base tokenizer cannot be pruned or found.
    """
    tokenizer = trained(config) if config.base_tokenizer is None else pruned_from_base(config)
    tokenizer.save_pretrained(config.output_dir)
    return tokenizer


def trained(config: TokenizerConfig) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE with merges learnt from the task's text."""

    def texts() -> Iterator[str]:
        for problem in _problems(config):
            yield str(problem.prompt)
            if problem.solution:
                yield problem.solution

    bpe = Tokenizer(models.BPE())
    # Arithmetic needs single digits. The first digit may include the space before it, which saves a token per number.
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r" ?\d"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[USER, ASSISTANT, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts(), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        model_max_length=config.model_max_length,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = config.chat_template or CHAT_TEMPLATE
    return tokenizer


def pruned_from_base(config: TokenizerConfig) -> PreTrainedTokenizerFast:
    """Return the base tokenizer, pruned to the tokens of the task's prompts (in the chat template) and solutions."""
    base = load_tokenizer(config.base_tokenizer or "")
    if not isinstance(base, PreTrainedTokenizerFast):
        raise ParseError(f"{config.base_tokenizer} has no fast tokenizer (tokenizer.json), which pruning needs")
    named = {token for token in base.special_tokens_map.values() if isinstance(token, str)}
    templates = [base.chat_template, config.chat_template]
    specials = special_tokens(
        base.get_added_vocab(), named, [template for template in templates if isinstance(template, str)]
    )
    base.chat_template = config.chat_template or base.chat_template
    if base.chat_template is None:
        raise ParseError(f"{config.base_tokenizer} has no chat template: the recipe needs the key chat_template")
    counts: Counter[int] = Counter()
    for problem in _problems(config):
        prompt = problem.prompt if isinstance(problem.prompt, list) else [{"role": "user", "content": problem.prompt}]
        rendered = base.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        for text in (str(rendered), problem.solution or ""):
            counts.update(base.encode(text, add_special_tokens=False))
    names = {key: token for key, token in base.special_tokens_map.items() if isinstance(token, str)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=pruned(base.backend_tokenizer, counts, specials, config.vocab_size),
        **names,
        extra_special_tokens=[token for token in base.all_special_tokens if token in specials - named],
        model_max_length=config.model_max_length,
        clean_up_tokenization_spaces=base.clean_up_tokenization_spaces,
    )
    tokenizer.chat_template = base.chat_template
    return tokenizer


def _problems(config: TokenizerConfig) -> Iterator[Problem]:
    task = load_task(config.task, **config.task_options)
    return task.problems("train", seed=config.seed, limit=config.n_problems)


def main(config: TokenizerConfig) -> None:
    tokenizer = make_tokenizer(config)
    print(f"tokenizer with {len(tokenizer)} entries saved to {config.output_dir}")
