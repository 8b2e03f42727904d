"""Trains a T5 with transformers on the rows of a proof, and prints losses, seconds and the peak as JSON.

Writes the first weights to `init`, so that another program can start from them. The working directory has `shape.json`, `rows.jsonl`
and `sample-data`.
"""

import json
import pathlib
import shutil
import sys
import time

import tokenizers
import torch
import transformers

BATCH, LENGTH, END, PADDING = 192, 8, 1, 0
steps = int(sys.argv[1])

torch.manual_seed(1)
shape = json.loads(pathlib.Path("shape.json").read_text()) | {"dropout_rate": 0.0}
model = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape))
model.save_pretrained("init", safe_serialization=True)
shutil.copyfile("sample-data/sample-tokenizer.json", "init/tokenizer.json")

tokenizer = tokenizers.Tokenizer.from_file("init/tokenizer.json")


def padded(texts):
    ids = [tokenizer.encode(text, add_special_tokens=False).ids[: LENGTH - 1] + [END] for text in texts]
    longest = max(map(len, ids))
    return torch.tensor([row + [PADDING] * (longest - len(row)) for row in ids])


rows = [json.loads(line) for line in pathlib.Path("rows.jsonl").read_text().splitlines()]
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
losses, seconds = [], []
model.train()
for step in range(steps):
    began = time.perf_counter()
    batch = rows[step * BATCH : (step + 1) * BATCH]
    sources, targets = padded([row["prompt"] for row in batch]), padded([row["response"] for row in batch])
    labels = targets.masked_fill(targets == PADDING, -100)
    loss = model(input_ids=sources, attention_mask=(sources != PADDING).long(), labels=labels).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
    seconds.append(time.perf_counter() - began)

status = pathlib.Path("/proc/self/status").read_text().splitlines()
peak = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:"))
print(json.dumps({"losses": losses, "seconds": seconds, "peak_bytes": peak}))
