"""Make one rank of a real training run hang, or merely slow: put this directory on PYTHONPATH, and say what in INJECT.

INJECT is ``CAUSE RANK STEP PHASE PLACE``: in that step the rank does it once, before its batch (data), in the forward, in the
backward, before the update (optimizer) or before the save that follows (save). PLACE is a directory for files. A slow cause acts in
every step from that one on.
"""

import importlib.abc
import importlib.util
import os
import sys
from pathlib import Path

LOOP = "llama405b.training.loop"


def _fifo(place):
    path = f"{place}/pipe-{os.getpid()}"
    os.mkfifo(path)
    return path


class Causes:
    """What may happen to a rank; each method is one cause."""

    def __init__(self, place):
        self.place = place

    def stop(self):
        import signal

        os.kill(os.getpid(), signal.SIGSTOP)

    def sleep(self):
        import time

        time.sleep(9999)

    def gil_held(self):
        import ctypes

        c, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
        c.pthread_mutex_lock(mutex)
        c.pthread_mutex_lock(mutex)  # no signal wakes it

    def gil_held_by_a_thread(self):
        import threading
        import time

        threading.Thread(target=self.gil_held, name="holds the lock", daemon=True).start()
        time.sleep(0.1)

    def endless_loop(self):
        while True:
            pass

    def blocked_read(self):
        with Path(_fifo(self.place)).open() as file:
            file.read()

    def full_pipe(self):
        _, end = os.pipe()
        while True:
            os.write(end, bytes(1 << 16))

    def frozen_disk(self):
        with Path(f"{self.place}/frozen/file-{os.getpid()}").open("w") as file:
            file.write("x" * 100_000)
            file.flush()
            os.fsync(file.fileno())

    def locked_file(self):
        import fcntl

        with Path(f"{self.place}/lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # which the test holds

    def deadlock(self):
        import threading

        lock = threading.Lock()
        lock.acquire()
        lock.acquire()

    def child_that_stays(self):
        import subprocess

        subprocess.run(["sleep", "9999"], check=False)

    def silent_server(self):
        import socket

        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as link:
            link.recv(1)

    def queue_of_a_dead_thread(self):
        import queue
        import threading

        waiting = queue.Queue()
        threading.Thread(target=lambda: None).start()
        waiting.get()

    def other_collective(self):
        import torch.distributed as dist

        dist.barrier()

    def swallowed(self):
        raise SwallowedError

    # These were written after the rules had been fixed.

    def endless_regex(self):
        import re

        re.match(r"(a+)+$", "a" * 64 + "b")

    def message_that_never_comes(self):
        import torch
        import torch.distributed as dist

        dist.recv(torch.zeros(1), (dist.get_rank() + 1) % dist.get_world_size())

    def group_of_its_own(self):
        import torch.distributed as dist

        dist.new_group(list(range(dist.get_world_size())))

    def lock_of_a_thread(self):
        import logging
        import threading
        import time

        handler = logging.StreamHandler()
        logging.getLogger().addHandler(handler)

        def hold():
            handler.acquire()
            time.sleep(9999)

        threading.Thread(target=hold, daemon=True).start()
        time.sleep(0.2)
        logging.getLogger().warning("this is never written")

    def slow(self):
        import time

        time.sleep(2.0)

    def slow_disk(self):
        import time

        with Path(f"{self.place}/slow-{os.getpid()}").open("wb") as file:
            for _ in range(30):
                file.write(bytes(1 << 20))
                file.flush()
                time.sleep(0.1)


class SwallowedError(Exception):
    """What the rank raises, and somebody catches: the rest of the step is left out."""


class Injection:
    """Wraps the trainer's step."""

    def __init__(self, words):
        cause, rank, step, self.phase, place = words.split()
        self.mine = int(rank) == int(os.environ["LLAMA405B_FIRST_RANK"]) + int(os.environ["LOCAL_RANK"])
        self.step, self.act, self.again = int(step), getattr(Causes(place), cause), cause.startswith("slow")
        self.done = False

    def due(self, phase, step):
        is_due = self.mine and phase == self.phase and (step >= self.step if self.again else step == self.step)
        if is_due and (self.again or not self.done):
            self.done = True
            self.act()

    def install(self, loop):
        step_of, learn, after = loop.Trainer.run_step, loop.train_step, loop.Trainer.after_step
        now = {"step": 0}

        def run_step(trainer, step):
            now["step"] = step
            self.due("data", step)
            return step_of(trainer, step)

        def train_step(passes, updater, batches, **more):
            try:
                layers = passes.model.model.layers
                hooks = [
                    layers[1].register_forward_pre_hook(lambda *_: self.due("forward", now["step"])),
                    layers[0].register_full_backward_pre_hook(lambda *_: self.due("backward", now["step"])),
                ]
                lap = more["on_phase_end"]
                more["on_phase_end"] = lambda part: (
                    lap(part),
                    part == "backward" and self.due("optimizer", now["step"]),
                )
                found = learn(passes, updater, batches, **more)
                for hook in hooks:
                    hook.remove()
                return found
            except SwallowedError:
                return None

        def after_step(trainer, step, metrics):
            self.due("save", step)
            return after(trainer, step, metrics)

        loop.Trainer.run_step, loop.train_step, loop.Trainer.after_step = run_step, train_step, after_step


class Finder(importlib.abc.MetaPathFinder):
    """Installs the injection once the loop is imported."""

    def find_spec(self, name, path, target=None):
        if name != LOOP:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            Injection(os.environ["INJECT"]).install(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("INJECT") and "LOCAL_RANK" in os.environ:
    sys.meta_path.insert(0, Finder())
