"""How golden JSON is written: readable, and one line per list of numbers."""

import json
import re


def write_json(path, value):
    text = json.dumps(value, indent=1, ensure_ascii=False)
    text = re.sub(r"\[\s+([-+\d.e,\snul]+?)\s+\]", lambda match: "[" + re.sub(r"\s+", " ", match[1]) + "]", text)
    assert json.loads(text) == value
    path.write_text(text + "\n", encoding="utf-8")
