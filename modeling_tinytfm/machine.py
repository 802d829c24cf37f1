"""What a run finds: threads, processes, device and precision."""

import os
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object, parse_flag_from_env
from transformers import Seq2SeqTrainingArguments, TrainingArguments
from transformers.integrations import get_available_reporting_integrations
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from .flops import processor_has_any
from .recipes import Recipe

# What a person can mend; anything else that preparation raises is a bug, and shows its traceback.
PREPARATION_ERRORS = (ValueError, OSError, ImportError)


def use_threads(threads: int | None) -> int:
    """Gives torch so many CPU threads, or all cores divided by this machine's processes.

    accelerate's launcher allows one, which leaves all other cores of a CPU idle.
    """
    if threads is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        threads = max(1, (cores or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(threads)
    return threads


@contextmanager
def main_process_first(state: PartialState) -> Iterator[None]:
    """Lets the main process fill the caches that the others then find.

    An error on one process becomes an error on all: accelerate's own context manager of this name
    would leave the others waiting for a process that has ended.
    """
    if not state.is_main_process:
        _share_error(None)
    error = None
    try:
        yield
    except PREPARATION_ERRORS as caught:
        error = caught
    if state.is_main_process:
        _share_error(error)
    _share_error(error)


def _share_error(error: Exception | None) -> None:
    messages = gather_object([None if error is None else str(error)])
    if error is not None:
        raise error
    for message in messages:
        if message is not None:
            raise ValueError(message)


def from_main_process(value: Any) -> Any:
    """The main process's value, on every process."""
    return broadcast_object_list([value])[0]


def training_arguments(recipe: Recipe) -> Seq2SeqTrainingArguments:
    """The Trainer's arguments, with the choices that depend on the machine.

    Making them also joins this process to the group of all.

    Raises:
        ValueError: If the machine cannot do what they ask for.
        ImportError: If a package is missing that they report to.
    """
    values = recipe.training.trainer_arguments()
    check_reporters(values.get("report_to"))
    chosen = device_arguments(values)
    values.update(chosen)
    values.setdefault("ddp_find_unused_parameters", False)
    values.setdefault("ddp_broadcast_buffers", False)  # none changes
    values.setdefault("hub_strategy", "end")  # published once, with its scores
    debug_level = torch.distributed.get_debug_level()
    if chosen["use_cpu"]:
        # With TORCH_DISTRIBUTED_DEBUG=DETAIL the CPUs' group would come in a wrapper, which DDP of
        # torch 2.13 takes for the group itself: it crashes.
        torch.distributed.set_debug_level(torch.distributed.DebugLevel.OFF)
    try:
        arguments = Seq2SeqTrainingArguments(**values)
    finally:
        torch.distributed.set_debug_level(debug_level)
    # Made from the launcher's choice where neither is set, which what is recorded would not tell.
    name = precision(arguments)
    arguments.mixed_precision = "no" if name == "fp32" else name
    return arguments


def check_reporters(report_to: str | list[str] | None) -> None:
    """Looks for what the log is to be sent to.

    Args:
        report_to: As the Trainer takes it.

    Raises:
        ImportError: If its package is missing.
    """
    names = [report_to] if isinstance(report_to, str) else report_to or []
    for name in {*names} - {"all", "none", *get_available_reporting_integrations()}:
        if name in INTEGRATION_TO_CALLBACK:
            extra = f"'modeling-tinytfm[{name}]'" if name == "tensorboard" else name
            raise ImportError(
                f"training.report_to={name}: its package is not installed: pip install {extra}"
            )


def device_arguments(values: dict[str, Any], *, training: bool = True) -> dict[str, Any]:
    """Device and precision for the given arguments of the Trainer, on this machine.

    What they leave open is what `accelerate launch` was told (`--cpu`, `--mixed_precision`), or
    else the fastest that a GPU has. A trained model is scored in what there is.

    Raises:
        ValueError: If training cannot have the precision.
    """
    has_accelerator = torch.cuda.is_available() or torch.backends.mps.is_available()
    told_cpu = values.get("use_cpu", False) or parse_flag_from_env("ACCELERATE_USE_CPU")
    use_cpu = told_cpu or not has_accelerator
    fp16, bf16 = values.get("fp16"), values.get("bf16")
    asked = f"training.fp16={str(fp16).lower()}"
    launched = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if training and fp16 is None and bf16 is None and launched != "no":
        asked = f"--mixed_precision {launched} of accelerate launch"
        if launched not in ("fp16", "bf16"):
            raise ValueError(f"{asked} is not known here: leave it out, or take bf16 or fp16")
        fp16, bf16 = launched == "fp16", launched == "bf16"
    if training and fp16 and use_cpu:
        raise ValueError(f"{asked} needs a GPU: a CPU has no fast fp16; leave it out")
    if bf16 is None:
        has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(False)
        bf16 = has_bf16 and not use_cpu and not fp16
    return {"use_cpu": use_cpu, "fp16": bool(fp16) and not use_cpu, "bf16": bf16}


def precision(arguments: TrainingArguments) -> str:
    """The type that a run computes in."""
    return "bf16" if arguments.bf16 else "fp16" if arguments.fp16 else "fp32"


def cpu_multiplies_bf16() -> bool | None:
    """Whether this CPU has instructions for bf16, which torch else imitates; None: not known."""
    return processor_has_any("avx512_bf16", "amx_bf16")


def bf16_advice(arguments: TrainingArguments) -> str:
    """What a run on a CPU had better compute in, if that is something else; "" if not."""
    has_bf16 = cpu_multiplies_bf16()
    if arguments.device.type == "cpu" and has_bf16 and precision(arguments) == "fp32":
        return "this processor has bf16: try training.bf16=true"
    if arguments.device.type == "cpu" and has_bf16 is False and precision(arguments) == "bf16":
        return "this processor only imitates bf16, slowly: try training.bf16=false"
    return ""


def allocator(arguments: TrainingArguments) -> str | None:
    """What a run on a CPU of Linux should know of the library that lends memory, in words."""
    if arguments.device.type != "cpu" or sys.platform != "linux":
        return None
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    if found := re.search(r"/lib(\w*malloc)\w*\.so", mapped):
        return found[1]
    return "the system's; tcmalloc is faster: apt-get install libtcmalloc-minimal4"


def machine_facts(arguments: TrainingArguments, threads: int) -> dict[str, Any]:
    """What a reader of the results should know of the machine; nothing that names it."""
    if arguments.device.type == "cuda":
        device = torch.cuda.get_device_name(arguments.device)
    elif arguments.device.type == "mps":
        device = f"GPU of {_processor()}"
    else:
        device = f"{threads} {'thread' if threads == 1 else 'threads'} of {_processor()}"
    packages = ("torch", "transformers", "tokenizers", "datasets", "accelerate", "modeling-tinytfm")
    return {
        "hardware": f"{arguments.world_size} x {device}" if arguments.world_size > 1 else device,
        "processes": arguments.world_size,
        "precision": precision(arguments),
        "versions": {"Python": platform.python_version(), **_installed(packages)},
    }


def _installed(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):  # run from a checkout
            found[package] = version(package)
    return found


def _processor() -> str:
    """The CPU's name, as Linux tells it, or its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
