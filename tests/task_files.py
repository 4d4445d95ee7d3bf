"""Tasks of lm-evaluation-harness with data of their own, which need no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CHOICES: list[dict[str, Any]] = [
    {"question": "the cat sat on the", "choices": ["mat", "moon", "cat and the mat"], "answer": 0},
    {"question": "def f(self, x):\n    return", "choices": ["x", "self.x + 1", "None"], "answer": 1},
    {"question": "a b c d e f g h i j k l m n o p q r s t u v w", "choices": ["x y z", "1 2 3", "x"], "answer": 0},
]
TEXTS = ["The cat sat on the mat, and it was a very good mat.\n", "Two lines\nof text.", "é", "short"]
PROMPTS = [
    {"prompt": "one two three", "answer": "four"},
    {"prompt": "", "answer": "nothing"},
    {"prompt": "a prompt that is much longer than what the model can see at once", "answer": "x"},
]

_CHOICE = """
task: tiny_choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: answer
doc_to_choice: "{{choices}}"
target_delimiter: " "
fewshot_split: test
metric_list:
  - metric: acc
  - metric: acc_norm
"""
_TEXT = """
task: tiny_text
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""
_ANSWER = """
task: tiny_answer
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: answer
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 6
  do_sample: false
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""


def write_tasks(folder: Path) -> Path:
    """Write the tasks tiny_choice, tiny_text and tiny_answer; skip the test if the harness is not installed."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install -e '.[eval]'")
    folder.mkdir()
    rows: dict[str, list[Any]] = {"choice": CHOICES, "text": [{"text": text} for text in TEXTS], "answer": PROMPTS}
    for (name, documents), head in zip(rows.items(), (_CHOICE, _TEXT, _ANSWER), strict=True):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        (folder / f"{name}.yaml").write_text(
            f"{head.lstrip()}dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
        )
    return folder
