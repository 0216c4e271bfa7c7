"""The training program, which also writes down each target token that enters a loss, where the loss is computed."""

import json
import os
from pathlib import Path

from torch.nn import functional

from llama405b import train
from llama405b.training.loop import Trainer

step_of_loss = 0


def main():
    record = Path(os.environ["RECORD"]) / f"{os.environ['LAUNCH']}-{os.environ.get('RANK', 0)}.jsonl"
    compute, take = functional.cross_entropy, Trainer.run_step

    def computing(logits, targets, **options):
        with record.open("a") as file:
            found = targets[targets != options["ignore_index"]].tolist()
            file.write(json.dumps({"step": step_of_loss, "pid": os.getpid(), "targets": found}) + "\n")
        return compute(logits, targets, **options)

    def taking(trainer, step):
        global step_of_loss
        step_of_loss = step
        return take(trainer, step)

    functional.cross_entropy, Trainer.run_step = computing, taking
    train.run_and_exit()


if __name__ == "__main__":
    main()
