"""Fixtures that several test modules share."""

import gc
import os
import subprocess
import sys

# No test may reach a network: what needs the Hub must fail at once, not after a time-out.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import datasets
import pytest
import torch
from tiny import reversal_batch, tiny_config
from transformers.utils import logging

from modeling_tinytfm import TinyTFMForConditionalGeneration, experiment


@pytest.fixture(autouse=True)
def _repeatable():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # Commands that run in this process ask for less to be said.
    verbosity = logging.get_verbosity()
    yield
    logging.set_verbosity(verbosity)


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A working folder and a cache of its own, and nothing left of what a run sets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    # What takes longest in runs as small as these: curves, and searching all objects for garbage.
    monkeypatch.setattr(experiment, "draw_curves", lambda *_, **__: None)
    gc.freeze()
    yield tmp_path
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def reverser(tmp_path_factory) -> TinyTFMForConditionalGeneration:
    """A tiny model, trained to reverse strings: its beams differ and stop at different lengths."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    model = TinyTFMForConditionalGeneration(tiny_config()).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    steps = 450
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
    for _ in range(steps):
        model(**reversal_batch(64, generator)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return model.eval()


@pytest.fixture
def elsewhere(tmp_path):
    """Runs Python code in a fresh process that cannot import this package; returns its output.

    The process has an empty cache of Hub code, no network, and `tmp_path` as working folder.
    Keywords add to its environment.
    """

    def run(code: str, *arguments: str, timeout: float = 120, **more: str) -> str:
        blocker = tmp_path / "blocker"
        blocker.mkdir(exist_ok=True)
        # An installed copy of the package would be found otherwise.
        (blocker / "sitecustomize.py").write_text(
            "import sys\nsys.modules['modeling_tinytfm'] = None\n"
        )
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(blocker),
            "HF_HOME": str(tmp_path / "hf_home"),
            "HF_MODULES_CACHE": str(tmp_path / "hf_modules"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        finished = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            env=environment | more,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    return run
