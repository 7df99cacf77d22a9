"""One fresh process of a HuggingFace user: train two steps, generate; prints losses and tokens.

    python -m tests.hf.cold_run '{"loop": "trainer", "checkpoint": true, "compile": "aot_eager"}'

loop: steps (a plain loop), trainer, or sft (trl's SFTTrainer). checkpoint: gradient checkpointing.
compile: a backend of torch.compile, or null. lora: train an adapter. tokenizer: its folder.
"""

import json
import sys
import tempfile

import torch
from transformers import AutoTokenizer, Trainer, TrainingArguments

from tests.hf.models import build

TEXTS = ["hello world", "a longer line of text", "short", "one two three four"]
SIZE = 264  # of the vocabulary: the byte tokenizer's and some


def adapted(model):
    """Add LoRA to layers that all blocks have; it is not zero, so that all of it gets gradients."""
    from peft import LoraConfig, get_peft_model

    targets = ["in_proj", "out_proj", "u_proj"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False))


def rows(tokenizer):
    """Return padded texts for the Trainer; padding has no loss."""
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    columns = {**batch, "labels": labels}
    return [{name: column[i] for name, column in columns.items()} for i in range(len(TEXTS))]


def by_steps(model, tokenizer, asked):
    """Return the losses of two steps of SGD."""
    if asked["checkpoint"]:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    if asked["compile"]:
        model.compile(backend=asked["compile"])
    optimizer = torch.optim.SGD(model.train().parameters(), 0.1)
    batch = {
        name: torch.stack([row[name] for row in rows(tokenizer)]) for name in rows(tokenizer)[0]
    }
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_trainer(model, tokenizer, asked):
    """Return the losses that transformers' Trainer, or trl's SFTTrainer, logs."""
    arguments = {
        "output_dir": tempfile.mkdtemp(),
        "gradient_checkpointing": asked["checkpoint"],
        "torch_compile": asked["compile"] is not None,
        "torch_compile_backend": asked["compile"],
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
    if asked["loop"] == "sft":
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        data = Dataset.from_list([{"text": text} for text in TEXTS])
        arguments = SFTConfig(max_length=32, **arguments)
        made = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    else:
        made = Trainer(model, TrainingArguments(**arguments), train_dataset=rows(tokenizer))
    made.train()
    return [entry["loss"] for entry in made.state.log_history if "loss" in entry]


def run(**given):
    """Return the losses of training and the generated tokens; see the top of this file."""
    asked = {"loop": "steps", "checkpoint": False, "compile": None, "lora": False, **given}
    tokenizer = AutoTokenizer.from_pretrained(asked["tokenizer"])
    torch.manual_seed(0)
    model = build("fp_mamba1", vocab_size=SIZE, eos_token_id=0)
    if asked["lora"]:
        model = adapted(model)
    train = by_steps if asked["loop"] == "steps" else by_trainer
    losses = train(model, tokenizer, asked)
    prompt = tokenizer(["hel", "a"], padding=True, padding_side="left", return_tensors="pt")
    tokens = model.eval().generate(
        **prompt,
        max_new_tokens=6,
        do_sample=False,
        stop_strings=["qqq"],
        tokenizer=tokenizer,
    )
    return {"losses": losses, "tokens": tokens.tolist()}


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))))
