"""Train a small transformer on real text, character by character, and let it write.

    pip install -e .
    python examples/quickstart.py                  # on the accelerator if there is one, else on the CPU (a minute or two)
    torchrun --nproc-per-node 2 examples/quickstart.py      # the same run on two ranks
    tensorboard --logdir runs/quickstart           # the curves

The text is Python's own manual, which comes with every Python. All that the run writes is in `--out`: checkpoints, logs, and the
exported weights. Stop it with Ctrl-C and start it again: it goes on from there. Once it is finished, it says so and only writes
text; a larger `--steps` trains it further, with the learning rates of a run of the new length.
"""

import argparse
import pydoc_data.topics
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from trainer_kit import AutoDataProvider, CausalLMTask, MeshStrategy, Trainer
from trainer_kit.callbacks import Checkpoint, Evaluate, GradientClipping, JSONLines, TensorBoard
from trainer_kit.models import Decoder, DecoderConfig, generate
from trainer_kit.optim import AdamW, Piecewise

parser = argparse.ArgumentParser(description="Train a small transformer on Python's manual, and let it write.")
parser.add_argument("--steps", type=int, default=500, help="optimizer steps in all (default: %(default)s)")
parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="folder of the run (default: %(default)s)")
parser.add_argument("--device", help="such as cpu or cuda (default: the accelerator if there is one, else cpu)")
args = parser.parse_args()

# 1. Data. A dataset is anything with numbered samples, here a tensor whose rows are 64 characters each. A step takes 32 of them,
#    in two forward passes of 16; the result does not depend on how a step is divided.
text = " ".join(" ".join(pydoc_data.topics.topics.values()).split())  # runs of white space become one space
alphabet = sorted(set(text))
number = {character: index for index, character in enumerate(alphabet)}
rows = torch.tensor([number[character] for character in text[: len(text) // 64 * 64]]).view(-1, 64)
num_training = len(rows) * 19 // 20
training = AutoDataProvider(rows[:num_training], global_batch_size=32, microbatch_size=16, shuffle=True)
validation = AutoDataProvider(rows[num_training:], global_batch_size=128)

# 2. Model. The trainer calls this function and gives the weights their memory and their first values, which follow from its seed.
config = DecoderConfig(vocab_size=len(alphabet), num_layers=2, num_heads=4, hidden_size=128, max_seq_len=64)


def make_model() -> Decoder:
    return Decoder(config)


# 3. Trainer. Nothing is built before it is used; `print(trainer.describe())` shows all parts.
trainer = Trainer(
    make_model,
    CausalLMTask(),
    training,
    MeshStrategy(device=args.device),
    optimizer=AdamW(lr=5e-3, weight_decay=0.1),
    lr_scheduler=Piecewise().linear(1.0, percent=5).cosine(0.05, rest=True),
    callbacks=[
        GradientClipping(1.0),
        Evaluate(validation, every=100),
        Checkpoint(args.out / "checkpoints", every=100, keep_last=2),
        TensorBoard(args.out / "tensorboard"),
        JSONLines(args.out / "log.jsonl"),
    ],
    total_steps=args.steps,
    run_name="quickstart",
)

# 4. Train, from the newest checkpoint if there is one.
try:
    trainer.fit()
except KeyboardInterrupt:
    sys.exit(f"stopped and saved after {trainer.step} steps; start it again to go on")

# 5. Export the weights to a file that other tools read too (all ranks take part), and read it into a fresh model.
(file_name,) = trainer.export(args.out / "model")
if not trainer.context.is_main:
    sys.exit()
model = make_model()
model.load_state_dict(load_file(args.out / "model" / file_name))

# 6. Write.
prompt = torch.tensor([[number[character] for character in "The "]])
written = generate(model, prompt, max_new_tokens=300, temperature=0.5, generator=torch.Generator().manual_seed(0))
print(f"\n{args.out / 'model' / file_name} writes:\n")
print("".join(alphabet[index] for index in written[0].tolist()))
