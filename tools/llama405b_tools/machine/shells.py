"""What sh (dash and bash) and Python write if a program cannot be started. Pure."""

import re

NO_DIRECTORY = re.compile(r"\bcd: ")
NO_PROGRAM = re.compile(
    r"\bexec: .*(not found|cannot execute|Permission denied)|\bline \d+: .*: No such file or directory$"
)
NO_MODULE = re.compile("No module named")
