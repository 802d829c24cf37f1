"""What has to be settled before torch is loaded; each script that computes begins with it.

Whatever the user has set stands.
"""

import os
import platform
import sys
from pathlib import Path

VARIABLES = {
    # Programs for products of matrices that oneDNN keeps, one for each shape. Batches of an epoch
    # have thousands of shapes; where they do not all fit, each is compiled anew every time.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "10000",
    # A progress bar is for what takes longer than this many seconds.
    "TQDM_DELAY": "1",
}
RESTARTED = "TINYTFM_RESTARTED"  # once, even where LD_PRELOAD gets lost
TCMALLOC = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
FOLDERS = (
    Path(sys.prefix) / "lib",  # conda's
    Path(f"/usr/lib/{platform.machine()}-linux-gnu"),  # Debian, Ubuntu
    Path("/usr/lib64"),
    Path("/usr/lib"),
)


def prepare() -> None:
    """Sets variables that libraries read when they are loaded, and preloads tcmalloc."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    if "OMP_WAIT_POLICY" not in os.environ:
        # How long a thread that waits for work spins. Sleeping at once makes small models 1.6
        # times slower; spinning for long, all else on a busy machine.
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    preload_tcmalloc()


def preload_tcmalloc() -> None:
    """Starts this process anew with tcmalloc for its allocator, if that is installed.

    glibc's allocator is not made for tensors: it gives memory back to the system and takes it again
    in every step, and what it keeps falls to pieces as batches of other shapes come.
    """
    if sys.platform != "linux" or "LD_PRELOAD" in os.environ or RESTARTED in os.environ:
        return
    if sys.argv[0] not in sys.orig_argv or sys.gettrace() is not None:
        return  # run by another program, or under a debugger
    places = (str(folder / name) for folder in FOLDERS for name in TCMALLOC)
    # Spaces and colons part the names of several libraries.
    usable = (place for place in places if not {" ", ":"} & {*place} and os.path.exists(place))
    if library := next(usable, None):
        # It tells of every gigabyte otherwise.
        os.environ.setdefault("TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD", str(2**60))
        os.environ.update({"LD_PRELOAD": library, RESTARTED: "1"})
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
