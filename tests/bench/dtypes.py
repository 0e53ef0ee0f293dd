"""bfloat16 beside float32, on a real model and the real GSM8K: how much faster, and do vLLM and the trainer still agree?

    python tests/bench/dtypes.py --model FOLDER --data FOLDER       # SmolLM2-135M: about 12 minutes on two cores

64 prompts, responses of at most 128 tokens, temperature 1; vLLM on one core, the trainer on the other. The ratio is the mean
over all tokens of exp(log-prob by the trainer - log-prob by vLLM): 1 where they compute the same.

Must reach: a ratio within 0.02 of 1 in bfloat16 and within 0.001 in float32; updates in bfloat16 at least 1.5 times as fast.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import run_gsm8k  # noqa: E402
from one_step_off import TOKEN_COLUMNS, Ragged, RolloutBatch  # noqa: E402
from partial_rollout import LLMServerManager, SingleTurnAgentLoop, VLLMServer  # noqa: E402


async def rollouts(model: str, prompts: RolloutBatch, dtype: str, core: int) -> tuple[RolloutBatch, float]:
    """(the prompts with responses, seconds)."""
    options = {"enforce_eager": True, "max_model_len": 512, "block_size": 32, "kv_cache_memory_bytes": 1 << 30}
    server = VLLMServer(model, dtype=dtype, cores=[core], **options)
    await server.ready()
    tokenizer, eos_token_ids = run_gsm8k.load_tokenizer(model)
    limits = {"response_length": 128, "max_model_len": 512, "eos_token_ids": eos_token_ids}
    loop = SingleTurnAgentLoop(LLMServerManager([server]), tokenizer, **limits)
    params = prompts.meta_info["sampling_params"]

    async def respond(sample: dict) -> object:
        return await loop.run(params | {"seed": sample["seed"]}, raw_prompt=sample["raw_prompt"])

    await respond(prompts[0])  # what a first request makes ready
    start = time.perf_counter()
    outputs = await asyncio.gather(*map(respond, prompts))
    seconds = time.perf_counter() - start
    await server.shutdown()
    columns = {name: Ragged.pack([getattr(o, name) for o in outputs], kind) for name, kind in TOKEN_COLUMNS.items()}
    return prompts.with_columns(**columns, rewards=np.arange(len(prompts)) % 2.0), seconds


def main() -> int:
    """The command; exit status 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--train", type=int, default=8, help="responses in the update that is timed")
    args = parser.parse_args()
    run_gsm8k.quiet_libraries(verbose=False)
    cores = sorted(os.sched_getaffinity(0))
    prompts = run_gsm8k.make_prompts(run_gsm8k.GSM8K(args.data).test(args.prompts), "bench", 1, 0, temperature=1.0)
    import torch

    from trainer import GRPOTrainer, compute_log_probs, load_policy, micro_batches

    torch.set_num_threads(1)
    rates, missed = {}, False
    print(
        "| dtype | generated, tokens/s | trained, tokens/s | ratio | mean abs(log ratio) | largest |\n|---|---|---|---|---|---|"
    )
    for dtype, within in (("float32", 1e-3), ("bfloat16", 0.02)):
        batch, generate_s = asyncio.run(rollouts(args.model, prompts, dtype, cores[-1]))
        os.sched_setaffinity(0, cores[:1])
        trainer = GRPOTrainer(load_policy(args.model, getattr(torch, dtype)), micro_batch_tokens=4096)
        rows = {name: batch[name].rows() for name in ("prompt_ids", "response_ids", "response_logprobs")}
        off = []
        with torch.no_grad():
            for cut in micro_batches(batch["prompt_ids"].lengths + batch["response_ids"].lengths, 4096):
                now = compute_log_probs(
                    trainer.model, [rows["prompt_ids"][i] for i in cut], [rows["response_ids"][i] for i in cut]
                )
                off.append(now.numpy() - np.concatenate([rows["response_logprobs"][i] for i in cut]))
        off = np.concatenate(off)
        part = batch[: args.train].with_columns(group=np.arange(args.train) // 2)
        trainer.update(part)
        start = time.perf_counter()
        trainer.update(part)
        tokens = int((part["prompt_ids"].lengths + part["response_ids"].lengths).sum())
        rates[dtype] = np.array([len(off) / generate_s, tokens / (time.perf_counter() - start)])
        ratio = float(np.exp(off).mean())
        shown = (
            f"{rates[dtype][0]:.0f} | {rates[dtype][1]:.0f} | {ratio:.5f} | {np.abs(off).mean():.5f} | {np.abs(off).max():.4f}"
        )
        print(f"| {dtype} | {shown} |", flush=True)
        missed |= abs(ratio - 1) > within
        os.sched_setaffinity(0, cores)
    generate, train = rates["bfloat16"] / rates["float32"]
    print(f"bfloat16 / float32: generate {generate:.2f}, train {train:.2f}; load average {os.getloadavg()[0]:.1f}")
    return int(missed or train < 1.5)


if __name__ == "__main__":
    sys.exit(main())
