"""Goldens of generation: tiny models that learned a little, 100 prompts, and transformers' answers under many settings.

A T5 in `t5`, T5Gemmas in `t5gemma` and `t5gemma2`, whose windows are shorter than most sources and answers.
`answers.json`: `sources` (ids, EOS included), and for each of `cases` its `settings`, under transformers' names, and `answers`: for
each source a list of answers, best first, up to and including EOS; `scores` beside them if beams found them. Each source was
answered alone. Sources whose answers in f32 and f64 differ are not among the 100: there rounding decides.
`processors.json`: scores, the history of tokens, and the scores after transformers' processors and warpers; null is -inf.
"""

import copy
import json
import pathlib
import shutil
import tempfile

import torch
from transformers import GenerationConfig, LogitsProcessorList, T5Config, T5ForConditionalGeneration

from . import gemma
from .files import write_json

PROMPTS = 100
EOS = 1
CONFIG = dict(
    vocab_size=48, d_model=24, d_kv=6, d_ff=32, num_heads=4, num_layers=2, num_decoder_layers=2,
    relative_attention_num_buckets=8, relative_attention_max_distance=16, feed_forward_proj="gated-gelu",
    tie_word_embeddings=False, decoder_start_token_id=0, pad_token_id=0, eos_token_id=EOS, dropout_rate=0.0,
)
CASES = [
    dict(),
    dict(repetition_penalty=1.4),
    dict(no_repeat_ngram_size=2),
    dict(no_repeat_ngram_size=1, repetition_penalty=0.8),
    dict(min_new_tokens=7),
    dict(num_beams=4),
    dict(num_beams=4, length_penalty=0.0),
    dict(num_beams=4, length_penalty=2.0),
    dict(num_beams=4, length_penalty=-1.0),
    dict(num_beams=4, early_stopping=True),
    dict(num_beams=4, early_stopping="never"),
    dict(num_beams=3, early_stopping="never", length_penalty=-0.5),
    dict(num_beams=4, no_repeat_ngram_size=2, repetition_penalty=1.3),
    dict(num_beams=2, min_new_tokens=6, length_penalty=0.6),
    dict(num_beams=5, num_return_sequences=3),
    dict(num_beams=3, eos_token_id=[EOS, 7]),
]
MAX_NEW_TOKENS = 14
# Cases in which rounding is checked.
UNSURE = [2, 5, 7, 12, 14]
OF_GEMMA = [0, 1, 5, 7, 12, 14]


def t5():
    return T5ForConditionalGeneration(T5Config(**CONFIG))


def t5gemma(generation):
    decoder = {"num_hidden_layers": 2, "layer_types": gemma.KINDS[:2]}
    return gemma.make_model(generation, {}, decoder, 5, vocab=CONFIG["vocab_size"])


# name -> (model, its token that begins answers, its first token that is a word, cases, cases in which rounding is checked)
MODELS = {
    "t5": (t5, 0, 2, range(len(CASES)), UNSURE),
    "t5gemma": (lambda: t5gemma(1), 2, 6, OF_GEMMA, OF_GEMMA),
    "t5gemma2": (lambda: t5gemma(2), 2, 6, OF_GEMMA, OF_GEMMA),
}


def trained(make, first):
    """Trains for some seconds on a task with more than one answer: a token stands for one other token, or for two."""
    torch.manual_seed(11)
    model, words = make().train(), CONFIG["vocab_size"] - first
    optimizer = torch.optim.Adam([tensor for name, tensor in model.named_parameters() if gemma.is_text(name)], lr=8e-3)
    for _ in range(260):
        sources, targets = torch.zeros(48, 8, dtype=torch.long), torch.full((48, 17), -100)
        for row in range(48):
            source = torch.randint(first, CONFIG["vocab_size"], (int(torch.randint(1, 7, ())),)).tolist()
            target = []
            for token in source:
                target += [(5 * token + 3) % words + first] + ([(3 * token + 1) % words + first] if torch.rand(()) < 0.45 else [])
            sources[row, : len(source) + 1] = torch.tensor([*source, EOS])
            targets[row, : len(target) + 1] = torch.tensor([*target, EOS])
        loss = model(input_ids=sources, attention_mask=(sources != 0).long(), labels=targets).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def answers(model, start, source, settings):
    config = GenerationConfig(
        **{"max_new_tokens": MAX_NEW_TOKENS, "eos_token_id": EOS, "pad_token_id": 0, "decoder_start_token_id": start,
           "return_dict_in_generate": True, "output_scores": True, **settings}
    )
    out = model.generate(torch.tensor([source]), generation_config=config)
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    found = []
    for row, sequence in enumerate(out.sequences):
        ids = sequence[1:].tolist()
        if "beam_indices" in out and out.beam_indices is not None:
            ids = ids[: int((out.beam_indices[row] >= 0).sum())]
        else:
            first = [i for i, token in enumerate(ids) if token in ends]
            ids = ids[: first[0] + 1] if first else ids
        found.append(ids)
    scores = getattr(out, "sequences_scores", None)
    return found, None if scores is None else scores.tolist()


def write(folder):
    gemma.exact_in_f64()
    for name in MODELS:
        (folder / name).mkdir()
        write_answers(folder / name, *MODELS[name])
    write_json(folder / "processors.json", processors(t5()))


def write_answers(folder, make, start, first, of_cases, unsure):
    torch.manual_seed(3)
    single = trained(make, first)
    double = copy.deepcopy(single).double()
    sources, cases = [], [{"settings": CASES[case], "answers": [], "scores": []} for case in of_cases]
    while len(sources) < PROMPTS:
        length = int(torch.randint(1, 7, ()))
        source = [*torch.randint(first, CONFIG["vocab_size"], (length,)).tolist(), EOS]
        found = {case: answers(single, start, source, CASES[case]) for case in of_cases}
        if any(answers(double, start, source, CASES[case])[0] != found[case][0] for case in unsure):
            continue
        sources.append(source)
        for case, (ids, scores) in zip(cases, found.values()):
            case["answers"].append(ids)
            if scores is None:
                case.pop("scores", None)
            else:
                case["scores"].append([round(score, 7) for score in scores])
    with tempfile.TemporaryDirectory() as scratch:
        single.save_pretrained(scratch)
        for name in ["config.json", "generation_config.json", "model.safetensors"]:
            shutil.copy(pathlib.Path(scratch) / name, folder / name)
    value = {"max_new_tokens": MAX_NEW_TOKENS, "sources": sources, "cases": cases}
    (folder / "answers.json").write_text(json.dumps(value, separators=(",", ":")) + "\n")


def processors(model):
    """The scores that `generate` would compute from given scores, with the processors that it builds itself."""
    torch.manual_seed(5)
    cases = []
    for settings in [
        dict(repetition_penalty=1.7), dict(no_repeat_ngram_size=2), dict(min_new_tokens=9),
        dict(repetition_penalty=0.5, no_repeat_ngram_size=3, min_new_tokens=2),
        dict(do_sample=True, temperature=0.6, top_k=0), dict(do_sample=True, top_k=5), dict(do_sample=True, top_k=0, top_p=0.7),
        dict(do_sample=True, temperature=1.8, top_k=9, top_p=0.55), dict(do_sample=True, top_k=0, top_p=1e-9),
        dict(do_sample=True, temperature=0.7, top_k=12, top_p=0.9, repetition_penalty=1.2, no_repeat_ngram_size=2),
        dict(do_sample=True, num_beams=3, top_k=1), dict(do_sample=True, num_beams=3, top_k=0, top_p=0.1),
    ]:
        for _ in range(2):
            scores = (3 * torch.randn(1, 20)).to(torch.float32)
            history = [0, *torch.randint(1, 6, (6,)).tolist()]
            config = GenerationConfig(**{"top_k": 0, "eos_token_id": EOS, **settings})
            config._eos_token_tensor = torch.tensor([EOS])
            made = model._get_logits_processor(
                generation_config=config, input_ids_seq_length=1, logits_processor=LogitsProcessorList(), device="cpu"
            )
            out = made(torch.tensor([history]), scores.clone())[0].tolist()
            out = [None if value == float("-inf") else value for value in out]
            cases.append({"settings": settings, "history": history, "scores": scores[0].tolist(), "expected": out})
    return cases
