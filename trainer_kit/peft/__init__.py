"""Fine-tuning with few parameters: LoRA, full tuning of chosen ones, and stacks of them, around any model provider.

    from trainer_kit import peft

    model = peft.adapt(model_provider, peft.LoRA(rank=8, alpha=16, targets=["*.q_proj", "*.v_proj"]), peft.FullTuning("*norm"))
    trainer = Trainer(model, task, data, source_model="base", checkpoint_trainable_only=True)
    trainer.fit()
    trainer.export("merged")                       # the base model's layout
    peft.export_adapters(trainer, "adapters")      # as the peft library writes them
"""

from trainer_kit.peft.adapter_files import export_adapters, load_adapters
from trainer_kit.peft.merging import merge, merged, unmerge
from trainer_kit.peft.methods import FullTuning, LoRA
from trainer_kit.peft.provider import AdaptedProvider, adapt

__all__ = ["AdaptedProvider", "FullTuning", "LoRA", "adapt", "export_adapters", "load_adapters", "merge", "merged", "unmerge"]
