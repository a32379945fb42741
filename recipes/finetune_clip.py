"""Fine-tunes a CLIP-like dual encoder with an exact contrastive loss over the whole effective batch.

    accelerate launch recipes/finetune_clip.py --config recipes/sample.yaml
    accelerate launch --config_file recipes/accelerate/multi_gpu.yaml recipes/finetune_clip.py \
        --config recipes/clip_flickr8k.yaml --learning_rate 1e-4
    torchrun --nproc_per_node 2 recipes/finetune_clip.py --config recipes/sample.yaml  # several processes on a CPU

Any field of the recipe can be overridden on the command line; `--help` lists them, and `--help-all` transformers' other
training arguments too. `hf-infcl train` runs the same.
The contrastive batch is per_device_train_batch_size x gradient_accumulation_steps x processes.
"""

import sys

from hf_infcl.cli.train import main, make_parser, run

__all__ = ["main", "make_parser"]

if __name__ == "__main__":
    sys.exit(run(prog="finetune_clip.py"))
