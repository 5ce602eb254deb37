"""Configs: precedence, origin, and every finding at once."""

from __future__ import annotations

import json

import pytest

from meshwright.config.load import json_schema, load_config
from meshwright.config.schema import Config
from meshwright.errors import ConfigError, Finding, LayoutError


def write(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_flag_beats_file_beats_recipe_beats_default(tmp_path):
    path = write(tmp_path, "model:\n  recipe: debug\n  layers: 3\ntrain:\n  lr: 3e-4\n")
    resolved = load_config(path, ["--train.lr=1e-3", "--data.seq_len=64"])
    assert resolved.config.train.lr == 1e-3
    assert resolved.config.model.layers == 3
    places = {key: place for key, _, place in resolved.table()}
    assert places["train.lr"] == "--train.lr"
    assert places["model.layers"] == f"{path}:3"
    assert places["model.width"] == "recipe debug"
    assert places["train.batch"] == "default"
    assert set(places) >= {"precision", "data.train.0.path"}


def test_numbers_without_a_dot_are_numbers(tmp_path):
    config = load_config(write(tmp_path, "train: {lr: 3e-4, tokens: 1e6}\nmodel: {rope_theta: 500000}\n")).config
    assert config.train.lr == 3e-4 and config.train.tokens == 1_000_000 and config.model.rope_theta == 500000.0


def test_all_findings_at_once_with_line_and_suggestion(tmp_path):
    path = write(tmp_path, "train:\n  lrr: 0.1\n  batch: 0\nmodle:\n  layers: 2\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["--data.seq_lenn=3", "--steps=4", "--dat.seq_len=3"])
    text = str(caught.value)
    assert f"{path}:2: train.lrr: unknown key. Did you mean 'lr'?" in text
    assert f"{path}:3: train.batch" in text and "greater than or equal to 1, not 0" in text
    assert f"{path}:4: modle: unknown key. Did you mean 'model'?" in text
    assert "--data.seq_lenn: unknown key. Did you mean 'seq_len'?" in text
    assert "--steps: unknown key. Did you mean 'train.steps'?" in text
    assert "--dat.seq_len: dat: unknown key. Did you mean 'data'?" in text
    assert len(caught.value.findings) == 6


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("train: {lr: 1}\ntrain: {lr: 2}\n", "stands twice (first on line 1)"),
        ("- a\n- b\n", "must hold `key: value` lines"),
        ("train: [1\n", "is not YAML"),
        ("train:\n\tlr: 1\n", "is not YAML"),
        ("train: {schedule: {warmup: 30}, steps: 20}\n", "30 steps are more than the 20 steps"),
        ("data: {train: [{path: a, weight: 1}, {path: b}]}\n", "data.train.1.weight: is missing"),
        ("objective: {kind: masked_lm}\n", "a decoder sees only the past"),
        ("precision: bf16\nloss_scale: {initial: 8}\n", "has no effect with precision bf16"),
        ("precision: int8\n", "precision"),
        ("train: {lr_scaling: linear}\n", "is needed by lr_scaling linear"),
        ("train: {batch: 4, micro_batch: 8}\n", "8 rows are more than train.batch 4"),
        ("model: {recipe: lama}\n", "model.recipe"),
    ],
)
def test_refusals_name_the_place(tmp_path, text, needle):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert needle in str(caught.value) and str(path) in str(caught.value)


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "gbk.yaml").write_bytes("run: {dir: 训练}\n".encode("gbk"))
    with pytest.raises(ConfigError, match="is not UTF-8 at byte 13"):
        load_config(tmp_path / "gbk.yaml")
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbftrain: {batch: 7}\n")
    assert load_config(tmp_path / "bom.yaml").config.train.batch == 7


ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("train:\n  lr: 2001-02-30\n", r"c\.yaml:2: is no value of YAML: day is out of range"),
        (f"train: {{steps: {'9' * 5000}}}\n", "c.yaml:1: is no value of YAML: .*5000 digits"),
        ("run: {dir: a\0b}\n", "c.yaml: is not YAML: unacceptable character"),
        ("run: " + "[" * 20000, "c.yaml: is nested too deeply"),
        ("run: &a [*a]\n", "more than 10000 keys or 20 levels"),
        ("run: &a {dir: *a}\n", "more than 10000 keys or 20 levels"),
        (ALIASES, "more than 10000 keys or 20 levels"),
        ("train: {steps: !!bool x}\n", "does not fit its tag"),
        ("train: {steps: !!timestamp x}\n", "does not fit its tag"),
    ],
)
def test_what_only_looks_like_yaml_is_refused(tmp_path, text, says):
    # red before, each by an error of Python, or without an end where aliases multiply in lists
    with pytest.raises(ConfigError, match=says):
        load_config(write(tmp_path, text))


@pytest.mark.parametrize("text", ["2001-02-30", "9" * 5000, "[" * 20000, "!!int ''", "!!bool x", "a\1b"])
def test_a_flag_that_cannot_be_read_is_named(tmp_path, text):
    with pytest.raises(ConfigError, match=r"--train\.steps: value .* cannot be read"):
        load_config(write(tmp_path, ""), [f"--train.steps={text}"])


def test_overrides_reach_lists_and_refuse_what_is_not_there(tmp_path):
    path = write(tmp_path, "data: {train: [{path: a.txt}]}\n")
    assert load_config(path, ["--data.train.0.text_key=body"]).config.data.train[0].text_key == "body"
    with pytest.raises(ConfigError, match="has 1 entry, numbered from 0; '2' is none of them"):
        load_config(path, ["--data.train.2.path=b.txt"])
    with pytest.raises(ConfigError, match="given twice, as '1' and '2'"):
        load_config(path, ["--train.batch=1", "--train.batch=2"])
    with pytest.raises(ConfigError, match="not of the form"):
        load_config(path, ["train.batch=1"])


def test_overrides_begin_a_list_and_add_to_it(tmp_path):
    path = write(tmp_path, "data: {train: [{path: a.txt}]}\n")
    flags = ["--data.valid.0.path=b.txt", "--data.valid.0.text_key=body", "--data.valid.1.path=c.txt", "--data.train.1.path=d"]
    data = load_config(path, flags).config.data
    assert [(source.path, source.text_key) for source in data.valid] == [("b.txt", "body"), ("c.txt", "text")]
    assert [source.path for source in data.train] == ["a.txt", "d"]
    with pytest.raises(ConfigError, match=r"data\.train\.1\.path: field required"):
        load_config(path, ["--data.train.1.text_key=body"])
    bare = write(tmp_path, "train: {batch: 2}\n")
    assert load_config(bare, ["--data.train.0.path=e"]).config.data.train[0].path == "e"
    assert load_config(bare, ["--run.modules.0=mine.py"]).config.run.modules == ["mine.py"]
    with pytest.raises(ConfigError, match=r"data\.valid has 0 entries, numbered from 0; '1' is none of them"):
        load_config(bare, ["--data.valid.1.path=f"])


def test_schema_names_every_section_and_is_json():
    schema = json.loads(json.dumps(json_schema()))
    assert set(schema["properties"]) == set(Config.model_fields)
    assert schema["additionalProperties"] is False


def test_a_written_config_reads_back_the_same(tmp_path):
    from meshwright.runtime.folder import RunFolder

    path = write(tmp_path, "model: {recipe: debug}\nlog: {sample: '你好: #x'}\ntrain: {optimizer: {no_decay: []}}\n")
    resolved = load_config(path, ["--train.steps=5"])
    folder = RunFolder(tmp_path / "run")
    folder.create(resume=False)
    folder.write_config(resolved)
    again = folder.read_config()
    assert again.config == resolved.config
    text = folder.config.read_text(encoding="utf-8")
    assert "steps: 5  # --train.steps" in text and f"# {path}:2" in text and "# recipe debug" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train:\nmodel: {layers: 2}\n", ":1: train: is no section. Write `key: value` lines"),
        ("model: 3\n", ":1: model: is no section"),
        ("data:\n  train: {path: a.txt}\n", ":2: data.train: is no list. Put it in [ ]"),
        ("model: {options: [1]}\n", ":1: model.options: is no mapping"),
    ],
)
def test_a_value_of_another_shape_is_told_in_words_of_yaml(text, words, tmp_path):
    # Red with pydantic's own words, which name classes of ours.
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, text))
    assert words in str(caught.value) and "Config" not in str(caught.value)


def test_what_checks_of_keys_find_is_told_with_its_place(tmp_path):
    # Red when a finding keeps its bare key, when a file that is called like a section gets a place of the config, and when
    # the fix or the type is lost.
    path = write(tmp_path, "model:\n  recipe: debug\n  width: 520\ntrain: {lr: 1e-3}\n")
    resolved = load_config(path, ["--data.seq_len=64"])
    found = [
        Finding("model.width", "is 520", "Change it"),
        Finding("model.heads", "are 4"),
        Finding("model.head_dim", "is odd"),
        Finding("data.seq_len", "is 64"),
        Finding("evaluate.every", "is 0"),
        Finding("--plan", "is bad"),
        Finding("runs/x", "is full"),
        Finding("train.jsonl, line 5", "is bad"),
        Finding("model.csv", "is empty"),
    ]
    with pytest.raises(LayoutError) as caught, resolved.placing():
        raise LayoutError(findings=found)
    assert str(caught.value).splitlines() == [
        f"{path}:3: model.width: is 520. Change it",
        "recipe debug: model.heads: are 4",
        f"{path}:1: model.head_dim: is odd",
        "--data.seq_len: is 64",
        "evaluate.every: is 0",
        "--plan: is bad",
        "runs/x: is full",
        "train.jsonl, line 5: is bad",
        "model.csv: is empty",
    ]
    with pytest.raises(LayoutError, match=r"^only words$"), resolved.placing():
        raise LayoutError("only words")
