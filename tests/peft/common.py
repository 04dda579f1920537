"""What the tests of adapters share: a small decoder, its data, a trainer that is quiet, and the tensors of a folder."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.ranks.support import on_mesh
from tests.support import quiet_trainer
from trainer_kit import AutoDataProvider, CausalLMTask, Trainer, peft
from trainer_kit.models import Decoder, DecoderConfig
from trainer_kit.optim import AdamW

CONFIG = DecoderConfig(
    vocab_size=13, num_layers=2, num_heads=4, num_kv_heads=2, hidden_size=16, intermediate_size=24, max_seq_len=8, init_std=0.2
)
LORA = peft.LoRA(4, 8, targets=["*.[qv]_proj", "*.o_proj", "*.down_proj", "embedding", "head"])
STACK = (LORA, peft.FullTuning("*norm"))


class Tokens(torch.utils.data.Dataset):
    """Sequences of 6 tokens, each a function of its number."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randint(CONFIG.vocab_size, (6,), generator=torch.Generator().manual_seed(index))


def tokens(num: int = 4) -> torch.Tensor:
    """A batch of them."""
    return torch.stack([Tokens()[index] for index in range(num)])


def decoder(stage: Any = None) -> Decoder:
    """The base model, or a stage of it."""
    return Decoder(CONFIG, stage)


def stack(*methods: Any, base: Any = decoder, **options: Any) -> Any:
    """An adapted provider."""
    return peft.adapt(base, *(methods or STACK), **options)


def trainer(model: Any, degrees: dict[str, int] | None = None, **settings: Any) -> Trainer:
    """Three steps of AdamW on 4 sequences each."""
    settings = {"total_steps": 3, "optimizer": AdamW(lr=0.02), **settings}
    data = AutoDataProvider(Tokens(), global_batch_size=4, microbatch_size=2)
    if degrees is None:
        return quiet_trainer(model, CausalLMTask(), data, **settings)
    return on_mesh(model, CausalLMTask(), data, degrees, **settings)


def tensors(folder: Path | str, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
    """What a file holds."""
    return load_file(f"{folder}/{file}")


def assert_bitwise(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, and the same bits."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
