"""trainer_kit: one Trainer for PyTorch, from a notebook on one CPU to large meshes."""

from trainer_kit.quick_import import collector_paused

with collector_paused():
    from trainer_kit.callback import Callback
    from trainer_kit.causal_lm import CausalLMTask
    from trainer_kit.config import TrainerConfig
    from trainer_kit.data import AutoDataProvider, DataProvider, Pack, SequencePacking
    from trainer_kit.events import Event
    from trainer_kit.launch import launch
    from trainer_kit.mesh import DistributedContext, MeshStrategy
    from trainer_kit.model import ModelProvider, StageContext, StageInfo
    from trainer_kit.task import Args, ForwardInputs, Loss, SupervisedTask, Task
    from trainer_kit.trainer import Trainer

__all__ = [
    "Args",
    "AutoDataProvider",
    "Callback",
    "CausalLMTask",
    "DataProvider",
    "DistributedContext",
    "Event",
    "ForwardInputs",
    "launch",
    "Loss",
    "MeshStrategy",
    "ModelProvider",
    "Pack",
    "SequencePacking",
    "StageContext",
    "StageInfo",
    "SupervisedTask",
    "Task",
    "Trainer",
    "TrainerConfig",
]

__version__ = "0.1.0"
