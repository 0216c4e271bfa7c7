from llama405b_tools.agent.streaming import FileFollower


def drain(tail, **how):
    return [(piece.path.name, piece.offset, piece.data) for piece in tail.read_new(**how)]


def test_whole_lines_once_in_files_that_appear_later(tmp_path):
    tail = FileFollower(tmp_path)
    (tmp_path / "a.log").write_text("one\ntw")
    assert drain(tail) == [("a.log", 0, b"one\n")]
    assert drain(tail) == []
    with (tmp_path / "a.log").open("a") as file:
        file.write("o\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.log").write_text("three\n")
    (tmp_path / "c.txt").write_text("not a log\n")
    assert drain(tail) == [("a.log", 4, b"two\n"), ("b.log", 0, b"three\n")]
    (tmp_path / "a.log").write_text("new\n")  # written anew
    assert drain(tail) == [("a.log", 0, b"new\n")]
    (tmp_path / "d").write_text("replaced\nby a longer one\n")
    (tmp_path / "d").rename(tmp_path / "a.log")
    assert drain(tail) == [("a.log", 0, b"replaced\nby a longer one\n")]


def test_a_long_log_is_handed_out_whole(tmp_path):
    text = "\n".join([*(f"{i} " + "x" * 90 for i in range(30_000)), "Traceback, and no newline"]).encode()
    (tmp_path / "a.log").write_bytes(text)
    tail = FileFollower(tmp_path)
    assert b"".join(piece.data for piece in tail.read_all(final=True)) == text
    assert list(tail.read_all(final=True)) == []


def test_from_the_end_and_from_a_mark(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("old\nolder\n")
    assert drain(FileFollower(tmp_path, from_end=True)) == []
    tail = FileFollower(tmp_path)
    tail.set_position(path, (path.stat().st_ino, 4))
    assert drain(tail) == [("a.log", 4, b"older\n")]
    other = FileFollower(tmp_path)
    other.set_position(path, (path.stat().st_ino + 1, 4))  # of a file that is gone
    assert drain(other) == [("a.log", 0, b"old\nolder\n")]
    assert drain(FileFollower(path)) == [("a.log", 0, b"old\nolder\n")]


def test_of_a_flood_only_the_end_is_read_and_the_rest_counted(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("".join(f"line {i}\n" for i in range(10)))
    tail = FileFollower(tmp_path, max_bytes=100)
    assert len(drain(tail)) == 1
    with path.open("a") as file:
        file.write("".join(f"line {i}\n" for i in range(10, 100_000)))
    ((_, _, data),) = drain(tail)
    assert len(data) <= 100
    *_, last = data.splitlines()
    assert last == b"line 99999"
    assert tail.n_skipped + len(data.splitlines()) == 100_000 - 10
    assert drain(tail) == []
