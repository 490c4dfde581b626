"""Train a LoRA adapter on the experts of a Hugging Face MoE model in FP8, and load it with peft alone.

python examples/finetune_lora.py
python examples/finetune_lora.py --model Qwen/Qwen3-30B-A3B --text book.txt --adapter my-adapter

Without --model it takes a tiny random Qwen3-MoE that reads bytes, and downloads nothing.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]  # as Qwen3-MoE names them

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument(
    "--model", help="name or directory of a checkpoint; default: a tiny random model"
)
parser.add_argument("--text", type=Path, default=Path(__file__), help="default: this file")
parser.add_argument("--rank", type=int, default=16, help="of every adapter")
parser.add_argument("--experts", default="sonicmoe_fp8", choices=["sonicmoe_fp8", "sonicmoe"])
parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
parser.add_argument("--lr", type=float, default=3e-3, help="default: 3e-3")
parser.add_argument("--adapter", type=Path, help="directory for the trained adapter")
parser.add_argument("--load", action="store_true", help="load --adapter with peft alone, and stop")


def text_of(name, source, length=64):
    """Token ids of a text, in rows."""
    text = source.read_text(encoding="utf-8")
    known = (Path(name) / "tokenizer.json").exists() or not Path(name).is_dir()
    ids = AutoTokenizer.from_pretrained(name)(text).input_ids if known else list(text.encode())
    return torch.tensor(ids[: len(ids) // length * length]).reshape(-1, length)


def make_tiny_model(folder):
    """A checkpoint with random weights."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=2, num_experts=8,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def train(name, arguments):
    """Train an adapter and save it."""
    from sonicmoe.integrations.transformers import check_model, register

    register()  # peft's adapters on experts are low-rank products from here on
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(
        name, dtype=torch.bfloat16, experts_implementation=arguments.experts
    ).to(device)
    check_model(model)
    lora = LoraConfig(r=arguments.rank, lora_alpha=2 * arguments.rank, target_modules=["q_proj", "v_proj"],
                      target_parameters=EXPERTS)  # fmt: skip
    model = get_peft_model(model, lora).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=arguments.lr)
    every = sum(parameter.numel() for parameter in model.parameters())
    print(f"{sum(p.numel() for p in trained):,} of {every:,} parameters train")
    rows = text_of(name, arguments.text)
    for step in range(arguments.steps):
        ids = rows[torch.randint(0, len(rows), (4,))].to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 or step == arguments.steps - 1:
            print(f"step {step:3}: loss {loss.item():.4f}")
    with torch.no_grad():
        ids = rows[:4].to(device)
        loss = model(input_ids=ids, labels=ids).loss
    print(f"in this process: loss {loss.item():.4f}", flush=True)
    model.save_pretrained(arguments.adapter)


def load(name, arguments):
    """Loss of the adapter as peft computes it, on transformers' own experts."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, arguments.adapter)
    ids = text_of(name, arguments.text)[:4]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert not any(module.startswith("sonicmoe") for module in sys.modules)
    print(f"with peft alone: loss {loss:.4f}")


def main():
    """Train here, and load in another process."""
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        name = arguments.model or folder
        arguments.adapter = arguments.adapter or Path(folder) / "adapter"
        if arguments.load:
            load(name, arguments)
            return
        if not arguments.model:
            make_tiny_model(folder)
        train(name, arguments)
        given = "--model", name, "--adapter", arguments.adapter, "--text", arguments.text
        subprocess.run([sys.executable, __file__, "--load", *map(str, given)], check=True)


if __name__ == "__main__":
    main()
