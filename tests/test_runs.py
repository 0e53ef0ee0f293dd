"""Whole runs on real Ray and vLLM beside one that nothing happened to: killed, broken, doubled, evaluated only."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

import run_gsm8k
import trainer
from processes import SMALL, command, finished, metrics_of, processes

ROOT = Path(run_gsm8k.__file__).parent


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `whole` has written."""
    return tmp_path_factory.mktemp("runs") / "whole"


@pytest.fixture(scope="module")
def whole(whole_folder: Path) -> list[dict[str, float]]:
    """The metrics of a one-step-off run on real Ray and vLLM that nothing happened to: staleness 0, 1, 1, and all files."""
    rows, out = finished(whole_folder.parent, "whole")
    assert "preset pocket" in out and "held-out accuracy" in out and str(whole_folder) in out
    assert [row["staleness/mean"] for row in rows] == [0, 1, 1] and [row["staleness/max"] for row in rows] == [0, 1, 1]
    assert all(abs(row["sampler_ratio"] - 1) < 1e-3 for row in rows[:1]), "sampler and trainer compute the same probabilities"
    for name in ("curve.png", "timeline.png", "timeline.json", "samples.jsonl", "config.json", "checkpoints/step_000003"):
        assert (whole_folder / name).exists(), name
    timeline = trainer.Timeline.load(whole_folder / "timeline.json")
    assert {lane for lane, *_ in timeline.spans} == {"server 0", "sync", "trainer"}
    assert [name for lane, name, *_ in timeline.spans if lane == "server 0"].count("evaluate") == 2, "before and after"
    return rows


def test_a_run_that_is_killed_and_resumed_is_the_same_to_the_bit(
    tmp_path: Path, whole: list[dict[str, float]], capsys: pytest.CaptureFixture
) -> None:
    """Killed -9 and resumed, a run writes the lines of one that nothing happened to.

    This one is evaluated at every step, which must change nothing, and finds a checkpoint that is harmed.
    """
    killed = command("--out", str(tmp_path), "--name", "killed", "--eval-every", "1", start_new_session=True)
    checkpoint = tmp_path / "killed" / "checkpoints" / "step_000001"
    end = time.monotonic() + 240
    while not checkpoint.exists():
        assert time.monotonic() < end and killed.poll() is None, killed.communicate()
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    harmed = shutil.copytree(checkpoint, checkpoint.with_name("step_000009"))
    os.truncate(harmed / "model.safetensors", 1000)
    resumed = command("--out", str(tmp_path), "--name", "killed", "--resume")
    out, err = resumed.communicate(timeout=240)
    assert resumed.returncode == 0, err
    assert "step_000009 is incomplete (model.safetensors differs from its checksum): skipped" in out
    assert "resuming" in out and "step_000009" not in out.split("resuming")[1]
    assert metrics_of(tmp_path / "killed") == whole
    last = (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()[-1]
    assert 0 <= json.loads(last)["eval/accuracy"] <= 1
    assert all(f"`{key}`" in (ROOT / "README.md").read_text() for key in json.loads(last) if key != "step"), "explained"
    assert run_gsm8k.main([*SMALL, "--out", str(tmp_path), "--name", "killed", "--resume"]) == 0
    assert "nothing left to do" in capsys.readouterr().out and metrics_of(tmp_path / "killed") == whole


def test_a_run_whose_engine_and_worker_are_killed_loses_nothing(tmp_path: Path, whole: list[dict[str, float]]) -> None:
    """Each is started again, the engine gets the current weights first, and the run is that of one that nothing happened to."""
    run = command("--out", str(tmp_path), "--name", "faulty", env={**os.environ, "RUN_MARK": str(tmp_path)})
    end = time.monotonic() + 240
    while not (tmp_path / "faulty" / "metrics.jsonl").exists():
        assert time.monotonic() < end and run.poll() is None, run.communicate()
        time.sleep(0.02)
    for title in ("EngineCore", "ray::AgentLoopWorker"):
        next(processes(str(tmp_path), title)).kill()
    out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert "vLLM server 0 was started again, and has the weights of version" in out, out
    names = "reward", "response_length/mean", "response_length/max", "staleness/mean", "staleness/max"
    curves = [[[row[name] for name in names] for row in rows] for rows in (metrics_of(tmp_path / "faulty"), whole)]
    assert curves[0] == curves[1]


def test_two_of_everything_are_one_run(tmp_path: Path, whole: list[dict[str, float]]) -> None:
    """Two workers, two servers and two trainer processes give the curve of one of each: a response depends on its seed, and not
    on who generates it; a gradient is a sum, whoever adds it up."""
    flags = "--workers 2 --rollout-servers 2 --trainer-workers 2 --steps 3".split()
    rows, out = finished(tmp_path, "two", *flags)
    assert "vLLM server 1 on" in out and "2 processes together" in out
    for name in ("reward", "response_length/mean", "response_length/max", "staleness/mean", "zero_spread_groups"):
        assert [row[name] for row in rows] == [row[name] for row in whole], name
    assert [row["grad_norm"] for row in rows] == pytest.approx([row["grad_norm"] for row in whole], rel=1e-3)


def test_a_policy_is_evaluated_as_it_is_and_nothing_is_written(
    tmp_path: Path, whole: list[dict[str, float]], whole_folder: Path
) -> None:
    """The accuracy that a run has before it trains."""
    run = command("--out", str(tmp_path / "runs"), "--eval-only")
    out, err = run.communicate(timeout=240)
    before = json.loads((whole_folder / "before.json").read_text())
    assert run.returncode == 0 and not (tmp_path / "runs").exists(), err
    assert f"held-out accuracy  {before['accuracy']:.3f} of 16 problems, greedy" in out
