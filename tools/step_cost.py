"""Compare training steps with a cached context (no gradient) and with back-propagation through all tokens.

`python -m tools.step_cost recipes/train-probe.yaml [--rounds 12] [--key value …]`
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from transformers import set_seed

from parse_infer.judge.probe.packing import probe_mask, probe_positions, readout_index
from parse_infer.models.attention import layer_masks
from parse_infer.models.devices import device_name, wait_for
from parse_train.judge.probe.config import ValidityTrainingConfig
from parse_train.judge.probe.data import ValidityCollator, load_datasets
from parse_train.judge.probe.model import ValidityModel
from parse_train.judge.probe.train import build_model, encoder_for, load_target, pad_id
from parse_train.judge.trainer import ValidityTrainer
from parse_train.length_sampler import EpochLengthSampler
from tools.measured_command import run_measurement

CACHED, WHOLE = "context cached, no gradient", "back-propagated throughout"


@dataclass
class StepCostArguments:
    """Options of the measurement."""

    rounds: int = field(default=12, metadata={"help": "Timed steps per kind, alternating, on the same batches."})


@dataclass(frozen=True)
class StepCost:
    """Seconds of each timed step by kind, in order; both kinds use the same batches."""

    seconds: dict[str, list[float]]
    tokens: list[int]
    """Prompt and draft tokens of each batch, without padding."""
    gradient_gap: float
    """Largest relative difference of the two kinds' gradients over all parameters, on the first batch."""
    peak_bytes: dict[str, int] | None
    """Peak memory on a GPU."""

    def table(self) -> str:
        """Return a table by kind: median and range of the time per step, tokens per second, memory."""
        lines = [f"{'training step':<30}{'median ms':>11}{'range ms':>19}{'tokens/s':>10}{'peak GiB':>10}"]
        for kind, seconds in self.seconds.items():
            ms = [1e3 * s for s in seconds]
            span = f"{min(ms):.0f} to {max(ms):.0f}"
            rate = sum(self.tokens) / sum(seconds)
            peak = "-" if self.peak_bytes is None else f"{self.peak_bytes[kind] / 2**30:.2f}"
            lines.append(f"{kind:<30}{statistics.median(ms):>11.0f}{span:>19}{rate:>10.0f}{peak:>10}")
        ratios = sorted(w / c for c, w in zip(self.seconds[CACHED], self.seconds[WHOLE], strict=True))
        quarter = len(ratios) // 4
        lines.append(
            f"the whole sequence costs {statistics.median(ratios):.2f} times as much (median of {len(ratios)} pairs, "
            f"middle half {ratios[quarter]:.2f} to {ratios[-1 - quarter]:.2f}); largest relative difference of the "
            f"gradients: {self.gradient_gap:.1e}"
        )
        return "\n".join(lines)


def back_propagate_throughout(model: ValidityModel, on: bool) -> None:
    """Let one packed pass carry gradient through every token (`on`), or restore the cached context."""
    vars(model).pop("_context_and_probes", None)
    if on:
        vars(model)["_context_and_probes"] = partial(_packed, model)


def _packed(model: ValidityModel, input_ids: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states of context [B, T, H] and probes [B, K, H] from one packed pass."""
    (b, k), p, n_keys = visible.shape, len(model.probe.ids), input_ids.shape[1]
    context = torch.arange(n_keys, device=input_ids.device).expand(b, -1)
    probes = torch.tensor(model.probe.ids, device=visible.device).repeat(b, k)
    with model.adapted(b, k * p):
        output = model.backbone(
            input_ids=torch.cat([input_ids, probes], dim=1),
            position_ids=torch.cat([context, probe_positions(visible, p)], dim=1),
            attention_mask=layer_masks(model.windows, lambda window: probe_mask(visible, p, n_keys, window)),
            use_cache=False,
        )
    hidden = output.last_hidden_state
    return hidden[:, :n_keys], hidden[:, n_keys + readout_index(k, p).to(visible.device)]


def measure(
    model: ValidityModel, batches: Sequence[dict[str, Tensor]], step: Callable[[dict[str, Tensor]], None], rounds: int
) -> StepCost:
    """Time `step` (forward and backward) in both modes, alternating, `rounds` times each over `batches` in turn.

    Every batch first runs once in each mode, untimed. The order within a pair alternates.
    """
    device = batches[0]["input_ids"].device
    seconds: dict[str, list[float]] = {CACHED: [], WHOLE: []}
    peaks: dict[str, int] = {CACHED: 0, WHOLE: 0}
    gradients: dict[str, list[Tensor]] = {}
    tokens: list[int] = []

    def once(kind: str, batch: dict[str, Tensor]) -> float:
        back_propagate_throughout(model, kind == WHOLE)
        model.zero_grad(set_to_none=True)
        wait_for(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        begin = time.perf_counter()
        step(batch)
        wait_for(device)
        took = time.perf_counter() - begin
        if device.type == "cuda":
            peaks[kind] = max(peaks[kind], torch.cuda.max_memory_allocated(device))
        return took

    for batch in batches:
        for kind in seconds:
            once(kind, batch)
            if kind not in gradients:
                gradients[kind] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for number in range(rounds):
        batch = batches[number % len(batches)]
        tokens.append(int(batch["visible"].max(dim=1).values.sum()))
        for kind in (CACHED, WHOLE) if number % 2 == 0 else (WHOLE, CACHED):
            seconds[kind].append(once(kind, batch))
    gap = max(
        float((a - b).norm() / b.norm().clamp_min(1e-12))
        for a, b in zip(gradients[CACHED], gradients[WHOLE], strict=True)
    )
    return StepCost(seconds, tokens, gap, peaks if device.type == "cuda" else None)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table for a recipe's model, data and batch size, and return the exit code."""

    def measure(config: ValidityTrainingConfig, how: StepCostArguments, arguments: list[str]) -> None:
        if how.rounds < 1:
            raise ValueError(f"rounds is {how.rounds}; it must be at least 1")
        print(run(config, how.rounds))

    command = "python -m tools.step_cost"
    return run_measurement(argv, command, "recipes/train-probe.yaml [--rounds 12]", StepCostArguments, measure)


def run(config: ValidityTrainingConfig, rounds: int) -> str:
    """Measure the first batches of a training."""
    config.report_to = []
    set_seed(config.seed)
    lm = load_target(config)
    train, evaluation, _ = load_datasets(config, encoder_for(config, lm))
    model = build_model(config, lm).train()
    with torch.no_grad():  # lora_B is initially zero, and so would be the gradients of lora_A
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    trainer = ValidityTrainer(model, config, train, evaluation, data_collator=ValidityCollator(pad_id(lm)))
    size, collate = config.per_device_train_batch_size, ValidityCollator(pad_id(lm))
    order = list(EpochLengthSampler(train.lengths, size, config.seed, lambda: 0))
    batches = []
    for begin in range(0, min(4 * size, len(order)), size):
        batch = collate([train[i] for i in order[begin : begin + size]])
        batches.append({key: value.to(config.device) for key, value in batch.items()})

    def step(batch: dict[str, Tensor]) -> None:
        with trainer.compute_loss_context_manager():
            loss = trainer.compute_loss(model, batch)
        loss.backward()

    cost = measure(model, batches, step, rounds)
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    where = device_name(config.device) or platform.machine()
    shapes = ", ".join(f"{len(b['input_ids'])} drafts of up to {b['input_ids'].shape[1]} tokens" for b in batches[:1])
    return (
        f"{config.target}: {parameters:.1f} M parameters, {where}, {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}, bf16 {config.bf16}; batches of {shapes}, {batches[0]['visible'].shape[1]} cuts, probes "
        f"of {len(model.probe.ids)} tokens\n{cost.table()}"
    )


if __name__ == "__main__":
    sys.exit(main())
