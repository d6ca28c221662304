"""Writes the folder of a tiny random vision model: `python tiny_vision.py TOKENIZER FOLDER`.

An Idefics3 with two small layers each for images and text. Run it with vLLM's interpreter: it needs transformers.
Idefics3 prepares images with Pillow; most other models need torchvision, which vLLM's CPU build lacks. Its answers are
nonsense, but they depend on the image.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig

IMAGE, FAKE, WHOLE, END = "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
SIDE, PATCH, SCALE = 32, 8, 2
IMAGE_TOKENS = (SIDE // PATCH) ** 2 // SCALE**2  # without the markers around them
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PREPROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor",
    "processor_class": "Idefics3Processor",
    "do_convert_rgb": True,
    "do_image_splitting": False,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": SIDE},
    "size": {"longest_edge": SIDE},
    "resample": 1,
    "rescale_factor": 1 / 255,
}


def main(tokenizer_folder: str, folder: Path) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [FAKE, WHOLE, IMAGE, END]})
    tokenizer.chat_template = TEMPLATE
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.2, **sizes
    )
    sight = Idefics3VisionConfig(image_size=SIDE, patch_size=PATCH, initializer_range=0.2, **sizes)
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    config = Idefics3Config(
        vision_config=sight.to_dict(),
        text_config=text.to_dict(),
        image_token_id=image,
        scale_factor=SCALE,
        tie_word_embeddings=False,
    )
    partial = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    Idefics3ForConditionalGeneration(config).to(torch.float32).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    (partial / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    (partial / "processor_config.json").write_text(
        json.dumps({"processor_class": "Idefics3Processor", "image_seq_len": IMAGE_TOKENS})
    )
    partial.rename(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
