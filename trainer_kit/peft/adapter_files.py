"""Adapter files as the peft library reads and writes them: `adapter_model.safetensors` and `adapter_config.json` in one folder.

Before editing: the config is what makes a folder valid, so it comes last; of a config that changes, the old one goes first.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainer_kit.exceptions import CheckpointError, ConfigurationError, StateError
from trainer_kit.mesh.team import Team
from trainer_kit.model.provider import StageContext, StageInfo
from trainer_kit.peft.inject import adapted_weights
from trainer_kit.peft.library_names import StageNames, check_config, check_ties, library_config, stage_names
from trainer_kit.peft.provider import AdaptedProvider
from trainer_kit.storage import Folder
from trainer_kit.weights.format import build_header, tensor_bytes
from trainer_kit.weights.loading import StageLoad, load_stages
from trainer_kit.weights.mappers import Drop, Parallel
from trainer_kit.weights.publish import MARK, TEMPORARY, check_folder, write_temporary
from trainer_kit.weights.stages import StageState, stage_state

if TYPE_CHECKING:
    from trainer_kit.trainer import Trainer

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def export_adapters(trainer: Trainer, path: str | os.PathLike[str]) -> list[str]:
    """Write the adapters of a trainer's model, and what is tuned in full, so that `PeftModel.from_pretrained(base, path)` loads them.

    All ranks call it; the files are the same as those of one process. Earlier adapter files of ours in the folder are replaced.
    Raises UnsupportedError for weights that have no place in such files, CheckpointError for a folder that holds something else.
    """
    _, stages, team = _names(trainer)
    config = library_config(stages, _base_of(trainer))
    stored = {name for stage in stages for name in stage.stored}
    others = Drop([entry.name for entry in trainer.parameters.entries if entry.name not in stored])
    with trainer.model_state(Parallel([*(stage.export_mapper() for stage in stages), others]), to="main") as buckets:
        tensors = {name: tensor.cpu().contiguous() for bucket in buckets for name, tensor in bucket}
    return team.on_main(lambda: _write(Folder(path), config, tensors))


def load_adapters(trainer: Trainer, path: str | os.PathLike[str]) -> None:
    """Fill the adapters of a trainer's model, and what is tuned in full, from adapter files, those of the peft library too.

    All ranks call it, before `fit`. The model must have been adapted alike: CheckpointError says what differs.
    """
    names, stages, team = _names(trainer)
    folder = Folder(path)
    config = team.on_main(lambda: _read_config(folder))
    check_config(config, stages, folder.path(CONFIG))

    def parts() -> list[StageLoad]:
        found = []
        for index, stage in names.items():
            tensors = stage_state(trainer.parameters, index).tensors
            wanted = {name: tensors[name] for name in stage.stored}
            found.append(StageLoad(stage.load_mapper(), StageState(index, wanted, aliases={}, copies=frozenset())))
        return found

    load_stages(folder.path(WEIGHTS), parts, trainer.context)


def _names(trainer: Trainer) -> tuple[dict[int, StageNames], list[StageNames], Team]:
    """What is in adapter files and how it is called there, of each stage of this rank, and of all stages in their order. A collective."""
    trainer.build()
    context, provider = trainer.context, trainer.recipe.model_provider
    if not isinstance(provider, AdaptedProvider):
        raise ConfigurationError(f"the model comes from a {type(provider).__name__}, expected trainer_kit.peft.adapt(model, LoRA(...))")
    num_stages, team = context.stage_layout.num_stages, Team.of(context)

    def find() -> dict[int, StageNames]:
        found = {}
        for index, module in zip(context.stages, trainer.stages, strict=True):
            if any(item.lora.original is not None for item in adapted_weights(module)):
                raise StateError("the adapters are merged into the weights; call trainer_kit.peft.unmerge(model) first")
            found[index] = stage_names(module, provider.load_mapper(StageContext(context, StageInfo(index, num_stages), module)))
        return found

    mine = team.everywhere(find)
    everywhere = {index: stage for told in team.exchange(mine) for index, stage in told.items()}
    stages = [everywhere[index] for index in sorted(everywhere)]
    check_ties(stages)
    return mine, stages, team


def _base_of(trainer: Trainer) -> str | None:
    source = trainer.config.source_model
    return None if source is None else os.fspath(source)


def _write(folder: Folder, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[str]:
    check_folder(folder)
    text = json.dumps(config, indent=2, sort_keys=True).encode()
    placed = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))  # aligned, and the same from any mesh
    header, _ = build_header(((name, tensor.dtype, tensor.shape) for name, tensor in placed), {"format": "pt", MARK[0]: MARK[1]})
    try:
        folder.make()
        write_temporary(folder, WEIGHTS, [header, *(tensor_bytes(tensor) for _, tensor in placed)])
        write_temporary(folder, CONFIG, [text])
        if folder.exists(CONFIG) and folder.read(CONFIG) != text:
            folder.remove(CONFIG)
        folder.rename(WEIGHTS + TEMPORARY, WEIGHTS)
        folder.rename(CONFIG + TEMPORARY, CONFIG)
        folder.sync()
    except BaseException as error:
        with contextlib.suppress(OSError):
            for name in (WEIGHTS, CONFIG):
                folder.remove(name + TEMPORARY)
        if not isinstance(error, OSError):
            raise
        raise CheckpointError(f"the adapters could not be written to {folder.url}: {error}; free space or choose another folder") from error
    return [WEIGHTS, CONFIG]


def _read_config(folder: Folder) -> dict[str, Any]:
    if not folder.exists(CONFIG) or not folder.exists(WEIGHTS):
        raise CheckpointError(f"no adapters at {folder.url}: {CONFIG} and {WEIGHTS} were expected, found {folder.names()[:10]}")
    return folder.read_object(CONFIG, CheckpointError)
