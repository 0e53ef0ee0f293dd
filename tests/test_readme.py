"""What the documents say is what the program does: excerpts, examples, flags, links, messages, and the lines on the path."""

from __future__ import annotations

import ast
import asyncio
import inspect
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load

import one_step_off
import partial_rollout
import run_gsm8k
import trainer

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PATH = (ROOT / "docs" / "path.md").read_text()
MODULES = {module.__name__: module for module in (one_step_off, partial_rollout, trainer, run_gsm8k)}
TESTS = "".join(path.read_text() for path in (ROOT / "tests").glob("test_*.py"))


def block(mark: str) -> str:
    """The python block under the comment `mark`."""
    return re.search(rf"<!-- {re.escape(mark)} -->\n```python\n(.*?)\n```", README, re.S)[1]


def named(name: str) -> Any:
    """The object that "module.Class.method" names."""
    module, *path = name.split(".")
    found = MODULES[module]
    for part in path:
        found = getattr(found, part)
    return found


def source(name: str) -> str:
    return inspect.getsource(named(name))


# ---- Excerpts and examples -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", re.findall(r"<!-- source: (\S+) -->", README))
def test_an_excerpt_is_the_source(name: str) -> None:
    assert block(f"source: {name}") == source(name).rstrip()


def test_all_three_loops_are_quoted() -> None:
    assert re.findall(r"<!-- source: trainer\.(\w+) -->", README) == ["fit_sync", "fit_one_step_off", "fit_partial"]


def test_the_example_for_bare_vllm_runs(tmp_path: Path) -> None:
    """Real vLLM: a response is cut, resumed, and is as if it had never been."""
    (tmp_path / "example.py").write_text(block("run: partial_rollout"))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(tmp_path / "example.py")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "cut after" in done.stdout and "as if never cut: True" in done.stdout


def test_the_example_for_ray_alone_runs(tmp_path: Path) -> None:
    """Real Ray, in a process of its own: all samples of all batches come back in order."""
    (tmp_path / "example.py").write_text(block("run: one_step_off"))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, str(tmp_path / "example.py")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert [line.split(": ")[1] for line in lines] == [", ".join(f"{t}-{i}" for i in range(4)) for t in range(4)]


def test_the_example_for_a_task_of_ones_own_is_a_stream_of_problems_with_right_answers() -> None:
    """The same problem at the same place, however it is asked for; prompts and rewards are made of it as of any other."""
    space: dict[str, Any] = {}
    exec(block("run: task"), space)
    sums = space["Sums"]()
    assert sums.train(5, 0, 9)[3:5] == sums.train(5, 3, 2) != sums.train(6, 3, 2) and sums.longest(2) == sums.test(2)
    for problem in sums.train(0, 0, 20):
        a, b = map(int, re.findall(r"\d+", problem.question)[:2])
        assert (
            run_gsm8k.compute_reward(f"#### {a + b}", problem.answer)
            == 1
            > run_gsm8k.compute_reward("#### 500", problem.answer)
        )
    prompts = run_gsm8k.make_prompts(sums.test(2), "test", 3, 0, temperature=1.0)
    assert len(set(prompts["uid"])) == 6 and prompts["ground_truth"][0] == sums.test(1)[0].answer


def test_the_example_for_trl_gives_what_rollout_func_must_give() -> None:
    """Every call in the same event loop; new weights go to the server once per step, before anything is generated."""
    seen: list[Any] = []

    class Server:
        param_version = 0

        async def update_weights(self, weights: bytes, param_version: int) -> None:
            seen.append((load(weights)["weight"].tolist(), param_version))
            self.param_version = param_version

    async def run(params: dict[str, float], raw_prompt: list[dict[str, str]], param_version: int) -> SimpleNamespace:
        assert params == {"temperature": 0.9}
        seen.append((asyncio.get_running_loop(), param_version))
        ids = [ord(c) for c in raw_prompt[0]["content"]]
        return SimpleNamespace(prompt_ids=ids, response_ids=ids[:1], response_logprobs=[-0.5])

    space: dict[str, Any] = {"server": Server(), "loop": SimpleNamespace(run=run)}
    exec(block("run: trl"), space)
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data[:] = 7.0
    prompts = [[{"role": "user", "content": text}] for text in ("ab", "c")]
    for step in (0, 1, 1):
        trl = SimpleNamespace(args=SimpleNamespace(temperature=0.9), state=SimpleNamespace(global_step=step), model=model)
        result = space["rollout_func"](prompts, trl)
        assert result == {"prompt_ids": [[97, 98], [99]], "completion_ids": [[97], [99]], "logprobs": [[-0.5], [-0.5]]}
    assert seen[2] == ([[7.0]], 1) and [version for _, version in seen] == [0, 0, 1, 1, 1, 1, 1]
    assert len({x for x, _ in seen if not isinstance(x, list)}) == 1
    space["runner"].close()


def test_the_example_for_verl_pads_as_verl_does() -> None:
    """Prompts end and responses begin at the same column; positions count from the first real token."""
    space: dict[str, Any] = {}
    exec(block("run: verl"), space)
    pack = one_step_off.Ragged.pack
    rollouts = one_step_off.RolloutBatch(
        {
            "prompt_ids": pack([[5, 6], [7]], np.int32),
            "response_ids": pack([[8], [9, 10, 11]], np.int32),
            "response_mask": pack([[1], [1, 1, 1]], np.int8),
            "response_logprobs": pack([[-0.5], [-1.0, -2.0, -3.0]], np.float32),
            "group": ["step0-0", "step0-1"],
        }
    )
    batch = {name: tensor.tolist() for name, tensor in space["to_verl"](rollouts, 0).items()}
    assert batch["prompts"] == [[5, 6], [0, 7]] and batch["responses"] == [[8, 0, 0], [9, 10, 11]]
    assert batch["input_ids"] == [[5, 6, 8, 0, 0], [0, 7, 9, 10, 11]]
    assert batch["attention_mask"] == [[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]]
    assert batch["position_ids"] == [[0, 1, 2, 2, 2], [0, 0, 1, 2, 3]]
    assert batch["response_mask"] == [[1, 0, 0], [1, 1, 1]]
    assert batch["rollout_log_probs"] == [[-0.5, 0, 0], [-1, -2, -3]]
    assert torch.is_tensor(space["to_verl"](rollouts, 0)["prompts"])
    assert batch["uid"] == ["step0-0", "step0-1"], "verl compares the responses that have the same"


# ---- Commands, flags, links, messages --------------------------------------------------------------------------------


def help_of(script: str) -> str:
    return subprocess.run([sys.executable, str(ROOT / script), "--help"], capture_output=True, text=True, check=True).stdout


def test_every_command_is_there_and_knows_its_flags() -> None:
    """Each `python ...` of the documents: the file exists, and its --help has each flag."""
    code = re.findall(r"```bash\n(.*?)```", README, re.S) + re.findall(r"`(python [^`]+)`", README + PATH)
    commands = [part.strip() for text in code for part in re.split(r"&&|\n", text) if part.strip().startswith("python ")]
    assert len(commands) > 10
    known: dict[str, str] = {}
    for command in commands:
        script, *words = command.split()[1:]
        assert (ROOT / script).exists(), command
        flags = [word for word in words if word.startswith("--")]
        if flags and script not in known:
            known[script] = help_of(script)
        for flag in flags:
            assert re.search(rf"{flag}\b", known[script]), command


def test_every_flag_is_in_the_help() -> None:
    text = help_of("run_gsm8k.py")
    flags = set(re.findall(r"`(--[a-z-]+)", README))
    assert len(flags) > 10
    for flag in flags - {"--extra-index-url"}:  # pip's
        assert re.search(rf"{flag}\b", text), flag
    assert len(text.splitlines()) < 100, "--help fits on two screens"


def test_no_place_for_a_figure_is_left_empty() -> None:
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        assert not re.search(r"@@|@[A-Z]+@", path.read_text()), path


def test_links_point_to_what_is_there() -> None:
    """Files of this repository; verl's at the pinned commit."""
    for folder, text in ((ROOT, README), (ROOT / "docs", PATH)):
        for target in re.findall(r"\]\(([^)]+)\)", text):
            if target.startswith("https://github.com/"):
                assert "/b178a3c/" in target, target
            elif not target.startswith("https://"):
                assert (folder / target.partition("#")[0]).exists(), target


def test_troubleshooting_quotes_messages_that_the_program_has() -> None:
    """Word by word, where "..." stands for a value."""
    program = re.sub(r'"\s*\n\s*f?"', "", "".join(map(inspect.getsource, MODULES.values())))
    table = README[README.index("## Troubleshooting") :]
    messages = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    ours = [message for message in messages if "torch" not in message]
    assert len(ours) >= 6
    for message in ours:
        for quoted in re.findall(r"`([^`]+)`", message):
            for piece in filter(None, (part.strip(" :") for part in quoted.split("..."))):
                assert piece in program, piece


def test_every_metric_of_a_run_is_explained() -> None:
    """The keys as they stand in the code; test_run_gsm8k.py looks at those of a real run."""
    table = README[README.index("| metric |") : README.index("## Names")]
    keys = re.findall(
        r'"((?:time|staleness|response_length|eval)/\w+)"', inspect.getsource(trainer) + inspect.getsource(run_gsm8k)
    )
    assert len(set(keys)) > 10
    for key in keys:
        assert f"`{key}`" in table, key


def test_the_files_are_as_long_as_we_say() -> None:
    rows = re.findall(r"^\| \[(\w+\.py)\]\(\1\) \| ([\d,]+) \|", README, re.M)
    assert [name for name, _ in rows] == [f"{name}.py" for name in MODULES]
    for name, lines in rows:
        assert len((ROOT / name).read_text().splitlines()) == pytest.approx(int(lines.replace(",", "")), rel=0.03), name


# ---- The path of a sample --------------------------------------------------------------------------------------------


def code_lines(name: str) -> int:
    """Lines of a function without docstring, comments and blank lines."""
    text = textwrap.dedent(source(name))
    body = ast.parse(text).body[0].body
    docstring = body[0] if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else None
    skipped = range(docstring.lineno, docstring.end_lineno + 1) if docstring else ()
    lines = enumerate(text.splitlines(), start=1)
    return sum(1 for i, line in lines if line.strip() and not line.strip().startswith("#") and i not in skipped)


def test_the_path_from_prompt_to_gradient_is_as_long_as_we_say() -> None:
    way, called, _ = re.split(r"^## ", PATH, flags=re.M)
    for text, end in ((way, "in all"), (called, "more")):
        rows = re.findall(r"^\| `([\w.]+)` \| (\d+) \|", text, re.M)
        assert len(rows) > 10
        assert {name: code_lines(name) for name, _ in rows} == {name: int(n) for name, n in rows}
        assert sum(int(n) for _, n in rows) == int(re.search(rf"^(\d+) lines {end}", text, re.M)[1]) <= 450


def test_each_pitfall_has_a_place_and_an_experiment() -> None:
    rows = re.findall(r"^\| [^|]+ \| `([\w.]+)` \| `(test_\w+)` \|", PATH, re.M)
    assert len(rows) == 10
    for where, experiment in rows:
        assert named(where) and f"def {experiment}(" in TESTS, (where, experiment)


def test_every_public_name_has_a_docstring_and_every_module_opens_with_a_timeline_or_a_picture() -> None:
    for module in MODULES.values():
        assert len(module.__doc__.splitlines()) <= 40 and "    " in module.__doc__.split("\n\n")[1], module.__name__
        for name, item in vars(module).items():
            if getattr(item, "__module__", None) == module.__name__ and not name.startswith("_"):
                assert item.__doc__, name
                for attribute, member in vars(item).items() if inspect.isclass(item) else ():
                    if inspect.isfunction(member) and member.__name__ == attribute and attribute[0] != "_":
                        assert member.__doc__, f"{name}.{attribute}"


def test_a_public_function_that_takes_or_gives_arrays_says_their_shape() -> None:
    for module in MODULES.values():
        mine = [
            item for name, item in vars(module).items() if getattr(item, "__module__", "") == module.__name__ and name[0] != "_"
        ]
        functions = [item for item in mine if inspect.isfunction(item)]
        functions += [
            f for item in mine if inspect.isclass(item) for n, f in vars(item).items() if inspect.isfunction(f) and n[0] != "_"
        ]
        for function in functions:
            signature = str(inspect.signature(function)).replace("dict[str, Tensor]", "")  # named tensors have many shapes
            if re.search(r"\b(Tensor|ndarray|Ragged)\b", signature):
                assert re.search(r"\((n|N|B|L|rows|sum|\d)[^()]*\)|scalar", function.__doc__), function.__qualname__
