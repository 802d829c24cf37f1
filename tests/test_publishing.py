"""What is published, how, and that strangers can load it: real clients, a double of the Hub."""

import json
import logging
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import torch
import yaml
from datasets import Dataset
from hub_double import HubDouble
from huggingface_hub import ModelCard, constants, hf_hub_download
from huggingface_hub.errors import HTTPError
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from test_experiment import RECIPE, write_pairs
from test_translation import digits  # noqa: F401 - a fixture
from tiny import reversal_batch, tiny_config, tiny_model
from transformers import (
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    MarianConfig,
    MarianMTModel,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)
from transformers.utils import hub as transformers_hub

from modeling_tinytfm import (
    TinyTFMForCausalLM,
    TinyTFMForConditionalGeneration,
    TinyTFMForSequenceClassification,
    conversion,
    publishing,
    translate,
)
from modeling_tinytfm.experiment import prepare, run_recipe
from modeling_tinytfm.loading import load_model, load_tokenizer
from modeling_tinytfm.machine import machine_facts
from modeling_tinytfm.model_card import is_generated, make_card, write_card
from modeling_tinytfm.publishing import files_to_publish, open_repository, push
from modeling_tinytfm.recipes import load_recipe
from modeling_tinytfm.tokenization import portable, save_tokenizer, train_tokenizer
from modeling_tinytfm.training import TinyTFMTrainer

# huggingface_hub 2.4 uploads large files in a way that its HTTP client would rather not see.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")

ROOT = Path(__file__).parents[1]
ADA, EVE = "hf_SecretOfAda", "hf_SecretOfEve"
DECODER = {"is_encoder_decoder": False, "is_decoder": True}
ENCODER = {"is_encoder_decoder": False, "is_decoder": False}
# What a run leaves, and what is published of it.
PUBLISHED = {
    *("model.safetensors", "config.json", "generation_config.json"),
    *("configuration_tinytfm.py", "modeling_tinytfm.py"),
    *("tokenizer.json", "tokenizer_config.json"),
    *("README.md", "recipe.yaml", "all_results.json", "run.json", "curves.png"),
}
OF_A_RUN = {"recipe.yaml", "all_results.json", "run.json", "curves.png"}
SCORES = {
    "train_runtime": 123.4,
    "train_samples": 28_500,
    "eval_loss": 0.4321,
    "eval_bleu": 39.876,
    "eval_samples": 500,
    "test_loss": 0.45,
    "test_perplexity": 1.568312,
    "test_token_accuracy": 0.91,
    "test_bleu": 38.123456,
    "test_bleu_signature": "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0",
    "test_exact_match": 0.25,
    "test_samples": 1000,
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The double, as this process's Hub, with Ada logged in."""
    monkeypatch.chdir(tmp_path)
    with HubDouble({ADA: "ada", EVE: "eve"}) as double:
        monkeypatch.setattr(constants, "ENDPOINT", double.url)
        template = double.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "own_cache"))
        monkeypatch.setattr(transformers_hub, "_hf_api", None)
        monkeypatch.setenv("HF_TOKEN", ADA)
        disable_progress_bars()
        yield double
        enable_progress_bars()


@pytest.fixture
def online(hub):
    """The environment in which other processes find the double."""
    return {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}


@pytest.fixture(scope="session")
def finished_run(reverser, digits, tmp_path_factory) -> Path:  # noqa: F811
    """A folder as a run leaves it, of a model that can reverse."""
    folder = tmp_path_factory.mktemp("home_of_ada") / "reversing"
    reverser.save_pretrained(folder)
    save_tokenizer(digits, folder)
    document = {
        "data": {"train_file": str(folder.parent / "private" / "pairs.de-en.tsv")},
        "training": {
            "output_dir": str(folder),
            "push_to_hub": True,
            "hub_model_id": "ada/reversing",
            "lr_scheduler_type": "noam",
            "warmup_steps": 400,
            "max_steps": 4000,
            "label_smoothing_factor": 0.1,
            "seed": 7,
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(document))
    (folder / "all_results.json").write_text(json.dumps(SCORES))
    arguments = TrainingArguments(str(folder), use_cpu=True)
    facts = {"updates": 4000, "training_seconds": 3723.4, "data": {"train": "28,500 pairs"}}
    facts |= machine_facts(arguments, 2)
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "curves.png").write_bytes(b"\x89PNG a picture")
    row = {"source": "1 2 3 4", "prediction": "4 3 2 1", "references": ["4 3 2 1"]}
    (folder / "predictions_test.jsonl").write_text(json.dumps(row) + "\n")
    for name in ("training_args.bin", "checkpoint-10/optimizer.pt", "events.log", ".hidden"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\x80\x04not for others")
    return folder


@pytest.fixture
def run_folder(finished_run, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(finished_run, tmp_path / "home" / "reversing"))


@pytest.fixture
def said() -> list[str]:
    return []


def reversed_rows(count: int) -> Dataset:
    batch = reversal_batch(count, torch.Generator().manual_seed(1))
    lengths = batch["attention_mask"].sum(1)
    rows = zip(batch["input_ids"], batch["labels"], lengths, strict=True)
    columns = [(ids[:n].tolist(), labels[:n].tolist()) for ids, labels, n in rows]
    return Dataset.from_dict(
        {"input_ids": [ids for ids, _ in columns], "labels": [labels for _, labels in columns]}
    )


def trainer_of(model, tokenizer, **options) -> TinyTFMTrainer:
    arguments = {
        "output_dir": "outputs/trained",
        "use_cpu": True,
        "max_steps": 3,
        "save_steps": 2,
        "per_device_train_batch_size": 4,
        "logging_strategy": "no",
        "disable_tqdm": True,
        "push_to_hub": True,
        **options,
    }
    return TinyTFMTrainer(
        model,
        Seq2SeqTrainingArguments(**arguments),
        train_dataset=reversed_rows(12),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model) if tokenizer else None,
        processing_class=tokenizer,
    )


def code_blocks(card: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", card, flags=re.DOTALL)


def is_pickle(content: bytes) -> bool:
    return content[:1] == b"\x80" or content[:2] == b"PK"


# Loads repositories as a stranger does; argument 1 is a list of [repository, head's Auto class].
LOAD = """
import json, sys, torch, transformers
torch.set_num_threads(1)
found = []
for name, head in json.loads(sys.argv[1]):
    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=True)
    base = transformers.AutoModel.from_pretrained(name, trust_remote_code=True)
    model = getattr(transformers, head).from_pretrained(name, trust_remote_code=True)
    batch = tokenizer(["1 2 3 4 5", "7"], return_tensors="pt", padding=True)
    ids = model.generate(**batch, num_beams=4, max_new_tokens=9)
    found.append([type(config).__name__, type(base).__name__, type(tokenizer).__module__,
                  type(model).__module__.split(".")[0], tokenizer.batch_decode(ids, True)])
print(json.dumps(found))
"""


# Three ways to publish


def test_b43_pushed_three_ways_it_loads_elsewhere_online_and_then_offline(
    hub,
    online,
    elsewhere,
    reverser,
    digits,  # noqa: F811
    run_folder,
    capsys,
    monkeypatch,
):
    script = runpy_script("push_to_hub")
    assert script.main([str(run_folder), "ada/by-command"]) == 0
    printed, errors = capsys.readouterr()
    assert errors == ""
    assert "ada/by-command is new" in printed
    lines = printed.splitlines()
    assert f"{hub.url}/ada/by-command" in lines
    assert len(lines[lines.index("") + 1 :]) == 3

    own = load_tokenizer(run_folder)
    reverser.push_to_hub("ada/by-method")
    own.push_to_hub("ada/by-method")

    model = TinyTFMForConditionalGeneration.from_pretrained(run_folder)
    trainer = trainer_of(model, digits, hub_model_id="ada/by-trainer", hub_strategy="end")
    assert set(hub.files("ada/by-trainer")) == {".gitattributes"}  # before it trains
    trainer.train()
    trained = trainer.model.eval()
    published = trainer.push_to_hub(license="mit")
    assert published.url == f"{hub.url}/ada/by-trainer"

    names = ["ada/by-command", "ada/by-method", "ada/by-trainer"]
    for name in names:
        held = hub.files(name)
        assert PUBLISHED - set(held) <= {
            "recipe.yaml",
            "all_results.json",
            "run.json",
            "curves.png",
        }
        assert not any(is_pickle(content) for content in held.values()), name
        assert not any(re.search(r"\.(bin|pt|pth|pkl)$|checkpoint", path) for path in held)
        assert json.loads(held["tokenizer_config.json"])["tokenizer_class"] == (
            "PreTrainedTokenizerFast"
        )
    assert not Path("outputs/trained/training_args.bin").exists()
    assert Path("outputs/trained/checkpoint-2/training_args.bin").exists()  # for resuming
    assert ModelCard(hub.files(names[2])["README.md"].decode()).data.license == "mit"

    jobs = json.dumps([[name, "AutoModelForSeq2SeqLM"] for name in names])
    seen = elsewhere(LOAD, jobs, **online).splitlines()[-1]
    batch = digits(["1 2 3 4 5", "7"], return_tensors="pt", padding=True)
    for (config, base, tokenizer, module, texts), expected in zip(
        json.loads(seen), (reverser, reverser, trained), strict=True
    ):
        assert (config, base, module) == ("TinyTFMConfig", "TinyTFMModel", "transformers_modules")
        assert tokenizer.startswith("transformers.")
        ids = expected.generate(**batch, num_beams=4, max_new_tokens=9)
        assert texts == digits.batch_decode(ids, skip_special_tokens=True)
    assert json.loads(seen)[0][-1] == ["5 4 3 2 1", "7"]

    asked = len(hub.requests)
    assert elsewhere(LOAD, jobs, HF_ENDPOINT=hub.url).splitlines()[-1] == seen
    assert len(hub.requests) == asked
    # With the plugin, and no code of the repository.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    model, tokenizer = load_model("ada/by-command")
    assert type(model) is TinyTFMForConditionalGeneration
    assert translate(model, tokenizer, ["1 2 3"]) == ["3 2 1"]


def runpy_script(name: str):
    import importlib.util

    place = ROOT / f"scripts/{name}.py"
    specification = importlib.util.spec_from_file_location(f"publishing_{name}", place)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_exactly_what_others_need_is_published(hub, run_folder, said):
    push(run_folder, "ada/reversing", say=said.append)
    held = hub.files("ada/reversing")
    assert set(held) == {*PUBLISHED, ".gitattributes"}
    for name in PUBLISHED - {"README.md", "recipe.yaml"}:
        assert held[name] == (run_folder / name).read_bytes(), name
    everything = b"".join(held.values())
    for secret in (ADA, str(run_folder.parent), "home_of_ada", "private"):
        assert secret.encode() not in everything
    Path("public.yaml").write_bytes(held["recipe.yaml"])
    public, kept = load_recipe("public.yaml"), load_recipe(run_folder / "recipe.yaml")
    assert public.data.train_file == "pairs.de-en.tsv"
    assert public.differences(kept) == ["data.train_file"]
    assert not {"push_to_hub", "hub_model_id"} & public.training.arguments.keys()
    assert hub.repositories["ada/reversing"].messages[-1] == "Publish reversing"


def test_a_hub_data_set_keeps_its_name_and_a_local_one_loses_its_path(tmp_path):
    for name, shown in (("org/data", "org/data"), (str(tmp_path / "org" / "data"), "data")):
        document = {"data": {"dataset_name": name}, "tokenizer": {"kind": "bpe"}}
        Path(tmp_path / "recipe.yaml").write_text(yaml.safe_dump(document))
        recipe = load_recipe(tmp_path / "recipe.yaml")
        assert recipe.without_paths().data.dataset_name == shown


def test_a_folder_that_looks_like_a_name_on_the_hub_stays_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data/own").mkdir(parents=True)
    Path("recipe.yaml").write_text("data: {dataset_name: data/own}")
    recipe = load_recipe("recipe.yaml")
    Path("kept.yaml").write_text(recipe.to_yaml())
    Path("data/own").rmdir()
    kept = load_recipe("kept.yaml")
    assert kept.without_paths().data.dataset_name == "own"
    assert kept.same_run(load_recipe("recipe.yaml"))  # which sees no folder any more


def test_only_what_names_a_file_loses_its_path(tmp_path):
    pattern = "/[^/]+/|[^ ]"
    document = {
        "tokenizer": {"kind": "regex", "pattern": pattern},
        "data": {"generator": "reverse"},
        "training": {"fsdp_config": "/home/ada/shards.json"},
    }
    Path(tmp_path / "recipe.yaml").write_text(yaml.safe_dump(document))
    shown = load_recipe(tmp_path / "recipe.yaml").without_paths()
    assert shown.tokenizer.pattern == pattern
    assert shown.training.arguments["fsdp_config"] == "shards.json"


def test_a_checkpoint_is_published_like_any_model(hub, reverser, digits):  # noqa: F811
    trainer = trainer_of(reverser_copy(reverser), digits, push_to_hub=False)
    trainer.train()
    push("outputs/trained/checkpoint-2", "from-a-checkpoint")
    held = set(hub.files("ada/from-a-checkpoint"))
    assert {path for path in held if path.endswith((".bin", ".pt", ".pth", "_state.json"))} == set()
    assert {"model.safetensors", "modeling_tinytfm.py", "tokenizer.json"} < held


def reverser_copy(reverser):
    model = TinyTFMForConditionalGeneration(reverser.config)
    model.load_state_dict(reverser.state_dict())
    return model


def test_weights_in_several_files_and_then_in_one(hub, digits, said):  # noqa: F811
    model = tiny_model()
    model.save_pretrained("split", max_shard_size="30KB")
    save_tokenizer(digits, "split")
    push("split", "ada/one", say=said.append)
    parts = {path.name for path in Path("split").glob("model*.safetensors*")}
    assert len(parts) > 3
    assert parts < set(hub.files("ada/one"))
    loaded = TinyTFMForConditionalGeneration.from_pretrained("ada/one")
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    # Another program's push left pickles.
    repository = hub.repositories["ada/one"]
    tree = {**hub.files("ada/one"), "training_args.bin": b"\x80", "notes.txt": b"mine"}
    repository.commit("main", tree, "by the Trainer")
    model.save_pretrained("whole")
    save_tokenizer(digits, "whole")
    push("whole", "ada/one", say=said.append)
    held = set(hub.files("ada/one"))
    assert "model.safetensors" in held
    assert not held & {*parts, "training_args.bin"}
    assert "notes.txt" in held
    assert any("removed from ada/one" in line and "training_args.bin" in line for line in said)


def test_what_belongs_to_other_weights_is_removed(hub, run_folder, said, digits):  # noqa: F811
    push(run_folder, "ada/reversing", say=said.append)
    tiny_model().save_pretrained("bare")
    push("bare", "ada/reversing", say=said.append)
    held = set(hub.files("ada/reversing"))
    assert not held & {"recipe.yaml", "all_results.json", "run.json", "curves.png"}
    assert not held & {"tokenizer.json", "tokenizer_config.json"}
    assert {"model.safetensors", "config.json", "README.md"} <= held


def test_whatever_stops_an_upload_is_an_oserror():
    with pytest.raises(OSError, match="ada/x: the disk is full"), publishing._hub_errors("ada/x"):
        raise RuntimeError("the disk is full")


def test_an_existing_repository_gets_a_commit_and_says_what_it_replaces(hub, run_folder, said):
    push(run_folder, "ada/reversing", say=said.append)
    (run_folder / "all_results.json").write_text(json.dumps({**SCORES, "test_bleu": 40.0}))
    first = hub.repositories["ada/reversing"].branches["main"]
    push(run_folder, "reversing", message="Better", say=said.append)
    repository = hub.repositories["ada/reversing"]
    assert repository.messages[-1] == "Better"
    assert said[-1].startswith("ada/reversing exists: a new commit replaces README.md, all_results")
    assert b"38.1" in repository.commits[first]["all_results.json"]
    assert b"40.0" in hub.files("ada/reversing")["all_results.json"]
    assert "| BLEU | 39.88 | 40 |" in hub.files("ada/reversing")["README.md"].decode()


def test_a_revision_is_a_branch_and_the_card_there_names_it(hub, run_folder, said):
    published = push(run_folder, "ada/reversing", revision="dev/2", say=said.append)
    assert published.url == f"{hub.url}/ada/reversing/tree/dev%2F2"
    assert set(hub.files("ada/reversing")) == {".gitattributes"}
    assert 'revision="dev/2"' in published.loading
    card = hub.files("ada/reversing", "dev/2")["README.md"].decode()
    for block in code_blocks(card):
        assert block.count('revision="dev/2"') == 2
    push(run_folder, "ada/reversing", revision="dev/2", say=said.append)  # it is there now
    loaded = TinyTFMForConditionalGeneration.from_pretrained("ada/reversing", revision="dev/2")
    assert torch.equal(
        loaded.lm_head.weight,
        TinyTFMForConditionalGeneration.from_pretrained(run_folder).lm_head.weight,
    )


# Who may


def test_a_private_repository_is_refused_without_its_owners_token(
    hub, online, elsewhere, run_folder, said, monkeypatch
):
    push(run_folder, "ada/hidden", private=True, say=said.append)
    assert hub.repositories["ada/hidden"].private
    assert said[0] == "ada/hidden is new, and private"
    attempt = """
import os, sys, transformers
for token in [None, *sys.argv[1:]]:
    try:
        transformers.AutoModelForSeq2SeqLM.from_pretrained(
            "ada/hidden", trust_remote_code=True, token=token
        )
        print("loaded")
    except OSError as error:
        print("refused", "ada/hidden" in str(error), str(token) in str(error))
"""
    seen = elsewhere(attempt, EVE, ADA, **online).splitlines()
    assert seen == ["refused True False", "refused True False", "loaded"]
    for token in (False, EVE):
        with pytest.raises(huggingface_hub.errors.RepositoryNotFoundError):
            hf_hub_download("ada/hidden", "model.safetensors", token=token)
    # Nothing of what should be private goes into what everybody reads.
    push(run_folder, "ada/open", say=said.append)
    with pytest.raises(ValueError, match="ada/open exists and everybody can read it"):
        push(run_folder, "ada/open", private=True, say=said.append)
    push(run_folder, "ada/hidden", private=True, say=said.append)
    monkeypatch.setenv("HF_TOKEN", EVE)
    with pytest.raises(OSError, match=r"ada/open: the Hub refused \(403\)"):
        push(run_folder, "ada/open", say=said.append)


def test_tokens_appear_nowhere(hub, run_folder, caplog, capsys, monkeypatch):
    caplog.set_level(logging.DEBUG)
    script = runpy_script("push_to_hub")
    assert script.main([str(run_folder), "ada/a"]) == 0
    monkeypatch.setenv("HF_TOKEN", "hf_NobodyKnowsIt")
    assert script.main([str(run_folder), "ada/a"]) == 2
    printed, errors = capsys.readouterr()
    assert errors == (
        "push_to_hub.py: ada/a: the Hub refused (401): the token is not valid, or may not see it: "
        "`hf auth login`\n"
    )
    for text in (caplog.text, printed, errors, str(hub.files("ada/a"))):
        assert ADA not in text
        assert "hf_NobodyKnowsIt" not in text
    assert any(token == ADA for *_, token in hub.requests)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a/b/c", "is no name of a repository"),
        ("../up", "is no name of a repository"),
        ("ada/with space", "is no name of a repository"),
        ("ada/" + "x" * 100, "is no name of a repository"),
        ("", "is no name of a repository"),
    ],
)
def test_names_are_checked_before_anything_is_asked(hub, run_folder, name, message):
    with pytest.raises(ValueError, match=message):
        push(run_folder, name)
    with pytest.raises(ValueError, match=message):
        open_repository(name)
    assert hub.requests == []


def test_whoever_is_not_logged_in_is_told_how(hub, run_folder, monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="log in by `hf auth login`, or set HF_TOKEN"):
        push(run_folder, "ada/x")
    assert hub.requests == []


def test_no_hub_is_one_line(hub, run_folder, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="ada/x: the Hub cannot be asked while HF_HUB_OFFLINE is set"):
        push(run_folder, "ada/x")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(OSError, match="ada/x: the Hub cannot be reached"):
        push(run_folder, "ada/x")


def damage(folder: Path, how: str) -> Path:
    if how == "no folder":
        return folder / "nowhere"
    if how == "no config":
        (folder / "config.json").unlink()
    elif how == "another model":
        (folder / "config.json").write_text('{"model_type": "marian"}')
    elif how == "no weights":
        (folder / "model.safetensors").unlink()
    elif how == "no code":
        (folder / "modeling_tinytfm.py").unlink()
    elif how == "a part lost":
        (folder / "model.safetensors").unlink()
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    elif how == "a way out":
        (folder / "model.safetensors").unlink()
        (folder.parent / "secret.txt").write_text("mine")
        index = {"weight_map": {"a": "../secret.txt"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no folder", "nowhere: no such folder"),
        ("no config", "is no model: it holds no config.json"),
        ("another model", "holds a model of type marian, not tinytfm"),
        ("no weights", "holds no model.safetensors"),
        ("no code", "lacks modeling_tinytfm.py, without which nobody else can load it"),
        ("a part lost", "lacks model-00001-of-00002.safetensors, which its model.safe"),
        ("a way out", r"lacks \.\./secret\.txt"),
    ],
)
def test_folders_that_nobody_could_load_are_refused(hub, run_folder, how, message):
    folder = damage(run_folder, how)
    with pytest.raises((ValueError, OSError), match=message):
        push(folder, "ada/x")
    assert hub.requests == []


def test_a_tokenizer_that_plain_transformers_saved_is_mended(run_folder):
    plain = AutoTokenizer.from_pretrained(run_folder)
    plain("1 2", padding="max_length", max_length=5)
    plain.save_pretrained(run_folder)
    settings = json.loads((run_folder / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "TokenizersBackend"
    files = files_to_publish(run_folder)
    settings = json.loads(files["tokenizer_config.json"])
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert json.loads(files["tokenizer.json"])["padding"] is None


def test_a_tokenizer_is_mended_however_it_is_saved(hub):
    trained = train_tokenizer(["a b c"], kind="word", vocab_size=9, show_progress=False)
    trained("a", padding="max_length", max_length=5)
    trained.save_pretrained("saved")
    trained.save_pretrained("named", push_to_hub=True)
    trained.save_pretrained("unnamed", push_to_hub=True, repo_id="ada/other")
    loaded = load_tokenizer("saved")
    loaded.push_to_hub("ada/loaded")
    saved = {path.name: path.read_bytes() for path in Path("saved").iterdir()}
    for files in (saved, *map(hub.files, ("ada/named", "ada/other", "ada/loaded"))):
        settings = json.loads(files["tokenizer_config.json"])
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert json.loads(files["tokenizer.json"])["padding"] is None
    again = AutoTokenizer.from_pretrained("ada/loaded")
    assert again("a b x").input_ids == trained("a b x").input_ids == loaded("a b x").input_ids
    assert type(portable(again)) is type(trained)
    assert portable("no tokenizer") == "no tokenizer"


# The Trainer


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_the_trainer_publishes_no_checkpoint(hub, strategy, tmp_path):
    with pytest.raises(ValueError, match=f"hub_strategy={strategy} would publish the optimizer"):
        trainer_of(tiny_model(), None, hub_strategy=strategy)
    assert hub.requests == []
    (tmp_path / "r.yaml").write_text("data: {generator: reverse}")
    with pytest.raises(ValueError, match=f"training.hub_strategy={strategy} would publish"):
        load_recipe(tmp_path / "r.yaml", [f"training.hub_strategy={strategy}"])


def test_the_trainer_may_publish_as_it_goes(hub, reverser, digits, caplog):  # noqa: F811
    trainer = trainer_of(reverser_copy(reverser), digits, hub_private_repo=True)
    trainer.train()
    repository = hub.repositories["ada/trained"]
    assert repository.private
    assert repository.messages[1:] == [
        "Training in progress, update 2",
        "Training in progress, update 3",
    ]
    for tree in repository.commits.values():
        assert not any(is_pickle(content) for content in tree.values())
    assert set(hub.files("ada/trained")) == {*(PUBLISHED - OF_A_RUN), ".gitattributes"}
    # Nothing is written into the run's own folder, and a Hub that fails stops no training.
    assert {path.name for path in Path("outputs/trained").iterdir()} == {
        "checkpoint-2",
        "checkpoint-3",
    }
    trainer = trainer_of(reverser_copy(reverser), digits, output_dir="outputs/again")
    del hub.repositories["ada/again"]
    hub.users.clear()
    trainer.train()
    assert trainer.state.global_step == 3
    assert "not published: ada/again: the Hub refused (401)" in caplog.text


def test_a_run_leaves_a_card_and_publishes_itself(hub, said, monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_pairs(Path("pairs.tsv"))
    data = {"train_file": str(Path("pairs.tsv").absolute())}
    Path("tiny.yaml").write_text(yaml.safe_dump({**RECIPE, "data": data}))
    options = ["training.push_to_hub=true", "training.hub_model_id=tiny-reverser"]
    options += ["training.hub_private_repo=true", "training.max_steps=4"]
    run_recipe(load_recipe("tiny.yaml", options), said.append)
    folder = Path("outputs/tiny")
    run = json.loads((folder / "run.json").read_text())
    assert run["updates"] == 4
    assert not run["resumed"]
    assert run["data"]["train"].endswith(" pairs; 6 held out for other splits")
    assert re.fullmatch(r"\d+ threads? of .+", run["hardware"])
    card = (folder / "README.md").read_text()
    assert is_generated(card)
    assert '"outputs/tiny", trust_remote_code=True' in card
    assert str(tmp_path) not in card
    repository = hub.repositories["ada/tiny-reverser"]
    assert repository.private
    assert repository.messages == ["initial commit", "Publish tiny"]  # once, with its scores
    assert set(hub.files("ada/tiny-reverser")) == {*PUBLISHED, ".gitattributes"}
    published = ModelCard(hub.files("ada/tiny-reverser")["README.md"].decode())
    scores = json.loads((folder / "all_results.json").read_text())
    seen = {result.metric_name: result.metric_value for result in published.data.eval_results}
    assert seen["Exact match"] == scores["test_exact_match"]
    assert f"{hub.url}/ada/tiny-reverser" in said[-1]
    assert not any(is_pickle(content) for content in hub.files("ada/tiny-reverser").values())
    assert not list(folder.glob("*.bin"))

    # Finished is finished, whether it is published or not.
    before = len(repository.commits)
    run_recipe(load_recipe("tiny.yaml", options[2:] + options[:1]), said.append)
    assert said[-1] == "publish it by: python scripts/push_to_hub.py outputs/tiny NAME"
    assert len(repository.commits) == before


def test_a_hub_that_fails_at_the_end_loses_nothing(hub, said, monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    write_pairs(Path("pairs.tsv"))
    Path("tiny.yaml").write_text(yaml.safe_dump({**RECIPE, "data": {"train_file": "pairs.tsv"}}))
    options = ["training.push_to_hub=true", "training.max_steps=4"]
    ready = prepare(load_recipe("tiny.yaml", options), said.append)
    hub.users.clear()
    advice = (
        "outputs/tiny holds the finished run: python scripts/push_to_hub.py outputs/tiny ada/tiny"
    )
    with pytest.raises(OSError, match=advice):
        ready.run()
    assert Path("outputs/tiny/all_results.json").exists()
    # Nor does a run begin that could not be published.
    with pytest.raises(OSError, match=r"the Hub refused \(401\)"):
        prepare(load_recipe("tiny.yaml", [*options, "training.output_dir=other"]), said.append)
    assert not Path("other").exists()


# The card


def test_a_card_with_a_slip_in_its_head_is_told(run_folder):
    (run_folder / "README.md").write_text("---\ntitle: a: b\n---\nmine\n")
    with pytest.raises(ValueError, match=r"README\.md: no YAML above its text: mapping values"):
        make_card(run_folder)
    (run_folder / "README.md").write_text("---\nlanguage:\n- en\n- no\n---\nmine\n")
    assert ModelCard(make_card(run_folder)).data.language == ["en", "no"]


def test_a_model_without_scores_speaks_of_none(run_folder):
    (run_folder / "all_results.json").unlink()
    assert "The scores are those" not in make_card(run_folder)


def test_the_card_tells_what_the_folder_tells(run_folder):
    text = make_card(run_folder, "ada/reversing", license="cc-by-4.0", languages=["de", "en"])
    card = ModelCard(text)
    data = card.data
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "translation"
    assert data.language == ["de", "en"]
    assert data.license == "cc-by-4.0"
    assert data.datasets is None
    assert data.metrics == ["bleu", "exact_match", "perplexity", "accuracy"]
    assert data.model_name == "reversing"
    results = {result.metric_name: result for result in data.eval_results}
    assert {name: result.metric_value for name, result in results.items()} == {
        "BLEU": 38.1235,
        "Exact match": 0.25,
        "Perplexity": 1.5683,
        "Token accuracy": 0.91,
    }
    bleu = results["BLEU"]
    assert (bleu.task_type, bleu.metric_type) == ("translation", "bleu")
    assert (bleu.dataset_name, bleu.dataset_split) == ("pairs.de-en.tsv", "test")
    assert bleu.metric_args == {"signature": SCORES["test_bleu_signature"]}

    model = TinyTFMForConditionalGeneration.from_pretrained(run_folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    versions = json.loads((run_folder / "run.json").read_text())["versions"]
    for expected in (
        "# reversing\n",
        "translates de to en",
        f"{parameters:,} parameters",
        "| BLEU | 39.88 | 38.12 | sacreBLEU on raw text",
        "| loss | 0.4321 | 0.45 |",
        "500 rows of validation data, 1,000 rows of test data",
        f"- BLEU: `{SCORES['test_bleu_signature']}`",
        "Greedy outputs.",
        "| begun from | scratch |",
        "| time | 1 h 2 min, evaluation included |",
        "| hardware | 2 threads of ",
        f"torch {versions['torch']}",
        "| updates | 4,000 |",
        "| learning rate | the paper's schedule (Eq. 3), warmup over the first 400 |",
        "| label smoothing | 0.1 |",
        "| train data | 28,500 pairs |",
        "![Loss and scores over the updates](curves.png)",
        "one run (seed 7)",
        "The weights: cc-by-4.0.",
    ):
        assert expected in text, expected
    assert "home" not in text


def test_what_is_not_known_is_left_out(run_folder):
    for name in ("recipe.yaml", "all_results.json", "run.json", "curves.png"):
        (run_folder / name).unlink()
    text = make_card(run_folder, "ada/reversing")
    data = ModelCard(text).data.to_dict()
    assert set(data) == {"library_name", "pipeline_tag", "tags"}
    for absent in ("## Results", "## Training", "curves", "BLEU", "hardware", "None", "nan"):
        assert absent not in text
    assert "No licence of the weights is stated" in text
    assert "How it was trained is not recorded here." in text


@pytest.mark.parametrize(
    ("columns", "languages"),
    [
        (("translation.en", "translation.de"), ["en", "de"]),
        (("de", "en"), ["de", "en"]),
        (("source", "target"), []),
        (("in", "out"), []),
        (("en", "en"), []),
    ],
)
def test_languages_come_from_the_columns_names(run_folder, columns, languages):
    document = yaml.safe_load((run_folder / "recipe.yaml").read_text())
    document["data"] = {
        "dataset_name": "ada/pairs",
        "dataset_config_name": "tiny",
        "source_column": columns[0],
        "target_column": columns[1],
    }
    (run_folder / "recipe.yaml").write_text(yaml.safe_dump(document))
    data = ModelCard(make_card(run_folder)).data
    assert (data.language or []) == languages
    assert data.pipeline_tag == ("translation" if languages else "text2text-generation")
    assert data.datasets == ["ada/pairs"]
    assert {(r.dataset_type, r.dataset_config) for r in data.eval_results} == {
        ("ada/pairs", "tiny")
    }


def test_the_model_that_it_began_from_is_named_without_its_path(run_folder):
    document = yaml.safe_load((run_folder / "recipe.yaml").read_text())
    for start, base_model, shown in (
        ("ada/parent", "ada/parent", "ada/parent"),
        (str(run_folder.parent / "parent"), None, "parent"),
    ):
        document["model"] = {"from_pretrained": start}
        (run_folder / "recipe.yaml").write_text(yaml.safe_dump(document))
        card = ModelCard(make_card(run_folder))
        assert card.data.base_model == base_model
        assert f"| begun from | {shown} |" in card.content


def test_a_card_stays_as_a_person_left_it(hub, run_folder, said):
    assert write_card(run_folder)
    file = run_folder / "README.md"
    assert is_generated(file.read_text())
    assert is_generated(file.read_text().replace("\n", "\r\n"))
    assert write_card(run_folder, license="mit")  # nobody touched it
    assert write_card(run_folder)
    assert ModelCard.load(file).data.license == "mit"  # once stated, it stays
    edited = file.read_text().replace("## Limits", "## Limits, in my words")
    assert not is_generated(edited)
    file.write_text(edited)
    assert not write_card(run_folder)
    push(run_folder, "ada/mine", say=said.append)
    assert hub.files("ada/mine")["README.md"].decode() == edited
    assert any("published as it was edited" in line for line in said)
    push(run_folder, "ada/mine", new_card=True, say=said.append)
    assert is_generated(hub.files("ada/mine")["README.md"].decode())
    assert file.read_text() == edited


def test_what_an_edited_card_does_not_state_is_told(hub, run_folder, said):
    write_card(run_folder, license="mit")
    file = run_folder / "README.md"
    file.write_text(file.read_text().replace("## Limits", "## Mine"))
    for number in (1, 2):  # the folder's, then the Hub's
        said.clear()
        push(run_folder, "ada/mine", license="mit", languages=["de"], say=said.append)
        told = [line for line in said if "stays as it is" in line]
        assert len(told) == 1, number
        assert told[0].startswith("language stays as it is on that card: write de above its text")
        assert "--new-card" in told[0]
        file.unlink(missing_ok=True)


def test_the_card_of_the_hub_is_read_anew(hub, run_folder, said, monkeypatch):
    push(run_folder, "ada/mine", say=said.append)

    def unreachable(*arguments, force_download=False, **_):
        assert force_download, "a cached card would do"
        raise ValueError("Force download failed") from HTTPError("no connection")

    monkeypatch.setattr(publishing.HfApi, "hf_hub_download", unreachable)
    with pytest.raises(OSError, match=r"ada/mine: the Hub cannot be reached \(HTTPError\)"):
        push(run_folder, "ada/mine", say=said.append)
    assert len(hub.repositories["ada/mine"].messages) == 2


def test_a_card_edited_on_the_hub_stays_and_an_empty_one_does_not(hub, run_folder, reverser, said):
    reverser.push_to_hub("ada/mine")
    assert b"More Information Needed" in hub.files("ada/mine")["README.md"]
    push(run_folder, "ada/mine", say=said.append)
    card = hub.files("ada/mine")["README.md"].decode()
    assert is_generated(card)
    tree = {**hub.files("ada/mine"), "README.md": card.replace("## Limits", "## Mine").encode()}
    hub.repositories["ada/mine"].commit("main", tree, "edited on the page")
    push(run_folder, "ada/mine", say=said.append)
    assert b"## Mine" in hub.files("ada/mine")["README.md"]
    assert "README.md of ada/mine was edited there and stays" in said


def other_folders() -> dict[str, str]:
    """Folders of the other shapes, and one without tokenizer and recipe; the Auto class of each."""
    tokenizer = train_tokenizer(["a b c d e f g"], kind="word", vocab_size=50, show_progress=False)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1}
    labels = {"id2label": {0: "bad", 1: "good"}, "label2id": {"bad": 0, "good": 1}}
    models = {
        "language-model": TinyTFMForCausalLM(tiny_config(**DECODER, **ids)),
        "classifier": TinyTFMForSequenceClassification(tiny_config(**ENCODER, **ids, **labels)),
        "features": TinyTFMForSequenceClassification(tiny_config(**ENCODER, input_feature_size=5)),
    }
    for name, model in models.items():
        model.save_pretrained(name)
        if name != "features":
            save_tokenizer(tokenizer, name)
    size = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32}
    size |= {"decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    marian = MarianConfig(vocab_size=50, pad_token_id=49, decoder_start_token_id=49, **size)
    conversion.from_marian(MarianMTModel(marian)).save_pretrained("from-marian")
    return {
        "language-model": "text-generation",
        "classifier": "text-classification",
        "features": None,
        "from-marian": "text2text-generation",
    }


def test_every_way_on_every_card_works(hub, online, elsewhere, run_folder, said, tmp_path, capsys):
    """Copied from the card: the first way elsewhere, the others where the package is installed."""
    push(run_folder, "ada/reversing", say=said.append)
    cards = {"ada/reversing": hub.files("ada/reversing")["README.md"].decode()}
    for folder, tag in other_folders().items():
        name = f"ada/{folder}"
        push(folder, name, say=said.append)
        cards[name] = hub.files(name)["README.md"].decode()
        assert ModelCard(cards[name]).data.pipeline_tag == tag
    first, second = [], []
    for card in cards.values():
        without_package, with_package = code_blocks(card)
        assert "trust_remote_code=True" in without_package
        assert "trust_remote_code=True" not in with_package
        first.append(without_package)
        second.append(with_package)
    run_all = "import json, sys\nfor code in json.loads(sys.argv[1]):\n    exec(code, {})\n"
    seen = elsewhere(run_all, json.dumps(first), **online).splitlines()
    assert seen[0] == "['4 3 2 1']"
    assert seen[2] in ("bad", "good")
    assert len(seen) == 5
    capsys.readouterr()
    for code in second:
        exec(code, {})
    also_seen = capsys.readouterr().out.splitlines()
    random_features = 3
    del seen[random_features], also_seen[random_features]
    assert also_seen == seen
    # The command line, in this checkout.
    (command,) = code_blocks(cards["ada/reversing"], "bash")
    command = command.replace("| python ", f"| {sys.executable} ")
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "h")}
    finished = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env=environment | online | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.stdout == "4 3 2 1\n", finished.stderr


# What strangers' code may do


def test_b44_repositories_use_each_its_own_code(hub, online, elsewhere, digits):  # noqa: F811
    """Two of one name and two of one owner, which differ in one constant of their code."""
    names = ["ada/m", "eve/m", "ada/n.v1-0"]
    for number, name in enumerate(names):
        tiny_model().save_pretrained("folder")
        save_tokenizer(digits, "folder")
        file = Path("folder/modeling_tinytfm.py")
        code = file.read_text(encoding="utf-8")
        changed = code.replace("base: float = 10000.0", f"base: float = 1000{number}.0")
        assert (number == 0) == (changed == code)
        file.write_text(changed, encoding="utf-8")
        push("folder", name, token=EVE if name.startswith("eve") else ADA)
    code = """
import json, sys, transformers
found = []
for name in json.loads(sys.argv[1]):
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=True)
    found.append(sys.modules[type(model).__module__].sinusoids.__defaults__[0])
print(json.dumps(found))
"""
    found = elsewhere(code, json.dumps([*names, *names]), **online).splitlines()[-1]
    assert json.loads(found) == [10000.0, 10001.0, 10002.0] * 2


def test_b43_whoever_loaded_it_publishes_it_again_without_the_package(
    hub, online, elsewhere, run_folder
):
    push(run_folder, "ada/first")
    code = """
import sys, transformers
name, again = "ada/first", "ada/again"
model = transformers.AutoModelForSeq2SeqLM.from_pretrained(name, trust_remote_code=True)
tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=True)
model.push_to_hub(again)
tokenizer.push_to_hub(again)
model = transformers.AutoModelForSeq2SeqLM.from_pretrained(again, trust_remote_code=True)
batch = tokenizer(["1 2 3"], return_tensors="pt")
print(tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True))
"""
    assert elsewhere(code, HF_TOKEN=ADA, **online).splitlines()[-1] == "['3 2 1']"
    held = hub.files("ada/again")
    first = hub.files("ada/first")
    for name in ("configuration_tinytfm.py", "modeling_tinytfm.py", "model.safetensors"):
        assert held[name] == first[name]
    assert (
        json.loads(held["config.json"])["auto_map"] == json.loads(first["config.json"])["auto_map"]
    )
    assert b"--" not in held["config.json"]
    # Its tokenizer is transformers' own there; pushed with the package, it is mended.
    own = load_tokenizer("ada/again")
    own.push_to_hub("ada/again")
    settings = json.loads(hub.files("ada/again")["tokenizer_config.json"])
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"


class Trap:
    """Makes a file when it is unpickled."""

    def __reduce__(self):
        return (Path.touch, (Path("it-ran"),))


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_resuming_runs_nothing_that_a_checkpoint_pickled(
    name,
    reverser,
    digits,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    monkeypatch.chdir(tmp_path)
    trainer_of(reverser_copy(reverser), digits, push_to_hub=False, max_steps=2).train()
    checkpoint = Path("outputs/trained/checkpoint-2")
    torch.save(Trap(), checkpoint / name)
    torch.save(Trap(), checkpoint / "training_args.bin")  # which nobody reads
    trainer = trainer_of(reverser_copy(reverser), digits, push_to_hub=False)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert not Path("it-ran").exists()


def test_no_code_of_a_repository_runs_unasked(hub, online, elsewhere, run_folder, monkeypatch):
    file = run_folder / "modeling_tinytfm.py"
    code = file.read_text(encoding="utf-8")
    file.write_text(code + "\nopen('it-ran', 'w').close()\n", encoding="utf-8")
    push(run_folder, "ada/m")
    attempt = """
import os, sys, transformers
for name in (sys.argv[1], "ada/m"):
    for options in ({}, {"trust_remote_code": False}):
        try:
            transformers.AutoModelForSeq2SeqLM.from_pretrained(name, **options)
            print("loaded")
        except ValueError as error:
            print("refused", "trust_remote_code" in str(error))
    assert not os.path.exists("it-ran")
transformers.AutoModelForSeq2SeqLM.from_pretrained("ada/m", trust_remote_code=True)
print(os.path.exists("it-ran"))
"""
    printed = elsewhere(attempt, str(run_folder), **online).splitlines()
    # transformers puts its question in front of the first of each pair, and gets no answer.
    assert [line.rpartition("refused ")[2] for line in printed[:-1] if "refused" in line] == (
        ["True"] * 4
    )
    assert printed[-1] == "True"
    Path("it-ran").unlink()
    for name in (str(run_folder), "ada/m"):
        model, tokenizer = load_model(name)
        assert translate(model, tokenizer, ["1 2 3"]) == ["3 2 1"]
    assert not Path("it-ran").exists()


def test_a_licence_once_stated_stays(hub, run_folder, said):
    push(run_folder, "ada/licensed", license="mit", languages=["en", "de"], say=said.append)
    push(run_folder, "ada/licensed", say=said.append)
    card = ModelCard(hub.files("ada/licensed")["README.md"].decode()).data
    assert card.license == "mit"
    assert card.language == ["en", "de"]
