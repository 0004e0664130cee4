import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))

import ranks  # noqa: E402

import mok  # noqa: E402


def pytest_report_header(config):
    backends = {name: info.detail.decode() for name, info in mok.backends().items()}
    return [f"libmok {mok.version()} from {mok._library.library().path}", *(f"backend {name}: {detail}" for name, detail in backends.items())]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """What a GPU cannot do yet is a skip there, with the library's sentence. On the CPU everything is done."""
    try:
        return (yield)
    except (mok.UnsupportedError, ranks.RankFailed) as refusal:
        lines = [line for line in str(refusal).splitlines() if "backend cuda" in line]
        if os.environ.get("MOK_TEST_DEVICE", "cpu") != "cuda" or not lines:
            raise
        pytest.skip(lines[-1].strip())


@pytest.fixture(scope="session")
def device():
    """MOK_TEST_DEVICE=cuda runs the tests on a GPU; ranks are virtual there."""
    return torch.device(os.environ.get("MOK_TEST_DEVICE", "cpu"))


@pytest.fixture(scope="session")
def run_ranks(device):
    """run_ranks(P, job, ...): processes on the CPU, virtual ranks on a GPU."""

    def run(count, job, *arguments, **options):
        if device.type == "cpu":
            return ranks.processes(count, job, *arguments, **options)
        return ranks.threads(count, job, *arguments, device=device, **options)

    return run


@pytest.fixture(autouse=True)
def poison():
    """New schedules and contexts hold garbage, so that nothing lives on zeros."""
    mok._workspace.fill = 0xA5
    torch.manual_seed(0)
    yield
    mok._workspace.fill = None


def pytest_sessionfinish(session, exitstatus):
    ranks.close()
