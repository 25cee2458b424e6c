"""Trains the small checkpoint on one GPU against the clock: dense, with indexers, sparse, against loops, MTP alone.

Owns the data windows, the stages, the losses and the schedule. The schedule is a function of the share of `--minutes`
that has passed, so a slower GPU trains on fewer tokens but ends its schedule. Called after `pretokenize.py`:

    python tools/train/train.py --data DIR/tokens --tokenizer DIR/tokenizer --out OUT --minutes 11
"""

from __future__ import annotations

import argparse
import json
import math
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import model as model_module
import numpy as np
import torch
import torch.nn.functional as F
from decode import extend
from export import read_checkpoint, trainable, write_checkpoint
from model import Layer, Model, ModelConfig, Probe, Runner, compiled, probe_loss
from optim import Optimisers
from pretokenize import IDS, VOCABULARY, read_chunk
from torch import Tensor

EXTRA = 8  # tokens a window holds past its rows, for the labels of the MTP chain


@dataclass(frozen=True)
class Stage:
    """One stage of the schedule; `until` is the share of the time at which it ends."""

    name: str
    until: float
    length: int
    sparse: bool = False
    probes: bool = False
    fp8_index: bool = False
    chain: int = 4  # MTP steps on every `chain_every`-th step
    chain_every: int = 4
    short_chain: int = 1  # MTP steps on the other steps
    distil: float = 0.0  # share of the MTP loss that is KL to the target's own distribution
    own_text: bool = False  # also train on the model's own continuations
    mtp_only: bool = False


STAGES = (
    Stage("dense-1024", 0.37, 1024),
    Stage("dense-4096", 0.55, 4096, probes=True, chain=6, chain_every=4, distil=0.5),
    Stage("sparse-4096", 0.76, 4096, sparse=True, probes=True, fp8_index=True, chain=6, chain_every=3, short_chain=1,
          distil=0.8),
    Stage("own-text", 0.88, 4096, sparse=True, probes=True, fp8_index=True, chain=1, short_chain=1, distil=0.8,
          own_text=True),
    Stage("mtp", 1.0, 4096, sparse=True, probes=True, fp8_index=True, chain=6, chain_every=1, distil=1.0,
          own_text=True, mtp_only=True),
)
RATES = {"matrices": 4e-3, "embed_tokens": 1.5e-2, "lm_head": 3e-3, "other": 3e-3, "indexer": 2e-3}
DECAY_FROM, FLOOR = 0.40, 0.12
OWN_LENGTH, OWN_PROMPT, OWN_ROWS, OWN_USES = 512, 128, 1024, 2
UNLIKELIHOOD, UNLIKELIHOOD_MOST, LOSS_ALLOWANCE = 0.3, 3.0, 1.015
PROBE_ROWS = 256
MTP_WEIGHT, MTP_GRADIENT, STEP_DECAY = 0.5, 0.4, 0.9
BALANCE_WEIGHT, BIAS_RATE = 1e-3, 1e-3


class Windows:
    """Random windows of a shuffled stream of documents; every window starts with [gMASK]<sop>."""

    def __init__(self, tokens: Tensor, seed: int) -> None:
        self.tokens, self.generator = tokens, torch.Generator(device=tokens.device).manual_seed(seed)
        self.starts = torch.nonzero(tokens == IDS["[gMASK]"]).flatten()
        ends = torch.cat((self.starts[1:], torch.tensor([len(tokens)], device=tokens.device)))
        self.lengths = ends - self.starts
        self.stream, self.order, self.at, self.length, self.epochs = tokens, tokens[:0], 0, 0, 0

    def _shuffle(self, length: int) -> None:
        """A new order of documents and of windows."""
        order = torch.randperm(len(self.starts), generator=self.generator, device=self.tokens.device)
        lengths = self.lengths[order]
        offset = self.starts[order] - (lengths.cumsum(0) - lengths)
        total = int(lengths.sum())
        source = torch.arange(total, device=self.tokens.device) + torch.repeat_interleave(offset, lengths)
        self.stream = self.tokens[source]
        count = (total - EXTRA) // length
        self.order = torch.randperm(count, generator=self.generator, device=self.tokens.device) * length
        self.at, self.length, self.epochs = 0, length, self.epochs + 1

    def draw(self, batch: int, length: int) -> Tensor:
        """Tokens [batch, length + EXTRA]."""
        if length != self.length or self.at + batch > len(self.order):
            self._shuffle(length)
        first = self.order[self.at : self.at + batch]
        self.at += batch
        windows = self.stream[first[:, None] + torch.arange(length + EXTRA, device=first.device)].long()
        windows[:, 0], windows[:, 1] = IDS["[gMASK]"], IDS["<sop>"]
        return windows


@compiled
def head_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of rows against labels."""
    return F.cross_entropy(F.linear(hidden, head.to(hidden.dtype)).float(), labels)


@compiled
def head_logits(hidden: Tensor, head: Tensor) -> Tensor:
    """The target's logits, kept for distillation (no gradient)."""
    return F.linear(hidden.detach(), head.detach().to(hidden.dtype))


@compiled
def distil_loss(hidden: Tensor, head: Tensor, labels: Tensor, teacher: Tensor, source: Tensor, valid: Tensor,
                share: Tensor) -> Tensor:
    """share * KL(teacher row `source` || draft) + (1 - share) * cross-entropy, over the valid rows for the KL part."""
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    log_q = logits - torch.logsumexp(logits, -1, keepdim=True)
    log_p = torch.log_softmax(teacher[source].float(), -1)
    soft = (log_p.exp() * (log_p - log_q)).sum(-1)
    hard = -log_q.gather(-1, labels[:, None])[:, 0]
    return (share * soft * valid + (1 - share) * hard).mean()


@compiled
def unlikelihood(hidden: Tensor, head: Tensor, labels: Tensor, marked: Tensor) -> Tensor:
    """-log(1 - p(label)) of the marked rows, summed and divided by the number of rows (Welleck et al. 2019)."""
    logits = F.linear(hidden, head.to(hidden.dtype)).float()
    p = torch.exp(logits.gather(-1, labels[:, None])[:, 0] - torch.logsumexp(logits, -1))
    return -(torch.log1p(-p.clamp(max=0.9995)) * marked).mean()


def repeated(rows: Tensor, start: int) -> Tensor:
    """Marks tokens [B, L] that go on with a loop: at or after `start`, ending a 12-gram seen before in the row's own
    continuation or an 8-gram seen there twice before."""
    own = rows[:, start:]
    grams = (own.unfold(1, 4, 1) * VOCABULARY ** torch.arange(4, device=rows.device)).sum(-1)
    same = (grams[:, :, None] == grams[:, None, :]).tril(-1)
    eight = same[:, 4:, 4:] & same[:, :-4, :-4]
    twelve = eight[:, 4:, 4:] & same[:, :-8, :-8]
    marks = eight.sum(-1) >= 2
    marks[:, 4:] |= twelve.any(-1)
    return F.pad(marks, (start + 7, 0))


class Trainer:
    """Model, data and optimisers, and one training step."""

    def __init__(self, model: Model, windows: Windows, rows_per_step: int, dtype: torch.dtype, attention: str) -> None:
        self.model, self.windows, self.rows, self.dtype, self.attention = model, windows, rows_per_step, dtype, attention
        self.optimisers = Optimisers(model)
        self.device = model.norm.device
        self.runners: dict[str, Runner] = {}
        self.generator = torch.Generator(device=self.device).manual_seed(99)
        self.tokens_seen = 0
        self.average = torch.zeros((), device=self.device)  # running mean of the loss on real text
        self.allowed, self.loop_weight = 0.0, UNLIKELIHOOD
        self.own_windows = Windows(windows.tokens, 77)
        self.own: list[Tensor] = []
        self.own_pool: list[Tensor] = []
        self.draft_turn = 0
        self.own_length, self.own_prompt, self.own_rows = OWN_LENGTH, OWN_PROMPT, OWN_ROWS

    def runner(self, stage: Stage) -> Runner:
        """The runner of a stage, with freshly sampled probe rows."""
        if stage.name not in self.runners:
            self.runners[stage.name] = Runner(self.model, max(1, self.rows // stage.length), stage.length, stage.sparse,
                                              None, stage.fp8_index, self.dtype, self.attention)
        runner = self.runners[stage.name]
        if stage.probes:
            count = min(PROBE_ROWS, stage.length)
            runner.rows = torch.randperm(stage.length, generator=self.generator, device=self.device)[:count].sort().values
        return runner

    def start(self, stage: Stage) -> None:
        """Freezes everything but the MTP layer for an MTP-only stage; drops text of an older model."""
        self.own = []
        if stage.own_text and not stage.mtp_only:
            self.allowed = float(self.average) * LOSS_ALLOWANCE
        for name, p in self.model.named_parameters():
            p.requires_grad_(not stage.mtp_only or name.startswith(("mtp.", "enorm", "hnorm", "eh_proj", "shared_head")))

    def mtp_loss(self, stage: Stage, runner: Runner, hidden: Tensor, tokens: Tensor,
                 steps: int) -> tuple[Tensor, list[Tensor], list[Tensor], Probe | None, Tensor]:
        """Weighted loss of the chain, the loss of each step, loads, the probe and the balance loss."""
        head, s = self.model.lm_head, runner.length
        teacher = head_logits(hidden, head) if stage.distil else None
        inside = hidden if stage.mtp_only else hidden * MTP_GRADIENT + hidden.detach() * (1 - MTP_GRADIENT)
        outputs, loads, probe, balance = runner.mtp_chain(inside, tokens, steps)
        index, losses = torch.arange(hidden.shape[0], device=hidden.device), []
        for step, g in enumerate(outputs):
            labels = tokens[:, 2 + step : 2 + step + s].flatten()
            if teacher is None:
                losses.append(head_loss(g, head, labels))
                continue
            valid = (index % s) + 1 + step < s
            share = torch.tensor(stage.distil, device=hidden.device)
            losses.append(distil_loss(g, head, labels, teacher, torch.where(valid, index + 1 + step, index),
                                      valid.float(), share))
        weights = [STEP_DECAY**i for i in range(steps)]
        total = sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights)
        return total, losses, loads, probe, balance

    def own_text(self, sampled_share: float) -> Tensor:
        """A batch [B, own_length + EXTRA] of the model's own continuations; a new pool when one is used up."""
        if not self.own:
            prompts = self.own_windows.draw(self.own_rows, self.own_length)[:, : self.own_prompt]
            sampled = (torch.rand(len(prompts), generator=self.generator, device=self.device) < sampled_share).float()
            was, model_module.compile_enabled = model_module.compile_enabled, False
            rows = extend(self.model, prompts, self.own_length + EXTRA - self.own_prompt, sampled, self.generator)
            model_module.compile_enabled = was
            self.own = list(rows.split(max(1, self.rows // self.own_length))) * OWN_USES
        return self.own.pop()

    def own_runner(self) -> Runner:
        """The runner of the model's own text: short, so dense."""
        if "own" not in self.runners:
            self.runners["own"] = Runner(self.model, max(1, self.rows // self.own_length), self.own_length, False, None,
                                         False, self.dtype, self.attention)
        return self.runners["own"]

    def loop_loss(self) -> tuple[Tensor, Tensor]:
        """Unlikelihood of the loops in greedy continuations, and the share of their tokens that are in loops.

        Its weight grows while the loss on real text stays within LOSS_ALLOWANCE of what it was, and shrinks otherwise.
        """
        tokens, runner = self.own_text(0.0), self.own_runner()
        marks = repeated(tokens, self.own_prompt)
        trunk, _ = runner.trunk(tokens[:, : self.own_length])
        labels, marked = tokens[:, 1 : 1 + self.own_length], marks[:, 1 : 1 + self.own_length]
        loss = unlikelihood(trunk.hidden, self.model.lm_head, labels.flatten(), marked.flatten().float())
        return loss, marked.float().mean() * self.own_length / (self.own_length - self.own_prompt)

    def draft_step(self, stage: Stage, rates: dict[str, float]) -> dict[str, Any]:
        """One MTP-only step on the model's own text, a quarter of it sampled."""
        if len(self.own_pool) < 4 * self.own_rows // max(1, self.rows // self.own_length):
            tokens = self.own_text(0.25)
            if not any(tokens is seen for seen in self.own_pool):
                self.own_pool.append(tokens)
        else:
            self.draft_turn += 1
            tokens = self.own_pool[self.draft_turn % len(self.own_pool)]
        runner = self.own_runner()
        self.tokens_seen += runner.batch * runner.length
        with torch.no_grad():
            trunk, _ = runner.trunk(tokens[:, : runner.length])
        mtp, losses, loads, _, balance = self.mtp_loss(stage, runner, trunk.hidden, tokens, stage.chain)
        (mtp + BALANCE_WEIGHT * balance).backward()
        self.update(rates)
        return {"loss": torch.zeros(()), "mtp": [x.detach() for x in losses], "index": [], "loads": [sum(loads)]}

    def update(self, rates: dict[str, float]) -> None:
        """Clips and applies the gradients."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimisers.set_rates(rates)
        self.optimisers.step()

    def step(self, stage: Stage, number: int, rates: dict[str, float], bias_rate: float) -> dict[str, Any]:
        """One optimisation step; the values returned are still on the device."""
        if stage.mtp_only and number % 2:
            return self.draft_step(stage, rates)
        runner = self.runner(stage)
        tokens = self.windows.draw(runner.batch, runner.length)
        self.tokens_seen += runner.batch * runner.length
        with torch.set_grad_enabled(not stage.mtp_only):
            trunk, balance = runner.trunk(tokens[:, : runner.length])
        hidden = trunk.hidden
        with torch.set_grad_enabled(not stage.mtp_only):
            loss = head_loss(hidden, self.model.lm_head, tokens[:, 1 : 1 + runner.length].flatten())
        steps = stage.chain if number % stage.chain_every == 0 else stage.short_chain
        mtp, mtp_losses, mtp_loads, probe, mtp_balance = self.mtp_loss(stage, runner, hidden, tokens, steps)
        probes = ([] if stage.mtp_only else trunk.probes) + ([probe] if probe is not None else [])
        index_losses = [probe_loss(p, runner.rows) for p in probes]
        total = mtp + BALANCE_WEIGHT * mtp_balance if stage.mtp_only else (
            loss + MTP_WEIGHT * mtp + BALANCE_WEIGHT * (balance + mtp_balance))
        (total + sum(index_losses)).backward()
        extra: dict[str, Any] = {}
        if stage.own_text and not stage.mtp_only:
            loops, share = self.loop_loss()
            self.loop_weight *= 0.7 if float(self.average) > self.allowed else 1.05
            self.loop_weight = min(max(self.loop_weight, 0.005), UNLIKELIHOOD_MOST)
            (self.loop_weight * loops).backward()
            extra = {"loops": loops.detach(), "loop_share": share, "loop_weight": self.loop_weight}
        self.average = torch.where(self.average == 0, loss.detach(), self.average * 0.92 + loss.detach() * 0.08)
        self.update(rates)
        self.balance_bias(self.model.moe_layers(), [*trunk.loads, sum(mtp_loads)], bias_rate, stage.mtp_only)
        return {"loss": loss.detach(), "mtp": [x.detach() for x in mtp_losses],
                "index": [x.detach() for x in index_losses], "loads": [*trunk.loads, sum(mtp_loads)], **extra}

    @torch.no_grad()
    def balance_bias(self, layers: list[Layer], loads: list[Tensor], rate: float, last_only: bool) -> None:
        """Raises the choosing bias of underused experts and lowers that of overused ones by `rate`."""
        for layer, load in list(zip(layers, loads, strict=True))[-1 if last_only else 0 :]:
            load = load.float()
            layer.router_bias += rate * torch.sign(load.mean() - load)


def rates_at(progress: float, stage: Stage) -> dict[str, float]:
    """Learning rates: warm-up, constant, linear to FLOOR by the end of the sparse stage, then to nothing."""
    sparse_end, own_end = STAGES[2].until, STAGES[3].until
    if stage.mtp_only:
        scale = 0.3 * max(0.0, 1 - (progress - own_end) / (1 - own_end)) + 0.003
    elif stage.own_text:
        scale = FLOOR * max(0.05, (own_end - progress) / (own_end - sparse_end))
    else:
        scale = min(1.0, progress / 0.02 + 0.02)
        if progress > DECAY_FROM:
            scale *= FLOOR + (1 - FLOOR) * max(0.0, (sparse_end - progress) / (sparse_end - DECAY_FROM))
    return {name: rate * (max(scale, 0.25) if name == "indexer" and not stage.own_text else scale)
            for name, rate in RATES.items()}


def load_tokens(folder: Path, device: torch.device) -> Tensor:
    """The whole training stream as int32 on the device."""
    with ProcessPoolExecutor(8) as pool:
        chunks = list(pool.map(read_chunk, sorted(folder.glob("train-*.xz"))))
    return torch.from_numpy(np.concatenate(chunks).astype(np.int32)).to(device)


def on_host(record: dict[str, Any]) -> dict[str, Any]:
    """A step's values as numbers."""
    loads = [(x.float() / x.float().mean()) for x in record["loads"]]
    extra = {k: round(float(record[k]), 4) for k in ("loops", "loop_share", "loop_weight") if k in record}
    return {"loss": round(float(record["loss"]), 4), **extra, "mtp": [round(float(x), 4) for x in record["mtp"]],
            "index": [round(float(x), 4) for x in record["index"]],
            "load_max": [round(float(x.max()), 2) for x in loads],
            "load_min": [round(float(x.min()), 2) for x in loads]}


def run(trainer: Trainer, minutes: float, out: Path, max_steps: int | None, stages: tuple[Stage, ...],
        start_share: float) -> None:
    """Runs the stages against the clock (or `max_steps` steps each), logging to OUT/train.jsonl."""
    begin, number, last = time.monotonic(), 0, None
    on_gpu = trainer.device.type == "cuda"
    log = open(out / "train.jsonl", "w", buffering=1)  # noqa: SIM115 (line-buffered for the whole run)
    for stage in stages:
        trainer.start(stage)
        in_stage, clock, tokens = 0, time.monotonic(), trainer.tokens_seen
        while True:
            progress = start_share + (time.monotonic() - begin) / (60 * minutes)
            if (progress >= stage.until) if max_steps is None else (in_stage >= max_steps):
                break
            rates = rates_at(progress, stage)
            bias_rate = BIAS_RATE * min(1.0, rates["matrices"] / RATES["matrices"] * 2)
            record = trainer.step(stage, number, rates, bias_rate)
            if on_gpu:
                event = torch.cuda.Event()
                event.record()
                if last is not None:
                    last.synchronize()
                last = event
            if in_stage < 3 or number % 20 == 0:
                now = time.monotonic()
                speed = (trainer.tokens_seen - tokens) / max(now - clock, 1e-9)
                clock, tokens = now, trainer.tokens_seen
                line = {"step": number, "stage": stage.name, "seconds": round(now - begin, 1),
                        "tokens": trainer.tokens_seen, "epochs": trainer.windows.epochs,
                        "tokens_per_s": round(speed), "rate": round(rates["matrices"], 6), **on_host(record)}
                log.write(json.dumps(line) + "\n")
                if not math.isfinite(line["loss"]):
                    raise RuntimeError(f"the loss is {line['loss']} at step {number}")
            number, in_stage = number + 1, in_stage + 1
        torch.save(trainer.model.state_dict(), out / f"{stage.name}.pt")
    log.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=11.0)
    parser.add_argument("--rows", type=int, default=131072, help="tokens per step")
    parser.add_argument("--attention", choices=("flex", "sdpa"), default="flex", help="sparse attention on the GPU")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--max-steps", type=int, help="steps per stage instead of the clock (for checks)")
    parser.add_argument("--resume", type=Path, help="BF16 folder to start from")
    parser.add_argument("--stages", nargs="+", help="names of the stages to run (all)")
    parser.add_argument("--start-share", type=float, default=0.0, help="share of the schedule taken as passed")
    parser.add_argument("--tiny", action="store_true", help="toy lengths, for checks on a CPU")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model_module.compile_enabled = device.type == "cuda" and not args.no_compile
    torch._dynamo.config.cache_size_limit = 64
    begin = time.monotonic()
    config, stages = ModelConfig(), STAGES
    if args.tiny:
        config = ModelConfig(index_topk=16)
        stages = tuple(Stage(**{**s.__dict__, "length": s.length // 32}) for s in STAGES)
    if args.stages:
        stages = tuple(s for s in stages if s.name in args.stages)
    model = Model(config).to(device)
    if args.resume:
        read_checkpoint(model, args.resume)
    windows = Windows(load_tokens(args.data, device), args.seed)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    trainer = Trainer(model, windows, args.rows, dtype, args.attention)
    setup = {"parameters": trainable(model), "stream_tokens": len(windows.tokens), "documents": len(windows.starts),
             "setup_seconds": round(time.monotonic() - begin, 1), "torch": torch.__version__,
             "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "args": vars(args)}
    (args.out / "setup.json").write_text(json.dumps(setup, default=str) + "\n")
    print(json.dumps(setup, default=str), flush=True)
    if args.tiny:
        trainer.own_length, trainer.own_prompt, trainer.own_rows = 32, 8, 32
    run(trainer, args.minutes, args.out, args.max_steps, stages, args.start_share)
    write_checkpoint(model, args.out / "bf16", args.tokenizer)
    print(json.dumps({"tokens": trainer.tokens_seen, "seconds": round(time.monotonic() - begin, 1)}), flush=True)


if __name__ == "__main__":
    main()
