"""Fine-tune a Hugging Face MoE model on a text file with FP8 experts: fp32 masters, autocast,
accumulation, clipping.

python examples/finetune_transformers.py
python examples/finetune_transformers.py --model allenai/OLMoE-1B-7B-0924 --text book.txt

Without --model it trains a tiny random Qwen3-MoE on bytes, and downloads nothing.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

from sonicmoe.integrations.transformers import IMPLEMENTATIONS, check_model, register

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument(
    "--model", help="name or directory of a checkpoint; default: a tiny random model"
)
parser.add_argument("--text", type=Path, default=Path(__file__), help="default: this file")
parser.add_argument(
    "--experts", default="sonicmoe_fp8", choices=[*IMPLEMENTATIONS, "grouped_mm", "eager"]
)
parser.add_argument(
    "--freeze-experts", action="store_true", help="train everything but the experts"
)
parser.add_argument(
    "--dtype",
    default="float32",
    choices=["float32", "bfloat16"],
    help="of the weights; float32: masters, trained under autocast to bfloat16",
)
parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
parser.add_argument("--batch", type=int, default=4, help="sequences per micro-batch")
parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
parser.add_argument("--lr", type=float, help="default: 1e-5; 3e-3 for the tiny model")
parser.add_argument("--save", type=Path, help="directory for the trained model")
arguments = parser.parse_args()

register()  # before the model is made
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
text = arguments.text.read_text(encoding="utf-8")
options = {"dtype": arguments.dtype, "experts_implementation": arguments.experts}
if arguments.model:
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokens = torch.tensor(tokenizer(text).input_ids)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, **options)
else:
    tokenizer, tokens = None, torch.tensor(list(text.encode()))
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=2, num_experts=8,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, **options)
if arguments.experts in IMPLEMENTATIONS:
    check_model(model)  # raises where the engine cannot compute these experts, and says why
for name, parameter in model.named_parameters():
    parameter.requires_grad_(not (arguments.freeze_experts and ".experts." in name))
model.to(device).train()
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=arguments.lr or (1e-5 if arguments.model else 3e-3))

for step in range(arguments.steps):
    total = 0.0
    for _ in range(arguments.accumulate):
        starts = torch.randint(0, len(tokens) - arguments.length, (arguments.batch, 1))
        ids = tokens[starts + torch.arange(arguments.length)].to(device)
        with torch.autocast(device, torch.bfloat16, enabled=arguments.dtype == "float32"):
            loss = model(input_ids=ids, labels=ids).loss
        (loss / arguments.accumulate).backward()
        total += loss.item() / arguments.accumulate
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()  # FP8 weights are quantised anew in the next forward, and only then
    optimizer.zero_grad()
    if step % 5 == 0 or step == arguments.steps - 1:
        print(f"step {step:3}: loss {total:.4f}, gradient norm {norm.item():.3f}")

if arguments.save:
    model.save_pretrained(arguments.save)  # the checkpoint names no experts implementation
    if tokenizer:
        tokenizer.save_pretrained(arguments.save)
