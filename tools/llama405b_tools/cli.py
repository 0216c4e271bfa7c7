"""The ``llama405b`` command. A verb's module is imported only when that verb is called."""

import codecs
import importlib
import io
import os
import sys
from collections.abc import Sequence

try:
    import msgspec  # noqa: F401 - an environment made for an older version of this checkout lacks it
except ModuleNotFoundError:
    sys.stderr.write("llama405b: msgspec is not installed; in a checkout, run `bash launch.sh`, which installs it\n")
    sys.exit(2)

from llama405b.contract.errors import EXIT_DETACHED, EXIT_FAILED, EXIT_OK, UserError, did_you_mean, fmt_if, shorten
from llama405b.contract.files import set_private_umask
from llama405b_tools.run import screen
from llama405b_tools.text.words import replace_unencodable, strip_controls

VERBS = {  # verb: (module with main(argv) -> exit code, what it does)
    "plan": (
        "llama405b_tools.verbs.predict",
        "predict whether a run fits, how fast it goes, and which settings are best",
    ),
    "import": (
        "llama405b_tools.verbs.recipes",
        "convert another program's recipe to a settings file for --config",
    ),
    "doctor": ("llama405b_tools.verbs.doctor", "check that the hosts are fit to train and agree with each other"),
    "setup": ("llama405b_tools.verbs.setup", "install the project and its environment on bare hosts"),
    "push": ("llama405b_tools.verbs.push", "copy code or a checkpoint to every host"),
    "tune": ("llama405b_tools.verbs.tune", "try settings on the hosts, and keep the fastest"),
    "launch": ("llama405b_tools.verbs.launch", "start a run on all hosts or on none"),
    "status": ("llama405b_tools.verbs.status", "show a run's progress and its state on every host"),
    "report": ("llama405b_tools.verbs.report", "show a run's loss curve and where its time went; write an HTML page"),
    "top": ("llama405b_tools.verbs.top", "cluster-top: hosts, GPUs, ranks, training and logs on one screen"),
    "logs": ("llama405b_tools.verbs.logs", "show the logs of every rank on every host"),
    "ask": ("llama405b_tools.verbs.ask", "make a live run save or restart, or record a profile, memory or stacks"),
    "autopsy": ("llama405b_tools.verbs.autopsy", "show what every rank is doing and which one holds up the run"),
    "blame": ("llama405b_tools.verbs.blame", "find the document that made a step go wrong"),
    "attach": ("llama405b_tools.verbs.attach", "open a tmux session with one window per host"),
    "stop": ("llama405b_tools.verbs.stop", "stop a run on every host and verify that it stopped"),
    "train": ("llama405b.train", "run the training program (launch runs it under torchrun)"),
    "download": ("llama405b.commands.download", "download and verify a model from the Hugging Face Hub"),
    "data": ("llama405b_tools.verbs.data", "show what a run would train on, or tokenize its data once"),
    "export": ("llama405b_tools.verbs.export", "write a checkpoint as a model that transformers and vLLM load"),
    "track": ("llama405b.commands.track", "upload metrics that W&B or TensorBoard do not have yet"),
    "demo": ("llama405b_tools.verbs.demo", "write a small Llama checkpoint for trying things out"),
    "bench": ("llama405b_tools.verbs.bench", "test GPUs, links and memory, up to whole steps"),
}
# What other programs call what these verbs do.
SYNONYMS = {
    "ps": "status", "ls": "status", "kill": "stop", "cancel": "stop", "down": "stop", "up": "launch", "run": "launch",
    "resume": "launch --resume auto", "eval": "launch --evaluate-only", "tail": "logs --follow", "check": "doctor", "init": "setup",
}  # fmt: skip
MAX_ERROR_CHARS = 20_000  # characters of an error message; it may name every host
NO_GPU = ("download", "data", "export", "track", "demo")
PRIVATE_OUTPUT_VERBS = (
    "launch",
    "report",
    "top",
    "logs",
    "autopsy",
    "blame",
)  # their files about a run are readable by their owner only
GROUPS = {
    "at your terminal": (
        "plan",
        "import",
        "setup",
        "doctor",
        "push",
        "tune",
        "launch",
        "status",
        "report",
        "top",
        "logs",
        "ask",
        "autopsy",
        "blame",
        "attach",
        "stop",
    ),
    "on a host (only train and bench need GPUs)": ("train", "bench", *NO_GPU),
}


def usage() -> str:
    """Return the help text."""
    lines = list[str]()
    for title, verbs in GROUPS.items():
        lines += [f"{title}:"] + [f"  {verb:8} {VERBS[verb][1]}" for verb in verbs]
    lines[0] = f"usage: llama405b VERB …, like llama405b launch hosts --preset demo (VERB --help); {lines[0]}"
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb and return its exit code."""
    _open_standard_streams()
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
    except SystemExit as system_exit:  # argparse's --help
        code = int(system_exit.code or EXIT_OK)
    except OSError:
        screen.show("")
        if not screen.flush_output():  # the error was not about standard output
            raise
        code = EXIT_FAILED
    if write_error := screen.flush_output():
        screen.show(f"llama405b: cannot write to standard output ({write_error})", error=True)
        return EXIT_FAILED
    return code


def _dispatch(args: list[str]) -> int:
    if "_ARGCOMPLETE" in os.environ:
        importlib.import_module("llama405b_tools.verbs.completion").complete(VERBS, args, _import_and_run)
        return EXIT_OK
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if args else 2
    if args[0] == "--version" or args[1:] == ["--version"]:
        return int(importlib.import_module("llama405b_tools.verbs.version").main())
    return _run_verb(args)


def _run_verb(args: list[str]) -> int:
    """Run a verb and return its exit code; print why it was refused or failed."""
    try:
        if args[0] not in VERBS:
            hint = fmt_if(" (here it is {!r})", SYNONYMS.get(args[0])) or did_you_mean(args[0], VERBS)
            raise UserError(f"unknown verb {args[0]!r}{hint}; use one of {', '.join(VERBS)}")
        return _import_and_run(args[0], args[1:])
    except UserError as error:
        screen.show(f"llama405b: {strip_controls(shorten(str(error), MAX_ERROR_CHARS))}", error=True)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_DETACHED
    except BrokenPipeError:  # `| head` has read enough
        return EXIT_OK


def _open_standard_streams() -> None:
    """Open closed standard streams (``>&-``); make all of them replace characters they cannot encode.

    A later file would otherwise get the number of a closed stream, and a child would write into it.
    """
    codecs.register_error("plain", replace_unencodable)
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # open() returns the lowest free descriptor, which is this number
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or screen.null_stream(1)
    sys.stderr = sys.stderr or screen.null_stream(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="plain")


def cluster_top() -> int:
    """Entry point of ``cluster-top``."""
    return main(["top", *sys.argv[1:]])


def _import_and_run(verb: str, args: list[str]) -> int:
    if verb == "train":  # report a bad command line first: importing torch takes seconds
        importlib.import_module("llama405b.settings.command").parse(args)
    try:
        module = importlib.import_module(VERBS[verb][0])
        if verb in PRIVATE_OUTPUT_VERBS:
            set_private_umask()
        return int(module.main(args))
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("llama405b", "llama405b_tools"):
            raise
        raise UserError(
            f"{verb} needs {error.name}, which is not installed; in a checkout: uv tool install '.[train]', "
            "or .venv/bin/llama405b after `bash launch.sh`"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
