import os
import subprocess
import sys

import pytest

# Takes and frees 16 MiB again and again, and counts the pages that the system had to clear.
PROBE = """
import resource
import torch
from modeling_tinytfm.allocator import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(2**21) + torch.ones(2**21)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(keep_freed_memory())
faults()
print(faults())
"""


def probe(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told anything")
def test_freed_memory_is_used_again_without_asking_the_system():
    kept, faults = probe()
    assert kept == "True"
    assert int(faults) < 100  # of 20 times 3 tensors of 2,048 pages


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_TRIM_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.check=0")],
)
def test_a_users_own_choice_stands(name, value):
    kept, _ = probe(**{name: value})
    assert kept == "False"
