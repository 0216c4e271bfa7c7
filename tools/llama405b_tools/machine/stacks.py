"""Read the stacks of a process's threads, as faulthandler and py-spy write them. Pure."""

import dataclasses
import json
import re

THREAD = re.compile(r"(Current thread|Thread) (0x[0-9a-f]+)(?: \[([^\]]*)\])? \(most recent call first\):")
FRAME = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
OUTERMOST = ("<module>", "_run_module_as_main", "_run_code")


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One call."""

    file: str  # of native code: the library
    line: int  # 0: unknown
    function: str
    code: str = ""  # the text of that line, if it could be read

    @property
    def is_python(self) -> bool:
        """Whether it is Python code."""
        return self.file.endswith(".py") or self.file.startswith("<")


@dataclasses.dataclass(frozen=True, slots=True)
class Thread:
    """One thread's calls, innermost first."""

    name: str
    frames: tuple[Frame, ...]
    is_main: bool = False
    has_gil: bool = False

    @property
    def python(self) -> tuple[Frame, ...]:
        """Its calls in Python, innermost first."""
        return tuple(frame for frame in self.frames if frame.is_python)


def read_faulthandler(text: str) -> tuple[Thread, ...]:
    """Read the last dump of faulthandler; the main thread first. What is not of that form is left out."""
    threads: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if match := THREAD.fullmatch(line):
            threads.append((match[3] or match[2], []))
        elif threads and (match := FRAME.fullmatch(line)):
            threads[-1][1].append(Frame(match[1], int(match[2]) if match[2].isdigit() else 0, match[3]))
    mains = [name for name, frames in threads if frames and frames[-1].function in OUTERMOST]
    main = ["", *(name for name, _ in threads), *mains][-1]  # faulthandler writes the oldest thread last
    found = [Thread(name, tuple(frames), is_main=name == main) for name, frames in threads]
    return tuple(sorted(found, key=lambda thread: not thread.is_main))


def read_py_spy(text: str) -> tuple[Thread, ...]:
    """Read ``py-spy dump --json``; the main thread first; () if it is something else."""
    try:
        listed = json.loads(text)
        found = [
            Thread(
                each["thread_name"] or f"thread {each['os_thread_id']}",
                tuple(Frame(frame["filename"], frame["line"], frame["name"]) for frame in each["frames"]),
                is_main=each["os_thread_id"] == each["pid"],
                has_gil=each["owns_gil"],
            )
            for each in listed
        ]
    except (ValueError, KeyError, TypeError):
        return ()
    return tuple(sorted(found, key=lambda thread: not thread.is_main))
