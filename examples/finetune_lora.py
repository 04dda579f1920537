"""Fine-tune a Hugging Face model with LoRA, export it with the adapters merged in, and load it again with transformers.

    pip install -e . transformers
    python examples/finetune_lora.py --model path/to/model     # a folder with a Llama, Qwen3 or Qwen3-MoE
    python examples/finetune_lora.py                           # without one: a tiny random Llama, since nothing is downloaded
    torchrun --nproc-per-node 2 examples/finetune_lora.py --model path/to/model      # the same run on two ranks

The text is Python's own manual. All that the run writes is in `--out`: `model` is a folder for `from_pretrained`, with the tokenizer and
configuration of the model that it came from, and `adapters` holds the adapters alone, as the `peft` library reads them. Left out here:
checkpoints to resume from and evaluation, which are in `quickstart.py`.
"""

import argparse
import os
import pydoc_data.topics
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from trainer_kit import AutoDataProvider, CausalLMTask, MeshStrategy, Trainer, peft
from trainer_kit.callbacks import GradientClipping
from trainer_kit.models import provider_from_hf
from trainer_kit.optim import AdamW, Piecewise

parser = argparse.ArgumentParser(description="Fine-tune a Hugging Face model with LoRA on Python's manual.")
parser.add_argument("--model", type=Path, help="folder of the model (default: a tiny random one is made)")
parser.add_argument("--steps", type=int, default=100, help="optimizer steps (default: %(default)s)")
parser.add_argument("--out", type=Path, default=Path("runs/finetune_lora"), help="folder of the run (default: %(default)s)")
parser.add_argument("--device", help="such as cpu or cuda (default: the accelerator if there is one, else cpu)")
args = parser.parse_args()

# 1. The model to start from.
if args.model is None and os.environ.get("WORLD_SIZE", "1") != "1":
    parser.error("several ranks need --model, such as the random one of an earlier run in one process")
source = args.model or args.out / "random"
if args.model is None:
    torch.manual_seed(0)
    sizes = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=128, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(sizes).save_pretrained(source)

# 2. Data: rows of 64 tokens, by the model's tokenizer if it has one, else bytes.
text = " ".join(pydoc_data.topics.topics.values())
has_tokenizer = (source / "tokenizer_config.json").exists()
tokens = AutoTokenizer.from_pretrained(source)(text)["input_ids"] if has_tokenizer else list(text.encode())
rows = torch.tensor(tokens[: len(tokens) // 64 * 64]).view(-1, 64)

# 3. Adapters on the projections of attention and feed-forward. All else is frozen: no gradients, and no optimizer state.
model = peft.adapt(provider_from_hf(source), peft.LoRA(rank=8, alpha=16, targets=["layers.*_proj"]))
trainer = Trainer(
    model,
    CausalLMTask(),
    AutoDataProvider(rows, global_batch_size=16, microbatch_size=8, shuffle=True),
    MeshStrategy(device=args.device),
    optimizer=AdamW(lr=1e-2),
    lr_scheduler=Piecewise().linear(1.0, percent=10).cosine(0.1, rest=True),
    callbacks=[GradientClipping(1.0)],
    source_model=source,
    total_steps=args.steps,
    run_name="finetune_lora",
)
trainer.fit()

# 4. Export, on all ranks together. The dtype is given so that the copied config.json says it too, whatever the source had.
trainer.export(args.out / "model", dtype=torch.float32, companions=source)
peft.export_adapters(trainer, args.out / "adapters")
logits = trainer.predict(AutoDataProvider(rows[:2], global_batch_size=2))
if not trainer.context.is_main:  # rank 0 got the logits of all
    sys.exit()

# 5. What transformers makes of the folder is the fine-tuned model: its logits are ours, where adapters are added and not merged.
losses = [value for _, value in trainer.history.values("train/loss")]
theirs = AutoModelForCausalLM.from_pretrained(args.out / "model")
with torch.no_grad():
    difference = (theirs(rows[:2]).logits - torch.cat(logits)).abs().max().item()
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; transformers reads {args.out / 'model'}: logits differ by {difference:.1e} at most")
if not difference < 1e-3:
    sys.exit("FAILED: transformers computes other logits")
