"""Train a small transformer on real text, character by character, and let it write.

    pip install -e .
    python examples/quickstart.py                  # on the accelerator if there is one, else about a minute on two CPU cores
    tensorboard --logdir runs/quickstart           # the curves

The text is Python's own manual, which every Python ships. Everything that the run writes goes to `--out` (runs/quickstart): checkpoints, logs, the
exported weights. Press Ctrl-C and start it again: it goes on where it was. When it is finished, it says so and only writes text;
a larger `--steps` trains further.
"""

import argparse
import pydoc_data.topics
from pathlib import Path

import torch
from safetensors.torch import load_file

from trainer_kit import AutoDataProvider, CausalLMTask, MeshStrategy, Trainer
from trainer_kit.callbacks import Checkpoint, Evaluate, GradientClipping, JSONLines, TensorBoard, Throughput
from trainer_kit.models import Decoder, DecoderConfig, generate
from trainer_kit.optim import AdamW, Piecewise

parser = argparse.ArgumentParser(description="Train a small transformer on Python's manual.")
parser.add_argument("--steps", type=int, default=300, help="optimizer steps in all (default: %(default)s)")
parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="folder of the run (default: %(default)s)")
parser.add_argument("--device", help="such as cpu or cuda (default: the accelerator if there is one, else cpu)")
args = parser.parse_args()

# 1. Data. A dataset is anything with numbered samples: here a tensor whose rows are blocks of characters.
LENGTH = 128
text = "\n".join(pydoc_data.topics.topics.values())
alphabet = sorted(set(text))
number = {character: index for index, character in enumerate(alphabet)}
characters = torch.tensor([number[character] for character in text])
blocks = characters[: len(characters) // LENGTH * LENGTH].view(-1, LENGTH)
num_train = int(0.95 * len(blocks))
train = AutoDataProvider(blocks[:num_train], global_batch_size=32, microbatch_size=16, shuffle=True)
validation = AutoDataProvider(blocks[num_train:], global_batch_size=64)

# 2. Model. A function that builds it: the trainer calls it, gives it memory on the device and initial values that follow from the seed.
config = DecoderConfig(vocab_size=len(alphabet), num_layers=4, num_heads=4, hidden_size=128, max_seq_len=LENGTH)


def make_model() -> Decoder:
    return Decoder(config)


# 3. The trainer puts the parts together.
trainer = Trainer(
    make_model,
    CausalLMTask(),
    train,
    MeshStrategy(device=args.device),
    optimizer=AdamW(lr=3e-3, weight_decay=0.1),
    lr_scheduler=Piecewise().linear(1.0, percent=5).cosine(0.05, rest=True),
    callbacks=[
        GradientClipping(1.0),
        Evaluate(validation, every=100),
        Checkpoint(args.out / "checkpoints", every=50, keep_last=2),
        Throughput(tokens=lambda microbatch: microbatch.numel()),
        TensorBoard(args.out / "tensorboard"),
        JSONLines(args.out / "log.jsonl"),
    ],
    total_steps=args.steps,
    log_every=10,
    run_name="quickstart",
)

# 4. Train. If the folder holds a checkpoint, the run goes on from there.
trainer.fit()

# 5. Export the weights to a file that other tools read too, and read it back into a fresh model.
model_file = args.out / "model" / trainer.export(args.out / "model")[0]
model = make_model()
model.load_state_dict(load_file(model_file))

# 6. Let it write.
prompt = "The "
tokens = torch.tensor([[number[character] for character in prompt]])
written = generate(model, tokens, 400, temperature=0.7, generator=torch.Generator().manual_seed(0))[0]
print(f"\n{model_file} says:\n")
print("".join(alphabet[index] for index in written.tolist()))
