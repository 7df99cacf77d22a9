"""One fresh process of a HuggingFace user: train two steps, generate; prints losses and tokens.

    python -m tests.hf.cold_run '{"loop": "trainer", "checkpoint": true, "compile": "aot_eager"}'

loop: steps (a plain loop), trainer, or sft (trl's SFTTrainer). checkpoint: gradient checkpointing.
compile: a backend of torch.compile, or null. lora: train an adapter. tokenizer: its folder.
"""

import json
import sys
import tempfile

import torch
from transformers import AutoTokenizer

from tests.hf.models import build

TEXTS = ["hello world", "a longer line of text", "short", "one two three four"]
VOCAB_SIZE = 264  # at least the size of the byte tokenizer's vocabulary


def add_lora(model):
    """Add LoRA to layers that all blocks have. Its weights are not zero, so all get gradients."""
    from peft import LoraConfig, get_peft_model

    targets = ["in_proj", "out_proj", "u_proj"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))


def make_rows(tokenizer):
    """Return padded texts for the Trainer; padding has no loss."""
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    columns = {**batch, "labels": labels}
    return [{name: column[i] for name, column in columns.items()} for i in range(len(TEXTS))]


def train_by_steps(model, tokenizer, options):
    """Return the losses of two steps of SGD."""
    if options["checkpoint"]:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    if options["compile"]:
        model.compile(backend=options["compile"])
    optimizer = torch.optim.SGD(model.train().parameters(), 0.1)
    batch_rows = make_rows(tokenizer)
    batch = {name: torch.stack([row[name] for row in batch_rows]) for name in batch_rows[0]}
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_by_trainer(model, tokenizer, options):
    """Return the losses that transformers' Trainer, or trl's SFTTrainer, logs."""
    arguments = {
        "output_dir": tempfile.mkdtemp(),
        "gradient_checkpointing": options["checkpoint"],
        "torch_compile": options["compile"] is not None,
        "torch_compile_backend": options["compile"],
        "per_device_train_batch_size": 2,
        "max_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "optim": "sgd",
        "learning_rate": 0.1,
    }
    if options["loop"] == "sft":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        data = Dataset.from_list([{"text": text} for text in TEXTS])
        arguments = SFTConfig(max_length=32, **arguments)
        trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    else:
        from transformers import Trainer, TrainingArguments

        trainer = Trainer(model, TrainingArguments(**arguments), train_dataset=make_rows(tokenizer))
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def run(**given_options):
    """Return the losses of training and the generated tokens; see the top of this file."""
    options = {"loop": "steps", "checkpoint": False, "compile": None, "lora": False}
    options |= given_options
    tokenizer = AutoTokenizer.from_pretrained(options["tokenizer"])
    torch.manual_seed(0)
    model = build("fp_mamba1", vocab_size=VOCAB_SIZE, eos_token_id=0)
    if options["lora"]:
        model = add_lora(model)
    train = train_by_steps if options["loop"] == "steps" else train_by_trainer
    losses = train(model, tokenizer, options)
    prompt = tokenizer(["hel", "a"], padding=True, padding_side="left", return_tensors="pt")
    tokens = model.eval().generate(
        **prompt,
        max_new_tokens=6,
        do_sample=False,
        stop_strings=["qqq"],  # never generated
        tokenizer=tokenizer,
    )
    return {"losses": losses, "tokens": tokens.tolist()}


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))))
