"""What does split-invariant sampling cost? vLLM's own sampler and ours in turn, in one engine, on one core.

    python tests/bench/sampler.py --model FOLDER     # a model with a large vocabulary, e.g. SmolLM2-135M: 49,152 tokens
    python tests/bench/sampler.py                    # the pocket policy: 431

Must reach: at most 10 % fewer tokens per second with a vocabulary of 49,152. Medians over pairs of runs, one right after the
other.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from partial_rollout import VLLMServer  # noqa: E402
from run_gsm8k import POCKET, quiet_libraries  # noqa: E402


def remember(worker: Any) -> None:
    """Keeps vLLM's own forward. Runs in the engine's process."""
    worker.plain_forward = worker.model_runner.sampler.topk_topp_sampler.forward


def use(worker: Any, ours: bool) -> None:
    """Puts our forward in, or vLLM's back."""
    if ours:
        worker.install_sampler()
    else:
        worker.model_runner.sampler.topk_topp_sampler.forward = worker.plain_forward


async def tokens_per_s(server: VLLMServer, batch: int, tokens: int) -> float:
    """Decodes `tokens` for each of `batch` requests of 32 tokens, at temperature 1."""
    params = {"temperature": 1.0, "max_tokens": tokens, "ignore_eos": True}
    prompts = [[10 + (i * 7 + k) % 300 for k in range(32)] for i in range(batch)]
    start = time.perf_counter()
    requests = [
        server.generate_for_partial(f"{start}-{i}", prompt_ids=prompt, sampling_params=params)
        for i, prompt in enumerate(prompts)
    ]
    await asyncio.gather(*requests)
    seconds = time.perf_counter() - start
    await server.clear_kv_cache()
    return batch * tokens / seconds


async def run(args: argparse.Namespace) -> int:
    """The table."""
    server = VLLMServer(
        args.model,
        cores=[max(os.sched_getaffinity(0))],
        dtype=args.dtype,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=max(args.batches),
        block_size=32,
        kv_cache_memory_bytes=1 << 30,
    )
    await server.engine.collective_rpc(remember)
    await server.ready()
    vocabulary = server.engine.model_config.get_vocab_size()
    missed = False
    print(f"vocabulary {vocabulary}, {args.dtype}, {args.tokens} tokens, {args.pairs} pairs")
    print("| batch | vLLM's sampler, tokens/s | ours, tokens/s | ours / vLLM's (lowest, highest) |\n|---|---|---|---|")
    for batch in args.batches:
        figures: dict[bool, list[float]] = {False: [], True: []}
        for pair in range(args.pairs + 1):
            for ours in (False, True) if pair % 2 else (True, False):
                await server.engine.collective_rpc(use, args=(ours,))
                figures[ours].append(await tokens_per_s(server, batch, args.tokens))
        plain, ours = (figures[which][1:] for which in (False, True))  # the first pair warms up
        ratios = [b / a for a, b in zip(plain, ours, strict=True)]
        median = statistics.median(ratios)
        missed |= median < 0.9
        print(
            f"| {batch} | {statistics.median(plain):.0f} | {statistics.median(ours):.0f} "
            f"| {median:.3f} ({min(ratios):.3f}, {max(ratios):.3f}) |",
            flush=True,
        )
    print(f"load average {os.getloadavg()[0]:.1f}")
    await server.shutdown()
    del server.engine
    return int(missed)


def main() -> int:
    """The command; exit status 1 where the limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(POCKET), help="Hugging Face folder [pocket]")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--tokens", type=int, default=32, help="of each response")
    parser.add_argument("--pairs", type=int, default=5)
    args = parser.parse_args()
    quiet_libraries(verbose=False)
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # functions as arguments of collective_rpc
    return asyncio.run(run(args))


if __name__ == "__main__":
    sys.exit(main())
