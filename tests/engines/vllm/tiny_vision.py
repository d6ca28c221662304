"""A tiny random model that sees, as a folder of the kind that vLLM reads: `python tiny_vision.py TOKENIZER FOLDER`.

A LLaVA of two small layers on either side, run by vLLM's interpreter: it needs transformers. What it says is nonsense,
but what it says depends on the picture.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

IMAGE, SIDE, PATCH = "<image>", 32, 8
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PREPROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "processor_class": "LlavaProcessor",
    "crop_size": {"height": SIDE, "width": SIDE},
    "size": {"shortest_edge": SIDE},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 3,
    "rescale_factor": 1 / 255,
}
PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "image_token": IMAGE,
    "patch_size": PATCH,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}


def main(tokenizer_folder: str, folder: Path) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    tokenizer.chat_template = TEMPLATE
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = LlamaConfig(
        vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.2, **sizes
    )
    sight = CLIPVisionConfig(image_size=SIDE, patch_size=PATCH, projection_dim=64, initializer_range=0.2, **sizes)
    config = LlavaConfig(
        vision_config=sight,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        vision_feature_layer=-1,
        image_seq_length=(SIDE // PATCH) ** 2,
    )
    made = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(made, ignore_errors=True)
    LlavaForConditionalGeneration(config).to(torch.float32).save_pretrained(made)
    tokenizer.save_pretrained(made)
    (made / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    (made / "processor_config.json").write_text(json.dumps(PROCESSOR))
    made.rename(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
