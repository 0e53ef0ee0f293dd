"""GRPO, and three loops around it: when to generate, when to train, when to move the weights.

    fit_sync          sync 0 | gen 0 | train 0 | sync 1 | gen 1 | train 1 | ...
    fit_one_step_off  sync 0 | gen 0 | gen 1   | sync 1 | gen 2   | sync 2 | gen 3   | ...
                                     | train 0 |        | train 1 |        | train 2 |
    fit_partial       sync 0 | gen ----------x sync 1 | gen ----------x sync 2 | gen ---- ...
                             |     | train 0 |        |   | train 1 |          (x: cut midway, resumed after the sync)

A step, from rollouts to new weights:
    1. group advantages: each response's reward against the other responses to the same prompt
    2. micro-batches: sequences sorted by length, padded among their like, at most `micro_batch_tokens` tokens each
    3. log-probabilities of the response tokens, and of nothing else
    4. PPO's clipped loss, against the log-probabilities the tokens were *sampled* with (a stale batch needs them)
    5. each token's loss divided by a number known for the whole batch, gradients summed: how it is split changes nothing
    6. check that all is finite, clip, step

Why a stale batch needs the sampler's log-probabilities: in `ratio = exp(log_probs - old_log_probs)` the denominator says who
chose the tokens. Recomputed with the newest weights it would be the numerator itself: the ratio would be 1, the clip would
never act, and the batch would pass for fresh. (`importance="decoupled"` does so, and multiplies the loss by the factor that is
then missing, old / sampled, truncated.)

Left out, and where verl does it (commit b178a3c):
    1. critics, GAE, dual clip              verl/trainer/ppo/core_algos.py
    2. Megatron, sequence parallelism       verl/workers/
    3. resharding between engines           verl/workers/

Needs: numpy, torch, safetensors (transformers inside load_policy).   Used by: run_gsm8k.py.
Run: python trainer.py  (a toy policy learns to say one token, synchronously and one step off)
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

logger = logging.getLogger(__name__)

# ---- 1. Advantages ---------------------------------------------------------------------------------------------------


def compute_grpo_advantages(
    rewards: Sequence[float] | np.ndarray,
    groups: Sequence[Any] | np.ndarray,
    *,
    normalize_by_std: bool = True,
    group_size: int | None = None,
    epsilon: float = 1e-6,
) -> np.ndarray:
    """Each reward minus its group's mean, over the group's standard deviation (GRPO, arXiv 2402.03300, section 4.1.2).

    `rewards` (n,) and `groups` (n,), any hashable label: those share it that answer the same prompt, of one draw of it.
    Returns (n,) float64.
    `normalize_by_std=False` leaves the division out (Dr. GRPO, arXiv 2503.20783). The deviation is that of a sample
    (n - 1), as in verl and TRL. A group whose rewards are all equal gets exactly 0, not rounding noise over epsilon.
    Raises ValueError for a group of one, and for one that has not `group_size` members, if that is given.

    >>> compute_grpo_advantages([1, 0, 5, 5], ["a", "a", "b", "b"], normalize_by_std=False).tolist()
    [0.5, -0.5, 0.0, 0.0]
    """
    rewards = np.asarray(rewards, np.float64)
    members: dict[Any, list[int]] = {}
    for i, label in enumerate(groups):
        members.setdefault(label, []).append(i)
    advantages = np.zeros_like(rewards)
    for label, mine in members.items():
        r = rewards[mine]
        if len(r) == 1:
            raise ValueError(f"group {label} has one response: its advantage over itself says nothing, use at least 2")
        if group_size is not None and len(r) < group_size:
            raise ValueError(f"group {label} has {len(r)} of {group_size} responses: score it when all are back")
        if group_size is not None and len(r) > group_size:
            raise ValueError(f"group {label} has {len(r)} responses, and not {group_size}: do two prompts share the label?")
        if r.max() != r.min():  # true of nan as well, which is then seen in the loss; `>` would take it for equal rewards
            advantages[mine] = (r - r.mean()) / (r.std(ddof=1) + epsilon if normalize_by_std else 1.0)
    return advantages


# ---- 2. Micro-batches ------------------------------------------------------------------------------------------------


MAX_PADDING = 0.1  # share of a micro-batch's tokens


def micro_batches(lengths: Sequence[int] | np.ndarray, max_tokens: int) -> list[np.ndarray]:
    """Row numbers of each micro-batch, (rows,) int64: sorted by length, at most `max_tokens` tokens after padding, of which at
    most a tenth is padding.

    `lengths` is (n,), in tokens; each of the n rows is in one micro-batch. A row longer than `max_tokens` gets one of its own.

    >>> [rows.tolist() for rows in micro_batches([10, 50, 12, 48], max_tokens=100)]
    [[1, 3], [2, 0]]
    """
    order = np.argsort(-np.asarray(lengths), kind="stable")
    batches: list[list[int]] = []
    padded = tokens = 0  # of the last one, with the next row
    for i in order:
        if batches:
            padded, tokens = lengths[batches[-1][0]] * (len(batches[-1]) + 1), tokens + lengths[i]  # the first row is longest
        if batches and padded <= max_tokens and tokens >= (1 - MAX_PADDING) * padded:
            batches[-1].append(i)
        else:
            batches.append([i])
            tokens = lengths[i]
    return [np.array(rows) for rows in batches]


def spread(lengths: Sequence[int] | np.ndarray, n: int) -> list[np.ndarray]:
    """Row numbers for each of n workers, (rows,) int64: longest first, each to whoever has the fewest tokens so far.

    `lengths` is (N,), in tokens. By tokens, since all wait for the one that has most. The loads differ by at most the
    longest row.

    >>> [rows.tolist() for rows in spread([50, 10, 30, 10], 2)]
    [[0], [2, 1, 3]]
    """
    shares: list[list[int]] = [[] for _ in range(n)]
    loads = [0] * n
    for i in np.argsort(-np.asarray(lengths), kind="stable"):
        lightest = loads.index(min(loads))
        shares[lightest].append(i)
        loads[lightest] += int(lengths[i])
    return [np.array(rows, np.int64) for rows in shares]


# ---- 3. Log-probabilities --------------------------------------------------------------------------------------------

LOGITS_AT_ONCE = 2**24  # entries of one chunk of logits: 64 MB in float32


def compute_log_probs(
    model: nn.Module, prompts: Sequence[np.ndarray], responses: Sequence[np.ndarray], temperature: float = 1.0
) -> Tensor:
    """log_softmax(logits / temperature) at each response token, packed: (sum of response lengths,) float32, rows in order.

    `prompts` and `responses` are B rows of token ids; a prompt has at least one. Rows are padded on the right, where a causal
    model cannot see the padding, so no mask is needed, and what pad is does not matter. The model body runs on all
    tokens, its head on those alone that predict a response token; so `model` has `base_model` and `get_output_embeddings()`, as
    Hugging Face's have, and does nothing between the two (`check_policy`). With no rows it runs on one token that counts for
    nothing, since a sharded model waits for all. Of the sampler's settings only the temperature is applied: train with samples
    that were drawn without top-p, top-k and the like.
    """
    device = next(model.parameters()).device
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    input_ids = np.zeros((max(1, len(lengths)), max(lengths, default=1)), np.int64)
    predicts = np.zeros(input_ids.shape, bool)  # True where the *next* token is one of the response
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        if len(prompt) == 0:
            raise ValueError("an empty prompt predicts nothing: the first response token would have no probability")
        input_ids[row, : len(prompt)] = prompt
        input_ids[row, len(prompt) : lengths[row]] = response
        predicts[row, len(prompt) - 1 : lengths[row] - 1] = True
    targets = torch.from_numpy(np.concatenate([*responses, []]).astype(np.int64)).to(device)
    # A sharded model has it as a method, at whose start and end its weights come and go.
    forward = getattr(model, "token_log_probs", None) or partial(token_log_probs, model)
    return forward(torch.from_numpy(input_ids).to(device), torch.from_numpy(predicts).to(device), targets, temperature)


def token_log_probs(model: nn.Module, input_ids: Tensor, predicts: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """log_softmax(logits / temperature) of `targets` (N,) where `predicts` (B, L), bool, has its N Trues: (N,) float32."""
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    hidden = hidden[predicts]  # (N, hidden size)
    head = model.get_output_embeddings()

    def log_probs(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = head(hidden).float() / temperature  # (n, vocabulary)
        return logits.gather(1, targets.unsqueeze(1)).squeeze(1) - logits.logsumexp(1)

    rows = max(1, LOGITS_AT_ONCE // head.weight.shape[0])
    if len(targets) <= rows:
        return log_probs(hidden, targets)
    # Tokens x vocabulary is the largest tensor of all. In chunks, each computed again in the backward pass, only one
    # chunk of it exists at a time.
    return torch.cat(
        [checkpoint(log_probs, h, t, use_reentrant=False) for h, t in zip(hidden.split(rows), targets.split(rows), strict=True)]
    )


# ---- 4. The loss -----------------------------------------------------------------------------------------------------


def policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped objective, negated, token by token (arXiv 1707.06347, eq. 7): (loss, ratio, clipped), each (N,).

    max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high)); with clip_high > clip_low it is DAPO's clip-higher (arXiv
    2503.14476). `clipped` is True where the clip decides: where the ratio has already moved the way the advantage pushes. It
    does not bound a token of negative advantage that became likelier (verl's dual clip does, arXiv 1912.09729). Log-ratios
    are bounded to +-20 first, as in verl, so that the ratio stays finite.
    """
    ratio = (log_probs - old_log_probs).clamp(-20, 20).exp()
    free = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    return torch.maximum(free, bounded), ratio.detach(), (bounded > free).detach()


def kl_k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(policy || reference), token by token, (N,) in nats: exp(d) - d - 1, d = ref - policy, which
    is never negative."""
    d = (ref_log_probs - log_probs).clamp(-20, 20)
    return d.expm1() - d  # exp(d) - 1 near zero is all rounding, and may come out below d


# ---- 5. and 6. The trainer: model, optimiser, one version number -----------------------------------------------------


def load_policy(
    path: str,
    dtype: torch.dtype = torch.float32,
    gradient_checkpointing: bool = False,
    attn_implementation: str | None = None,
) -> nn.Module:
    """A Hugging Face causal language model from a folder or hub name. Code that comes with a model is never run.

    `attn_implementation` is transformers' name for how attention is computed; None leaves the choice to it.
    """
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": attn_implementation} if attn_implementation else {}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=False, **options)
    _check_generation_config(path, model.generation_config)
    # It is in eval mode as it is loaded, and stays so: dropout would make another policy of it.
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()  # transformers wants it for that, so here dropout must be zero, as in most models it is
    try:
        check_policy(model)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return model


def check_policy(model: nn.Module) -> None:
    """Raises ValueError for a model of which `compute_log_probs` would be wrong: one that scales or caps its logits, and one
    with dropout that is in train mode."""
    device, dtype = next((p.device, p.dtype) for p in model.parameters())
    ids = np.arange(8) % model.get_output_embeddings().weight.shape[0]
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(ids).unsqueeze(0).to(device), use_cache=False).logits[0, :-1].float()
        expected = logits.log_softmax(-1).gather(1, torch.from_numpy(ids[1:]).unsqueeze(1).to(device)).squeeze(1)
        found = compute_log_probs(model, [ids[:1]], [ids[1:]])
    rounded = torch.finfo(dtype).eps * logits.abs().max().item()  # eight rows and seven may round a logit differently
    if not torch.allclose(found, expected, atol=0.02 + rounded):
        raise ValueError(
            "its log-probabilities are not those of its head's output. It rescales its logits: choose another model; or it has "
            "dropout: leave gradient checkpointing out"
        )


def _check_generation_config(path: str, config: Any) -> None:
    """transformers loads what it then refuses to save, which would be with the first checkpoint. Most often it is a temperature
    without the word that it samples."""
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True
        try:
            config.validate(strict=True)
        except ValueError as error:
            why = " ".join(line for line in str(error).splitlines() if line.startswith("- "))  # those with the reasons
            raise ValueError(f"{path}: its generation_config.json could not be saved again: mend it ({why})") from error


def shard(model: nn.Module) -> nn.Module:
    """Spreads weights, gradients and optimiser state over the processes of the default group, by PyTorch's FSDP2.

    A layer's weights are gathered when it is computed, forward and backward, and its gradients are summed and scattered after
    it. So every process must make the same number of passes. The group must be there, and the model on its device.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(model.device.type, (torch.distributed.get_world_size(),))

    def layers(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            yield from child if isinstance(child, nn.ModuleList) else layers(child)

    for module in (*layers(model.base_model), model):  # the model itself takes what is in no layer: embedding, norm, head
        fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        # Sums, not means: the loss is divided already, by what the batch of all processes holds.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    model.token_log_probs = MethodType(token_log_probs, model)
    register_fsdp_forward_method(model, "token_log_probs")
    return model


@dataclass
class GRPOTrainer:
    """What mutates in a run: the model, the optimiser, and `param_version`, which counts the updates.

    Several processes may train together: each has a trainer on a model that `shard` has spread over them, calls the same
    methods with the same arguments, and computes its share of each batch. The gradient is that of one process.

    learning_rate         AdamW, constant, no weight decay unless asked for
    temperature           the one that was sampled with
    clip_low, clip_high   the ratio is clipped below 1 - clip_low and above 1 + clip_high (see policy_loss)
    importance            "bypass": the ratio's denominator is the sampler's log-probability, one forward pass. "decoupled":
                          it is recomputed before the update, and the sampler's enters as a weight (Hilton et al., arXiv
                          2110.00641; AReaL, arXiv 2505.24298, eq. 5), truncated at `tis_cap` (truncated importance
                          sampling). With one mini-batch the ratio is then 1: the cap bounds the update, and not the clip
    loss_aggregation      "token-mean": every token of the batch counts alike (DAPO, arXiv 2503.14476; the GRPO paper takes
                          the mean of each response first). "dr-grpo": sum over a response divided by the constant
                          `response_length`, mean over responses (that paper has normalize_by_std=False as well)
    group_size            responses per prompt; a group that has more or fewer is refused. None refuses those of one alone
    num_mini_batches      optimiser steps per batch
    kl_coef, reference    weight of the KL to a reference model; with 0 there is no reference and nothing is computed
    micro_batch_tokens    tokens after padding that go through the model at once: memory, not mathematics
    """

    model: nn.Module
    learning_rate: float = 1e-6
    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    importance: Literal["bypass", "decoupled"] = "bypass"
    tis_cap: float = 2.0
    loss_aggregation: Literal["token-mean", "dr-grpo"] = "token-mean"
    response_length: int = 1024
    normalize_by_std: bool = True
    group_size: int | None = None
    num_mini_batches: int = 1
    kl_coef: float = 0.0
    reference: nn.Module | None = None
    max_grad_norm: float = 1.0
    micro_batch_tokens: int = 8192
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    param_version: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        sharded = hasattr(self.model, "token_log_probs")
        self._weights: bytearray | None = None  # see `weights`
        self._slots: dict[str, Tensor] = {}
        self.rank = torch.distributed.get_rank() if sharded else 0
        self.world_size = torch.distributed.get_world_size() if sharded else 1
        for name in ("importance", "loss_aggregation"):
            choices = get_args(get_type_hints(GRPOTrainer)[name])
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {', '.join(choices)}")
        if self.kl_coef and self.reference is None:
            raise ValueError(f"kl_coef={self.kl_coef} needs a reference model: pass one, or kl_coef=0")
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        # A step of 1e-6 is lost in bfloat16, which has 8 bits. So weights of less than float32 get a float32 copy, which
        # is what the optimiser updates (master weights); a weight in float32 is its own.
        self.master = [p if p.dtype == torch.float32 else p.detach().float() for p in self.parameters]
        self.optimizer = torch.optim.AdamW(
            self.master, lr=self.learning_rate, betas=self.betas, weight_decay=self.weight_decay, fused=True
        )

    # -- one update

    def update(self, rollouts: Any) -> dict[str, float]:
        """Trains on one batch and returns its metrics; means are over response tokens unless the name says otherwise.

        `rollouts` has n rows. Ragged columns, with `rows()`, `lengths` (n,) and `values`: prompt_ids and response_ids (ints),
        response_mask (0 or 1), response_logprobs (nats, of the distribution that was sampled: after the temperature, unlike
        vLLM's default, raw_logprobs), span_versions and span_lengths (ints, for the staleness). Arrays (n,): rewards
        (floats), group (labels) and uid (names of the samples). Of a fresh batch in one mini-batch `abs_log_ratio` must come
        out near 0.

        Raises ValueError for incomplete groups, and FloatingPointError, which names the step and the samples, for a loss or
        gradient that is not finite; no optimiser step is then made with it (where a batch is cut into mini-batches, those
        before it are in the weights).
        """
        if len(rollouts) == 0:
            raise ValueError("an empty batch has nothing to train on")
        knobs = {"normalize_by_std": self.normalize_by_std, "group_size": self.group_size}
        advantages = compute_grpo_advantages(rollouts["rewards"], rollouts["group"], **knobs)
        names = ("prompt_ids", "response_ids", "response_mask", "response_logprobs")
        columns = {name: rollouts[name].rows() for name in names} | {"advantages": advantages}
        lengths = rollouts["prompt_ids"].lengths + rollouts["response_ids"].lengths
        mini = np.array_split(np.arange(len(rollouts)), min(self.num_mini_batches, len(rollouts)))
        mine = [self._micro_batches(part, lengths, rollouts["response_ids"].lengths) for part in mini]

        with torch.no_grad():
            columns["ref_log_probs"] = self._all_log_probs(self.reference, columns, mine) if self.kl_coef else None
            # With one optimiser step the proximal policy is the current one: `_loss` then takes log_probs.detach().
            recompute = self.importance == "decoupled" and len(mini) > 1
            columns["old_log_probs"] = self._all_log_probs(self.model, columns, mine) if recompute else None

        sums: dict[str, float] = {"tokens": 0.0}
        grad_norms = []
        for part, batches in zip(mini, mine, strict=True):
            grad_norms.append(self._step(part, batches, columns, sums, rollouts["uid"]))
        self.param_version += 1

        tokens = sums.pop("tokens")
        metrics = {name: value / max(tokens, 1) for name, value in sums.items()}
        return {"grad_norm": float(np.mean(grad_norms)), **metrics, **self._describe(rollouts, advantages)}

    def _micro_batches(self, part: np.ndarray, lengths: np.ndarray, response_lengths: np.ndarray) -> list[np.ndarray]:
        """This process's micro-batches of the rows `part`. An empty response teaches nothing, and is in none of them.

        Every process has the same number, since each pass over a sharded model takes them all: those with fewer end with
        empty ones.
        """
        full = part[response_lengths[part] > 0]
        shares = [full[share] for share in spread(lengths[full], self.world_size)]
        batches = [[share[rows] for rows in micro_batches(lengths[share], self.micro_batch_tokens)] for share in shares]
        mine = batches[self.rank]
        return mine + [full[:0]] * (max(map(len, batches)) - len(mine))

    def _step(
        self, part: np.ndarray, batches: Sequence[np.ndarray], columns: dict[str, Any], sums: dict[str, float], uids: np.ndarray
    ) -> float:
        """One optimiser step on the rows `part`, of which this process has the micro-batches `batches`; returns the gradient's
        norm before clipping.

        Adds the sums of the metrics, over the tokens of all processes, to `sums`.
        """
        # The divisor is that of all of `part`, known before the first micro-batch. A mean per micro-batch, averaged, would
        # weigh a token by the company it was packed with.
        if self.loss_aggregation == "token-mean":
            divisor = max(1, sum(int(columns["response_mask"][i].sum()) for i in part))
        else:
            divisor = len(part) * self.response_length
        self.optimizer.zero_grad()
        totals: dict[str, float] = {}  # of this process
        bad: list[str] = []  # samples whose loss is not finite
        for micro_batch in batches:
            per_token, figures = self._loss(micro_batch, columns)
            if not torch.isfinite(per_token).all():
                owner = np.repeat(micro_batch, [len(columns["response_ids"][i]) for i in micro_batch])
                bad += map(str, uids[np.unique(owner[~torch.isfinite(per_token).cpu().numpy()])])
            (per_token.sum() / divisor).backward()
            for master, p in self._masters():
                # Summed in float32: in bfloat16 256 + 1 is 256, and the 257th of equal micro-batches would not count.
                if p.grad is not None:
                    master.grad = p.grad.float() if master.grad is None else master.grad.add_(p.grad)
                    p.grad = None
            for name, value in figures.items():
                totals[name] = totals.get(name, 0.0) + float(value)
        for name, value in self._total(totals).items():
            sums[name] = sums.get(name, 0.0) + value
        if all(p.grad is None for p in self.master):
            return 0.0  # every response was empty
        norm = nn.utils.get_total_norm([p.grad for p in self.master if p.grad is not None])
        size = float(_whole(norm))
        # Asked once, of what all processes have in common, so that either all of them stop or none.
        if not math.isfinite(size + sum(sums.values())):
            if bad := self._names_of_all(bad):
                raise FloatingPointError(f"step {self.param_version}: the loss of {_shorten(bad)} is not finite")
            bad = self._blame(part, columns, uids)
            raise FloatingPointError(f"step {self.param_version}: the gradient is not finite, from {_shorten(bad)}")
        nn.utils.clip_grads_with_norm_(self.master, self.max_grad_norm, norm)
        self.optimizer.step()
        with torch.no_grad():
            for master, p in self._masters():
                p.copy_(master)
        return size

    def _total(self, mine: dict[str, float]) -> dict[str, float]:
        """Each figure summed over the processes."""
        if self.world_size == 1:
            return mine
        totals = torch.tensor(list(mine.values()), dtype=torch.float64, device=self.model.device)
        torch.distributed.all_reduce(totals)
        return dict(zip(mine, totals.tolist(), strict=True))

    def _names_of_all(self, mine: list[str]) -> list[str]:
        if self.world_size == 1:
            return mine
        every: list[list[str]] = [[]] * self.world_size
        torch.distributed.all_gather_object(every, mine)
        return sorted(name for names in every for name in names)

    def _masters(self) -> list[tuple[Tensor, nn.Parameter]]:
        """The master weights and the weights that they are rounded to; none for a model in float32."""
        return [(master, p) for master, p in zip(self.master, self.parameters, strict=True) if master is not p]

    def _loss(self, micro_batch: np.ndarray, columns: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of each response token of a micro-batch, (N,), and the sums of its metrics."""
        prompts, responses = [columns["prompt_ids"][i] for i in micro_batch], [columns["response_ids"][i] for i in micro_batch]
        log_probs = compute_log_probs(self.model, prompts, responses, self.temperature)

        def flat(values: Sequence[np.ndarray]) -> Tensor:
            return torch.from_numpy(np.concatenate([*values, []]).astype(np.float32)).to(log_probs.device)

        mask = flat([columns["response_mask"][i] for i in micro_batch])
        # A masked token was not sampled, and what stands there may be nan. 0 * nan is nan, in a backward pass too, so it goes
        # before anything is computed with it.
        sampled = torch.where(mask > 0, flat([columns["response_logprobs"][i] for i in micro_batch]), log_probs.detach())
        advantages = flat([np.full(len(columns["response_ids"][i]), columns["advantages"][i]) for i in micro_batch])
        # The ratio's denominator. bypass: the policy that sampled (the behaviour policy). decoupled: the policy before this
        # update (the proximal policy); the weight below corrects from the one to the other.
        old = sampled
        if self.importance == "decoupled":
            stored = columns["old_log_probs"]
            old = log_probs.detach() if stored is None else flat([stored[i] for i in micro_batch])
        per_token, _, clipped = policy_loss(log_probs, old, advantages, clip_low=self.clip_low, clip_high=self.clip_high)
        if self.importance == "decoupled":
            per_token = per_token * (old - sampled).clamp(-20, 20).exp().clamp(max=self.tis_cap)
        figures = {"policy_loss": (per_token.detach() * mask).sum()}
        if self.kl_coef:
            kl = kl_k3(log_probs, flat([columns["ref_log_probs"][i] for i in micro_batch]))
            per_token = per_token + self.kl_coef * kl
            figures["ref_kl"] = (kl.detach() * mask).sum()
        off = (log_probs.detach() - sampled) * mask  # how far the policy has moved from who sampled
        figures |= {
            "tokens": mask.sum(),
            "clip_frac": (clipped * mask).sum(),
            "approx_kl": (kl_k3(old, log_probs.detach()) * mask).sum(),
            "abs_log_ratio": off.abs().sum(),
            "sampler_ratio": (off.clamp(-20, 20).exp() * mask).sum(),
        }
        return per_token * mask, figures

    def _all_log_probs(
        self, model: nn.Module, columns: dict[str, Any], mine: Sequence[Sequence[np.ndarray]]
    ) -> list[np.ndarray]:
        """The log-probabilities under `model` of the rows in the micro-batches `mine`, row by row; no gradient."""
        result: list[np.ndarray] = [np.zeros(0)] * len(columns["advantages"])
        for micro_batch in itertools.chain(*mine):
            prompts = [columns["prompt_ids"][i] for i in micro_batch]
            responses = [columns["response_ids"][i] for i in micro_batch]
            values = compute_log_probs(model, prompts, responses, self.temperature).cpu().numpy()
            ends = np.cumsum([len(r) for r in responses], dtype=np.int64)
            for i, row in zip(micro_batch, np.split(values, ends)[:-1], strict=True):
                result[i] = row
        return result

    def _blame(self, part: np.ndarray, columns: dict[str, Any], uids: np.ndarray) -> list[str]:
        """The samples whose own gradient is not finite, or all: where only their sum is not, and where no process can tell."""
        bad = []
        for i in part if self.world_size == 1 else ():
            per_token, _ = self._loss(np.array([i]), columns)
            grads = torch.autograd.grad(per_token.sum(), self.parameters, allow_unused=True) if per_token.numel() else ()
            if not all(torch.isfinite(g).all() for g in grads if g is not None):
                bad.append(i)
        return [str(uid) for uid in uids[bad or part]]

    def _describe(self, rollouts: Any, advantages: np.ndarray) -> dict[str, float]:
        """Metrics of the batch itself; staleness is in versions, over tokens."""
        lengths = rollouts["response_ids"].lengths
        groups = np.asarray(rollouts["group"])
        differ = [np.any(advantages[groups == group] != 0) for group in np.unique(groups)]
        trained_from = self.param_version - 1
        staleness = trained_from - rollouts["span_versions"].values
        n = rollouts["span_lengths"].values
        return {
            "reward": float(np.mean(rollouts["rewards"])),
            "response_length/mean": float(lengths.mean()),
            "response_length/max": int(lengths.max()),
            "staleness/mean": float(np.average(staleness, weights=n)) if n.sum() else 0.0,
            "staleness/max": int(staleness.max(initial=0)),
            "partial_fraction": float(np.mean(rollouts["span_lengths"].lengths > 1)),
            "zero_spread_groups": 1 - float(np.mean(differ)),
        }

    # -- state out and in

    def weights(self) -> memoryview:
        """All weights as the bytes of a safetensors file; tied ones once, as vLLM and transformers want them.

        Good until the next call, which fills the same memory: to lay it out anew takes seven times as long as to copy. It costs
        a copy of the weights on the CPU. Ray takes it as `np.frombuffer(trainer.weights(), np.uint8)`.
        """
        state = self.model_state()
        if self._weights is None:
            file, slots = bytearray(save(state)), {}
            header = 8 + int.from_bytes(file[:8], "little")  # its length comes first, then where each tensor begins
            for name, entry in json.loads(file[8:header]).items():
                start, like = header + entry["data_offsets"][0], state[name]
                slots[name] = torch.frombuffer(file, dtype=like.dtype, count=like.numel(), offset=start).view(like.shape)
            self._weights, self._slots = file, slots
        for name, tensor in state.items():
            self._slots[name].copy_(tensor)
        return memoryview(self._weights).toreadonly()

    def model_state(self) -> dict[str, Tensor]:
        """All weights by name, tied ones once. Where several processes train, all must call this, and the first gets them."""
        unique = {name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())}
        return self._gather({name: tensor for name, tensor in self.model.state_dict().items() if name in unique})

    def optimizer_state(self) -> dict[str, Tensor]:
        """What else an update changes: the optimiser's moments, and master weights where there are any. As `model_state`."""
        tensors: dict[str, Tensor] = {}
        for i, master in enumerate(self.master):
            if self.parameters[i] is not master:
                tensors[f"{i}.master"] = master
            for name, value in self.optimizer.state.get(master, {}).items():
                tensors[f"{i}.{name}"] = value
        return self._gather(tensors)

    def load_optimizer_state(self, tensors: dict[str, Tensor]) -> None:
        """Takes what `optimizer_state` gave; each process takes its share of it."""
        for key, value in tensors.items():
            i, name = key.split(".")
            master = self.master[int(i)]
            if hasattr(master, "placements") and value.shape == master.shape:
                value = torch.distributed.tensor.distribute_tensor(value, master.device_mesh, master.placements)
            if name == "master":
                master.data.copy_(value)
            else:
                self.optimizer.state[master][name] = value.to(master.device)

    def _gather(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        state = {}
        for name, tensor in tensors.items():
            # A tensor at a time, and only the first process keeps them; not on its GPU, which has no room for what is spread.
            whole = _whole(tensor.detach())
            if self.rank == 0:
                state[name] = (whole.cpu() if self.world_size > 1 else whole).contiguous()
        return state


def _whole(tensor: Tensor) -> Tensor:
    """A tensor that is spread over processes, put together in each of them; any other as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _shorten(names: Sequence[str]) -> str:
    return f"sample{'s' if len(names) > 1 else ''} {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}"


# ---- The loops -------------------------------------------------------------------------------------------------------


@dataclass
class Timeline:
    """Who worked when: spans (lane, name, start, end, param_version) and marks (name, moment); seconds since the run began."""

    spans: list[tuple[str, str, float, float, int]] = field(default_factory=list)
    marks: list[tuple[str, float]] = field(default_factory=list)
    zero: float = field(default_factory=time.perf_counter)

    @contextmanager
    def span(self, lane: str, name: str, param_version: int) -> Iterator[None]:
        """Records the time that the block takes."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(lane, name, start, time.perf_counter(), param_version)

    def add(self, lane: str, name: str, start: float, end: float, param_version: int) -> None:
        """Records a span between two readings of time.perf_counter."""
        self.spans.append((lane, name, start - self.zero, end - self.zero, param_version))

    def mark(self, name: str) -> None:
        """Records that something happens now."""
        self.marks.append((name, time.perf_counter() - self.zero))

    def save(self, path: Path) -> None:
        """Writes the Trace Event Format, which Perfetto and chrome://tracing open; times in microseconds."""
        lanes = {lane: i for i, lane in enumerate(sorted({span[0] for span in self.spans}))}
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": lane}} for lane, i in lanes.items()
        ]
        for lane, name, start, end, version in self.spans:
            event = {"ph": "X", "name": name, "cat": lane, "pid": 0, "tid": lanes[lane], "args": {"param_version": version}}
            events.append(event | {"ts": start * 1e6, "dur": (end - start) * 1e6})
        events += [{"ph": "i", "s": "p", "name": name, "pid": 0, "tid": 0, "ts": moment * 1e6} for name, moment in self.marks]
        aside = path.with_name(f".{path.name}")
        try:
            aside.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
            aside.replace(path)  # whole, or not at all
        finally:
            aside.unlink(missing_ok=True)

    @staticmethod
    def load(path: Path) -> Timeline:
        """The spans and marks of a file that `save` wrote."""
        timeline = Timeline(zero=0.0)
        for event in json.loads(path.read_text())["traceEvents"]:
            start, end = event.get("ts", 0) / 1e6, (event.get("ts", 0) + event.get("dur", 0)) / 1e6
            if event["ph"] == "X":
                timeline.add(event["cat"], event["name"], start, end, event["args"]["param_version"])
            elif event["ph"] == "i":
                timeline.marks.append((event["name"], start))
        return timeline


@dataclass
class Parts:
    """What a loop is made of. The loops decide when each is called, and nothing else.

    generate(t)          starts generating batch t *now* and returns an awaitable of its rollouts (a coroutine would start
                         when the loop next waits); in meta_info["timing"]["generate_s"] these say how many seconds it took
    score(rollouts)      the same rollouts with a column `rewards` (n,)
    sync()               puts the trainer's weights and param_version into every server
    trainer              its `update(rollouts)` raises `param_version` by 1 and returns metrics; it blocks, so it gets a thread
    steps, first_step    batches first_step .. steps - 1 are trained
    first_rollouts       those of batch `first_step`, where a checkpoint brought them
    checkpoint(t, rollouts)   called when nothing is in flight and batch t waits to be trained; in fit_partial `rollouts` are
                         all that wait, finished and cut, or None
    evaluate(t)          called when nothing is in flight and the servers have the weights that batch t will change; returns
                         metrics
    log(t, metrics, rollouts)   called after each update

    fit_partial has rollouts in flight all the time, so in place of `generate` it needs
    group(number)        the prompts of one group, as a batch; numbers count from 0 over the whole run
    generate_groups(groups)     starts them all *now*, each fresh or from where it was cut; an awaitable for each, of rollouts
                         with a column `stop_reason`, where "abort" is a response that was cut
    concat(groups)       one batch out of several, whose meta_info may differ
    cancel(), resume()   the servers end what they have in flight and take nothing more; they take requests again
    """

    score: Callable[[Any], Any]
    sync: Callable[[], Awaitable[None]]
    trainer: GRPOTrainer
    steps: int
    generate: Callable[[int], Awaitable[Any]] | None = None
    group: Callable[[int], Any] | None = None
    generate_groups: Callable[[list[Any]], list[Awaitable[Any]]] | None = None
    concat: Callable[[list[Any]], Any] | None = None
    cancel: Callable[[], Awaitable[None]] | None = None
    resume: Callable[[], Awaitable[None]] | None = None
    first_step: int = 0
    first_rollouts: Any = None
    checkpoint: Callable[[int, Any], None] = lambda t, rollouts: None
    evaluate: Callable[[int], Awaitable[dict[str, float]]] | None = None
    log: Callable[[int, dict[str, float], Any], None] = lambda t, metrics, rollouts: None
    timeline: Timeline = field(default_factory=Timeline)

    def __post_init__(self) -> None:
        # One thread for training, not one of asyncio's pool: whoever waits there must not hold up an update.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train")
        self._sent_back = 0  # how often, in this step

    async def before_sending_again(self) -> None:
        """A moment's wait, after groups came back that the loop has not cut: by another's cancel, or from a server that was not
        ready. Every ten seconds of it a warning, since it may never end."""
        self._sent_back += 1
        if self._sent_back % 100 == 0:
            logger.warning(
                "requests came back unfinished %d times, and not for a sync: are the servers paused, or do they have weights "
                "of another version than %d?",
                self._sent_back,
                self.trainer.param_version,
            )
        await asyncio.sleep(0.1)

    async def timed_sync(self) -> float:
        """Syncs; returns the seconds it took."""
        start = time.perf_counter()
        with self.timeline.span("sync", f"sync {self.trainer.param_version}", self.trainer.param_version):
            await self.sync()
        return time.perf_counter() - start

    async def train(self, t: int, rollouts: Any) -> tuple[dict[str, float], Any, float]:
        """Scores and trains in the thread: (metrics, scored rollouts, seconds)."""

        def work() -> tuple[dict[str, float], Any]:
            scored = self.score(rollouts)
            return self.trainer.update(scored), scored

        self._sent_back = 0
        start = time.perf_counter()
        with self.timeline.span("trainer", f"train {t}", self.trainer.param_version):
            metrics, scored = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        return metrics, scored, time.perf_counter() - start

    async def evaluated(self, t: int) -> dict[str, float]:
        """The metrics of `evaluate`, or none."""
        return await self.evaluate(t) if self.evaluate else {}


async def fit_sync(parts: Parts) -> None:
    """Generate, train, sync. Every batch is trained by the very weights that sampled it: what the others are measured by."""
    rollouts = parts.first_rollouts
    for t in range(parts.first_step, parts.steps):
        start = time.perf_counter()
        sync_s = await parts.timed_sync()
        evaluation = await parts.evaluated(t)
        wait_start = time.perf_counter()
        if rollouts is None:
            rollouts = await parts.generate(t)
        wait_s = time.perf_counter() - wait_start
        parts.checkpoint(t, rollouts)
        metrics, scored, train_s = await parts.train(t, rollouts)
        times = step_times(rollouts.meta_info["timing"]["generate_s"], wait_s, train_s, sync_s, time.perf_counter() - start)
        parts.log(t, metrics | evaluation | times, scored)
        rollouts = None


async def fit_one_step_off(parts: Parts) -> None:
    """Train on batch t while batch t+1 is generated. The first batch is fresh, each later one exactly one version old."""
    if parts.first_step >= parts.steps:
        return
    start = time.perf_counter()
    sync_s = await parts.timed_sync()
    pending = None  # where a checkpoint has brought the first batch
    if parts.first_rollouts is None:
        pending = asyncio.ensure_future(parts.generate(parts.first_step))
    try:
        for t in range(parts.first_step, parts.steps):
            wait_start = time.perf_counter()
            rollouts = parts.first_rollouts if pending is None else await pending
            wait_s = time.perf_counter() - wait_start
            pending = None

            # Nothing is in flight: the one moment to save, and to change the weights.
            parts.checkpoint(t, rollouts)
            if t > parts.first_step:  # before the first update nothing is new: batches 0 and 1 have the same weights
                sync_s = await parts.timed_sync()
            evaluation = await parts.evaluated(t)
            if t + 1 < parts.steps:
                pending = asyncio.ensure_future(parts.generate(t + 1))  # under way before the next line runs

            metrics, scored, train_s = await parts.train(t, rollouts)
            times = step_times(rollouts.meta_info["timing"]["generate_s"], wait_s, train_s, sync_s, time.perf_counter() - start)
            parts.log(t, metrics | evaluation | times, scored)
            start = time.perf_counter()
    finally:
        if pending is not None:
            pending.cancel()  # training failed: the batch in flight has no one to wait for it, nor to look at its own error
            await asyncio.gather(pending, return_exceptions=True)


class GroupPool:
    """The bookkeeping of fully asynchronous training: which prompts may start, which groups may be trained. No I/O.

    A group is the responses to one prompt, as one batch. It is admitted at some version of the weights, comes back finished
    or cut, and is trained exactly once, whole, and at most `max_staleness` versions after its admission.

    Admission (AReaL, arXiv 2505.24298, eq. 3): at version v at most (v + max_staleness + 1) x batch_size groups have ever been
    admitted. So those admitted at v fit into the batches v ... v + max_staleness. That alone does not keep the promise: fast
    groups that overtake could leave more old ones behind than one batch holds. Hence `take`: oldest first among the
    finished, and no batch at all while it would lack one that can wait no longer.
    """

    def __init__(self, batch_size: int, max_staleness: int, total: int, admitted: int = 0) -> None:
        self.batch_size, self.max_staleness, self.total = batch_size, max_staleness, total
        self.admitted = admitted  # how many groups so far: also the number of the next one
        self.admitted_at: dict[int, int] = {}  # groups that are not trained yet: number -> version
        self.finished: dict[int, Any] = {}
        self.cut: dict[int, Any] = {}

    def admit(self, version: int) -> list[int]:
        """Numbers of the groups that may start at `version`."""
        allowed = min(self.total, (version + self.max_staleness + 1) * self.batch_size)
        new = list(range(self.admitted, allowed))
        self.admitted = max(self.admitted, allowed)
        self.admitted_at |= dict.fromkeys(new, version)
        return new

    def put(self, number: int, group: Any) -> None:
        """Takes back a group. One with a cancelled response is not complete: it waits to be resumed. Raises ValueError for a
        group that is not out."""
        if number not in self.admitted_at or number in self.finished or number in self.cut:
            raise ValueError(f"group {number} came back, but it is not out")
        complete = not np.any(np.asarray(group["stop_reason"]) == "abort")
        (self.finished if complete else self.cut)[number] = group

    def resumable(self) -> dict[int, Any]:
        """Hands out the groups that were cut, in order of admission."""
        groups, self.cut = dict(sorted(self.cut.items())), {}
        return groups

    def untrained(self, concat: Callable[[list[Any]], Any]) -> Any:
        """All groups that wait here, as one batch whose meta_info["groups"] says which they are; None if there are none.

        What a checkpoint needs, at a moment when no group is out.
        """
        groups = dict(sorted({**self.finished, **self.cut}.items()))
        if not groups:
            return None
        batch = concat(list(groups.values()))
        batch.meta_info["groups"] = [(number, self.admitted_at[number], len(group)) for number, group in groups.items()]
        return batch

    def restore(self, untrained: Any) -> None:
        """Takes in the groups of a checkpoint, as `untrained` gave them."""
        start = 0
        for number, admitted_at, size in [] if untrained is None else untrained.meta_info["groups"]:
            group = untrained[start : start + size]
            del group.meta_info["groups"]
            start += size
            self.admitted += 1  # beyond those that are trained already
            self.admitted_at[number] = admitted_at
            self.put(number, group)

    def take(self, version: int) -> dict[int, Any] | None:
        """The batch to train at `version`: number -> group, oldest first. None while it has to wait."""
        chosen = sorted(self.finished)[: self.batch_size]
        if len(chosen) < self.batch_size:
            return None
        for later in range(self.max_staleness + 1):
            # A group admitted at version a must be trained at a + max_staleness at the latest. The `later` batches after this
            # one can hold later * batch_size of those that are due by then: any more of them must be in this one.
            latest = version - self.max_staleness + later
            due = sum(at <= latest for at in self.admitted_at.values()) - later * self.batch_size
            if sum(self.admitted_at[number] <= latest for number in chosen) < due:
                return None
        for number in chosen:
            del self.admitted_at[number]
        return {number: self.finished.pop(number) for number in chosen}


async def fit_partial(parts: Parts, *, batch_size: int, max_staleness: int) -> None:
    """Fully asynchronous: rollouts run ahead by `max_staleness` batches, and training waits for the first `batch_size` complete
    groups; where an unfinished one would be too old for the next batch, for that one too.

        rollouts | gen v0 .............x gen v1 ................x gen v2 ......
        trainer  | (waits) | train v0 | | (waits) | train v1 | |
                                      ^ sync: what is in flight is cut, weights change, it resumes

    With max_staleness=0 nothing may run ahead, and it trains what `fit_sync` trains, to the bit.
    """
    pool = GroupPool(batch_size, max_staleness, total=parts.steps * batch_size, admitted=parts.first_step * batch_size)
    pool.restore(parts.first_rollouts)
    in_flight: dict[Any, int] = {}
    dispatched_at = answered_at = 0.0  # when the last rollouts went out, and came back: for the metrics and the timeline alone

    def stamp(_: Any) -> None:
        nonlocal answered_at
        answered_at = time.perf_counter()

    def dispatch() -> None:
        groups = pool.resumable()
        groups |= {number: parts.group(number) for number in pool.admit(parts.trainer.param_version)}
        tasks = [asyncio.ensure_future(group) for group in parts.generate_groups(list(groups.values()))]
        for task in tasks:
            task.add_done_callback(stamp)
        in_flight.update(zip(tasks, groups, strict=True))

    if parts.first_step >= parts.steps:
        return
    start = time.perf_counter()
    sync_s = await parts.timed_sync()
    evaluation = await parts.evaluated(parts.first_step)
    dispatched_at = answered_at = time.perf_counter()
    dispatch()
    try:
        for t in range(parts.first_step, parts.steps):
            version = parts.trainer.param_version
            wait_start = time.perf_counter()
            while (taken := pool.take(version)) is None:
                if pool.cut:  # not by this loop; sent again until they come back whole
                    await parts.before_sending_again()
                    dispatch()
                done, _ = await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    pool.put(in_flight.pop(task), task.result())
            wait_s = time.perf_counter() - wait_start
            rollouts = parts.concat(list(taken.values()))
            metrics, scored, train_s = await parts.train(t, rollouts)

            cancel_start = time.perf_counter()
            if not all(task.done() for task in in_flight):
                parts.timeline.mark("cancel")
            await parts.cancel()
            for task, number in list(in_flight.items()):  # all of them come back: finished, or with the tokens they have
                pool.put(number, await task)
                del in_flight[task]
            cancel_s = time.perf_counter() - cancel_start
            parts.timeline.add("rollouts", f"generate v{version}", dispatched_at, answered_at, version)
            step_s, generate_s = time.perf_counter() - start, answered_at - dispatched_at
            times = step_times(generate_s, wait_s, train_s, sync_s + cancel_s, step_s)
            parts.log(t, metrics | evaluation | times, scored)
            start = time.perf_counter()
            if t + 1 == parts.steps:
                await parts.resume()
                return
            # Nothing is in flight: the one moment to save, and to change the weights.
            parts.checkpoint(t + 1, pool.untrained(parts.concat))
            sync_s = await parts.timed_sync()
            await parts.resume()
            evaluation = await parts.evaluated(t + 1)
            dispatched_at = answered_at = time.perf_counter()
            dispatch()
    finally:
        for task in in_flight:
            task.cancel()
        await asyncio.gather(*in_flight, return_exceptions=True)


def step_times(generate_s: float, wait_s: float, train_s: float, sync_s: float, step_s: float) -> dict[str, float]:
    """Seconds of one step. Overlap efficiency is max(generate, train) / step: 1 where the longer hides the shorter whole.

    Overlap cannot win more: in the mean a step lasts at least as long as the longer of its two halves. (A single row may have
    more: one step off, batch t was generated in the step before, and that may have been the longer one.)
    """
    return {
        "time/generate_s": generate_s,
        "time/wait_s": wait_s,
        "time/train_s": train_s,
        "time/sync_s": sync_s,
        "time/step_s": step_s,
        "time/overlap_efficiency": max(generate_s, train_s) / step_s,
    }


# ---- Checkpoints -----------------------------------------------------------------------------------------------------


def save_checkpoint(
    root: Path,
    step: int,
    trainer: GRPOTrainer,
    rollouts: Any,
    *,
    keep: int = 2,
    tokenizer: Any = None,
    spare: Path | None = None,
) -> Path:
    """Writes root/step_NNNNNN: all that a run needs to go on with batch `step` as if it had never stopped.

    Weights (with config and tokenizer: the folder is a model like any other), optimiser, versions, random state, and the
    rollouts that wait to be trained, if any do. Everything is written aside, synced to disk and renamed in one piece, so a
    folder with that name is complete. `state.json` holds the SHA-256 of each file, and its own. Older checkpoints beyond
    `keep` are removed last, but for `spare`: the one that a run began with, and that what is started again begins with, too.
    """
    final = root / f"step_{step:06d}"
    aside = root / f".writing_{step:06d}"
    for left in root.glob(".writing_*"):  # by a run that was killed while it saved
        shutil.rmtree(left, ignore_errors=True)
    ours = aside / "trainer"  # a folder of its own: vLLM takes every .safetensors beside config.json for weights
    ours.mkdir(parents=True)
    try:
        trainer.model.save_pretrained(aside, state_dict=trainer.model_state())
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)
        save_file({"rng": torch.get_rng_state(), **trainer.optimizer_state()}, ours / "optimizer.safetensors")
        if rollouts is not None:
            rollouts.save(ours / "rollouts.npz")
        files = {str(path.relative_to(aside)): _sha256(path) for path in sorted(aside.rglob("*")) if path.is_file()}
        state = {"step": step, "param_version": trainer.param_version, "files": files}
        state["sha256"] = hashlib.sha256(json.dumps(state).encode()).hexdigest()
        (aside / "state.json").write_text(json.dumps(state, indent=1))
        for path in (*aside.rglob("*"), aside):
            _fsync(path)
        shutil.rmtree(final, ignore_errors=True)  # one that was harmed, and skipped when the run was resumed
        aside.rename(final)
        _fsync(root)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    # Later ones were harmed, or the run would have resumed there. They must not push out those that are whole.
    for old in sorted(path for path in root.glob("step_*") if path <= final)[:-keep]:
        if spare is None or old.resolve() != spare.resolve():
            shutil.rmtree(old)
    return final


def newest_checkpoint(root: Path, report: Callable[[str], None] = print) -> Path | None:
    """The newest checkpoint under `root` whose files are all there and unharmed; `report` gets a line for each one skipped."""
    for path in sorted(root.glob("step_*"), reverse=True):
        try:
            state = json.loads((path / "state.json").read_text())
            expected = {"state.json": state.pop("sha256"), **state["files"]}
            found = {name: _sha256(path / name) for name in state["files"]}
            found["state.json"] = hashlib.sha256(json.dumps(state).encode()).hexdigest()
            if differing := [name for name, digest in expected.items() if found[name] != digest]:
                raise ValueError(f"{', '.join(differing)} differs from its checksum")
            return path
        except (OSError, ValueError, KeyError) as error:
            report(f"checkpoint {path} is incomplete ({error}): skipped")
    return None


def load_checkpoint(path: Path, trainer: GRPOTrainer) -> int:
    """Puts optimiser, version and random state of a checkpoint into `trainer`; returns the step that comes next.

    The model's own weights are loaded with `load_policy(path)`, before the trainer is made.
    """
    state = json.loads((path / "state.json").read_text())
    tensors = load_file(path / "trainer" / "optimizer.safetensors")
    torch.set_rng_state(tensors.pop("rng"))
    trainer.load_optimizer_state(tensors)
    trainer.param_version = state["param_version"]
    return state["step"]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- See it: a policy that learns one token, synchronously and one step off ------------------------------------------


async def _demo(steps: int = 30) -> None:
    from types import SimpleNamespace

    class Column:  # the ragged column that the trainer reads, at its smallest
        def __init__(self, rows: list[list], dtype: Any) -> None:
            self._rows = [np.array(row, dtype) for row in rows]
            self.lengths = np.array([len(row) for row in rows])
            self.values = np.concatenate(self._rows)

        def rows(self) -> list[np.ndarray]:
            return self._rows

    class Batch(dict):
        def __len__(self) -> int:
            return len(self["uid"])

    class Bigram(nn.Module):  # a language model of one table
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)

        @property
        def base_model(self) -> Callable:
            return lambda input_ids, use_cache: SimpleNamespace(last_hidden_state=self.embed(input_ids))

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    async def show(loop: Callable) -> None:
        torch.manual_seed(0)
        trainer = GRPOTrainer(Bigram(), learning_rate=0.1)
        sampler = {"weights": None, "version": 0}
        history: list[dict[str, float]] = []

        def sample(t: int, seconds: float = 0.02) -> Batch:
            start = time.perf_counter()
            state, version = sampler["weights"], sampler["version"]
            time.sleep(seconds)
            logits = (state["embed.weight"] @ state["head.weight"].T)[0]
            log_probs = logits.log_softmax(0)
            draws = torch.multinomial(log_probs.exp(), 16, replacement=True).tolist()
            batch = Batch(
                uid=np.arange(16),
                group=np.arange(16) // 8,
                rewards=np.array([token == 3 for token in draws], float),
                prompt_ids=Column([[0]] * 16, np.int64),
                response_ids=Column([[token] for token in draws], np.int64),
                response_mask=Column([[1]] * 16, np.int8),
                response_logprobs=Column([[float(log_probs[token])] for token in draws], np.float32),
                span_versions=Column([[version]] * 16, np.int64),
                span_lengths=Column([[1]] * 16, np.int64),
            )
            batch.meta_info = {"timing": {"generate_s": time.perf_counter() - start}}
            return batch

        async def sync() -> None:
            sampler["weights"] = {name: w.clone() for name, w in trainer.model.state_dict().items()}
            sampler["version"] = trainer.param_version

        await loop(
            Parts(
                generate=lambda t: asyncio.ensure_future(asyncio.to_thread(sample, t)),
                score=lambda rollouts: rollouts,
                sync=sync,
                trainer=trainer,
                steps=steps,
                log=lambda t, metrics, rollouts: history.append(metrics),
            )
        )
        last = history[-1]
        log_ratio, clipped = (np.mean([row[name] for row in history]) for name in ("abs_log_ratio", "clip_frac"))
        print(
            f"{loop.__name__:17} reward {history[0]['reward']:.2f} -> {last['reward']:.2f}, "
            f"staleness {last['staleness/mean']:.0f}, mean |log ratio| {log_ratio:.4f}, clipped {clipped:.3f}"
        )

    for loop in (fit_sync, fit_one_step_off):
        await show(loop)


if __name__ == "__main__":
    asyncio.run(_demo())
