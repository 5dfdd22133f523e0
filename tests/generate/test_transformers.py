"""Texts and chats beside transformers: greedy tokens of each family, rendered templates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.chat_template_utils import render_jinja_template

from megalite.data.chat_template import ChatTemplate
from megalite.data.tokenizer import open_tokenizer
from megalite.errors import DataError
from megalite.generate.generate import Text, generate
from megalite.generate.sampling import Sampling
from tests import ROOT
from tests.model.kit import hugging_face
from tests.model.kit.small import VARIANTS, make_stage, model_config

LENGTH = 48
TOKENIZER = open_tokenizer(ROOT / "tests" / "fixtures" / "run" / "data" / "tiny.model")
PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9]]
STOCK = ["llama", "llama3", "gpt2", "qwen2", "qwen3", "mistral"]


@pytest.mark.parametrize("variant", STOCK)
def test_greedy_tokens_are_those_of_transformers(variant) -> None:
    """In float32, prompts of several lengths in one batch (theirs padded on the left)."""
    sizes = {"max_positions": LENGTH, "num_layers": 3, "hidden_size": 32, "tie_embeddings": False}
    config = model_config(**{**VARIANTS[variant], **sizes})
    model = make_stage(config, dtype=torch.float32, seq_length=LENGTH)
    theirs = hugging_face.stock_model(config, max_positions=LENGTH)
    weights = {spec.name: param.detach() for param, spec in model.named_params()}
    hugging_face.fill(theirs, hugging_face.as_theirs(config, weights))
    theirs = theirs.float()

    texts = [Text(prompt, 30, Sampling(temperature=0)) for prompt in PROMPTS]
    for _ in generate(model, texts):
        pass
    width = max(map(len, PROMPTS))
    padded = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in PROMPTS])
    made: Any = theirs.generate(
        padded, attention_mask=seen, max_new_tokens=30, do_sample=False, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    assert [text.tokens[-30:] for text in texts] == made[:, width:].tolist()
    assert len({tuple(text.tokens[-30:]) for text in texts}) == 3


TEMPLATES = {
    "plain": "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}\n{% endfor %}"
    "{%- if add_generation_prompt -%}<assistant>{%- endif -%}",
    "loops": "{%- for m in messages -%}\n  {%- if m.role == 'system' -%}{%- continue -%}"
    "{%- endif -%}\n{{ bos_token + m.content }}{%- if loop.index > 2 -%}{%- break -%}{%- endif -%}"
    "\n{%- endfor -%}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
    "parts": "{% set ns = namespace(last='') %}{% for m in messages %}{% set ns.last = m.role %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ ns.last }}"
    "{{ 'x' if tools is defined and tools else 'no tools' }}",
}
CHAT = [
    {"role": "system", "content": " <b>terse</b> & \u4e2d "},
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two?"},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_is_rendered_as_transformers_does(name, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATES[name], "bos_token": {"content": "<s>"}})
    )
    rendered: Any = render_jinja_template(
        conversations=[CHAT],
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        bos_token="<s>",
    )
    template = ChatTemplate.of(TOKENIZER, tmp_path / "tokenizer_config.json")
    assert template.prompt(CHAT) == rendered[0][0]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{{ messages.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{{ messages[0] + 1 }}", "unsupported operand"),
    ],
)
def test_what_a_template_may_not_do_is_refused(template, reason, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(template)
    with pytest.raises(DataError, match=r"--chat-template=.*chat\.jinja: ") as caught:
        ChatTemplate.of(TOKENIZER, file).prompt(CHAT)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("chat.jinja", "{% for %}", "no template of jinja2"),
        ("tokenizer_config.json", "{", "is not JSON"),
        ("tokenizer_config.json", '{"bos_token": "<s>"}', "has no chat template"),
    ],
)
def test_a_file_without_a_template_is_refused(name, content, reason, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=reason):
        ChatTemplate.of(TOKENIZER, tmp_path / name)
