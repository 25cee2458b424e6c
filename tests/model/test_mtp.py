"""The MTP layer against transformers' decoder layer: draft-extend, the chain on the reused selection, and later rounds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from legato.config import CacheConfig, Config, ExecutionConfig, ScheduleConfig, resolve
from legato.model.checkpoint import Checkpoint
from legato.model.inventory import stored_spec
from legato.model.weights import Residency, load_weights
from legato.plan import Admit, Extend, Plan
from legato.runtime.batch import build_batch
from legato.runtime.draw import BestDraw, PlainDraw, choose_greedy
from legato.runtime.rows import Rows
from legato.runtime.runner import Runner
from tests.tiny import save_checkpoint, tiny_config, tiny_tensors

K = 5
EPS = 1e-5
MTP = "model.layers.7."


class Oracle:
    """transformers' decoder layer with the MTP layer's weights, and the formulas around it."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        # Here: every process that collects tests would import it.
        modeling = pytest.importorskip("transformers.models.glm_moe_dsa.modeling_glm_moe_dsa")
        raw = tiny_config()
        raw["num_hidden_layers"] += 1
        raw["indexer_types"] = [*raw["indexer_types"], "full"]
        raw["mlp_layer_types"] = ["dense"] * 2 + ["sparse"] * 6
        self.config = modeling.GlmMoeDsaConfig(**{k: v for k, v in raw.items() if k != "architectures"})
        self.config._attn_implementation = self.config._experts_implementation = "eager"
        self.layer = modeling.GlmMoeDsaDecoderLayer(self.config, 7).eval().float()
        self.rotary = modeling.GlmMoeDsaRotaryEmbedding(config=self.config)
        self.tensors = {name: tensor.float() for name, tensor in tensors.items()}
        own = {name[len(MTP) :]: t for name, t in self.tensors.items() if name.startswith(MTP)}
        experts = range(raw["n_routed_experts"])
        state = {name: t for name, t in own.items() if "experts." not in name or "shared" in name}
        for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"):
            state.pop(name)
        part = {p: [own[f"mlp.experts.{e}.{p}_proj.weight"] for e in experts] for p in ("gate", "up", "down")}
        pairs = zip(part["gate"], part["up"], strict=True)
        state["mlp.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        state["mlp.experts.down_proj"] = torch.stack(part["down"])
        self.layer.load_state_dict(state)
        self.layer.self_attn.q_a_layernorm.variance_epsilon = EPS
        self.layer.self_attn.kv_a_layernorm.variance_epsilon = EPS
        self.indexer = self.layer.self_attn.indexer

    def norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.tensors[MTP + name]
        return rms_norm(x, weight.shape, weight, EPS)

    def inputs(self, token: Tensor, hidden: Tensor, position: Tensor) -> Tensor:
        e = self.tensors["model.embed_tokens.weight"][token] * (position > 0)[:, None]
        pair = torch.cat((self.norm(e, "enorm.weight"), self.norm(hidden, "hnorm.weight")), -1)
        return pair @ self.tensors[MTP + "eh_proj.weight"].T

    def run(self, u: Tensor, position: Tensor, reuse: Tensor | None) -> tuple[Tensor, Tensor]:
        """Rows u at their positions; row i sees rows <= i, or exactly `reuse` (indices) if given. -> normed output, indices."""
        count = len(u)
        mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        self.layer.self_attn.indexer = self.indexer if reuse is None else None
        cos_sin = self.rotary(u[None], position_ids=position[None])
        out, indices = self.layer(u[None], attention_mask=mask, position_embeddings=cos_sin, prev_topk_indices=reuse)
        return self.norm(out[0], "shared_head.norm.weight"), indices

    @torch.no_grad()
    def drafts(self, ids: list[int], hidden: Tensor) -> Tensor:
        """Logits of the K drafts after `ids` (the last of which has not been run), from post-norm target hiddens of the rest."""
        n = len(ids) - 1
        position = torch.arange(n)
        u = self.inputs(torch.tensor(ids[1:]), hidden, position)
        extended, indices = self.run(u, position, None)
        seen = indices[:, -1:]
        seen = torch.where(seen < n, seen, seen.amin())  # fewer visible keys than k: the padding points at nothing new
        logits, state = [extended[-1] @ self.tensors["lm_head.weight"].T], extended[-1:]
        for step in range(1, K):
            at = torch.tensor([n - 1 + step])
            row = self.inputs(logits[-1].argmax().view(1), state, at)
            reuse = seen.expand(1, n + 1, -1)
            state = self.run(torch.cat((u, row)), torch.cat((position, at)), reuse)[0][-1:]
            logits.append(state[0] @ self.tensors["lm_head.weight"].T)
        return torch.stack(logits)


class Recorder:
    """A greedy draw that keeps the logits it was shown."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def __call__(self, logits: Tensor, rows: Rows, device_rows: Tensor, positions: Tensor) -> Tensor:
        self.seen.append(logits.clone())
        return logits.argmax(-1)


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return tiny_tensors(tiny_config(), seed=3)


@pytest.fixture(scope="module")
def oracle(tensors: dict[str, Tensor]) -> Oracle:
    return Oracle(tensors)


@pytest.fixture
def runner(tensors: dict[str, Tensor], tmp_path: Path) -> Runner:
    save_checkpoint(tmp_path, tiny_config(), tensors)
    checkpoint = Checkpoint.open(tmp_path)
    spec = stored_spec(checkpoint)
    weights = load_weights(checkpoint, spec, device="cpu", dtype=torch.float32, resident=Residency.DENSE)
    config = Config(
        cache=CacheConfig(latent="float32", index="float32", tokens=4096),
        schedule=ScheduleConfig(max_running=4),
        execution=ExecutionConfig(device="cpu"),
    )
    settings = resolve(config, max_position=spec.max_position, has_mtp=True, cuda_available=False)
    return Runner(spec, weights, replace(settings, num_drafts=K))


@torch.inference_mode()
def iterate(runner: Runner, plan: Plan) -> list[Tensor]:
    """Runs one iteration and returns the draft logits, one tensor [B, W] per draft."""
    draw = Recorder()
    batch = build_batch(replace(plan, num_drafts=K), runner.rows, runner.spec)
    runner.iteration.run(batch, runner.rows, PlainDraw(draw), K)
    return draw.seen[1:]


@torch.inference_mode()
def target_hidden(runner: Runner, ids: list[int], row: int) -> Tensor:
    """Post-norm hiddens of a text, computed afresh in another row."""
    runner.rows.admit(Admit(row, tuple(range(40, 40 + len(ids) // 64 + 1)), 512, (), 0.0, 0, 1.0, 0.0, 0, -1))
    batch = build_batch(Plan(0, (), (Extend(row, 0, tuple(ids), 0),), ()), runner.rows, runner.spec)
    return runner.iteration.target.hidden(batch.ids, batch.step, runner.iteration.caches)


@torch.inference_mode()
def test_the_best_tokens_alone_are_those_of_the_logits(runner: Runner) -> None:
    runner.rows.admit(Admit(1, (1, 2, 3), 190, (), 0.0, 0, 1.0, 0.0, 0, -1))
    plan = Plan(0, (), (Extend(1, 0, tuple(range(70)), None),), (), num_drafts=K)
    made = [
        runner.iteration.run(build_batch(plan, runner.rows, runner.spec), runner.rows, draw, K)[1]
        for draw in (PlainDraw(choose_greedy), BestDraw())
    ]
    assert made[0] is not None and made[0].logits is not None and made[1] is not None and made[1].logits is None
    assert torch.equal(made[0].sampled, made[1].sampled) and torch.equal(made[0].drafts, made[1].drafts)


@pytest.mark.parametrize("length", [2, 8, 9, 63, 64, 65, 150])
def test_chain_from_a_prompt(runner: Runner, oracle: Oracle, length: int) -> None:
    """Shorter than `index_topk`, equal, and far beyond it; in chunks, whose last rows take the known next token."""
    ids = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    runner.rows.admit(Admit(1, (1, 2, 3), 190, (), 0.0, 0, 1.0, 0.0, 0, -1))
    middle = length // 2
    if middle:
        iterate(runner, Plan(0, (), (Extend(1, 0, tuple(ids[:middle]), ids[middle]),), ()))
    drafted = iterate(runner, Plan(1, (), (Extend(1, middle, tuple(ids[middle:]), None),), ()))
    first = int(runner.rows.tokens[1, 0])
    expected = oracle.drafts([*ids, first], target_hidden(runner, ids, 2))
    assert (torch.cat(drafted) - expected).abs().max().item() <= 1e-4
    assert runner.rows.tokens[1, 1 : K + 1].tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("accepted", range(K + 1))
def test_later_rounds_read_only_accepted_rows(runner: Runner, oracle: Oracle, accepted: int) -> None:
    """The target is made to accept exactly `accepted` drafts; the next chain must equal one from the accepted text alone."""
    ids = torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(9)).tolist()
    rows = runner.rows
    rows.admit(Admit(1, (1, 2, 3), 190, (), 0.0, 0, 1.0, 0.0, 0, -1))
    iterate(runner, Plan(0, (), (Extend(1, 0, tuple(ids), None),), ()))
    text = [*ids, int(rows.tokens[1, 0])]
    for _ in range(2):
        # The drafts are replaced by the target's own continuation, wrong from the chosen depth on.
        truth = _greedy(runner, text, K)
        wrong = [(token + 1) % 256 for token in truth]
        rows.tokens[1, 1 : K + 1] = torch.tensor(truth[:accepted] + wrong[accepted:])
        drafted = iterate(runner, Plan(1, (), (), (1,)))
        text = [*text, *truth[:accepted], int(rows.tokens[1, 0])]
        assert int(rows.lengths[1]) == len(text) - 1
        expected = oracle.drafts(text, target_hidden(runner, text[:-1], 2))
        assert (torch.cat(drafted) - expected).abs().max().item() <= 1e-4


@torch.inference_mode()
def _greedy(runner: Runner, text: list[int], count: int) -> list[int]:
    text = list(text)
    for _ in range(count):
        hidden = target_hidden(runner, text, 3)
        text.append(int(runner.iteration.target.logits(hidden[-1:]).argmax()))
    return text[-count:]
