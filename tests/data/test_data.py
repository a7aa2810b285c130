"""Prompt data sets: what is read, what is refused, and the same order after a restore."""

import json
import pickle

import pytest

from gspo_megatron.config import ConfigError, DataConfig
from gspo_megatron.data import load_dataset


class Characters:
    """A tokenizer whose token ids are code points."""

    chat_template = None

    def __call__(self, texts, add_special_tokens):
        assert add_special_tokens is False
        return {"input_ids": [[ord(character) for character in text] for text in texts]}


class Chat(Characters):
    chat_template = "a template"

    def apply_chat_template(self, messages, tokenize, add_generation_prompt, return_dict):
        assert tokenize and add_generation_prompt and not return_dict
        return [ord(c) for m in messages for c in f"<{m['role']}>{m['content']}"] + [ord(">")]


def write(tmp_path, *lines):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b"\n".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
    return str(path)


def text_of(prompt):
    return "".join(map(chr, prompt.token_ids))


def numbered(tmp_path, count):
    return write(tmp_path, *({"prompt": f"p{k}", "answer": k} for k in range(count)))


def test_jsonl_text_and_record(tmp_path):
    path = write(tmp_path, {"prompt": "2+2", "answer": "4", "level": 1}, b"", {"prompt": "é"})
    source = load_dataset(DataConfig(train=path, shuffle=False), Characters(), seed=1)
    first, second = source.next(2)
    assert (first.index, text_of(first), first.record) == (0, "2+2", {"answer": "4", "level": 1})
    assert (second.index, text_of(second), second.record) == (1, "é", {})


def test_chat_template_by_key_and_by_messages(tmp_path):
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    path = write(tmp_path, {"prompt": messages}, {"prompt": "T"})
    source = load_dataset(DataConfig(train=path, shuffle=False), Chat(), seed=1)
    assert [text_of(p) for p in source.next(2)] == ["<system>S<user>U>", "T"]
    source = load_dataset(DataConfig(train=path, shuffle=False, chat_template=True), Chat(), seed=1)
    assert [text_of(p) for p in source.next(2)] == ["<system>S<user>U>", "<user>T>"]
    with pytest.raises(ConfigError, match="data.chat_template: .*train.jsonl:1 needs a chat template"):
        load_dataset(DataConfig(train=path), Characters(), seed=1)


def test_a_real_tokenizer_gives_plain_lists(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "user": 3}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}{% endfor %}"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", chat_template=template)
    path = write(tmp_path, {"prompt": "a b"}, {"prompt": [{"role": "user", "content": "b"}]})
    source = load_dataset(DataConfig(train=path, shuffle=False), tokenizer, seed=1)
    assert [prompt.token_ids for prompt in source.prompts] == [(1, 2), (3, 2)]


def test_every_epoch_has_all_prompts_in_an_order_of_its_own(tmp_path):
    path = numbered(tmp_path, 50)
    source = load_dataset(DataConfig(train=path), Characters(), seed=1)
    first, second = ([p.index for p in source.next(50)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second and first != list(range(50))
    again = load_dataset(DataConfig(train=path), Characters(), seed=1)
    assert [p.index for p in again.next(50)] == first
    other = load_dataset(DataConfig(train=path), Characters(), seed=2)
    assert [p.index for p in other.next(50)] != first
    plain = load_dataset(DataConfig(train=path, shuffle=False), Characters(), seed=1)
    assert [p.index for p in plain.next(120)] == [*range(50), *range(50), *range(20)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("before", [0, 3, 9, 10, 11, 20, 27])
def test_restore_goes_on_with_the_same_prompts(tmp_path, shuffle, before):
    """Positions inside, at and across the border of epochs of 10 prompts, taken 4 at a time."""
    config = DataConfig(train=numbered(tmp_path, 10), shuffle=shuffle)
    source = load_dataset(config, Characters(), seed=5)
    source.next(before)
    state = json.loads(json.dumps(source.state()))
    expected = [source.next(4) for _ in range(7)]
    restored = load_dataset(config, Characters(), seed=5)
    restored.next(13)
    restored.restore(state)
    assert [restored.next(4) for _ in range(7)] == expected


def test_restore_refuses_other_answers_to_the_same_prompts(tmp_path):
    rows = [{"prompt": "one", "answer": "1"}, {"prompt": "two", "answer": "2"}]
    state = load_dataset(DataConfig(train=write(tmp_path, *rows)), Characters(), seed=1).state()
    load_dataset(DataConfig(train=write(tmp_path, *rows)), Characters(), seed=1).restore(state)
    path = write(tmp_path, rows[0], rows[1] | {"answer": "3"})
    changed = load_dataset(DataConfig(train=path), Characters(), seed=1)
    with pytest.raises(ConfigError, match="data.train: .*but not what comes with them .*run.allow_changed"):
        changed.restore(state)
    del state["records"]  # a checkpoint of before they were looked at
    changed.restore(state)


def test_restore_refuses_other_prompts(tmp_path):
    state = load_dataset(DataConfig(train=numbered(tmp_path, 10)), Characters(), seed=1).state()
    with pytest.raises(ConfigError, match="run.seed"):
        load_dataset(DataConfig(train=numbered(tmp_path, 10)), Characters(), seed=2).restore(state)
    with pytest.raises(ConfigError, match="data.train"):
        load_dataset(DataConfig(train=numbered(tmp_path, 11)), Characters(), seed=1).restore(state)


@pytest.mark.parametrize("line, fault", [
    (b'{"prompt": "caf\xe9"}', "train.jsonl:2: byte 15 of the line is not UTF-8"),
    (b'{"prompt": "x"', "train.jsonl:2: not JSON"),
    (b'["x"]', "train.jsonl:2: no JSON object with a `prompt`"),
    (b'{"question": "x"}', "train.jsonl:2: no JSON object with a `prompt`"),
    (b'{"prompt": 3}', "train.jsonl:2: `prompt` must be a text or a list of messages"),
    (b'{"prompt": []}', "train.jsonl:2: `prompt` must be a text or a list of messages"),
    (b'{"prompt": [{"content": "x"}]}', "train.jsonl:2: `prompt` must be a text or a list of messages"),
    (b'{"prompt": ""}', "train.jsonl:2: the prompt has 0 tokens"),
    (b'{"prompt": "123456789"}', "train.jsonl:2: the prompt has 9 tokens; raise data.max_prompt_tokens=8"),
])  # fmt: skip
def test_a_bad_line_is_named(tmp_path, line, fault):
    path = write(tmp_path, {"prompt": "x"}, line)
    with pytest.raises(ConfigError) as error:
        load_dataset(DataConfig(train=path, max_prompt_tokens=8), Characters(), seed=1)
    assert len(error.value.faults) == 1
    assert error.value.faults[0].startswith("data.train: ") and fault in error.value.faults[0]


def test_many_faults_are_cut(tmp_path):
    with pytest.raises(ConfigError) as error:
        load_dataset(DataConfig(train=write(tmp_path, *[b"{"] * 25)), Characters(), seed=1)
    assert len(error.value.faults) == 11 and "15 more" in error.value.faults[-1]


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_or_missing_file_is_refused(tmp_path, content):
    with pytest.raises(ConfigError, match="is empty"):
        load_dataset(DataConfig(train=write(tmp_path, content)), Characters(), seed=1)
    with pytest.raises(ConfigError, match="can't be read"):
        load_dataset(DataConfig(train=str(tmp_path / "missing.jsonl")), Characters(), seed=1)


def test_reasoning_gym_problems_follow_the_seed():
    config = DataConfig(train="reasoning_gym:chain_sum", options={"size": 6, "min_terms": 2, "max_terms": 2})
    source = load_dataset(config, Characters(), seed=3)
    assert len(source) == 6
    prompt = source.next(1)[0]
    assert text_of(prompt) == prompt.record["question"]
    assert set(prompt.record) == {"question", "answer", "metadata", "task", "options"}
    assert prompt.record["task"] == "chain_sum" and pickle.loads(pickle.dumps(prompt)) == prompt
    again = load_dataset(config, Characters(), seed=3)
    assert again.prompts == source.prompts and again.next(1)[0] == prompt
    assert load_dataset(config, Characters(), seed=4).prompts != source.prompts


@pytest.mark.parametrize("train, options, message", [
    ("reasoning_gym:chain_sm", {}, "no task 'chain_sm'; nearest: .*chain_sum"),
    ("reasoning_gym:chain_sum", {"min_term": 2}, "no option 'min_term'; it has .*min_terms"),
    ("reasoning_gym:chain_sum", {"min_terms": -1}, "refuses .*min_terms must be positive"),
])  # fmt: skip
def test_reasoning_gym_faults(train, options, message):
    with pytest.raises(ConfigError, match=message):
        load_dataset(DataConfig(train=train, options=options), Characters(), seed=1)
