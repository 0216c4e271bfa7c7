"""The reader: what it accepts, what it refuses and with which message, and that no input crashes it."""

import concurrent.futures
import contextlib
import dataclasses
import enum
import json
import random
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from llama405b.contract import reader
from llama405b.contract.reader import FirstOf, MalformedError, SoundOnly


class Color(enum.StrEnum):
    RED = "red"


@dataclasses.dataclass(frozen=True, slots=True)
class Inner:
    x: int
    y: float = 0.5


@dataclasses.dataclass(frozen=True, slots=True)
class Other:
    x: int
    z: int


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    below: tuple["Tree", ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Outer:
    text: str
    inner: Inner
    maybe: Inner | None = None
    color: Color = Color.RED
    word: Literal["a", "b"] = "a"
    flag: bool = False
    row: tuple[int, str] = (0, "")
    many: tuple[Inner, ...] = ()
    sound: SoundOnly[tuple[Inner, ...]] = ()
    hopefully: SoundOnly[Inner | None] = None
    number: SoundOnly[float | None] = None
    either: FirstOf[Other, Named] | None = None
    by_name: Mapping[str, Inner] = dataclasses.field(default_factory=dict)
    place: Path = Path()
    raw: Any = None


WHOLE = Outer(
    "ü", Inner(1, 2.0), Inner(3), Color.RED, "b", True, (4, "x"), (Inner(5),), (Inner(6),), Inner(7), 1.5, Other(9, 9),
    {"k": Inner(8)}, Path("/a b"), {"any": [1, None]},
)  # fmt: skip


def test_what_is_written_is_read_back():
    assert reader.loads(Outer, reader.dumps(WHOLE), "it") == WHOLE
    least = Outer("", Inner(0))
    assert json.loads(reader.dumps(least)).keys() <= {"text", "inner", "by_name", "place"}  # defaults go without saying
    assert reader.loads(Outer, reader.dumps(least), "it") == least


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text": 1}, "it.text: expected `str`, got `int`"),
        ({"inner": []}, "it.inner: expected `object`, got `array`"),
        ({"inner": {}}, "it.inner: object missing required field `x`"),
        ({"inner": {"x": True}}, "it.inner.x: expected `int`, got `bool`"),
        ({"inner": {"x": 1.5}}, "it.inner.x: expected `int`, got `float`"),
        ({"inner": {"x": 10**30}}, "it.inner.x: expected `int`, got `null`"),
        ({"inner": {"x": 1, "y": "2"}}, "it.inner.y: expected `float`, got `str`"),
        ({"inner": {"x": 1, "y": float("nan")}}, "it.inner.y: expected `float`, got `null`"),
        ({"color": "blue"}, "it.color: invalid enum value 'blue'"),
        ({"word": "c"}, "it.word: invalid enum value 'c'"),
        ({"word": []}, "it.word: expected `str`, got `array`"),
        ({"flag": 1}, "it.flag: expected `bool`, got `int`"),
        ({"row": [1]}, "it.row: expected `array` of length 2, got 1"),
        ({"row": [1, 2]}, "it.row[1]: expected `str`, got `int`"),
        ({"many": [{"x": 1}, {}]}, "it.many[1]: object missing required field `x`"),
        ({"many": [{"x": 1}] * 100_001}, "it: more than 100000 items"),
        ({"sound": 3}, "it: expected `array`, got `int`"),
        ({"by_name": {"k": 1}}, "it.by_name[...]: expected `object`, got `int`"),
        ({"by_name": []}, "it.by_name: expected `object`, got `array`"),
        ({"maybe": 1}, "it.maybe: expected `object | null`, got `int`"),
        ({"place": 1}, "it.place: expected str, bytes or os.PathLike object, not int"),
        ({"either": {"x": 1, "z": "?"}}, "it: object missing required field `name`"),
    ],
)
def test_what_is_malformed_is_named(change, words):
    with pytest.raises(MalformedError) as refused:
        reader.build_record(Outer, {"text": "", "inner": {"x": 1}} | change, "it")
    assert str(refused.value) == words


def test_unknown_keys_are_passed_over_and_unsound_items_left_out():
    value = {"text": "", "inner": {"x": 1, "new": 1}, "sound": [{"x": 1}, {}, 3], "hopefully": {"x": "?"}, "newer": {}}
    found = reader.build_record(Outer, value | {"number": 1e20, "raw": [float("nan")]}, "it")
    assert (found.sound, found.hopefully, found.number, found.raw) == ((Inner(1),), None, None, [None])


def test_the_first_type_that_fits_is_read():
    value = {"text": "", "inner": {"x": 1}, "either": {"name": "n", "x": 1, "z": 1}}
    assert reader.build_record(Outer, value, "it").either == Other(1, 1)
    value["either"].pop("z")
    assert reader.build_record(Outer, value, "it").either == Named("n")


@pytest.mark.parametrize(
    "text", ["", "nul", "[1", "{" * 100_000, "[" * 100_000, '{"text": 1e999, "inner": 1}', "\x00", "3"]
)
def test_text_that_is_no_message(text):
    with pytest.raises(MalformedError):
        reader.loads(Outer, text, "it")


def test_depth_and_size_are_bounded(monkeypatch):
    deep: dict[str, Any] = {}
    for _ in range(50):
        deep = {"below": [deep]}
    with pytest.raises(MalformedError, match="nested too deeply"):
        reader.build_record(Tree, deep, "it")
    monkeypatch.setattr(reader, "MAX_TEXT", 10)
    with pytest.raises(MalformedError, match="is larger than"):
        reader.loads(Inner, '{"x": 1, "y": 2.0}', "it")


def test_no_value_in_any_place_breaks_it():
    """Every place of a whole message, replaced by things that do not belong there: read, or refused."""
    whole = json.loads(reader.dumps(WHOLE))
    odd = [None, True, -1, 10**400, 1.5, float("inf"), "", "x" * 10, [], [[]], {}, {"x": {}}]
    draw = random.Random(1)
    for _ in range(3000):
        value = json.loads(json.dumps(whole))
        at = value
        while True:
            key = draw.choice(list(at) if isinstance(at, dict) else range(len(at)))
            if isinstance(at[key], dict | list) and at[key] and draw.random() < 0.6:
                at = at[key]
                continue
            at[key] = draw.choice(odd)
            break
        with contextlib.suppress(MalformedError):
            assert isinstance(reader.build_record(Outer, value, "it"), Outer)


class Light(enum.StrEnum):
    GREEN = "green"


@dataclasses.dataclass(frozen=True, slots=True)
class Lamp:
    light: Light
    name: str = ""
    parts: tuple["Lamp", ...] = ()
    room: str | None = None


def test_a_record_for_other_programs_is_written_with_all_its_members():
    lamp = Lamp(Light.GREEN, parts=(Lamp(Light.GREEN, "b"),))
    assert json.loads(reader.dumps_all_fields(lamp)) == dataclasses.asdict(lamp) | {
        "parts": [dataclasses.asdict(part) | {"parts": []} for part in lamp.parts]
    }


def test_one_thread_at_a_time_has_msgspec_learn_a_type_and_each_type_once(monkeypatch):
    """msgspec 0.22 crashes the interpreter when two threads use a class for the first time at once."""
    at_once, built, real = [], [], reader.msgspec.json.Decoder

    def decoder(kind, **options):
        at_once.append(1)
        assert len(at_once) == 1
        assert reader.DECODER_LOCK.locked()
        time.sleep(0.01)  # others would come in meanwhile
        built.append(kind)
        made = real(kind, **options)
        at_once.clear()
        return made

    monkeypatch.setattr(reader.msgspec.json, "Decoder", decoder)
    within = dataclasses.make_dataclass("Within", [("x", int)], frozen=True)
    kinds = [dataclasses.make_dataclass(f"Of{i}", [("y", within)], frozen=True) for i in range(3)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(reader.loads, kind, '{"y": {"x": 1}}', "it") for kind in kinds * 2]
        values = [job.result().y.x for job in jobs]
    assert values == [1] * 6
    assert sorted(built, key=str) == kinds


def test_what_is_within_sound_parts_is_learned_under_the_lock_too():
    @dataclasses.dataclass(frozen=True)
    class Part:
        x: int

    whole = dataclasses.make_dataclass("Whole", [("parts", SoundOnly[tuple[Part, ...]])])
    reader.loads(whole, '{"parts": [{"x": 1}]}', "it")
    assert whole in reader.DECODERS
    assert tuple[Part, ...] in reader.DECODERS
