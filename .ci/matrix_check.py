"""Loads one folder of `matrix_save.py` the way a stranger would and compares what it computes.

    python -I matrix_check.py FOLDER

Runs on the oldest transformers as well as the newest, in a process where this project cannot be
imported, with nothing but the folder: configuration, weights, tokenizer and the two files of code.
"""

import importlib.util
import json
import sys
import tempfile

import torch
import transformers
from safetensors import safe_open

LINES = [
    "the cat sat on the mat",
    "Ein Hund!",
    "</s> a literal <pad>\tand  spaces ",
    "naïve 😀",
    "",
]
TOLERANCE = 1e-5


def observe_model(head, base, inputs):
    """Hidden states, logits, tokens of every search, and how many parameters are not shared.

    The logits of generating from a static cache are looked at, too: where a version put its keys
    and values into a wrong place, the tokens of a small model were right by luck.
    """
    prompt = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    with torch.no_grad():
        seen = {
            "parameters": torch.tensor(len(list(head.parameters()))),
            "hidden": base(**inputs)[0],
            "logits": head(**inputs).logits,
        }
        if head.can_generate():
            for name, num_beams in (("greedy", 1), ("beam_4", 4)):
                seen[name] = head.generate(
                    **prompt, num_beams=num_beams, do_sample=False, max_new_tokens=16
                )
            steps = head.generate(
                **prompt,
                cache_implementation="static",
                do_sample=False,
                max_new_tokens=16,
                return_dict_in_generate=True,
                output_logits=True,
            )
            seen["static_cache"] = steps.sequences
            seen["static_cache_logits"] = torch.stack(steps.logits)
    return {name: value.contiguous() for name, value in seen.items()}


def observe_tokenizer(tokenizer):
    """Ids of `LINES`, the text they decode to, and the settings people rely on."""
    rows = tokenizer(LINES)["input_ids"]
    return {
        "rows": rows,
        "text": tokenizer.batch_decode(rows, skip_special_tokens=True),
        "padded": tokenizer(LINES, padding=True)["attention_mask"],
        "special": tokenizer.special_tokens_map,
        "vocabulary": len(tokenizer),
        "padding_side": tokenizer.padding_side,
        "names": tokenizer.model_input_names,
    }


def outputs(model, tokenizer, sources):
    """Text in, text out: four lines, as a model card shows them."""
    batch = tokenizer(sources, return_tensors="pt", padding=True)
    with torch.no_grad():
        return tokenizer.batch_decode(model.generate(**batch), skip_special_tokens=True)


def compare(seen, expected, where):
    """Floats within `TOLERANCE`, tokens and counts exactly."""
    for name, value in expected.items():
        same = seen[name].shape == value.shape
        if same and value.is_floating_point():
            same = bool((seen[name] - value).abs().max() <= TOLERANCE)
        elif same:
            same = torch.equal(seen[name], value)
        if not same:
            raise AssertionError(f"{where}: {name} is {seen[name]}, expected {value}")


def load(auto_class, folder, surplus_allowed=False):
    """One model through its Auto class; no key may be missing, mismatched or (a head) surplus."""
    model, info = auto_class.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True
    )
    for problem, keys in info.items():
        if keys and not (surplus_allowed and problem == "unexpected_keys"):
            raise AssertionError(f"{auto_class.__name__}: {problem}: {keys}")
    if not type(model).__module__.startswith("transformers_modules."):
        raise AssertionError(f"{auto_class.__name__} gave {type(model)}, not the travelling class")
    return model.eval()


def main(folder):
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if importlib.util.find_spec("modeling_tinytfm"):
        raise AssertionError("the project can be imported: this would not test the folder's code")
    with safe_open(f"{folder}/expected.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata()
    inputs = {name[7:]: value for name, value in tensors.items() if name.startswith("inputs.")}
    expected = {name: value for name, value in tensors.items() if not name.startswith("inputs.")}
    auto_class = getattr(transformers, metadata["auto_class"])

    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    if type(config).__name__ != "TinyTFMConfig":
        raise AssertionError(f"AutoConfig gave {type(config)}")
    head = load(auto_class, folder)
    base = load(transformers.AutoModel, folder, surplus_allowed=True)
    compare(observe_model(head, base, inputs), expected, folder)

    with tempfile.TemporaryDirectory() as copy:
        head.save_pretrained(copy)
        compare(observe_model(load(auto_class, copy), base, inputs), expected, "saved again")

    if "tokenizer" in metadata:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        seen = observe_tokenizer(tokenizer)
        for name, value in json.loads(metadata["tokenizer"]).items():
            if seen[name] != value:
                raise AssertionError(f"tokenizer: {name} is {seen[name]}, expected {value}")
    if "texts" in metadata:
        sources, texts = json.loads(metadata["texts"])
        if (seen := outputs(head, tokenizer, sources)) != texts:
            raise AssertionError(f"{sources} gave {seen}, expected {texts}")
    sys.stdout.write(f"{folder}: the same {', '.join(expected)}\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except Exception as error:
        error.add_note(f"transformers {transformers.__version__}, {sys.argv[1]}")
        raise
