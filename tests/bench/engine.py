"""Does the engine lose anything to us? Manager, Ray worker, agent loop and server around vLLM, beside vLLM's own LLM.generate.

    python tests/bench/engine.py                     # about 3 minutes on two cores

128 requests of 128 tokens (EOS ignored), temperature 1, with the log-probability of each token, which training needs; all
processes on one core, in turns. Must reach: 0.90 of the tokens a second of LLM.generate, at 32 and at 128 sequences at once.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import run_gsm8k  # noqa: E402
from one_step_off import AgentLoopManager, AgentLoopWorker  # noqa: E402
from partial_rollout import VLLMServer, pin_process  # noqa: E402

REQUESTS, TOKENS = 128, 128
OPTIONS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "kv_cache_memory_bytes": 512 << 20,
    "block_size": 32,
    "max_num_batched_tokens": 2048,  # vLLM's own differ between LLM and AsyncLLM
}


class OnOneCore(VLLMServer):
    """A server that shares the core with its engine."""

    async def ready(self) -> dict[str, Any]:
        """As always."""
        facts = await super().ready()
        pin_process(self.cores)
        return facts


def make_agent_loop(core: int, *args: Any) -> Any:
    """As always, on that core too."""
    pin_process([core])
    return run_gsm8k.make_agent_loop(*args)


class Bare:
    """vLLM's LLM in this process, with vLLM's own sampler."""

    def __init__(self, model: str, core: int, max_num_seqs: int) -> None:
        os.sched_setaffinity(0, [core])
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        self.llm = LLM(model, max_num_seqs=max_num_seqs, disable_log_stats=True, **OPTIONS)
        pin_process([core])

    def generate(self, questions: list[str]) -> float:
        """Seconds for all requests."""
        from vllm import SamplingParams

        chats = [[{"role": "user", "content": question}] for question in questions]
        params = SamplingParams(
            temperature=1.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0, flat_logprobs=True, detokenize=False
        )
        start = time.perf_counter()
        outputs = self.llm.chat(chats, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert sum(len(output.outputs[0].token_ids) for output in outputs) == REQUESTS * TOKENS
        return seconds


def main() -> int:
    """The command; exit status 1 where the limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(run_gsm8k.POCKET))
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    run_gsm8k.quiet_libraries(verbose=False)
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, [core])  # Ray's own processes, too
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    problems, missed = run_gsm8k.PocketProblems().train(0, 0, REQUESTS), False
    prompts = run_gsm8k.make_prompts(problems, "bench", 1, 0, temperature=1.0, ignore_eos=True)
    tokenizer, eos_token_ids = run_gsm8k.load_tokenizer(args.model)
    load_tokenizer = functools.partial(type(tokenizer).from_pretrained, args.model)
    lengths = {"response_length": TOKENS, "max_model_len": 512}
    print("| at once | LLM.generate, tokens/s | ours, tokens/s | ours / LLM.generate (lowest, highest) |\n|---|---|---|---|")
    for at_once in (32, 128):
        bare = ray.remote(num_cpus=0)(Bare).remote(args.model, core, at_once)
        options = {"num_cpus": 0, "max_concurrency": 1000, "enable_task_events": False}  # as run_gsm8k.py has its actors
        actor = ray.remote(**options)(OnOneCore)
        server = actor.options(name=f"server-{at_once}").remote(args.model, cores=[core], max_num_seqs=at_once, **OPTIONS)
        ray.get(server.ready.remote())
        make = functools.partial(
            make_agent_loop, core, "single_turn_agent", load_tokenizer, [f"server-{at_once}"], eos_token_ids, lengths
        )
        manager = AgentLoopManager([ray.remote(**options)(AgentLoopWorker).remote(make)])
        bares, ours = [], []
        for turn in range(2 * (args.rounds + 1)):
            if turn % 4 in (0, 3):  # each is first in every other round
                bares.append(ray.get(bare.generate.remote([p.question for p in problems])))
                continue
            start = time.perf_counter()
            rollouts = manager.generate_sequences(prompts)
            ours.append(time.perf_counter() - start)
            assert int(rollouts["response_ids"].lengths.sum()) == REQUESTS * TOKENS
        ratios = [a / b for a, b in zip(bares[1:], ours[1:], strict=True)]
        rates = [REQUESTS * TOKENS / statistics.median(seconds[1:]) for seconds in (bares, ours)]
        ratio = statistics.median(ratios)
        print(
            f"| {at_once} | {rates[0]:,.0f} | {rates[1]:,.0f} | {ratio:.2f} ({min(ratios):.2f}, {max(ratios):.2f}) |",
            flush=True,
        )
        missed |= ratio < 0.9
        ray.kill(bare)
        ray.kill(server)
    print(f"load average {os.getloadavg()[0]:.1f}")
    return int(missed)


if __name__ == "__main__":
    from engine import main  # by import, so that the actors find the class by name

    sys.exit(main())
