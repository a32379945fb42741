"""Loads the demo's adapter as anyone would who has only transformers and PEFT, and ranks captions for a picture.

    python demo_reload.py BASE ADAPTER PICTURE CAPTIONS

It is run as a script, in a process of its own, and imports nothing of hf_infcl.
"""

import sys
from pathlib import Path

import torch
from peft import PeftModel
from PIL import Image
from transformers import AutoModel, AutoProcessor

base, adapter, picture, captions = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModel.from_pretrained(base), adapter).eval()
processor = AutoProcessor.from_pretrained(adapter)

texts = Path(captions).read_text(encoding="utf-8").splitlines()
inputs = processor(text=texts, images=Image.open(picture), padding=True, truncation=True, return_tensors="pt")
with torch.no_grad():
    probabilities = model(**inputs).logits_per_image.softmax(dim=-1)[0]
print(f"captions for {picture}, whose own is {texts[0]!r}:")
for place, index in enumerate(probabilities.argsort(descending=True).tolist(), 1):
    print(f"  {place}. {probabilities[index]:.2f}  {texts[index]}{'  <- its own' if index == 0 else ''}")
if "hf_infcl" in sys.modules:
    raise SystemExit("hf_infcl was imported: this was to do without it")
