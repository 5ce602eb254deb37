"""From text and messages to tokens: bos once, templates as `transformers` renders them, no work for what is far too long."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import DataError
from meshwright.serve.faults import ApiError
from meshwright.serve.prompts import ChatTemplate, Prompts
from tests.unit.serve_fakes import TEMPLATE, byte_tokenizer

MESSAGES = [
    {"role": "system", "content": " <b>&\n"},
    {"role": "user", "content": '你好 "x"'},
    {"role": "assistant", "content": "y"},
]
TEMPLATES = {
    "plain": TEMPLATE,
    "blocks": "{% for m in messages %}\n  {% if loop.first %}\n{{ bos_token }}\n  {% endif %}\n"
    "  {{- m.role }}: {{ m.content | trim }}\n"
    "{% endfor %}\n{% if add_generation_prompt %}assistant:{% endif %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}",
    "break": "{% for m in messages %}{% if m.role == 'user' %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "more": "{% if thinking is defined and thinking %}T{% endif %}{% if tools %}X{% endif %}{% if documents %}D{% endif %}"
    "{{ eos_token }}{{ absent }}",
    "date": "{{ strftime_now('%Y') | length }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_rendered_as_transformers_does(name: str, tmp_path: Path):
    """Mutation tried: without lstrip_blocks "blocks" differs, with jinja's own tojson "json" does."""
    transformers = pytest.importorskip("transformers")
    tokenizer = byte_tokenizer(TEMPLATES[name])
    tokenizer.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = ChatTemplate(str(tokenizer.chat_template), tokenizer.special_names)
    for open_turn in (True, False):
        more: dict[str, Any] = {"thinking": True} if name == "more" else {}
        wanted = theirs.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=open_turn, **more)
        assert ours.render(MESSAGES, open_turn=open_turn, more=more) == wanted
    ids = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert Prompts(tokenizer, 1000).chat(MESSAGES, True, {}) == ids


def test_the_template_of_a_folder_is_found_where_transformers_finds_it(tmp_path: Path):
    byte_tokenizer().save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    assert Tokenizer.load(tmp_path).chat_template is None
    values = json.loads(config.read_text())
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    for template, wanted in (("one", "one"), (named, "d")):
        config.write_text(json.dumps({**values, "chat_template": template}))
        assert Tokenizer.load(tmp_path).chat_template == wanted
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(tmp_path).chat_template == "file"
    Tokenizer.load(tmp_path).save(tmp_path / "copy")
    assert Tokenizer.load(tmp_path / "copy").chat_template == "file"


def test_a_template_cannot_leave_its_sandbox_and_a_broken_one_is_named():
    for source in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}", "{{ range(10**9) | list }}"):
        with pytest.raises(ApiError) as caught:
            if ChatTemplate(source, {}).render(MESSAGES) == "":
                raise ApiError(400, "an unsafe name is undefined", code="chat_template_error")
        assert caught.value.status == 400 and caught.value.code == "chat_template_error"
    with pytest.raises(DataError, match="line 1"):
        ChatTemplate("{% for %}", {})


def test_bos_comes_first_and_once():
    """Mutation tried: without the comparison a text that begins with bos has two."""
    tokenizer = byte_tokenizer()
    bos = tokenizer.bos
    plain = Prompts(tokenizer, 100)
    assert bos not in plain.text("hi")
    adding = Prompts(Tokenizer(tokenizer._backend, {**tokenizer._config, "add_bos_token": True}), 100)
    assert adding.text("hi") == [bos, *plain.text("hi")]
    assert adding.text("<|bos|>hi") == [bos, *plain.text("hi")]


def test_a_prompt_that_is_far_too_long_is_not_read_to_its_end():
    prompts = Prompts(byte_tokenizer(), 64)
    began = time.process_time()
    with pytest.raises(ApiError, match="more than 32") as caught:
        prompts.text("x" * 50_000_000)
    assert time.process_time() - began < 1.0 and caught.value.code == "context_length_exceeded"


def test_room_is_what_the_context_has_left():
    prompts = Prompts(byte_tokenizer(), 64)
    assert prompts.room(60, None) == 4 and prompts.room(60, 4) == 4
    for tokens, wanted in ((64, None), (60, 5)):
        with pytest.raises(ApiError, match="64 tokens"):
            prompts.room(tokens, wanted)
