"""Training with the weights cut up among the processes: FSDP, as accelerate sets it up.

Only training sees the pieces. Whatever else wants the model (evaluation, generation, checkpoints,
averaging, the saved folder) gets a whole one of the ordinary class, into which the pieces are
copied: processes evaluate different numbers of batches and of generated tokens, which modules that
gather their weights at every call would not survive.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.utils import parse_flag_from_env
from packaging.version import Version
from torch.distributed.fsdp.fully_sharded_data_parallel import StateDictType
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainingArguments

FIRST_VERSION = "5.24.0"  # of transformers: the first that was tried and works


def shard_on_cpus_too(arguments: TrainingArguments) -> None:
    """Lets accelerate shard where the processes have no GPU.

    accelerate 1.15 knows FSDP for groups of accelerators only; a group of CPUs that asked for it
    would train with whole weights, in silence.

    Args:
        arguments: The Trainer's, before there is an Accelerator.
    """
    wanted = arguments.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP")
    if wanted and arguments.device.type == "cpu":
        state = PartialState()
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU  # the Accelerator makes FSDP of it


def refuse_deepspeed(arguments: TrainingArguments) -> None:
    """Refuses what would leave checkpoints that nothing here can go on from.

    Args:
        arguments: The Trainer's, before there is an Accelerator.

    Raises:
        ValueError: With what to take instead.
    """
    if arguments.deepspeed or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        raise ValueError(
            "DeepSpeed leaves no checkpoint that a run could be continued from: cut up the weights "
            "by FSDP (accelerate launch --config_file configs/accelerate/fsdp.yaml)"
        )


def check_sharding(accelerator: Accelerator) -> None:
    """Refuses ways of sharding that leave no checkpoint to be loaded elsewhere.

    Raises:
        ValueError: With what to write instead.
    """
    plugin: Any = accelerator.state.fsdp_plugin
    if Version(transformers.__version__) < Version(FIRST_VERSION):
        raise ValueError(
            f"transformers {transformers.__version__} saves sharded models by its main process "
            f"alone: install transformers>={FIRST_VERSION}"
        )
    if plugin.fsdp_version != 2:
        raise ValueError(
            f"fsdp_version={plugin.fsdp_version}: transformers gives it up; write fsdp_version: 2 "
            "in the file of accelerate launch (configs/accelerate/fsdp.yaml)"
        )
    if plugin.state_dict_type != StateDictType.FULL_STATE_DICT:
        raise ValueError(
            f"fsdp_state_dict_type={plugin.state_dict_type.name} would leave checkpoints without a "
            "model.safetensors: write FULL_STATE_DICT"
        )


@contextmanager
def embeddings_in_the_outermost_group(model: PreTrainedModel) -> Iterator[None]:
    """Keeps accelerate from giving the embeddings a group of their own while it shards a model.

    It would take the input's and the output's, but with all sharing on there are two more that have
    the same weight, and torch refuses a weight that is in two groups.

    Args:
        model: The model that is to be sharded.
    """
    names = ("get_input_embeddings", "get_output_embeddings")
    for name in names:
        setattr(model, name, lambda: None)
    try:
        yield
    finally:
        for name in names:
            delattr(model, name)


def copy_whole(sharded: PreTrainedModel, whole: PreTrainedModel) -> None:
    """Copies weights out of their pieces; all processes call this.

    Args:
        sharded: The model that is trained.
        whole: An ordinary model of the same class and size.
    """
    pieces = getattr(sharded, "_orig_mod", sharded).state_dict()  # torch.compile's wrapper, if any
    with torch.no_grad():
        for name, weight in whole.state_dict().items():
            piece = pieces[name]
            weight.copy_(piece.full_tensor() if isinstance(piece, DTensor) else piece)
