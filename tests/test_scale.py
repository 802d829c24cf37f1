"""Several processes, sharded weights, several machines; speed, FLOPs and what the log says of them.

Functions that `launch` runs in processes of their own stand at the module's top level.
"""

import copy
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
import yaml
from accelerate import DistributedType
from packaging.version import Version
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_experiment import RECIPE, write_pairs
from test_training import (  # noqa: F401 - two are fixtures
    arguments,
    assert_equal_weights,
    fork_server,
    history,
    launch,
    make_trainer,
    pairs,
    weights,
)
from tiny import redraw, tiny_config, tiny_model, token_ids
from torch import nn
from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForSeq2SeqLM

from modeling_tinytfm import (
    TinyTFMForCausalLM,
    TinyTFMForConditionalGeneration,
    TinyTFMForSequenceClassification,
    flops,
    machine,
)
from modeling_tinytfm.checkpoints import (
    average_checkpoints,
    last_checkpoints,
    last_complete_checkpoint,
    what_is_missing,
)
from modeling_tinytfm.experiment import prepare, run_recipe
from modeling_tinytfm.flops import (
    SpeedMeter,
    TokenCounts,
    describe_flops,
    peak_flops,
    training_flops,
    weights_per_token,
)
from modeling_tinytfm.recipes import load_recipe
from modeling_tinytfm.sharding import FIRST_VERSION, check_sharding, copy_whole
from modeling_tinytfm.training import TinyTFMTrainer

ROOT = Path(__file__).parents[1]
ACCELERATE = ROOT / "configs" / "accelerate"

# Model FLOPs

ENCODER_ONLY = {"is_encoder_decoder": False, "is_decoder": False, "num_labels": 7}
DECODER_ONLY = {"is_encoder_decoder": False, "is_decoder": True}
SHAPES = {
    "translation": (TinyTFMForConditionalGeneration, {}),
    "untied, Pre-Norm": (
        TinyTFMForConditionalGeneration,
        {"tie_word_embeddings": False, "norm_first": True, "output_bias": True},
    ),
    "uneven": (
        TinyTFMForConditionalGeneration,
        {"encoder_layers": 3, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 80},
    ),
    "language model": (TinyTFMForCausalLM, DECODER_ONLY),
    "classes of text": (TinyTFMForSequenceClassification, ENCODER_ONLY),
    "classes of features": (
        TinyTFMForSequenceClassification,
        {**ENCODER_ONLY, "input_feature_size": 28},
    ),
}


def full_batch(config, rows=3, source=11, target=6) -> dict[str, torch.Tensor]:
    """Rows without padding, for a model of any shape."""
    if config.is_decoder and not config.is_encoder_decoder:
        ids = token_ids(rows, target)
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    mask = torch.ones(rows, source, dtype=torch.long)
    if config.input_feature_size is not None:
        inputs = {"input_features": torch.randn(rows, source, config.input_feature_size)}
    else:
        inputs = {"input_ids": token_ids(rows, source)}
    labels = token_ids(rows, target) if config.is_encoder_decoder else torch.randint(7, (rows,))
    return {**inputs, "labels": labels, "attention_mask": mask}


@pytest.mark.parametrize("name", SHAPES)
def test_flops_are_those_that_torch_counts(name):
    model_class, changes = SHAPES[name]
    # The fused kernels compute the scores again in backward, which torch would count.
    model = model_class(tiny_config(**changes, attn_implementation="eager")).train()
    batch = full_batch(model.config)
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    counts = TokenCounts.of_batch(model.config, batch)
    assert training_flops(model.config, counts) == counter.get_total_flops()


def test_flops_of_the_papers_base_model():
    """6 FLOPs for each weight that a token meets; d_model 512, d_ff 2048, 6 + 6 layers."""
    config = tiny_config(
        vocab_size=37000,
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
    )
    square = 512 * 512
    per_source, per_target = weights_per_token(config)
    assert per_source == 6 * (4 * square + 2 * 4 * square) + 6 * 2 * square
    assert per_target == 6 * (6 * square + 2 * 4 * square) + 512 * 37000
    # Each matrix meets either source or target tokens; the embeddings' as output projection.
    with torch.device("meta"):
        parameters = list(TinyTFMForConditionalGeneration(config).parameters())
    assert sum(parameter.numel() for parameter in parameters) == 63_082_496
    matrices = sum(parameter.numel() for parameter in parameters if parameter.ndim == 2)
    assert per_source + per_target == matrices
    # 6 x 22.0 million and 6 x 41.0 million.
    assert describe_flops(config) == (
        "132 MFLOPs a source token, 246 MFLOPs a target token, forward and backward, "
        "attention's products aside"
    )


def test_padding_is_no_arithmetic_of_the_model():
    config = tiny_config()
    batch = full_batch(config, rows=2)
    alone = TokenCounts.of_batch(config, batch)
    padded = {
        "input_ids": torch.nn.functional.pad(batch["input_ids"], (4, 0), value=1),
        "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (4, 0)),
        "labels": torch.nn.functional.pad(batch["labels"], (0, 9), value=-100),
    }
    assert TokenCounts.of_batch(config, padded) == alone
    padded["attention_mask"][0] = 0
    padded["attention_mask"][0, :5] = 1
    padded["labels"][1, 2:] = -100
    counts = TokenCounts.of_batch(config, padded)
    assert counts == TokenCounts(
        source=5 + 11,
        target=6 + 2,
        source_pairs=5 * 5 + 11 * 11,
        target_pairs=6 * 6 + 2 * 2,
        cross_pairs=5 * 6 + 11 * 2,
        rows=2,
    )
    del batch["attention_mask"]
    assert TokenCounts.of_batch(config, batch) == alone


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        # Others, a part of one, and one that only sounds alike.
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A10G", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_known_peaks_are_looked_up_and_others_measured(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    monkeypatch.setattr(flops, "_measured_flops", lambda *_: 1.0)
    gpu = torch.device("cuda", 0)
    for dtype in (torch.bfloat16, torch.float16):
        assert peak_flops(gpu, dtype) == (1.0 if peak is None else peak)
    assert peak_flops(gpu, torch.float32) == 1.0  # how fast depends on torch's settings


def test_a_cpu_is_measured_once():
    cpu = torch.device("cpu")
    assert peak_flops(cpu, torch.float32) > 1e9
    hits = flops._measured_flops.cache_info().hits
    assert peak_flops(cpu, torch.float32) == peak_flops(cpu, torch.float32)
    assert flops._measured_flops.cache_info().hits == hits + 2


# Speed


class Clock:
    """Time, as a test wants it."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(flops, "time", clock)
    monkeypatch.setattr(flops, "peak_flops", lambda device, dtype: 1e9)
    return clock


def alone(values: list[float]) -> list[float]:
    return values


def two_alike(values: list[float]) -> list[float]:
    return [2 * value for value in values]


def test_speed_leaves_out_evaluation_and_checkpoints(clock):
    config = tiny_config()
    batch = full_batch(config, rows=2)  # 22 source and 12 target tokens
    work = training_flops(config, TokenCounts.of_batch(config, batch))
    meter = SpeedMeter(config, torch.float32)
    event = (SimpleNamespace(device=torch.device("cpu")), None, None)
    clock.now += 1000
    meter.on_train_begin(*event)
    for seconds in (2.0, 3.0):
        clock.now += seconds
        assert meter.count(batch) == work
        meter.on_step_end(*event)
    rates = meter.rates(alone)
    assert rates == {
        "tokens_per_second": 2 * 34 / 5,
        "target_tokens_per_second": 2 * 12 / 5,
        "model_flops_per_second": 2 * work / 5,
        "mfu": 2 * work / 5 / 1e9,
    }
    for pause in (meter.on_evaluate, meter.on_save):
        clock.now += 70
        pause(*event)
    clock.now += 5
    meter.count(batch)
    meter.on_step_end(*event)
    both = meter.rates(two_alike)
    assert both["tokens_per_second"] == 2 * 34 / 5
    assert both["mfu"] == pytest.approx(rates["mfu"] / 2)  # of twice the devices
    assert meter.overall(alone)["tokens_per_second"] == 3 * 34 / 10
    meter.on_train_begin(*event)
    assert meter.overall(alone) == {}


def test_the_log_tells_tokens_flops_and_utilisation(tmp_path):
    rows = 20
    trainer = make_trainer(
        tmp_path,
        rows=rows,
        max_steps=-1,
        num_train_epochs=1,
        logging_steps=2,
        gradient_accumulation_steps=2,
    )
    counted = []
    count = trainer.meter.count
    trainer.meter.count = lambda inputs: counted.append(count(inputs)) or counted[-1]
    results = trainer.train().metrics
    lines = [line for line in trainer.state.log_history if "loss" in line]
    names = ("tokens_per_second", "target_tokens_per_second", "model_flops_per_second", "mfu")
    for name in names:
        assert all(line[name] > 0 for line in lines)
        assert results[f"train_{name}"] > 0
    config = trainer.model.config
    each = [
        TokenCounts(length, length, length**2, length**2, length**2, rows=1)
        for length in map(len, pairs(rows)["input_ids"])  # reversals are as long
    ]
    expected = sum(training_flops(config, one) for one in each)
    assert trainer.state.total_flos == sum(counted) == expected
    evaluated = trainer.evaluate(pairs(3))
    assert not set(names) & set(evaluated)


# One process and several


def scaled_trainer(folder, *, sharded=False, model=None, **changes):
    """A trainer that evaluates and generates in the middle of training."""
    if sharded:
        use_fsdp()
    settings = {
        "max_steps": -1,
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
        "label_smoothing_factor": 0.1,
        "warmup_steps": 20,
        "adam_epsilon": 1e-3,  # a small one would enlarge rounding
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "load_best_model_at_end": True,
        "include_num_input_tokens_seen": "non_padding",
        **changes,
    }
    torch.manual_seed(0)
    return make_trainer(
        folder,
        model=redraw(TinyTFMForConditionalGeneration(tiny_config(**(model or {})))),
        rows=21,
        eval_dataset=pairs(5),
        own={"metrics": ["exact_match"], "generation": {"max_new_tokens": 9}, "noam": True},
        **settings,
    )


def use_fsdp():
    """What `accelerate launch` sets for configs/accelerate/fsdp.yaml."""
    configured = yaml.safe_load((ACCELERATE / "fsdp.yaml").read_text())["fsdp_config"]
    for key, value in configured.items():
        os.environ[key.upper()] = str(value).lower() if isinstance(value, bool) else str(value)
    os.environ.update(
        ACCELERATE_USE_FSDP="true",
        FSDP_CPU_RAM_EFFICIENT_LOADING="true",
        FSDP_SYNC_MODULE_STATES="true",
        FSDP_USE_ORIG_PARAMS="true",
    )


def scaled_run(folder, *, resume=None, **settings):
    """What there is to be compared between runs of different processes."""
    trainer = scaled_trainer(folder, **settings)
    pieces = {}

    def measure_pieces(*_, **__):
        parameters = trainer.model_wrapped.parameters()
        pieces["numel"] = sum(getattr(p, "_local_tensor", p).numel() for p in parameters)

    trainer.meter.on_train_end = measure_pieces
    trainer.train(resume_from_checkpoint=resume)
    scores, predictions = trainer.score(pairs(5), "test")
    names = trainer.model.named_parameters(remove_duplicate=False)
    return SimpleNamespace(
        kind=str(trainer.accelerator.distributed_type),
        pieces=pieces["numel"],
        log=trainer.state.log_history,
        flops=trainer.state.total_flos,
        weights=weights(trainer),
        parameters=len({id(parameter) for _, parameter in names}),
        scores=scores,
        predictions=predictions,
        samples=trainer.get_total_train_batch_size(trainer.args),
    )


# Seconds, and what is computed from them.
OF_TIME = re.compile("second|runtime|mfu|flops")


SHARDS = pytest.mark.skipif(
    Version(transformers.__version__) < Version(FIRST_VERSION),
    reason="the Trainer of this transformers does not shard as needed: it is refused by name",
)


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=SHARDS)])
def test_b29_the_log_means_the_same_on_two_processes(launch, tmp_path, sharded):  # noqa: F811
    """Under DDP and FSDP, of the same global batch: losses within a millionth, scores, FLOPs."""
    one = scaled_run(tmp_path / "one", per_device_train_batch_size=4)
    job = {"per_device_train_batch_size": 2, "sharded": sharded}
    two = launch(run_scaled, tmp_path / "two", job, world_size=2)
    for rank in two:
        assert rank.kind == str(DistributedType.FSDP if sharded else DistributedType.MULTI_CPU)
        assert len(rank.log) == len(one.log) == 6 + 3 + 1
        for found, expected in zip(rank.log, one.log, strict=True):
            assert found.keys() == expected.keys()
            for name in {*expected} - {name for name in expected if OF_TIME.search(name)}:
                assert found[name] == pytest.approx(expected[name], rel=1e-6), name
        assert rank.flops == one.flops > 0
        assert rank.samples == one.samples
        assert rank.predictions == one.predictions
        assert rank.scores == pytest.approx(one.scores, rel=1e-6)
        assert rank.parameters == one.parameters  # tied as before
        for name, weight in one.weights.items():
            torch.testing.assert_close(rank.weights[name], weight, atol=1e-6, rtol=1e-5)
    assert_equal_weights(two[0].weights, two[1].weights)
    if sharded:
        # Each holds half of the weights while it trains.
        assert two[0].pieces + two[1].pieces == pytest.approx(one.pieces, rel=0.01)
        assert two[0].pieces == pytest.approx(one.pieces / 2, rel=0.05)


def run_scaled(folder, settings):
    return scaled_run(folder, **settings)


KINDS = [
    {"tie_word_embeddings": False},
    {"share_encoder_decoder_embeddings": False},
    {
        "tie_word_embeddings": False,
        "share_encoder_decoder_embeddings": False,
        "position_embedding_type": "learned",
        "output_bias": True,
    },
]


def kinds_trained(folder, batch, sharded):
    """The losses of two updates of each kind of model, and its weights."""
    settings = {"per_device_train_batch_size": batch, "max_steps": 2, "eval_strategy": "no"}
    settings |= {"save_strategy": "no", "load_best_model_at_end": False, "sharded": sharded}
    results = []
    for number, model in enumerate(KINDS):
        trainer = scaled_trainer(folder / str(number), model=model, **settings)
        trainer.train()
        results.append(([line["loss"] for line in history(trainer)], weights(trainer)))
    return results


@SHARDS
def test_every_way_of_sharing_embeddings_may_be_sharded(launch, tmp_path):  # noqa: F811
    expected = kinds_trained(tmp_path / "one", 4, False)
    for rank in launch(kinds_trained, tmp_path / "two", 2, True, world_size=2):
        for (losses, found), (right, weights_of_one) in zip(rank, expected, strict=True):
            assert losses == pytest.approx(right, rel=1e-6)
            assert found.keys() == weights_of_one.keys()
            for name, weight in weights_of_one.items():
                torch.testing.assert_close(found[name], weight, atol=1e-6, rtol=1e-5)


def sharded_and_resumed(folder):
    """A run with FSDP, dropout and all, and the same once more from its second update."""
    settings = {"per_device_train_batch_size": 2, "sharded": True, "model": {"dropout": 0.1}}
    whole = scaled_run(folder, **settings)
    checkpoint = str(folder / "checkpoint-2")
    resumed = scaled_run(folder.with_name("resumed"), resume=checkpoint, **settings)
    saved = scaled_trainer(folder.with_name("saved"), **settings)
    saved.save_model()  # before any training
    return whole, resumed


@SHARDS
@pytest.mark.slow
def test_sharded_checkpoints_are_resumed_averaged_and_load_anywhere(launch, tmp_path):  # noqa: F811
    run = tmp_path / "run"
    for whole, resumed in launch(sharded_and_resumed, run, world_size=2):
        assert_equal_weights(resumed.weights, whole.weights)
        assert [line["loss"] for line in resumed.log if "loss" in line] == [
            line["loss"] for line in whole.log if "loss" in line
        ]
        assert resumed.scores == whole.scores
    # The best one was loaded at the end, and it is the last.
    model = AutoModelForSeq2SeqLM.from_pretrained(run / "checkpoint-6")
    assert_equal_weights(model.state_dict(), whole.weights)
    assert type(model) is TinyTFMForConditionalGeneration
    assert model.lm_head.weight is model.get_encoder().embed_tokens.weight
    assert json.loads((run / "checkpoint-6" / "config.json").read_text())["architectures"] == [
        "TinyTFMForConditionalGeneration"
    ]
    for folder in (run / "checkpoint-6", tmp_path / "saved"):
        for name in ("modeling_tinytfm.py", "configuration_tinytfm.py", "tokenizer.json"):
            assert (folder / name).is_file()
    checkpoints = last_checkpoints(run, 2)
    averaged = average_checkpoints(checkpoints).state_dict()
    states = [AutoModelForSeq2SeqLM.from_pretrained(path).state_dict() for path in checkpoints]
    for name, weight in averaged.items():
        assert torch.equal(weight, ((states[0][name].double() + states[1][name]) / 2).float())

    assert last_complete_checkpoint(run, 2, sharded=True) == run / "checkpoint-6"
    for world_size, sharded, asked in ((2, False, "2"), (1, True, "1 with FSDP"), (1, False, "1")):
        with pytest.raises(ValueError, match=f"by 2 processes with FSDP and .* by {asked}$"):
            last_complete_checkpoint(run, world_size, sharded=sharded)
    assert what_is_missing(run / "checkpoint-6", 2) == "it was written with FSDP (optimizer.bin)"
    (run / "checkpoint-6" / "optimizer.bin").unlink()
    assert what_is_missing(run / "checkpoint-6", 2, sharded=True) == "optimizer.bin is missing"
    assert last_complete_checkpoint(run, 2, sharded=True) == run / "checkpoint-4"
    (run / "checkpoint-4" / "optimizer.pt").touch()
    assert "without FSDP" in what_is_missing(run / "checkpoint-4", 2, sharded=True)


@pytest.mark.parametrize(
    ("version", "kind", "message"),
    [
        (1, "FULL_STATE_DICT", "fsdp_version=1: .*write fsdp_version: 2"),
        (2, "SHARDED_STATE_DICT", "fsdp_state_dict_type=SHARDED_STATE_DICT .*write FULL_STATE_D"),
        (2, "FULL_STATE_DICT", None),
    ],
)
@SHARDS
def test_sharding_that_leaves_no_model_to_load_is_refused(version, kind, message):
    plugin = SimpleNamespace(fsdp_version=version, state_dict_type=StateDictType[kind])
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    if message is None:
        check_sharding(accelerator)
        return
    with pytest.raises(ValueError, match=message):
        check_sharding(accelerator)


def test_deepspeed_is_refused(tmp_path, monkeypatch):
    args = arguments(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match=r"DeepSpeed leaves no .*fsdp\.yaml"):
        TinyTFMTrainer(tiny_model(), args)


def test_compiled_models_are_copied_and_give_logits(tmp_path):
    model = tiny_model()
    whole = redraw(TinyTFMForConditionalGeneration(model.config), 0)
    copy_whole(SimpleNamespace(_orig_mod=model), whole)
    assert_equal_weights(whole.state_dict(), model.state_dict())
    trainer = make_trainer(tmp_path, model=model)
    assert trainer._needs_no_logits(model)
    assert trainer._needs_no_logits(nn.parallel.DataParallel(model))
    assert not trainer._needs_no_logits(copy.copy(model))  # what compiled layers are put into


# Several launchers: accelerate's example files, as their headers say


@pytest.fixture
def recipe_file(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    write_pairs(Path("pairs.tsv"))
    document = {**RECIPE, "data": {"train_file": "pairs.tsv"}}
    document["training"] = {**RECIPE["training"], "load_best_model_at_end": True}
    Path("tiny.yaml").write_text(yaml.safe_dump(document))
    return "tiny.yaml"


def start(recipe_file: str, example: str, *flags: str) -> subprocess.Popen:
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "accelerate.commands.launch"),
            *("--config_file", ACCELERATE / f"{example}.yaml", *flags),
            *(ROOT / "scripts" / "train.py", recipe_file, f"training.output_dir={example}"),
        ],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "HF_HOME": str(Path("hf_home").absolute()),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def without_rendezvous(errors: str) -> str:
    """What a launch wrote on stderr, less what torch's agents log of one another: whichever ends
    first takes its store along, and another that is still at the barrier of their exit logs that
    as an error, with a traceback, and ends well."""
    of_agents = re.compile(r"^[EW]\d{4} \S+ \d+ torch/distributed/elastic/\S+\].*\n", re.MULTILINE)
    return of_agents.sub("", errors)


def test_what_agents_say_of_one_another_is_no_error_of_ours():
    agent = "E1130 09:15:41.697000 28859 torch/distributed/elastic/agent/server/api.py:1008] "
    ours = 'Traceback (most recent call last):\n  File "torch/distributed/elastic/x.py", line 1\n'
    logged = f"{agent}Traceback (most recent call last):\n{agent}DistNetworkError: 0 bytes\n"
    assert without_rendezvous(logged + ours) == ours


@SHARDS
@pytest.mark.slow
def test_the_examples_of_launching_start_two_processes_each(recipe_file):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    address = ("--main_process_ip", "127.0.0.1", "--main_process_port", port)
    nodes = [("--machine_rank", str(rank), *address) for rank in range(2)]
    results = {}
    for example, launchers in (("ddp", [()]), ("fsdp", [()]), ("multi_node", nodes)):
        started = [start(recipe_file, example, *flags) for flags in launchers]
        outputs = [process.communicate(timeout=180) for process in started]
        assert [process.returncode for process in started] == [0] * len(started), outputs
        for (plan, errors), rank in zip(outputs, range(2), strict=False):
            assert plan.count("x 2 processes") == (rank == 0)
            assert plan.count("next: python scripts/translate.py") == (rank == 0)
            assert "Traceback" not in without_rendezvous(errors)
        assert ("FSDP" in outputs[0][0]) == (example == "fsdp")
        scores = json.loads(Path(example, "all_results.json").read_text())
        results[example] = {
            key: value
            for key, value in scores.items()
            if isinstance(value, float) and not OF_TIME.search(key)
        }
        AutoModelForSeq2SeqLM.from_pretrained(example)
        assert what_is_missing(Path(example, "checkpoint-4"), 2, sharded=example == "fsdp") is None
    assert results["multi_node"] == results["ddp"]
    assert results["fsdp"] == pytest.approx(results["ddp"], rel=1e-6)


def test_every_example_says_how_it_is_started():
    for path in ACCELERATE.iterdir():
        header = "".join(re.findall(r"^#(.*\n)", path.read_text(), flags=re.MULTILINE))
        command = re.search(r"accelerate launch (.*?)data\.train_file=", header, re.DOTALL)
        words = command[1].replace("\\", "").split()
        assert words[:2] == ["--config_file", f"configs/accelerate/{path.name}"]
        assert "--num_processes" in words
        assert words[-2:] == ["scripts/train.py", "configs/pairs.yaml"]


# TensorBoard


def test_tensorboard_gets_what_the_log_says(recipe_file):
    run_recipe(load_recipe(recipe_file, ["training.report_to=tensorboard"]), lambda _: None)
    (folder,) = Path("outputs/tiny/runs").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    checkpoint = Path("outputs/tiny/checkpoint-4/trainer_state.json")
    lines = json.loads(checkpoint.read_text())["log_history"]
    for prefix, told, names in (
        ("train", "loss", ("loss", "learning_rate", "tokens_per_second", "mfu")),
        ("eval", "eval_loss", ("loss", "exact_match")),
    ):
        of_log = [line for line in lines if told in line]
        assert len(of_log) == (4 if prefix == "train" else 2)
        for name in names:
            key = name if prefix == "train" else f"eval_{name}"
            curve = events.Scalars(f"{prefix}/{name}")[: len(of_log)]  # the end is evaluated, too
            assert [(point.step, pytest.approx(point.value)) for point in curve] == [
                (line["step"], line[key]) for line in of_log
            ]


@pytest.mark.parametrize(
    ("name", "what_to_do"),
    [
        ("tensorboard", "pip install 'modeling-tinytfm[tensorboard]'"),
        ("wandb", "pip install wandb"),
    ],
)
def test_a_missing_reporter_is_told_before_anything_is_read(
    recipe_file, monkeypatch, name, what_to_do
):
    monkeypatch.setattr(machine, "get_available_reporting_integrations", list)
    Path("pairs.tsv").unlink()
    with pytest.raises(ImportError) as error:
        prepare(load_recipe(recipe_file, [f"training.report_to={name}"]))
    assert str(error.value) == (
        f"training.report_to={name}: its package is not installed: {what_to_do}"
    )
    with pytest.raises(ValueError, match="tensorbord is not supported"):
        make_trainer(Path("run"), report_to="tensorbord")
