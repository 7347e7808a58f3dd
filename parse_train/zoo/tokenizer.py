"""Train the tokenizer of the embedded models: byte-level BPE, single digits, a chat template.

`accelerate launch recipes/zoo/tokenizer.yaml`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from data_tools.tasks.by_name import load_task

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
    """What the tokenizer is trained on and where it goes."""

    output_dir: str = field(metadata={"help": "Folder that receives the tokenizer."})
    task: str = field(
        default="gsm_symbolic", metadata={"help": "Task whose prompts and worked answers it is trained on."}
    )
    task_options: dict[str, Any] = field(default_factory=dict, metadata={"help": "Options of the task."})
    vocab_size: int = field(default=2048, metadata={"help": "Size of the vocabulary, special tokens included."})
    n_problems: int = field(default=20_000, metadata={"help": "Number of training problems to learn the merges from."})
    model_max_length: int = field(
        default=512, metadata={"help": "Longest sequence of the models that use it, in tokens."}
    )


def train_tokenizer(config: TokenizerConfig) -> PreTrainedTokenizerFast:
    """Train and save the tokenizer; returns it."""
    task = load_task(config.task, **config.task_options)

    def texts() -> Iterator[str]:
        for problem in task.problems("train", limit=config.n_problems):
            yield str(problem.prompt)
            if problem.solution:
                yield problem.solution

    bpe = Tokenizer(models.BPE())
    # Single digits: a number is read and written digit by digit, which is what arithmetic needs. The first digit may
    # carry the space before it, which saves a token a number.
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
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(config.output_dir)
    return tokenizer


def main(config: TokenizerConfig) -> None:
    tokenizer = train_tokenizer(config)
    print(f"tokenizer with {len(tokenizer)} entries saved to {config.output_dir}")
