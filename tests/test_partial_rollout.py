"""The law of the seam, on an engine of thirty lines and on the real one.

    With weights unchanged, any schedule of cancels and resumes gives the uninterrupted response.

Part 1 has a fake engine whose next token is a function of (prefix, param_version, seed, absolute position). There the law is
exact, and hypothesis looks for a schedule that breaks it. Part 2 asks the same of vLLM, with a random model of a few
thousand weights, and has transformers for its truth.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import doctest
import functools
import itertools
import math
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import partial_rollout
from partial_rollout import (
    AgentLoopOutput,
    LLMServerManager,
    LogprobTable,
    PartialSingleTurnAgentLoop,
    SingleTurnAgentLoop,
    VLLMServer,
    extend_spans,
    find_stop,
    get_agent_loop,
    inverse_cdf,
    register,
    remaining_params,
    uniform_noise,
)

settings.register_profile("laws", deadline=None)  # no test here depends on how fast the machine is
settings.load_profile("laws")

# ---- Part 1: an engine in thirty lines -------------------------------------------------------------------------------

EOS = (256, 257)  # two ids end a response, as in many a model
VOCABULARY = [*b"ab" * 9, *"é".encode() * 3, *EOS]  # token = byte; a character may be cut in two


class Bytes:
    """A tokenizer whose tokens are bytes. It remembers what it was asked to decode."""

    def __init__(self) -> None:
        self.decoded: list[list[int]] = []

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: Any) -> list[int]:
        return list(messages[-1]["content"].encode())

    def decode(self, ids: Sequence[int], **_: bool) -> str:
        self.decoded.append(list(ids))
        return text_of(ids)


def text_of(ids: Sequence[int]) -> str:
    return bytes(i for i in ids if i < 256).decode(errors="replace")


def next_token(prefix: Sequence[int], param_version: int | None, seed: int, banned: Sequence[int]) -> tuple[int, float]:
    """(token, logprob), from the whole prefix, the weights, and the noise at this absolute position."""
    h = hash((*prefix, param_version, seed + len(prefix)))
    allowed = [token for token in VOCABULARY if token not in banned]
    return allowed[h % len(allowed)], -(h % 9973) / 1000


class FakeServer:
    """The contract of VLLMServer without vLLM. As the real one, it knows of a request only what the request says."""

    def __init__(self, param_version: int = 1) -> None:
        self.param_version, self.closed, self.cuts, self.lost, self.calls = param_version, False, 0, 0, []

    def cancel(self, lost: int = 0) -> None:
        """Ends what is in flight. The last `lost` tokens were computed, but never delivered."""
        self.closed, self.cuts, self.lost = True, self.cuts + 1, lost

    def resume(self) -> None:
        self.closed = False

    def update(self) -> None:
        self.cuts, self.lost, self.param_version = self.cuts + 1, 0, self.param_version + 1

    async def generate_for_partial(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], param_version: int, ticket: Any = None
    ) -> tuple[list[int], list[float], bool]:
        self.calls.append((request_id, len(prompt_ids), sampling_params["max_tokens"], ticket))
        if self.closed or param_version != self.param_version:
            return [], [], True
        params, cuts, ids, logprobs = sampling_params, self.cuts, list(prompt_ids), []
        while len(logprobs) < params["max_tokens"]:
            await asyncio.sleep(0)  # a step of the engine; a cancel may come before the first, or on the very last
            early = len(logprobs) < params.get("min_tokens", 0)
            token, logprob = next_token(ids, param_version, params.get("seed", 0), params["stop_token_ids"] if early else ())
            ids.append(token)
            logprobs.append(logprob)
            await asyncio.sleep(0)
            if cuts != self.cuts:
                keep = max(0, len(logprobs) - self.lost)
                return ids[len(prompt_ids) :][:keep], logprobs[:keep], True
            text = text_of(ids)[len(text_of(prompt_ids)) :]  # its own text: what is before the seam, it does not search
            floor = len(settled(ids[: len(prompt_ids) + params.get("min_tokens", 0)])) - len(text_of(prompt_ids))
            stops = [params["stop"]] if isinstance(params.get("stop"), str) else params.get("stop") or []
            if token in params["stop_token_ids"] or any(s in text[max(0, floor - len(s) + 1) :] for s in stops):
                break
        return ids[len(prompt_ids) :], logprobs, False


def settled(ids: Sequence[int]) -> str:
    """The text of `ids` without a character that is not complete yet."""
    return text_of(ids).rstrip("\ufffd")


def first_stop(ids: Sequence[int], stops: Sequence[str], min_tokens: int, decode: Callable[..., str] = text_of) -> int | None:
    """The truth for find_stop, by linear scan: the fewest tokens that complete a match, if they are more than min_tokens."""
    text = decode(ids)
    ends = [i + len(s) for s in stops for i in range(len(text)) if text.startswith(s, i)]
    complete = [next(n for n in range(len(ids) + 1) if decode(ids[:n]).startswith(text[:end])) for end in ends]
    return min((n for n in complete if n > min_tokens), default=None)


def uninterrupted(
    prompt_ids: list[int], params: dict[str, Any], budget: int, version_of: Callable[[int], int | None]
) -> tuple[list[int], list[float], str]:
    """The truth: (ids, logprobs, stop reason), one token after the other, each by the version that `version_of` gives it."""
    stop_ids = {*(() if params.get("ignore_eos") else EOS), *params.get("stop_token_ids", ())}
    stops = [params["stop"]] if isinstance(params.get("stop"), str) else params.get("stop") or []
    ids, logprobs, min_tokens = [], [], params.get("min_tokens", 0)
    while len(ids) < budget:
        banned = stop_ids if len(ids) < min_tokens else ()
        token, logprob = next_token(prompt_ids + ids, version_of(len(ids)), params.get("seed", 0), banned)
        ids.append(token)
        logprobs.append(logprob)
        if token in stop_ids or first_stop(ids, stops, min_tokens):
            return ids, logprobs, "stop"
    return ids, logprobs, "length"


# ---- The law, under hypothesis ---------------------------------------------------------------------------------------


STOPS = [{}, {"stop": []}, {"stop": "ab"}, {"stop": "é"}, {"stop": ["aaa", "bé"]}, {"stop": ["ébb", "a"]}]
OTHERS = [{}, {}, {"ignore_eos": True}, {"stop_token_ids": [98]}, {"presence_penalty": 0.0}]
PARAMS = [{"temperature": 1.0, **stop, **other} for stop in STOPS for other in OTHERS]


def sample_by_number(number: int) -> dict[str, Any]:
    """A prompt, its limits and its parameters: the digits of `number` choose. (One draw, where twelve would be slow.)"""

    def choose(options: Sequence[Any]) -> Any:
        nonlocal number
        number, digit = divmod(number, len(options))
        return options[digit]

    prompt, params, seed = choose(["a", "é", "ab"]), choose(PARAMS), choose(range(100))
    response_length, room = choose([*[12] * 6, 0, 1, 4, 8]), choose([*[12] * 6, 1, 3, 6, 9])
    max_tokens, min_tokens = choose([*[None] * 6, 0, 1, 5, 9]), choose([*[0] * 5, 1, 2, 4, 7, 10])
    budget = min(response_length, room, room if max_tokens is None else max_tokens)
    return dict(
        prompt=prompt,
        params={**params, "seed": seed, "max_tokens": max_tokens, "min_tokens": min(min_tokens, budget)},
        response_length=response_length,
        max_model_len=len(prompt.encode()) + room,
        budget=budget,
    )


SAMPLES = st.lists(st.integers(0, 3 * 30 * 100 * 10**4 - 1).map(sample_by_number), min_size=1, max_size=3)


def schedules(*moves: str) -> st.SearchStrategy:
    """[(steps to wait, move), ...]. Of "cut 2" and "close 2" the number is that of tokens which were not delivered; after
    "late" requests carry an old version, until "publish"."""
    return st.lists(st.sampled_from([(steps, move) for steps in range(8) for move in moves]), max_size=8)


async def conduct(schedule: Sequence[tuple[int, str]], servers: Sequence[FakeServer], stamp: dict[str, int]) -> None:
    """Does what the schedule says, to all servers; leaves them open and the stamp right, so that everyone finishes."""
    for steps, move in [*schedule, (0, "open"), (0, "publish")]:
        for _ in range(steps):
            await asyncio.sleep(0)
        for server in servers:
            if move.startswith(("cut", "close")):
                server.cancel(lost=int(move[-1]))
            if move.startswith(("cut", "open")):
                server.resume()
            if move == "update":
                server.update()
        stamp["version"] = {"late": 0, "publish": servers[0].param_version}.get(move, stamp["version"])


async def respond(sample: dict[str, Any], manager: LLMServerManager, stamp: dict[str, int]) -> AgentLoopOutput:
    """Runs one sample to its end, and looks at all that must hold in between."""
    loop = PartialSingleTurnAgentLoop(
        manager, Bytes(), response_length=sample["response_length"], max_model_len=sample["max_model_len"], eos_token_ids=EOS
    )
    prompt_ids, output = list(sample["prompt"].encode()), None
    while output is None or output.is_cancel:
        old = output or AgentLoopOutput(prompt_ids, [], [], [], stop_reason="abort")
        output = await loop.run(
            sample["params"], raw_prompt=[{"content": sample["prompt"]}], output=output, param_version=stamp["version"]
        )
        kept, n = len(old.response_ids), len(output.response_ids)
        assert output.prompt_ids == prompt_ids
        assert output.response_ids[:kept] == old.response_ids and output.response_logprobs[:kept] == old.response_logprobs
        assert n == len(output.response_mask) == len(output.response_logprobs) == sum(output.span_lengths) <= sample["budget"]
        assert all(output.response_mask) and output.span_versions == sorted(set(output.span_versions))
        assert output.span_lengths[: len(old.spans) - 1] == old.span_lengths[:-1]
        await asyncio.sleep(0)
    return output


def rollout(samples: list[dict[str, Any]], schedule: list[tuple[int, str]], n_servers: int) -> list[AgentLoopOutput]:
    """All samples at once over the servers, while the schedule is conducted. What must hold at the end is looked at too."""
    servers, stamp = [FakeServer() for _ in range(n_servers)], {"version": 1}
    manager = LLMServerManager(servers)

    async def all_at_once() -> list[AgentLoopOutput]:
        tasks = [respond(sample, manager, stamp) for sample in samples]
        *outputs, _ = await asyncio.wait_for(asyncio.gather(*tasks, conduct(schedule, servers, stamp)), timeout=60)
        return outputs

    outputs = asyncio.run(all_at_once())
    assert manager.in_flight == [0] * n_servers
    for server in servers:
        assert all(0 < max_tokens <= 12 for _, _, max_tokens, _ in server.calls)
    return outputs


@settings(max_examples=2000)
@given(SAMPLES, schedules("cut 0", "cut 2", "close 1", "open", "late", "publish"), st.integers(1, 2))
def test_any_schedule_of_cancels_and_resumes_gives_the_uninterrupted_response(samples: Any, schedule: Any, n: int) -> None:
    """With weights unchanged: the same ids, logprobs, stop reason and mask, whatever was cancelled, paused, late or lost."""
    for sample, output in zip(samples, rollout(samples, schedule, n), strict=True):
        ids, logprobs, reason = uninterrupted(list(sample["prompt"].encode()), sample["params"], sample["budget"], lambda _: 1)
        assert (output.response_ids, output.response_logprobs, output.stop_reason) == (ids, logprobs, reason)
        assert output.response_mask == [1] * len(ids) and output.spans == (((1, len(ids)),) if ids else ())


@settings(max_examples=2000)
@given(SAMPLES, schedules("cut 0", "cut 1", "close 2", "open", "update", "publish"), st.integers(1, 2))
def test_each_token_is_the_one_its_version_samples_after_the_tokens_before_it(samples: Any, schedule: Any, n: int) -> None:
    """With weights changing: the response is what its spans say, token by token, and it stops where it must."""
    for sample, output in zip(samples, rollout(samples, schedule, n), strict=True):
        versions = [version for version, length in output.spans for _ in range(length)]
        version_of = dict(enumerate(versions)).get
        truth = uninterrupted(list(sample["prompt"].encode()), sample["params"], sample["budget"], version_of)
        assert (output.response_ids, output.response_logprobs, output.stop_reason) == truth
        fields = output.extra_fields
        ends = (versions[0], versions[-1]) if versions else (-1, -1)
        assert (fields["param_version_start"], fields["param_version_end"]) == ends and not fields["is_cancel"]


# ---- The law, row by row ---------------------------------------------------------------------------------------------


class Answers:
    """A server manager that answers what it is told to, and writes down what it was asked."""

    def __init__(self, *answers: tuple[Sequence[int], bool]) -> None:
        self.answers, self.requests = list(answers), []

    async def generate_for_partial(self, request_id: str, **request: Any) -> tuple[list[int], list[float], bool]:
        self.requests.append({"request_id": request_id, **request})
        ids, is_cancel = self.answers.pop(0)
        return list(ids), [-0.5] * len(ids), is_cancel


def run(manager: Any, params: dict[str, Any], runs: int = 1, kind: type = PartialSingleTurnAgentLoop, **more: Any) -> Any:
    """The output of `runs` calls of `run`, each resuming what the one before gave, with versions 0, 1, ..."""
    limits = {"response_length": 10, "max_model_len": 100, "eos_token_ids": EOS}
    loop = kind(manager, more.pop("tokenizer", Bytes()), **limits | {k: more.pop(k) for k in limits.keys() & more.keys()})
    output = more.pop("output", None)

    async def all_runs() -> AgentLoopOutput:
        nonlocal output
        for version in range(runs):
            output = await loop.run(params, raw_prompt=[{"content": "hi"}], output=output, param_version=version, **more)
        return output

    return asyncio.run(all_runs())


def cancelled(ids: Sequence[int]) -> AgentLoopOutput:
    return AgentLoopOutput([1], list(ids), [1] * len(ids), [-1.0] * len(ids), ((0, len(ids)),), "abort")


def test_a_resumed_request_has_the_tokens_so_far_in_its_prompt_and_out_of_its_limits() -> None:
    """prompt + tokens so far; max_tokens and min_tokens less what exists; seed, version, name and ticket as given."""
    manager = Answers(([97] * 4, True), ([], True), ([98] * 3, True), ([99], False))
    params = {"min_tokens": 6, "seed": 5, "temperature": 0.7}
    output = run(manager, params, runs=4, ticket=("batch", 0, 1))
    prompt_ids = list(b"hi")
    assert [r["prompt_ids"] for r in manager.requests] == [
        prompt_ids + tokens for tokens in ([], [97] * 4, [97] * 4, [97] * 4 + [98] * 3)
    ]
    asked = [r["sampling_params"] for r in manager.requests]
    assert [p["max_tokens"] for p in asked] == [10, 6, 6, 3] and [p["min_tokens"] for p in asked] == [6, 2, 2, 0]
    assert all(p["seed"] == 5 and p["temperature"] == 0.7 and p["stop_token_ids"] == list(EOS) for p in asked)
    assert [r["param_version"] for r in manager.requests] == [0, 1, 2, 3]
    assert {r["ticket"] for r in manager.requests} == {("batch", 0, 1)}
    assert len({r["request_id"] for r in manager.requests}) == 1, "a resume goes by the same name, so that it finds its server"
    assert output.spans == ((0, 4), (2, 3), (3, 1)) and output.span_versions == [0, 2, 3] and output.span_lengths == [4, 3, 1]
    assert output.metrics == {"num_calls": 4} and output.num_turns == 2
    assert params == {"min_tokens": 6, "seed": 5, "temperature": 0.7}, "the caller's parameters are the caller's"


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 60), st.integers(0, 60))
def test_what_is_asked_for_never_exceeds_what_is_left(done: int, left: int, min_tokens: int, max_tokens: int) -> None:
    """done + max_tokens is the budget, done + min_tokens is min_tokens until it is reached; nothing else changes."""
    given_params = {"min_tokens": min_tokens, "max_tokens": max_tokens, "top_p": 0.9}
    params = remaining_params(given_params, done, done + left)
    assert params == {"max_tokens": left, "min_tokens": max(min_tokens - done, 0), "top_p": 0.9}
    assert "min_tokens" not in remaining_params({}, done, done + left)
    nothing = dict.fromkeys(["min_tokens", "presence_penalty", "n", "stop", "seed"])
    assert remaining_params(nothing, done, done + left) == {"max_tokens": left}, "vLLM takes None for some of them only"


@pytest.mark.parametrize(
    "limits, params, asked",
    [
        ({"response_length": 5}, {}, 5),
        ({"max_model_len": 6}, {}, 4),
        ({}, {"max_tokens": 3}, 3),
        ({}, {"max_tokens": None}, 10),
        ({"response_length": 5}, {"max_tokens": 30}, 5),
    ],
)
def test_the_budget_is_the_smallest_of_the_three_limits(limits: Any, params: Any, asked: int) -> None:
    """response_length, max_model_len - len(prompt), max_tokens."""
    manager = Answers(([], True))
    run(manager, params, **limits)
    assert manager.requests[0]["sampling_params"]["max_tokens"] == asked


@pytest.mark.parametrize(
    "limits, params, output",
    [
        ({"response_length": 0}, {}, None),
        ({}, {"max_tokens": 0}, None),
        ({}, {}, cancelled([97] * 10)),
        ({"max_model_len": 4}, {}, cancelled([97] * 3)),
    ],
)
def test_with_nothing_left_to_ask_for_no_call_is_made(limits: Any, params: Any, output: Any) -> None:
    """A budget of 0 is an answer of 0 tokens, and a cancelled response that has used its budget up is complete."""
    manager = Answers()
    result = run(manager, params, output=output, **limits)
    assert result.stop_reason == "length" and result.response_ids == (output.response_ids if output else [])
    assert not manager.requests


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_finished_response_comes_back_as_it_is(reason: Any) -> None:
    """No call, no new record, and no look at the parameters."""
    output, manager = AgentLoopOutput([1], [2], [1], [-0.5], ((0, 1),), reason), Answers()
    assert run(manager, {"no such": "parameter"}, output=output) is output and not manager.requests


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": -0.5},
        {"bad_words": ["x"]},
        {"structured_outputs": {"regex": "a*"}},
        {"n": 2},
        {"logits_processors": []},
        {"include_stop_str_in_output": True},
    ],
)
@pytest.mark.parametrize("output", [None, cancelled([97])])
def test_a_parameter_whose_state_would_be_lost_is_refused_before_anything_is_generated(params: Any, output: Any) -> None:
    """The error names parameter, value and way out; no request is made, not even the first."""
    manager = Answers()
    (name,) = params
    with pytest.raises(ValueError, match=f"{name}=.* cannot be resumed.*Leave it out"):
        run(manager, params, output=output)
    assert not manager.requests


def test_parameters_that_survive_a_cut_are_passed_on() -> None:
    """Those that look at prompt + tokens alone. Of the others the neutral value may be given, and goes no further: vLLM does
    not take None for each of them."""
    params = {
        **{"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 1, "repetition_penalty": 1.1},
        **{"logit_bias": {1: 2.0}, "allowed_token_ids": [1, 2], "logprobs": 0, "ignore_eos": False},
    }
    manager = Answers(([97], False))
    neutral = {"presence_penalty": None, "frequency_penalty": 0, "n": 1, "bad_words": [], "structured_outputs": None}
    run(manager, params | neutral)
    assert manager.requests[0]["sampling_params"] == params | {"max_tokens": 10, "stop_token_ids": list(EOS)}


@pytest.mark.parametrize("logprobs", [[-0.5, None], [None, -0.5], [-0.5, math.nan], [-0.5, -math.inf], [-0.5], [-0.5] * 3])
def test_a_missing_logprob_is_an_error(logprobs: list[float]) -> None:
    """Never 0.0, which would say that the token was certain."""

    class Broken(Answers):
        async def generate_for_partial(self, request_id: str, **_: Any) -> Any:
            return [97, 98], logprobs, False

    with pytest.raises(ValueError, match=r"2 tokens came back with logprobs .* one is missing"):
        run(Broken(), {})


@pytest.mark.parametrize("eos", EOS)
def test_a_cancel_on_the_very_step_of_the_eos_is_no_cancel(eos: int) -> None:
    """The finish wins, whichever of the EOS ids it is; and the EOS is trained like every other token."""
    output = run(Answers(([97, eos], True)), {})
    assert output.stop_reason == "stop" and not output.is_cancel and output.response_mask == [1, 1]
    assert run(Answers(([97, eos], True)), {"ignore_eos": True}).is_cancel


def test_a_cancel_on_the_last_token_of_the_budget_is_no_cancel() -> None:
    """The finish wins; and an EOS in the last place of the budget is a stop."""
    assert run(Answers(([97] * 10, True)), {}).stop_reason == "length"
    assert run(Answers(([97] * 9 + [256], True)), {}).stop_reason == "stop"
    assert run(Answers(([97, 98], True)), {"stop_token_ids": [98]}).stop_reason == "stop"


def test_a_cancel_before_the_first_token_leaves_nothing_behind() -> None:
    """An empty response with no spans, which waits for its resume."""
    output = run(Answers(([], True)), {})
    assert output == AgentLoopOutput(list(b"hi"), [], [], [], (), "abort") and output.is_cancel
    assert output.extra_fields == {
        **{"is_cancel": True, "stop_reason": "abort", "num_turns": 2},
        **{"param_version_start": -1, "param_version_end": -1, "request_id": output.request_id},
    }


def test_a_response_that_comes_back_as_a_sample_of_a_batch_is_known_to_its_server() -> None:
    """Its columns give the same output, and the resume has the request_id under which a server may have its prefix cached."""
    manager = Answers(([97], True), ([98, 256], False))
    output = run(manager, {})
    names = ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "span_versions", "span_lengths")
    sample = {name: np.array(getattr(output, name)) for name in names} | output.extra_fields
    again = AgentLoopOutput.from_sample(sample)
    assert again == output and again.request_id == output.request_id != ""
    assert run(manager, {}, output=again).response_ids == [97, 98, 256]
    first, second = manager.requests
    assert first["request_id"] == second["request_id"]
    loop = PartialSingleTurnAgentLoop(manager, Bytes(), response_length=10, max_model_len=100, eos_token_ids=EOS)
    finished = sample | {"stop_reason": "stop", "raw_prompt": []}
    assert asyncio.run(loop.run({}, **finished)).request_id == output.request_id, "handed in again, it keeps its name"


def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers() -> None:
    """ValueError before any call; one token of room is enough."""
    manager = Answers(([97], False))
    with pytest.raises(ValueError, match=r"prompt of 2 tokens leaves no room .* max_model_len=2"):
        run(manager, {}, max_model_len=2)
    assert not manager.requests
    assert run(manager, {}, max_model_len=3).stop_reason == "length"


def test_a_stop_string_cut_by_the_seam_is_found_and_cut_at_the_same_place() -> None:
    """The response ends with the token that completes the stop string; logprobs, mask and spans end with it."""
    manager = Answers((b"xxST", True), (b"OPyy", True))
    output = run(manager, {"stop": "STOP"}, runs=2)
    assert bytes(output.response_ids) == b"xxSTOP" and output.stop_reason == "stop"
    assert len(output.response_logprobs) == 6 and output.spans == ((0, 4), (1, 2))
    assert run(Answers((b"xSTOPy", True)), {"stop": ["no", "STOP"]}).stop_reason == "stop", "a stop beats a cancel, too"


def test_a_character_cut_by_the_seam_is_decoded_whole() -> None:
    """Text is decoded from the ids of the whole response: each decode has a beginning of it, never the end alone."""
    tokenizer, text = Bytes(), "zé€x".encode()
    output = run(Answers((text[:2], True), (text[2:4], True), (text[4:], True)), {"stop": ["€"]}, runs=3, tokenizer=tokenizer)
    assert text_of(output.response_ids) == "zé€" and output.stop_reason == "stop"
    assert all([*b"hi", *text][: len(ids)] == ids for ids in tokenizer.decoded)


PIECES = ["▁a", "a", "▁b", "b", "▁", "<0xC3>", "<0xA9>", "</s>"]


@functools.cache
def spaced() -> Any:
    """A tokenizer as Llama's first ones are: a word has its space in front, and the first of a text loses it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(PIECES)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


class Script:
    """An engine that says the tokens it was given, finds stop strings by vLLM's own code, and is cut after so many tokens."""

    def __init__(self, prompt_ids: list[int], says: list[int], cuts: Sequence[int] = ()) -> None:
        self.prompt_ids, self.says, self.cuts = prompt_ids, says, list(cuts)

    def apply_chat_template(self, *_: Any, **__: Any) -> list[int]:
        return self.prompt_ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True, **_: bool) -> str:
        return spaced().decode(list(ids), skip_special_tokens=skip_special_tokens)

    async def generate_for_partial(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> tuple[list[int], list[float], bool]:
        from vllm import SamplingParams
        from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

        request = SimpleNamespace(request_id="", prompt_token_ids=prompt_ids, sampling_params=SamplingParams(**sampling_params))
        text, said = FastIncrementalDetokenizer(SimpleNamespace(_tokenizer=spaced()), request), []
        cut = self.cuts.pop(0) if self.cuts else None
        for token in self.says[len(prompt_ids) - len(self.prompt_ids) :][: sampling_params["max_tokens"]]:
            if len(said) == cut:
                return said, [-1.0] * cut, True
            said.append(token)
            if token in sampling_params["stop_token_ids"] or text.update([token], False):
                break
        return said, [-1.0] * len(said), False


@settings(max_examples=500)
@given(
    st.lists(st.integers(0, len(PIECES) - 2), max_size=4),
    st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=10),
    st.lists(st.sampled_from([" a", " b a", " ", "a b", "é", " é", "b  a", "ba"]), min_size=1, max_size=2),
    st.integers(0, 4),
    st.lists(st.integers(0, 4), max_size=4),
)
@example([1], [0, 2, 0], [" a b"], 0, [1])  # the space in front of the first word of the response
@example([1], [0], [" a"], 0, [0])
@example([0], [5, 6, 1, 0], [" a"], 0, [1])  # vLLM found it in the prompt, since the cut was within a character
@example([0], [5, 1, 0], [" a"], 0, [1])
@example([], [0, 0, 4, 5, 6, 5], [" é"], 0, [3])  # the character begun behind "é" takes it away from the text again
@example([], [0, 5, 6, 5, 2, 1], ["éba"], 0, [4])  # vLLM forgot the space, and everything before it, with the bytes
@example([], [0, 0, 4, 5, 6, 5, 6, 5, 6], [" é"], 0, [3])  # there, gone, there: a bisection of it finds the second
@example([], [4, 5, 6, 5, 6], [" é"], 4, [])  # complete within min_tokens, then gone, then there again
def test_a_stop_string_is_where_vllm_finds_it_whatever_the_tokenizer_does_with_spaces(
    prompt_ids: list[int], says: list[int], stop: list[str], min_tokens: int, cuts: list[int]
) -> None:
    """The response ends where vLLM alone ends it, wherever it was cut, and for the same reason."""
    stop_ids, min_tokens = [len(PIECES) - 1], min(min_tokens, len(says))
    params = {"stop": stop, "min_tokens": min_tokens}

    def respond(*cuts: int, kind: type = PartialSingleTurnAgentLoop) -> AgentLoopOutput:
        engine, output, calls = Script(prompt_ids, says, cuts), None, 0
        more = {"tokenizer": engine, "eos_token_ids": stop_ids, "response_length": len(says)}
        while output is None or output.is_cancel:
            output, calls = run(engine, params, output=output, kind=kind, **more), calls + 1
            assert calls <= len(cuts) + 1, "what vLLM took for a stop is no cancel"
            again = engine.decode(output.response_ids).count("\ufffd")  # each may make vLLM forget
            assert output.metrics["num_calls"] <= 2 * len(cuts) + 1 + again, "twice for a cut, if that is within a character"
        return output

    request = {**params, "max_tokens": len(says), "stop_token_ids": stop_ids}
    engine = Script(prompt_ids, says)
    alone, _, _ = asyncio.run(engine.generate_for_partial("", prompt_ids=prompt_ids, sampling_params=request))
    whole, resumed = respond(kind=SingleTurnAgentLoop), respond(*cuts)
    assert (whole.response_ids, whole.stop_reason) == (resumed.response_ids, resumed.stop_reason)
    if "\ufffd" not in engine.decode(prompt_ids + says):  # after half a character vLLM may forget what came before
        assert whole.response_ids == alone


def test_without_stop_strings_nothing_is_decoded() -> None:
    """The cost of a resume grows with the tokens that are copied, and with nothing else."""
    tokenizer = Bytes()
    run(Answers(([97], True), ([98], True), ([99], False)), {}, runs=3, tokenizer=tokenizer)
    assert not tokenizer.decoded


@settings(max_examples=500)
@given(
    st.lists(st.sampled_from([*b"ab" * 2, *"é€".encode(), 256]), max_size=14),
    st.lists(st.sampled_from(["a", "ab", "ba", "aab", "é", "aé", "€", "é€", "bb"]), max_size=3),
    st.integers(0, 15),
)
@example(ids=list("é".encode()), stops=["é"], min_tokens=1)  # half a character counted as a whole one, and hid the match
@example(ids=list(b"aaba"), stops=["aab"], min_tokens=2)  # begins before min_tokens and ends after
def test_find_stop_equals_a_linear_scan(ids: list[int], stops: list[str], min_tokens: int) -> None:
    """The fewest tokens whose text has a stop string that ends after the first min_tokens tokens."""
    assert find_stop(ids, stops, min_tokens, text_of) == first_stop(ids, stops, min_tokens)


def test_find_stop_decodes_a_logarithm_of_the_length() -> None:
    """A bisection: 2,048 tokens need at most 12 decodes, and one where there is no stop string."""
    tokenizer = Bytes()
    assert find_stop([97] * 1500 + [98] * 548, ["ab"], 0, tokenizer.decode) == 1501 and len(tokenizer.decoded) <= 12
    tokenizer.decoded.clear()
    assert find_stop([97] * 2048, ["ab"], 0, tokenizer.decode) is None and len(tokenizer.decoded) == 1
    tokenizer.decoded.clear()
    assert find_stop([0xC3] + [97] * 2047, ["ab"], 0, tokenizer.decode) is None and len(tokenizer.decoded) <= 23


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=8))
def test_spans_hold_every_token_once_and_versions_never_decrease(pieces: list[tuple[int, int]]) -> None:
    """extend_spans equals run-length encoding of the version of each token; a version that goes back is an error."""
    spans, versions = (), []
    for version, n in pieces:
        if n and versions and version < versions[-1]:
            with pytest.raises(ValueError, match=f"went back from {versions[-1]} to {version}"):
                extend_spans(spans, version, n)
            continue
        spans = extend_spans(spans, version, n)
        versions += [version] * n
    assert spans == tuple(Counter(versions).items())


def test_a_record_is_frozen_and_its_lengths_agree() -> None:
    """A token without mask, logprob or version cannot be recorded."""
    output = cancelled([5, 6])
    with pytest.raises(AttributeError):
        output.response_ids = []
    for lengths in ((1, 2, 2, 2), (2, 1, 2, 2), (2, 2, 1, 2), (2, 2, 2, 1)):
        ids, mask, logprobs, span = lengths
        with pytest.raises(ValueError, match="every response token needs its mask, its logprob and its version"):
            AgentLoopOutput([1], [5] * ids, [1] * mask, [-1.0] * logprobs, ((0, span),))


def test_what_was_handed_over_does_not_change_any_more() -> None:
    """An engine that goes on with its lists, or a resume that goes on with the record, leaves what came back as it was."""
    ids, logprobs = [97, 98], [-0.5, -0.5]

    class Growing(Answers):
        async def generate_for_partial(self, request_id: str, **_: Any) -> Any:
            return ids, logprobs, True

    first = run(Growing(), {})
    ids.append(99)
    logprobs.append(-0.5)
    assert first.response_ids == [97, 98] and first.response_logprobs == [-0.5, -0.5]
    second = run(Answers(([100], False)), {}, output=first)
    assert first.response_ids == [97, 98] and second.response_ids == [97, 98, 100] and first.prompt_ids == second.prompt_ids


def test_a_prompt_is_a_plain_list_of_int() -> None:
    """Whatever kind of integers the chat template gives."""

    class Numpy(Bytes):
        def apply_chat_template(self, messages: Any, **kwargs: Any) -> Any:
            assert kwargs == {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
            return np.array([5, 6])

    prompt_ids = run(Answers(([97], False)), {}, tokenizer=Numpy()).prompt_ids
    assert prompt_ids == [5, 6] and {type(i) for i in prompt_ids} == {int}


@given(st.lists(st.sampled_from(["a", "b", ""]), max_size=8))
@example(["a", "b"])  # the same dict, with other words in it
def test_a_prompt_that_comes_again_is_encoded_once_and_never_an_old_one(contents: list[str]) -> None:
    """Equal messages in a row share one call of the template; whoever changes messages, or ids he was given, hurts no one."""
    calls: list[str] = []

    class Counting(Bytes):
        def apply_chat_template(self, messages: Any, **_: Any) -> list[int]:
            calls.append(messages[0]["content"])
            return super().apply_chat_template(messages)

    loop = PartialSingleTurnAgentLoop(Answers(), Counting(), response_length=10, max_model_len=100)
    message: dict[str, str] = {}
    for content in contents:
        message["content"] = content
        ids = loop.encode_prompt([message])
        assert ids == list(content.encode())
        ids.append(0)
    assert calls == [content for content, _ in itertools.groupby(contents)]


def test_single_turn_agent_is_never_cut() -> None:
    """It is the same loop, but a cancel is an error that says what to use instead."""
    assert run(Answers(([97, 256], False)), {}, kind=SingleTurnAgentLoop).stop_reason == "stop"
    with pytest.raises(RuntimeError, match=r"cancelled after 1 tokens.*partial_single_turn_agent"):
        run(Answers(([97], True)), {}, kind=SingleTurnAgentLoop)
    with pytest.raises(RuntimeError, match=r"sent back untouched: .* other weights than param_version=\d+, which must"):
        run(Answers(([], True)), {}, kind=SingleTurnAgentLoop)


def test_the_registry_knows_loops_by_name() -> None:
    """Both loops are there; an unknown name is answered with the known ones."""
    assert get_agent_loop("partial_single_turn_agent") is PartialSingleTurnAgentLoop
    assert get_agent_loop("single_turn_agent") is SingleTurnAgentLoop
    with pytest.raises(ValueError, match="unknown agent loop 'x': choose one of partial_single_turn_agent, single_turn_agent"):
        get_agent_loop("x")


def test_a_name_belongs_to_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second class of the name is refused and changes nothing; the same class again, as after a reload, is fine."""
    monkeypatch.setattr(partial_rollout, "_REGISTRY", dict(partial_rollout._REGISTRY))
    with pytest.raises(ValueError, match="'single_turn_agent' is already registered as SingleTurnAgentLoop"):
        register("single_turn_agent")(PartialSingleTurnAgentLoop)
    assert register("single_turn_agent")(SingleTurnAgentLoop) is SingleTurnAgentLoop is get_agent_loop("single_turn_agent")


# ---- The manager -----------------------------------------------------------------------------------------------------


class Holding:
    """A server that answers when it is told to."""

    def __init__(self) -> None:
        self.waiting: dict[str, asyncio.Future] = {}
        self.tickets: list[Any] = []

    async def generate_for_partial(self, request_id: str, *, ticket: Any, **_: Any) -> Any:
        self.tickets.append(ticket)
        self.waiting[request_id] = asyncio.get_running_loop().create_future()
        return await self.waiting[request_id]


async def ask(manager: LLMServerManager, request_id: str, ticket: Any = None) -> asyncio.Task:
    request = manager.generate_for_partial(request_id, prompt_ids=[1], sampling_params={}, ticket=ticket)
    task = asyncio.ensure_future(request)
    await asyncio.sleep(0)  # the task runs up to the server's answer
    return task


@given(st.integers(1, 4), st.lists(st.integers(0, 9), max_size=30))
def test_a_request_goes_to_a_server_with_fewest_in_flight(n_servers: int, events: list[int]) -> None:
    """Whatever order requests come (0-5) and end (6-9) in, and however they end."""

    async def check() -> None:
        servers = [Holding() for _ in range(n_servers)]
        manager, tasks = LLMServerManager(servers), []
        for number, event in enumerate(events):
            before = [len(server.waiting) for server in servers]
            if event <= 5:
                tasks.append(await ask(manager, f"r{number}"))
                (chosen,) = [i for i, server in enumerate(servers) if len(server.waiting) > before[i]]
                assert before[chosen] == min(before)
            elif any(before):
                busiest = servers[before.index(max(before))]
                name, future = busiest.waiting.popitem()
                future.set_exception(OSError(name)) if event == 9 else future.set_result(([1], [-1.0], False))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            assert manager.in_flight == [len(server.waiting) for server in servers]
        for server in servers:
            for future in server.waiting.values():
                future.set_result(([1], [-1.0], False))
        await asyncio.gather(*tasks, return_exceptions=True)
        assert manager.in_flight == [0] * n_servers and not manager._home

    asyncio.run(check())


def test_a_cancelled_request_goes_home() -> None:
    """Where its prefix may be cached, though another server has fewer in flight; also after it was sent back untouched."""

    async def check() -> None:
        servers = [Holding(), Holding()]
        manager = LLMServerManager(servers)

        async def at(request_id: str) -> tuple[int, asyncio.Task, asyncio.Future]:
            task = await ask(manager, request_id)
            (home,) = [i for i, server in enumerate(servers) if request_id in server.waiting]
            return home, task, servers[home].waiting.pop(request_id)

        await ask(manager, "other")  # at server 0
        home, task, answer = await at("mine")
        answer.set_result(([7, 8], [-1.0, -1.0], True))
        assert (await task)[2] and home == 1
        await ask(manager, "busy")
        servers[0].waiting.pop("other").set_result(([1], [-1.0], False))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert manager.in_flight == [0, 1], "home is the busier one now"
        home, task, answer = await at("mine")
        answer.set_result(([], [], True))  # the door was closed
        assert home == 1 and await task == ([], [], True)
        home, task, answer = await at("mine")
        answer.set_result(([9], [-1.0], False))
        assert home == 1 and await task == ([9], [-1.0], False) and not manager._home
        _, task, answer = await at("new")
        answer.set_result(([], [], True))
        assert await task == ([], [], True) and not manager._home, "without a token there is no home"

    asyncio.run(check())


def test_requests_that_no_one_resumes_are_forgotten() -> None:
    """The memory of homes is bounded: it drops what was cancelled longest ago."""
    manager = LLMServerManager([Answers(*[([1], True)] * 5)])
    manager.max_homes = 3

    async def check() -> None:
        for name in "abcde":
            await manager.generate_for_partial(name, prompt_ids=[1], sampling_params={})

    asyncio.run(check())
    assert list(manager._home) == ["c", "d", "e"]


@given(st.integers(1, 5), st.integers(1, 23), st.randoms(use_true_random=False))
def test_tickets_split_a_batch_so_that_each_server_gets_the_number_it_waits_for(n_servers: int, size: int, rng: Any) -> None:
    """In whatever order they come: a server's requests all say how many there are, and which is which by the batch's index."""

    async def check() -> None:
        servers = [Holding() for _ in range(n_servers)]
        manager, order = LLMServerManager(servers), rng.sample(range(size), size)
        tasks = [await ask(manager, f"r{i}", ticket=("batch", i, size)) for i in order]
        for number, server in enumerate(servers):
            assert {ticket[2] for ticket in server.tickets} <= {len(server.tickets)}
            assert sorted(ticket[1] for ticket in server.tickets) == list(range(number, size, n_servers))
            for future in server.waiting.values():
                future.set_result(([1], [-1.0], True))
        await asyncio.gather(*tasks)
        again = [await ask(manager, f"r{i}", ticket=("again", i, size)) for i in order]
        for server in servers:
            for future in server.waiting.values():
                future.cancelled() or future.done() or future.set_result(([1], [-1.0], False))
        await asyncio.gather(*again)
        assert manager.in_flight == [0] * n_servers and not manager._home

    asyncio.run(check())


def test_servers_may_be_actors_or_objects_but_there_must_be_one() -> None:
    """With a `.remote` the method is called through it, as Ray does; if an actor takes a request as one argument, by that."""

    async def remote(request_id: str, *, prompt_ids: list[int], sampling_params: Any, ticket: Any) -> Any:
        return [len(prompt_ids)], [-1.0], False

    async def as_one(request: dict[str, Any]) -> Any:
        return (await remote(**request))[0] * 2, [-1.0] * 2, False

    actor = SimpleNamespace(generate_for_partial=SimpleNamespace(remote=remote))
    request = LLMServerManager([actor]).generate_for_partial("r", prompt_ids=[1, 2], sampling_params={})
    assert asyncio.run(request) == ([2], [-1.0], False)
    actor.generate_for_request = SimpleNamespace(remote=as_one)
    request = LLMServerManager([actor]).generate_for_partial("r", prompt_ids=[1, 2], sampling_params={})
    assert asyncio.run(request) == ([2, 2], [-1.0, -1.0], False)
    with pytest.raises(ValueError, match="at least one server, got none"):
        LLMServerManager([])


# ---- The door of the server, with no engine behind it ----------------------------------------------------------------


class NoEngine:
    """What VLLMServer asks of vLLM's AsyncLLM, each request taking a while; it knows whether it would generate."""

    model_config = SimpleNamespace(max_model_len=64)

    def __init__(self) -> None:
        self.paused = self.asleep = self.errored = False
        self.inside: list[asyncio.Future] = []
        self.engine_core = self.output_processor = self
        self.utility_results: dict[int, asyncio.Future] = {}
        self.dead_error = RuntimeError("dead")

    @classmethod
    def from_engine_args(cls, engine_args: dict[str, Any]) -> NoEngine:
        engine = cls()
        engine.args = engine_args
        return engine

    async def add_request(self, request_id: str, prompt: Any, params: Any) -> Any:
        await asyncio.sleep(0)
        answer = asyncio.get_running_loop().create_future()
        self.inside.append(answer)
        serving = asyncio.ensure_future(self.serve(answer))
        return SimpleNamespace(request_id=request_id, get_nowait=lambda: None, get=lambda: answer, serving=serving)

    async def serve(self, answer: asyncio.Future) -> None:
        steps = 3
        while steps and not answer.done():
            await asyncio.sleep(0.001)
            steps -= not self.paused
        self.end([answer], "stop")

    def end(self, answers: list[asyncio.Future], finish_reason: str) -> None:
        completion = SimpleNamespace(token_ids=[1], logprobs=SimpleNamespace(logprobs=[-1.0]), finish_reason=finish_reason)
        for answer in [answer for answer in answers if not answer.done()]:
            answer.set_result(SimpleNamespace(outputs=[completion]))
        self.inside = [answer for answer in self.inside if not answer.done()]

    def propagate_error(self, error: Exception) -> None:
        for answer in self.inside:
            answer.set_exception(error)

    def shutdown(self, timeout: float) -> None:
        self.errored = True

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        await asyncio.sleep(0)
        self.paused = True
        if mode == "abort":
            self.end(self.inside, "abort")

    async def resume_generation(self) -> None:
        await asyncio.sleep(0)
        self.paused = False

    async def sleep(self, level: int) -> None:
        await asyncio.sleep(0)
        self.asleep = self.paused = True

    async def wake_up(self) -> None:
        await asyncio.sleep(0)
        self.asleep = self.paused = False

    async def is_sleeping(self) -> bool:
        return self.asleep or self.paused  # as vLLM's

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        await asyncio.sleep(0)
        return reset_connector  # else blocks of the old weights would come back from where they were moved to

    async def collective_rpc(self, method: str, args: Any = ()) -> None:
        assert (self.paused and not self.inside) or method != "load_weights"
        if method == "load_weights" and Path(*args).read_bytes() == b"broken":
            raise OSError("a broken file")

    async def update_weight_version(self, version: str) -> None:
        await asyncio.sleep(0)


@contextlib.contextmanager
def no_engine() -> Iterator[None]:
    import vllm.v1.engine.exceptions  # noqa: F401  (as it is, before parts of vLLM are replaced)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        patch.setitem(sys.modules, "vllm.engine.arg_utils", SimpleNamespace(AsyncEngineArgs=dict))
        patch.setitem(sys.modules, "vllm.v1.engine.async_llm", SimpleNamespace(AsyncLLM=NoEngine))
        patch.setitem(sys.modules, "vllm.inputs.engine", SimpleNamespace(tokens_input=list))
        params = SimpleNamespace(SamplingParams=SimpleNamespace, RequestOutputKind=SimpleNamespace(FINAL_ONLY=2))
        patch.setitem(sys.modules, "vllm.sampling_params", params)
        yield


def test_replicas_of_one_run_do_not_share_their_noise() -> None:
    """Their engines' seeds differ, and so do the seeds that they give to requests without one, also when one of them is started
    again: no twins in a group."""
    with no_engine():
        servers = [VLLMServer("model", seed=7, rank=rank) for rank in range(8)]
        servers += [VLLMServer("model", seed=7, rank=0, wait_for_weights=lambda: True) for _ in range(2)]
    assert [server.engine.args["seed"] for server in servers] == [*range(7, 15), 7, 7]
    assert len({server._own_seeds.getrandbits(63) for server in servers for _ in range(100)}) == 1000


@given(st.lists(st.integers(0, 4), max_size=30))
def test_a_row_of_logprobs_belongs_to_one_request_and_starts_empty(turns: list[int]) -> None:
    """Whoever comes and goes: rows in use differ, an empty one reads as nan, and what the engine writes is what is read."""
    ours = LogprobTable.create(16)
    engines = LogprobTable(ours.path, 16)
    rows: dict[int, int] = {}
    for who in turns:
        if who in rows:
            row = rows.pop(who)
            engines.values[row, 3:6] = [-who - 0.5, -1, -2]
            assert ours.read(row, 3, 3) == [-who - 0.5, -1, -2]
            ours.give_row(row)
        else:
            rows[who] = ours.take_row(3, who or None)
            assert len(set(rows.values())) == len(rows) and max(rows.values()) < 5, "memory stays small"
            assert all(math.isnan(x) for x in ours.read(rows[who], 3, who or 13))


def test_weights_that_an_engine_gave_up_must_come_before_a_request() -> None:
    """After sleep(level=2) waking up is not enough: what is in the memory then is anything."""
    with no_engine():
        server = VLLMServer("model")

    async def check() -> list[set[str]]:
        moves = [server.sleep(2), server.wake_up(), server.resume(), server.update_weights(b"weights", 1)]
        return [set(server._closed_by) for move in moves if await move is None]

    assert asyncio.run(check()) == [{"sleep", "no weights"}, {"no weights"}, {"no weights"}, set()]


def test_weights_of_another_size_leave_a_file_of_that_size() -> None:
    """Also after none at all, which are refused."""
    with no_engine():
        server = VLLMServer("model")

    async def check() -> None:
        for weights in (b"four", b"", b"four", b"sixsix", b"", b"two"):
            if not weights:
                with pytest.raises(ValueError, match="empty"):
                    await server.update_weights(weights, 1)
            else:
                await server.update_weights(weights, 1)
                assert Path(f"/proc/self/fd/{server._weights_file}").read_bytes() == weights

    asyncio.run(check())


def test_an_incomplete_batch_goes_in_once(caplog: pytest.LogCaptureFixture) -> None:
    """However many wait for the member that never comes: one warning, one pause. Each used to make its own."""
    with no_engine():
        server = VLLMServer("model")
    pauses, pause = [], server.engine.pause_scheduler_async
    server.engine.pause_scheduler_async = lambda **more: pauses.append(more) or pause(**more)
    take = server._take_batch
    server._take_batch = lambda ticket, put_in: take(ticket, put_in, patience_s=0.05)

    async def check() -> list[Any]:
        calls = [ask_server(server, ("batch", i, 9)) for i in range(8)]
        return await asyncio.wait_for(asyncio.gather(*calls), 10)

    assert asyncio.run(check()) == [([1], [-1.0], False)] * 8
    said = [record.message for record in caplog.records if record.name == "partial_rollout"]
    assert said == ["8 of 9 requests of a batch arrived within 0.05 s; they start"] and len(pauses) == 1


def assert_no_row_is_lost(server: VLLMServer) -> None:
    """One for each request that has ended: a run of 512 steps of 128 responses would be the end of them."""
    assert sorted(server._logprobs._free) == list(range(LogprobTable.rows))


def ask_server(server: VLLMServer, ticket: Any) -> Any:
    return server.generate_for_partial(f"r{ticket}", prompt_ids=[1], sampling_params={"max_tokens": 9}, ticket=ticket)


@given(st.integers(1, 6), st.integers(0, 30), st.data())
@example(6, 8, None)  # the last to arrive is in, its fellows are not yet: it went on, in a row that was another's by then
def test_whoever_gives_up_leaves_nothing_in_the_engine(n: int, turns: int, data: Any) -> None:
    """A caller that is cancelled at any moment of a batch's way in: its request ends, and the others are served."""
    who = data.draw(st.integers(0, n - 1)) if data else 0
    order = data.draw(st.permutations(range(n))) if data else [1, 2, 3, 4, 5, 0]
    with no_engine():
        server = VLLMServer("model")
    running: dict[str, asyncio.Future] = {}
    add = server.engine.add_request

    async def add_request(request_id: str, *args: Any) -> Any:
        outputs = await add(request_id, *args)
        running[request_id] = outputs.get()
        return outputs

    async def abort(request_id: str, internal: bool) -> None:
        server.engine.end([running[request_id]], "abort")

    server.engine.add_request, server.engine.abort = add_request, abort

    async def check() -> None:
        tasks = {i: asyncio.ensure_future(ask_server(server, ("batch", i, n))) for i in order}
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks[who].cancel()
        results = await asyncio.wait_for(asyncio.gather(*tasks.values(), return_exceptions=True), 10)
        gave_up = isinstance(dict(zip(tasks, results, strict=True))[who], asyncio.CancelledError)
        mine = running.get(f"r{('batch', who, n)}")
        if gave_up and mine is not None:
            await asyncio.sleep(0)
            assert mine.done(), "it is still in the engine"
        assert [result for i, result in zip(tasks, results, strict=True) if i != who] == [([1], [-1.0], False)] * (n - 1)
        assert_no_row_is_lost(server)

    with no_engine():
        take = server._take_batch
        server._take_batch = lambda ticket, put_in: take(ticket, put_in, patience_s=0.02)
        asyncio.run(check())


@given(st.integers(1, 5), st.lists(st.integers(0, 4), max_size=12))
@example(3, [0, 1, 0, 2, 1])  # 0 was asked again before the batch was whole, 1 when it was in: they waited 20 s for others
def test_a_request_that_is_asked_again_takes_the_place_of_the_first(n: int, asked: list[int]) -> None:
    """A worker died, and another asks again. The batch begins as soon as each of its requests is there, by index, each once and
    the newest; whoever was replaced is sent back; whoever comes when it has begun goes in at once."""
    order = [i % n for i in asked] + list(range(n))
    begins = next(k for k in range(len(order)) if set(order[: k + 1]) == set(range(n)))
    newest = {i: k for k, i in enumerate(order[: begins + 1])}
    late = range(begins + 1, len(order))
    with no_engine():
        server = VLLMServer("model")
    went_in, add = [], server.engine.add_request
    server.engine.add_request = lambda name, *more: went_in.append(int(name)) or add(name, *more)

    async def check() -> list[Any]:
        tasks = []
        for k, i in enumerate(order):
            request = {"prompt_ids": [1], "sampling_params": {"max_tokens": 9}, "ticket": ("batch", i, n)}
            tasks.append(asyncio.ensure_future(server.generate_for_partial(str(k), **request)))
            for _ in range(5):
                await asyncio.sleep(0)
        return await asyncio.wait_for(asyncio.gather(*tasks), 10)

    with no_engine():
        answers = asyncio.run(check())
    assert went_in == [newest[i] for i in range(n)] + list(late)
    assert answers == [([1], [-1.0], False) if k in went_in else ([], [], True) for k in range(len(order))]
    assert not server._batches


@pytest.mark.parametrize("why", ["cancel", "patience"])
def test_no_one_waits_for_a_batch_of_which_a_part_has_gone(why: str) -> None:
    """Two of three were sent back, or began when their patience ended: the third, which comes later, goes in at once."""
    with no_engine():
        server = VLLMServer("model")
    take = server._take_batch

    async def check() -> None:
        if why == "patience":
            server._take_batch = lambda ticket, put_in: take(ticket, put_in, patience_s=0.02)
        first = asyncio.ensure_future(ask_server(server, ("batch", 0, 3)))
        await asyncio.sleep(0.01)
        if why == "cancel":
            await server.cancel()
        second = asyncio.ensure_future(ask_server(server, ("batch", 1, 3)))
        answer = ([], [], True) if why == "cancel" else ([1], [-1.0], False)
        assert await asyncio.wait_for(asyncio.gather(first, second), 10) == [answer] * 2
        await server.resume()
        server._take_batch = take
        assert await asyncio.wait_for(ask_server(server, ("batch", 2, 3)), 10) == ([1], [-1.0], False)
        assert await asyncio.wait_for(ask_server(server, None), 10) == ([1], [-1.0], False)

    with no_engine():
        asyncio.run(check())


def test_whoever_gives_up_while_the_engine_is_set_going_leaves_nothing_in_it() -> None:
    """A request alone, or one that comes late, is in, and the engine is told to go on: then its caller is cancelled."""
    for ticket in (None, ("batch", 0, 1)):
        with no_engine():
            server = VLLMServer("model")
        going, ended = asyncio.Event(), []

        async def resume_generation(going: asyncio.Event = going) -> None:
            going.set()
            await asyncio.Event().wait()

        async def abort(request_id: str, internal: bool, ended: list[str] = ended) -> None:
            ended.append(request_id)

        async def check(server: VLLMServer = server, ticket: Any = ticket, going: asyncio.Event = going) -> None:
            await server.update_weights(b"weights", 1)  # which leaves the engine paused
            server.engine.resume_generation, server.engine.abort = resume_generation, abort
            if ticket is not None:
                server._begin_batch(ticket[0])
            task = asyncio.ensure_future(ask_server(server, ticket))
            await asyncio.wait_for(going.wait(), 10)
            task.cancel()
            assert (await asyncio.gather(task, return_exceptions=True))[0].__class__ is asyncio.CancelledError
            for answer in server.engine.inside:
                answer.cancel()

        with no_engine():
            asyncio.run(check())
        assert ended == [f"r{ticket}"]
        assert_no_row_is_lost(server)


def test_a_server_that_was_started_again_does_not_wait_for_the_finished_ones_of_a_batch() -> None:
    """Two of a batch of three come again, the third was through: they go in when the weights are there; and so does one that a
    worker's heir asks for after that."""
    with no_engine():
        server = VLLMServer("model", wait_for_weights=lambda: True)

    async def check() -> list[Any]:
        tasks = [asyncio.ensure_future(ask_server(server, ("batch", i, 3))) for i in range(2)]
        await asyncio.sleep(0.01)
        assert not server.engine.inside
        await server.update_weights(b"weights", 7)
        answers = await asyncio.wait_for(asyncio.gather(*tasks), 10)
        return [*answers, await asyncio.wait_for(ask_server(server, ("batch", 0, 3)), 10)]

    assert asyncio.run(check()) == [([1], [-1.0], False)] * 3


def test_an_actor_ends_with_its_engine_even_if_no_one_asks() -> None:
    """What the engine was asked when it died is never answered; the caller would hold the door for ever."""
    ends = []
    with no_engine(), pytest.MonkeyPatch.context() as patch:
        server = VLLMServer("model", exit_when_dead=True, cores=[0])
        patch.setattr(os, "_exit", ends.append)

        async def check() -> None:
            asked: Counter[str] = Counter()
            server.engine.collective_rpc = lambda method, args=(): asked.update([method]) or asyncio.sleep(0, ["facts"])
            assert await server.ready() == await server.ready() == "facts"
            watching = server._watching
            await asyncio.sleep(0.01)
            assert sum(asked.values()) == 4 + 2, "all that must be set up once, and two looks at it"
            assert not watching.done()
            server.engine.errored = True
            await asyncio.wait_for(watching, 30)
            server._watching, server.engine.errored = None, False
            await server.ready()
            await server.shutdown()  # which is no death
            await asyncio.wait([server._watching])

        asyncio.run(check())
    assert ends == [1]


def test_without_an_actor_to_end_a_dead_engine_answers_all_that_wait() -> None:
    """Requests that are in, that wait for others of their batch, and at the door behind a call; and that call."""
    with no_engine():
        server = VLLMServer("model")

        async def check() -> list[Any]:
            early = asyncio.ensure_future(ask_server(server, ("batch", 0, 2)))
            server.engine.serve = lambda answer: asyncio.sleep(0)
            request = asyncio.ensure_future(ask_server(server, None))
            await asyncio.sleep(0.01)
            never = server.engine.utility_results[7] = asyncio.get_running_loop().create_future()
            server.engine.collective_rpc = lambda method: never
            calls = [early, request, asyncio.ensure_future(server.ping()), asyncio.ensure_future(ask_server(server, None))]
            await asyncio.sleep(0.01)
            assert not any(call.done() for call in calls)
            server.engine.errored = True
            return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)

        assert [str(error) for error in asyncio.run(check())] == ["dead"] * 4
    assert_no_row_is_lost(server)


def test_a_request_that_vllm_refuses_fails_alone() -> None:
    """The others of its batch go in; the error must not carry the name of one of them."""
    from vllm.exceptions import VLLMValidationError

    with no_engine():
        server = VLLMServer("model")
        take = server.engine.add_request

        async def check() -> list[Any]:
            async def add_request(request_id: str, prompt: list[int], params: Any) -> Any:
                if len(server.engine.inside) == 1:
                    server.engine.add_request = take
                    raise VLLMValidationError("the prompt is too long")
                return await take(request_id, prompt, params)

            server.engine.add_request = add_request
            tasks = [ask_server(server, ("batch", i, 3)) for i in (2, 0, 1)]
            return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)

        last, first, middle = asyncio.run(check())
    assert first == last == ([1], [-1.0], False) and str(middle) == "the prompt is too long"
    assert_no_row_is_lost(server)


def test_a_batch_that_all_have_given_up_is_forgotten() -> None:
    """It would be kept until the next sync, and for ever where there is none."""
    with no_engine():
        server = VLLMServer("model")

        async def check() -> None:
            tasks = [asyncio.ensure_future(ask_server(server, ("batch", i, 3))) for i in range(2)]
            await asyncio.sleep(0.01)
            assert len(server._batches) == 1
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert not server._batches

        asyncio.run(check())
    assert_no_row_is_lost(server)


def test_a_caller_that_is_gone_ends_its_request_in_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """An actor's method goes on, whoever waits for it: without `ray.cancel` it would decode to the end for no one."""
    import ray

    ended: list[Any] = []
    monkeypatch.setattr(ray, "cancel", ended.append)

    async def check() -> None:
        never = asyncio.get_running_loop().create_future()
        method = SimpleNamespace(remote=lambda request_id, **request: never)
        manager = LLMServerManager([SimpleNamespace(generate_for_partial=method)])
        task = await ask(manager, "r")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == [never] and manager.in_flight == [0]

    asyncio.run(check())


def test_a_request_that_vllm_ends_by_an_error_is_no_response() -> None:
    """It would be trained as a finished one without tokens."""
    with no_engine():
        server = VLLMServer("model")
        server.engine.serve = lambda answer: asyncio.sleep(0, server.engine.end([answer], "error"))
        with pytest.raises(RuntimeError, match="vLLM ended it with finish_reason='error'"):
            asyncio.run(server.generate_for_partial("r", prompt_ids=[1], sampling_params={"max_tokens": 9}))
    assert_no_row_is_lost(server)


def test_what_an_engine_would_forget_at_a_cut_is_refused() -> None:
    with no_engine(), pytest.raises(ValueError, match="speculative_config: a drafted token"):
        VLLMServer("model", speculative_config={"method": "ngram"})
    with no_engine(), pytest.raises(ValueError, match="logits_processors: what they remember"):
        VLLMServer("model", logits_processors=["mine.Counts"])


def test_who_gives_up_while_vllm_takes_the_request_leaves_nothing_in_the_engine() -> None:
    """vLLM knows a request before it has sent it to its engine, and so before add_request returns."""
    with no_engine():
        server = VLLMServer("model")
    inside, returns, aborted = asyncio.Event(), asyncio.Event(), []

    async def add_request(request_id: str, *_: Any) -> Any:
        inside.set()
        await returns.wait()
        return SimpleNamespace(request_id=request_id)

    async def abort(request_id: str, internal: bool) -> None:
        aborted.append(request_id)

    server.engine.add_request, server.engine.abort = add_request, abort

    async def check() -> None:
        asked = asyncio.ensure_future(ask_server(server, None))
        await inside.wait()
        asked.cancel()
        await asyncio.sleep(0)
        returns.set()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(asked, 10)
        assert aborted == ["rNone"] and not server._door.locked()
        assert_no_row_is_lost(server)

    with no_engine():
        asyncio.run(check())


def test_text_has_the_spaces_that_the_engine_sees() -> None:
    """Some tokenizers of transformers tidy up what they decode; vLLM does not, and searches it for stop strings."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.WordPiece({"[UNK]": 0, "is": 1, "it": 2, "?": 3}, unk_token="[UNK]"))
    bare.decoder = decoders.WordPiece(cleanup=False)
    tidy = PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="[UNK]", clean_up_tokenization_spaces=True)
    loop = PartialSingleTurnAgentLoop(None, tidy, response_length=9, max_model_len=99, eos_token_ids=[])
    assert tidy.decode([1, 2, 3]) == "is it?" and loop.decode([1, 2, 3]) == bare.decode([1, 2, 3]) == "is it ?"


def test_weights_from_gpu_to_gpu_pass_the_same_door() -> None:
    """vLLM's weight transfer gets what the trainer's side said, while nothing is served; up to the call, without a GPU."""
    calls = []

    class Transferring(NoEngine):
        async def init_weight_transfer_engine(self, request: Any) -> None:
            calls.append(("init", request.init_info))

        async def start_weight_update(self) -> None:
            calls.append(("start", self.paused))

        async def update_weights(self, request: Any) -> None:
            calls.append(("update", request.update_info, self.paused))

        async def finish_weight_update(self) -> None:
            calls.append(("finish", self.paused))

    with no_engine():
        server = VLLMServer("model")
    server.engine = Transferring()

    async def check() -> None:
        await server.init_weight_transfer({"rank_offset": 1})
        await server.update_weights({"names": ["w"]}, 5)

    asyncio.run(check())
    assert calls == [("init", {"rank_offset": 1}), ("start", True), ("update", {"names": ["w"]}, True), ("finish", True)]
    assert server.param_version == 5 and not server._closed_by


def test_handles_of_gpu_memory_get_through_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where trainer and server share a GPU, what is sent are functions and types, which vLLM's encoder refuses unless it is
    told to pickle; up to the call, without a GPU."""
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    name = "VLLM_ALLOW_INSECURE_SERIALIZATION"
    handle = {"ipc_handles": [(torch.Tensor, torch.float32)]}
    for backend, there in (("nccl", None), ("ipc", "1")):
        monkeypatch.delenv(name, raising=False)
        with no_engine():
            VLLMServer("model", weight_transfer_config={"backend": backend})
            found = os.environ.get(name)
            assert found == there
        if there is None:
            with pytest.raises(TypeError, match="is not serializable"):
                MsgpackEncoder().encode(handle)
        else:
            monkeypatch.setenv(name, found)
            decoded = MsgpackDecoder(dict).decode(MsgpackEncoder().encode(handle))
            assert decoded["ipc_handles"][0] == [torch.Tensor, torch.float32]


MOVES = ["cancel", "resume", "sleep", "deep sleep", "wake_up", "update", "failing update", "request", "batch"]


@given(st.lists(st.lists(st.sampled_from(MOVES), max_size=6), max_size=4))
@example([["sleep"], ["wake_up"]])  # woke up between the two halves of falling asleep: an open door, and no one awake behind it
def test_the_door_and_the_engine_agree_whatever_order_callers_come_in(callers: list[list[str]]) -> None:
    """Whoever gets in is served, or comes back cut; an engine that sleeps has a closed door, and one that takes weights is
    paused and empty; a last round opens the door, and then all are served."""
    with no_engine():
        server = VLLMServer("model")
    numbers = itertools.count()

    async def request(n: int = 1) -> set[bool]:
        """Whether they came back cut; those that ask together go in together."""
        params, batch = {"max_tokens": 9}, next(numbers)
        tickets = [(batch, i, n) for i in range(n)] if n > 1 else [None]
        calls = [
            server.generate_for_partial(f"{batch}-{i}", prompt_ids=[1], sampling_params=params, ticket=ticket)
            for i, ticket in enumerate(tickets)
        ]
        answers = await asyncio.wait_for(asyncio.gather(*calls), 10)
        assert all(answer in (([], [], True), ([1], [-1.0], True), ([1], [-1.0], False)) for answer in answers)
        return {is_cancel for _, _, is_cancel in answers}

    async def call(moves: Sequence[str]) -> None:
        for move in moves:
            if move == "update":
                await server.update_weights(b"weights", server.param_version + 1)
            elif move == "failing update":
                version = server.param_version
                with pytest.raises(OSError):
                    await server.update_weights(b"broken", version + 1)
            elif move == "deep sleep":
                await server.sleep(level=2)
            elif move in ("request", "batch"):
                await request(3 if move == "batch" else 1)
            else:
                await getattr(server, move)()

    async def check() -> None:
        await asyncio.gather(*map(call, callers))
        if not server._closed_by:
            assert not server.engine.asleep and await request() == {False}
        assert "sleep" in server._closed_by or not server.engine.asleep
        await asyncio.gather(*map(call, [["wake_up"], ["resume"], ["update"]]))
        assert not server._closed_by and not server.engine.asleep
        assert await request(3) == {False} and await request() == {False}
        assert not server.engine.paused and not server.engine.inside and not server._in_flight
        assert_no_row_is_lost(server)

    with no_engine():
        asyncio.run(check())


# ---- Noise and sampling ----------------------------------------------------------------------------------------------


def splitmix64(x: int) -> int:
    """One step of splitmix64 (Steele, Lea and Flood, 2014), in plain Python."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def chi_square_is_small(observed: np.ndarray, expected: np.ndarray) -> bool:
    """Whether Pearson's statistic lies within 4 standard deviations of its mean, degrees of freedom."""
    freedom = len(observed) - 1
    return ((observed - expected) ** 2 / expected).sum() < freedom + 4 * math.sqrt(2 * freedom)


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=20), st.randoms())
def test_noise_is_a_function_of_seed_and_position_alone(pairs: list[tuple[int, int]], rng: Any) -> None:
    """Whatever the company and the order, and equal to the plain-Python truth; strictly between 0 and 1."""
    rng.shuffle(pairs)
    seeds, positions = np.array(pairs, np.uint64).T
    noise = uniform_noise(seeds, positions)
    assert noise.tolist() == [((splitmix64(splitmix64(s) ^ p) >> 32) + 0.5) / 2**32 for s, p in pairs]
    assert all(0 < u < 1 for u in noise)


def test_noise_of_two_positions_two_seeds_and_two_rollouts_is_uncorrelated() -> None:
    """|r| below 4 standard errors over 20,000 pairs, and the values fill 50 cells evenly."""
    n = 20_000
    one_seed = uniform_noise(np.full(n, 7), np.arange(n))
    one_position = uniform_noise(np.arange(n), np.full(n, 7))
    pairs = {
        "a position and the next": (one_seed[:-1], one_seed[1:]),
        "a position and one 64 later": (one_seed[:-64], one_seed[64:]),
        "a seed and the next, at one position": (one_position[:-1], one_position[1:]),
        "two seeds, over all positions": (one_seed, uniform_noise(np.full(n, 8), np.arange(n))),
        "seed and position exchanged": (one_seed, one_position),
        "seed plus one and position plus one": (one_seed[1:], uniform_noise(np.full(n, 8), np.arange(n))[:-1]),
    }
    for name, (x, y) in pairs.items():
        assert abs(np.corrcoef(x, y)[0, 1]) < 4 / math.sqrt(n), name
        joint = np.histogram2d(x, y, bins=5, range=[[0, 1], [0, 1]])[0].ravel()
        assert chi_square_is_small(joint, np.full(25, len(x) / 25)), name
    for u in (one_seed, one_position):
        assert chi_square_is_small(np.histogram(u, 50, (0, 1))[0], np.full(50, n / 50))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_the_sampler_is_a_sampler(temperature: float) -> None:
    """20,000 draws pass a chi-square test against the softmax, over positions as well as over seeds."""
    n, probs = 20_000, (torch.randn(40, generator=torch.Generator().manual_seed(1)) / temperature).softmax(0)
    for seeds, positions in ((np.full(n, 3), np.arange(n)), (np.arange(n), np.full(n, 100))):
        drawn = inverse_cdf(probs.expand(n, -1), torch.from_numpy(uniform_noise(seeds, positions)))
        assert chi_square_is_small(np.bincount(drawn, minlength=40), probs.double().numpy() * n)


WEIGHTS = st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-9, 0.1, 0.25, 1.0]), min_size=1, max_size=9).filter(any)
U = st.integers(0, 2**32 - 1).map(lambda i: (i + 0.5) / 2**32)  # what uniform_noise can give


@given(WEIGHTS, U)
@example([0.0, 1.0, 0.0], 0.5 / 2**32)
@example([0.0, 1.0, 0.0], 1 - 0.5 / 2**32)
@example([1.0, 1.0], 0.5)  # the sum reaches u exactly
def test_inverse_cdf_equals_a_plain_loop_and_never_picks_an_impossible_token(weights: list[float], u: float) -> None:
    """The first token at which the sum of probabilities, in float64, reaches u of the total."""
    probs = torch.tensor([weights, weights[::-1]], dtype=torch.float32)
    for row, picked in zip(probs, inverse_cdf(probs, torch.tensor([u, u], dtype=torch.float64)), strict=True):
        threshold, total = u * sum(row.tolist()), 0.0
        for token, p in enumerate(row.tolist()):
            total += p
            if total >= threshold:
                assert picked == token and p > 0
                break


def test_a_large_vocabulary_does_not_shift_the_boundaries() -> None:
    """50,000 probabilities are summed in float64, as a plain Python loop does: in float32 the sum drifts by whole tokens."""
    probs = torch.rand(50_000, generator=torch.Generator().manual_seed(2))
    cumulated = list(itertools.accumulate(probs.tolist()))
    u = uniform_noise(np.arange(300), np.zeros(300))
    picked = inverse_cdf(probs.expand(300, -1), torch.from_numpy(u))
    assert picked.tolist() == [bisect.bisect_left(cumulated, x * cumulated[-1]) for x in u]


# ---- The file --------------------------------------------------------------------------------------------------------


def test_the_examples_in_the_docstrings_run() -> None:
    """The docstrings of partial_rollout say what it does."""
    result = doctest.testmod(partial_rollout)
    assert result.attempted >= 2 and not result.failed


def test_the_file_works_as_a_part_of_a_package(tmp_path: Path) -> None:
    """Under another name, too: the engine's process, which is a new Python, finds what the server means."""
    package = tmp_path / "theirs" / "rl"
    package.mkdir(parents=True)
    shutil.copy(partial_rollout.__file__, package / "seam.py")
    with no_engine(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        from theirs.rl import seam

        server = seam.VLLMServer("model")
        program = (
            "from vllm.utils.import_utils import resolve_obj_by_qualname\n"
            f"print(resolve_obj_by_qualname({server.engine.args['worker_extension_cls']!r}))"
        )
        env = dict(os.environ)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == "<class 'theirs.rl.seam.WorkerExtension'>\n", done.stderr


def test_the_file_works_alone(tmp_path: Path) -> None:
    """Copied into an empty folder it can be imported without vLLM, Ray or torch, and its demo runs."""
    shutil.copy(partial_rollout.__file__, tmp_path)
    program = (
        "import sys; sys.modules.update(vllm=None, ray=None, torch=None, numpy=None, transformers=None)\n"
        "import runpy; runpy.run_path('partial_rollout.py', run_name='__main__')"
    )
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "cut at each place: the same" in done.stdout
    assert "weights changed at two cuts: spans ((0, 5), (1, 4), (2," in done.stdout


# ---- Part 2: the real engine -----------------------------------------------------------------------------------------

CORPUS = (
    "the quick brown fox jumps over the lazy dog. she sells sea shells by the sea shore. how much wood would a woodchuck chuck "
    "if a woodchuck could chuck wood? peter piper picked a peck of pickled peppers. 12 + 34 = 46, so the answer is 46.\n"
)
CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
MAX_MODEL_LEN = 256
HALVES = ["Ã", "©"]  # the two bytes of é, as byte-level BPE writes them


def tiny_tokenizer() -> Any:
    """Byte-level BPE over printable ASCII and é, which has two tokens, with a chat template and two ids that end a response."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]
    alphabet = [*map(chr, range(33, 127)), "Ġ", "Ċ", *HALVES]  # how byte-level BPE writes a space and a newline
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator([CORPUS] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<pad>", chat_template=CHAT)


def tiny_llama(vocab_size: int, tied: bool, seed: int = 0) -> Any:
    """Random weights, large enough for text that varies: with the usual 0.02 greedy decoding repeats one token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **{"vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": MAX_MODEL_LEN},
        **{"tie_word_embeddings": tied, "bos_token_id": None, "eos_token_id": [2, 3], "pad_token_id": 0},
    )
    model, noise = LlamaForCausalLM(config).eval(), torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        if weight.ndim == 2:
            std = 0.3 if len(weight) == vocab_size else 2 / math.sqrt(weight.shape[1])
            torch.nn.init.normal_(weight, std=std, generator=noise)
    return model


def weights_of(model: Any) -> bytes:
    """What update_weights takes: a safetensors file, a tied head left out."""
    from safetensors.torch import save

    left_out = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return save({name: weight.contiguous() for name, weight in model.state_dict().items() if name not in left_out})


class Engine:
    """A VLLMServer in this process, the transformers model that it serves, and short ways to ask both."""

    def __init__(self, wait: Callable[[Any], Any], folder: Path, tokenizer: Any, model: Any, **engine_args: Any) -> None:
        tokenizer.save_pretrained(folder)
        model.save_pretrained(folder)
        self.wait, self.tokenizer, self.model = wait, tokenizer, model

        engine_args = {
            **{"dtype": "float32", "enforce_eager": True, "max_model_len": MAX_MODEL_LEN, "max_num_seqs": 64, "block_size": 32},
            **{"kv_cache_memory_bytes": 256 << 20, **engine_args},
        }
        self.cores = os.sched_getaffinity(0)

        async def start() -> VLLMServer:
            server = VLLMServer(str(folder), seed=1, cores=[max(self.cores)], **engine_args)
            self.facts = await server.ready()
            return server

        self.server: VLLMServer = wait(start())

    async def close(self) -> None:
        await self.server.shutdown()
        del self.server.engine  # its __del__ needs an interpreter that is still whole

    def request(self, prompt_ids: list[int], **params: Any) -> Any:
        """A coroutine that gives (token_ids, logprobs, is_cancel)."""
        more = {key: params.pop(key) for key in ("ticket", "param_version") if key in params}
        return self.server.generate_for_partial(f"r{random.random()}", prompt_ids=prompt_ids, sampling_params=params, **more)

    def respond(self, params: dict[str, Any], question: str = "how much wood?", output: Any = None, **limits: Any) -> Any:
        """A coroutine that gives an AgentLoopOutput, resumed and resumed until it is complete."""
        limits = {"response_length": 200, "max_model_len": MAX_MODEL_LEN, "eos_token_ids": [2, 3]} | limits
        loop = PartialSingleTurnAgentLoop(LLMServerManager([self.server]), self.tokenizer, **limits)

        async def until_complete() -> AgentLoopOutput:
            result = output
            while result is None or result.is_cancel:
                version, raw_prompt = self.server.param_version, [{"role": "user", "content": question}]
                result = await loop.run(params, raw_prompt=raw_prompt, output=result, param_version=version)
                await asyncio.sleep(0.01)
            return result

        return until_complete()

    def all(self, requests: Sequence[Any]) -> list[Any]:
        async def gather() -> list[Any]:
            return await asyncio.gather(*requests)

        return self.wait(gather())

    def among_others(self, requests: Sequence[Any]) -> list[Any]:
        """The same, in the company of 32 requests that have nothing to do with them."""
        others = [self.request(prompt(3 + i), temperature=1.0, max_tokens=9 + i, ignore_eos=True) for i in range(32)]
        return self.all([*requests, *others])[: len(requests)]

    def update(self, model: Any, param_version: int) -> None:
        self.wait(self.server.update_weights(weights_of(model), param_version))
        self.model = model

    def logprobs(self, prompt_ids: list[int], ids: list[int], temperature: float = 1.0, bias: Any = None) -> torch.Tensor:
        """The truth, by transformers: log_softmax((logits + bias) / T) at each token; (len(ids), vocabulary)."""
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt_ids + ids])).logits[0, len(prompt_ids) - 1 : -1].double()
        for token, x in (bias or {}).items():
            logits[:, token] += x
        return (logits / temperature).log_softmax(-1)

    def is_greedy(self, prompt_ids: list[int], ids: list[int]) -> bool:
        """The truth, by transformers: whether each token is the likeliest after those before it."""
        return ids == self.logprobs(prompt_ids, ids).argmax(-1).tolist()


def prompt(n: int) -> list[int]:
    """n token ids, always the same for the same n."""
    rng = random.Random(n)
    return [rng.randrange(4, 150) for _ in range(n)]


def distance(xs: Sequence[float], ys: Sequence[float]) -> float:
    return max((abs(x - y) for x, y in zip(xs, ys, strict=True)), default=0.0)


@pytest.fixture(scope="module")
def wait() -> Iterator[Callable[[Any], Any]]:
    """One event loop for all engines of this module; what waits longer than five minutes, hangs."""
    environment = dict(os.environ)
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    with asyncio.Runner() as runner:
        yield lambda request: runner.run(asyncio.wait_for(request, timeout=300))
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="module")
def engine(wait: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Tied embeddings, prefix cache on: what a small model has, and what vLLM does by itself."""
    tokenizer = tiny_tokenizer()
    engine = Engine(wait, tmp_path_factory.mktemp("tied"), tokenizer, tiny_llama(len(tokenizer), tied=True))
    yield engine
    wait(engine.close())


@pytest.fixture(scope="module")
def other(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The same function from another engine: untied, the head a copy of the embedding; no prefix cache; other blocks."""
    model = tiny_llama(len(engine.tokenizer), tied=False)
    model.load_state_dict(tiny_llama(len(engine.tokenizer), tied=True).state_dict())
    folder = tmp_path_factory.mktemp("untied")
    other = Engine(engine.wait, folder, engine.tokenizer, model, enable_prefix_caching=False, block_size=64)
    yield other
    engine.wait(other.close())


@pytest.fixture
def first_weights(engine: Engine) -> Iterator[None]:
    """Whatever weights a test leaves, the next finds those of the beginning."""
    model = engine.model
    yield
    engine.update(model, engine.server.param_version + 1)


SPLITS = [1, 2, 7, 15, 16, 17, 30, 31, 32, 33, 47]  # with prompts of 5 to 33 tokens: before, at and after the ends of blocks
PROMPTS = [prompt(n) for n in (5, 16, 17, 31, 33)]


def whole_responses(engine: Engine, temperature: float) -> list[tuple[list[int], list[float], bool]]:
    params = {"temperature": temperature, "max_tokens": 48, "ignore_eos": True}
    wholes = engine.all([engine.request(ids, seed=i, **params) for i, ids in enumerate(PROMPTS)])
    assert all(len(ids) == len(logprobs) == 48 and not is_cancel for ids, logprobs, is_cancel in wholes)
    assert all(len(set(ids)) > 5 for ids, _, _ in wholes), "text that does not vary shows nothing"
    return wholes


def rest(engine: Engine, i: int, whole: Any, cut: int, end: int = 48, **params: Any) -> Any:
    """The request for tokens cut..end of response i."""
    return engine.request(PROMPTS[i] + whole[0][:cut], seed=i, max_tokens=end - cut, ignore_eos=True, **params)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resumed_request_gives_the_tokens_of_the_uninterrupted_one(engine: Engine, temperature: float) -> None:
    """prompt + tokens so far as the new prompt: the same ids, logprobs within 1e-4; alone, and among 32 others."""
    wholes = whole_responses(engine, temperature)
    alone = [(i, cut) for i in (0, 3) for cut in (1, 16, 33, 47)]
    rests = [engine.wait(rest(engine, i, wholes[i], cut, temperature=temperature)) for i, cut in alone]
    company = [(i, cut) for i in range(len(PROMPTS)) for cut in SPLITS]
    rests += engine.among_others([rest(engine, i, wholes[i], cut, temperature=temperature) for i, cut in company])
    for (i, cut), (ids, logprobs, _) in zip(alone + company, rests, strict=True):
        assert ids == wholes[i][0][cut:], f"prompt {i} cut at {cut}"
        assert distance(logprobs, wholes[i][1][cut:]) < 1e-4, f"prompt {i} cut at {cut}"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_response_may_be_resumed_on_another_server(engine: Engine, other: Engine, temperature: float) -> None:
    """Three cuts at random places, each piece from the other server: the same ids, logprobs within 1e-4."""
    wholes, rng = whole_responses(engine, temperature), random.Random(1)
    for i, (ids, logprobs, _) in enumerate(wholes):
        cuts = [0, *sorted(rng.sample(range(1, 48), 3)), 48]
        pieces = [
            rest((other, engine)[n % 2], i, (ids,), cut, end, temperature=temperature)
            for n, (cut, end) in enumerate(itertools.pairwise(cuts))
        ]
        pieces = engine.all(pieces)
        assert [token for piece, _, _ in pieces for token in piece] == ids
        assert distance([x for _, piece, _ in pieces for x in piece], logprobs) < 1e-4


@pytest.mark.parametrize(
    "temperature, filters",
    [
        *[(temperature, filters) for temperature in (0.7, 1.0, 1.3) for filters in ({}, {"top_k": 5}, {"top_p": 0.8})],
        *[(0.7, {"logit_bias": {50: 5.0}}), (0.0, {}), (0.0, {"logit_bias": {50: 5.0}})],
    ],
)
def test_logprobs_are_those_of_the_distribution_that_was_sampled(engine: Engine, temperature: float, filters: Any) -> None:
    """log_softmax(logits / T) of transformers within 1e-3, over the tokens that top-k and top-p leave; no noise is in them."""
    params = {"temperature": temperature, "max_tokens": 40, "ignore_eos": True, **filters}
    results = engine.all([engine.request(ids, seed=i, **params) for i, ids in enumerate(PROMPTS)])
    for prompt_ids, (ids, logprobs, _) in zip(PROMPTS, results, strict=True):
        truth = engine.logprobs(prompt_ids, ids, temperature or 1.0, filters.get("logit_bias"))  # greedy counts as T = 1
        ordered, order = truth.sort(descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()  # probability of the likelier ones
        kept = (before < filters.get("top_p", 1.0)) & (torch.arange(truth.shape[1]) < filters.get("top_k", truth.shape[1]))
        truth = truth.masked_fill(~torch.zeros_like(kept).scatter(1, order, kept), -math.inf).log_softmax(-1)
        assert distance(logprobs, truth[range(40), ids].tolist()) < 1e-3


def test_the_table_brings_the_logprobs_that_vllm_itself_would_send(engine: Engine) -> None:
    """The same requests with vLLM's own way in place of the table: greedy, filtered and sampled ones in one batch."""
    params = [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8}, {"temperature": 1.0}, {"temperature": 1.3, "top_k": 5}]

    def ask() -> list[Any]:
        requests = [engine.request(ids, seed=i, max_tokens=30 + i, **params[i % 4]) for i, ids in enumerate(PROMPTS)]
        return engine.all([*requests, engine.request(prompt(200), temperature=1.0, max_tokens=300, seed=5)])

    def swap(worker: Any) -> str:
        sampler = worker.model_runner.sampler
        if ours := sampler.__dict__.pop("gather_logprobs", None):
            worker.ours = ours
        else:
            sampler.gather_logprobs = worker.ours
        return sampler.gather_logprobs.__qualname__

    with_table = ask()
    assert engine.wait(engine.server.engine.collective_rpc(swap)) == ["Sampler.gather_logprobs"]
    without = ask()
    assert "carry_logprobs" in engine.wait(engine.server.engine.collective_rpc(swap))[0]
    for (ids, logprobs, _), (their_ids, their_logprobs, _) in zip(with_table, without, strict=True):
        assert ids == their_ids and len(ids) == len(logprobs) and distance(logprobs, their_logprobs) < 1e-4


def test_tokens_depend_on_the_seed_and_not_on_the_company(engine: Engine) -> None:
    """The same seed gives the same tokens alone and in a crowd; another seed, and no seed, other ones."""
    params = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True}
    alone = [engine.wait(engine.request(prompt(9), seed=seed, **params))[0] for seed in (1, 2)]
    crowd = engine.among_others([engine.request(prompt(9), seed=seed, **params) for seed in (1, 2, 3, 2**62)])
    assert [ids for ids, _, _ in crowd[:2]] == alone
    unseeded = engine.all([engine.request(prompt(9), **params) for _ in range(8)])
    assert len({tuple(ids) for ids, _, _ in crowd + unseeded}) == 12, "no two alike: a group must not be filled with twins"


def test_the_first_tokens_of_many_seeds_follow_the_softmax(engine: Engine) -> None:
    """Chi-square of 1,000 first tokens by the whole engine against transformers."""
    params = {"temperature": 1.0, "max_tokens": 1, "ignore_eos": True}
    results = engine.all([engine.request(prompt(9), seed=seed, **params) for seed in range(1000)])
    counts = np.bincount([ids[0] for ids, _, _ in results], minlength=len(engine.tokenizer))
    expected = engine.logprobs(prompt(9), [0])[0].exp().numpy() * 1000
    common = expected > 5  # the rest counts as one token, as is usual
    pool = [[*x[common], x[~common].sum()] for x in (counts, expected)]
    assert chi_square_is_small(*map(np.array, pool))


def test_a_stop_string_cuts_at_the_same_place_split_or_not(engine: Engine) -> None:
    """Every split, those inside the stop string too; and the cut is where the text first has it."""
    params = {"temperature": 1.0, "seed": 4, "ignore_eos": True}
    free = engine.wait(engine.respond(params, response_length=40))
    decode = functools.partial(engine.tokenizer.decode, skip_special_tokens=True)
    text = decode(free.response_ids)
    params["stop"] = ["never said", text[len(text) // 2 : len(text) // 2 + 6]]
    whole = engine.wait(engine.respond(params, response_length=40))
    n = len(whole.response_ids)
    assert 1 < n < 40 and whole.stop_reason == "stop" and whole.response_ids == free.response_ids[:n]
    assert n == first_stop(free.response_ids, params["stop"], 0, decode)
    check_all_splits(engine, params, whole, range(1, n), response_length=40)


def test_a_stop_string_of_the_prompt_is_not_found_by_a_cut_within_a_character(engine: Engine) -> None:
    """Every split of a response in which many characters are halves. vLLM takes the prompt for new text after some of them."""
    halves = engine.tokenizer.convert_tokens_to_ids([*HALVES, "a"])
    params = {"temperature": 1.0, "seed": 4, "ignore_eos": True, "allowed_token_ids": halves}
    whole = engine.wait(engine.respond(params, response_length=40))
    assert "é" in engine.tokenizer.decode(whole.response_ids) and whole.stop_reason == "length"
    check_all_splits(engine, {**params, "stop": ["wood", "user"]}, whole, range(1, 40), response_length=40)


def check_all_splits(engine: Engine, params: Any, whole: AgentLoopOutput, splits: Sequence[int], **limits: Any) -> None:
    def begun(cut: int) -> AgentLoopOutput:
        ids, logprobs = whole.response_ids[:cut], whole.response_logprobs[:cut]
        return AgentLoopOutput(whole.prompt_ids, ids, [1] * cut, logprobs, ((engine.server.param_version, cut),), "abort")

    resumed = engine.among_others([engine.respond(params, output=begun(cut), **limits) for cut in splits])
    for cut, result in zip(splits, resumed, strict=True):
        assert (result.response_ids, result.stop_reason) == (whole.response_ids, whole.stop_reason), f"cut at {cut}"
        assert distance(result.response_logprobs, whole.response_logprobs) < 1e-4, f"cut at {cut}"


@pytest.mark.parametrize("extra", [{}, {"repetition_penalty": 1.3}, {"top_k": 20, "min_p": 0.01}, {"logit_bias": {50: 3.0}}])
def test_min_tokens_count_from_the_start_of_the_response_split_or_not(engine: Engine, extra: Any) -> None:
    """A token that ends the response is held off for min_tokens, whichever request is at work; other parameters survive too."""
    params = {"temperature": 1.0, "seed": 5, "min_tokens": 20, **extra}
    free = engine.wait(engine.respond(params | {"ignore_eos": True, "min_tokens": 0}, response_length=40))
    params["stop_token_ids"] = [free.response_ids[5], free.response_ids[30]]
    whole = engine.wait(engine.respond(params, response_length=40))
    ends = {2, 3, *params["stop_token_ids"]}
    assert len(whole.response_ids) >= 20 and not ends & set(whole.response_ids[:20]), "held off"
    check_all_splits(engine, params, whole, range(1, len(whole.response_ids), 2), response_length=40)


def test_a_penalty_on_what_was_said_forgets_it_at_the_cut(engine: Engine) -> None:
    """Why `check_resumable` refuses it: sent to the engine all the same, a resumed request gives another response."""
    for penalty in ("presence_penalty", "frequency_penalty"):
        params = {"temperature": 0.0, "ignore_eos": True, penalty: 1.5}
        whole, _, _ = engine.wait(engine.request(prompt(9), max_tokens=48, **params))
        cuts = range(8, 48, 8)
        rests = engine.all([engine.request(prompt(9) + whole[:cut], max_tokens=48 - cut, **params) for cut in cuts])
        assert any(ids != whole[cut:] for cut, (ids, _, _) in zip(cuts, rests, strict=True)), penalty


async def cut_again_and_again(server: VLLMServer, done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(0.1)
        await server.cancel()
        await server.resume()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cancels_in_flight_lose_nothing(engine: Engine, temperature: float) -> None:
    """8 responses, cancelled and resumed until they are complete, equal the uninterrupted ones, EOS and all."""
    params = [{"temperature": temperature, "seed": seed, "ignore_eos": seed % 2 == 0} for seed in range(8)]
    questions = [f"how much is {seed} + {seed}?" for seed in range(8)]

    def responses() -> list[Any]:
        return [engine.respond(p, q, response_length=120) for p, q in zip(params, questions, strict=True)]

    wholes = engine.all(responses())

    async def disturbed() -> list[AgentLoopOutput]:
        disturbed = asyncio.gather(*responses())
        await cut_again_and_again(engine.server, disturbed.done)
        return await disturbed

    cut = engine.wait(disturbed())
    assert sum(output.metrics["num_calls"] for output in cut) > 8, "nothing was cut"
    assert cut == [
        AgentLoopOutput(w.prompt_ids, w.response_ids, w.response_mask, c.response_logprobs, w.spans, w.stop_reason)
        for w, c in zip(wholes, cut, strict=True)
    ]
    assert max(distance(c.response_logprobs, w.response_logprobs) for c, w in zip(cut, wholes, strict=True)) < 1e-4


def test_a_cancelled_request_returns_what_it_has_and_the_closed_door_returns_nothing(engine: Engine) -> None:
    """Tokens so far, True; then ([], [], True) at once for whoever arrives, with a ticket too; nothing is left behind."""
    params = {"temperature": 1.0, "seed": 6, "ignore_eos": True}

    async def check() -> None:
        whole = await engine.request(prompt(9), max_tokens=240, **params)
        cut, patience = ([], [], True), 0.05
        while not cut[0]:  # a cancel may come before the first token
            task = asyncio.ensure_future(engine.request(prompt(9), max_tokens=240, **params))
            await asyncio.sleep(patience)
            await engine.server.cancel()
            cut, patience = await task, patience * 2
            for more in ({}, {"ticket": ("a batch", 0, 2)}, {"param_version": engine.server.param_version}):
                refused = engine.request(prompt(9), max_tokens=9, **params, **more)
                assert await asyncio.wait_for(refused, 10) == ([], [], True)
            assert not engine.server.engine.output_processor.has_unfinished_requests() and not engine.server._batches
            await engine.server.resume()
        ids, logprobs, is_cancel = cut
        assert is_cancel and 0 < len(ids) < 240
        assert ids == whole[0][: len(ids)] and distance(logprobs, whole[1][: len(ids)]) < 1e-4

    engine.wait(check())


def test_a_request_for_other_weights_is_sent_back(engine: Engine) -> None:
    """Older or newer than the server's: ([], [], True); its own version and None are served."""
    version = engine.server.param_version
    answers = engine.all(
        [engine.request(prompt(9), max_tokens=2, param_version=v) for v in (version - 1, version + 1, version, None)]
    )
    assert answers[:2] == [([], [], True)] * 2 and [len(ids) for ids, _, _ in answers[2:]] == [2, 2]


def test_a_batch_with_tickets_is_repeatable_to_the_bit(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 requests, sent in any order, give the very same logprobs each time: they enter together, by index."""
    add, entered = engine.server.engine.add_request, []

    async def add_request(request_id: str, prompt: Any, params: Any) -> Any:
        entered.append(len(prompt["prompt_token_ids"]))
        assert await engine.server.engine.is_paused(), "the engine took a step before all were in"
        return await add(request_id, prompt, params)

    monkeypatch.setattr(engine.server.engine, "add_request", add_request)

    def batch(name: str) -> list[Any]:
        order = random.Random(name).sample(range(24), 24)
        params = {"temperature": 1.0, "ignore_eos": True}
        requests = [engine.request(prompt(5 + i), seed=i, max_tokens=10 + i, ticket=(name, i, 24), **params) for i in order]
        engine.wait(engine.server.clear_kv_cache())
        return [result for _, result in sorted(zip(order, engine.all(requests), strict=True), key=lambda pair: pair[0])]

    first = batch("monday")
    assert batch("tuesday") == first and not engine.server._batches
    assert entered == [5 + i for i in range(24)] * 2


def test_a_batch_that_stays_incomplete_starts_all_the_same(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some patience those that are there go in; a member that gave up in the meantime is not among them."""
    take = engine.server._take_batch
    monkeypatch.setattr(engine.server, "_take_batch", lambda ticket, put_in: take(ticket, put_in, patience_s=0.5))

    async def check() -> None:
        there, gone = (
            asyncio.ensure_future(engine.request(prompt(9), max_tokens=n, ignore_eos=True, ticket=("b", n, 3)))
            for n in (3, 240)
        )
        await asyncio.sleep(0.1)
        gone.cancel()
        assert len((await there)[0]) == 3 and gone.cancelled()
        assert not engine.server.engine.output_processor.has_unfinished_requests() and not engine.server._batches

    engine.wait(check())


def test_any_int_is_a_seed(engine: Engine) -> None:
    """Below 0 and above 2^64, too, which once ended the engine; -1 is none, as in vLLM."""
    big, small, negative, *none = (
        engine.wait(engine.request(prompt(9), max_tokens=24, ignore_eos=True, temperature=1.0, seed=seed))[0]
        for seed in (2**64 + 5, 5, -7, -1, -1)
    )
    assert big == small != negative and none[0] != none[1]


def test_a_caller_that_gives_up_frees_its_request(engine: Engine) -> None:
    """A cancelled task does not leave a request behind that no one waits for."""

    async def check() -> None:
        task = asyncio.ensure_future(engine.request(prompt(9), max_tokens=240, ignore_eos=True))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not engine.server.engine.output_processor.has_unfinished_requests()
        await engine.server.clear_kv_cache()

    engine.wait(check())


def test_the_cache_is_cleared_when_idle_and_never_silently_not(engine: Engine) -> None:
    """While a request holds blocks vLLM refuses, and so do we: a cache believed to be clear would be a stale one."""

    async def check() -> None:
        await engine.server.clear_kv_cache()
        task = asyncio.ensure_future(engine.request(prompt(40), max_tokens=100, ignore_eos=True))
        await asyncio.sleep(0.05)
        await engine.server.engine.pause_generation(mode="keep", clear_cache=False)  # the request stays, at any speed
        with pytest.raises(RuntimeError, match="refused to clear its prefix cache"):
            await engine.server.clear_kv_cache()
        await engine.server.engine.resume_generation()
        assert len((await task)[0]) == 100

    engine.wait(check())


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_new_weights_are_really_the_new_ones(kind: str, request: pytest.FixtureRequest) -> None:
    """Greedy decoding equals transformers with the new weights, the head included; a second update as well as a first."""
    served = request.getfixturevalue({"tied": "engine", "untied": "other"}[kind])
    first = served.model
    for model in (first, *(tiny_llama(len(served.tokenizer), tied=kind == "tied", seed=seed) for seed in (1, 2)), first):
        version = served.server.param_version + 1
        served.update(model, version)
        file = served.server._weights_file
        os.pwrite(file, bytes(os.fstat(file).st_size), 0)  # what was loaded is the engine's own
        ids, logprobs, _ = served.wait(served.request(prompt(9), temperature=0, max_tokens=30, ignore_eos=True))
        assert served.is_greedy(prompt(9), ids) and served.server.param_version == version
        assert distance(logprobs, served.logprobs(prompt(9), ids)[range(30), ids].tolist()) < 1e-3


def test_a_request_resumed_after_an_update_has_nothing_of_the_old_policy_in_it(engine: Engine, first_weights: None) -> None:
    """From its first token on, ids and logprobs are those of transformers with the new weights on the whole prefix."""
    old_ids, _, _ = engine.wait(engine.request(prompt(40), temperature=0, max_tokens=50, ignore_eos=True))
    engine.update(tiny_llama(len(engine.tokenizer), tied=True, seed=3), engine.server.param_version + 1)
    prefix = prompt(40) + old_ids
    ids, logprobs, _ = engine.wait(engine.request(prefix, temperature=0, max_tokens=20, ignore_eos=True))
    assert engine.is_greedy(prefix, ids)
    assert distance(logprobs, engine.logprobs(prefix, ids)[range(20), ids].tolist()) < 1e-3


def test_an_update_in_flight_cancels_and_the_spans_say_who_sampled_what(engine: Engine, first_weights: None) -> None:
    """Each token of a response with several versions is likely under the policy of its span, to 1e-3."""
    models = [engine.model, *(tiny_llama(len(engine.tokenizer), tied=True, seed=seed) for seed in (4, 5))]
    start = engine.server.param_version

    async def check() -> list[AgentLoopOutput]:
        params = [{"temperature": 1.0, "seed": seed, "ignore_eos": True} for seed in range(4)]
        responses = asyncio.gather(*[engine.respond(p) for p in params])
        for i in (1, 2):
            await asyncio.sleep(0.1)
            await engine.server.update_weights(weights_of(models[i]), start + i)
        return await responses

    outputs = engine.wait(check())
    assert any(len(output.spans) > 1 for output in outputs)
    for output in outputs:
        done = 0
        for version, n in output.spans:
            engine.model = models[version - start]
            ids = output.response_ids[done : done + n]
            truth = engine.logprobs(output.prompt_ids + output.response_ids[:done], ids)[range(n), ids].tolist()
            assert distance(output.response_logprobs[done : done + n], truth) < 1e-3
            done += n
    engine.model = models[0]


def test_an_update_that_changes_nothing_changes_no_token(engine: Engine) -> None:
    """The packing of the weights is undone and redone; ids are the same and logprobs within 1e-4."""
    before = whole_responses(engine, 1.0)
    engine.update(engine.model, engine.server.param_version + 1)
    for old, new in zip(before, whole_responses(engine, 1.0), strict=True):
        assert old[0] == new[0] and distance(old[1], new[1]) < 1e-4


def test_a_failed_update_closes_the_door_until_one_succeeds(engine: Engine) -> None:
    """Weights that cannot be read are an error; until there are good ones, requests are sent back and do not hang."""
    version = engine.server.param_version
    with pytest.raises(Exception, match=r"(?i)safetensor|header"):
        engine.wait(engine.server.update_weights(b"not a safetensors file", version + 1))
    assert engine.server.param_version == version
    assert engine.wait(engine.request(prompt(9), max_tokens=2)) == ([], [], True)
    engine.wait(engine.server.resume())
    assert engine.wait(engine.request(prompt(9), max_tokens=2)) == ([], [], True)
    engine.update(engine.model, version + 1)
    assert len(engine.wait(engine.request(prompt(9), max_tokens=2))[0]) == 2


@pytest.mark.parametrize("fault", ["a shape", "a name", "a weight too few", "a part too few"])
def test_weights_that_the_model_refuses_halfway_leave_no_trace_in_the_next_ones(
    engine: Engine, first_weights: None, fault: str
) -> None:
    """Some of them are read before the fault shows. vLLM would count these for the next file, of which it then takes too few;
    and a file that lacks some would pass, with a line in a log."""
    from safetensors.torch import load, save

    model, version = tiny_llama(len(engine.tokenizer), tied=True, seed=5), engine.server.param_version
    weights = load(weights_of(model))
    v = "model.layers.1.self_attn.v_proj.weight"
    if fault == "a shape":
        weights[v] = weights[v][:-1].contiguous()
    elif fault == "a name":
        weights["model.layers.1.self_attn.k_proj.weigh"] = weights[v].clone()
    elif fault == "a weight too few":
        del weights["model.layers.1.mlp.down_proj.weight"]
    else:
        del weights["model.layers.1.self_attn.q_proj.weight"]
    said = {
        "a shape": "(?i)size|shape",
        "a name": "collective_rpc method failed",
        "a weight too few": r"such as .*down_proj\.weight",
    }
    with pytest.raises(Exception, match=said.get(fault, r"1 weights are missing, such as .*q_proj\.weight")):
        engine.wait(engine.server.update_weights(save(weights), version + 1))
    assert engine.wait(engine.request(prompt(9), max_tokens=2)) == ([], [], True)
    engine.update(model, version + 1)
    ids, logprobs, _ = engine.wait(engine.request(prompt(9), temperature=0.0, max_tokens=40, ignore_eos=True))
    assert engine.is_greedy(prompt(9), ids)
    assert distance(logprobs, engine.logprobs(prompt(9), ids)[range(40), ids].tolist()) < 1e-3


def test_a_cache_that_is_too_small_and_prompts_in_pieces_change_nothing(engine: Engine, tmp_path: Path) -> None:
    """An engine whose cache holds four of eight responses, so that vLLM throws some out and begins them again, and that takes
    at most 64 tokens a step: tokens and log-probabilities are those of an engine that has room for all."""

    def count(worker: Any) -> None:
        runner, counts = worker.model_runner, {"thrown out": 0, "in pieces": 0}
        execute = runner.execute_model

        def execute_model(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            counts["thrown out"] += len(scheduled.preempted_req_ids or ())
            new = scheduled.scheduled_new_reqs
            counts["in pieces"] += sum(scheduled.num_scheduled_tokens[r.req_id] < len(r.prompt_token_ids) for r in new)
            return execute(scheduled, *args, **kwargs)

        runner.execute_model, worker.counts = execute_model, counts

    room = {"kv_cache_memory_bytes": 1 << 20, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
    small = Engine(engine.wait, tmp_path, engine.tokenizer, engine.model, **room)
    engine.wait(small.server.engine.collective_rpc(count))
    params = [{"temperature": 1.0 if i % 2 else 0.0, "seed": i, "max_tokens": 140, "ignore_eos": True} for i in range(8)]
    (found, truth) = (e.all([e.request(prompt(100 + i), **p) for i, p in enumerate(params)]) for e in (small, engine))
    (counts,) = engine.wait(small.server.engine.collective_rpc(lambda worker: worker.counts))
    engine.wait(small.close())
    assert counts["thrown out"] >= 3 and counts["in pieces"] >= 3
    for (ids, logprobs, is_cancel), (their_ids, their_logprobs, _) in zip(found, truth, strict=True):
        assert ids == their_ids and len(ids) == 140 and not is_cancel
        assert distance(logprobs, their_logprobs) < 1e-4


def test_cancel_resume_sleep_and_update_may_come_in_any_order_from_anyone(engine: Engine) -> None:
    """Four callers at once, each with its own order: the server stays usable and 12 responses come out uninterrupted."""
    params = [{"temperature": 1.0, "seed": seed} for seed in range(12)]
    wholes = engine.all([engine.respond(p) for p in params])
    server, weights = engine.server, weights_of(engine.model)
    moves = {
        "cancel": server.cancel,
        "resume": server.resume,
        "sleep": server.sleep,
        "wake_up": server.wake_up,
        "update": lambda: server.update_weights(weights, server.param_version + 1),
    }

    async def disturb(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(8):
            await asyncio.sleep(rng.choice([0, 0.01, 0.1]))
            await moves[rng.choice(list(moves))]()

    async def check() -> list[AgentLoopOutput]:
        responses = asyncio.gather(*[engine.respond(p) for p in params])
        await asyncio.gather(*[disturb(seed) for seed in range(4)])
        await asyncio.gather(server.wake_up(), server.resume(), server.resume())  # all reasons, in any order
        return await responses

    outputs = engine.wait(check())
    assert [(o.response_ids, o.stop_reason) for o in outputs] == [(w.response_ids, w.stop_reason) for w in wholes]
    assert max(distance(o.response_logprobs, w.response_logprobs) for o, w in zip(outputs, wholes, strict=True)) < 1e-4


def test_a_server_that_is_both_cancelled_and_asleep_opens_when_both_are_over(engine: Engine) -> None:
    """cancel and sleep are two reasons to be closed: repeating one does not count twice, ending one does not end the other."""
    server = engine.server

    async def served() -> bool:
        return bool((await engine.request(prompt(9), max_tokens=1, ignore_eos=True))[0])

    async def check() -> list[bool]:
        moves = [server.cancel, server.cancel, server.sleep, server.resume, server.cancel, server.wake_up, server.resume]
        return [await served() for move in [*moves, server.wake_up] if await move() is None]

    assert engine.wait(check()) == [False] * 6 + [True, True]


def test_generate_is_for_requests_that_run_to_their_end(engine: Engine) -> None:
    """(token_ids, logprobs); a cancel is an error."""
    params = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}

    async def check() -> None:
        ids, logprobs = await engine.server.generate("g", prompt_ids=prompt(9), sampling_params=params)
        assert len(ids) == len(logprobs) == 4 and engine.is_greedy(prompt(9), ids)
        await engine.server.cancel()
        with pytest.raises(RuntimeError, match="request g was cancelled after 0 tokens"):
            await engine.server.generate("g", prompt_ids=prompt(9), sampling_params=params)
        await engine.server.resume()

    engine.wait(check())


def test_the_server_says_where_it_runs(engine: Engine) -> None:
    """One thread on the core that it was given, in a process of its own; this one keeps all of its cores."""
    assert engine.facts["cores"] == [max(engine.cores)] and engine.facts["threads"] == 1
    assert os.sched_getaffinity(0) == engine.cores
    assert engine.facts["pid"] != os.getpid()


def test_whoever_waits_for_an_engine_hears_of_its_end(tmp_path: Path) -> None:
    """Real vLLM, in a process without Ray. Shut down in the middle of a request it gives that back, with the tokens it has.
    Killed in the middle of one, while weights are to be loaded: vLLM answers neither, and the latter would hold the door."""
    text = """
import asyncio, os, pathlib, signal
from partial_rollout import VLLMServer

def ask(server):
    params = {"max_tokens": 400, "ignore_eos": True}
    return asyncio.ensure_future(server.generate_for_partial("r", prompt_ids=[5, 6], sampling_params=params))

async def under_way(server):
    request = ask(server)
    while not server._in_flight:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    return request

async def main():
    options = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "kv_cache_memory_bytes": 64 << 20}
    servers = [VLLMServer("pocket", **options) for _ in range(2)]
    engines = [(await server.ready())["pid"] for server in servers]
    request = await under_way(servers[0])
    await servers[0].shutdown()
    await servers[0].shutdown()
    tokens, logprobs, is_cancel = await request
    print(0 < len(tokens) == len(logprobs) < 400, is_cancel, flush=True)

    request = await under_way(servers[1])
    os.kill(engines[1], signal.SIGSTOP)
    weights = pathlib.Path("pocket/model.safetensors").read_bytes()
    update = asyncio.ensure_future(servers[1].update_weights(weights, 1))
    late = ask(servers[1])
    await asyncio.sleep(0.2)
    os.kill(engines[1], signal.SIGKILL)
    for waits in (request, update, late, ask(servers[1]), servers[1].clear_kv_cache(), ask(servers[0])):
        try:
            await asyncio.wait_for(waits, 60)
            print("answered")
        except Exception as error:
            print(type(error).__name__, flush=True)
    await servers[1].shutdown()

if __name__ == "__main__":
    asyncio.run(main())
"""
    (tmp_path / "serve.py").write_text(text)
    root = Path(partial_rollout.__file__).parent
    environment = os.environ | {"PYTHONPATH": str(root), "VLLM_LOGGING_LEVEL": "CRITICAL", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "serve.py")]
    done = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True, timeout=240)
    assert done.stdout.splitlines() == ["True True", *["EngineDeadError"] * 6], done.stdout + done.stderr
    assert "FileNotFoundError" not in done.stderr, "what the first engine had taken away it looked for when it left"


def test_a_killed_server_leaves_no_engine_behind_where_several_processes_share_the_weights(tmp_path: Path) -> None:
    """The processes that compute are children of the engine's, which is a child of the server's: none knows of the server."""
    text = """
import asyncio, sys
from partial_rollout import VLLMServer

async def main():
    server = VLLMServer("pocket", tensor_parallel_size=2, dtype="float32", enforce_eager=True, max_model_len=64, block_size=32,
                        kv_cache_memory_bytes=16 << 20)
    await server.ready()
    print("up", flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""
    import psutil

    (tmp_path / "serve.py").write_text(text)
    root = Path(partial_rollout.__file__).parent
    environment = os.environ | {"PYTHONPATH": str(root), "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    command, pipes = [sys.executable, str(tmp_path / "serve.py")], {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(command, cwd=root, env=environment, text=True, **pipes)
    assert server.stdout.readline() == "up\n"
    left = psutil.Process(server.pid).children(recursive=True)
    assert sum("resource_tracker" not in " ".join(process.cmdline()) for process in left) == 3, "not every one has a title"
    server.kill()
    server.communicate()
    assert not psutil.wait_procs(left, timeout=60)[1]


def test_the_private_parts_of_vllm_are_where_they_were(engine: Engine) -> None:
    """All that WorkerExtension reaches into, by name: if vLLM moves one, this says which."""

    def look(worker: Any) -> list[str]:
        from vllm.model_executor.layers import utils
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        runner, missing = worker.model_runner, []
        (name,) = list(runner.requests) or [None]
        paths = {
            "the sampler, with our forward": lambda: "install_sampler" in runner.sampler.topk_topp_sampler.forward.__qualname__,
            "the sampler, with our table": lambda: "carry_logprobs" in runner.sampler.gather_logprobs.__qualname__,
            "runner.requests[...].sampling_params": lambda: "noise_seed" in runner.requests[name].sampling_params.extra_args,
            "runner.input_batch.req_ids": lambda: runner.input_batch.req_ids == [name],
            "runner.input_batch.num_tokens_no_spec": lambda: 9 <= runner.input_batch.num_tokens_no_spec[0] <= 249,
            "get_layerwise_info": lambda: (
                {"load_numel", "loaded_weights"} <= vars(get_layerwise_info(runner.get_model())).keys()
            ),
            "lm_head.cpu_linear": lambda: callable(runner.get_model().lm_head.cpu_linear),
            "dispatch_cpu_unquantized_gemm": lambda: callable(utils.dispatch_cpu_unquantized_gemm),
        }
        for path, is_there in paths.items():
            try:
                if not is_there():
                    missing.append(f"{path}: something else is there")
            except Exception as error:
                missing.append(f"{path}: {type(error).__name__}: {error}")
        return missing

    async def check() -> list[str]:
        task = asyncio.ensure_future(engine.request(prompt(9), max_tokens=240, ignore_eos=True))
        await asyncio.sleep(0.05)
        await engine.server.engine.pause_generation(mode="keep", clear_cache=False)
        (missing,) = await engine.server.engine.collective_rpc(look)
        await engine.server.engine.resume_generation()
        await task
        return missing

    assert engine.wait(check()) == []
