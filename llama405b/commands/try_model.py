"""Generate a few tokens with a model on disk, if this machine can hold it."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from llama405b.contract.errors import FAILED, GOOD, UNFIT
from llama405b.distributed.host_memory import free_bytes

NEW_TOKENS = 40
SPARE = 1.2  # of the weights' bytes, for all else


def try_model(directory: Path, prompt: str, n_bytes: int) -> int:
    """Print what the model says after a prompt (greedy), with its chat template if it has one; returns the exit code."""
    if not (directory / "tokenizer.json").is_file():
        print(f"--try: {directory} has no tokenizer.json, so a prompt cannot be read; copy it there, and try again")
        return FAILED
    device, room = _roomiest()
    if n_bytes * SPARE > room:
        print(
            f"--try: the model takes {n_bytes * SPARE / 1e9:.1f} GB, but this machine has {room / 1e9:.1f} GB; "
            f"give {directory} to an inference server instead"
        )
        return UNFIT
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").to(device)
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    asked = tokenizer(prompt, return_tensors="pt").to(device)
    with torch.no_grad():
        said = model.generate(**asked, max_new_tokens=NEW_TOKENS, do_sample=False)
    print(tokenizer.decode(said[0, asked["input_ids"].shape[1] :], skip_special_tokens=True), flush=True)
    return GOOD


def _roomiest() -> tuple[str, int]:
    """Return where a model may be put, and how many bytes are free there."""
    if torch.cuda.is_available():
        return "cuda", torch.cuda.mem_get_info()[0]
    return "cpu", free_bytes()
