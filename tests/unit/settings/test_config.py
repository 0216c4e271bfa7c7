import contextlib
import dataclasses
import io
import json
import tomllib
from pathlib import Path

import jsonschema
import pytest

from conftest import ROOT
from llama405b.contract.errors import UserError
from llama405b.contract.files import write_json
from llama405b.contract.paths import RunDir
from llama405b.settings import command, config, schema
from llama405b.settings.axes import Axes
from llama405b.spec.plan import NO_PLAN, read_plan
from llama405b_tools.launch import request

GIVEN = ["--model.path", "m", "--data.paths", "d"]


def refusal(call, *args):
    with pytest.raises(UserError) as caught:
        call(*args)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", config.preset_names())
def test_presets_resolve_and_survive_as_flags_and_toml(name, tmp_path):
    settings = config.read_preset(name) | config.read_flags(["--data.paths", "x,y"])
    resolved = config.resolve(settings)
    assert config.resolve(config.read_flags(config.to_flags(settings))) == resolved
    (tmp_path / "c.toml").write_text(config.to_toml(resolved))
    assert config.resolve(config.read_toml(tmp_path / "c.toml")) == resolved


def test_flags_win_over_the_file_over_the_preset(tmp_path):
    (tmp_path / "c.toml").write_text("[optimizer]\nlr = 5\nwarmup = 3\n")
    parsed = command.parse(["--preset", "demo", "--config", str(tmp_path / "c.toml"), "--optimizer.lr=7"])
    assert (parsed.config.optimizer.lr, parsed.config.optimizer.warmup, parsed.config.optimizer.min_lr) == (
        7.0,
        3,
        3e-4,
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[optimizer]\nlr = 1\n\nlrr = 2\n", ":4: 'optimizer.lrr' is not a setting (did you mean 'optimizer.lr'?)"),
        ("[optimiser]\nlr = 1\n", ":2: 'optimiser.lr' is not a setting (did you mean 'optimizer.lr'?)"),
        ('[optimizer]\n# lr = 3\nlr = "x"\n', ":3: optimizer.lr is 'x'; use a number"),
        ("[training]\nmax_steps = 1.5\n", ":2: training.max_steps is 1.5; use a whole number"),
        ("[parallel]\noverlap = 1\n", ":2: parallel.overlap is 1; use true or false"),
        (
            '[parallel]\nnumerics = "int8"\n',
            ":2: parallel.numerics is 'int8'; use one of fp32-master, fp8, pure-bf16, bf16-stochastic, fp32",
        ),
        ("[optimizer]\nbetas = [0.9]\n", ":2: optimizer.betas is [0.9]; use 2 numbers"),
        ("lr = 1\n", ":1: 'lr' is outside a section"),
        (
            '[data]\nseq_len = 8\n[[data.sources]]\npath = "a"\n',
            ":3: a source is {'path': 'a'}; write path = \"…\" and weight = 0.5, and nothing else",
        ),
        ("[data]\nsources = 3\n", ":2: a source is 3; write path"),
        ("[optimizer\n", ":1: not valid TOML"),
        ("[optimizer]\nlr = 1" + "0" * 400 + "\n", ":2: optimizer.lr is 1"),
        ("[training]\nmax_steps = 1" + "0" * 5000 + "\n", ": cannot be read as TOML"),
        ("[data]\npaths = " + "[" * 5000 + "\n", ": cannot be read as TOML"),
    ],
)
def test_a_bad_file_is_named_by_line(tmp_path, text, words):
    path = tmp_path / "c.toml"
    path.write_text(text)
    assert f"{path}{words}" in refusal(config.read_toml, path)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lr", "1"], "--lr: unknown option (did you mean 'optimizer.lr'?)"),
        (["--optimizer.lr"], "--optimizer.lr: no value given"),
        (["--optimizer.lr", "fast"], "--optimizer.lr: optimizer.lr is 'fast'; use a number"),
        (["--parallel.overlap", "perhaps"], "--parallel.overlap: parallel.overlap is 'perhaps'"),
        (["--checkpoint.keep", "1"], "--checkpoint.keep: checkpoint.keep is 1; keep at least 2"),
        (["--optimizer.min_lr", "1"], "--optimizer.min_lr: min_lr 1.0 is above lr 1e-05"),
        (
            ["--parallel.numerics", "fp16"],
            "--parallel.numerics: parallel.numerics is 'fp16'; FP16 needs loss scaling",
        ),
        (
            ["--optimizer.decay_steps", "5"],
            "--optimizer.decay_steps: no effect with decay cosine; leave it out, or use wsd",
        ),
        (
            ["--optimizer.groups", "lm_head.* lr=0.1"],
            "--optimizer.groups: optimizer.groups has 'lm_head.* lr=0.1'; write ",
        ),
        (
            ["--optimizer.groups", "lm_head.* lr_factor=-1"],
            "--optimizer.groups: optimizer.groups has 'lm_head.* lr_factor=-1'",
        ),
        (
            ["--training.micro_batch_size", "0"],
            "--training.micro_batch_size: training.micro_batch_size is 0; it must be above 0",
        ),
        (
            ["--parallel.strategy", "fsdp1", "--parallel.device", "cpu"],
            "--parallel.strategy: torch does not support fsdp1 on CPU; use fsdp2",
        ),
        (["--preset", "demmo"], "--preset: 'demmo' is not a preset (did you mean 'demo'?)"),
        (["stray"], "stray: unexpected argument"),
        (["--optimizer.lr", "inf"], "--optimizer.lr: optimizer.lr is inf"),
        (["--training.seed", "9" * 30], "--training.seed: training.seed is"),
        (["--data.paths", "[" * 5000], "--data.paths: "),
        (["--resume", "²"], "--resume: '²' is not a checkpoint"),
        (["--resume", ""], "--resume: '' is not a checkpoint"),
        (["--resume=-5"], "--resume: '-5' is not a checkpoint"),
        (["--resume", "/tmp"], "--resume: '/tmp' is not a checkpoint"),
        (
            ["--parallel.numerics", "fp32", "--model.attention", "flash_attention_2"],
            "flash_attention_2 computes in BF16 only",
        ),
        (
            ["--parallel.offload", "optimizer", "--parallel.strategy", "fsdp1"],
            "--parallel.offload: optimizer needs fsdp2",
        ),
        (
            ["--parallel.offload", "optimizer", "--parallel.numerics", "fp32"],
            "--parallel.offload: optimizer keeps FP32 weights",
        ),
        (["--parallel.moments", "bf16"], "--parallel.moments: bf16 moments need offload"),
        (
            ["--parallel.moments", "bf16", "--parallel.offload", "all", "--parallel.strategy", "fsdp1"],
            "need offload optimizer or",
        ),
        (
            ["--parallel.moments", "bf16", "--parallel.offload", "all", "--parallel.numerics", "pure-bf16"],
            "the moments are already BF16",
        ),
        (
            ["--parallel.moments", "bf16", "--parallel.offload", "all", "--optimizer.betas", "0.9,0.999"],
            "--parallel.moments: a step changes second moments by less than BF16 resolves where beta2 is 0.999",
        ),
        (
            ["--parallel.forward_prefetch", "on"],
            "--parallel.forward_prefetch: no effect with FSDP2; use --parallel.prefetch 1",
        ),
        (
            ["--model.activations", "host", "--model.activation_checkpointing", "none"],
            "--model.activations: no effect without activation checkpointing",
        ),
        (
            ["--parallel.prefetch", "1", "--parallel.pp", "2", "--parallel.pp_schedule", "interleaved"],
            "--parallel.prefetch: the interleaved schedule does not use units in order",
        ),
        (
            ["--parallel.reshard_after_forward", "1"],
            "--parallel.reshard_after_forward: one rank would keep all weights",
        ),
    ],
)
def test_a_bad_flag_is_named(flags, words):
    assert words in refusal(command.parse, [*GIVEN, *flags])


@pytest.mark.parametrize(("words", "value"), [([], "true"), (["off"], "false"), (["Yes"], "true"), (["auto"], "auto")])
def test_a_choice_of_more_than_on_and_off_is_a_switch_too(words, value):
    assert config.resolve(config.read_flags([*GIVEN, "--model.fused", *words])).model.fused == value


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("data.learn", "user", "data.learn was renamed; use data.train_on"),
        (
            "parallel.fsdp",
            "fsdp2",
            "parallel.fsdp was renamed; use parallel.strategy (fsdp2, fsdp1, zero3, zero2, zero1, ddp, hsdp, 3d, auto)",
        ),
        ("parallel.loss", "parts", "parallel.loss was renamed; use model.loss (full, chunked)"),
        ("model.loss", "parts", "model.loss 'parts' was renamed; use chunked"),
        ("training.on_spike", "skip", "training.on_spike was renamed; use training.on_loss_spike (warn, skip, stop)"),
        ("training.spike", "4", "training.spike was renamed; use training.loss_spike_factor"),
        ("checkpoint.place", "node", "checkpoint.place was renamed; use checkpoint.storage (shared, local)"),
        ("checkpoint.storage", "node", "checkpoint.storage 'node' was renamed; use local"),
        ("parallel.offload", "states", "parallel.offload 'states' was renamed; use optimizer"),
        ("parallel.offload", "full", "parallel.offload 'full' was renamed; use all"),
    ],
)
def test_what_had_another_name_is_refused_with_the_name_of_now(key, value, words, tmp_path):
    assert refusal(command.parse, [*GIVEN, f"--{key}", value]) == f"--{key}: {words}"
    section, _, name = key.partition(".")
    (tmp_path / "c.toml").write_text(f'[{section}]\n{name} = "{value}"\n')
    assert refusal(config.read_toml, tmp_path / "c.toml") == f"{tmp_path / 'c.toml'}:2: {words}"


def _as_before(text):
    """A file of all settings, under the names of earlier versions."""
    for now, before in {
        "train_on = [": "learn = [",
        'strategy = "fsdp2"': 'fsdp = "fsdp2"',
        'fsdp_unit = "sublayer"\nfsdp_embedding = true': 'wrap = ["LlamaAttention", "LlamaMLP", "Embedding"]\nloss = "parts"',
        'loss = "chunked"\n': "",
        'offload = "optimizer"': 'offload = "states"',
        'storage = "local"': 'place = "node"',
    }.items():
        assert text.count(now) == 1, now
        text = text.replace(now, before)
    return text


def test_a_file_that_the_program_wrote_before_is_read_with_the_names_of_now(tmp_path):
    flags = [
        "--parallel.fsdp_unit=sublayer",
        "--model.loss=chunked",
        "--parallel.offload=optimizer",
        "--checkpoint.storage=local",
    ]
    resolved = command.parse([*GIVEN, *flags]).config
    (tmp_path / "c.toml").write_text(text := _as_before(config.to_toml(resolved)))
    assert config.resolve(config.read_toml(tmp_path / "c.toml")) == resolved
    (tmp_path / "own.toml").write_text(text.partition("[tracking]")[0])  # not all sections: a user's
    assert "was renamed" in refusal(config.read_toml, tmp_path / "own.toml")


def test_a_plan_of_before_is_read_with_the_names_of_now(tmp_path):
    before = [
        '--parallel.wrap=["LlamaDecoderLayer"]',
        "--parallel.loss=parts",
        "--checkpoint.place=node",
        "--parallel.wrap=x",
    ]
    now = [
        "--parallel.fsdp_unit=layer",
        "--parallel.fsdp_embedding=false",
        "--model.loss=chunked",
        "--checkpoint.storage=local",
        "--parallel.wrap=x",  # the trainer refuses it
    ]
    run, trainer = RunDir(tmp_path), ("-m", "llama405b.train", "--resume", "auto", "--preset", "demo")
    for program, expected in (
        ((*trainer, *before), (*trainer, *now)),
        (("-m", "mine", *before), ("-m", "mine", *before)),
    ):
        write_json(run.plan, dataclasses.replace(NO_PLAN, run="r", program=program))
        assert read_plan(run).program == expected
    assert command.parse([*GIVEN, *now[:-1]]).config.model.loss == "chunked"


@pytest.mark.parametrize(
    ("words", "unit", "embedding"),
    [
        ("LlamaDecoderLayer,Embedding", "layer", True),
        ('["LlamaDecoderLayer"]', "layer", False),
        ("LlamaMLP,Embedding,LlamaAttention", "sublayer", True),
    ],
)
def test_units_may_be_typed_as_their_classes(words, unit, embedding, tmp_path):
    parallel = command.parse([*GIVEN, "--parallel.wrap", words]).config.parallel
    assert (parallel.fsdp_unit, parallel.fsdp_embedding) == (unit, embedding)
    classes = words.split(",") if words[0] != "[" else json.loads(words)
    (tmp_path / "c.toml").write_text(f"[parallel]\nwrap = {json.dumps(classes)}\n")
    assert command.parse([*GIVEN, "--config", str(tmp_path / "c.toml")]).config.parallel == parallel


@pytest.mark.parametrize(
    "words", ["LlamaMLP", "LlamaDecoderLayer,LlamaMLP", "LlamaRMSNorm", "Embedding", "[]", "[1, {}]"]
)
def test_classes_that_are_no_units_are_refused(words):
    text = refusal(command.parse, [*GIVEN, "--parallel.wrap", words])
    assert text.startswith("--parallel.wrap: parallel.wrap is ")
    assert "; use LlamaDecoderLayer or LlamaAttention,LlamaMLP, with Embedding or without, or set parallel.fsdp" in text


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7, 128])
def test_the_demo_fits_any_number_of_ranks(world):
    demo = command.parse(["--preset", "demo"]).config
    axes = Axes(dp_shard=world)
    assert config.check_ranks(demo, axes).grad_accum_steps == 1
    assert config.with_global_batch(demo, axes).training.global_batch_size == 4 * world
    fixed = command.parse([*GIVEN, "--training.global_batch_size", "8"]).config
    assert config.with_global_batch(fixed, axes) == fixed


def test_fsdp1_with_offload_does_not_accumulate():
    flags = [*GIVEN, "--parallel.strategy", "fsdp1", "--parallel.offload", "all", "--training.global_batch_size", "64"]
    chosen = command.parse(flags).config
    assert config.check_ranks(chosen, Axes(dp_shard=64)).grad_accum_steps == 1
    refused = refusal(config.check_ranks, chosen, Axes(dp_shard=32))
    assert "fsdp1 with offload cannot accumulate 2 micro-batches" in refused


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit):
        command.parse(["--help"])
    text = capsys.readouterr().out
    for key, _, _, _ in schema.setting_fields():
        assert f"--{key} " in text


def test_sources_are_paths_with_weights(tmp_path):
    tables = "".join(
        f'[[data.sources]]\npath = "{path}"\nweight = {weight}\n' for path, weight in (("a", 2), ("b/*", 0.5))
    )
    (tmp_path / "c.toml").write_text("[model]\npath = 'm'\n" + tables)
    data = config.resolve(config.read_toml(tmp_path / "c.toml")).data
    assert (data.paths, data.weights) == (("a", "b/*"), (2.0, 0.5))
    assert [part.paths for part in data.sources] == [("a",), ("b/*",)]
    typed = ["--model.path", "m", "--data.paths", "a,b/*", "--data.weights", "2,0.5"]
    assert config.resolve(config.read_flags(typed)).data == data


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data.weights", "1,2"], "--data.weights: 2 weights for 1 path; give one for each"),
        (["--data.weights", "0"], "--data.weights: each weight must be above 0; leave out the paths"),
        (
            ["--training.loss_spike_factor", "1"],
            "--training.loss_spike_factor: training.loss_spike_factor is 1; use more than 1",
        ),
    ],
)
def test_what_cannot_be_mixed_or_judged_is_refused(flags, words):
    assert words in refusal(config.resolve, config.read_flags([*GIVEN, *flags]))


@pytest.mark.parametrize(
    ("name", "value"),
    [("sharding_strategy", "NO_SHARD"), ("backward_prefetch", "none"), ("limit_all_gathers", "false")],
)
def test_what_only_fsdp1_takes_is_not_ignored(name, value):
    flag = f"--parallel.{name}"
    said = refusal(command.parse, [*GIVEN, flag, value])
    assert said == f"{flag}: no effect with FSDP2; leave it out, or use fsdp1"
    assert command.parse([*GIVEN, flag, value, "--parallel.strategy", "fsdp1"])


def test_fields_are_named_in_a_table_or_in_a_flag(tmp_path):
    (tmp_path / "my.toml").write_text('[data]\nfields = {prompt = "instruction", completion = "output"}\n')
    of_file = config.read_toml(tmp_path / "my.toml")["data.fields"][0]
    assert of_file == config.read_flags(["--data.fields", "prompt=instruction,completion=output"])["data.fields"][0]
    for bad in (["prompt=a"], ["text"], ["text="], ["txt=a"], ["text=a", "text=b"]):
        settings = {"model.path": ("m", ""), "data.paths": (("d",), ""), "data.fields": (tuple(bad), "--data.fields")}
        with pytest.raises(
            UserError,
            match=r"--data\.fields: the fields do not make up a document; write text=FIELD, or prompt=FIELD,c",
        ):
            config.resolve(settings)


def test_of_several_files_the_later_one_wins_and_says_what_it_replaced(tmp_path, capsys):
    (tmp_path / "a.toml").write_text("[optimizer]\nlr = 1e-3\nwarmup = 3\n")
    (tmp_path / "b.toml").write_text("[optimizer]\nwarmup = 3\nlr = 2e-3\n")
    files = [tmp_path / "a.toml", tmp_path / "b.toml"]
    words = ["--preset", "demo", *(word for file in files for word in ("--config", str(file)))]
    assert command.parse(words).config.optimizer.lr == 2e-3
    line = f"{files[1]}:3: optimizer.lr is 0.002; it was 0.001 in {files[0]}:2"
    assert config.describe_overrides(files) == [line]
    asked = request.parse_launch([*words, "--run", "r"], 0.0)
    assert (asked.config.optimizer.lr, asked.overridden) == (2e-3, (line,))


def printed_schema():
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit) as left:
        command.parse(["--schema"])
    assert left.value.code == 0
    return json.loads(out.getvalue())


def test_the_schema_knows_every_setting_and_takes_what_is_shipped():
    found = printed_schema()
    jsonschema.Draft202012Validator.check_schema(found)
    known = {f"{section}.{key}" for section, of in found["properties"].items() for key in of["properties"]}
    assert known == {*schema.SETTING_TYPES, "data.sources"}
    files = [*config.PRESET_DIR.glob("*.toml"), *(ROOT / "examples").glob("*.toml")]
    assert len(files) > 10
    for file in files:
        jsonschema.validate(tomllib.loads(file.read_text()), found)


@pytest.mark.parametrize(
    "text",
    [
        "[optimiser]\nlr = 1",
        "[optimizer]\nrate = 1",
        "[optimizer]\nlr = 'x'",
        "[model]\nload = 'all'",
        "[data]\nsources = [{path = 'a'}]",
    ],
)
def test_the_schema_refuses_what_the_trainer_does(text):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tomllib.loads(text), printed_schema())


LENGTHS = "training.epochs", "training.max_steps"
OF_EPOCHS = "{}: training.epochs is {}, so training.max_steps ({} in {}) is ignored".format
OF_STEPS = "{}: training.max_steps is 9, so training.epochs (2.0 in 0.toml:2) is ignored".format


@pytest.mark.parametrize(
    ("preset", "files", "flags", "length", "said"),
    [
        ("demo", ["epochs = 0.02"], {}, (0.02, 0), [OF_EPOCHS("0.toml:2", 0.02, 200, "preset demo")]),
        ("demo", [], {"epochs": "3"}, (3, 0), [OF_EPOCHS("--training.epochs", 3.0, 200, "preset demo")]),
        ("demo", ["epochs = 2"], {"max_steps": "9"}, (2, 9), [
            OF_EPOCHS("0.toml:2", 2.0, 200, "preset demo"),
            OF_STEPS("--training.max_steps")]),
        ("demo", ["max_steps = 9", "epochs = 2"], {}, (2, 0), [OF_EPOCHS("1.toml:2", 2.0, 9, "0.toml:2")]),
        ("demo", ["epochs = 2\nmax_steps = 9"], {}, (2, 9), [OF_STEPS("0.toml:3")]),
        ("demo", ["max_steps = 0\nepochs = 2"], {}, (2, 0), [OF_EPOCHS("0.toml:3", 2.0, 200, "preset demo")]),
        ("demo", [], {}, (1, 200), []),
        ("", ["epochs = 2"], {}, (2, 0), []),
    ],
)  # fmt: skip
def test_of_epochs_and_steps_the_later_source_wins_and_the_other_is_named(
    tmp_path, monkeypatch, preset, files, flags, length, said
):
    monkeypatch.chdir(tmp_path)
    for number, text in enumerate(files):
        (tmp_path / f"{number}.toml").write_text(f"[training]\n{text}\n")
    settings = [f"--training.{name}={value}" for name, value in flags.items()]
    paths = [Path(f"{number}.toml") for number in range(len(files))]
    sources = [config.read_preset(preset), *map(config.read_toml, paths), config.read_flags(settings)]
    found = config.merge_sources(*sources)
    assert (found.get(LENGTHS[0], (1, ""))[0], found.get(LENGTHS[1], (0, ""))[0]) == length
    assert config.describe_unused_length(*sources) == said
    on_hosts = ["--preset", preset] * bool(preset) + config.to_flags(config.merge_sources(*sources[1:]))
    flags_there, _ = config.split_flags(on_hosts)
    there = config.merge_sources(config.read_preset(preset), config.read_flags(flags_there))
    assert [there.get(key) and there[key][0] for key in LENGTHS] == [
        found.get(key) and found[key][0] for key in LENGTHS
    ]


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        (["Hello, world"], ["Hello, world"]),
        (["Hello, world", "def f(a, b):"], ["Hello, world", "def f(a, b):"]),
        (["one, two\nthree\n\n"], ["one, two", "three"]),
        (["[INST] Hi, you [/INST]", "[1]", "5"], ["[INST] Hi, you [/INST]", "[1]", "5"]),
        (['["a, b", "two\\nlines"]', "c"], ["a, b", "two\nlines", "c"]),
    ],
)
def test_prompts_are_given_one_per_flag_or_line(values, texts):
    flags = ["--preset", "demo", *(word for value in values for word in ("--evaluation.prompts", value))]
    assert command.parse(flags).config.evaluation.prompts == tuple(texts)
    again = config.to_flags(config.read_flags(flags[2:]))  # as they are handed on to hosts
    assert command.parse(["--preset", "demo", *again]).config.evaluation.prompts == tuple(texts)


def test_settings_are_written_as_toml_reads_them(tmp_path):
    texts = ["a \N{GRINNING FACE}", 'del \x7f, tab \t, quote " and \\', "é\n"]
    flags = ["--preset", "demo", "--evaluation.prompts", json.dumps(texts)]
    resolved = command.parse(flags).config
    (tmp_path / "c.toml").write_text(config.to_toml(resolved))
    assert config.resolve(config.read_toml(tmp_path / "c.toml")) == resolved
    assert resolved.evaluation.prompts == tuple(texts)


OF_OTHERS = {
    "--fsdp": ["full"], "--early_stopping_patience": ["3"], "--val_set_size": ["0.1"], "--sample_packing": [], "--template": ["x"],
    "--lora_target": ["q_proj"], "--finetuning_type": ["lora"], "--train_on_inputs": [], "--neftune_noise_alpha": ["5"],
    "--use_liger_kernel": [], "--generate_samples": [], "--no_fsdp": [], "--xyzzy": ["1"],
}  # fmt: skip


def test_all_unknown_flags_of_a_line_are_answered_at_once():
    flags = [word for flag, values in OF_OTHERS.items() for word in (flag, *values)]
    with pytest.raises(UserError) as refused:
        request.parse_launch(["hosts", "--preset", "demo", *flags, "--optimizer.lr", "1"], 0.0)
    first, *lines = str(refused.value).split("\n  ")
    assert first == "13 unknown flags"
    assert [line.partition(":")[0] for line in lines] == [
        flag.partition("=")[0] for flag in flags if flag.startswith("--")
    ]
    unanswered = [line for line in lines if "settings are written like" in line]
    assert unanswered == ["--xyzzy: unknown option; settings are written like --optimizer.lr 1e-5"]
    with pytest.raises(UserError, match=r"^--xyzzy: unknown option; settings are written like --optimizer\.lr 1e-5$"):
        request.parse_launch(["hosts", "--xyzzy", "1"], 0.0)


@pytest.mark.parametrize(("value", "use"), [("ThreeD", "3d"), ("Zero1", "zero1"), ("Zero3", "zero3"), ("DDP", "ddp")])
def test_strategies_as_others_write_them(value, use):
    assert refusal(command.parse, ["--preset", "demo", "--parallel.strategy", value]).endswith(
        f"is {value!r}; use {use}"
    )
