"""Interrupt and resume: stop a response midway, change the weights, and go on where it stopped.

    request   | prompt + 0 tokens ----> cancel | sync | prompt + 37 tokens ----> cancel | sync | prompt + 90 -> EOS
    tokens    | t0 ... t36                     |      | t37 ... t89                     |      | t90 ... t121
    version   | 4                              | 4->5 | 5                               | 5->6 | 6
    spans       (4, 37)                                 (5, 53)                                  (6, 32)

A long response need not hold up a weight update. It is cancelled, keeps the tokens that it has, and is sent again with
prompt + tokens so far as its new prompt. What this file is really about is the seam:

    With weights unchanged, any schedule of cancels and resumes gives the uninterrupted response: the same token ids,
    the same stop reason, log-probabilities equal within the engine's own noise. Greedy as well as sampled.

What must hold for that, and for the trainer's ratio, stands where it is applied, marked "Seam". Every token knows the version
of the policy that sampled it (`spans`) and its log-probability under the distribution it was really drawn from.

The law is exact in float32. In bfloat16 a log-probability moves with the batch it is computed in by up to 0.2, which flips
tokens: there a cut response may go on as another response of the same policy (README.md has figures).

Left out, and where verl does it (commit b178a3c):
    1. multi-turn and tool-calling loops   verl/experimental/agent_loop/
    2. SGLang servers, data-parallel vLLM  verl/workers/rollout/
    3. the queue between the processes     verl/experimental/fully_async_policy/; here fit_partial in trainer.py

Needs: nothing but Python; VLLMServer Linux and vllm 0.32 (its tests tell whether another will do), and to be imported from a
file: the engine's process looks for it by name.   Used by: run_gsm8k.py.
Run: python partial_rollout.py  (a toy engine, cut at every place)
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import logging
import math
import mmap
import os
import random
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

logger = logging.getLogger(__name__)

StopReason = Literal["stop", "length", "abort"]


# ---- The record: one response, finished or on its way ----------------------------------------------------------------


@dataclass(frozen=True)
class AgentLoopOutput:
    """A response and everything a trainer must know of it. Frozen: a resume builds a new one.

    prompt_ids         token ids of the prompt; never change once set
    response_ids       token ids sampled so far; a resume only appends
    response_mask      1 for tokens that the policy sampled (in a single turn: all of them)
    response_logprobs  log-probability of each response token under the distribution it was sampled from, in nats
    spans              ((param_version, n_tokens), ...): who sampled which tokens, oldest first, versions never decreasing
    stop_reason        "stop" (EOS or a stop string), "length" (budget used up), "abort" (cancelled: resume me)
    num_turns          messages in the conversation, as verl counts: prompt and response make 2
    metrics            the loop's own figures: num_calls, the calls of a server so far (they do not travel in a batch's columns)
    request_id         the name under which the servers know it: by it a resume finds the server that has its prefix cached

    Raises ValueError where the lengths disagree.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    spans: tuple[tuple[int, int], ...] = ()
    stop_reason: StopReason = "stop"
    num_turns: int = 2
    metrics: dict[str, float] = field(default_factory=dict, compare=False)
    request_id: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        lengths = {
            "response_ids": len(self.response_ids),
            "response_mask": len(self.response_mask),
            "response_logprobs": len(self.response_logprobs),
            "spans": sum(n for _, n in self.spans),
        }
        if len(set(lengths.values())) > 1:
            raise ValueError(f"every response token needs its mask, its logprob and its version, got {lengths}")

    @classmethod
    def from_sample(cls, sample: Mapping[str, Any]) -> AgentLoopOutput:
        """The output that a sample of a batch carries in its columns, as it comes back from an earlier call."""
        names = ("prompt_ids", "response_ids", "response_mask", "response_logprobs")
        spans = zip(sample["span_versions"].tolist(), sample["span_lengths"].tolist(), strict=True)
        more = {"stop_reason": sample["stop_reason"], "request_id": sample.get("request_id", "")}
        return cls(**{name: sample[name].tolist() for name in names}, spans=tuple(spans), **more)

    @property
    def is_cancel(self) -> bool:
        """True while the response waits to be resumed."""
        return self.stop_reason == "abort"

    @property
    def span_versions(self) -> list[int]:
        """The param_version of each span; (n_spans,)."""
        return [version for version, _ in self.spans]

    @property
    def span_lengths(self) -> list[int]:
        """The number of tokens of each span; (n_spans,), summing to len(response_ids)."""
        return [n for _, n in self.spans]

    @property
    def extra_fields(self) -> dict[str, Any]:
        """verl's extra_fields: is_cancel, stop_reason, the versions of first and last token (-1: none), and the request_id."""
        return {
            "is_cancel": self.is_cancel,
            "stop_reason": self.stop_reason,
            "param_version_start": self.spans[0][0] if self.spans else -1,
            "param_version_end": self.spans[-1][0] if self.spans else -1,
            "num_turns": self.num_turns,
            "request_id": self.request_id,
        }


def extend_spans(spans: Sequence[tuple[int, int]], param_version: int, n_tokens: int) -> tuple[tuple[int, int], ...]:
    """`spans` with `n_tokens` more tokens by `param_version`. Raises ValueError where the version goes back.

    >>> extend_spans(((4, 37),), 4, 3), extend_spans(((4, 40),), 5, 2)
    (((4, 40),), ((4, 40), (5, 2)))
    """
    if n_tokens == 0:
        return tuple(spans)
    if not spans:
        return ((param_version, n_tokens),)
    last_version, last_n = spans[-1]
    if param_version < last_version:
        raise ValueError(f"param_version went back from {last_version} to {param_version} within one response")
    if param_version == last_version:
        return (*spans[:-1], (last_version, last_n + n_tokens))
    return (*spans, (param_version, n_tokens))


# ---- The rules of the seam, as small pure functions ------------------------------------------------------------------

# Seam: parameters that can be resumed, since their effect depends on prompt + tokens alone, or can be made to.
RESUMABLE = {
    "temperature", "top_p", "top_k", "min_p", "seed",  # a function of the logits and of the noise at a position
    "repetition_penalty",  # counts the prompt too, and a resumed prompt contains the tokens
    "logit_bias", "allowed_token_ids", "stop_token_ids", "ignore_eos",  # look at one token at a time
    "max_tokens", "min_tokens", "stop",  # corrected below
    "logprobs",  # always returned
}  # fmt: skip
# Everything else keeps a state that a new request forgets: presence and frequency penalties count output tokens only, a
# grammar would start again from its first symbol, bad_words may be cut in two. Neutral values are let through.
NEUTRAL = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "n": 1, "bad_words": None, "structured_outputs": None}


def check_resumable(sampling_params: Mapping[str, Any]) -> None:
    """Raises ValueError for a parameter whose state would be lost at a cut, before anything is generated."""
    for name, value in sampling_params.items():
        if name in RESUMABLE or (name in NEUTRAL and value in (NEUTRAL[name], None, [])):
            continue
        raise ValueError(f"{name}={value!r} cannot be resumed: the engine would forget its state at the cut. Leave it out")


def response_budget(prompt_length: int, response_length: int, max_model_len: int) -> int:
    """Tokens that the *whole* response may have, however often it is cut. Raises ValueError where the prompt leaves none."""
    room = max_model_len - prompt_length
    if room <= 0:
        raise ValueError(
            f"a prompt of {prompt_length} tokens leaves no room for an answer in max_model_len={max_model_len}: "
            f"raise max_model_len or leave the prompt out"
        )
    return min(response_length, room)


def remaining_params(sampling_params: Mapping[str, Any], done: int, budget: int) -> dict[str, Any]:
    """The parameters for the rest of a response that has `done` tokens of at most `budget`.

    Seam: the engine counts `max_tokens` and `min_tokens` from the start of a *request*. A resumed one would get a fresh
    budget, and could stop too early or too late.

    >>> remaining_params({"min_tokens": 8, "temperature": 1.0}, done=5, budget=20)
    {'min_tokens': 3, 'temperature': 1.0, 'max_tokens': 15}
    """
    given = {name: value for name, value in sampling_params.items() if value is not None and name not in NEUTRAL}
    if "min_tokens" in given:
        given["min_tokens"] = max(0, given["min_tokens"] - done)
    return {**given, "max_tokens": budget - done}


def find_stop(
    response_ids: Sequence[int], stop: Sequence[str], min_tokens: int, decode: Callable[[Sequence[int]], str], searched: int = 0
) -> int | None:
    """How many tokens the response has when its text first contains a stop string; None if it does not.

    The first `searched` tokens are known to contain none.

    Seam: the engine searches the text of its own request. A stop string cut in two by the seam is in neither half, so the
    text of the whole response is searched: decoded once from ids, never joined from pieces, since a character cut in two
    decodes to garbage on both sides. As in vLLM, a match counts if it ends after the first `min_tokens` tokens.
    """
    # A character that the first min_tokens tokens only begin decodes to U+FFFD there; it ends later, so it counts.
    whole = (decode(response_ids[:n]).rstrip("\ufffd") for n in range(max(0, min_tokens - 3), min_tokens + 1))
    floor = max(map(len, whole)) if min_tokens else 0

    def stops(text: str) -> bool:
        return any(text.find(s, max(0, floor - len(s) + 1)) >= 0 for s in stop)

    def first(low: int, before: str, high: int, after: str) -> int | None:
        """A bisection: the fewest tokens that stop, more than `low`, whose text is `before`, and at most `high`."""
        if high - low == 1:
            return high if stops(after) else None
        # Seam: the decoders of some tokenizers give up a whole run of bytes that is not UTF-8 (yet): a character begun behind
        # "é" takes the "é" away again. An engine has seen it by then; one whose request began between the two has not.
        if not stops(after) and "\ufffd" not in after.removeprefix(before):
            return None
        middle = (low + high) // 2
        text = decode(response_ids[:middle])
        return first(low, before, middle, text) or first(middle, text, high, after)

    low, high = max(searched, min_tokens), len(response_ids)
    return first(low, "", high, decode(response_ids)) if low < high else None


def all_finite(logprobs: Sequence[float]) -> bool:
    """Whether each is there and finite. One sum tells: None cannot be added, nan and infinity spread. `None in logprobs`
    takes 30 times as long, which at 8,192 tokens was most of what a resume costs."""
    try:
        return math.isfinite(sum(logprobs))
    except TypeError:
        return False


def uniform_noise(seeds: Any, positions: Any) -> Any:
    """One number in (0, 1) for each (seed, position): the splitmix64 finaliser, twice. Arrays (n,) to float64 (n,)."""
    import numpy as np

    def mix(x: Any) -> Any:
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    bits = mix(mix(np.asarray(seeds).astype(np.uint64)) ^ np.asarray(positions).astype(np.uint64))
    return ((bits >> np.uint64(32)).astype(np.float64) + 0.5) / 2.0**32


def inverse_cdf(probs: Any, u: Any) -> Any:
    """The token at which the cumulated probabilities pass u. probs (n, vocabulary), u (n,) float64; returns (n,) int64.

    In float64, since the sum of 50,000 float32 probabilities would shift the boundaries. A token of probability zero is never
    picked.
    """
    import torch

    cumulated = probs.cumsum(dim=-1, dtype=torch.float64)
    return torch.searchsorted(cumulated, (u * cumulated[:, -1]).unsqueeze(1)).squeeze(1)


# ---- Agent loops: what happens to one sample -------------------------------------------------------------------------

_REGISTRY: dict[str, type[AgentLoopBase]] = {}


def register(name: str) -> Callable[[type], type]:
    """Class decorator: makes an agent loop known by `name`. Raises ValueError if the name is taken by another class."""

    def add(cls: type) -> type:
        known = _REGISTRY.setdefault(name, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"agent loop {name!r} is already registered as {known.__qualname__}")
        _REGISTRY[name] = cls
        return cls

    return add


def get_agent_loop(name: str) -> type[AgentLoopBase]:
    """The agent loop class registered under `name`. Raises ValueError, with the names there are."""
    if name not in _REGISTRY:
        raise ValueError(f"unknown agent loop {name!r}: choose one of {', '.join(sorted(_REGISTRY))}")
    return _REGISTRY[name]


class AgentLoopBase:
    """What every loop needs: servers to ask, a tokenizer, and the limits.

    `server_manager` has the coroutine of `LLMServerManager`; `tokenizer` is a Hugging Face tokenizer with a chat
    template. `response_length` bounds a whole response and `max_model_len` prompt + response, both in tokens.
    Seam: `eos_token_ids` are *all* the ids that end a response. A model may have several, and where pad is one of them a mask
    made from `token == pad` would lose the EOS its gradient. Masks come from lengths.
    """

    def __init__(
        self,
        server_manager: Any,
        tokenizer: Any,
        *,
        response_length: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.response_length = response_length
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self._last_prompt: tuple[list | None, list[int]] = None, []

    async def run(self, sampling_params: Mapping[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Generates one response."""
        raise NotImplementedError

    def encode_prompt(self, raw_prompt: Sequence[Mapping[str, str]]) -> list[int]:
        """Chat messages to token ids by the model's own chat template; always a plain list of int."""
        messages = list(raw_prompt)
        if messages != self._last_prompt[0]:  # a group's samples come one after the other, and share it
            ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
            self._last_prompt = copy.deepcopy(messages), [int(i) for i in ids]
        return list(self._last_prompt[1])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out, and spaces as they are: the engine searches it like that."""
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def stop_ids(self, sampling_params: Mapping[str, Any]) -> frozenset[int]:
        """The ids that end a response under these parameters."""
        eos = () if sampling_params.get("ignore_eos") else self.eos_token_ids
        return frozenset(eos).union(sampling_params.get("stop_token_ids") or ())


@register("partial_single_turn_agent")
class PartialSingleTurnAgentLoop(AgentLoopBase):
    """One prompt, one response, which may be cancelled midway and resumed by calling `run` again with what came back."""

    async def run(
        self,
        sampling_params: Mapping[str, Any],
        *,
        raw_prompt: Sequence[Mapping[str, str]],
        output: AgentLoopOutput | None = None,
        param_version: int = 0,
        request_id: str | None = None,
        ticket: Any = None,
        **sample: Any,
    ) -> AgentLoopOutput:
        """Starts a response (`output` is None), resumes a cancelled one, or returns a finished one as it is.

        `param_version` is that of the weights the servers have now: it stamps the tokens of this call. It is fixed *before*
        the request is sent, and a server whose weights are others sends the request back untouched.
        Raises ValueError for parameters that cannot be resumed, and for a prompt that leaves no room for an answer.
        """
        if output is None and "response_ids" in sample:
            output = AgentLoopOutput.from_sample({**sample, "request_id": request_id or ""})
        if output is not None and not output.is_cancel:
            return output
        check_resumable(sampling_params)
        if output is None:
            output = AgentLoopOutput(self.encode_prompt(raw_prompt), [], [], [], stop_reason="abort")
        request_id = request_id or output.request_id or uuid4().hex
        prompt_ids, old_ids = output.prompt_ids, output.response_ids
        budget = response_budget(len(prompt_ids), self.response_length, self.max_model_len)
        if sampling_params.get("max_tokens") is not None:
            budget = min(budget, sampling_params["max_tokens"])

        stop_ids = self.stop_ids(sampling_params)
        new_ids, new_logprobs, cancelled, num_calls = [], [], False, output.metrics.get("num_calls", 0)
        if len(old_ids) < budget:  # Seam: with nothing left to ask for, no call is made
            params = remaining_params(sampling_params, len(old_ids), budget) | {"stop_token_ids": sorted(stop_ids)}
            request = {"prompt_ids": prompt_ids + old_ids, "sampling_params": params, "param_version": param_version}
            answer = await self.server_manager.generate_for_partial(request_id, ticket=ticket, **request)
            new_ids, new_logprobs, cancelled = answer
            num_calls += 1
            if len(new_ids) != len(new_logprobs) or not all_finite(new_logprobs):
                # Seam: a missing logprob must not become 0.0, which would claim that the token was certain.
                raise ValueError(f"{len(new_ids)} tokens came back with logprobs {new_logprobs!r}: one is missing")

        response_ids = old_ids + list(new_ids)
        logprobs = output.response_logprobs + list(new_logprobs)
        # Seam: the stop reason is read off the whole response. So it cannot depend on where it was cut, and a cancel that
        # arrives on the very step of the EOS or of the last token of the budget is no cancel: the finish wins.
        reason: StopReason = "abort" if cancelled else "stop"
        if new_ids and new_ids[-1] in stop_ids:
            reason = "stop"
        elif len(response_ids) >= budget:
            reason = "length"
        if stop := sampling_params.get("stop"):
            stop = [stop] if isinstance(stop, str) else stop
            # Seam: read behind the prompt, as the engine reads it. By itself the first token may lose its leading space.
            prompt_text = self.decode(prompt_ids)

            def text_of(ids: Sequence[int]) -> str:
                return self.decode([*prompt_ids, *ids])[len(prompt_text) :]

            if cut := find_stop(response_ids, stop, sampling_params.get("min_tokens") or 0, text_of, len(old_ids)):
                response_ids, logprobs, reason = response_ids[:cut], logprobs[:cut], "stop"
            elif reason == "stop" and new_ids and new_ids[-1] not in stop_ids:
                # Seam: of a request that begins within a character vLLM takes the prompt for new text, and finds the stop
                # string there; after bytes that are no character it forgets what came before. It has to go on.
                reason = "abort" if "\ufffd" in text_of(old_ids)[-1:] + text_of(response_ids) else "stop"
        spans = extend_spans(output.spans, param_version, len(response_ids) - len(old_ids))
        more = {"metrics": {"num_calls": num_calls}, "request_id": request_id}
        output = AgentLoopOutput(prompt_ids, response_ids, [1] * len(response_ids), logprobs, spans, reason, **more)
        if output.is_cancel and not cancelled:  # no one cut it
            again = {"raw_prompt": raw_prompt, "param_version": param_version}
            return await PartialSingleTurnAgentLoop.run(self, sampling_params, output=output, **again)
        return output


@register("single_turn_agent")
class SingleTurnAgentLoop(PartialSingleTurnAgentLoop):
    """One prompt, one response, never cut: for the synchronous and the one-step-off loop, where a sync waits for the batch."""

    async def run(self, sampling_params: Mapping[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """As in the parent class, but raises RuntimeError if the server cancels the request."""
        output = await super().run(sampling_params, **kwargs)
        if output.is_cancel and not output.response_ids:
            raise RuntimeError(
                f"sent back untouched: the servers are closed, or have other weights than param_version="
                f"{kwargs.get('param_version', 0)}, which must be that of their last update_weights"
            )
        if output.is_cancel:
            raise RuntimeError(
                f"cancelled after {len(output.response_ids)} tokens, and single_turn_agent cannot resume: "
                f"use partial_single_turn_agent where weights change while requests run"
            )
        return output


# ---- The manager: which server takes a request -----------------------------------------------------------------------


class LLMServerManager:
    """Spreads requests over servers: to the one with the fewest of its own in flight, and a resumed request back to where its
    prefix may be cached (a sync of weights empties the cache). Those with a ticket, which AgentLoopWorker gives to each sample,
    are dealt out in turn.

    `servers` are Ray actor handles, or plain objects, with one coroutine, `generate_for_partial`, as `VLLMServer` has it. One
    of your own takes (request_id, *, prompt_ids, sampling_params, param_version, ticket), and answers with the new token ids,
    that of the stop token included; as many log-probabilities, in nats, of the distribution that was sampled; and whether it
    was cut. What came for weights that it does not have it sends back as ([], [], True). It may ignore `ticket`. Where an actor
    has `generate_for_request`, which takes all of these in one dict, that is called in its place.
    """

    max_homes = 10_000

    def __init__(self, servers: Sequence[Any]) -> None:
        if not servers:
            raise ValueError("a server manager needs at least one server, got none")
        self.servers = list(servers)
        self.in_flight = [0] * len(self.servers)
        self._home: dict[str, int] = {}  # which server had a cancelled request; a hint, so the oldest may be forgotten

    async def generate_for_partial(
        self, request_id: str, *, ticket: tuple[Any, int, int] | None = None, **request: Any
    ) -> tuple[list[int], list[float], bool]:
        """(token_ids, logprobs, is_cancel) of what was generated in this call; see `VLLMServer.generate_for_partial`, which
        gets the `request`.

        `ticket` is (batch, index, size): this is request `index` of a batch of `size` that the servers take in order, as a
        whole. Their share is then every len(servers)-th request, which depends on nothing but the batch.
        """
        home = self._home.pop(request_id, None)
        if ticket is not None:
            batch, index, size = ticket
            server = index % len(self.servers)
            ticket = (batch, index, len(range(server, size, len(self.servers))))
        elif home is not None:
            server = home
        else:
            server = min(range(len(self.servers)), key=self.in_flight.__getitem__)
        self.in_flight[server] += 1
        try:
            answer = await self._ask(self.servers[server], {"request_id": request_id, "ticket": ticket, **request})
        finally:
            self.in_flight[server] -= 1
        token_ids, _, is_cancel = answer
        if is_cancel and (token_ids or server == home):  # its prefix is there, from this call or from an earlier one
            self._home[request_id] = server
            if len(self._home) > self.max_homes:  # of requests that no one resumed
                del self._home[next(iter(self._home))]
        return answer

    async def _ask(self, server: Any, request: dict[str, Any]) -> tuple[list[int], list[float], bool]:
        if not hasattr(server.generate_for_partial, "remote"):
            return await server.generate_for_partial(**request)
        # Ray packs every argument by itself: with one of them 64 requests are in the server after 15 ms, with five after 23.
        one = hasattr(server, "generate_for_request")
        call = server.generate_for_request.remote(request) if one else server.generate_for_partial.remote(**request)
        try:
            return await call
        except asyncio.CancelledError:
            import ray

            ray.cancel(call)  # an actor goes on, whoever waits for it
            raise


# ---- The server: vLLM in an actor ------------------------------------------------------------------------------------


def _needs_engine(method: Callable) -> Callable:
    """Decorator of VLLMServer's coroutines: where the engine is dead, and `exit_when_dead` says so, this process ends, and Ray
    starts the actor again. Else vLLM's EngineDeadError is raised."""

    @functools.wraps(method)
    async def call(self: VLLMServer, *args: Any, **kwargs: Any) -> Any:
        if self._watching is None or self._watching.done():
            self._watching = asyncio.ensure_future(self._watch_engine(weakref.ref(self)))
        try:
            return await method(self, *args, **kwargs)
        except Exception as error:
            from vllm.v1.engine.exceptions import EngineDeadError

            if self.exit_when_dead and isinstance(error, EngineDeadError):
                os._exit(1)
            raise

    return call


class VLLMServer:
    """vLLM's AsyncLLM, with the door that partial rollouts need. As an actor: `ray.remote(max_concurrency=2**16)(VLLMServer)`,
    since by Ray's default of a thousand calls at once a cancel would wait behind the requests that it should end.

    model        folder or hub name, as vLLM takes it
    seed, rank   the run's seed and this replica's number. Seam: engines with equal seeds would draw the same noise for
                 requests that bring no seed of their own, and fill a group with twins
    cores        CPU cores for the engine's process, a thread for each: with more threads than free cores, decoding is 15
                 times slower. None leaves it where it is (a GPU machine)
    exit_when_dead    whether this process ends when its engine has died. As an actor with max_restarts it is then started
                 again, and with max_task_retries its requests are sent again, each with the tokens it was sent with. Without
                 it every call raises vLLM's EngineDeadError, those that were under way too, within a second
    wait_for_weights  asked at the start; if it says True, requests wait for the first `update_weights`. For an actor that was
                 started again: what it has loaded are the weights of the beginning
    engine_args  anything else that vllm.AsyncEngineArgs knows: dtype, max_model_len, tensor_parallel_size, ...

    All methods are safe to call in any order and from several callers, in one event loop; cancel, resume and update_weights may
    be repeated. On a GPU that sleeps, `wake_up` goes before `update_weights`: there is no memory to load them into. Make it in
    a thread that stays, since the engine ends with the thread that has started it.
    """

    def __init__(
        self,
        model: str,
        *,
        seed: int = 0,
        rank: int = 0,
        cores: Sequence[int] | None = None,
        exit_when_dead: bool = False,
        wait_for_weights: Callable[[], bool] = lambda: False,
        **engine_args: Any,
    ) -> None:
        if engine_args.get("speculative_config"):
            raise ValueError("speculative_config: a drafted token is not drawn with the noise of its position; leave it out")
        if engine_args.get("logits_processors"):
            raise ValueError("logits_processors: what they remember of a response would be lost at a cut; leave them out")
        # Read when vLLM is imported, here and in the engine's own process, which must find this file too.
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        # The engine has a process of its own either way; with "1" a CPU engine would have one more, for its only worker.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if engine_args.get("tensor_parallel_size", 1) == 1 else "1"
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # WorkerExtension reaches into V1
        os.environ["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "0"  # else a name asked for twice at once would wait for ever
        root = Path(__file__).resolve().parents[__name__.count(".")]  # of the package, where this file is part of one
        os.environ["PYTHONPATH"] = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        if (engine_args.get("weight_transfer_config") or {}).get("backend") == "ipc":
            # What the trainer sends are handles of its GPU's memory, which vLLM will only pickle.
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        self.cores = cores
        if cores is not None:
            os.environ["OMP_NUM_THREADS"] = str(len(cores))
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if engine_args.get("tensor_parallel_size", 1) > 1:
            # In a placement group vLLM would choose Ray for the engine's own processes, and want a bundle for each of them.
            engine_args.setdefault("distributed_executor_backend", "mp")
            # And a NUMA node for each on a CPU; `ready` pins them.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=model,
                seed=seed + rank,
                worker_extension_cls=f"{__name__}.WorkerExtension",
                # Seam: raw logprobs are those of temperature 1 and of the whole vocabulary. The trainer's ratio needs the
                # distribution that was sampled: after temperature, top-k and top-p.
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
                **engine_args,
            )
        )
        self.param_version = 0
        restarted = wait_for_weights()
        # Started again it must not give the seeds that it has given: a group's other half would be twins of the first.
        self._own_seeds = random.Random(None if restarted else seed + rank)
        # A file without a name: the engine's process opens it through /proc, and it goes with this process however that ends.
        # It is kept from sync to sync: memory that is touched anew takes twice as long as the copy.
        self._weights_file, self._weights_map = os.memfd_create("weights"), None
        weakref.finalize(self, os.close, self._weights_file)
        self._logprobs = LogprobTable.create(self.engine.model_config.max_model_len)
        # Why no request is taken: "cancel", "sleep", "update", or "no weights" after sleep(2).
        self._closed_by: set[str] = set()
        self._door = asyncio.Lock()  # held while a request goes in, and while the door moves: none is ever half-way
        self._paused = False  # whether the engine is: from a cut, or before a batch goes in, until the next request is in
        self._batches: dict[Any, dict[int, tuple[Callable, asyncio.Future]]] = {}  # requests that wait for the rest, by index
        self._begun: deque[Any] = deque(maxlen=100)  # batches that wait no more: whoever is late goes in alone
        self.exit_when_dead = exit_when_dead
        self._watching: asyncio.Future | None = None
        self._has_weights = asyncio.Event()  # not set after a restart: requests then wait, in place of being sent back
        if not restarted:
            self._has_weights.set()
        self._setting_up, self._is_set_up = asyncio.Lock(), False
        self._in_flight = 0
        self._busy: list[tuple[float, float, int]] = []  # see busy_spans
        self._busy_since = (0.0, 0)

    @_needs_engine
    async def ready(self) -> dict[str, Any]:
        """Answers once requests can be served: pid, cores and threads of the engine's process."""
        await self._set_up()
        gc.collect()
        gc.freeze()  # what vLLM has imported stays; to look through it for garbage took 0.35 s in every tenth batch of 128
        return (await self.engine.collective_rpc("describe"))[0]

    async def _set_up(self) -> None:
        """What the engine needs before its first request. Once: whoever comes meanwhile waits."""
        async with self._setting_up:
            if self._is_set_up:
                return
            await self.engine.collective_rpc("die_with_server", args=(os.getpid(),))
            await self.engine.collective_rpc("install_sampler")
            await self.engine.collective_rpc("carry_logprobs", args=(self._logprobs.path, self._logprobs.width))
            if self.cores is not None:  # only now: while everything is being imported, any core will do
                # The engine alone. This process works when the engine's step is over, on whichever core has nothing to do:
                # pinned beside the engine it would hold up the next step, which made a step of fit_sync a tenth longer.
                await self.engine.collective_rpc("pin", args=(list(self.cores),))
            self._is_set_up = True

    # -- requests

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> tuple[list[int], list[float]]:
        """(token_ids, logprobs) of a request that runs to its end. Raises RuntimeError if it was cancelled."""
        token_ids, logprobs, is_cancel = await self.generate_for_partial(
            request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs
        )
        if is_cancel:
            raise RuntimeError(f"request {request_id} was cancelled after {len(token_ids)} tokens")
        return token_ids, logprobs

    async def generate_for_request(self, request: dict[str, Any]) -> tuple[list[int], list[float], bool]:
        """`generate_for_partial`, whose arguments are `request`."""
        return await self.generate_for_partial(**request)

    @_needs_engine
    async def generate_for_partial(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        param_version: int | None = None,
        ticket: tuple[Any, int, int] | None = None,
    ) -> tuple[list[int], list[float], bool]:
        """Generates until the end or until `cancel`, and returns (token_ids, logprobs, is_cancel).

        `sampling_params` are vLLM's; `seed` makes the noise a function of (seed, absolute position). `logprobs` are
        those of the distribution that was sampled, in nats, one per token.
        A request that finds the door closed, or other weights than `param_version`, gets ([], [], True), once an update that is
        under way is through, and leaves nothing behind. `ticket` (batch, index, size) makes it wait for the other requests of
        its batch, which then go in together, by index: see `_take_batch`. Raises RuntimeError where vLLM ends it by an error.
        """
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        params = dict(sampling_params)
        seed = params.pop("seed", None)
        # Seam: never vLLM's own `seed`. It starts a generator for the request, so a resumed one would draw the noise of its
        # first tokens again; on a CPU it also kills the engine when a prefill is chunked.
        # As in vLLM -1 is none at all; the rest of what Python takes for an int must fit into the engine's 64 bits.
        noise_seed = self._own_seeds.getrandbits(63) if seed in (None, -1) else int(seed) % 2**64
        params |= {"logprobs": 0, "prompt_logprobs": None, "flat_logprobs": True, "detokenize": bool(params.get("stop"))}
        row = self._logprobs.take_row(len(prompt_ids), params.get("max_tokens"))
        try:
            params["extra_args"] = {"noise_seed": noise_seed, "row": row}
            vllm_params = SamplingParams(**params, output_kind=RequestOutputKind.FINAL_ONLY)
            output = await self._run_request(request_id, prompt_ids, vllm_params, param_version, ticket)
            if output is None:
                return [], [], True
            (completion,) = output.outputs
            if completion.finish_reason not in ("stop", "length", "abort"):
                raise RuntimeError(f"request {request_id}: vLLM ended it with finish_reason={completion.finish_reason!r}")
            # Seam: copied, since the engine's own lists are its to change.
            token_ids, logprobs = list(completion.token_ids), list(completion.logprobs.logprobs)
            # On a CPU vLLM brings none: the engine wrote them into the table (`carry_logprobs`).
            logprobs = logprobs or self._logprobs.read(row, len(prompt_ids), len(token_ids))
        finally:
            self._logprobs.give_row(row)
        if len(token_ids) != len(logprobs) or not all_finite(logprobs):
            raise RuntimeError(f"request {request_id}: of {len(token_ids)} tokens a log-probability is missing")
        return token_ids, logprobs, completion.finish_reason == "abort"

    async def _run_request(
        self, request_id: str, prompt_ids: list[int], vllm_params: Any, param_version: int | None, ticket: Any
    ) -> Any:
        """vLLM's RequestOutput at its end; None for a request that was not taken."""

        async def put_in() -> Any:
            # Seam: a request that comes while the door is closed goes back at once, and leaves nothing behind.
            if self._is_closed() or param_version not in (None, self.param_version):
                return None
            from vllm.inputs.engine import tokens_input

            # add_request is the first half of AsyncLLM.generate. On its own it tells when the request is *in*: that is
            # what the order within a batch, and the door, need to know.
            return await self.engine.add_request(request_id, tokens_input(prompt_ids), vllm_params)

        if not self._has_weights.is_set():
            # This server was started again, in the middle of a batch of which some may be finished. They do not come again, so
            # the others must not wait for them.
            if ticket is not None:
                self._begin_batch(ticket[0])
            await self._has_weights.wait()
        if not self._is_set_up:
            await self._set_up()
        outputs = None
        try:
            outputs = await (self._take_one(put_in) if ticket is None else self._take_batch(ticket, put_in))
            if outputs is None:
                return None
            self._begin()
            try:
                return outputs.get_nowait() or await outputs.get()
            finally:
                self._end()
        except asyncio.CancelledError:
            await self._abort(outputs)
            raise

    async def _abort(self, outputs: Any) -> None:
        """Ends a request, if it is in, whose caller is gone: the engine would go on, into a row that is someone else's."""
        if outputs is not None:
            await self.engine.abort(outputs.request_id, internal=True)

    async def _take_one(self, put_in: Callable[[], Any]) -> Any:
        async with self._door:
            entering = asyncio.ensure_future(put_in())
            try:
                outputs = await asyncio.shield(entering)
                await self._go_on()
            except asyncio.CancelledError:
                await asyncio.wait({entering})  # vLLM may know it already, before add_request returns
                if not entering.cancelled() and not entering.exception():
                    await self._abort(entering.result())
                raise
        return outputs

    async def _take_batch(self, ticket: tuple[Any, int, int], put_in: Callable[[], Any], patience_s: float = 20) -> Any:
        """Waits until all of the batch is here, then puts it in, by index, before the engine takes a step.

        In float32 sampled tokens do not depend on the company they are decoded in, but log-probabilities do, in their last
        bits. This makes the engine's batches a function of the data alone, and a run repeatable to the bit.
        Where a worker died, another sends its requests again: they take the places of those that wait, or follow a batch that
        is in.
        """
        batch, index, size = ticket
        entered: asyncio.Future = asyncio.get_running_loop().create_future()
        async with self._door:
            if self._is_closed():
                self._begin_batch(batch)
                return None
            if waits := batch not in self._begun:
                waiting = self._batches.setdefault(batch, {})
                self._send_back(waiting.pop(index, None))
                waiting[index] = put_in, entered
        if not waits:
            return await self._take_one(put_in)
        try:
            if len(waiting) == size:
                # The others count on it, whatever becomes of our caller.
                await asyncio.shield(self._enter_together(self._begin_batch(batch)))
            elif not (await asyncio.wait([entered], timeout=patience_s))[0] and self._batches.get(batch) is waiting:
                # The first whose patience ends takes all of them in; to the others, whose patience ends too, they are gone.
                logger.warning("%d of %d requests of a batch arrived within %g s; they start", len(waiting), size, patience_s)
                await asyncio.shield(self._enter_together(self._begin_batch(batch)))
            return await entered
        except asyncio.CancelledError:
            if entered.done() and not entered.cancelled() and not entered.exception():
                await self._abort(entered.result())
            raise
        finally:
            entered.cancel()  # a caller that gave up meanwhile is not put in; else a no-op
            if self._batches.get(batch) is waiting and all(other.cancelled() for _, other in waiting.values()):
                self._begin_batch(batch)  # all have given up

    def _begin_batch(self, batch: Any) -> dict[int, tuple[Callable, asyncio.Future]]:
        """Those that wait; no one waits for `batch` from now on."""
        if batch not in self._begun:
            self._begun.append(batch)
        return self._batches.pop(batch, {})

    @staticmethod
    def _send_back(request: tuple[Callable, asyncio.Future] | None) -> None:
        if request is not None and not request[1].done():
            request[1].set_result(None)

    @staticmethod
    def _refuse(entered: asyncio.Future, error: Exception) -> None:
        if not entered.done():
            entered.set_exception(error)

    async def _enter_together(self, waiting: dict[int, tuple[Callable, asyncio.Future]]) -> None:
        async with self._door:
            try:
                if not self._closed_by and not self._paused:
                    await self._pause("keep")
                for _, (put_in, entered) in sorted(waiting.items()):
                    if not entered.done():
                        try:
                            outputs = await put_in()
                        except Exception as error:  # vLLM refuses this one, not the batch: its prompt is too long, say
                            if self.engine.errored:
                                raise
                            self._refuse(entered, error)
                            continue
                        if not entered.cancelled():
                            entered.set_result(outputs)
                        else:  # its caller gave up on the way in
                            await self._abort(outputs)
            except Exception as error:  # whoever waits must hear of it, not only the caller that came last
                for _, entered in waiting.values():
                    self._refuse(entered, error)
            finally:
                await self._go_on()

    # -- the door

    def _is_closed(self) -> bool:
        if self.engine.errored:
            raise self.engine.dead_error
        return bool(self._closed_by)

    @_needs_engine
    async def cancel(self) -> None:
        """Ends every request in flight, each with the tokens it has, and takes none until `resume`. (In a server that was
        started again those that wait for weights go on waiting.)"""
        async with self._door:
            await self._close("cancel")

    @_needs_engine
    async def resume(self) -> None:
        """Takes requests again. The engine itself stays paused until the next one is in, so that a batch enters it whole."""
        async with self._door:
            self._closed_by.discard("cancel")

    @_needs_engine
    async def sleep(self, level: int = 1) -> None:
        """Cancels, and gives the memory of weights and cache back (on a CPU vLLM only pauses). Level 2 drops the weights
        for good: requests are taken again only after `wake_up` and `update_weights`."""
        await self._has_weights.wait()  # one that was started again stays awake until it has them: asleep it could take none
        async with self._door:
            await self._close("sleep")
            if level == 2:
                self._closed_by.add("no weights")
            await self.engine.sleep(level)

    @_needs_engine
    async def wake_up(self) -> None:
        """Takes the memory back, and requests again."""
        async with self._door:
            if await self.engine.is_sleeping():
                await self.engine.wake_up()
                self._paused = False
            self._closed_by.discard("sleep")

    @_needs_engine
    async def clear_kv_cache(self) -> None:
        """Forgets every cached prefix. Raises RuntimeError if vLLM refuses, as it does while requests run."""
        async with self._door:
            await self._reset_prefix_cache()

    async def _close(self, reason: str) -> None:
        self._closed_by.add(reason)
        for batch in list(self._batches):
            for request in self._begin_batch(batch).values():
                self._send_back(request)
        if self._in_flight or not self._paused:
            await self._pause("abort")

    async def _pause(self, mode: str) -> None:
        self._paused = True  # first: a pause that fails half-way may have paused
        # What pause_generation does, without the 0.02 s that it then sleeps, so that outputs are there before it returns: here
        # they are waited for anyway.
        await self.engine.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)

    async def _go_on(self) -> None:
        if self._paused and not self._closed_by:
            await self.engine.resume_generation()
            self._paused = False

    async def _reset_prefix_cache(self, tries: int = 20, pause_s: float = 0.05) -> None:
        for _ in range(tries):
            if await self.engine.reset_prefix_cache(reset_connector=True):  # blocks that were moved to CPU memory as well
                return
            await asyncio.sleep(pause_s)  # blocks of a request that just ended may not be free yet
        raise RuntimeError("vLLM refused to clear its prefix cache while requests run; a stale cache must not be used")

    # -- weights

    @_needs_engine
    async def update_weights(self, weights: Any, param_version: int) -> None:
        """Takes new weights and the version they have. `weights` are the bytes of a safetensors file, as any buffer, or the
        update_info of vLLM's weight transfer, which the trainer's side sends (a dict): then they come GPU to GPU.

        Requests in flight are cancelled first. Seam: prefixes cached under the old weights would be the old policy's keys
        and values; they are forgotten, and vLLM's answer is checked, since it may refuse.
        """
        async with self._door:
            await self._close("update")  # where this fails it stays closed: half-loaded weights serve no one
            await self._reset_prefix_cache()
            await (self._receive(weights) if isinstance(weights, dict) else self._load_file(weights))
            await self.engine.update_weight_version(str(param_version))
            self.param_version = param_version
            self._closed_by -= {"no weights", "update"}
            self._has_weights.set()

    async def _receive(self, update_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.engine.start_weight_update()
        await self.engine.update_weights(WeightTransferUpdateRequest(update_info=update_info))
        await self.engine.finish_weight_update()

    async def _load_file(self, weights: Any) -> None:
        self._write_file(weights)
        await self.engine.collective_rpc("load_weights", args=(f"/proc/{os.getpid()}/fd/{self._weights_file}",))

    def _write_file(self, weights: Any) -> None:
        size = memoryview(weights).nbytes
        if self._weights_map is None or len(self._weights_map) != size:
            self._weights_map = None  # where the next two lines fail, the old one must not pass for one of this size
            os.ftruncate(self._weights_file, size)
            self._weights_map = mmap.mmap(self._weights_file, size)
        self._weights_map[:] = weights

    @_needs_engine
    async def init_weight_transfer(self, init_info: dict[str, Any]) -> None:
        """Joins the trainer for weights that come GPU to GPU; `init_info` is that of vLLM's weight transfer."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))

    # -- for those who watch over it

    @_needs_engine
    async def ping(self) -> bool:
        """Answers if the engine does, between two of its steps: whether requests wait here for weights."""
        await self.engine.collective_rpc("describe")
        return not self._has_weights.is_set()

    async def sleep_for_ever(self) -> None:
        """Never answers: the call fails when this actor dies, and so tells of its death."""
        await asyncio.get_running_loop().create_future()

    @staticmethod
    async def _watch_engine(server: weakref.ref[VLLMServer]) -> None:
        while (alive := server()) and not alive.engine.errored:  # vLLM tells no one
            del alive  # who lets the server go ends its engine
            await asyncio.sleep(1)
        if alive and alive.exit_when_dead:
            os._exit(1)
        if alive:
            alive._tell_all_that_wait()

    def _tell_all_that_wait(self) -> None:
        """What an engine was asked before it ended vLLM never answers: who waits for that would do so for ever, and hold the
        door."""
        for answer in self.engine.engine_core.utility_results.values():
            if not answer.done():
                answer.set_exception(self.engine.dead_error)
        self.engine.output_processor.propagate_error(self.engine.dead_error)
        for batch in list(self._batches):
            for _, entered in self._begin_batch(batch).values():
                self._refuse(entered, self.engine.dead_error)
        self._has_weights.set()  # none will come; the door says why

    async def busy_spans(self) -> list[tuple[float, float, int]]:
        """(start, end, param_version) of each period with requests in flight, in seconds of time.time()."""
        return list(self._busy)

    def _begin(self) -> None:
        if self._in_flight == 0:
            self._busy_since = (time.time(), self.param_version)
        self._in_flight += 1

    def _end(self) -> None:
        self._in_flight -= 1
        if self._in_flight == 0:
            start, param_version = self._busy_since
            self._busy.append((start, time.time(), param_version))

    async def shutdown(self) -> None:
        """Ends the engine's process, after a cancel: what is in flight comes back, if the engine still answers. Idempotent."""
        self.exit_when_dead = False
        with contextlib.suppress(Exception):
            async with asyncio.timeout(5):
                await self.cancel()
                while self._in_flight:  # noqa: ASYNC110  (until they have their answers)
                    await asyncio.sleep(0.01)
        self.engine.shutdown(timeout=1.0)  # it has nothing to save, so it leaves by itself; vLLM would give it five
        self._tell_all_that_wait()


class LogprobTable:
    """Log-probabilities by row and position, in nats, in memory that a server shares with its engine. A request has a row.

    vLLM's own way is three small arrays for each token, packed, sent from process to process and unpacked. Where both share a
    core, this table brings 0.96 of the tokens/s of LLM.generate in place of 0.79 (tests/bench/engine.py, 128 sequences).
    """

    rows = 2**16  # only those that were in use take memory

    def __init__(self, path: str, width: int) -> None:
        import numpy as np

        self.path, self.width = path, width
        self.values = np.asarray(np.memmap(path, np.float32, "r+", shape=(self.rows, width)))
        self._free: list[int] = []  # rows that no request has; filled by `create`, since the server alone hands rows out

    @classmethod
    def create(cls, width: int) -> LogprobTable:
        """A new one. Its file has no name in any folder, and is gone when the table or this process ends."""
        file = os.memfd_create("logprobs")
        table = cls(f"/proc/{os.getpid()}/fd/{file}", width)
        weakref.finalize(table, os.close, file)
        table._free = list(range(cls.rows))[::-1]  # a stack with 0 on top: what was in use is used again, so memory stays small
        return table

    def take_row(self, start: int, n: int | None = None) -> int:
        """The number of a row that no one else has, for the tokens at positions start .. start + n - 1, or to its end."""
        if not self._free:
            raise RuntimeError(f"a server takes {self.rows} requests at once; this one is more")
        row = self._free.pop()
        # Seam: what is never written must not pass for 0, which would be certain, nor for what another request left here.
        self.values[row, start : None if n is None else start + n] = math.nan
        return row

    def give_row(self, row: int) -> None:
        """Gives a row back."""
        self._free.append(row)

    def read(self, row: int, start: int, n: int) -> list[float]:
        """Those of the tokens at positions start .. start + n - 1."""
        return self.values[row, start : start + n].tolist()


class WorkerExtension:
    """What runs inside vLLM's worker process: with `_pause` and `_tell_all_that_wait` of VLLMServer the only code here that
    touches vLLM's private parts.

    Written against vLLM 0.32, model runner V1. `tests/test_partial_rollout.py` fails when one of them moves.
    """

    def describe(self) -> dict[str, Any]:
        """pid, cores, threads and device of this process."""
        import torch

        cores = sorted(os.sched_getaffinity(0))
        return {"pid": os.getpid(), "cores": cores, "threads": torch.get_num_threads(), "device": str(self.device)}

    def die_with_server(self, server: int) -> None:
        """Has the engine end when the process `server` ends, in whatever way: a killed actor leaves no engine behind.

        This process is the engine, or one of several that share the weights and that the engine has started.
        """
        import ctypes
        import select
        import signal
        import threading

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if (engine := os.getppid()) != server:
            ends = os.pidfd_open(server)

            def follow() -> None:
                select.select([ends], [], [])
                os.kill(engine, signal.SIGKILL)  # its other children end with it, this process too

            threading.Thread(target=follow, daemon=True).start()
        self._unlink_tqdm_lock()

    @staticmethod
    def _unlink_tqdm_lock() -> None:
        """The lock of tqdm's progress bars is a semaphore with a name, a file in /dev/shm. In use it needs the name no more,
        and whoever is killed cannot take it away."""
        from multiprocessing import util

        from tqdm.std import TqdmDefaultWriteLock

        lock = getattr(TqdmDefaultWriteLock, "mp_lock", None)
        name = lock is not None and lock._semlock.name
        for at_exit in list(util._finalizer_registry.values()):
            if name and name in (at_exit._args or ()):
                at_exit()  # what this process does when it ends in peace; once

    def pin(self, cores: Sequence[int]) -> None:
        """Keeps this process on `cores`."""
        pin_process(cores)

    def install_sampler(self) -> None:
        """Makes sampling split-invariant: the noise at a position is a function of (seed, absolute position) alone.

        Replaces `forward` of vLLM's top-k/top-p sampler. Temperature and filters stay vLLM's, and so do the logprobs, which
        have no noise in them. One uniform number per token picks it from the cumulated probabilities: a resumed request
        has the same position, so it draws the same number.
        """
        import numpy as np
        import torch
        from vllm.utils.torch_utils import async_tensor_h2d
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

        runner = self.model_runner

        def forward(logits: Any, generators: Any, k: Any, p: Any) -> tuple[Any, Any]:
            # Seam: by sorting, on a GPU too. There vLLM has two kernels, and the size of the batch chooses between them.
            logits = apply_top_k_top_p_pytorch(logits, k, p)
            logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
            ids = runner.input_batch.req_ids
            seeds = np.array([runner.requests[i].sampling_params.extra_args["noise_seed"] for i in ids], np.uint64)
            positions = runner.input_batch.num_tokens_no_spec[: len(ids)]  # prompt + tokens so far
            # A plain copy to a GPU would wait for the forward pass that has just been queued there.
            u = async_tensor_h2d(uniform_noise(seeds, positions), logits.device)
            return inverse_cdf(logprobs.exp(), u), logprobs

        runner.sampler.topk_topp_sampler.forward = forward

    def carry_logprobs(self, path: str, width: int) -> None:
        """Writes the log-probability of each sampled token into the server's LogprobTable in place of sending it there.

        Not on a GPU: there the copy would make the engine wait for its own step, and vLLM copies them beside the next one.
        """
        if self.device.type != "cpu":
            return
        runner, table = self.model_runner, LogprobTable(path, width)

        def gather_logprobs(logprobs: Any, num_logprobs: int, token_ids: Any) -> None:
            ids = runner.input_batch.req_ids
            rows = [runner.requests[i].sampling_params.extra_args["row"] for i in ids]
            positions = runner.input_batch.num_tokens_no_spec[: len(ids)]  # prompt + tokens so far
            table.values[rows, positions] = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1).numpy()

        runner.sampler.gather_logprobs = gather_logprobs

    def load_weights(self, path: str) -> None:
        """Loads a safetensors file into the running model. Raises ValueError where it lacks a weight. After an error some
        weights are the old ones and some the new ones; the next file is loaded as if that one had never been.

        On a CPU vLLM repacks each weight matrix and empties the original, so a plain `load_weights` corrupts the model: its
        reload undoes and redoes the packing, but misses a head that is tied to the embedding.
        """
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        model, weights = self.model_runner.get_model(), load_file(path)
        names = {name for name, _ in model.named_parameters()}  # before the reload, which takes apart what is tied
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            try:
                loaded = model.load_weights(iter(weights.items()))
                if missing := self._missing(model, names, weights, loaded):
                    raise ValueError(f"{len(missing)} weights are missing, such as {min(missing)}: send all of them")
            except BaseException:
                for layer in model.modules():  # what has been read of it would count for the next file
                    info = get_layerwise_info(layer)
                    info.load_numel = 0
                    info.loaded_weights.clear()
                raise
            finally:
                finalize_layerwise_reload(model, self.model_config)
        head = getattr(model, "lm_head", None)
        if hasattr(head, "cpu_linear") and head.weight.numel():
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(head, remove_weight=False)

    @staticmethod
    def _missing(model: Any, names: set[str], weights: Mapping[str, Any], loaded: set[str] | None) -> set[str]:
        """Of `names`, the model's weights, those that a file lacks. Of several that vLLM has fused into one, a single part
        passes for all."""
        missing = set() if loaded is None else names - loaded
        for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
            for mine in ({name.replace(fused, part) for part in parts} for name in names if f".{fused}." in name):
                missing |= mine - weights.keys() if mine & weights.keys() else set()
        return missing


def pin_process(cores: Sequence[int]) -> None:
    """Keeps every thread that this process has, and will have, on `cores`."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


# ---- See it: a toy engine, cut at every place ------------------------------------------------------------------------


class _ToyServer:
    """Twenty lines of engine: the next token is a function of the prefix and of the weights' version."""

    def __init__(self, cut_after: Sequence[int] = (), param_version: int = 0) -> None:
        self.cuts = list(cut_after)  # each request in turn is cancelled after so many tokens
        self.param_version = param_version

    def next_token(self, prefix: Sequence[int]) -> int:
        return hash((tuple(prefix), self.param_version)) % 50

    async def generate_for_partial(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> tuple[list[int], list[float], bool]:
        ids = list(prompt_ids)
        stop_after = self.cuts.pop(0) if self.cuts else None
        for n in range(sampling_params["max_tokens"]):
            if n == stop_after:
                return ids[len(prompt_ids) :], [-1.0] * n, True
            ids.append(self.next_token(ids))
            if ids[-1] in sampling_params["stop_token_ids"]:
                break
        new = ids[len(prompt_ids) :]
        return new, [-1.0] * len(new), False


async def _demo() -> None:
    class Letters:  # a tokenizer for token ids that are letters
        def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
            return [ord(c) for c in messages[-1]["content"]]

    async def respond(server: _ToyServer, changes: Sequence[int] = ()) -> AgentLoopOutput:
        manager = LLMServerManager([server])
        loop = PartialSingleTurnAgentLoop(manager, Letters(), response_length=40, max_model_len=100, eos_token_ids=[7])
        output = None
        while output is None or output.is_cancel:
            output = await loop.run({}, raw_prompt=[{"content": "hi"}], output=output, param_version=server.param_version)
            server.param_version += 1 if server.param_version in changes else 0
        return output

    whole = await respond(_ToyServer())
    for cut in range(len(whole.response_ids) + 1):
        assert await respond(_ToyServer([cut, 1])) == whole
    print(f"uninterrupted: {len(whole.response_ids)} tokens, {whole.stop_reason}; cut at each place: the same")
    mixed = await respond(_ToyServer([5, 4]), changes=[0, 1])
    print(f"weights changed at two cuts: spans {mixed.spans} (param_version, tokens), {mixed.stop_reason}")


if __name__ == "__main__":
    asyncio.run(_demo())
