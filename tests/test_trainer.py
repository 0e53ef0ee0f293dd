"""The laws of trainer.py, in the order of the file: from rewards to a gradient, from a gradient to a run, and back from a disk.

Each is held against a truth that owes nothing to the code under test. For the gradient that truth is `plain_gradient`: one
row and one token at a time, in float64, through transformers' own forward pass, with the clip written as an `if`. It has no
padding, no batches and no tricks, and what the trainer computes with all of those must be the same.
"""

from __future__ import annotations

import asyncio
import copy
import doctest
import faulthandler
import gc
import io
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from safetensors.torch import load
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
)

import trainer as module
from one_step_off import Ragged, RolloutBatch
from trainer import (
    GroupPool,
    GRPOTrainer,
    Parts,
    Timeline,
    compute_grpo_advantages,
    compute_log_probs,
    fit_one_step_off,
    fit_partial,
    fit_sync,
    kl_k3,
    load_checkpoint,
    load_policy,
    micro_batches,
    newest_checkpoint,
    policy_loss,
    save_checkpoint,
    shard,
    spread,
    step_times,
)

torch.set_num_threads(1)
VOCABULARY = 17


# ---- Two small policies and a batch ----------------------------------------------------------------------------------


@cache
def _llama(seed: int, tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.4,  # of the usual 0.02 all tokens would be equally likely
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def tiny_llama(seed: int = 0, *, tied: bool = False) -> LlamaForCausalLM:
    """A new copy of a Llama of 5,000 random parameters. Its pad token is its EOS token: 0, as in many a real model."""
    return copy.deepcopy(_llama(seed, tied))


class Bigram(nn.Module):
    """A language model of one table, which answers to the three names that the trainer asks a model for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)

    @property
    def base_model(self) -> Callable:
        return lambda input_ids, use_cache: SimpleNamespace(last_hidden_state=self.hidden(self.embed(input_ids)))

    def hidden(self, embedded: Tensor) -> Tensor:
        return embedded

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def make_batch(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    rewards: Sequence[float] | None = None,
    group: Sequence[int] | None = None,
    mask: Sequence[Sequence[int]] | None = None,
    logprobs: Sequence[Sequence[float]] | None = None,
) -> RolloutBatch:
    """Rollouts as they come back from the workers: groups of two, every other answer right, samples named a, b, c ..."""
    n = len(prompts)
    return RolloutBatch(
        {
            "uid": [chr(ord("a") + i) for i in range(n)],
            "group": group if group is not None else [i // 2 for i in range(n)],
            "rewards": np.array(rewards if rewards is not None else [i % 2 for i in range(n)], float),
            "prompt_ids": Ragged.pack(prompts, np.int32),
            "response_ids": Ragged.pack(responses, np.int32),
            "response_mask": Ragged.pack(mask or [[1] * len(r) for r in responses], np.int8),
            "response_logprobs": Ragged.pack(logprobs or [[-2.0] * len(r) for r in responses], np.float32),
            "span_versions": Ragged.pack([[0]] * n, np.int32),
            "span_lengths": Ragged.pack([[len(r)] for r in responses], np.int32),
        },
        {"timing": {"generate_s": 0.0}},
    )


def random_batch(
    seed: int, shape: Sequence[tuple[int, int]] = ((3, 4), (1, 6), (2, 0), (5, 3)), group_size: int = 2
) -> RolloutBatch:
    """A batch of (prompt length, response length) rows with random tokens, rewards, masks and sampler's log-probabilities.

    Some masked tokens carry nan or inf: what stands there was not sampled, and may be anything.
    """
    rng = np.random.default_rng(seed)
    mask = [(rng.random(response) < 0.8).astype(int).tolist() for _, response in shape]
    return make_batch(
        [rng.integers(0, VOCABULARY, prompt).tolist() for prompt, _ in shape],
        [rng.integers(0, VOCABULARY, response).tolist() for _, response in shape],
        rewards=rng.choice([0.0, 0.25, 1.0], len(shape)).tolist(),
        group=[i // group_size for i in range(len(shape))],
        mask=mask,
        logprobs=[[rng.uniform(-6, 0) if m else rng.choice([np.nan, np.inf, -np.inf, -1.0]) for m in row] for row in mask],
    )


@st.composite
def ragged_batches(draw: st.DrawFn) -> RolloutBatch:
    """Groups of two or three rows; prompts of 1 to 6 tokens, responses of 0 to 6."""
    group_size = draw(st.integers(2, 3))
    rows = group_size * draw(st.integers(1, 3))
    shape = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=rows, max_size=rows))
    return random_batch(draw(st.integers(0, 2**32 - 1)), shape, group_size)


# ---- The truth: one row and one token at a time ----------------------------------------------------------------------


def plain_advantages(rewards: Sequence[float], groups: Sequence[Any], by_std: bool = True) -> list[float]:
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        mine = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if all(r == mine[0] for r in mine):
            result.append(0.0)
        else:
            result.append((reward - statistics.fmean(mine)) / (statistics.stdev(mine) + 1e-6 if by_std else 1.0))
    return result


def plain_log_probs(model: nn.Module, prompt: np.ndarray, response: np.ndarray, temperature: float) -> list[Tensor]:
    """Of each response token, one sequence at a time, from transformers' own logits."""
    ids = torch.tensor([[*prompt.tolist(), *response.tolist()]])
    log_probs = (model(input_ids=ids).logits[0] / temperature).log_softmax(-1)
    return [log_probs[len(prompt) - 1 + k, token] for k, token in enumerate(response.tolist())]


def plain_gradient(
    trainer: GRPOTrainer,
    batch: RolloutBatch,
    model: nn.Module | None = None,
    old_log_probs: dict[str, list[float]] | None = None,
    rows: Sequence[int] | None = None,
) -> dict[str, Tensor]:
    """The gradient of one optimiser step on `rows`, in float64, with the settings of `trainer`.

    `model` is that of the trainer unless given. `old_log_probs`, by uid, is the proximal policy of a decoupled update;
    without it that is the model itself.
    """
    model = copy.deepcopy(trainer.model).double() if model is None else model
    reference = copy.deepcopy(trainer.reference).double() if trainer.kl_coef else None
    advantages = plain_advantages(batch["rewards"].tolist(), batch["group"].tolist(), trainer.normalize_by_std)
    rows = range(len(batch)) if rows is None else rows
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for i in rows:
        row, advantage = batch[i], advantages[i]
        log_probs = plain_log_probs(model, row["prompt_ids"], row["response_ids"], trainer.temperature)
        for k, now in enumerate(log_probs):
            if not row["response_mask"][k]:
                continue
            tokens += 1
            sampled = float(row["response_logprobs"][k])
            if trainer.importance == "bypass":
                old, weight = sampled, 1.0
            else:
                old = old_log_probs[row["uid"]][k] if old_log_probs else now.item()
                weight = min(math.exp(old - sampled), trainer.tis_cap)
            ratio = (now - old).exp()
            if advantage > 0 and ratio > 1 + trainer.clip_high:
                gain = advantage * (1 + trainer.clip_high)  # a number: no gradient
            elif advantage < 0 and ratio < 1 - trainer.clip_low:
                gain = advantage * (1 - trainer.clip_low)
            else:
                gain = advantage * ratio
            total = total - weight * gain
            if reference is not None:
                there = plain_log_probs(reference, row["prompt_ids"], row["response_ids"], trainer.temperature)[k].detach()
                total = total + trainer.kl_coef * ((there - now).exp() - (there - now) - 1)
    divisor = max(tokens, 1) if trainer.loss_aggregation == "token-mean" else len(rows) * trainer.response_length
    names, parameters = zip(*model.named_parameters(), strict=True)
    if not total.requires_grad:
        return {name: torch.zeros_like(p) for name, p in zip(names, parameters, strict=True)}
    grads = torch.autograd.grad(total / divisor, parameters, allow_unused=True, materialize_grads=True)
    return dict(zip(names, grads, strict=True))


def measuring(model: nn.Module, **knobs: Any) -> GRPOTrainer:
    """A trainer that leaves its weights and its gradient as they are, so that `p.grad` after `update` is what it computed."""
    return GRPOTrainer(model, **{"learning_rate": 0.0, "max_grad_norm": 1e9, **knobs})


def gradient(trainer: GRPOTrainer) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trainer.model.named_parameters()}


def assert_same_gradient(got: dict[str, Tensor], truth: dict[str, Tensor], rtol: float = 1e-4) -> None:
    """Within float32 rounding of the *largest* entry: a small one may be the difference of two large ones."""
    scale = max(float(g.abs().max()) for g in truth.values())
    for name, g in got.items():
        torch.testing.assert_close(
            g.double(), truth[name].double(), rtol=rtol, atol=rtol * scale / 10 + 1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def weights_of(trainer: GRPOTrainer) -> list[Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


# ---- 1. Advantages ---------------------------------------------------------------------------------------------------

REWARDS = st.floats(-100, 100, width=32)


@given(st.lists(st.lists(REWARDS, min_size=2, max_size=6), min_size=1, max_size=4), st.booleans())
@settings(max_examples=100, deadline=None)
@example([[1.0, 0.0, 0.0, 0.0]], True)
@example([[1.0, 1.0 + 2**-20]], True)
def test_advantages_are_those_of_a_plain_loop_and_sum_to_zero_in_each_group(groups: list[list[float]], by_std: bool) -> None:
    """A_i = (r_i - mean) / (std + epsilon) over the group; without the division in Dr. GRPO. The group's mean is then zero."""
    rewards = [reward for group in groups for reward in group]
    labels = [g for g, group in enumerate(groups) for _ in group]
    advantages = compute_grpo_advantages(rewards, labels, normalize_by_std=by_std)
    np.testing.assert_allclose(advantages, plain_advantages(rewards, labels, by_std), rtol=1e-6, atol=1e-9)
    for g in range(len(groups)):
        assert abs(advantages[np.array(labels) == g].sum()) < 1e-9


@given(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(2, 9), st.booleans())
@example(np.float32(0.7), 7, True)
@example(np.float32(0.7), 7, False)
@settings(max_examples=50, deadline=None)
def test_equal_rewards_give_exactly_zero(reward: float, n: int, by_std: bool) -> None:
    """A group without spread teaches nothing. The float32 mean of seven 0.7 is not 0.7, and the rest is divided by epsilon."""
    advantages = compute_grpo_advantages(np.full(n, reward, np.float32), [0] * n, normalize_by_std=by_std)
    assert advantages.tolist() == [0.0] * n


@given(st.lists(REWARDS, min_size=6, max_size=6), st.permutations(range(6)), st.booleans())
@settings(max_examples=50, deadline=None)
def test_permuting_the_samples_permutes_the_advantages(rewards: list[float], order: list[int], by_std: bool) -> None:
    """The place of a sample in the batch, or of its group's other members, says nothing about it."""
    labels = ["x", "y", "x", "y", "y", "x"]
    straight = compute_grpo_advantages(rewards, labels, normalize_by_std=by_std)
    permuted = compute_grpo_advantages([rewards[i] for i in order], [labels[i] for i in order], normalize_by_std=by_std)
    np.testing.assert_allclose(permuted, straight[order], rtol=1e-9, atol=1e-9)


def test_a_group_label_may_be_anything_hashable() -> None:
    """(problem, attempt) is a label like any other; two of them make two groups."""
    labels = [("p", 1), ("p", 1), ("p", 2), ("p", 2)]
    assert compute_grpo_advantages([1, 0, 4, 0], labels, normalize_by_std=False).tolist() == [0.5, -0.5, 2.0, -2.0]


def test_a_group_of_one_is_refused() -> None:
    """Its advantage over itself would always be zero: a mistake in the set-up, not a batch to train on."""
    with pytest.raises(ValueError, match="group b has one response"):
        compute_grpo_advantages([1, 0, 1], ["a", "a", "b"])


def test_an_incomplete_group_is_refused() -> None:
    """A mean over those who came back first is a mean over the short answers."""
    with pytest.raises(ValueError, match="group 1 has 2 of 3 responses"):
        compute_grpo_advantages([1, 0, 0, 1, 0], [0, 0, 0, 1, 1], group_size=3)
    with pytest.raises(ValueError, match="group 0 has 2 of 3 responses"):
        measuring(tiny_llama(), group_size=3).update(random_batch(0))
    with pytest.raises(ValueError, match="group 0 has 4 responses, and not 2: do two prompts share the label"):
        compute_grpo_advantages([1, 0, 0, 1], [0, 0, 0, 0], group_size=2)


# ---- 2. Micro-batches ------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 400))
@settings(max_examples=150, deadline=None)
@example([5, 400, 5], 10)
def test_micro_batches_hold_each_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    """Each row stands in one micro-batch, and none is over budget after padding, save a row that is so on its own."""
    batches = micro_batches(lengths, budget)
    assert sorted(i for rows in batches for i in rows) == list(range(len(lengths)))
    for rows in batches:
        assert len(rows) * max(lengths[i] for i in rows) <= budget or len(rows) == 1


@given(st.lists(st.integers(1, 300), min_size=1, max_size=200), st.integers(1, 4000))
@settings(max_examples=150, deadline=None)
@example([60, 70, 90, 130, 400, 420], 8192)  # sorting alone would pad a third of them
@example([100, 90, 89], 300)
def test_at_most_a_tenth_of_what_is_computed_is_padding(lengths: list[int], budget: int) -> None:
    """In each micro-batch, whatever the lengths and the budget; and none is cut while there is room for the next row."""
    batches = micro_batches(lengths, budget)
    longest, tokens = ([f(lengths[i] for i in rows) for rows in batches] for f in (max, sum))
    for rows, most, inside in zip(batches, longest, tokens, strict=True):
        assert inside >= 0.9 * most * len(rows) - 1e-9
    for k in range(len(batches) - 1):
        padded = longest[k] * (len(batches[k]) + 1)
        assert padded > budget or tokens[k] + longest[k + 1] < 0.9 * padded + 1e-9, "the next one is the longest of the rest"


# ---- 3. Log-probabilities --------------------------------------------------------------------------------------------

ROWS = st.lists(
    st.tuples(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6),
        st.lists(st.integers(0, VOCABULARY - 1), max_size=6),
    ),
    min_size=1,
    max_size=5,
)


@given(ROWS, st.sampled_from([0.5, 1.0, 1.7]), st.sampled_from([1, 4, 10**6]))
@settings(max_examples=40, deadline=None)
@example([([0], [0, 0]), ([0, 0, 0], [0])], 1.0, 1)  # pad = eos = 0 everywhere
@example([([3], []), ([4], [5])], 1.0, 4)
def test_log_probs_are_those_of_transformers_at_the_temperature(rows: list, temperature: float, at_once: int) -> None:
    """log_softmax(logits / T) of each response token, and its gradient, in chunks of any size (`at_once` tokens here)."""
    prompts, responses = [[np.array(row[j], np.int32) for row in rows] for j in (0, 1)]
    model, truth = _llama(0, False), tiny_llama().double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LOGITS_AT_ONCE", at_once * VOCABULARY)
        got = compute_log_probs(model, prompts, responses, temperature)
        expected = [x for p, r in zip(prompts, responses, strict=True) for x in plain_log_probs(truth, p, r, temperature)]
        assert (got.dtype, got.shape) == (torch.float32, (len(expected),))
        if not expected:
            return
        expected = torch.stack(expected)
        torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)
        weights = torch.linspace(-1, 2, len(expected))  # a gradient that tells the tokens apart
        ours = torch.autograd.grad((got * weights).sum(), list(model.parameters()))
        theirs = torch.autograd.grad((expected * weights).sum(), list(truth.parameters()))
    names = [name for name, _ in model.named_parameters()]
    assert_same_gradient(dict(zip(names, ours, strict=True)), dict(zip(names, theirs, strict=True)))


def test_an_empty_prompt_is_refused() -> None:
    """Nothing predicts the first token then."""
    with pytest.raises(ValueError, match="empty prompt"):
        compute_log_probs(tiny_llama(), [np.array([], np.int32)], [np.array([1], np.int32)])


def test_prompt_tokens_get_no_logits() -> None:
    """The head, which is vocabulary times as wide as anything else, sees the response tokens and nothing more."""
    model, seen = tiny_llama(), []
    model.lm_head.register_forward_hook(lambda head, args, logits: seen.append(tuple(logits.shape)))
    compute_log_probs(model, [np.arange(9), np.arange(1, 4)], [np.arange(2), np.arange(5)])
    assert seen == [(2 + 5, VOCABULARY)]


def test_in_chunks_no_logits_are_kept_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk exists at a time, and is computed again when its gradient is due: tokens x vocabulary is never held whole."""

    def logits_kept() -> list[tuple[int, ...]]:
        kept: list[tuple[int, ...]] = []
        model = tiny_llama()
        note = lambda t: kept.append(tuple(t.shape)) or t  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            compute_log_probs(model, [np.arange(3)] * 4, [np.arange(10)] * 4)
        return [shape for shape in kept if len(shape) == 2 and shape[1] == VOCABULARY]

    assert (40, VOCABULARY) in logits_kept()  # all at once: the test can see them
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 8 * VOCABULARY)
    assert logits_kept() == []


def sampled_by_transformers(model: LlamaForCausalLM, temperature: float, rows: int = 8) -> RolloutBatch:
    """Rollouts sampled by `generate`, with the log-probabilities that it sampled from."""
    torch.manual_seed(1)
    prompts = torch.randint(1, VOCABULARY, (rows, 4))
    out = model.generate(
        prompts,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        max_new_tokens=6,
        eos_token_id=VOCABULARY,  # one that never comes: all rows are full
        output_scores=True,
        return_dict_in_generate=True,
    )
    responses = out.sequences[:, 4:]
    log_probs = torch.stack(out.scores, dim=1).log_softmax(-1).gather(2, responses.unsqueeze(2)).squeeze(2)
    return make_batch(prompts.tolist(), responses.tolist(), logprobs=log_probs.tolist())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_on_unchanged_weights_the_ratio_to_the_sampler_is_one(temperature: float) -> None:
    """What the trainer computes for a token is what it was sampled with; otherwise every batch would pass for a stale one."""
    model = tiny_llama()
    metrics = measuring(model, temperature=temperature).update(sampled_by_transformers(model, temperature))
    assert abs(metrics["sampler_ratio"] - 1) < 1e-3
    assert metrics["abs_log_ratio"] < 1e-3
    assert metrics["clip_frac"] == 0


def test_on_changed_weights_the_correction_is_on() -> None:
    """The batch a step late: the log ratio leaves zero, the clip acts, and a wider clip acts less."""
    clip_frac = {}
    for clip in (0.05, 0.2, 5.0):
        trainer = GRPOTrainer(tiny_llama(), learning_rate=0.01, clip_low=min(clip, 0.9), clip_high=clip)
        rollouts = sampled_by_transformers(trainer.model, 1.0)
        trainer.update(rollouts)
        metrics = trainer.update(rollouts)
        assert metrics["abs_log_ratio"] > 0.01
        assert metrics["staleness/mean"] == metrics["staleness/max"] == 1
        clip_frac[clip] = metrics["clip_frac"]
    assert clip_frac[0.05] > clip_frac[0.2] > clip_frac[5.0]


# ---- 4. The loss -----------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-5, 0), min_size=1, max_size=8), st.data())
@settings(max_examples=30, deadline=None)
def test_at_ratio_one_the_gradient_is_that_of_reinforce(log_probs: list[float], data: st.DataObject) -> None:
    """d loss / d log_prob = -A where the sampling policy is the current one, on the edge of a clip of no width too."""
    advantages = data.draw(st.lists(st.floats(-3, 3), min_size=len(log_probs), max_size=len(log_probs)))
    clip = data.draw(st.sampled_from([0.0, 0.2]))
    now = torch.tensor(log_probs, requires_grad=True)
    loss, ratio, clipped = policy_loss(now, now.detach(), torch.tensor(advantages), clip_low=clip, clip_high=clip)
    loss.sum().backward()
    torch.testing.assert_close(now.grad, -torch.tensor(advantages))
    assert ratio.tolist() == [1.0] * len(log_probs) and not clipped.any()


@given(st.floats(-3, 3), st.integers(-3, 3), st.floats(0, 0.99), st.floats(0, 3))
@settings(max_examples=200, deadline=None)
@example(0.5, 1, 0.2, 0.2)  # up, and good: clipped
@example(0.5, -1, 0.2, 0.2)  # up, and bad: free to come down
@example(-0.5, -1, 0.2, 0.2)  # down, and bad: clipped
@example(-0.5, 1, 0.2, 0.2)  # down, and good: free to come up
@example(0.25, 1, 0.2, 0.28)  # e^0.25 = 1.284: over 1.28, so clip-higher clips it too
@example(0.24, 1, 0.2, 0.28)  # e^0.24 = 1.271: clip-higher lets it pass
def test_the_clip_acts_on_both_sides_each_with_its_bound(log_ratio: float, advantage: int, low: float, high: float) -> None:
    """A good token gains up to ratio 1 + clip_high, a bad one loses down to 1 - clip_low; beyond, no gradient."""
    ratio = math.exp(log_ratio)
    assume(min(abs(ratio - (1 + high)), abs(ratio - (1 - low))) > 1e-9)  # on the edge itself the last bit of exp decides
    if advantage > 0 and ratio > 1 + high:
        value, slope, clips = -advantage * (1 + high), 0.0, True
    elif advantage < 0 and ratio < 1 - low:
        value, slope, clips = -advantage * (1 - low), 0.0, True
    else:
        value, slope, clips = -advantage * ratio, -advantage * ratio, False
    now = torch.tensor([log_ratio - 1], dtype=torch.float64, requires_grad=True)
    old, A = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    loss, _, clipped = policy_loss(now, old, A, clip_low=low, clip_high=high)
    loss.sum().backward()
    assert loss.item() == pytest.approx(value, rel=1e-9, abs=1e-9)
    assert now.grad.item() == pytest.approx(slope, rel=1e-9, abs=1e-9)
    assert clipped.item() == clips


@pytest.mark.parametrize("advantage", [-1e3, -1.0, 0.0, 1.0, 1e3])
@pytest.mark.parametrize("log_ratio", [-100.0, 100.0])
def test_a_log_ratio_of_a_hundred_stays_finite(log_ratio: float, advantage: float) -> None:
    """e^100 is over float32's range. One token that the policy has become sure of must not end the run."""
    now = torch.tensor([log_ratio - 1], requires_grad=True)
    loss, ratio, _ = policy_loss(now, torch.tensor([-1.0]), torch.tensor([advantage]))
    loss.sum().backward()
    assert torch.isfinite(loss).all() and torch.isfinite(ratio).all() and torch.isfinite(now.grad).all()


@given(st.lists(st.floats(-3, 3), min_size=4, max_size=4), st.lists(st.floats(-3, 3), min_size=4, max_size=4))
@settings(max_examples=30, deadline=None)
def test_k3_is_on_average_the_kl_divergence(policy_logits: list[float], reference_logits: list[float]) -> None:
    """The sum over tokens of p x k3 is KL(policy || reference), here as torch.distributions has it."""
    p, q = (torch.distributions.Categorical(logits=torch.tensor(x)) for x in (policy_logits, reference_logits))
    k3 = kl_k3(p.logits, q.logits)
    expected = torch.distributions.kl_divergence(p, q)
    torch.testing.assert_close((p.probs * k3).sum(), expected, rtol=1e-4, atol=1e-5)


@given(st.floats(-10, 0, width=32), st.floats(-10, 0, width=32))
@settings(max_examples=200, deadline=None)
@example(0.0, 4e-7)  # exp(d) - d - 1 is -6e-8 here: what is left is the rounding of three numbers near one
def test_k3_is_never_negative(now: float, reference: float) -> None:
    """Not even by a rounding error, for policies that are still close to each other."""
    assert kl_k3(torch.tensor([now]), torch.tensor([reference])).item() >= 0


# ---- 5. and 6. One update --------------------------------------------------------------------------------------------


@given(
    batch=ragged_batches(),
    order_seed=st.integers(0, 1000),
    micro_batch_tokens=st.integers(1, 60),
    knobs=st.fixed_dictionaries(
        {
            "importance": st.sampled_from(["bypass", "decoupled"]),
            "loss_aggregation": st.sampled_from(["token-mean", "dr-grpo"]),
            "normalize_by_std": st.booleans(),
            "temperature": st.sampled_from([0.8, 1.0]),
            "kl_coef": st.sampled_from([0.0, 0.3]),
            "clip_high": st.sampled_from([0.2, 0.5]),
        }
    ),
)
@settings(max_examples=30, deadline=None)
def test_the_gradient_is_that_of_a_plain_loop_however_the_batch_is_cut(
    batch: RolloutBatch, order_seed: int, micro_batch_tokens: int, knobs: dict[str, Any]
) -> None:
    """Micro-batches, padding and order are memory, not mathematics: any of them gives the gradient of a plain loop.

    The batches have empty responses, masked tokens (some of them nan or inf), and groups without spread.
    """
    trainer = measuring(
        _llama(0, False), reference=_llama(1, False), response_length=7, micro_batch_tokens=micro_batch_tokens, **knobs
    )
    truth = plain_gradient(trainer, batch)
    order = np.random.default_rng(order_seed).permutation(len(batch))
    trainer.update(batch[order])
    assert_same_gradient(gradient(trainer), truth)


@pytest.mark.parametrize("aggregation", ["token-mean", "dr-grpo"])
def test_masked_tokens_and_empty_responses_contribute_nothing_and_divide_nothing(aggregation: str) -> None:
    """The mean is over tokens that were sampled, so a tool's words, or a sample that never spoke, do not thin it out.

    In Dr. GRPO a response is divided by a constant; a masked token then leaves its response as long as it was.
    """
    logprobs = [[-1.0, -2.0], [-3.0, -1.5]]
    plain = make_batch([[1, 2], [3]], [[4, 5], [6, 7]], logprobs=logprobs)
    masked = make_batch(
        [[1, 2], [3]],
        [[4, 5, 9, 9], [6, 7, 8]],
        mask=[[1, 1, 0, 0], [1, 1, 0]],
        logprobs=[[*logprobs[0], float("nan"), float("inf")], [*logprobs[1], -50.0]],
    )
    trainer = measuring(tiny_llama(), loss_aggregation=aggregation)
    metrics = trainer.update(plain)
    expected = gradient(trainer)
    masked_metrics = trainer.update(masked)
    assert_same_gradient(gradient(trainer), expected)
    for name in ("policy_loss", "clip_frac", "approx_kl", "abs_log_ratio", "sampler_ratio", "grad_norm"):
        assert masked_metrics[name] == pytest.approx(metrics[name], rel=1e-4), name

    # Two more rows, one empty and one masked from end to end, in a group of their own, where one was right and one wrong.
    silent = make_batch(
        [[1, 2], [3], [2, 2], [2, 2]],
        [[4, 5], [6, 7], [], [1, 1]],
        mask=[[1, 1], [1, 1], [], [0, 0]],
        logprobs=[*logprobs, [], [float("nan")] * 2],
    )
    trainer.update(silent)
    # Dr. GRPO takes the mean over responses, and an empty one is a response: its divisor doubles with the rows.
    thinner = 1.0 if aggregation == "token-mean" else 0.5
    assert_same_gradient(gradient(trainer), {name: g * thinner for name, g in expected.items()})


@pytest.mark.parametrize("importance", ["bypass", "decoupled"])
def test_a_masked_log_probability_that_is_not_finite_leaves_every_gradient_finite(importance: str) -> None:
    """Zero times nan is nan, also in a backward pass behind a `where`: the nan has to go before it is computed with."""
    batch = make_batch(
        [[1], [2]], [[3, 4], [5, 6]], mask=[[1, 0], [0, 1]], logprobs=[[-1.0, float("nan")], [float("inf"), -1.0]]
    )
    trainer = measuring(tiny_llama(), importance=importance)
    metrics = trainer.update(batch)
    assert_same_gradient(gradient(trainer), plain_gradient(trainer, batch))
    assert all(math.isfinite(value) for value in metrics.values()), metrics


def test_a_batch_without_a_single_token_changes_nothing() -> None:
    """All responses empty: no loss, no step, and metrics that are numbers all the same."""
    trainer = GRPOTrainer(tiny_llama(), learning_rate=1.0)
    before = weights_of(trainer)
    metrics = trainer.update(make_batch([[1], [2]], [[], []]))
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(trainer), strict=True))
    assert metrics["grad_norm"] == 0 and all(math.isfinite(value) for value in metrics.values())
    with pytest.raises(ValueError, match="empty batch"):
        trainer.update(make_batch([], []))


@pytest.mark.parametrize("aggregation", ["token-mean", "dr-grpo"])
def test_a_decoupled_update_in_mini_batches_is_that_of_a_plain_loop(aggregation: str) -> None:
    """Two optimiser steps on one batch. The ratio's denominator is the policy from before the first; the sampler's
    log-probability enters as a weight, truncated at `tis_cap`. Bypass, on the same batch, does something else.
    """
    batch = random_batch(3, [(2, 5), (3, 4), (1, 6), (4, 3)]).with_columns(rewards=np.array([1.0, 0.0, 0.0, 1.0]))
    knobs = {"learning_rate": 0.01, "max_grad_norm": 1e9, "num_mini_batches": 2, "tis_cap": 1.5, "clip_high": 0.05}
    knobs |= {"loss_aggregation": aggregation, "response_length": 7}
    trainer = GRPOTrainer(tiny_llama(), importance="decoupled", **knobs)

    model = tiny_llama().double()
    old = {row["uid"]: [x.item() for x in plain_log_probs(model, row["prompt_ids"], row["response_ids"], 1.0)] for row in batch}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for rows in ([0, 1], [2, 3]):
        truth = plain_gradient(trainer, batch, model, old, rows)
        for name, p in model.named_parameters():
            p.grad = truth[name]
        optimizer.step()

    metrics = trainer.update(batch)
    assert_same_gradient(gradient(trainer), truth, rtol=2e-3)  # of the second step, after a first one in float32
    assert metrics["clip_frac"] > 0
    assert trainer.param_version == 1  # versions count batches: that is when weights go out

    bypass = GRPOTrainer(tiny_llama(), importance="bypass", **knobs)
    bypass.update(batch)
    with pytest.raises(AssertionError):
        assert_same_gradient(gradient(bypass), truth, rtol=2e-3)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_three_updates_are_those_of_adamw(weight_decay: float) -> None:
    """Gradients of a plain loop, clipped to their norm, into PyTorch's AdamW with PyTorch's betas, in float64: no weight decay
    unless it is asked for. The first step of Adam is the same whatever the betas, the later ones are not."""
    trainer = GRPOTrainer(tiny_llama(), learning_rate=0.01, max_grad_norm=0.01, weight_decay=weight_decay)
    model = tiny_llama().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.999), weight_decay=weight_decay)
    for seed in range(3):
        batch = random_batch(seed)
        for name, g in plain_gradient(trainer, batch, model).items():
            model.get_parameter(name).grad = g
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.01) > 0.01
        optimizer.step()
        trainer.update(batch)
    for p, truth in zip(trainer.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p.double(), truth, rtol=0, atol=2e-4)


def test_metrics_are_means_over_the_tokens_that_count() -> None:
    """clip_frac, approx_kl (k3), abs_log_ratio, sampler_ratio and policy_loss, each from a plain loop."""
    batch = random_batch(5)
    trainer = measuring(tiny_llama(), micro_batch_tokens=9)
    advantages = plain_advantages(batch["rewards"].tolist(), batch["group"].tolist())
    model, seen = tiny_llama().double(), []
    for row, A in zip(batch, advantages, strict=True):
        for k, now in enumerate(plain_log_probs(model, row["prompt_ids"], row["response_ids"], 1.0)):
            if row["response_mask"][k]:
                off = now.item() - float(row["response_logprobs"][k])
                ratio = math.exp(off)
                bounded = min(max(ratio, 0.8), 1.2)
                loss = max(-A * ratio, -A * bounded)
                seen.append((loss, -A * bounded > -A * ratio, ratio - 1 - off, abs(off), ratio))
    metrics = trainer.update(batch)
    names = ("policy_loss", "clip_frac", "approx_kl", "abs_log_ratio", "sampler_ratio")
    for name, expected in zip(names, np.mean(seen, axis=0), strict=True):
        assert metrics[name] == pytest.approx(expected, rel=1e-4), name
    assert metrics["reward"] == pytest.approx(batch["rewards"].mean())
    assert (metrics["response_length/mean"], metrics["response_length/max"]) == (3.25, 6)
    norm = math.sqrt(sum(float((g**2).sum()) for g in plain_gradient(trainer, batch).values()))
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_staleness_is_counted_in_versions_and_over_tokens() -> None:
    """Three tokens of version 4 and one of version 6, trained by version 7: (3 x 3 + 1) / 4. Half the samples are partial."""
    batch = make_batch([[1], [2]], [[3, 4, 5], [6]]).with_columns(
        span_versions=Ragged.pack([[4, 4], [6]], np.int32), span_lengths=Ragged.pack([[2, 1], [1]], np.int32)
    )
    trainer = measuring(tiny_llama())
    trainer.param_version = 7
    metrics = trainer.update(batch)
    assert (metrics["staleness/mean"], metrics["staleness/max"], metrics["partial_fraction"]) == (2.5, 3, 0.5)
    assert metrics["zero_spread_groups"] == 0
    assert trainer.update(batch.with_columns(rewards=np.ones(2)))["zero_spread_groups"] == 1


def test_gradients_are_clipped_as_one_and_the_norm_is_told_from_before() -> None:
    """All gradients shrink by the same factor, so that their direction stays."""
    free, bounded = measuring(tiny_llama()), measuring(tiny_llama(), max_grad_norm=0.01)
    batch = random_batch(1)
    norm = free.update(batch)["grad_norm"]
    assert bounded.update(batch)["grad_norm"] == norm > 0.01
    assert_same_gradient(gradient(bounded), {name: g * 0.01 / norm for name, g in gradient(free).items()})


def test_without_a_coefficient_the_reference_costs_nothing() -> None:
    """kl_coef=0 needs no reference, and does not run one that is there; any other coefficient insists on one."""

    class Untouchable(nn.Module):
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"the reference was asked for {name}")

    metrics = measuring(tiny_llama(), reference=Untouchable()).update(random_batch(0))
    assert "ref_kl" not in metrics
    with pytest.raises(ValueError, match="needs a reference"):
        GRPOTrainer(tiny_llama(), kl_coef=0.1)
    assert measuring(tiny_llama(), reference=tiny_llama(), kl_coef=0.1).update(random_batch(0))["ref_kl"] == pytest.approx(
        0, abs=1e-6
    )
    assert measuring(tiny_llama(), reference=tiny_llama(1), kl_coef=0.1).update(random_batch(0))["ref_kl"] > 0.01


def test_the_eos_token_is_trained_where_pad_is_the_eos() -> None:
    """Masks come from lengths. One made from `token == pad` would leave a model that never learns to stop.

    The padding is the same token as the EOS in front of it here; only the EOS has a gradient, and the right one.
    """
    eos = 0
    batch = make_batch([[1, 2], [3]], [[4, eos], [5, 6, 7, 8, eos]], logprobs=[[-1.0, -2.0], [-3.0] * 5])
    trainer = measuring(tiny_llama(), clip_high=1e3, clip_low=0.99)
    trainer.update(batch)
    with_eos = gradient(trainer)
    assert_same_gradient(with_eos, plain_gradient(trainer, batch))

    only_eos = batch.with_columns(response_mask=Ragged.pack([[0, 1], [0, 0, 0, 0, 1]], np.int8))
    trainer.update(only_eos)
    assert gradient(trainer)["lm_head.weight"][eos].abs().max() > 1e-3
    assert_same_gradient(gradient(trainer), plain_gradient(trainer, only_eos))


# ---- What is not finite stops the run --------------------------------------------------------------------------------


def assert_stops_and_leaves_everything(trainer: GRPOTrainer, batch: RolloutBatch, message: str) -> None:
    trainer.param_version = 3
    before = weights_of(trainer)
    moments = copy.deepcopy(trainer.optimizer.state_dict()["state"])
    with pytest.raises(FloatingPointError, match=f"^{message}$"):
        trainer.update(batch)
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(trainer), strict=True))
    torch.testing.assert_close(trainer.optimizer.state_dict()["state"], moments, rtol=0, atol=0)
    assert trainer.param_version == 3


@pytest.mark.parametrize("micro_batch_tokens", [1, 8, 10**6])
def test_a_loss_that_is_not_finite_names_the_step_and_the_sample(micro_batch_tokens: int) -> None:
    """The culprit by its uid, whoever shares its micro-batch; weights, optimiser and version stay as they were."""
    trainer = GRPOTrainer(tiny_llama(), learning_rate=0.1, micro_batch_tokens=micro_batch_tokens)
    prompts, responses = [[1], [2], [3], [4, 4]], [[1], [2, 3], [4, 5], [6]]
    trainer.update(make_batch(prompts, responses))
    poisoned = make_batch(prompts, responses, logprobs=[[-1.0], [-1.0] * 2, [-1.0, float("nan")], [-1.0]])
    assert_stops_and_leaves_everything(trainer, poisoned, "step 3: the loss of sample c is not finite")


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, about inf - inf
def test_a_reward_that_is_not_finite_is_not_taken_for_a_group_without_spread(reward: float) -> None:
    """`max > min` is false for nan: the group would count as one whose rewards are all equal, and the run would go on."""
    batch = make_batch([[1]] * 4, [[2], [3], [4], [5]], rewards=[1.0, 0.0, reward, 1.0])
    message = "step 3: the loss of samples? c(, d)? is not finite"
    assert_stops_and_leaves_everything(GRPOTrainer(tiny_llama()), batch, message)


@pytest.mark.parametrize("micro_batch_tokens", [1, 6, 10**6])
def test_a_gradient_that_is_not_finite_names_the_step_and_the_sample(micro_batch_tokens: int) -> None:
    """The loss can be finite where its slope is not. sqrt(x x) is such a function: at 0 its slope is 0 / 0."""

    class Kinked(Bigram):
        def hidden(self, embedded: Tensor) -> Tensor:
            return (embedded * embedded).sqrt()

    model = Kinked()
    trainer = GRPOTrainer(model, learning_rate=0.1, micro_batch_tokens=micro_batch_tokens)
    responses = [[1], [2, 3], [4, 6], [6]]
    trainer.update(make_batch([[1], [2], [3], [4]], responses))
    model.embed.weight.data[5] = 0.0
    poisoned = make_batch([[1], [2], [5], [4]], responses)
    assert_stops_and_leaves_everything(trainer, poisoned, "step 3: the gradient is not finite, from sample c")


# ---- Several processes -----------------------------------------------------------------------------------------------


@given(lengths=st.lists(st.integers(1, 50), max_size=40), n=st.integers(1, 5))
@example(lengths=[9, 1, 1, 1, 1, 1, 1, 1, 1, 1], n=2)  # by count the first would get 13 tokens and the second 5
def test_rows_are_spread_by_tokens(lengths: list[int], n: int) -> None:
    """Each row once; the loads differ by at most the longest row."""
    shares = spread(lengths, n)
    assert len(shares) == n and sorted(i for share in shares for i in share.tolist()) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def sharded_cases() -> list[tuple[str, RolloutBatch, dict[str, Any], bool]]:
    """(name, batch, knobs, tied): random ragged batches, and those that leave a process with nothing to do."""
    rng = np.random.default_rng(0)
    cases = []
    for seed in range(6):
        rows = 2 * int(rng.integers(1, 7))
        shape = [(int(rng.integers(1, 7)), int(rng.integers(0, 7))) for _ in range(rows)]
        knobs = {"micro_batch_tokens": int(rng.choice([1, 12, 40, 1000])), "response_length": 7, "kl_coef": 0.3 * (seed % 2)}
        knobs |= {"loss_aggregation": ["token-mean", "dr-grpo"][seed // 2 % 2], "importance": ["bypass", "decoupled"][seed % 2]}
        cases.append((f"random {seed}", random_batch(seed, shape), knobs, seed % 2 == 0))
    cases.append(("two rows", random_batch(7, [(2, 3), (1, 9)]), {}, True))
    cases.append(("one row with tokens", random_batch(8, [(2, 3), (1, 0)]), {}, False))
    cases.append(("no tokens", make_batch([[1], [2]], [[], []]), {}, False))
    decoupled = {"importance": "decoupled", "num_mini_batches": 2, "learning_rate": 0.01}
    cases.append(("two optimiser steps", random_batch(9, [(2, 5), (3, 4), (1, 6), (4, 3)]), decoupled, True))
    return cases


def measure(case: tuple[str, RolloutBatch, dict[str, Any], bool], sharded: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
    """(gradient, metrics) of one update; with a tied head each layer runs twice, without one the head runs on two tokens at a
    time, each time twice: what a sharded model must be gathered for again."""
    _, batch, knobs, tied = case
    model = tiny_llama(tied=tied)
    if tied:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    model, reference = (shard(m) if sharded else m for m in (model, tiny_llama(1)))
    trainer = measuring(model, reference=reference, **knobs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LOGITS_AT_ONCE", 2**24 if tied else 2 * VOCABULARY)
        metrics = trainer.update(batch)
    return {name: g.full_tensor() if sharded else g for name, g in gradient(trainer).items()}, metrics


def rank_of_groups(rank: int, folder: str) -> None:
    """What each of three processes does: alone, as one of two, as one of three."""
    faulthandler.enable()  # one of them once ended by SIGSEGV: the next time it says where
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for world_size in range(rank + 1, 4):
        rank_of_a_group(rank, world_size, f"{folder}/{world_size}")


def rank_of_a_group(rank: int, world_size: int, folder: str) -> None:
    """Keeps what it finds in files."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world_size)
    found = {case[0]: measure(case, sharded=True) for case in sharded_cases()}
    trainer = GRPOTrainer(shard(tiny_llama()), learning_rate=0.1)
    prompts, responses = [[1], [2], [3], [4, 4]], [[1], [2, 3], [4, 5], [6]]
    try:
        trainer.update(make_batch(prompts, responses, logprobs=[[-1.0], [-1.0] * 2, [-1.0, float("nan")], [-1.0]]))
    except FloatingPointError as error:
        found["nan"] = str(error)
    for dtype in (torch.bfloat16, torch.float32):
        trainer = GRPOTrainer(shard(tiny_llama(tied=True).to(dtype)), learning_rate=1e-3)
        trainer.update(random_batch(0))
        weights, rest = trainer.model_state(), trainer.optimizer_state()
        path = Path(folder) / str(dtype)
        if rank == 0:
            state = vars(trainer) | {"model_state": lambda w=weights: w, "optimizer_state": lambda r=rest: r}
            save_checkpoint(path, 1, SimpleNamespace(**state), None)
        else:
            assert not weights and not rest, "held once, not by every process"
        torch.distributed.barrier()
        resumed = GRPOTrainer(shard(load_policy(f"{path}/step_000001", dtype)), learning_rate=1e-3)
        load_checkpoint(path / "step_000001", resumed)
        found[f"resumed {dtype}"] = [trainer.update(random_batch(1)), resumed.update(random_batch(1))]
    opt = OPTConfig(vocab_size=VOCABULARY, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, dropout=0.0)
    nested = shard(AutoModelForCausalLM.from_config(opt))
    found["nested"] = [isinstance(layer, FSDPModule) for layer in nested.model.decoder.layers]
    torch.save(found, f"{folder}/found-{rank}")
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where groups of one, two and three processes have left what they found: 1/, 2/ and 3/."""
    folder = tmp_path_factory.mktemp("groups")
    for world_size in (1, 2, 3):
        (folder / str(world_size)).mkdir()
    torch.multiprocessing.spawn(rank_of_groups, (str(folder),), nprocs=3)
    return folder


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_gradient_of_several_processes_is_that_of_one(world_size: int, groups: Path) -> None:
    """Whatever the spread: processes with fewer micro-batches than others, with none, a model with and without a tied head.

    A loss that is not finite stops all of them with the same words, and a checkpoint is that of one process.
    """
    folder = groups / str(world_size)
    found = [torch.load(folder / f"found-{rank}") for rank in range(world_size)]
    for case in sharded_cases():
        truth, metrics = measure(case, sharded=False)
        for mine in found:
            assert_same_gradient(mine[case[0]][0], truth)
            assert mine[case[0]][1] == pytest.approx(metrics, rel=1e-4, abs=1e-6), case[0]
    for mine in found:
        assert mine["nan"] == "step 0: the loss of sample c is not finite"
        for dtype in (torch.bfloat16, torch.float32):
            first, resumed = mine[f"resumed {dtype}"]
            assert first == resumed == found[0][f"resumed {dtype}"][0]
        assert mine["nested"] == [True, True], "a layer's weights are gathered when it is computed, wherever it stands"
    whole = GRPOTrainer(tiny_llama(tied=True), learning_rate=1e-3)
    whole.update(random_batch(0))
    path = folder / "torch.float32" / "step_000001"
    saved = load_policy(str(path)).state_dict()
    for name, weight in whole.model.state_dict().items():
        torch.testing.assert_close(saved[name], weight, rtol=1e-3, atol=1e-4)
    assert json.loads((path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


# ---- Less memory: bfloat16 weights, gradient checkpointing -----------------------------------------------------------


def ones_bigram(dtype: torch.dtype) -> Bigram:
    """Weights from 1 to 2, where neighbours in bfloat16 are 1/128 apart."""
    model = Bigram()
    for p in model.parameters():
        nn.init.uniform_(p, 1, 2)
    return model.bfloat16().to(dtype)


def test_small_updates_to_bfloat16_weights_add_up() -> None:
    """A hundred steps of 1e-4 are each below half the distance of two bfloat16 numbers, and together above it.

    An optimiser that works on the bfloat16 weights themselves moves none of them, ever. With float32 twins the result is
    that of float32 training, rounded.
    """
    batch = make_batch([[0], [0]], [[3], [4]], logprobs=[[-2.0], [-2.0]])
    start = ones_bigram(torch.float32).head.weight.detach()
    wide = dict(learning_rate=1e-4, clip_low=0.99, clip_high=1e3)
    narrow, full = GRPOTrainer(ones_bigram(torch.bfloat16), **wide), GRPOTrainer(ones_bigram(torch.float32), **wide)
    naive = ones_bigram(torch.bfloat16)
    optimizer = torch.optim.AdamW(naive.parameters(), lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        narrow.update(batch)
        full.update(batch)
        for p, q in zip(naive.parameters(), full.model.parameters(), strict=True):
            p.grad = q.grad.bfloat16()
        optimizer.step()
    moved = narrow.model.head.weight[[3, 4]]
    assert moved.dtype == torch.bfloat16
    assert torch.equal(naive.head.weight.float(), start)
    assert ((moved.float() - start[[3, 4]]).abs() > 0.004).all()
    torch.testing.assert_close(moved.float(), full.model.head.weight[[3, 4]], rtol=0, atol=1 / 128)
    assert all(state["exp_avg"].dtype == torch.float32 for state in narrow.optimizer.state.values())


def test_gradients_of_bfloat16_micro_batches_are_summed_in_float32() -> None:
    """In bfloat16 256 + 1 is 256: from the 257th of equal micro-batches on, nothing would be added any more."""
    n = 600
    batch = make_batch([[0]] * n, [[3], [4]] * (n // 2), rewards=[1.0, 0.0] * (n // 2), group=[0] * n)
    narrow, full = (
        measuring(ones_bigram(dtype), micro_batch_tokens=2, clip_high=1e3, clip_low=0.99)
        for dtype in (torch.bfloat16, torch.float32)
    )
    narrow.update(batch)
    full.update(batch)
    for master, p in zip(narrow.master, full.model.parameters(), strict=True):
        torch.testing.assert_close(master.grad, p.grad, rtol=0.02, atol=float(p.grad.abs().max()) * 0.02)


def test_gradient_checkpointing_computes_more_and_changes_nothing(tmp_path: Path) -> None:
    """Each layer runs a second time in the backward pass, and the gradient is the same."""
    tiny_llama().save_pretrained(tmp_path)
    runs, gradients = {}, {}
    for checkpointing in (False, True):
        trainer = measuring(load_policy(str(tmp_path), gradient_checkpointing=checkpointing))
        calls: list[int] = []
        trainer.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        trainer.update(random_batch(2))
        runs[checkpointing], gradients[checkpointing] = len(calls), gradient(trainer)
    assert runs == {False: 1, True: 2}
    assert_same_gradient(gradients[True], gradients[False])


def test_the_implementation_of_attention_is_the_users_choice_and_changes_nothing(tmp_path: Path) -> None:
    """Two that are computed in different ways have one gradient."""
    tiny_llama().save_pretrained(tmp_path)
    gradients = {}
    for name in ("sdpa", "eager"):
        trainer = measuring(load_policy(str(tmp_path), attn_implementation=name))
        assert trainer.model.config._attn_implementation == name
        trainer.update(random_batch(2))
        gradients[name] = gradient(trainer)
    assert_same_gradient(gradients["sdpa"], gradients["eager"])


SMALL = dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4)
SMALL |= dict(num_key_value_heads=2, head_dim=4, max_position_embeddings=64, initializer_range=0.4, pad_token_id=0)


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SMALL, final_logit_softcapping=0.5, attn_implementation="eager"),
        CohereConfig(**SMALL, logit_scale=0.0625),
        GraniteConfig(**SMALL, logits_scaling=8.0),
    ],
    ids=["soft cap", "scale", "divisor"],
)
def test_a_model_that_rescales_its_logits_is_refused(config: Any, tmp_path: Path) -> None:
    """The head's output is not the logits then, and every probability would be wrong by a little. Found by trying, whatever
    the knob is called."""
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="It rescales its logits: choose another model"):
        load_policy(str(tmp_path))


def test_dropout_is_off_and_where_it_cannot_be_the_model_is_refused(tmp_path: Path) -> None:
    """GPT-2 has some by default: log-probabilities that change from pass to pass are those of no policy."""
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.4)
    assert config.resid_pdrop == 0.1
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = load_policy(str(tmp_path))
    rows = [np.arange(1, 4)], [np.arange(4, 12)]
    assert torch.equal(compute_log_probs(model, *rows), compute_log_probs(model, *rows))
    with pytest.raises(ValueError, match="it has dropout: leave gradient checkpointing out"):
        load_policy(str(tmp_path), gradient_checkpointing=True)


def test_a_model_that_could_not_be_saved_again_is_found_when_it_is_loaded(tmp_path: Path) -> None:
    """transformers loads such a generation config and refuses to save it: at the first checkpoint, or after the last step."""
    tiny_llama().save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.9, "top_p": 0.6}))  # does not say that it samples
    trainer = GRPOTrainer(load_policy(str(tmp_path)))
    saved = json.loads((save_checkpoint(tmp_path / "out", 1, trainer, None) / file.name).read_text())
    assert saved["do_sample"] and saved["temperature"] == 0.9
    file.write_text(json.dumps({"pad_token_id": -1}))
    with pytest.raises(ValueError, match=r"its generation_config.json could not be saved again: mend it \(.*pad_token_id"):
        load_policy(str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_the_weights_that_go_out_are_the_weights(tied: bool, dtype: torch.dtype) -> None:
    """A safetensors file in memory with every weight, a tied one once; loaded into another model it answers the same."""
    trainer = measuring(tiny_llama(tied=tied).to(dtype))
    ids = torch.arange(10).unsqueeze(0)
    for seed in range(3):  # the first lays the file out, the others fill it
        trainer.model.load_state_dict(tiny_llama(seed, tied=tied).to(dtype).state_dict())
        sent = load(bytes(trainer.weights()))
        other = tiny_llama(9, tied=tied).to(dtype)
        missing, unexpected = other.load_state_dict(sent, strict=False)
        assert (missing, unexpected) == (["lm_head.weight"] if tied else [], [])
        assert torch.equal(other(ids).logits, trainer.model(ids).logits)


# ---- The loops -------------------------------------------------------------------------------------------------------


class Rollouts(SimpleNamespace):
    """Batch t; for fit_partial the one group of batch t, finished."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, column: str) -> np.ndarray:
        return {"stop_reason": np.array(["stop"])}[column]


class Play:
    """The parts of a run as fakes that write down when each was called. Batches carry the version that generated them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.staleness: list[int] = []
        self.logged: list[dict[str, float]] = []
        self.pending: dict[int, asyncio.Future] = {}
        self.param_version, self.server_version = 0, -1

    def rollouts(self, t: int, version: int) -> Any:
        return Rollouts(t=t, version=version, meta_info={"timing": {"generate_s": 0.0}})

    async def generation(self, t: int) -> Any:
        version = self.server_version
        await asyncio.sleep(0)
        assert version == self.server_version, "the weights changed under a generation in flight"
        return self.rollouts(t, version)

    def generate(self, t: int) -> asyncio.Future:
        self.events.append(f"generate {t}")
        self.pending[t] = asyncio.ensure_future(self.generation(t))
        return self.pending[t]

    def generate_groups(self, groups: list[Any]) -> list[asyncio.Future]:
        return [self.generate(getattr(group, "t", group)) for group in groups]

    async def cancel(self) -> None:
        self.events.append(f"cancel {self.param_version}")

    async def resume(self) -> None:
        self.note_at_rest(f"resume {self.param_version}")

    async def sync(self) -> None:
        self.note_at_rest(f"sync {self.param_version}")
        self.server_version = self.param_version

    def update(self, rollouts: Any) -> dict[str, float]:
        self.events.append(f"train {rollouts.t}")
        self.staleness.append(self.param_version - rollouts.version)
        self.param_version += 1
        return {"loss": 0.5}

    async def evaluate(self, t: int) -> dict[str, float]:
        self.note_at_rest(f"evaluate {t}")
        assert self.server_version == self.param_version == t
        return {"eval/accuracy": t / 10}

    def checkpoint(self, t: int, rollouts: Any) -> None:
        self.note_at_rest(f"checkpoint {t}")
        assert (rollouts.t, self.param_version) == (t, t)

    def log(self, t: int, metrics: dict[str, float], rollouts: Any) -> None:
        self.events.append(f"log {t}")
        self.logged.append(metrics)

    def note_at_rest(self, event: str) -> None:
        assert all(future.done() for future in self.pending.values()), f"{event} while a batch was in flight"
        self.events.append(event)

    def parts(self, **changes: Any) -> Parts:
        names = ("generate", "sync", "checkpoint", "evaluate", "log", "generate_groups", "cancel", "resume")
        own = {name: getattr(self, name) for name in names}
        own |= {"score": lambda rollouts: rollouts, "group": lambda number: number, "concat": lambda groups: groups[0]}
        return Parts(**{**own, "trainer": self, "steps": 3, **changes})


async def fit_one_ahead(parts: Parts) -> None:
    """fit_partial with batches of one group, of which one may run ahead."""
    await fit_partial(parts, batch_size=1, max_staleness=1)


SYNC = """sync 0  generate 0  checkpoint 0  train 0  log 0
          sync 1  generate 1  checkpoint 1  train 1  log 1
          sync 2  generate 2  checkpoint 2  train 2  log 2"""

ONE_STEP_OFF = """sync 0  generate 0
                  checkpoint 0          generate 1  train 0  log 0
                  checkpoint 1  sync 1  generate 2  train 1  log 1
                  checkpoint 2  sync 2              train 2  log 2"""


ONE_AHEAD = """sync 0                                  generate 0  generate 1  train 0  cancel 1  log 0
               checkpoint 1  sync 1  resume 1              generate 2  train 1  cancel 2  log 1
               checkpoint 2  sync 2  resume 2                          train 2  cancel 3  log 2  resume 3"""


def story(text: str) -> list[str]:
    words = text.split()
    return [f"{verb} {t}" for verb, t in zip(words[::2], words[1::2], strict=True)]


STORIES = [(fit_sync, SYNC), (fit_one_step_off, ONE_STEP_OFF), (fit_one_ahead, ONE_AHEAD)]


@pytest.mark.parametrize(("fit", "expected"), STORIES)
def test_each_loop_does_this_in_this_order(fit: Callable, expected: str) -> None:
    """The whole of the three loops, as they unfold. Three steps are three generations, not four.

    One step off, a generation is under way before the training that it overlaps with begins, and batch t is saved when it has
    come back and t+1 is not yet begun. In fit_partial a run is saved, the weights change, and servers take requests again only
    while nothing is in flight.
    """
    play = Play()
    asyncio.run(fit(play.parts(evaluate=None)))
    assert play.events == story(expected)
    assert all(metrics["loss"] == 0.5 and metrics["time/step_s"] >= 0 for metrics in play.logged)


@pytest.mark.parametrize(
    ("fit", "expected"), [(fit_sync, [0, 0, 0, 0]), (fit_one_step_off, [0, 1, 1, 1]), (fit_one_ahead, [0, 1, 1, 1])]
)
def test_staleness_is_exact(fit: Callable, expected: list[int]) -> None:
    """Zero in the synchronous loop. One step off: the first batch is fresh, each later one is one version old."""
    play = Play()
    asyncio.run(fit(play.parts(steps=4)))
    assert play.staleness == expected


@pytest.mark.parametrize("fit", [fit_sync, fit_one_step_off, fit_one_ahead])
def test_evaluation_sees_the_weights_before_the_step_and_nothing_in_flight(fit: Callable) -> None:
    """Evaluation t measures version t, which batch t is about to change; its metrics stand in the line of step t.

    With or without it, everything else happens in the same order.
    """
    play, without = Play(), Play()
    asyncio.run(fit(play.parts()))
    asyncio.run(fit(without.parts(evaluate=None)))
    assert [event for event in play.events if event.startswith("evaluate")] == ["evaluate 0", "evaluate 1", "evaluate 2"]
    assert [event for event in play.events if not event.startswith("evaluate")] == without.events
    assert [metrics["eval/accuracy"] for metrics in play.logged] == [0.0, 0.1, 0.2]


RESUMED_SYNC = """sync 1              checkpoint 1  train 1  log 1
                  sync 2  generate 2  checkpoint 2  train 2  log 2"""

RESUMED_ONE_STEP_OFF = """sync 1
                          checkpoint 1          generate 2  train 1  log 1
                          checkpoint 2  sync 2              train 2  log 2"""


@pytest.mark.parametrize(
    ("fit", "expected", "staleness"),
    [(fit_sync, RESUMED_SYNC, [0, 0]), (fit_one_step_off, RESUMED_ONE_STEP_OFF, [1, 1])],
)
def test_a_resumed_loop_goes_on_as_if_it_had_never_stopped(fit: Callable, expected: str, staleness: list[int]) -> None:
    """Batch 1, which waited, comes with the checkpoint and is not generated again. The new servers get version 1 first.

    From there on all is as in the whole run above, the age of that batch included.
    """
    play = Play()
    play.param_version = 1
    waiting = play.rollouts(1, version=1 - staleness[0])
    asyncio.run(fit(play.parts(first_step=1, first_rollouts=waiting, evaluate=None)))
    assert play.events == story(expected)
    assert play.staleness == staleness


@pytest.mark.parametrize("fit", [fit_sync, fit_one_step_off, fit_one_ahead])
@pytest.mark.parametrize("first_step", [0, 3])
def test_no_steps_are_no_work(fit: Callable, first_step: int) -> None:
    """A run resumed at its end starts nothing, not even a generation that it would then throw away."""
    play = Play()
    asyncio.run(fit(play.parts(steps=first_step, first_step=first_step)))
    assert play.events == []


@pytest.mark.parametrize(
    ("fit", "wait_s", "sync_s"),
    [(fit_sync, [1, 1, 1], [3, 3, 3]), (fit_one_step_off, [0, 0, 0], [3, 3, 3]), (fit_one_ahead, [0, 0, 0], [4, 4, 4])],
)
def test_the_steps_of_a_run_are_all_of_its_time(
    fit: Callable, wait_s: list[float], sync_s: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first sync to the last line nothing but writing the lines is left out, in none of the loops: so their seconds a
    step can be set side by side, with or without evaluations. Time is what the events take: a second, a sync three, an
    evaluation ten."""

    class Clock(Play):
        @property
        def now(self) -> float:
            return sum({"evaluate": 10.0, "sync": 3.0, "log": 0.0}.get(event.split()[0], 1.0) for event in self.events)

    play = Clock()
    monkeypatch.setattr(module.time, "perf_counter", lambda: play.now)
    asyncio.run(fit(play.parts(timeline=Timeline(zero=0.0))))
    after = play.events[play.events.index("log 2") :]
    assert sum(metrics["time/step_s"] for metrics in play.logged) == play.now - len([e for e in after if "resume" in e])
    shown = [[metrics[f"time/{name}_s"] for metrics in play.logged] for name in ("wait", "train", "sync")]
    assert shown == [wait_s, [1, 1, 1], sync_s], "a cut counts as syncing, in the step that it ends"
    assert all(row["time/wait_s"] + row["time/train_s"] + row["time/sync_s"] <= row["time/step_s"] for row in play.logged)
    assert sum(metrics["time/step_s"] > 10 for metrics in play.logged) == 3, "one evaluation in each"


def test_a_cut_is_marked_where_something_is_cut() -> None:
    """A group that came back while training went on is no cut, though no one has taken it yet."""

    class Long(Play):
        def __init__(self) -> None:
            super().__init__()
            self.stopped = asyncio.Event()

        async def generation(self, t: int) -> Any:
            if t == 2:
                await self.stopped.wait()
            return await super().generation(t)

        async def cancel(self) -> None:
            await super().cancel()
            self.stopped.set()

        async def resume(self) -> None:
            await super().resume()
            self.stopped.clear()

    play, timeline = Long(), Timeline()
    parts = play.parts(timeline=timeline)
    asyncio.run(fit_one_ahead(parts))
    assert [name for name, _ in timeline.marks] == ["cancel"], "batch 1 was back before the first cancel, 2 was cut"


def test_the_next_batch_is_generated_while_training_goes_on() -> None:
    """Training blocks its own thread and not the event loop: here it *waits* for the next batch, which comes."""

    class Overlapping(Play):
        def __init__(self) -> None:
            super().__init__()
            self.generated = [threading.Event() for _ in range(3)]

        async def generation(self, t: int) -> Any:
            rollouts = await super().generation(t)
            self.generated[t].set()
            return rollouts

        def update(self, rollouts: Any) -> dict[str, float]:
            if rollouts.t + 1 < 3:  # the limit only keeps a broken loop from hanging
                assert self.generated[rollouts.t + 1].wait(timeout=30), "training held up the generation"
            return super().update(rollouts)

    for fit in (fit_one_step_off, fit_one_ahead):
        play = Overlapping()
        asyncio.run(fit(play.parts()))
        assert play.staleness == [0, 1, 1]


@pytest.mark.parametrize(
    ("fit", "expected"), [(fit_sync, [0, 0, 0]), (fit_one_step_off, [0, 1, 1]), (fit_one_ahead, [0, 1, 1])]
)
def test_rollouts_may_be_a_coroutine(fit: Callable, expected: list[int]) -> None:
    """It starts when the loop next waits, which is when training begins; one that fails ends it, as a task would."""
    play = Play()
    parts = play.parts(generate=play.generation, generate_groups=lambda numbers: [play.generation(t) for t in numbers])
    asyncio.run(fit(parts))
    assert play.staleness == expected

    def update(rollouts: Any) -> None:
        raise FloatingPointError("not finite")

    play = Play()
    play.update = update
    parts = play.parts(generate=play.generation, generate_groups=lambda numbers: [play.generation(t) for t in numbers])
    with pytest.raises(FloatingPointError, match="not finite"):
        asyncio.run(fit(parts))


def test_groups_that_never_get_through_are_told_of(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Servers with other weights send everything back: the loop goes on asking, and says so every ten seconds."""

    class Deaf(Play):
        asked = 0

        async def generation(self, t: int) -> Any:
            self.asked += 1
            rollouts = await super().generation(t)
            return Cut(**vars(rollouts)) if self.asked < 250 else rollouts

    class Cut(Rollouts):
        def __getitem__(self, column: str) -> list[str]:
            return {"stop_reason": ["abort"]}[column]  # a list will do, as it does in other batches

    play, wait, waits = Deaf(), asyncio.sleep, []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        await wait(0)

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    asyncio.run(fit_one_ahead(play.parts()))
    said = [record.message for record in caplog.records]
    assert play.staleness == [0, 1, 1] and 100 <= waits.count(0.1) < 250
    assert len(said) == waits.count(0.1) // 100 and all("weights of another version than 0?" in line for line in said)


@pytest.mark.parametrize("fit", [fit_one_step_off, fit_one_ahead])
@pytest.mark.parametrize("generation", ["goes on", "has failed too"])
def test_a_training_error_surfaces_as_it_is_and_cancels_the_batch_in_flight(generation: str, fit: Callable) -> None:
    """The original error, not one about a task; and no task is left behind, nor one whose own error nobody looked at."""

    class Failing(Play):
        async def generation(self, t: int) -> Any:
            if t == 2:
                if generation == "has failed too":
                    raise ConnectionError("the server is gone")
                await asyncio.Event().wait()  # never comes
            return await super().generation(t)

        def update(self, rollouts: Any) -> dict[str, float]:
            if rollouts.t == 1:
                raise FloatingPointError("step 1: the loss of sample a is not finite")
            return super().update(rollouts)

    async def run() -> list[dict[str, Any]]:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        with pytest.raises(FloatingPointError, match=r"^step 1: the loss of sample a is not finite$"):
            await asyncio.wait_for(fit(play.parts()), timeout=30)  # only keeps a broken loop from hanging
        last = play.pending.pop(2)
        assert last.cancelled() if generation == "goes on" else last.done()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        del last
        gc.collect()  # an exception that nobody has looked at is reported when its task is freed
        return complaints

    play = Failing()
    assert asyncio.run(run()) == []
    assert "log 1" not in play.events and "checkpoint 2" not in play.events


@pytest.mark.parametrize(("fit", "last"), [(fit_one_step_off, "log 1"), (fit_one_ahead, "cancel 2")])
def test_a_generation_error_surfaces_when_its_batch_is_due(fit: Callable, last: str) -> None:
    """Batch 2 fails at once, while 1 is trained: 1 is trained, and then the error comes up."""

    class Failing(Play):
        async def generation(self, t: int) -> Any:
            if t == 2:
                raise TimeoutError("worker 0 with 4 samples (a, b, c, ...) did not answer within 9 s")
            return await super().generation(t)

    play = Failing()
    with pytest.raises(TimeoutError, match="worker 0 with 4 samples"):
        asyncio.run(fit(play.parts()))
    assert play.events[-2:] == ["train 1", last]


@pytest.mark.parametrize("fit", [fit_one_step_off, fit_one_ahead])
def test_a_cancelled_run_cancels_its_generation(fit: Callable) -> None:
    """Ctrl-C while a batch is awaited leaves no task behind."""

    class Endless(Play):
        async def generation(self, t: int) -> Any:
            await asyncio.Event().wait()

    async def run() -> None:
        fitting = asyncio.ensure_future(fit(play.parts(evaluate=None)))
        while 0 not in play.pending:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        fitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fitting
        assert all(task.cancelled() for task in play.pending.values())

    play = Endless()
    asyncio.run(run())


def test_overlap_efficiency_is_the_longer_half_over_the_step() -> None:
    """Generating 2 s and training 3 s in a step of 4 s: the step cannot be shorter than 3 s, so 0.75 of the best is reached."""
    times = step_times(generate_s=2.0, wait_s=0.5, train_s=3.0, sync_s=0.25, step_s=4.0)
    assert times == {
        "time/generate_s": 2.0,
        "time/wait_s": 0.5,
        "time/train_s": 3.0,
        "time/sync_s": 0.25,
        "time/step_s": 4.0,
        "time/overlap_efficiency": 0.75,
    }


def test_a_timeline_is_a_valid_trace(tmp_path: Path) -> None:
    """Trace Event Format: complete events, ts and dur in microseconds, on lanes that have names. Failed work is drawn too."""
    timeline = Timeline(zero=100.0)
    timeline.add("rollouts", "generate 1", 101.0, 103.5, 7)
    with pytest.raises(KeyError), timeline.span("trainer", "train 0", 6):
        raise KeyError
    asyncio.run(fit_one_step_off(Play().parts(timeline=timeline)))
    timeline.mark("cancel")
    timeline.save(tmp_path / "timeline.json")

    trace = json.loads((tmp_path / "timeline.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    lanes = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    complete = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert set(lanes.values()) == {"rollouts", "trainer", "sync"}
    (mark,) = [event for event in trace["traceEvents"] if event["ph"] == "i"]
    assert mark["name"] == "cancel" and mark["ts"] == pytest.approx(timeline.marks[0][1] * 1e6) and mark["s"] == "p"
    assert len(complete) + len(lanes) + 1 == len(trace["traceEvents"])
    for event in complete:
        assert {"name", "ph", "ts", "dur", "pid", "tid"} <= event.keys()

        assert lanes[event["tid"]] == event["cat"] and event["dur"] >= 0
    first = complete[0]
    assert (first["name"], first["ts"], first["dur"], first["args"]) == ("generate 1", 1e6, 2.5e6, {"param_version": 7})
    names = [event["name"] for event in complete if event["cat"] == "trainer"]
    assert names == ["train 0", "train 0", "train 1", "train 2"]


def test_a_timeline_is_whole_or_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill, or a full disk, in the middle of its second save leaves the first: pictures are drawn from it later."""
    timeline = Timeline(zero=0.0, spans=[("trainer", "train 0", 1.0, 2.0, 0)])
    timeline.save(tmp_path / "timeline.json")

    def full(path: Path, text: str) -> None:
        with path.open("w") as opened:
            opened.write(text[:1])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        timeline.save(tmp_path / "timeline.json")
    assert Timeline.load(tmp_path / "timeline.json").spans == timeline.spans
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.json"], "and nothing beside it"


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


def new_trainer(source: Path | None = None, dtype: torch.dtype = torch.float32) -> GRPOTrainer:
    model = tiny_llama().to(dtype) if source is None else load_policy(str(source), dtype)
    return GRPOTrainer(model, learning_rate=1e-3, num_mini_batches=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_training_is_that_of_one_that_never_stopped_to_the_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    """Weights, float32 twins, both moments, versions, random state, and the batch that waits: all of it comes back."""
    whole = new_trainer(dtype=dtype)
    torch.manual_seed(5)
    for seed in (0, 1):
        whole.update(random_batch(seed))
    path = save_checkpoint(tmp_path, 2, whole, random_batch(2))
    rest = [whole.update(random_batch(2)), whole.update(random_batch(3))]
    draws = torch.rand(3)

    torch.manual_seed(6)
    assert newest_checkpoint(tmp_path) == path == tmp_path / "step_000002"
    resumed = new_trainer(path, dtype)
    assert load_checkpoint(path, resumed) == 2
    rollouts = RolloutBatch.load(path / "trainer" / "rollouts.npz")
    assert [resumed.update(rollouts), resumed.update(random_batch(3))] == rest  # every metric, to the bit
    assert torch.equal(torch.rand(3), draws)
    for ours, theirs in ((resumed.master, whole.master), (resumed.parameters, whole.parameters)):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    torch.testing.assert_close(resumed.optimizer.state_dict(), whole.optimizer.state_dict(), rtol=0, atol=0)
    assert resumed.param_version == whole.param_version == 4


def test_a_checkpoint_is_a_model_folder_like_any_other_and_runs_no_code(tmp_path: Path) -> None:
    """transformers opens it. Nothing in it is a pickle: safetensors, JSON, and an .npz that loads with pickle forbidden."""
    trainer = new_trainer()
    path = save_checkpoint(tmp_path, 0, trainer, random_batch(0))
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = torch.arange(9).unsqueeze(0)
    assert torch.equal(model(ids).logits, trainer.model(ids).logits)
    assert {file.suffix for file in path.rglob("*") if file.is_file()} == {".safetensors", ".json", ".npz"}
    assert [file.name for file in path.glob("*.safetensors")] == ["model.safetensors"], "vLLM would take others for weights"
    with np.load(path / "trainer" / "rollouts.npz", allow_pickle=False) as arrays:
        assert all(arrays[name].dtype != object for name in arrays.files)


def test_a_checkpoint_from_before_the_first_step_has_no_optimiser_state_yet(tmp_path: Path) -> None:
    """Loading one gives a trainer whose first step is the first."""
    whole = new_trainer()
    path = save_checkpoint(tmp_path, 0, whole, random_batch(0))
    resumed = new_trainer(path)
    load_checkpoint(path, resumed)
    assert resumed.update(random_batch(0)) == whole.update(random_batch(0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_optimiser_state_comes_back_to_the_device_of_its_weights(tmp_path: Path) -> None:
    """A file is read into main memory; the next step needs the moments where the weights are."""
    trainer = GRPOTrainer(tiny_llama().cuda())
    trainer.update(random_batch(0))
    path = save_checkpoint(tmp_path, 1, trainer, random_batch(1))
    resumed = GRPOTrainer(load_policy(str(path)).cuda())
    load_checkpoint(path, resumed)
    resumed.update(random_batch(1))


def test_a_checkpoint_that_was_harmed_is_skipped_with_a_line_that_says_so(tmp_path: Path) -> None:
    """Each file of the newest in turn: cut by a byte, one bit flipped, gone. The one before it is then the newest."""
    trainer = new_trainer()
    older, newest = (save_checkpoint(tmp_path, step, trainer, random_batch(step)) for step in (1, 2))
    (tmp_path / ".writing_000003").mkdir()  # a save that was killed is not even looked at
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    assert [str(file.relative_to(newest)) for file in files] == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "state.json",
        "trainer/optimizer.safetensors",
        "trainer/rollouts.npz",
    ]
    for file in files:
        whole = file.read_bytes()
        flipped = bytes([*whole[:-2], whole[-2] ^ 1, whole[-1]])
        other_step = [whole.replace(b'"step": 2', b'"step": 3')] if file.name == "state.json" else []  # one bit, too
        for harmed in (whole[:-1], whole[: len(whole) // 2], b"", b"\0" * len(whole), flipped, *other_step, None):
            file.unlink() if harmed is None else file.write_bytes(harmed)
            lines: list[str] = []
            assert newest_checkpoint(tmp_path, lines.append) == older, file
            assert len(lines) == 1 and str(newest) in lines[0] and "skipped" in lines[0]
            file.write_bytes(whole)
    assert newest_checkpoint(tmp_path, pytest.fail) == newest
    shutil.rmtree(older)
    shutil.rmtree(newest)
    assert newest_checkpoint(tmp_path, pytest.fail) is None
    assert newest_checkpoint(tmp_path / "nowhere", pytest.fail) is None


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_checkpoints_are_kept_and_no_more(tmp_path: Path, keep: int) -> None:
    """`keep` of them, the last ones; the rest goes when the new one is complete, and so does what a killed run was writing."""
    trainer = new_trainer()
    (tmp_path / ".writing_000099").mkdir()
    for step in range(1, 5):
        save_checkpoint(tmp_path, step, trainer, random_batch(0), keep=keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step_{step:06d}" for step in range(5 - keep, 5)]


def test_the_checkpoint_that_a_launch_began_with_stays(tmp_path: Path) -> None:
    """A server that dies and is started again loads its model from there, however many have been written since."""
    trainer = new_trainer()
    first = save_checkpoint(tmp_path, 1, trainer, random_batch(0))
    for step in range(2, 6):
        save_checkpoint(tmp_path, step, trainer, random_batch(0), keep=2, spare=first.resolve())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000004", "step_000005"]


def test_a_harmed_checkpoint_does_not_push_out_the_one_just_written(tmp_path: Path) -> None:
    """After a resume from before it, a harmed step 9 is still there. What is kept is counted back from the one just saved."""
    trainer = new_trainer()
    harmed = save_checkpoint(tmp_path, 9, trainer, random_batch(0), keep=1)
    (harmed / "model.safetensors").write_bytes(b"")
    saved = save_checkpoint(tmp_path, 8, trainer, random_batch(0), keep=1)
    assert newest_checkpoint(tmp_path, lambda line: None) == saved
    assert save_checkpoint(tmp_path, 9, trainer, random_batch(0), keep=1) == harmed  # written again, whole
    assert newest_checkpoint(tmp_path, pytest.fail) == harmed
    assert list(tmp_path.iterdir()) == [harmed]


class DiskFull(OSError):
    pass


@pytest.mark.parametrize("culprit", ["model", "optimizer", "rollouts", "state", "fsync", "rename"])
def test_a_save_that_fails_leaves_no_trace_and_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, culprit: str
) -> None:
    """Whichever write it is that finds the disk full: the error comes up, and the folder is as it was."""
    trainer, rollouts = new_trainer(), random_batch(0)
    good = save_checkpoint(tmp_path, 1, trainer, rollouts, keep=1)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise DiskFull(28, "No space left on device")

    owner, name = {
        "model": (trainer.model, "save_pretrained"),
        "optimizer": (module, "save_file"),
        "rollouts": (rollouts, "save"),
        "state": (Path, "write_text"),
        "fsync": (os, "fsync"),
        "rename": (Path, "rename"),
    }[culprit]
    with monkeypatch.context() as patch, pytest.raises(DiskFull):
        patch.setattr(owner, name, fail)
        save_checkpoint(tmp_path, 2, trainer, rollouts, keep=1)
    assert list(tmp_path.iterdir()) == [good]
    assert newest_checkpoint(tmp_path, pytest.fail) == good


def test_at_every_moment_of_a_save_a_complete_checkpoint_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at before and after each sync to disk, as one would after a kill there. Also with a single one kept."""
    trainer, rollouts = new_trainer(), random_batch(0)
    save_checkpoint(tmp_path, 1, trainer, rollouts, keep=1)
    found: list[str] = []
    fsync = os.fsync

    def look_and_sync(handle: int) -> None:
        found.append(newest_checkpoint(tmp_path, pytest.fail).name)
        fsync(handle)
        found.append(newest_checkpoint(tmp_path, pytest.fail).name)

    monkeypatch.setattr(os, "fsync", look_and_sync)
    save_checkpoint(tmp_path, 2, trainer, rollouts, keep=1)
    # Six files and their two folders are on the disk before the new name is given, and then that name is.
    assert found == ["step_000001"] * 2 * 8 + ["step_000002"] * 2


# ---- fit_partial: the bookkeeping as a state machine, the loop on a fake engine --------------------------------------

GROUP = 2


def group_with(*stop_reasons: str, number: int = -1) -> RolloutBatch:
    return RolloutBatch({"stop_reason": np.array(stop_reasons), "number": [number] * len(stop_reasons)})


def as_one(groups: Sequence[RolloutBatch]) -> RolloutBatch:
    return RolloutBatch.concat([RolloutBatch(group.columns) for group in groups])


class PoolMachine(RuleBasedStateMachine):
    """Whatever order completions, cuts, syncs, and kills after a save come in: every prompt is trained exactly once, in a
    complete group of its own, within max_staleness; nothing is lost or doubled; a slow prompt among fast ones is trained."""

    @initialize(batch_size=st.integers(1, 4), max_staleness=st.integers(0, 3), steps=st.integers(1, 6))
    def start(self, batch_size: int, max_staleness: int, steps: int) -> None:
        self.pool = GroupPool(batch_size, max_staleness, total=batch_size * steps)
        self.version, self.steps = 0, steps
        self.admitted_at: dict[int, int] = {}
        self.out: set[int] = set()
        self.trained: list[int] = []
        self.dispatch()

    def dispatch(self) -> None:
        resumed, new = self.pool.resumable(), self.pool.admit(self.version)
        assert not set(resumed) & set(new) and not set(resumed) & self.out
        self.admitted_at |= dict.fromkeys(new, self.version)
        self.out |= {*resumed, *new}

    @rule(data=st.data())
    def a_group_finishes(self, data: st.DataObject) -> None:
        if self.out:
            number = data.draw(st.sampled_from(sorted(self.out)))
            self.out.remove(number)
            self.pool.put(number, group_with("stop", "length", number=number))

    @rule(data=st.data(), killed=st.booleans())
    def the_trainer_takes_what_it_may_and_syncs(self, data: st.DataObject, killed: bool) -> None:
        taken = self.pool.take(self.version)
        if taken is not None:
            cut = data.draw(st.sets(st.sampled_from(sorted(self.out)))) if self.out else set()
            self.train(taken, cut, killed)

    def train(self, taken: dict[int, Any], cut: set[int], killed: bool = False) -> None:
        assert len(taken) == self.pool.batch_size
        for number, group in taken.items():
            assert number not in self.trained and "abort" not in group["stop_reason"]
            assert len(group) == 2 and set(group["number"]) == {number}
            assert 0 <= self.version - self.admitted_at[number] <= self.pool.max_staleness
        self.trained.extend(taken)
        for number in self.out:  # the cancel brings all of them back
            self.pool.put(number, group_with("stop", "abort" if number in cut else "stop", number=number))
        self.out = set()
        self.version += 1
        if killed:
            size, old = self.pool.batch_size, self.pool
            self.pool = GroupPool(size, old.max_staleness, old.total, admitted=self.version * size)
            self.pool.restore(old.untrained(as_one))
        self.dispatch()

    @invariant()
    def every_prompt_is_in_one_place(self) -> None:
        if hasattr(self, "pool"):
            places = [*self.out, *self.pool.finished, *self.pool.cut, *self.trained]
            assert sorted(places) == list(range(self.pool.admitted))
            assert self.pool.admitted <= (self.version + self.pool.max_staleness + 1) * self.pool.batch_size

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        while self.version < self.steps:  # with everything finished there is always a batch to take: no deadlock
            for number in sorted(self.out):
                self.pool.put(number, group_with("stop", "stop", number=number))
            self.out = set()
            taken = self.pool.take(self.version)
            assert taken is not None
            self.train(taken, cut=set())
        assert sorted(self.trained) == list(range(self.steps * self.pool.batch_size))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_a_slow_prompt_is_trained_before_it_is_too_old() -> None:
    """Five fast groups overtake a slow one; the batch in which it is due does not start without it."""
    pool = GroupPool(batch_size=2, max_staleness=2, total=10)
    assert pool.admit(0) == [0, 1, 2, 3, 4, 5]
    for number in (1, 2, 3, 4):
        pool.put(number, group_with("stop", "stop"))
    assert list(pool.take(0)) == [1, 2]
    pool.admit(1)
    assert list(pool.take(1)) == [3, 4]
    pool.admit(2)
    for number in (5, 6, 7):
        pool.put(number, group_with("stop", "stop"))
    assert pool.take(2) is None, "group 0 is two versions old: it is due now"
    pool.put(0, group_with("stop", "stop"))
    assert list(pool.take(2)) == [0, 5]


def test_a_group_that_is_not_out_cannot_come_back() -> None:
    """Twice the same group, or one that was never admitted: refused by number."""
    pool = GroupPool(batch_size=1, max_staleness=0, total=1)
    with pytest.raises(ValueError, match="group 0 came back, but it is not out"):
        pool.put(0, group_with("stop"))
    pool.admit(0)
    pool.put(0, group_with("stop"))
    with pytest.raises(ValueError, match="not out"):
        pool.put(0, group_with("stop"))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=12, max_size=12),
    max_staleness=st.integers(0, 3),
    pace=st.integers(1, 4),
)
@example(lengths=[12] + [1] * 11, max_staleness=2, pace=1)
def test_fit_partial_trains_every_prompt_once_and_never_too_late(lengths: list[int], max_staleness: int, pace: int) -> None:
    """On a fake engine that makes a token per tick: each group once, whole, its tokens' versions within max_staleness, and
    every token stamped with the version that the engine had when it made it."""

    class Many(list):
        def __init__(self, groups: list[Any]) -> None:
            super().__init__(groups)
            self.meta_info: dict[str, Any] = {}

    class Engine:
        def __init__(self) -> None:
            self.version, self.open, self.stopped = -1, True, asyncio.Event()

        async def generate(self, group: dict[str, Any]) -> dict[str, Any]:
            made, spans = list(group["made"]), list(group["spans"])
            assert self.open, "a group was sent while the servers take none"
            mine = 0
            while len(made) < group["length"] and self.open:
                await asyncio.sleep(0)
                if self.open:
                    made.append(len(made))
                    mine += 1
            if mine:
                spans.append((self.version, mine))
            done = len(made) == group["length"]
            return {**group, "made": made, "spans": spans, "stop_reason": np.array(["stop" if done else "abort"])}

    async def scenario() -> None:
        engine, trained, events = Engine(), [], []
        trainer = SimpleNamespace(param_version=0)

        async def sync() -> None:
            assert not engine.running, "weights changed under a request"
            engine.version = trainer.param_version

        engine.running = 0

        async def counted(group: dict[str, Any]) -> dict[str, Any]:
            engine.running += 1
            try:
                return await engine.generate(group)
            finally:
                engine.running -= 1

        async def cancel() -> None:
            engine.open = False

        async def resume() -> None:
            engine.open = True

        def update(rollouts: list[dict[str, Any]]) -> dict[str, float]:
            for group in rollouts:
                assert group["made"] == list(range(group["length"])) and sum(n for _, n in group["spans"]) == group["length"]
                versions = [version for version, _ in group["spans"]]
                assert versions == sorted(versions) and trainer.param_version - versions[0] <= max_staleness
                trained.append(group["number"])
            trainer.param_version += 1
            events.append(len(trained))
            return {}

        parts = Parts(
            score=lambda rollouts: rollouts,
            sync=sync,
            trainer=trainer,
            steps=4,
            group=lambda number: {"number": number, "length": lengths[number], "made": [], "spans": []},
            generate_groups=lambda groups: [asyncio.ensure_future(counted(group)) for group in groups],
            concat=Many,
            cancel=cancel,
            resume=resume,
        )

        async def train(t: int, rollouts: Any) -> Any:
            for _ in range(pace):  # generation goes on meanwhile
                await asyncio.sleep(0)
            return update(rollouts), rollouts, 0.0

        parts.train = train
        await asyncio.wait_for(fit_partial(parts, batch_size=3, max_staleness=max_staleness), 60)
        assert sorted(trained) == list(range(12)) and events == [3, 6, 9, 12]
        if max_staleness == 0:
            assert trained == list(range(12)), "nothing may run ahead: the order of fit_sync"

    asyncio.run(scenario())


# ---- The file itself -------------------------------------------------------------------------------------------------


def test_the_examples_in_the_docstrings_are_true() -> None:
    """Documentation that is not run goes wrong."""
    said = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False)
    for case in doctest.DocTestFinder().find(module):
        runner.run(case, out=said.write)
    assert runner.failures == 0, said.getvalue()
    assert runner.tries >= 2


def test_the_file_works_alone(tmp_path: Path) -> None:
    """Copied into an empty folder, importing it is silent, and its demo learns, in each loop."""
    shutil.copy(module.__file__, tmp_path)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}

    def python(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=120
        ).stdout

    assert python("-c", "import trainer") == ""
    said = {line.split()[0]: line for line in python("trainer.py").splitlines()}
    assert "staleness 0, mean |log ratio| 0.0000, clipped 0.000" in said["fit_sync"]
    assert "staleness 1, mean" in said["fit_one_step_off"]
    assert float(said["fit_one_step_off"].split("|log ratio| ")[1].split(",")[0]) > 0
    for line in said.values():
        before, after = (float(word) for word in line.split("reward ")[1].split(",")[0].split(" -> "))
        assert before < 0.5 < 0.9 < after, line
