"""What faulthandler and py-spy write is read, as they wrote it."""

import json

from llama405b_tools.parsers import parse_faulthandler, parse_py_spy, parse_syscall

DUMP = """Thread 0x00007effe6e1d6c0 (most recent call first):
  File "/tmp/fh.py", line 5 in <lambda>
  File "/usr/lib/python3.11/threading.py", line 982 in run

Current thread 0x00007effe788ab80 (most recent call first):
  File "/tmp/a b.py", line 6 in f
  File "/tmp/a b.py", line 9 in <module>
"""


def test_the_main_thread_comes_first():
    main, other = parse_faulthandler(DUMP)
    assert main.is_main
    assert [(frame.file, frame.line, frame.function) for frame in main.frames] == [
        ("/tmp/a b.py", 6, "f"),
        ("/tmp/a b.py", 9, "<module>"),
    ]
    assert [frame.function for frame in other.frames] == ["<lambda>", "run"]


def test_of_several_dumps_in_a_row_none_is_lost_and_names_of_threads_are_taken():
    newer = DUMP.replace("Thread 0x00007effe6e1d6c0 (", "Thread 0x00007effe6e1d6c0 [writer] (")  # since Python 3.14
    assert [thread.name for thread in parse_faulthandler(newer)] == ["0x00007effe788ab80", "writer"]


def test_a_dump_that_is_cut_short_or_something_else():
    assert parse_faulthandler("") == ()
    assert parse_faulthandler('Segmentation fault\n  File "x.py", line 1 in f') == ()
    [cut] = parse_faulthandler(DUMP[:70])
    assert cut.frames == ()


def test_py_spy_tells_native_frames_and_who_holds_the_lock():
    frame = {"name": "pthread_mutex_lock", "filename": "/lib/libc.so.6", "line": 0}
    call = {"name": "run", "filename": "/w/train.py", "line": 7}
    thread = {"pid": 7, "thread_name": None, "os_thread_id": 8, "owns_gil": True, "frames": [frame, call]}
    main = thread | {"thread_name": "MainThread", "os_thread_id": 7, "owns_gil": False, "frames": [call]}
    first, second = parse_py_spy(json.dumps([thread, main]))
    assert first.is_main
    assert second.has_gil
    assert [frame.function for frame in second.python_frames] == ["run"]
    assert parse_py_spy("Error: Permission denied") == ()
    assert parse_py_spy('[{"pid": 1}]') == ()


def test_system_calls_have_names_and_files():
    assert parse_syscall("1 0x5 0x7f 0x10000 0x0 0x0 0x0 0x7ffe 0x7f24\n", "x86_64") == ("write", 5)
    assert parse_syscall("202 0x7f 0x80 0x0 0x0 0x0 0x0 0x7ffe 0x7f24", "x86_64") == ("futex", None)
    assert parse_syscall("64 0x5 0x7f 0x10000 0x0 0x0 0x0 0x7ffe 0x7f24", "aarch64") == ("write", 5)
    assert parse_syscall("running\n", "x86_64") == ("", None)
    assert parse_syscall("", "x86_64") == ("", None)
    assert parse_syscall("999 0x5", "x86_64") == ("system call 999", None)
