from llama405b_tools.tail import Tail


def drain(tail):
    return [(path.name, lines) for path, lines in tail.new_lines()]


def test_whole_lines_once_in_files_that_appear_later(tmp_path):
    tail = Tail(tmp_path)
    (tmp_path / "a.log").write_text("one\ntw")
    assert drain(tail) == [("a.log", ["one"])]
    assert drain(tail) == []
    with (tmp_path / "a.log").open("a") as file:
        file.write("o\n")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.log").write_text("three\n")
    (tmp_path / "c.txt").write_text("not a log\n")
    assert drain(tail) == [("a.log", ["two"]), ("b.log", ["three"])]
    (tmp_path / "a.log").write_text("new\n")  # written anew
    assert drain(tail) == [("a.log", ["new"])]
    (tmp_path / "d").write_text("replaced\nby a longer one\n")
    (tmp_path / "d").rename(tmp_path / "a.log")
    assert drain(tail) == [("a.log", ["replaced", "by a longer one"])]


def test_a_long_log_is_handed_out_whole(tmp_path):
    lines = [f"{i} " + "x" * 90 for i in range(30_000)]
    (tmp_path / "a.log").write_text("\n".join([*lines, "Traceback, and no newline"]))
    tail = Tail(tmp_path)
    assert [line for _, block in tail.all_lines(final=True) for line in block] == [*lines, "Traceback, and no newline"]
    assert list(tail.all_lines(final=True)) == []


def test_from_end(tmp_path):
    (tmp_path / "a.log").write_text("old\n")
    tail = Tail(tmp_path, from_end=True)
    assert drain(tail) == []
