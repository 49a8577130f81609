"""Loads model folders by documented lines, and writes what they compute; runs in any generation of transformers.

`python read_exports.py CASES OUT`: CASES is a JSON object, for each name the lines that load a folder. OUT gets
NAME.safetensors with what was computed, and said.json with the rest, or with the error of a folder that does not load.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from PIL import Image
from safetensors.torch import save_file

WORDS = "Which way is the top of the photo? <answer>up</answer><|im_end|>\n{}"
QUESTION = "Which way is up?"
SIZE = (96, 68)
"""Width and height of the image: neither in whole patches, nor square."""


def inputs_of(tokenizer, image_processor):
    """What the model is given: a question, about an image where it sees."""
    content = [{"type": "text", "text": QUESTION}]
    if image_processor is not None:
        content.insert(0, {"type": "image"})
    messages = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if image_processor is None:
        return {"input_ids": tokenizer(text, return_tensors="pt")["input_ids"]}
    pixels = torch.randint(0, 256, (SIZE[1], SIZE[0], 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    seen = image_processor(images=[Image.fromarray(pixels.numpy())], return_tensors="pt")
    places = int(seen["image_grid_thw"].prod()) // image_processor.merge_size**2
    ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * places), return_tensors="pt")["input_ids"]
    inputs = {"input_ids": ids, "pixel_values": seen["pixel_values"], "image_grid_thw": seen["image_grid_thw"]}
    if int(transformers.__version__.split(".")[0]) >= 5:  # transformers 4 finds the places by itself
        inputs["mm_token_type_ids"] = (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).long()
    return inputs


@torch.no_grad()
def read(lines):
    """Tensors and words of one folder."""
    names = {}
    exec(lines, names)
    model, tokenizer = names["model"].eval(), names["tokenizer"]
    dtype = str(model.dtype)
    model = model.float()
    inputs = inputs_of(tokenizer, names.get("image_processor"))
    answer = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    tensors = {**inputs, "logits": model(**inputs).logits, "answer": answer}
    said = {
        "dtype": dtype,
        "ids": tokenizer.encode(WORDS),
        "decoded": tokenizer.decode(tokenizer.encode(WORDS), skip_special_tokens=True),
        "vocabulary": len(tokenizer),
        "ends": [tokenizer.eos_token, tokenizer.pad_token],
        "special": sorted(tokenizer.all_special_tokens),
    }
    return tensors, said


def main(cases, out):
    transformers.utils.logging.set_verbosity_error()
    said = {"transformers": transformers.__version__}
    for name, lines in json.loads(Path(cases).read_text()).items():
        try:
            tensors, said[name] = read(lines)
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, Path(out) / f"{name}.safetensors")
        except Exception as error:  # each folder is a case of its own
            said[name] = {"error": f"{type(error).__name__}: {error}"}
    (Path(out) / "said.json").write_text(json.dumps(said))


main(*sys.argv[1:])
