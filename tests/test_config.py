"""Config files, --set and options: what is read, what is refused and how, and where each value came from."""

from __future__ import annotations

from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from contbatch_cli.config import Config
from contbatch_cli.config_files import Option, load_config, to_yaml
from contbatch_cli.config_schema import config_keys, json_schema
from contbatch_cli.errors import ExitStatus, UsageError


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "run.yaml"


def refusal(file: Path | None = None, *assignments: str, options: tuple[Option, ...] = ()) -> str:
    with pytest.raises(UsageError) as caught:
        load_config(file, assignments, options)
    assert caught.value.exit_status is ExitStatus.USAGE
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_without_anything_all_values_are_built_in() -> None:
    effective = load_config()
    assert effective.config == Config()
    assert {origin.place for origin in effective.origins.values()} == {"default"}
    assert list(effective.values) == list(config_keys())


def test_each_source_overrides_the_one_before_and_is_remembered(config_file: Path) -> None:
    config_file.write_text("sampling:\n  max_tokens: 10\n  temperature: 0.5\n  top_k: 3\n")
    options = (Option("sampling.max_tokens", "--max-tokens", 30), Option("sampling.seed", "--seed", None))
    effective = load_config(config_file, ["sampling.max_tokens=20", "sampling.temperature=0.7"], options)
    sampling = effective.config.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.seed) == (30, 0.7, 3, 0)
    places = {path: origin.place for path, origin in effective.origins.items() if effective.is_written(path)}
    assert places == {
        "sampling.max_tokens": "--max-tokens",
        "sampling.temperature": "--set",
        "sampling.top_k": f"{config_file}:4",
    }


def test_row_defaults_are_layered_by_who_wrote_them(config_file: Path) -> None:
    config_file.write_text("sampling: {max_tokens: 10, seed: 4, from_model: true}\noutput: {order: input}\n")
    effective = load_config(config_file, ["sampling.top_p=0.9"], [Option("sampling.stop", "--stop", ["a", "b"])])
    assert effective.command_line_sampling() == {"top_p": 0.9, "stop": ("a", "b")}
    assert effective.file_sampling() == {"max_tokens": 10}
    names = {path.removeprefix("sampling.") for path in config_keys() if path.startswith("sampling.")}
    assert set(effective.default_sampling()) == names - {"max_tokens", "top_p", "stop", "seed", "from_model"}


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("sampling: {temperature: 1e-5}", "sampling.temperature", 1e-5),
        ("sampling: {temperature: 1}", "sampling.temperature", 1.0),
        ("sampling: {temperature: .5}", "sampling.temperature", 0.5),
        ("sampling: {seed: 0x10}", "sampling.seed", 16),
        ("sampling: {seed: 010}", "sampling.seed", 10),
        ("cache: {prefix_caching: off}", "cache.prefix_caching", False),
        ("cache: {prefix_caching: No}", "cache.prefix_caching", False),
        ("output: {metrics: yes}", "output.metrics", True),
        ("output: {metrics: TRUE}", "output.metrics", True),
        ("model: {name: no}", "model.name", "no"),
        ("model: {name: 2024-01-31}", "model.name", "2024-01-31"),
        ("model: {revision: 0012345}", "model.revision", "0012345"),
        ("model: {revision: 12e5}", "model.revision", "12e5"),
        ("model: {revision: true}", "model.revision", "true"),
        ("model: {revision: ~}", "model.revision", None),
        ("model: {revision: 'null'}", "model.revision", "null"),
        ("cache: {memory: 2GiB}", "cache.memory", "2GiB"),
        ("cache: {memory: 0.25}", "cache.memory", 0.25),
        ("cache: {memory: 1}", "cache.memory", 1.0),
        ("cache: {num_blocks: 64}", "cache.num_blocks", 64),
        ("cache: {num_blocks: auto}", "cache.num_blocks", "auto"),
        ("model: {device: 'cuda:1'}", "model.device", "cuda:1"),
        ("sampling: {stop: END}", "sampling.stop", ("END",)),
        ("sampling: {stop: [no, 5, '#', \"\\n\"]}", "sampling.stop", ("no", "5", "#", "\n")),
        ("sampling: {stop: []}", "sampling.stop", ()),
        ('sampling: {stop: "\\ud83d\\ude00"}', "sampling.stop", ("\U0001f600",)),
    ],
)
def test_values_are_read_as_their_key_means_them(config_file: Path, text: str, path: str, value: object) -> None:
    config_file.write_text(text)
    read = load_config(config_file).values[path]
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    "text", ["", "# nothing\n", "---\n", "sampling:\n", "sampling:\n  # max_tokens: 5\nmodel: ~\n", "\ufeff{}"]
)
def test_empty_files_and_sections_say_nothing(config_file: Path, text: str) -> None:
    config_file.write_text(text, encoding="utf-8")
    assert load_config(config_file).config == Config()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sampling:\n  max_tokns: 5", ":2: sampling.max_tokns = 5: unknown key; did you mean sampling.max_tokens?"),
        ("token_budget: 5", ":1: token_budget = 5: unknown key; did you mean scheduler.token_budget?"),
        ("sampler: {seed: 5}", ":1: sampler = {...}: unknown key; did you mean sampling?"),
        ("cache: {token_budget: 5}", ":1: cache.token_budget = 5: unknown key; did you mean scheduler.token_budget?"),
        ("scheduler:\n\n  token_budget: -5", ":3: scheduler.token_budget = -5: must be a whole number of at least 1, or auto"),
        ("scheduler: {token_budget: 64.0}", ":1: scheduler.token_budget = 64.0: must be a whole number of at least 1, or auto"),
        ("sampling: {max_tokens: '5'}", ':1: sampling.max_tokens = "5": must be a whole number of at least 0'),
        ("sampling: {max_tokens: true}", ":1: sampling.max_tokens = true: must be a whole number of at least 0"),
        ("sampling: {max_tokens: 1_000}", ":1: sampling.max_tokens = 1_000: must be a whole number of at least 0"),
        ("sampling: {temperature: .nan}", ":1: sampling.temperature = .nan: must be a number from 0 to 2"),
        ("sampling: {temperature: .inf}", ":1: sampling.temperature = .inf: must be a number from 0 to 2"),
        ("sampling: {top_p: 0}", ":1: sampling.top_p = 0: must be a number above 0 and up to 1"),
        ("sampling: {presence_penalty: 3}", ":1: sampling.presence_penalty = 3: must be a number from -2 to 2"),
        (f"sampling: {{max_tokens: {10**400}}}", "must be at most 9,223,372,036,854,775,807"),
        ("model: {dtype: bf16}", "model.dtype = bf16: must be one of auto, float32, bfloat16, float16; did you mean bfloat16?"),
        ("model: {device: gpu}", "model.device = gpu: must be auto, cpu, cuda or cuda:N"),
        ("model: {name: ''}", 'model.name = "": must not be empty'),
        ("model: {name: ~}", "model.name = ~: must be a string"),
        ("cache: {memory: 2G}", 'cache.memory = 2G: must be a size with its unit, such as "512MiB" or "2GiB"'),
        ("cache: {memory: 2000000000}", 'cache.memory = 2000000000: must be a size such as "2GiB", a fraction'),
        ("cache: {prefix_caching: 0}", "cache.prefix_caching = 0: must be true or false"),
        ("cache: {num_blocks: 9, memory: 1GiB}", ":1) and cache.memory = 1GiB ("),
        ("sampling: {min_tokens: 9, max_tokens: 3}", "sampling.min_tokens = 9 ("),
        ("sampling: {stop: [a, ~]}", "sampling.stop = [a, ~]: must be a string that is not empty, or a list of such strings"),
        ("sampling: {stop: ['']}", 'sampling.stop = [""]: must not be empty'),
        ("sampling: {seed: {a: 1}}", ":1: sampling.seed = {a: 1}: must be a whole number of at least 0"),
        ("sampling: {seed: {a: [1]}}", ":1: sampling.seed: must be a single value, a list or a mapping of single values"),
        ("model: {adapters: x}", ":1: model.adapters = x: must be a mapping of names to directories or hub ids"),
        ("model: {adapters: {a: x, b: ''}}", ':1: model.adapters = {a: x, b: ""}: must not be empty'),
        ("model: {adapters: {a: x, a: y}}", ":1: model.adapters: a stands in it twice"),
        ("model: {adapters: {'': y}}", ':1: model.adapters = {"": y}: has an entry without a name'),
        ("sampling: {seed: [1]}", ":1: sampling.seed = [1]: must be a whole number of at least 0"),
        ("sampling: 5", ":1: sampling must be a mapping of keys to values"),
        ("- a", ":1: the config must be a mapping of keys to values"),
        ("just text", ":1: the config must be a mapping of keys to values"),
        ("sampling:\n  seed: 1\n  top_k: 1\n  seed: 2", ":4: seed stands in sampling twice, first on line 2"),
        ("cache: {}\ncache: {}", ":2: cache stands in the config twice, first on line 1"),
        ("sampling: {[1]: 2}", ":1: a key in sampling must be a word"),
        ("sampling:\n\tseed: 1", "line 2, column 1: not valid YAML: found character '\\t'"),
        ("sampling: {seed: 1", "not valid YAML"),
        ("a: &a [*a]\n", "unknown key"),
        (
            "model: {name: !!python/name:os.system x}",
            ":1: model.name: the tag tag:yaml.org,2002:python/name:os.system is not supported",
        ),
        ('sampling: {stop: "\\ud83d"}', ":1: sampling.stop: holds half of a surrogate pair"),
        ("model: {name: !!int x}", ":1: model.name: not a number that can be read: x"),
        ("a: 1\n---\nb: 2", "not valid YAML: but found another document"),
        ("[" * 5000, "not valid YAML"),
        ("model: {name: \x07}", "not valid YAML"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(config_file: Path, text: str, message: str) -> None:
    config_file.write_text(text)
    said = refusal(config_file)
    assert message in said
    assert said.count(str(config_file)) >= 1


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "absent.yaml") == f"config {tmp_path / 'absent.yaml'}: No such file or directory"
    assert refusal(tmp_path) == f"config {tmp_path}: Is a directory"
    (tmp_path / "latin.yaml").write_bytes(b"model: {name: caf\xe9}")
    assert refusal(tmp_path / "latin.yaml").endswith("latin.yaml: not UTF-8 at byte 17")
    with (tmp_path / "weights.yaml").open("wb") as stream:
        stream.truncate(1 << 30)
    assert refusal(tmp_path / "weights.yaml").endswith("larger than 1,048,576 bytes; is it the config?")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("sampling.max_tokens", "--set sampling.max_tokens: must be key.path=value, such as sampling.max_tokens=64"),
        ("=5", "--set =5: must be key.path=value, such as sampling.max_tokens=64"),
        ("sampling.max_tokens=x", "--set sampling.max_tokens=x: must be a whole number of at least 0"),
        ("sampling=x", "--set sampling=x: sampling is a section; its keys are max_tokens, min_tokens"),
        ("output.ordr=input", "--set output.ordr=input: unknown key; did you mean output.order?"),
        ("qqqq=1", "--set qqqq=1: unknown key; the sections are model, scheduler, cache, engine, sampling, output, cluster"),
        ("model.name=", "--set model.name=null: must be a string"),
        ("sampling.seed=*x", "not valid YAML: found undefined alias 'x'"),
    ],
)
def test_assignments_are_refused_in_one_line(assignment: str, message: str) -> None:
    assert message in refusal(None, assignment)


def test_options_are_refused_by_their_own_name() -> None:
    said = refusal(options=(Option("sampling.max_tokens", "--max-tokens", -1),))
    assert said == "--max-tokens -1: must be a whole number of at least 0"


def test_the_shown_config_is_a_config_of_the_same_values(config_file: Path, tmp_path: Path) -> None:
    assignments = [
        "sampling.stop=['#', \"\\n\", no]",
        "model.revision='1e5'",
        "model.name='a b # é'",
        "sampling.temperature=1e-7",
    ]
    effective = load_config(None, assignments)
    config_file.write_text(to_yaml(effective), encoding="utf-8")
    assert load_config(config_file).config == effective.config
    assert "# --set" in config_file.read_text(encoding="utf-8")


texts = st.text(st.characters(codec="utf-8"), max_size=8)
scalars = st.one_of(st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), texts)


@given(st.sampled_from(sorted(config_keys())), st.one_of(scalars, st.lists(scalars, max_size=3)))
def test_any_yaml_value_is_held_or_refused_in_one_line(
    tmp_path_factory: pytest.TempPathFactory, path: str, value: object
) -> None:
    section, name = path.split(".")
    file = tmp_path_factory.getbasetemp() / "drawn.yaml"
    file.write_text(yaml.safe_dump({section: {name: value}}, allow_unicode=True), encoding="utf-8")
    try:
        effective = load_config(file)
    except UsageError as error:
        assert "\n" not in str(error)
        assert path in str(error)
        return
    file.write_text(to_yaml(effective), encoding="utf-8")
    assert load_config(file).config == effective.config


@given(st.text("ab:{}[]#&*!|>'\"%@`-?, \n\t\\0.1~e\x00\ufeff", max_size=40))
def test_any_text_is_a_config_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "drawn.yaml"
    file.write_text(text, encoding="utf-8", newline="")
    try:
        load_config(file)
    except UsageError as error:
        assert "\n" not in str(error)


def test_schema_is_a_schema_with_a_description_for_every_key() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    described = {
        f"{section}.{name}"
        for section, content in schema["properties"].items()
        for name, entry in content["properties"].items()
        if entry["description"].endswith(".")
    }
    assert described == set(config_keys())


@given(
    st.sampled_from(sorted(set(config_keys()) - {"cache.memory", "sampling.min_tokens", "cache.num_blocks"})),
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 5000),
        st.floats(-3, 3, allow_nan=False).filter(lambda number: not number.is_integer()),
        st.sampled_from(["auto", "float32", "cpu", "cuda:0", "cuda:", "input", "static", "", "x"]),
        st.lists(st.sampled_from(["", "a"]), max_size=2),
    ),
)
def test_schema_and_checks_agree(path: str, value: object) -> None:
    section, name = path.split(".")
    fits = jsonschema.Draft202012Validator(json_schema()).is_valid({section: {name: value}})
    try:
        config_keys()[path].convert(value)
    except ValueError:
        assert not fits
    else:
        assert fits


def test_a_mapping_is_written_whole_or_entry_by_entry(config_file: Path) -> None:
    config_file.write_text("model:\n  adapters: {fr: adapters/fr, 7: 2024}\n")
    assert load_config(config_file).config.model.adapters == {"fr": "adapters/fr", "7": "2024"}
    effective = load_config(config_file, ["model.adapters.de=somebody/german lora", "model.adapters.fr=other"])
    assert effective.config.model.adapters == {"fr": "other", "7": "2024", "de": "somebody/german lora"}
    config_file.write_text(to_yaml(effective), encoding="utf-8")
    assert load_config(config_file).config == effective.config
    assert load_config(config_file, ["model.adapters={}"]).config.model.adapters == {}
    with pytest.raises(UsageError, match=r"--set model.adapters.a=\[1\]: must be a mapping of names"):
        load_config(None, ["model.adapters.a=[1]"])
    assert load_config().config.model.adapters == {}, "a default was changed in place"
