"""Does the law of the seam hold on the real engine, at every place? Cuts each response after every token, and resumes it.

    python tests/bench/seam.py                      # the pocket policy in float32: about 15 minutes on two cores
    python tests/bench/seam.py --model FOLDER --dtype bfloat16 --prompts 2 --tokens 16        # how far it holds in bfloat16

Two vLLM servers, one with a prefix cache and one without. Must reach, in float32: the same token ids at every split, greedy
and sampled, alone and among 32 strangers; log-probabilities within 1e-4 of the uninterrupted response's, and within 1e-3 of
transformers' log_softmax(logits / T). Exit status 1 where that fails. In bfloat16 nothing is required: it is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from partial_rollout import AgentLoopOutput, LLMServerManager, PartialSingleTurnAgentLoop, VLLMServer  # noqa: E402
from run_gsm8k import POCKET, PocketProblems, quiet_libraries  # noqa: E402


class Bench:
    """Two servers, the responses that they give when no one interrupts, and ways to interrupt."""

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoTokenizer

        self.args, self.tokenizer = args, AutoTokenizer.from_pretrained(args.model)
        self.questions = [[{"role": "user", "content": p.question}] for p in PocketProblems().test(args.prompts)]
        self.rng = random.Random(0)
        self.failed = False

    async def start(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.servers: dict[str, VLLMServer] = {}
        for i, cache in enumerate(("on", "off")):
            self.servers[cache] = VLLMServer(
                self.args.model,
                rank=i,
                cores=[cores[i % len(cores)]],
                dtype=self.args.dtype,
                enable_prefix_caching=cache == "on",
                enforce_eager=True,
                max_model_len=512,
                max_num_seqs=64,
                block_size=32,
                kv_cache_memory_bytes=512 << 20,
            )
        for server in self.servers.values():
            await server.ready()

    async def respond(self, i: int, temperature: float, servers: Sequence[VLLMServer], cuts: Sequence[int] = ()) -> Any:
        """Response i, cut after so many tokens, each piece from the next of `servers`.

        A request that is cancelled after k tokens has made what one with a budget of k makes. So each piece but the last is
        asked for with max_tokens up to its cut, and put down as cancelled there.
        """
        tokens, output = self.args.tokens, None
        for n, end in enumerate([*cuts, tokens]):
            loop = PartialSingleTurnAgentLoop(
                LLMServerManager([servers[n % len(servers)]]), self.tokenizer, response_length=end, max_model_len=512
            )
            params = {"temperature": temperature, "seed": i, "ignore_eos": True}
            output = await loop.run(params, raw_prompt=self.questions[i], output=output)
            if end < tokens:
                output = as_cancelled(output)
        return output

    async def resume(self, i: int, temperature: float, server: VLLMServer, whole: AgentLoopOutput, cut: int) -> Any:
        """Response i from its first `cut` tokens on."""
        loop = PartialSingleTurnAgentLoop(
            LLMServerManager([server]), self.tokenizer, response_length=self.args.tokens, max_model_len=512
        )
        params = {"temperature": temperature, "seed": i, "ignore_eos": True}
        return await loop.run(params, raw_prompt=self.questions[i], output=as_cancelled(whole, cut))

    async def strangers(self, server: VLLMServer, n: int = 32) -> None:
        """n requests that have nothing to do with the rest, as long as a whole response."""
        params = {"temperature": 1.0, "max_tokens": self.args.tokens, "ignore_eos": True}
        ids = [self.rng.choices(range(10, 300), k=self.rng.randrange(5, 60)) for _ in range(n)]
        requests = [
            server.generate_for_partial(f"stranger-{self.rng.random()}", prompt_ids=prompt, sampling_params=params)
            for prompt in ids
        ]
        await asyncio.gather(*requests)

    async def every_split(self, temperature: float, cache: str, company: str) -> None:
        """One row: each response at each of its splits, on one server, alone or in company."""
        start, server, tokens = time.perf_counter(), self.servers[cache], self.args.tokens
        wholes = [await self.respond(i, temperature, [server]) for i in range(self.args.prompts)]
        splits = list(itertools.product(range(self.args.prompts), range(1, tokens)))
        width = 1 if company == "alone" else 16
        results: list[AgentLoopOutput] = []
        for group in batched(splits, width):
            others = [] if company == "alone" else [self.strangers(server)]
            resumed = [self.resume(i, temperature, server, wholes[i], cut) for i, cut in group]
            results += (await asyncio.gather(*resumed, *others))[: len(group)]
        self.report(f"every split, {company}", temperature, cache, [wholes[i] for i, _ in splits], results, start)

    async def three_cuts(self, temperature: float, rounds: int = 4) -> None:
        """One row: three cuts at random places, each piece from the other server."""
        start, servers = time.perf_counter(), [*self.servers.values()]
        numbers = [i for i in range(self.args.prompts) for _ in range(rounds)]
        wholes = [await self.respond(i, temperature, servers[:1]) for i in range(self.args.prompts)]
        cuts = [sorted(self.rng.sample(range(1, self.args.tokens), 3)) for _ in numbers]
        in_turn = [servers[k % 2 :] + servers[: k % 2] for k in range(len(numbers))]
        pieces = zip(numbers, in_turn, cuts, strict=True)
        results = await asyncio.gather(*[self.respond(i, temperature, turn, places) for i, turn, places in pieces])
        self.report("three cuts, two servers", temperature, "on, off", [wholes[i] for i in numbers], results, start)

    def report(self, what: str, temperature: float, cache: str, wholes: list, results: list, start: float) -> None:
        """Prints the row of one experiment."""
        same = sum(result.response_ids == whole.response_ids for result, whole in zip(results, wholes, strict=True))
        # Where an id differs, what comes after it is another text, and no log-probability can be compared.
        apart = max(
            (
                abs(a - b)
                for result, whole in zip(results, wholes, strict=True)
                if result.response_ids == whole.response_ids
                for a, b in zip(result.response_logprobs, whole.response_logprobs, strict=True)
            ),
            default=float("nan"),
        )
        self.failed |= same < len(results) or not apart < 1e-4
        seconds = time.perf_counter() - start
        print(f"| {what} | {temperature} | {cache} | {same} of {len(results)} | {apart:.1e} | {seconds:.0f} |", flush=True)

    async def truth(self, temperatures: Sequence[float]) -> None:
        """Are the log-probabilities those of transformers, temperature in them?"""
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.args.model, dtype=getattr(torch, self.args.dtype)).eval()
        for temperature in temperatures:
            apart = 0.0
            for i in range(self.args.prompts):
                output = await self.respond(i, temperature, [self.servers["on"]])
                with torch.no_grad():
                    logits = model(torch.tensor([output.prompt_ids + output.response_ids])).logits[0].float()
                logits = logits[len(output.prompt_ids) - 1 : -1] / (temperature or 1.0)
                ours = torch.tensor(output.response_logprobs)
                theirs = logits.log_softmax(-1)[range(len(ours)), output.response_ids]
                apart = max(apart, (ours - theirs).abs().max().item())
            self.failed |= not apart < 1e-3
            print(f"temperature {temperature}: at most {apart:.1e} from transformers' log_softmax(logits / T)", flush=True)


def as_cancelled(output: AgentLoopOutput, n: int | None = None) -> AgentLoopOutput:
    """The first n tokens of a response, as a cancel would have left them."""
    n = len(output.response_ids) if n is None else n
    ids, logprobs = output.response_ids[:n], output.response_logprobs[:n]
    return AgentLoopOutput(output.prompt_ids, ids, [1] * n, logprobs, ((0, n),) if n else (), "abort")


def batched(items: Sequence[Any], n: int) -> list[Sequence[Any]]:
    """`items` in groups of n; itertools.batched comes with Python 3.12."""
    return [items[i : i + n] for i in range(0, len(items), n)]


async def run(args: argparse.Namespace) -> int:
    """All rows of the table; the two servers work side by side, each on its own core."""
    bench = Bench(args)
    await bench.start()
    print("| what | temperature | prefix cache | same token ids | logprobs apart, at most | s |\n|---|---|---|---|---|---|")
    for temperature in (0.0, 1.0):
        for company in ("among 32 others", "alone"):
            await asyncio.gather(*[bench.every_split(temperature, cache, company) for cache in ("on", "off")])
    for temperature in (0.7, 1.3):
        await asyncio.gather(*[bench.every_split(temperature, cache, "among 32 others") for cache in ("on", "off")])
    for temperature in (0.0, 1.0):
        await bench.three_cuts(temperature)
    print()
    await bench.truth((0.0, 0.7, 1.0, 1.3))
    for server in bench.servers.values():
        await server.shutdown()
        del server.engine
    return int(bench.failed and args.dtype == "float32")


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(POCKET), help="Hugging Face folder [pocket]")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of each response")
    args = parser.parse_args()
    quiet_libraries(verbose=False)
    return asyncio.run(run(args))


if __name__ == "__main__":
    sys.exit(main())
