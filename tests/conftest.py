"""The order of the files, which keeps both test processes busy to the end and whole runs apart: each pins its engine to the
second half of the cores, so two of them at once wait for the same one."""

import pytest

FIRST = ["test_run_gsm8k.py", "test_partial_rollout.py", "test_runs.py", "test_trainer.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))
