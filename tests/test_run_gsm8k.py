"""Laws of run_gsm8k.py: reading answers, problems, bad input; and the command itself, on real Ray and vLLM."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import doctest
import errno
import functools
import getpass
import hashlib
import http.server
import inspect
import json
import math
import os
import pickle
import random
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import run_gsm8k
import trainer
from one_step_off import Ragged, RolloutBatch
from processes import command, finished, processes
from run_gsm8k import (
    POCKET,
    PocketProblems,
    UsageError,
    compute_reward,
    demonstration,
    held_out,
    load_gsm8k,
    make_problem,
    make_prompts,
    parse_config,
    read_answer,
    sample_seed,
)
from trainer import GroupPool, GRPOTrainer

ROOT = Path(run_gsm8k.__file__).parent

# ---- The reward ------------------------------------------------------------------------------------------------------

RIGHT = ["#### 1,234", "#### 1234.00", "####1234", "#### $1,234", "#### **1234**", "#### 1234.", "#### 1,234 dollars"]
WRONG = ["#### ", "####", "1234", "#### 12 34", "#### 1234 or 1235", "#### -1234", "#### 1,23,4", "no number"]


@pytest.mark.parametrize("response", RIGHT)
@pytest.mark.parametrize("tail", ["", "\n" + "and so on, at length. " * 230])
def test_an_answer_is_read_as_a_person_would(response: str, tail: str) -> None:
    """Commas, a dollar sign, bold marks, a full stop, .00 and a unit do not make a right answer wrong."""
    assert compute_reward("48/2 = 24 clips.\n" + response + tail, "1234") == 1.0


def test_the_last_mark_counts() -> None:
    """Of a response that corrects itself, and of one that says no more."""
    corrected = "#### 3\nNo, that is wrong:\n#### 5"
    assert compute_reward(corrected, "5") == 1.0 and compute_reward(corrected, "3") == 0.0
    assert read_answer("#### 5 ####") is None and read_answer("#### 5\n####\n") is None


@pytest.mark.parametrize("response", WRONG)
def test_what_is_no_single_number_after_the_mark_is_no_answer(response: str) -> None:
    """Strict: exactly one number after the last ####, and the right one."""
    assert compute_reward(response, "1234") == 0.0


def test_flexible_mode_takes_the_last_number_of_the_text() -> None:
    """Without ####, the last number counts; a minus is a sign only where it is one."""
    assert read_answer("The total is 72, altogether.", "flexible") == 72
    assert read_answer("She has 9 - 5 left", "flexible") == 5
    assert read_answer("9-5", "flexible") == 5
    assert read_answer("It is -5.", "flexible") == -5
    assert compute_reward("#### -5", "5") == 0.0 and compute_reward("#### 5", "-5") == 0.0


def test_a_format_score_is_for_a_wrong_number_in_the_right_place() -> None:
    """Less than a right answer, and nothing for a number elsewhere."""
    scores = [compute_reward(text, "5", format_score=0.2) for text in ("#### 5", "#### 6", "5", "####", "6 ####")]
    assert scores == [1.0, 0.2, 0.0, 0.0, 0.0]
    assert compute_reward("so 5", "5", "flexible", 0.2) == 1.0 and compute_reward("so 6", "5", "flexible", 0.2) == 0.0


@given(
    st.decimals(min_value=-(10**9), max_value=10**9, places=2) | st.integers(-(10**9), 10**9).map(Decimal),
    st.sampled_from(["{}", "${}", "**{}**", "{}.", "{} dollars", "({})", "= {}", "\\boxed{{{}}}"]),
    st.booleans(),
)
@example(Decimal("-1234"), "${}", True)
@example(Decimal("0.50"), "{}.", False)
def test_any_number_reads_back_as_itself_however_it_is_written(number: Decimal, form: str, commas: bool) -> None:
    """Formatting a number and reading it is the identity, in both modes."""
    text = "#### " + form.format(f"{number:,}" if commas else f"{number}")
    assert read_answer(text) == number
    assert read_answer(text, "flexible") == number


# ---- The problems ----------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6))
def test_a_pocket_problem_and_its_demonstration_agree(seed: int) -> None:
    """The working of a problem is true arithmetic in one to five steps, and every demonstration earns the reward."""
    rng = random.Random(seed)
    problem = make_problem(rng)
    assert 1 <= len(problem.working) <= 5
    for line in problem.working:
        claim = next(word for word in line.rstrip(".").split() if "=" in word)
        left, right = claim.split("=")
        assert eval(left.replace("/", "//")) == int(right) < 100
    for bare in (0.0, 1.0):
        assert compute_reward(demonstration(problem, rng, bare), problem.answer) == 1.0


def test_no_problem_is_both_trained_on_and_held_out() -> None:
    """The test set is decided by a hash of the text: no training problem can be in it."""
    problems = PocketProblems()
    test = problems.test(300)
    assert len({p.question for p in test}) == 300 and all(held_out(p.question) for p in test)
    train = problems.train(seed=0, start=0, n=300)
    assert not any(held_out(p.question) for p in train)
    assert train[100:] == problems.train(seed=0, start=100, n=200), "a problem is a function of its number alone"
    assert train != problems.train(seed=1, start=0, n=300)


def test_gsm8k_files_are_read_whole_or_refused_with_their_line(tmp_path: Path) -> None:
    """Broken JSON, a missing field, an answer without ####, an empty file: file, line and cause; CRLF is no fault."""
    good = {"question": "How many?", "answer": "2+2=<<2+2=4>>4\n#### 1,004"}
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\r\n".join([json.dumps(good).encode()] * 2) + b"\r\n")
    assert [p.answer for p in load_gsm8k(path)] == ["1004", "1004"]
    parted = {**good, "question": "How\u2028many\x85?"}  # where splitlines would split
    path.write_text(json.dumps(parted, ensure_ascii=False) + "\n", encoding="utf-8")
    assert load_gsm8k(path)[0].question.startswith(parted["question"])
    for line in ("{", "[]", '{"question": "q"}', json.dumps({**good, "answer": "4"}), json.dumps({**good, "answer": 4})):
        path.write_text(json.dumps(good) + "\n" + line + "\n")
        with pytest.raises(UsageError, match=r"train.jsonl, line 2"):
            load_gsm8k(path)
    path.write_text("")
    with pytest.raises(UsageError, match="has no problems"):
        load_gsm8k(path)
    with pytest.raises(UsageError, match="cannot read"):
        load_gsm8k(tmp_path / "test.jsonl")


@given(st.integers(1, 9), st.integers(0, 3), st.integers(0, 30), st.integers(0, 12))
@example(9, 0, 5, 9)  # over the end of an epoch
def test_each_epoch_has_each_problem_once_in_an_order_of_its_own(n: int, seed: int, start: int, count: int) -> None:
    """The stream is a function of the seed; another epoch, and another seed, has another order."""
    with tempfile.TemporaryDirectory() as folder:
        for split in ("train", "test"):
            lines = [json.dumps({"question": "?" * (i + 1), "answer": f"#### {i}"}) for i in range(n)]
            (Path(folder) / f"{split}.jsonl").write_text("\n".join(lines))
        problems = run_gsm8k.GSM8K(folder)

    def numbers(seed: int, start: int, count: int) -> list[int]:
        return [int(problem.answer) for problem in problems.train(seed, start, count)]

    stream = numbers(seed, 0, 6 * n)
    epochs = [stream[i : i + n] for i in range(0, 6 * n, n)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(n))] * 6
    assert numbers(seed, start, count) == numbers(seed, 0, start + count)[start:]
    if n == 9:
        assert len({tuple(epoch) for epoch in epochs}) == 6 and numbers(seed + 1, 0, n) != epochs[0]
    assert [problem.answer for problem in problems.longest(3)] == [str(i) for i in range(n)][::-1][:3]
    assert [problem.answer for problem in problems.test(3)] == [str(i) for i in range(n)][:3]


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, bytes]]:
    """A web server on this machine in place of GSM8K's; it has what is put into the dict. The cache is empty."""
    files: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = files.get(self.path[1:])
            self.send_response(404 if body is None else 200)
            self.send_header("Content-Length", str(len(body or b"")))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(run_gsm8k, "GSM8K_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(run_gsm8k, "getproxies", dict)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield files
    server.shutdown()
    server.server_close()


def test_gsm8k_is_downloaded_once_and_checked(web: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both files, each against its SHA-256; the second time nothing is asked of the network. A wrong file leaves nothing."""
    lines = {name: json.dumps({"question": name, "answer": "#### 4"}).encode() for name in run_gsm8k.GSM8K_SHA256}
    monkeypatch.setattr(run_gsm8k, "GSM8K_SHA256", {name: hashlib.sha256(body).hexdigest() for name, body in lines.items()})
    web |= lines | {"test.jsonl": lines["test.jsonl"] + b" "}
    with pytest.raises(
        UsageError, match=r"test\.jsonl: invalid hash value.*; put its train.jsonl and test.jsonl into a folder"
    ):
        run_gsm8k.load_problems("gsm8k")
    assert [path.name for path in (tmp_path / "cache" / "gsm8k").iterdir()] == ["train.jsonl"], "what is wrong is gone"
    del web["test.jsonl"]
    with pytest.raises(UsageError, match="404"):
        run_gsm8k.load_problems("gsm8k")
    web |= lines
    assert run_gsm8k.load_problems("gsm8k").test(1)[0].answer == "4"
    web.clear()
    assert run_gsm8k.load_problems("gsm8k").train(0, 0, 1)[0].question.startswith("train.jsonl")


def test_without_a_network_one_line_says_what_to_do(web: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """No one listens at that port: refused at once, with the mend."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setattr(run_gsm8k, "GSM8K_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(UsageError, match=r"127.0.0.1 cannot be reached from here; put its train.jsonl"):
            run_gsm8k.load_problems("gsm8k")


def test_the_confidence_interval_is_where_the_observed_share_is_no_surprise() -> None:
    """Wilson's interval by its definition: the shares from which `right` of n lies at most z standard deviations away."""
    for right, n in ((0, 20), (7, 256), (128, 256), (256, 256)):
        z = NormalDist().inv_cdf(0.975)
        fits = [p for p in np.linspace(0, 1, 100_001) if abs(right / n - p) <= z * math.sqrt(p * (1 - p) / n) + 1e-12]
        assert run_gsm8k.wilson_interval(right, n) == pytest.approx((fits[0], fits[-1]), abs=2e-5)


def test_each_response_has_a_seed_of_its_own_that_depends_on_nothing_else() -> None:
    """Seeds follow (run seed, uid): no twins in a group, another run seed gives others, the batch's cut gives the same."""
    problems = PocketProblems().train(0, 0, 4)
    batch = make_prompts(problems, "step3", 8, run_seed=5, temperature=1.0)
    seeds = batch["seed"].tolist()
    assert len(set(seeds)) == 32 and max(seeds) < 2**63
    assert seeds == [sample_seed(5, str(uid)) for uid in batch["uid"]]
    assert not set(seeds) & set(make_prompts(problems, "step3", 8, run_seed=6)["seed"].tolist())
    assert [row["ground_truth"] for row in batch][::8] == [p.answer for p in problems]


# ---- Bad input: one line, exit status 2 ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--steps", "0"], "--steps 0: give at least 1"),
        (["--batch-size", "0"], "--batch-size 0: give at least 1"),
        (["--group-size", "1"], "--group-size 1: give at least 2"),
        (["--temperature", "0"], "--temperature 0.0: give a number above 0"),
        (["--learning-rate", "nan"], "--learning-rate nan: give a number above 0"),
        (["--model", "./nowhere"], "--model ./nowhere: no such folder; give a folder or a hub name"),
        (["--model", "a b"], "--model a b: neither a folder nor a hub name"),
        (["--model", str(Path(__file__).parent)], "a folder without config.json is no Hugging Face model"),
        (["--data", "nowhere"], "--data nowhere: no such folder"),
        (["--response-length", "2000"], "--response-length 2000 do not fit in the 1024 tokens of"),
        (["--prompt-length", "5"], "--prompt-length 5: a prompt has"),
        (["--resume", "--name", "nowhere"], "nothing to resume"),
        (["--eval-only", "--eval-problems", "0"], "--eval-only with --eval-problems 0: give at least 1"),
        (["--eval-every", "2", "--eval-problems", "0"], "--eval-every 2 with --eval-problems 0: give at least 1 problem"),
        (["--compare", "-1"], "--compare -1: give at least 0"),
        (["--compare", "--colocate"], "--compare runs all three loops, and --colocate only sync"),
        (["--compare", "--mode", "sync"], "--compare runs all three loops, so not --mode sync alone: leave one of them out"),
        (["--temperature", "0.001"], "--temperature 0.001: vLLM samples between 0.01 and 2"),
        (["--kl-coef", "nan"], "--kl-coef nan: give a finite number, 0 or above"),
        (["--seed", str(2**31)], "--seed 2147483648: give at most 2147483647"),
        (["--data", "x" * 300], "xxx: File name too long"),
        (["--trainer-workers", "0"], "--trainer-workers 0: give at least 1"),
        (["--clip-low", "1.5"], "--clip-low 1.5: no ratio is below 0; give at most 1"),
        (["--num-mini-batches", "129"], "--num-mini-batches 129: a batch has 128 responses; give at most that"),
        (
            ["--mode", "partial", "--batch-size", "512", "--max-staleness", "8"],
            "--batch-size 512 and --group-size 8 are 36864 responses at once, with --max-staleness 8: give at most 32768",
        ),
        (["--compare", "--batch-size", "512", "--max-staleness", "8"], "36864 responses at once, with --max-staleness 8"),
        (["--eval-problems", "32769"], "--eval-problems 32769: give at most 32768 for each of the --rollout-servers"),
        (["--format-score", "1"], "--format-score 1.0: give at least 0, and less than the 1 of a right answer"),
        (["--colocate"], "--colocate with --mode one-step-off: rollouts go on while it trains; use --mode sync"),
        (
            ["--colocate", "--mode", "sync", "--ray-address", "a:1"],
            "--colocate shares the GPU of this machine, and --ray-address",
        ),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization 1.5: give a share between 0 and 1"),
        (["--ray-address", "127.0.0.1:1"], "--ray-address 127.0.0.1:1: nothing answers there ("),
        (["--ray-address", "nowhere.invalid:6379"], "--ray-address nowhere.invalid:6379: nothing answers there ("),
        (["--ray-address", "ray://a:1"], "--ray-address ray://a:1: give HOST:PORT, as ray start --head prints it, or auto"),
        (["--ray-address", "a:b"], "--ray-address a:b: give HOST:PORT, as ray start --head prints it, or auto"),
        (["--ray-address", "127.0.0.1:99999"], "--ray-address 127.0.0.1:99999: nothing answers there ("),
    ],
)
def test_bad_input_ends_in_one_line_that_names_the_value(
    argv: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """One line on standard error, exit status 2, and nothing written."""
    out = tmp_path / "runs"
    assert run_gsm8k.main(["--preset", "pocket", "--out", str(out), *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and line in err and err.count("\n") == 1
    assert not out.exists()


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        ({"chat_template.jinja": None}, "has no chat template, so a prompt has no form: use a chat or instruct model"),
        ({"config.json": "{"}, "config.json is no JSON ("),
        ({"config.json": "[]"}, "config.json is no JSON object"),
        ({"generation_config.json": '{"pad_token_id": -1}'}, "could not be saved again: mend it (- "),
    ],
)
def test_a_model_that_cannot_do_the_job_is_named(
    broken: dict[str, str | None], line: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """One line, status 2, nothing written, and no engine left behind."""
    model = shutil.copytree(POCKET, tmp_path / "model")
    for name, text in broken.items():
        (model / name).unlink() if text is None else (model / name).write_text(text)
    assert run_gsm8k.main(["--preset", "pocket", "--out", str(tmp_path / "runs"), "--model", str(model)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and line in err and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_model_of_text_and_pictures_whose_text_alone_would_be_trained_is_refused(tmp_path: Path) -> None:
    """vLLM builds all of it, and would be sent weights under names that it does not know. Of other models it says nothing."""
    from transformers import Gemma3Config, Qwen3_5Config

    Qwen3_5Config(architectures=["Qwen3_5ForConditionalGeneration"]).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=r"builds Qwen3_5ForConditionalGeneration, training Qwen3_5ForCausalLM: "):
        run_gsm8k.check_architecture(str(tmp_path))
    Gemma3Config(architectures=["Gemma3ForConditionalGeneration"]).save_pretrained(tmp_path)
    for model in (tmp_path, POCKET):
        run_gsm8k.check_architecture(str(model))


def test_weights_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """What the safetensors library raises is neither an OSError nor a ValueError, and names no file."""
    model = shutil.copytree(POCKET, tmp_path / "model")
    (model / "model.safetensors").write_bytes((POCKET / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(UsageError, match=f"^--model {model}: "):
        run_gsm8k.make_trainer(parse_config(["--preset", "pocket"])[0], str(model), None, "cpu")


def test_an_output_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A file where the folder should be."""
    (tmp_path / "runs").write_text("")
    assert run_gsm8k.main(["--preset", "pocket", "--out", str(tmp_path / "runs")]) == 2
    assert "cannot write to" in capsys.readouterr().err


def make_run(folder: Path, *argv: str) -> run_gsm8k.Run:
    return run_gsm8k.Run(parse_config(["--preset", "pocket", "--out", str(folder), "--name", "run", *argv])[0])


@pytest.mark.parametrize("seed", [0, 5])
def test_a_batch_and_its_groups_are_those_of_the_run(seed: int, tmp_path: Path) -> None:
    """What partial mode asks for group by group is what the other loops ask for at once: problems, seeds and temperature of the
    run, each response once."""
    run = make_run(tmp_path, "--seed", str(seed), "--temperature", "0.7", "--batch-size", "3", "--group-size", "2")
    sent: list[RolloutBatch] = []
    run.trainer, run.timeline = SimpleNamespace(param_version=3), trainer.Timeline()

    async def generate() -> None:
        def generate_sequences_async(prompts: RolloutBatch) -> asyncio.Future:
            sent.append(prompts)
            return asyncio.get_running_loop().create_future()

        run.manager = SimpleNamespace(generate_sequences_async=generate_sequences_async, close=lambda: None)
        for t in range(3):
            run.generate(t)

    asyncio.run(generate())
    problems, made = PocketProblems().train(seed, 0, 9), []
    run.problems = SimpleNamespace(train=lambda *args: made.append(args) or PocketProblems().train(*args))
    for t, batch in enumerate(sent):
        together = run.concat([run.group(number) for number in range(3 * t, 3 * t + 3)])
        assert {name: list(together[name]) for name in together.columns} == {n: list(batch[n]) for n in batch.columns}
        assert batch.meta_info == {"sampling_params": {"temperature": 0.7}, "param_version": 3}
        assert batch["seed"].tolist() == [sample_seed(seed, str(uid)) for uid in batch["uid"]]
        asked = [(chat[0]["content"], gold) for chat, gold in zip(batch["raw_prompt"], batch["ground_truth"], strict=True)]
        assert asked == [(p.question, p.answer) for p in problems[3 * t : 3 * t + 3] for _ in range(2)]
    assert len({uid for batch in sent for uid in batch["uid"]}) == 18
    assert len(made) == 3, "a batch's problems are made once, and not for each of its groups"


def test_a_server_by_turns_sleeps_without_its_weights_after_each_batch(tmp_path: Path) -> None:
    """Also after one that a checkpoint brought. The next sync wakes it up and brings newer ones."""
    run, calls = make_run(tmp_path, "--mode", "sync", "--colocate"), []
    run.trainer, run.timeline = SimpleNamespace(param_version=0), trainer.Timeline()

    async def generated() -> str:
        calls.append("generate")
        return "rollouts"

    async def sleep(level: int) -> None:
        calls.append(f"sleep {level}")

    run.manager = SimpleNamespace(
        generate_sequences_async=lambda _: asyncio.ensure_future(generated()), sleep=sleep, close=lambda: None
    )

    async def check() -> list[str]:
        run.first_rollouts = None
        first = await run.generate(0)
        run.first_rollouts = "those of a checkpoint"
        return [first, await run.generate(0), await run.generate(1)]

    assert asyncio.run(check()) == ["rollouts", "those of a checkpoint", "rollouts"]
    assert calls == ["generate", "sleep 2", "sleep 2", "generate", "sleep 2"]


@pytest.mark.parametrize(
    ("argv", "rewards", "accuracy"),
    [
        ([], [1, 0, 0], 1 / 3),
        (["--reward", "flexible"], [1, 0, 1], 2 / 3),
        (["--format-score", "0.2"], [1, 0.2, 0], 1 / 3),
    ],
)
def test_a_response_is_rewarded_for_its_own_answer(
    argv: list[str], rewards: list[float], accuracy: float, tmp_path: Path
) -> None:
    """By its own ground truth, in the way that was chosen; what is given for the form alone is no accuracy."""
    run = make_run(tmp_path, *argv)
    run.tokenizer, _ = run_gsm8k.load_tokenizer(str(POCKET))
    ids = [run.tokenizer.encode(text) for text in ("#### 5", "#### 6", "so 7")]
    batch = RolloutBatch({"response_ids": Ragged.pack(ids, np.int32), "ground_truth": ["5", "7", "7"]})
    assert run.score(batch)["rewards"].tolist() == rewards
    manager = SimpleNamespace(
        generate_sequences_async=lambda _: asyncio.sleep(0, batch), clear_kv_cache=lambda: asyncio.sleep(0)
    )
    run.manager, run.trainer, run.timeline, run.test_prompts = manager, None, trainer.Timeline(), batch
    assert asyncio.run(run.measure_accuracy()) == {"accuracy": accuracy, "answered": 2 / 3}


def test_a_resumed_run_drops_the_lines_that_it_repeats_and_one_that_was_cut(tmp_path: Path) -> None:
    """Also one that was cut where a bracket of its own text closes. And the summary, if it goes on beyond it."""
    run = make_run(tmp_path, "--steps", "4")
    run.folder.mkdir()
    (run.folder / "summary.json").write_text("")
    rows = [{"step": step, "time/seconds": step + 1.0} for step in range(4)]
    for name in ("metrics.jsonl", "samples.jsonl"):
        text = "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4, "response": "so \\\\boxed{5}'
        (run.folder / name).write_text(text)
    run._drop_rows_from(4)
    assert (run.folder / "summary.json").exists() and run.rows == rows
    run._drop_rows_from(2)
    assert not (run.folder / "summary.json").exists(), "a summary is that of a run which is over"
    assert run.rows == rows[:2] and run.seconds_before == 2.0
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert [json.loads(line) for line in (run.folder / name).read_text().splitlines()] == rows[:2]


def test_every_id_that_ends_a_response_is_known(tmp_path: Path) -> None:
    """A model may have several, in any of three places; without a generation config, two."""
    model = shutil.copytree(POCKET, tmp_path / "model")
    for name, ids in (("config.json", 5), ("generation_config.json", [2, 7])):
        (model / name).write_text(json.dumps(json.loads((model / name).read_text()) | {"eos_token_id": ids}))
    assert run_gsm8k.load_tokenizer(str(model))[1] == [2, 5, 7]
    (model / "generation_config.json").unlink()
    assert run_gsm8k.load_tokenizer(str(model))[1] == [2, 5]
    for broken in ("{", "[]", '{"num_beams": 2, "num_return_sequences": 3}'):  # ids would be missed in silence
        (model / "generation_config.json").write_text(broken)
        with pytest.raises(UsageError, match=r"its generation_config.json cannot be read \(.+\): mend it or remove it"):
            run_gsm8k.load_tokenizer(str(model))


def begun(folder: Path, *argv: str) -> Path:
    """A run's folder as it is before its first checkpoint."""
    config, _ = parse_config(["--preset", "pocket", "--out", str(folder.parent), "--name", folder.name, *argv])
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    return folder


def test_a_run_is_resumed_where_it_lies_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder may have moved, and those of its model and data, which need not be given as at the start; nothing else may
    change."""
    model, data = shutil.copytree(POCKET, tmp_path / "model"), tmp_path / "data"
    data.mkdir()
    monkeypatch.chdir(tmp_path)
    at_first = ["--model", "model", "--data", "./data"]
    begun(tmp_path / "a" / "run", *at_first)
    shutil.move(tmp_path / "a", tmp_path / "b")
    resume = ["--out", "b", "--name", "run", "--resume"]
    config, _ = parse_config([*resume, *at_first])
    assert (config.out, config.model, config.data) == ("b", str(model), str(data)), "the same command, and --resume"
    shutil.copytree(model, tmp_path / "other")
    with pytest.raises(UsageError, match=r"was begun with .*model; leave --model out, or start anew"):
        parse_config([*resume, "--model", "other"])
    with pytest.raises(UsageError, match=r"--temperature 0.5: .* was begun with 1.0; leave --temperature out"):
        parse_config([*resume, "--temperature", "0.5"])  # what waits in the checkpoint was sampled at the other
    shutil.move(model, tmp_path / "moved")
    assert parse_config([*resume, "--model", "moved"])[0].model == str(tmp_path / "moved")
    with pytest.raises(UsageError, match=r"--seed 1: .* was begun with 0; leave --seed out"):
        parse_config([*resume, "--seed", "1"])


def test_what_would_break_a_promise_of_the_run_is_not_changed_on_the_way(tmp_path: Path) -> None:
    """Groups under way in partial mode were admitted for its bounds: with a lower one some could not be trained in time, and
    the run would end there; with fewer steps, and then more, some would be trained twice; with fewer tokens some would be too
    long already. Elsewhere steps may change."""
    begun(tmp_path / "run", "--mode", "partial", "--max-staleness", "2", "--steps", "9")
    resume = ["--out", str(tmp_path), "--resume", "--name"]
    for flag, less in (("--max-staleness", "1"), ("--steps", "8"), ("--response-length", "319"), ("--prompt-length", "127")):
        with pytest.raises(UsageError, match=rf"{flag} {less}: .* was begun with {int(less) + 1}; give no less, or start anew"):
            parse_config([*resume, "run", flag, less])
    assert parse_config([*resume, "run", "--max-staleness", "3", "--steps", "10"])[0].max_staleness == 3
    with pytest.raises(UsageError, match=r"--preset qwen: .* was begun with pocket; leave --preset out"):
        parse_config([*resume, "run", "--preset", "qwen"])
    with pytest.raises(UsageError, match=r"--compare: .* is one run; leave --compare out"):
        parse_config([*resume, "run", "--compare"])
    begun(tmp_path / "sync", "--mode", "sync", "--steps", "9")
    config, why = parse_config([*resume, "sync", "--steps", "8"])
    assert config.steps == 8 and why == "preset pocket: that of the run"


def test_an_accuracy_before_is_only_set_beside_one_of_the_same_kind(tmp_path: Path) -> None:
    """A run that is resumed with other problems, another reward, or less room for a response has none."""
    run = run_gsm8k.Run(parse_config(["--preset", "pocket", "--out", str(tmp_path), "--name", "run"])[0])
    run.folder.mkdir()
    run.test_prompts = [1] * 256
    assert run.read_before() is None
    before = {"accuracy": 0.5, "answered": 1.0} | run._measured()
    assert before["problems"] == 256 and before["reward"] == "strict" and before["response_length"] == 320
    (run.folder / "before.json").write_text(json.dumps(before))
    assert run.read_before() == before
    run.test_prompts = [1] * 64
    assert run.read_before() is None
    run.test_prompts, run.config.reward = [1] * 256, "flexible"
    assert run.read_before() is None
    run.config.reward, run.config.response_length = "strict", 64
    assert run.read_before() is None


def test_a_comparison_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """One run killed in the middle, and one that fails: what is done is not done again, what was begun is resumed, and at the
    end there is the same table. A run that is ended by a signal is named, since it says nothing itself."""
    launched: list[tuple[str, bool]] = []
    ends = {"one-step-off-0": [-9, 0], "sync-1": [1, 0]}

    class Process:
        def __init__(self, argv: list[str], **_: Any) -> None:
            config, _ = parse_config(argv[2:])
            launched.append((config.name, config.resume))
            self.status = ends.get(config.name, [0]).pop(0)
            folder = Path(config.out) / config.name
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
            if self.status == 0:
                row = {"step": 0, "reward": 0.5, "staleness/mean": 0.0, "staleness/max": 0, "partial_fraction": 0.0}
                (folder / "metrics.jsonl").write_text(json.dumps(row | {"time/step_s": 1.0}) + "\n")
                timeline = trainer.Timeline()
                timeline.add("trainer", "train 0", 0.0, 1.0, 0)
                timeline.save(folder / "timeline.json")
                figures = {"accuracy": 0.25}
                summary = {"before": figures, "after": figures, "step_s": 1.0, "fit_s": 1.0, "overlap_efficiency": 0.5}
                (folder / "summary.json").write_text(json.dumps(summary))

        def wait(self) -> int:
            return self.status

    monkeypatch.setattr(run_gsm8k.subprocess, "Popen", Process)
    where = ["--out", str(tmp_path), "--name", "all"]

    def go(*argv: str) -> None:
        run_gsm8k.compare(parse_config(argv)[0], lambda: None)

    for argv, what in ((["--preset", "pocket", "--compare", "2"], "signal 9"), (["--resume"], "status 1")):
        with pytest.raises(SystemExit) as ended:
            go(*where, *argv)
        err = capsys.readouterr().err
        assert ended.value.code == 1 and f"ended with {what}; go on with" in err
        assert shlex.split(err.split("go on with ")[1]) == [*where, "--resume"]
    with pytest.raises(UsageError, match="exists already: choose another --name, or go on with it by --resume"):
        go(*where, "--preset", "pocket", "--compare", "2")
    for flag, value, was in (("--steps", "9", "20"), ("--learning-rate", "0.5", "0.0003")):  # half of the runs have the old one
        with pytest.raises(UsageError, match=f"{flag} {value}: .* was begun with {was}; leave {flag} out, or start anew"):
            go(*where, "--resume", flag, value)
    go(*where, "--resume", "--timeout-s", "99")
    modes = ("sync", "one-step-off", "partial")
    first = [("sync-0", False), ("one-step-off-0", False), ("one-step-off-0", True), ("partial-0", False)]
    assert launched == [*first, ("sync-1", False), ("sync-1", True), ("one-step-off-1", False), ("partial-1", False)]
    table = capsys.readouterr().out.split("partial |\n")[1]
    assert [f"| {mode} | {seed} | 0.25 | 0.25 | 1 | 1 | 0.5 |" in table for mode in modes for seed in (0, 1)] == [True] * 6
    assert {"compare.png", "timelines.png"} <= {path.name for path in (tmp_path / "all").iterdir()}


def test_what_an_engine_said_before_it_ended_is_found(tmp_path: Path) -> None:
    """vLLM's own error says "see above", and above is a log that goes with the run."""
    logs = tmp_path / "session_2026-01-01" / "logs"
    logs.mkdir(parents=True)
    lines = ["(EngineCore pid=7) ERROR 01-01 10:00:00 [core.py:9] Traceback (most recent call last):", "something else"]
    lines += ["(EngineCore pid=7) ERROR 01-01 10:00:00 [core.py:9] ValueError: 0.09 GiB KV cache is needed"]
    (logs / "worker-1-2.out").write_text("\n".join(lines) + "\n")
    run = run_gsm8k.Run(parse_config(["--preset", "pocket", "--out", str(tmp_path / "runs"), "--name", "run"])[0])
    run._make_folder()
    error = RuntimeError("The actor died because of an error raised in its creation task\nEngine core initialization failed.")
    assert run_gsm8k.describe_failure(run, error).startswith("error: The actor died")
    run.temporary = str(tmp_path)
    line = run_gsm8k.describe_failure(run, error)
    assert line.startswith("error: vLLM's engine did not start: ValueError: 0.09 GiB KV cache is needed; traceback in")
    assert (
        (run.folder / "error.txt")
        .read_text()
        .endswith("Traceback (most recent call last):\nValueError: 0.09 GiB KV cache is needed")
    )
    run.temporary = ""
    run.close()


def test_a_comparison_that_is_killed_takes_its_run_along() -> None:
    """kill -9 tells no one; the kernel does."""
    program = """
import ctypes, functools, run_gsm8k, subprocess, sys
preexec = functools.partial(run_gsm8k.end_with_parent, ctypes.CDLL(None))
child = subprocess.Popen(["sleep", "100"], start_new_session=True, preexec_fn=preexec, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
child.wait()
"""
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    child = os.pidfd_open(int(parent.stdout.readline()))
    try:
        assert not select.select([child], [], [], 0.2)[0]
        parent.kill()
        assert select.select([child], [], [], 30)[0], "it still runs"
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(child, signal.SIGKILL)
        os.close(child)
        parent.communicate()


def test_a_comparison_that_is_interrupted_interrupts_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, since the run has a session of its own, and does not see the Ctrl-C; and if it does not end, by force."""
    told: list[Any] = []

    class Process:
        def __init__(self, argv: list[str], **options: Any) -> None:
            told.append(options)

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                raise KeyboardInterrupt
            told.append(timeout)
            raise subprocess.TimeoutExpired("run", timeout)

        def send_signal(self, number: int) -> None:
            told.append(number)

        def kill(self) -> None:
            told.append("killed")

    monkeypatch.setattr(run_gsm8k.subprocess, "Popen", Process)
    config, _ = parse_config(["--preset", "pocket", "--out", str(tmp_path), "--name", "all", "--compare"])
    with pytest.raises(KeyboardInterrupt):
        run_gsm8k.compare(config, lambda: told.append("heard"))
    options, *rest = told
    assert rest == ["heard", signal.SIGINT, 60, "killed"]
    assert options["start_new_session"] and options["preexec_fn"].func is run_gsm8k.end_with_parent


def test_after_a_loss_that_is_not_finite_the_run_can_be_begun_again_with_its_flags(tmp_path: Path) -> None:
    """From the newest whole checkpoint, and with all that was not as in the preset: else it would be another run."""
    flags = ["--dtype", "bfloat16", "--response-length", "160", "--no-normalize-by-std", "--kl-coef", "0.5"]
    config, _ = parse_config(["--preset", "pocket", "--out", str(tmp_path), "--name", "run", *flags])
    run = run_gsm8k.Run(config)
    made = GRPOTrainer(trainer.load_policy(str(POCKET)))
    for step in (10, 20):
        trainer.save_checkpoint(run.checkpoints, step, made, None)
    os.truncate(run.checkpoints / "step_000020" / "model.safetensors", 1000)
    line = run_gsm8k.describe_failure(run, FloatingPointError("step 12: the loss of sample a is not finite"))
    again, _ = parse_config(shlex.split(line.split("start from the newest checkpoint with ")[1]))
    assert again == dataclasses.replace(config, model=str(run.checkpoints / "step_000010"), out="runs", name="")
    run.close()


def test_a_loss_that_another_process_of_the_trainer_finds_is_called_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed from the checkpoint the run would meet it again, so it must not pass for a process that failed."""
    import ray

    def get(call: Any, timeout: float | None) -> None:
        raise ray.exceptions.RayTaskError("update", "Traceback ...", call)

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(FloatingPointError, match=r"^step 3: not finite$"):
        run_gsm8k._answer_of(1, FloatingPointError("step 3: not finite"))
    with pytest.raises(RuntimeError, match=r"^trainer worker 1 failed: no room$"):
        run_gsm8k._answer_of(1, MemoryError("no room"))


def test_nohup_is_heard() -> None:
    """Where a hangup is ignored it stays ignored; elsewhere it ends the run like Ctrl-C."""
    before = signal.getsignal(signal.SIGHUP)
    try:
        for handler in (signal.SIG_IGN, signal.SIG_DFL):
            signal.signal(signal.SIGHUP, handler)
            with run_gsm8k.Interrupts() as interrupts:
                assert (signal.getsignal(signal.SIGHUP) is signal.SIG_IGN) == (handler is signal.SIG_IGN)
                interrupts.heard()
            assert signal.getsignal(signal.SIGHUP) is handler
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_checkpoint_has_all_that_a_run_needs_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But the reference of a KL, which is the model of the beginning; and steps that are made cannot be taken back."""
    model = shutil.copytree(POCKET, tmp_path / "model")
    newest = begun(tmp_path / "run", "--model", str(model)) / "checkpoints" / "step_000010"
    shutil.copytree(POCKET, newest)
    (newest / "state.json").write_text(json.dumps({"step": 10}))
    monkeypatch.setattr(trainer, "newest_checkpoint", lambda *_: newest)
    shutil.rmtree(model)

    def resumed(*argv: str) -> run_gsm8k.Run:
        return run_gsm8k.Run(parse_config(["--out", str(tmp_path), "--name", "run", "--resume", *argv])[0])

    assert resumed().source == str(newest) and resumed("--steps", "10").first_step == 10
    with pytest.raises(UsageError, match="model: no such folder"):
        resumed("--kl-coef", "0.1")
    with pytest.raises(UsageError, match=r"--steps 9: .*step_000010 has 10 of them already; give more"):
        resumed("--steps", "9")


def test_a_launch_without_a_step_leaves_the_timeline_and_says_whose_seconds_it_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Killed between its last checkpoint and its end, a run is evaluated when it is resumed; there is nothing to draw then."""
    run = run_gsm8k.Run(parse_config(["--preset", "pocket", "--out", str(tmp_path), "--steps", "3"])[0])
    run._make_folder()
    times = {f"time/{name}_s": 1.0 for name in ("step", "generate", "train", "sync")} | {"time/seconds": 1.0}
    run.rows = [{"step": step, "reward": 0.5, "response_length/mean": 9, **times} for step in range(3)]
    run.timeline, run.first_step = trainer.Timeline(), 3
    (run.folder / "timeline.json").write_text("of the launch before")
    run.save_timeline()
    run_gsm8k.summarize(run, {"before": None, "after": None, "fit_s": 0.0, "first_step_s": 1.0})
    assert (run.folder / "timeline.json").read_text() == "of the launch before"
    assert " since it was resumed, of which 1 before the first step and 0 for 0 steps" in capsys.readouterr().out
    run.close()


def test_the_prompt_length_that_is_asked_for_is_enough() -> None:
    """That of the longest prompt, and not of the first that is too long."""
    tokenizer, _ = run_gsm8k.load_tokenizer(str(POCKET))
    with pytest.raises(UsageError, match=r"a prompt has [0-9]+ tokens; give at least that") as refused:
        run_gsm8k.check_prompts(PocketProblems(), tokenizer, parse_config(["--preset", "pocket", "--prompt-length", "5"])[0])
    enough = str(refused.value).split("a prompt has ")[1].split()[0]
    run_gsm8k.check_prompts(PocketProblems(), tokenizer, parse_config(["--preset", "pocket", "--prompt-length", enough])[0])


def test_the_knobs_of_training_reach_the_trainer_and_its_models() -> None:
    """One that is parsed, saved and forgotten would look like a choice, and be none."""
    flags = """--learning-rate 0.5 --clip-low 0.3 --clip-high 0.4 --importance decoupled --loss-aggregation dr-grpo
        --group-size 3 --num-mini-batches 2 --kl-coef 0.1 --max-grad-norm 7 --micro-batch-tokens 99 --temperature 0.7
        --response-length 12""".split()
    more = "--preset pocket --no-normalize-by-std --gradient-checkpointing --dtype bfloat16 --attn-implementation eager".split()
    config, _ = parse_config(flags + more)
    made = run_gsm8k.make_trainer(config, config.model, None, "cpu")
    for name in flags[::2]:
        name = name.removeprefix("--").replace("-", "_")
        assert getattr(made, name) == getattr(config, name) != getattr(run_gsm8k.Config, name)
    assert not made.normalize_by_std and made.model.is_gradient_checkpointing
    for model in (made.model, made.reference):
        assert model.config._attn_implementation == "eager" and model.dtype == torch.bfloat16


def test_a_resumed_run_is_held_to_the_policy_that_it_began_with(tmp_path: Path) -> None:
    """And not to that of its checkpoint."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(POCKET, dtype=torch.float32)
    start = model.model.norm.weight.detach().clone()
    model.model.norm.weight.data *= 2
    model.save_pretrained(tmp_path)
    config, _ = parse_config(["--preset", "pocket", "--kl-coef", "0.1"])
    made = run_gsm8k.make_trainer(config, str(tmp_path), None, "cpu")
    assert torch.equal(made.model.model.norm.weight, 2 * start) and torch.equal(made.reference.model.norm.weight, start)


def test_what_was_not_measured_is_not_in_the_summary(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A run that is evaluated only since it was resumed has no accuracy before; and no error any more."""
    times = {f"time/{name}_s": 1.0 for name in ("step", "generate", "train", "sync")} | {"time/seconds": 1.0}
    run = run_gsm8k.Run(parse_config(["--preset", "pocket", "--out", str(tmp_path)])[0])
    run._make_folder()
    run.rows, run.timeline, run.test_prompts = (
        [{"step": 0, "reward": 0.5, "response_length/mean": 9, **times}],
        trainer.Timeline(),
        [1],
    )
    run.timeline.add("trainer", "train 0", 0.0, 1.0, 0)
    (run.folder / "error.txt").write_text("")
    after = {"accuracy": 0.75, "answered": 0.5}
    run_gsm8k.summarize(run, {"before": None, "after": after, "fit_s": 1.0, "first_step_s": 1.0})
    out = capsys.readouterr().out
    assert "held-out accuracy  0.750 after (1 problems, greedy)\nwith a #### number 0.500 after\n" in out
    assert " in all, of which 1 before" in out
    assert json.loads((run.folder / "summary.json").read_text())["before"] is None and not (run.folder / "error.txt").exists()
    run.close()


@pytest.mark.parametrize(
    ("text", "line"),
    [("", "cannot read"), ('{"seed": 0}', "is of another version of this program"), ("[1]", "cannot read")],
)
def test_a_config_that_cannot_be_resumed_is_named(text: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Cut off by a full disk, or of another version: one line, and the way out."""
    (begun(tmp_path / "run") / "config.json").write_text(text)
    assert run_gsm8k.main(["--out", str(tmp_path), "--name", "run", "--resume"]) == 2
    err = capsys.readouterr().err
    assert line in err and "start anew with another --name" in err and err.count("\n") == 1


def test_a_folder_is_one_runs_alone(tmp_path: Path) -> None:
    """Whoever comes second is told so, whether the first has just begun, or is being resumed; and may have it afterwards."""
    argv = ["--preset", "pocket", "--out", str(tmp_path), "--name", "run"]
    first, second = (run_gsm8k.Run(parse_config(argv)[0]) for _ in range(2))
    first._make_folder()
    with pytest.raises(UsageError, match="is in use by another run"):
        second._make_folder()
    again = run_gsm8k.Run(parse_config([*argv, "--resume"])[0])
    with pytest.raises(UsageError, match="is in use by another run"):
        again._make_folder()
    for run in (first, second, again):
        run.close()
    with pytest.raises(UsageError, match="exists already: another run has made it meanwhile"):
        second._make_folder()
    second.close()
    again._make_folder()
    again.close()


def test_a_run_that_another_has_gone_on_with_meanwhile_is_not_trained_again(tmp_path: Path) -> None:
    """Looked at while the other was still at work, locked after its end: its last steps would be dropped and made once more."""
    begun(tmp_path / "run")
    late = run_gsm8k.Run(parse_config(["--out", str(tmp_path), "--name", "run", "--resume"])[0])
    (late.checkpoints / "step_000020").mkdir(parents=True)
    with pytest.raises(UsageError, match="another run has gone on with it meanwhile; give the same command again"):
        late._make_folder()
    late.close()


def test_a_text_file_is_whole_or_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up in the middle leaves the file of before, and nothing beside it."""
    file = tmp_path / "config.json"
    run_gsm8k.write_whole(file, "old")

    def full(path: Path, text: str) -> None:
        with path.open("w") as opened:
            opened.write(text[:1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space left"):
            run_gsm8k.write_whole(file, "new")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_a_temporary_folder_with_a_long_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's name has at most 107 characters, and Ray puts 77 of its own behind."""
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 29)
    run_gsm8k.check_temporary_folder("")
    monkeypatch.setattr(tempfile, "tempdir", "/" + "x" * 30)
    run_gsm8k.check_temporary_folder("auto")
    with pytest.raises(UsageError, match=r"TMPDIR=/x+: .* at most 30 characters, such as /tmp"):
        run_gsm8k.check_temporary_folder("")


def test_of_what_an_actor_raised_the_cause_is_said(tmp_path: Path) -> None:
    """Ray's text begins with where it was, and ends, a traceback later, with what it was."""
    from ray.exceptions import RayTaskError

    run = make_run(tmp_path)
    error = RayTaskError("update_weights", "Traceback (most recent call last):\n  File ...\nValueError: why", ValueError("why"))
    for raised in (error, error.as_instanceof_cause()):
        assert run_gsm8k.describe_failure(run, raised).startswith("error: ValueError: why; ")
    assert not str(error).startswith("ValueError: why"), "else the rule is not needed any more"


def test_no_more_runs_ahead_than_the_run_has() -> None:
    """Of five steps with --max-staleness 8 no more than five batches are ever asked for."""
    argv = ["--preset", "pocket", "--mode", "partial", "--batch-size", "512", "--max-staleness", "8", "--steps"]
    assert parse_config([*argv, "5"])[0].steps == 5
    with pytest.raises(UsageError, match="36864 responses at once"):
        parse_config([*argv, "9"])


def test_a_worker_tokenizes_without_torch() -> None:
    """It knows the class of its tokenizer, which needs little of transformers; AutoTokenizer imports all of torch. Both say the
    same."""
    tokenizer, _ = run_gsm8k.load_tokenizer(str(POCKET))
    message = [{"role": "user", "content": "1 + 2"}]
    code = """
import pickle, sys
from partial_rollout import PartialSingleTurnAgentLoop
tokenizer = pickle.load(sys.stdin.buffer)()
loop = PartialSingleTurnAgentLoop(None, tokenizer, response_length=9, max_model_len=99, eos_token_ids=[])
ids = loop.encode_prompt([{"role": "user", "content": "1 + 2"}])
print(ids == [int(i) for i in sys.argv[1:]], loop.decode(ids) != "", "torch" in sys.modules)
"""
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    argv = [sys.executable, "-c", code, *map(str, ids)]
    root = Path(run_gsm8k.__file__).parent
    load_tokenizer = functools.partial(type(tokenizer).from_pretrained, str(POCKET))
    done = subprocess.run(argv, input=pickle.dumps(load_tokenizer), cwd=root, capture_output=True, timeout=120)
    assert done.stdout == b"True True False\n", done.stderr.decode()


def test_a_failure_says_how_to_go_on(tmp_path: Path) -> None:
    """With flags that find the run, whatever its name."""
    run = run_gsm8k.Run(parse_config(["--preset", "pocket", "--out", str(tmp_path / "my runs"), "--name", "exp/a"])[0])
    assert run_gsm8k.describe_failure(run, OSError("x")) == "error: x; --verbose shows its traceback"
    assert not run.folder.exists()
    run._make_folder()
    step = run.checkpoints / "step_000001"
    step.mkdir(parents=True)
    line = run_gsm8k.describe_failure(run, OSError("x"))
    flags = shlex.split(line.split("checkpoint with ")[1])
    assert (run.folder / "error.txt").exists() and parse_config(flags)[0].name == "exp/a"
    run.close()


def test_a_run_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A name that is taken is refused."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "metrics.jsonl").write_text("")
    assert run_gsm8k.main(["--preset", "pocket", "--out", str(tmp_path), "--name", "first"]) == 2
    assert "exists already: choose another --name" in capsys.readouterr().err


def test_a_broken_torchvision_is_named_with_its_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torchvision that does not import ends in the command that removes it, not in a traceback out of transformers."""
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="pip uninstall -y torchvision torchaudio torchcodec"):
        run_gsm8k.check_companions()


def test_the_preset_says_why_it_was_chosen() -> None:
    """Nothing falls back silently."""
    config, why = parse_config([])
    if not run_gsm8k.count_gpus():
        assert config.preset == "pocket" and "no GPU was found; choose another with --preset" in why
        config, why = parse_config(["--model", str(ROOT), "--data", str(ROOT)])
        assert config.preset == "gsm8k" and config.learning_rate == 1e-5 and "no GPU was found" in why
        with pytest.raises(
            UsageError, match="--preset gsm8k has no model of its own: give a Hugging Face folder or a hub name"
        ):
            parse_config(["--data", "gsm8k"])
    assert parse_config(["--preset", "qwen"])[0].dtype == "bfloat16"
    assert parse_config(["--preset", "qwen", "--dtype", "float32"])[0].dtype == "float32", "a flag goes before a preset"


def test_a_group_out_of_a_checkpoint_goes_on_as_it_began(tmp_path: Path) -> None:
    """Sampled at the temperature of the run, at the version that the servers have. It used to go on at vLLM's default, 1."""
    run = run_gsm8k.Run(parse_config(["--preset", "pocket", "--out", str(tmp_path), "--temperature", "0.7"])[0])
    run.trainer = SimpleNamespace(param_version=3)
    run.manager = SimpleNamespace(generate_groups=list, close=lambda: None)
    pool = GroupPool(batch_size=16, max_staleness=0, total=32)
    for number in pool.admit(0):
        cut = run.group(number)
        pool.put(number, cut.with_columns(stop_reason=["abort"] * len(cut)))
    pool.untrained(run.concat).save(tmp_path / "rollouts.npz")
    again = GroupPool(batch_size=16, max_staleness=0, total=32)
    again.restore(RolloutBatch.load(tmp_path / "rollouts.npz"))
    groups = run.generate_groups(list(again.resumable().values()))
    assert [group.meta_info for group in groups] == [{"sampling_params": {"temperature": 0.7}, "param_version": 3}] * 16


def servers_of(*actors: Any, server_timeout_s: float = 60) -> run_gsm8k.Servers:
    return run_gsm8k.Servers(actors, timeout_s=1800, server_timeout_s=server_timeout_s)


def test_a_weight_transfer_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends while the thread that sends still hangs: in asyncio's own pool it would be waited for."""
    import ray

    monkeypatch.setattr(ray, "put", lambda array: array)
    go_on, ended = threading.Event(), threading.Event()
    servers = run_gsm8k.Servers([], timeout_s=0.01, server_timeout_s=60)
    servers.transfer = SimpleNamespace(send=lambda version: (go_on.wait(60), ended.set()))
    with pytest.raises(TimeoutError):
        asyncio.run(servers.update(SimpleNamespace(param_version=1, weights=lambda: memoryview(b"weights"))))
    assert not ended.is_set()
    go_on.set()


@pytest.mark.parametrize("error", [RuntimeError("vLLM refused\n  it all"), TimeoutError()])
def test_a_server_that_cannot_be_brought_back_is_killed(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Whatever stands in the way: its requests would wait for weights that no one brings."""
    import ray

    async def ready() -> None:
        raise error

    killed = []
    monkeypatch.setattr(ray, "kill", lambda server, no_restart: killed.append((server, no_restart)))
    server = SimpleNamespace(ready=SimpleNamespace(remote=ready))
    assert asyncio.run(servers_of(server)._bring_back(0)) is False and killed == [(server, False)]
    why = str(error).split("\n")[-1].strip() or "did not answer within 60 s"
    assert f"vLLM server 0 cannot be brought back ({why}); it is killed and started again" in capsys.readouterr().out


class Method:
    """A method of an actor: what it answers, call by call, and with which options it was called."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked, self.sent = list(answers), [], []

    def options(self, **options: Any) -> Method:
        self.asked.append(options)
        return self

    def remote(self, *args: Any) -> Any:
        self.sent.append(args)
        future: concurrent.futures.Future = concurrent.futures.Future()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)

        class Ref:
            def future(self) -> concurrent.futures.Future:
                return future

            def __await__(self) -> Any:
                return asyncio.wrap_future(future).__await__()

        return Ref()


def test_a_server_that_died_and_is_up_again_unseen_gets_its_weights() -> None:
    """A call that should fail when it dies is kept by Ray while it is being started, and then waits on the new one for ever.
    But that one says, when asked, that it waits for weights."""
    server = SimpleNamespace(sleep_for_ever=Method(None), ping=Method(False, False, True))
    asyncio.run(asyncio.wait_for(servers_of(server)._until_it_dies(0, period_s=0.01), 60))
    assert server.ping.answers == []


def test_a_server_that_is_silent_is_killed_and_one_that_fails_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A ping that fails is of a server that is being started: nothing to kill."""
    import ray

    killed = []
    monkeypatch.setattr(ray, "kill", lambda server, no_restart: killed.append((server, no_restart)))
    starting = ray.exceptions.ActorUnavailableError("it is being started", None)
    failing = SimpleNamespace(sleep_for_ever=Method(None), ping=Method(starting, True))
    silent = SimpleNamespace(sleep_for_ever=Method(None), ping=Method(False, None))
    for server in (failing, silent):
        assert killed == []
        watch = servers_of(server, server_timeout_s=0.05)._until_it_dies(0, period_s=0.01)
        asyncio.run(asyncio.wait_for(watch, 60))
        assert server.ping.answers == []
    assert killed == [(silent, False)] and "vLLM server 0 did not answer within 0.05 s" in capsys.readouterr().out


def test_a_server_is_brought_back_between_two_syncs_and_only_if_it_has_no_weights() -> None:
    """Weights that come twice would cut what is in flight; while a sync goes on they may change."""
    server = SimpleNamespace(ready=Method({}, {}), ping=Method(False, True), update_weights=Method(0))
    servers = servers_of(server)
    servers.weights, servers.version = b"old", 3

    async def check() -> None:
        assert await servers._bring_back(0) and server.update_weights.sent == []
        async with servers.updating:
            back = asyncio.ensure_future(servers._bring_back(0))
            await asyncio.sleep(0.05)
            assert server.ping.answers == [True], "it was asked while a sync went on"
            servers.weights, servers.version = b"new", 4
        assert await asyncio.wait_for(back, 60) and server.update_weights.sent == [(b"new", 4)]

    asyncio.run(check())


def test_a_sync_reaches_every_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are laid out once, and sent to all with their version."""
    import ray

    monkeypatch.setattr(ray, "put", lambda array: array.tobytes())
    run = make_run(tmp_path)
    run.trainer = SimpleNamespace(param_version=7, weights=lambda: memoryview(b"weights"))
    run.servers = servers_of(*[SimpleNamespace(update_weights=Method(0)) for _ in range(3)])
    asyncio.run(run.sync())
    assert [server.update_weights.sent for server in run.servers.actors] == [[(b"weights", 7)]] * 3


def test_weights_for_a_server_that_dies_again_are_not_sent_twice() -> None:
    """Ray would send them to the next one, at any time, after newer ones too. It is brought back anew, and not killed."""
    import ray

    again = ray.exceptions.ActorUnavailableError("it is being started", None)
    server = SimpleNamespace(ready=Method({}, {}), ping=Method(True, True), update_weights=Method(again, 0))
    servers = servers_of(server)
    assert asyncio.run(servers._bring_back(0)) is False and asyncio.run(servers._bring_back(0)) is True
    assert server.update_weights.asked == [{"max_task_retries": 0}] * 2


# ---- GPUs, up to the call --------------------------------------------------------------------------------------------


def plan(gpus: int, *argv: str) -> run_gsm8k.Plan:
    return run_gsm8k.plan_devices(parse_config(["--preset", "pocket", *argv])[0], gpus)


@pytest.mark.parametrize(("capability", "fast"), [("AVX512", True), ("AVX2", False), ("DEFAULT", False)])
def test_a_cpu_on_which_bfloat16_is_slow_is_known(capability: str, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch names it, whose kernels these are."""
    assert torch.backends.cpu.get_cpu_capability() in ("AVX512", "AVX2", "DEFAULT"), "on x86-64"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert run_gsm8k._cpu_has_bfloat16() is fast


def test_every_part_gets_a_device() -> None:
    """None on a CPU machine; one GPU is shared; with more the trainer has the first, and Ray hands out the others."""
    on_cpu = {"kv_cache_memory_bytes": 512 << 20, "enforce_eager": True, "max_num_batched_tokens": 2048}
    assert plan(0, "--rollout-servers", "9").engine_args == on_cpu
    assert plan(0, "--max-num-seqs", "4096").engine_args["max_num_batched_tokens"] == 4096, "vLLM takes no less"
    one = plan(1)
    assert one.shared and one.server == {"CPU": 1} and one.engine_args["weight_transfer_config"] == {"backend": "ipc"}
    assert one.engine_args["gpu_memory_utilization"] == 0.4 and not one.engine_args["enable_sleep_mode"]
    asleep = plan(8, "--colocate", "--mode", "sync")
    assert asleep.shared and asleep.engine_args["gpu_memory_utilization"] == 0.6 and asleep.engine_args["enable_sleep_mode"]
    many = plan(8, "--rollout-servers", "3", "--tensor-parallel-size", "2", "--trainer-workers", "2")
    assert not many.shared and many.server == {"CPU": 1, "GPU": 2} and many.trainer == {"CPU": 1, "GPU": 1}
    assert many.engine_args["weight_transfer_config"] == {"backend": "nccl"}
    with pytest.raises(UsageError, match="--colocate: one server and one trainer take turns on one GPU; leave out"):
        plan(8, "--colocate", "--mode", "sync", "--rollout-servers", "2")
    alone = plan(1, "--colocate", "--mode", "sync", "--eval-only")  # no one to take turns with
    assert not alone.shared and not alone.engine_args["enable_sleep_mode"]
    with pytest.raises(UsageError, match="take 8 GPUs, and 7 are here: lower one of them"):
        plan(7, "--rollout-servers", "3", "--tensor-parallel-size", "2", "--trainer-workers", "2")
    with pytest.raises(UsageError, match=r"^--rollout-servers 1 with --tensor-parallel-size 2 take 2 GPUs, and 1 are here"):
        plan(1, "--eval-only", "--tensor-parallel-size", "2")
    only = plan(2, "--eval-only", "--tensor-parallel-size", "2")  # no trainer takes one
    assert not only.shared and only.server == {"CPU": 1, "GPU": 2} and only.engine_args["gpu_memory_utilization"] == 0.9
    assert plan(2, "--gpu-memory-utilization", "0.7").engine_args["gpu_memory_utilization"] == 0.7


def test_the_trainers_gpu_is_not_lent_to_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that lends all GPUs of this machine would give its first one, the trainer's, to a server as well."""
    import ray

    nodes = [{"NodeID": "there", "Resources": {"GPU": 8.0}}, {"NodeID": "here", "Resources": {"GPU": 4.0, "CPU": 9.0}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    with pytest.raises(UsageError, match=r"has 4 GPUs, and its Ray lends 4, .* by CUDA_VISIBLE_DEVICES=1,2,3 ray start"):
        run_gsm8k.check_first_gpu(4)
    run_gsm8k.check_first_gpu(5)
    del nodes[1]["Resources"]["GPU"]
    run_gsm8k.check_first_gpu(1)


@pytest.mark.parametrize("shared", [False, True])
def test_weights_go_from_gpu_to_gpu_by_vllms_own_transfer(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything up to NCCL: vLLM's trainer side is built as it wants to be, and each server's workers have their own ranks."""
    import ray
    import torch
    from vllm.distributed.weight_transfer import base, factory

    calls: list[tuple[str, int, Any]] = []

    class Server:
        def __init__(self, i: int) -> None:
            self.i = i

        def __getattr__(self, method: str) -> Any:
            call = SimpleNamespace(remote=lambda *args: calls.append((method, self.i, args)))
            call.options = lambda **_: call
            return call

    class Sender:  # vLLM's own, without the GPU
        def __init__(self, info: Any, client: Any, source: Any) -> None:
            self.info, self.client, self.names = info, client, [meta.name for meta in source.metadata()]
            client.init_weight_transfer_engine(
                {"packed": True} if shared else {"rank_offset": 1, "world_size": info.world_size}
            )

        def send_weights(self) -> None:
            self.client.start_weight_update()
            self.client.update_weights({"names": self.names})
            self.client.finish_weight_update()

    def trainer_init(init_info: Any, *, client: Any, source: Any) -> Sender:
        return Sender(init_info, client, source)

    assert {name for name in vars(base.VLLMWeightSyncClient) if not name.startswith("_")} <= set(dir(run_gsm8k.GPUTransfer))
    real, ours = map(inspect.signature, (factory.WeightTransferTrainerFactory.trainer_init, trainer_init))
    assert [(p.name, p.kind) for p in real.parameters.values()] == [(p.name, p.kind) for p in ours.parameters.values()]
    monkeypatch.setattr(factory.WeightTransferTrainerFactory, "trainer_init", trainer_init)
    monkeypatch.setattr(ray, "get", list)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    trainer = SimpleNamespace(model=torch.nn.Linear(2, 2), param_version=3)
    transfer = run_gsm8k.GPUTransfer([Server(0), Server(1)], trainer, plan(1) if shared else plan(5), 2)
    transfer.send(4)
    offsets = [args[0].get("rank_offset") for method, _, args in calls if method == "init_weight_transfer"]
    assert offsets == ([None, None] if shared else [1, 3])
    if not shared:
        assert transfer.engine.info.world_size == 5 and transfer.engine.info.is_sender
    assert [call for call in calls if call[0] == "update_weights"] == [
        ("update_weights", i, ({"names": ["weight", "bias"]}, 4)) for i in range(2)
    ]


# ---- The pocket policy -----------------------------------------------------------------------------------------------


def test_the_pocket_policy_is_small_and_stock() -> None:
    """At most 2 MB of weights, a stock architecture, a chat template, EOS and a pad of its own."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert (POCKET / "model.safetensors").stat().st_size <= 2_000_000
    model, tokenizer = AutoModelForCausalLM.from_pretrained(POCKET), AutoTokenizer.from_pretrained(POCKET)
    assert type(model).__name__ == "LlamaForCausalLM" and 500_000 < model.num_parameters() < 1_500_000
    assert tokenizer.chat_template and tokenizer.eos_token_id is not None
    assert tokenizer.pad_token_id not in (None, tokenizer.eos_token_id)
    text = "Zoë has 1,234 ▢ ünusual 数 things.\n#### 42"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


# ---- The command -----------------------------------------------------------------------------------------------------


def test_without_staleness_partial_mode_trains_what_sync_trains_to_the_bit(tmp_path: Path) -> None:
    """The one by groups, the other with a server that sleeps, without its weights, while training goes on."""
    asleep, _ = finished(tmp_path, "asleep", "--mode", "sync", "--colocate")
    partial, _ = finished(tmp_path, "partial", "--mode", "partial", "--max-staleness", "0")
    assert asleep == partial and [row["staleness/max"] for row in partial] == [0, 0, 0]
    lanes = trainer.Timeline.load(tmp_path / "asleep" / "timeline.json").spans
    spans = {lane: [(a, b) for name, _, a, b, _ in lanes if name == lane] for lane in ("server 0", "trainer")}
    assert not [1 for a, b in spans["server 0"] for c, d in spans["trainer"] if max(a, c) < min(b, d)], "by turns"


def test_partial_mode_cuts_and_resumes_responses_and_scores_them_as_they_are(tmp_path: Path) -> None:
    """Some have tokens of two versions, none is older than was allowed, and each sample has the reward of its text."""
    rows, _ = finished(tmp_path, "partial", "--mode", "partial", "--steps", "4", "--response-length", "160")
    assert max(row["partial_fraction"] for row in rows) > 0 and {row["staleness/max"] for row in rows} <= {0, 1}
    samples = [json.loads(line) for line in (tmp_path / "partial" / "samples.jsonl").read_text().splitlines()]
    assert len({sample["uid"] for sample in samples}) == len(samples) == 16
    for sample in samples:
        assert sample["reward"] == compute_reward(sample["response"], sample["ground_truth"])
        (problem,) = [p for p in PocketProblems().train(0, 0, 12) if p.question == sample["question"]]
        assert problem.answer == sample["ground_truth"]


def apart(mark: Path, temporary: Path) -> dict[str, str]:
    """An environment by which a run's processes and temporary files can be told from others. torch's cache may stay."""
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
    return {**os.environ, "RUN_MARK": str(mark), "TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": cache}


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """A folder for temporary files of a run, with a name that is short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        yield Path(folder)


def test_ctrl_c_ends_the_run_and_leaves_nothing(tmp_path: Path, short_tmp: Path) -> None:
    """Interrupted while it trains: status 130, one line, and every process and temporary file of the run is gone."""
    run = command(
        "--out",
        str(tmp_path),
        "--name",
        "cut",
        "--steps",
        "1000",
        "--mode",
        "sync",
        env=apart(tmp_path, short_tmp),
    )
    metrics = tmp_path / "cut" / "metrics.jsonl"
    end = time.monotonic() + 240
    while not metrics.exists():
        assert time.monotonic() < end and run.poll() is None, run.communicate()
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130 and err.strip().splitlines()[-1] == "interrupted", err
    end = time.monotonic() + 30
    while left := [*processes(str(tmp_path)), *short_tmp.iterdir()]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


@pytest.mark.parametrize("seconds", [3.5, 5.0])
def test_sigterm_while_ray_starts_leaves_nothing_behind(seconds: float, tmp_path: Path, short_tmp: Path) -> None:
    """Ray has its own handler then, and forgets processes that have just been started."""
    run = command("--out", str(tmp_path), "--name", "cut", env=apart(tmp_path, short_tmp))
    time.sleep(seconds)
    run.terminate()
    _, err = run.communicate(timeout=60)
    assert run.returncode == 130 and err.strip().splitlines()[-1] == "interrupted", err
    end = time.monotonic() + 30
    while left := [*processes(str(tmp_path)), *short_tmp.iterdir()]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


HANDLER, DESTRUCTOR, LIBRARY = "a handler of someone else's", "a destructor", "nothing, but a C library takes its time"


@pytest.mark.parametrize(
    ("number", "lost_in"),
    [(signal.SIGTERM, HANDLER), (signal.SIGTERM, DESTRUCTOR), (signal.SIGINT, DESTRUCTOR), (signal.SIGTERM, LIBRARY)],
)
def test_an_interrupt_that_is_lost_comes_again(number: int, lost_in: str) -> None:
    """A SIGTERM was once lost in the imports of Ray, and the run went on. Once one is heard, no other disturbs the end.

    Nor does the one that comes again where the first was only late: as another signal it was raised out of the handling of
    the first, and the run ended with status 15.
    """
    code = f"""
import hashlib, os, signal, sys, time, run_gsm8k
class Loser:
    def __del__(self):
        if {lost_in == DESTRUCTOR}:
            print("ready", flush=True)  # only here: a signal that comes earlier is not lost
        time.sleep(0.5)
lost = []
def rays(*_):
    if not lost and {lost_in == HANDLER}:
        return lost.append(print("lost", flush=True))
    sys.exit(15)
with run_gsm8k.Interrupts() as interrupts:
    try:
        if {lost_in != DESTRUCTOR}:
            signal.signal({int(number)}, rays)
        start = time.monotonic()
        hashlib.pbkdf2_hmac("sha512", b"", b"", 10**5)
        many = int(5e5 / (time.monotonic() - start))
        if {lost_in != DESTRUCTOR}:
            print("ready", flush=True)
        if {lost_in == LIBRARY}:
            hashlib.pbkdf2_hmac("sha512", b"", b"", many)  # 5 s in C, without the interpreter's lock: no handler runs meanwhile
        loser = Loser()
        del loser
        time.sleep(30)
    except (KeyboardInterrupt, SystemExit):
        for _ in range(1000):
            pass
        interrupts.heard()
        os.kill(os.getpid(), {int(number)})
        time.sleep(0.1)
        print("heard")
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, text=True, **pipes)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    lost = "lost" in out if lost_in == HANDLER else "Exception ignored in" in err if lost_in == DESTRUCTOR else not err
    assert lost and out.endswith("heard\n") and process.returncode == 0, (out, err)


def test_no_descendant_survives_however_fast_they_multiply() -> None:
    """An orphan that starts orphans, each in a session of its own: whichever moment the look at them falls into, all end."""
    shell = 'setsid sh -c "while :; do setsid sleep 1000 & sleep 0.001; done" & sleep 0.3; exit'
    code = f"""
import subprocess, psutil, run_gsm8k
run_gsm8k.adopt_orphans()
for _ in range(5):
    subprocess.run(["sh", "-c", {shell!r}])
    many = len(psutil.Process().children(recursive=True))
    run_gsm8k.kill_descendants()
    left = [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
    assert many > 10 and not left, (many, left)
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_the_docstring_examples_are_true() -> None:
    """What the documentation shows is what the code does."""
    result = doctest.testmod(run_gsm8k)
    assert result.attempted and not result.failed
